# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""RMS norms and gated activations, rounded where the eager code of Transformers rounds.

Differences that remain: the order of a sum, and the last bit of an exponential or a reciprocal root, in float32. After
rounding to 16 bits that is at most one unit in the last place of a norm or an activation, and rarely anything; but far
out on the negative side of gelu, where PyTorch's own formula cancels, three in a hundred values differ in float16.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvboost.kernels.triton.early import early, wait_for_kernel_before

MAX_WIDTH = 1 << 16
"""A program holds a whole row; wider rows would spill."""

ELEMENTS_PER_PROGRAM = 4096

FEW_ROWS = 132
"""Up to this many rows each gets a program of its own: that many multiprocessors has the largest GPU of its kind."""

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
    round_first: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """`x / rms(x) * (weight + weight_offset)` over the last dimension; weight `[N]`. Returns `out`, or a new tensor.

    round_first: the normalised value is rounded to the dtype before the product, as LlamaRMSNorm does; otherwise the
    product is taken in float32 and rounded once: GptOssRMSNorm, and GemmaRMSNorm with weight_offset 1. `x` may be a
    view, such as one part of a fused projection; `out` may be `x` itself. Raises ValueError where dtype or width of the
    weight differ, or `out` is not like `x`.
    """
    if out is None:
        out = x.new_empty(x.shape)
    elif out.shape != x.shape or out.dtype != x.dtype:
        raise ValueError(f"out {tuple(out.shape)} in {out.dtype} must be like x, {tuple(x.shape)} in {x.dtype}.")
    _norm(x, None, weight, eps, weight_offset, round_first, out, out)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0, round_first: bool = True
) -> tuple[Tensor, Tensor]:
    """`(rms_norm(s), s)` with `s = residual + x` rounded to the dtype; options as in `rms_norm`."""
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"residual {tuple(residual.shape)} in {residual.dtype} must be like x, {tuple(x.shape)} in {x.dtype}."
        )
    normed, total = x.new_empty(x.shape), x.new_empty(x.shape)
    _norm(x, residual, weight, eps, weight_offset, round_first, normed, total)
    return normed, total


def act_mul(gate_up: Tensor, activation: str) -> Tensor:
    """`act(gate) * up` of `gate_up [.., 2I]`, gate first; `[.., I]`. activation: `silu`, `gelu_tanh` or `gelu` (erf).

    The activation is rounded to the dtype before the product. Raises ValueError for another activation or odd width.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is not one of {', '.join(ACTIVATIONS)}.")
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[-1]} columns, which are not two equal parts.")
    width = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * width)
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    block = min(triton.next_power_of_2(width), 1024)
    _act_mul_kernel[(rows.shape[0], triton.cdiv(width, block))](
        rows, out, rows.stride(0), WIDTH=width, BLOCK=block, ACTIVATION=activation,
        num_warps=4, **early(rows.device),
    )  # fmt: skip
    return out


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    weight_offset: float,
    round_first: bool,
    normed: Tensor,
    total: Tensor,
) -> None:
    """Fill `normed`, and with a residual the contiguous `total`."""
    width = x.shape[-1]
    if weight.shape != (width,) or weight.dtype != x.dtype:
        raise ValueError(
            f"weight {tuple(weight.shape)} in {weight.dtype} does not fit x with {width} columns in {x.dtype}."
        )
    if width > MAX_WIDTH:
        raise ValueError(f"rows of {width} are wider than {MAX_WIDTH}; use the model's own norm.")
    if residual is not None:
        residual, x, normed, total = (t.reshape(-1, width) for t in (residual, x, normed, total))
    rows, target = _as_rows(x), _as_rows(normed)
    if target.data_ptr() != normed.data_ptr() or (rows.dim() == 3) != (target.dim() == 3):
        raise ValueError(f"out with strides {normed.stride()} is no view of rows; pass a contiguous tensor.")
    count = x.numel() // width
    block = triton.next_power_of_2(width)
    together = max(1, min(ELEMENTS_PER_PROGRAM // block, 16)) if count > FEW_ROWS else 1
    _rms_norm_kernel[(triton.cdiv(count, together),)](
        rows, residual, weight, target, total, count, rows.shape[1] if rows.dim() == 3 else 1,
        rows.stride(0), rows.stride(1), target.stride(0), target.stride(1),
        0 if residual is None else residual.stride(0), eps, weight_offset,
        WIDTH=width, BLOCK=block, ROWS=together, ROUND_FIRST=round_first,
        num_warps=max(1, min(block * together // 512, 16)), **early(x.device),
    )  # fmt: skip


def _as_rows(x: Tensor) -> Tensor:
    """`x` as `[n, N]` or `[n, m, N]`, elements of a row adjacent: the heads of a fused projection stay where they are."""
    sizes = [size for size in x.shape[:-1] if size != 1]
    if x.stride(-1) == 1 and len(sizes) == 2:
        return x.reshape(*sizes, x.shape[-1])
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


@triton.jit(do_not_specialize=["count"])
def _rms_norm_kernel(
    x, residual, weight, normed, total, count, inner_size,
    outer_stride, inner_stride, normed_outer_stride, normed_inner_stride, residual_stride, eps, offset,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ROUND_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid `(groups of ROWS rows,)`."""
    wait_for_kernel_before(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < count)[:, None] & (column < WIDTH)[None, :]
    start = row // inner_size * outer_stride
    target = row // inner_size * normed_outer_stride
    if inner_size > 1:  # without heads the second stride is that of an element
        start += row % inner_size * inner_stride
        target += row % inner_size * normed_inner_stride
    values = tl.load(x + start[:, None] + column[None, :], mask=mask, other=0.0)
    if residual is not None:
        other = tl.load(residual + row[:, None] * residual_stride + column[None, :], mask=mask, other=0.0)
        values = (other.to(tl.float32) + values.to(tl.float32)).to(values.dtype)
        tl.store(total + row[:, None] * WIDTH + column[None, :], values, mask=mask)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
    wide = wide * scale[:, None]
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + offset
    if ROUND_FIRST:
        wide = wide.to(values.dtype).to(tl.float32)
    tl.store(normed + target[:, None] + column[None, :], (wide * w[None, :]).to(values.dtype), mask=mask)


@triton.jit
def _act_mul_kernel(
    gate_up, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Grid `(rows, blocks of columns)`."""
    wait_for_kernel_before(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(gate_up + row * stride + column, mask=mask, other=0.0)
    up = tl.load(gate_up + row * stride + WIDTH + column, mask=mask, other=0.0)
    x = activated(gate.to(tl.float32), ACTIVATION)
    x = x.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * WIDTH + column, x.to(gate.dtype), mask=mask)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """One of `ACTIVATIONS` of x in float32."""
    if ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":  # x / 2 * (1 + tanh(y)) = x / (1 + exp(-2y)), without the cancellation
        y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x / (1.0 + tl.exp(-2.0 * y))
    else:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return x
