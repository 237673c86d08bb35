"""Products of a few rows with packed 4-bit weights: `packed_few.cu`, compiled for the case at hand and launched. A norm of the
rows, a gate or a residual may be part of it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from kvboost.kernels.cuda.attempts import can_be_had
from kvboost.kernels.cuda.compiler import cubin
from kvboost.kernels.cuda.driver import Kernel, address_of
from kvboost.kernels.cuda.workspace import holds, prepare, workspace_of
from kvboost.kernels.norm import RmsNorm
from kvboost.weights.packing import Packing, Scheme

SOURCE = "packed_few.cu"
DTYPES = (torch.bfloat16, torch.float16)
CAPABILITY = (8, 0)
"""The oldest GPUs with the matrix instructions that the kernel uses."""

MOST_ROWS = 16
"""Of x. With more the Triton kernel, which reads x less often, is faster."""

STEP = 128
"""Weights of a row in one step of a warp."""

MUCH_X = 32 << 10
"""Bytes of x in shared memory from which fewer, larger blocks are faster, because each fetches all of x."""

FEWEST_STEPS = 32
"""Of a block in its part of a row, which ends with a barrier and the joining of sums; so rows of 8,192 weights may be split."""

FEW_TILES = 4
"""For each block that the GPU holds; from so many on at least 4 blocks of 5 are always busy, and rows are not split."""

WORTH_SPLITTING = 1.1
"""How much busier the GPU must be with rows in parts, whose sums are to be joined."""

RESERVED_BYTES = 1024
"""Of shared memory, for every block."""

ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2, "gelu": 3}
"""The numbers of elementwise.h."""

SCHEMES = {Scheme.SYMMETRIC: 0, Scheme.ZEROS: 1, Scheme.MINIMUM: 4, Scheme.TWO_LEVEL: 5}
"""The numbers of packed_few.cu."""


@dataclass(frozen=True, slots=True)
class Around:
    """What a launch computes beside its product. activation: one of `ACTIVATIONS`, of the first half of its columns, times
    the second half. norm: of x, and how it rounds; a number of elementwise.h."""

    activation: str | None = None
    norm: int = 0

    @classmethod
    def of(cls, norm: RmsNorm | None, activation: str | None) -> Around:
        return cls(activation, 0 if norm is None else 1 if norm.round_first else 2)

    def width(self, n: int) -> int:
        """Columns of the result, with so many rows of the weight."""
        return n // 2 if self.activation else n


PRODUCT = Around()
"""Nothing."""


@dataclass(frozen=True, slots=True)
class FewTile:
    """`tiles` of 16 weight rows and `cols` of 8 rows of x in a block; its warps; the steps that each reads ahead; blocks that a
    multiprocessor must hold, which bounds registers; rows of x kept in shared memory, 0 for none; and parts of k, of which a
    block takes one. `warps` is even, and without rows in shared memory `depth`, too."""

    tiles: int
    cols: int
    warps: int
    depth: int
    blocks: int
    x_shared: int
    parts: int = 1

    def steps(self, packing: Packing) -> int:
        """Of a row, in the longest of its parts."""
        return -(-packing.k // (STEP * self.parts))

    def tail_bytes(self, packing: Packing) -> int:
        """Room for what a row, or a part of it, has beside its codes.

        That of a part is copied in two pieces, with up to 15 bytes too many at each of their four ends, and half a step's. An
        odd number of 16 bytes, so that rows that are read together begin in different banks.
        """
        whole = packing.row_bytes - packing.scales_at
        if self.parts == 1:
            return whole
        return (-(-whole * self.steps(packing) * STEP // packing.k) + 80) // 16 * 16 | 16

    def sums_bytes(self, packing: Packing, buffers: int, around: Around) -> int:
        """For the sums of a tile by each warp; before there are any, for the weight of a norm and the squares of rows."""
        sums = buffers * self.warps * (self.x_shared or 8 * self.cols) * (16 * self.tiles + 4) * 4
        return max(sums, packing.k * 2 + -(-self.warps * self.x_shared // 4) * 16) if around.norm else sums

    def shared_bytes(self, packing: Packing, buffers: int, around: Around = PRODUCT) -> int:
        """As packed_few.cu divides shared memory."""
        factors = buffers * 16 * self.tiles * self.tail_bytes(packing)
        k = self.steps(packing) * STEP
        x = self.x_shared * k * 2 + k // min(STEP, packing.group) * max(2, self.x_shared) * 4
        return self.sums_bytes(packing, buffers, around) + factors + (x if self.x_shared else 0)


@dataclass(frozen=True, slots=True)
class Launch:
    """How a product is computed. blocks: the same number for each part, which take the tiles in turn; buffers: 1 where none
    has more than one."""

    tile: FewTile
    blocks: int
    buffers: int
    shared_bytes: int
    around: Around = PRODUCT


@dataclass(frozen=True, slots=True)
class Gpu:
    """Multiprocessors of a GPU, and the bytes of shared memory of one and of a block."""

    processors: int
    shared_bytes: int
    block_shared_bytes: int

    @classmethod
    @lru_cache
    def of(cls, device: torch.device) -> Gpu:
        told: Any = torch.cuda.get_device_properties(device)  # its stub lacks a field
        return cls(
            told.multi_processor_count, told.shared_memory_per_multiprocessor, told.shared_memory_per_block_optin
        )


class Shape(ctypes.Structure):
    """`Shape` of packed_few.cu."""

    _fields_ = (
        ("row_bytes", ctypes.c_uint64), ("x_bytes", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("rows", "n", "k", "tail", "scales_at", "beside_at", "factors_at",
                                           "buffers")),
        ("eps", ctypes.c_float), ("offset", ctypes.c_float),
    )  # fmt: skip


def shape_of(x: Tensor, weight: Tensor, packing: Packing, plan: Launch, norm: RmsNorm | None = None) -> Shape:
    return Shape(
        row_bytes=weight.stride(0), x_bytes=x.stride(0) * x.element_size(), rows=x.shape[0],
        n=plan.around.width(weight.shape[0]), k=packing.k, tail=plan.tile.tail_bytes(packing), scales_at=packing.scales_at,
        beside_at=packing.beside_at,
        factors_at=plan.tile.sums_bytes(packing, plan.buffers, plan.around), buffers=plan.buffers,
        eps=norm.eps if norm else 0.0, offset=norm.offset if norm else 0.0,
    )  # fmt: skip


def serves(
    x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None = None, *,
    norm: RmsNorm | None = None, activation: str | None = None,
) -> bool:  # fmt: skip
    """Whether `packed_few` can compute this here; otherwise other kernels do, or say what is wrong."""
    return (
        x.device.type == "cuda"
        and _fit_each_other(x, weight, packing, bias)
        and knows(packing)
        and (norm is None or _normalises(norm, x))
        and (activation is None or _has_halves(weight, activation))
        and _has_kernel(x.device, x.dtype, packing, weight.shape[0], x.shape[0], Around.of(norm, activation))
    )


def _normalises(norm: RmsNorm, x: Tensor) -> bool:
    return _like_a_row(norm.weight, x, (x.shape[1],)) and norm.weight.data_ptr() % 16 == 0


def _has_halves(weight: Tensor, activation: str) -> bool:
    """Whether the kernel can gate one half of such a weight by the other, from which it is 32 bits away."""
    return activation in ACTIVATIONS and weight.shape[0] % 2 == 0 and weight.shape[0] * weight.stride(0) < 1 << 32


def _fit_each_other(x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None) -> bool:
    rows = x.dtype in DTYPES and x.dim() == 2 and 0 < x.shape[0] <= MOST_ROWS
    inner = rows and x.shape[1] == packing.k and x.stride(1) == 1
    packed = weight.dtype == torch.uint8 and weight.dim() == 2 and weight.shape[1] == packing.row_bytes
    aligned = not (x.data_ptr() | x.stride(0) * x.element_size() | weight.data_ptr() | weight.stride(0)) % 16
    added = bias is None or _like_a_row(bias, x, (weight.shape[0],))
    return inner and packed and weight.stride(1) == 1 and weight.device == x.device and aligned and added


def _like_a_row(other: Tensor, x: Tensor, shape: tuple[int, ...]) -> bool:
    return other.shape == shape and other.dtype == x.dtype and other.device == x.device and other.is_contiguous()


def knows(packing: Packing) -> bool:
    """Whether the kernel knows the layout: 4 bits, fp16 scales, whole steps, and groups of 32, 64 or whole steps."""
    wide = packing.group % STEP == 0 or packing.group in (32, 64)
    known = packing.scheme in SCHEMES and packing.bits == 4 and packing.scale_bytes == 2
    return known and packing.k % STEP == 0 and wide


def packed_few(
    x: Tensor,
    weight: Tensor,
    packing: Packing,
    bias: Tensor | None = None,
    *,
    total: Tensor | None = None,
    out: Tensor | None = None,
    norm: RmsNorm | None = None,
    activation: str | None = None,
    tile: FewTile | None = None,
) -> Tensor:
    """`x [rows, k] @ W.T + bias [n]` in bf16 or fp16, summed in fp32 and rounded once; for what `serves` tells.

    weight: uint8 `[n, packing.row_bytes]`. norm: of x first, rounded where `rms_norm` of triton/elementwise.py rounds; its squares
    are added in another order. activation: `silu`, `gelu_tanh` or `gelu`; the result, `[rows, n / 2]`, is what `act_mul` makes of
    the rounded product. total: contiguous `[rows, n]`, to which the product is added, in place unless there is an `out`; not with
    an activation. out: contiguous, not x, where the result is stored and which is returned. tile overrides the rule. The weight
    and that of the norm are read ahead of the kernel before, so that must not have written them. Raises `CudaUnavailable` when
    the kernel cannot be compiled or launched, ValueError for a `total`, `out` or `tile` that does not fit.
    """
    rows, n, around = x.shape[0], weight.shape[0], Around.of(norm, activation)
    if total is not None and activation is not None:
        raise ValueError(f"activation={activation!r} is taken of the product alone, without a total.")
    for name, given in (("total", total), ("out", out)):
        if given is not None and not _like_a_row(given, x, (rows, around.width(n))):
            raise ValueError(
                f"{name} {tuple(given.shape)} in {given.dtype} must be a contiguous [{rows}, {around.width(n)}] "
                f"in {x.dtype}."
            )
    if tile is not None and not _can(tile, packing, n, rows, around):
        raise ValueError(f"{tile} does not serve {rows} rows of x and {n} of the weight with {around}.")
    if x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return packed_few(
                x, weight, packing, bias, total=total, out=out, norm=norm, activation=activation, tile=tile
            )
    if tile is None:
        plan = _launch(x.device, packing, n, rows, around)
    else:
        plan = planned(tile, packing, n, Gpu.of(x.device), around)
    if plan is None:
        raise ValueError(f"this GPU has no kernel for {rows} rows of x and {n} of the weight with {around}.")
    kernel = _kernel(x.device, x.dtype, packing.scheme, packing.group, plan.tile, around)
    if out is None:
        out = x.new_empty(rows, around.width(n)) if total is None else total
    space = workspace_of(x.device) if plan.tile.parts > 1 else (None, None)
    pointers = map(address_of, (x, weight, bias, total, None if norm is None else norm.weight, out))
    shape = shape_of(x, weight, packing, plan, norm)
    grid = (plan.blocks, -(-rows // (8 * plan.tile.cols)))
    kernel.launch(grid, plan.shared_bytes, (*pointers, shape, *map(address_of, space)))
    return out


def _can(tile: FewTile, packing: Packing, n: int, rows: int, around: Around = PRODUCT) -> bool:
    """Whether a tile serves so many rows of the weight and of x. Rows are normalised on their way to shared memory; and parts of
    k are joined for the product alone, as what follows a norm or is gated seldom has few tiles of long rows."""
    split = tile.parts == 1 or (around == PRODUCT and tile.parts <= packing.k // STEP and holds(tile.parts, rows, n))
    kept = rows <= tile.x_shared if tile.x_shared else not around.norm
    return n >= 16 * tile.tiles and kept and split


def chosen_tile(packing: Packing, n: int, rows: int, gpu: Gpu) -> FewTile:
    """The fastest of those that were measured on an H200 (docs/results/gpu-packed-products.md).

    Up to 4 rows of x stay in shared memory while enough blocks fit beside one another. There long rows of few tiles are split
    where that keeps more of the GPU busy, in as many parts as `_busy` says: 5120 x 27648 takes 29.6 us in 3 parts and 34.3 whole.
    """
    if rows <= 4:
        kept = 1 << (rows - 1).bit_length()
        small, wide = FewTile(1, 1, 8, 3, 3, kept), FewTile(2, 1, 8, 3, 2, kept)
        tiles = [small, wide]
        if kept * packing.k * 2 > MUCH_X:
            tiles = [FewTile(1, 1, 12, 2, 2, kept)]
        splits = [small] if rows > 2 else [wide]
        if rows == 1:
            splits.insert(0, FewTile(2, 1, 4, 3, 4, kept))
        most = packing.k // (STEP * FEWEST_STEPS)
        for split in splits:
            if n <= FEW_TILES * 16 * split.tiles * gpu.processors * split.blocks:
                tiles += [replace(split, parts=parts) for parts in range(2, most + 1)]
        fitting = [tile for tile in tiles if _can(tile, packing, n, rows) and _fits(tile, packing, n, gpu)]
        if fitting:
            return max(
                fitting, key=lambda tile: _busy(tile, packing, n, gpu) / (WORTH_SPLITTING if tile.parts > 1 else 1)
            )
    return FewTile(2, 1, 8, 2, 2, 0) if rows <= 8 else FewTile(2, 2, 4, 2, 2, 0)


def _fits(tile: FewTile, packing: Packing, n: int, gpu: Gpu, around: Around = PRODUCT) -> bool:
    return tile.blocks * (planned(tile, packing, n, gpu, around).shared_bytes + RESERVED_BYTES) <= gpu.shared_bytes


def _busy(tile: FewTile, packing: Packing, n: int, gpu: Gpu) -> float:
    """The share of the GPU's warps that have a step, over all rounds of tiles and of the steps of each."""
    tiles, together = -(-n // (16 * tile.tiles)), gpu.processors * tile.blocks // tile.parts
    rounds, steps = -(-tiles // together), -(-tile.steps(packing) // tile.warps)
    return tiles * (packing.k // STEP) / (rounds * together * steps * tile.warps * tile.parts)


def planned(tile: FewTile, packing: Packing, n: int, gpu: Gpu, around: Around = PRODUCT) -> Launch:
    """As many blocks as the GPU holds at a time, or one for each part of a tile."""
    tiles = -(-n // (16 * tile.tiles))
    for buffers in (1, 2):
        shared = tile.shared_bytes(packing, buffers, around)
        together = gpu.processors * max(1, min(tile.blocks, gpu.shared_bytes // (shared + RESERVED_BYTES)))
        of_a_part = max(1, together // tile.parts)
        if tiles <= of_a_part:
            return Launch(tile, tiles * tile.parts, buffers, shared, around)
    return Launch(tile, of_a_part * tile.parts, 2, shared, around)


@lru_cache(maxsize=4096)
def _launch(device: torch.device, packing: Packing, n: int, rows: int, around: Around = PRODUCT) -> Launch | None:
    """None where the GPU or the weight is too small for it, or where a norm would leave room for fewer blocks."""
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return None
    gpu = Gpu.of(device)
    tile = chosen_tile(packing, n, rows, gpu)
    plan = planned(tile, packing, n, gpu, around)
    fits = plan.shared_bytes <= gpu.block_shared_bytes and (not around.norm or _fits(tile, packing, n, gpu, around))
    return plan if fits and _can(tile, packing, n, rows, around) else None


_failed: dict[tuple[torch.device, torch.dtype, Scheme, int, FewTile, Around], str] = {}
"""Kernels that could not be had, and why; they are not tried again."""


def _has_kernel(
    device: torch.device, dtype: torch.dtype, packing: Packing, n: int, rows: int, around: Around = PRODUCT
) -> bool:
    plan = _launch(device, packing, n, rows, around)
    if plan is None:
        return False
    key = (device, dtype, packing.scheme, packing.group, plan.tile, around)

    def make() -> None:
        _kernel(*key)
        if plan.tile.parts > 1:
            prepare(device)

    return can_be_had(_failed, key, make, "4-bit products use Triton, which is slower for a few rows")


@cache
def _kernel(
    device: torch.device, dtype: torch.dtype, scheme: Scheme, group: int, tile: FewTile, around: Around
) -> Kernel:
    with torch.cuda.device(device):
        code = cubin(SOURCE, definitions(dtype, scheme, group, tile, around), torch.cuda.get_device_capability(device))
        return Kernel(code, "packed_few", tile.warps * 32, Gpu.of(device).block_shared_bytes)


def definitions(
    dtype: torch.dtype, scheme: Scheme, group: int, tile: FewTile, around: Around = PRODUCT
) -> dict[str, int]:
    """What packed_few.cu is compiled for."""
    wide = group % STEP == 0
    return {
        "BF16": dtype is torch.bfloat16, "SCHEME": SCHEMES[scheme], "WORDS": 4 if wide else group // 32,
        "STEPS": group // STEP if wide else 1, "TILES": tile.tiles, "COLS": tile.cols, "WARPS": tile.warps,
        "DEPTH": tile.depth, "BLOCKS": tile.blocks, "X_SHARED": tile.x_shared, "PARTS": tile.parts,
        "ACTIVATION": ACTIVATIONS[around.activation], "NORM": around.norm,
    }  # fmt: skip
