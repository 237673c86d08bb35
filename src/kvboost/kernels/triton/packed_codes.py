# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""How a kernel reads packed rows (kvboost/weights/packing.py): codes into registers, scales as fp32 factors.

Every weight is `a * (q - z) + b`. q - z is an integer below 2 ** 8, exact in bf16 and fp16; a and b are fp32.

A tile is `[rows, runs * 16]` bytes of low nibbles: byte j of a run holds the weights j and j + 16 of 32, so one tile
gives two, each of runs of 16 weights, which meet their own columns of x. Nothing is shuffled between threads. A nibble
becomes a number without a conversion, which GPUs do at a quarter of the rate: or-ed into the mantissa of 128 (bf16) or
1024 (fp16), and the zero point that is subtracted has the same offset. PTX does this on two numbers at a time; beside it
stands the same in Triton, for the interpreter and other GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvboost.weights.packing import Packing, Scheme

SYMMETRIC = tl.constexpr(0)
ZEROS = tl.constexpr(1)
TWO_LEVEL_SIGNED = tl.constexpr(2)
FLOAT8 = tl.constexpr(3)
MINIMUM = tl.constexpr(4)
TWO_LEVEL = tl.constexpr(5)
"""The schemes as kernels know them; those from MINIMUM on have a b."""

NUMBERS = {
    Scheme.SYMMETRIC: 0, Scheme.ZEROS: 1, Scheme.TWO_LEVEL_SIGNED: 2, Scheme.FLOAT8: 3, Scheme.MINIMUM: 4,
    Scheme.TWO_LEVEL: 5,
}  # fmt: skip

MAGIC = {torch.bfloat16: 0x4300, torch.float16: 0x6400, torch.float32: 0}
"""Bits of 128.0 and 1024.0: a nibble in the lowest bits of their mantissas adds its value. fp32 is converted."""

SPLIT_NIBBLES = tl.constexpr("""{{
.reg .b32 even, odd, even_high, odd_high;
prmt.b32 even, $4, 0, 0x4140;
prmt.b32 odd, $4, 0, 0x4342;
shr.u32 even_high, even, 4;
shr.u32 odd_high, odd, 4;
lop3.b32 $0, even, 0x000f000f, {0}, 0xea;
lop3.b32 $1, odd, 0x000f000f, {0}, 0xea;
lop3.b32 $2, even_high, 0x000f000f, {0}, 0xea;
lop3.b32 $3, odd_high, 0x000f000f, {0}, 0xea;
}}""")
"""Four bytes to eight 16-bit lanes: the low nibbles, then the high ones, each with the magic bits. 8 instructions for 8
weights; from `(byte & 15) | magic` the compiler makes 18."""

WIDEN_FLOAT8 = tl.constexpr("""{{
.reg .b32 even, odd, even_sign, odd_sign;
prmt.b32 even, $2, 0, 0x1404;
prmt.b32 odd, $2, 0, 0x3424;
and.b32 even_sign, even, 0x80008000;
and.b32 odd_sign, odd, 0x80008000;
shr.u32 even, even, {0};
shr.u32 odd, odd, {0};
lop3.b32 $0, even, {1}, even_sign, 0xea;
lop3.b32 $1, odd, {1}, odd_sign, 0xea;
}}""")
"""Four bytes of e4m3fn to four 16-bit lanes: the sign stays on top, the other bits move down to a wider exponent."""

SPLIT_NIBBLES_BF16 = tl.constexpr(SPLIT_NIBBLES.value.format("0x43004300"))
SPLIT_NIBBLES_FP16 = tl.constexpr(SPLIT_NIBBLES.value.format("0x64006400"))
WIDEN_FLOAT8_BF16 = tl.constexpr(WIDEN_FLOAT8.value.format("4", "0x07f007f0"))
WIDEN_FLOAT8_FP16 = tl.constexpr(WIDEN_FLOAT8.value.format("1", "0x3f803f80"))


def layout(packing: Packing, dtype: torch.dtype) -> dict[str, Any]:
    """What every kernel here is told about the rows and about the dtype it computes in."""
    compiled = not triton.knobs.runtime.interpret and torch.version.hip is None
    return {
        "high_at": packing.high_at, "scales_at": packing.scales_at // packing.scale_bytes,
        "beside_at": packing.beside_at, "SCHEME": NUMBERS[packing.scheme], "BITS": packing.bits,
        "GROUP": packing.group, "WIDE_SCALES": packing.scale_bytes == 4, "MAGIC": MAGIC[dtype],
        "PTX": compiled and dtype is not torch.float32,
    }  # fmt: skip


@triton.jit
def load(at, inside, EVEN: tl.constexpr):
    """What is at the pointers; zeros where not inside, unless EVEN says that all are."""
    return tl.load(at) if EVEN else tl.load(at, mask=inside, other=0)


@triton.jit
def as_scales(base, WIDE_SCALES: tl.constexpr):
    """Byte pointers as pointers to scales; `scales_at` counts in these."""
    return base.to(tl.pointer_type(tl.float32)) if WIDE_SCALES else base.to(tl.pointer_type(tl.float16))


@triton.jit
def nibbles(raw, MAGIC: tl.constexpr, PTX: tl.constexpr):
    """Low and high nibbles of bytes as int16, with the magic bits."""
    if PTX:
        if MAGIC == 0x4300:
            low, high = tl.inline_asm_elementwise(
                SPLIT_NIBBLES_BF16, "=r,=r,=r,=r,r", [raw], (tl.int16, tl.int16), is_pure=True, pack=4
            )
        else:
            low, high = tl.inline_asm_elementwise(
                SPLIT_NIBBLES_FP16, "=r,=r,=r,=r,r", [raw], (tl.int16, tl.int16), is_pure=True, pack=4
            )
    else:
        low = (raw & 15).to(tl.int16) | MAGIC
        high = (raw >> 4).to(tl.int16) | MAGIC
    return low, high


@triton.jit
def number(code, like: tl.constexpr, MAGIC: tl.constexpr):
    """int16 codes as numbers of the dtype `like`, plus its offset where it has magic bits."""
    return code.to(like) if MAGIC == 0 else code.to(like, bitcast=True)


@triton.jit
def offset(MAGIC: tl.constexpr):
    """What the magic bits add to a code."""
    value: tl.constexpr = 128.0 if MAGIC == 0x4300 else (1024.0 if MAGIC == 0x6400 else 0.0)
    return value


@triton.jit
def byte_number(code, like: tl.constexpr, SCHEME: tl.constexpr, MAGIC: tl.constexpr, PTX: tl.constexpr):
    """Codes of 8 bits as numbers of the dtype `like`, exact. No weight is NaN: e4m3fn's code for it becomes 480.

    Older GPUs do not convert e4m3fn: its 4 bits of exponent are put into the wider exponent of `like`, and what the bias
    of 7 lacks there is multiplied in. Subnormal numbers come out right, too.
    """
    if SCHEME == FLOAT8:
        if MAGIC == 0:
            wide = code.to(tl.int32)
            bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
            value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** (127 - 7)
        elif MAGIC == 0x4300:
            if PTX:
                bits = tl.inline_asm_elementwise(WIDEN_FLOAT8_BF16, "=r,=r,r", [code], tl.int16, is_pure=True, pack=4)
            else:
                bits = ((code & 0x80).to(tl.int16) << 8) | ((code & 0x7F).to(tl.int16) << 4)
            value = bits.to(like, bitcast=True) * 1.329227995784916e36
        else:
            if PTX:
                bits = tl.inline_asm_elementwise(WIDEN_FLOAT8_FP16, "=r,=r,r", [code], tl.int16, is_pure=True, pack=4)
            else:
                bits = ((code & 0x80).to(tl.int16) << 8) | ((code & 0x7F).to(tl.int16) << 7)
            value = bits.to(like, bitcast=True) * 256.0  # 2 ** (15 - 7)
    elif SCHEME == ZEROS:
        value = code.to(like)
    else:
        value = code.to(tl.int8, bitcast=True).to(like)
    return value


@triton.jit
def constant_zero(SCHEME: tl.constexpr, BITS: tl.constexpr):
    """z of the schemes that have one for all weights."""
    middle: tl.constexpr = (1 << (BITS - 1)) * 1.0
    centred: tl.constexpr = SCHEME == TWO_LEVEL_SIGNED or (SCHEME == SYMMETRIC and BITS < 8)
    value: tl.constexpr = middle if centred else 0.0
    return value


@triton.jit
def stored_zero(base, group, inside, beside_at, BITS: tl.constexpr, EVEN: tl.constexpr):
    """z of the scheme ZEROS: fp32 integers of the shape of `base + group`."""
    if BITS == 8:
        zero = load(base + beside_at + group, inside, EVEN)
    else:
        zero = (load(base + beside_at + group // 2, inside, EVEN) >> (group % 2 * 4)) & 15
    return zero.to(tl.float32)


@triton.jit
def run_scales(
    base, run, inside, scales_at, beside_at, HALF: tl.constexpr, SCHEME: tl.constexpr, GROUP: tl.constexpr,
    WIDE_SCALES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """fp32 `(a, b)`, each `[rows, runs]`, for half HALF of each run of 32 weights; b means nothing in schemes without.

    base: row starts `[rows, 1]`. run, inside: `[1, runs]`.
    """
    scales = as_scales(base, WIDE_SCALES) + scales_at
    if SCHEME == TWO_LEVEL:
        d = load(scales + run // 8 * 2, inside, EVEN).to(tl.float32)
        d_min = load(scales + run // 8 * 2 + 1, inside, EVEN).to(tl.float32)
        a = d * load(base + beside_at + run * 2, inside, EVEN).to(tl.float32)
        b = -(d_min * load(base + beside_at + run * 2 + 1, inside, EVEN).to(tl.float32))
    elif SCHEME == TWO_LEVEL_SIGNED:
        d = load(scales + run // 8, inside, EVEN).to(tl.float32)
        a = d * load(base + beside_at + run * 2 + HALF, inside, EVEN).to(tl.int8, bitcast=True).to(tl.float32)
        b = a
    else:
        group = run * 32 // GROUP
        a = load(scales + group, inside, EVEN).to(tl.float32)
        b = a
        if SCHEME == MINIMUM:
            b = load(as_scales(base + beside_at, WIDE_SCALES) + group, inside, EVEN).to(tl.float32)
    return a, b


@triton.jit
def spread(values, LENGTH: tl.constexpr):
    """`[rows, runs]` to `[rows, runs * LENGTH]`, each value for LENGTH neighbours."""
    rows: tl.constexpr = values.shape[0]
    runs: tl.constexpr = values.shape[1]
    return tl.reshape(tl.broadcast_to(values[:, :, None], [rows, runs, LENGTH]), [rows, runs * LENGTH])


@triton.jit
def decoded(
    code, base, run, inside, scales_at, beside_at, HALF: tl.constexpr, LENGTH: tl.constexpr, SCHEME: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, WIDE_SCALES: tl.constexpr, MAGIC: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """fp32 weights of codes that are numbers already, `[rows, runs * LENGTH]`; arguments as in `run_scales`.

    Without magic bits the difference of integers comes first, as in `Packing.dense`. With them their offset and the zero
    point go into b: one multiply-add a weight, off by at most a / 2 ** 13, where rounding to fp16 may be by w / 2 ** 11.
    """
    a, b = run_scales(base, run, inside, scales_at, beside_at, HALF, SCHEME, GROUP, WIDE_SCALES, EVEN)
    has_b: tl.constexpr = SCHEME >= MINIMUM
    if SCHEME == ZEROS:
        zero = stored_zero(base, run * 32 // GROUP, inside, beside_at, BITS, EVEN)
    else:
        zero = tl.full(a.shape, constant_zero(SCHEME, BITS), tl.float32)
    if MAGIC != 0:
        b = (b if has_b else 0.0) - a * (zero + offset(MAGIC))
    if MAGIC != 0 or has_b:
        weight = code.to(tl.float32) * spread(a, LENGTH) + spread(b, LENGTH)
    else:
        weight = (code.to(tl.float32) - spread(zero, LENGTH)) * spread(a, LENGTH)
    return weight


@triton.jit
def high_bits(base, run, inside, high_at, PLANE: tl.constexpr, BITS: tl.constexpr, EVEN: tl.constexpr):
    """Bit 4 + PLANE of the codes, where it belongs: int16 `[rows, runs * 16]` for both halves of runs.

    base: row starts `[rows, 1]`. run, inside: `[1, runs]`.
    """
    at = (base + high_at).to(tl.pointer_type(tl.uint32)) + run * (BITS - 4) + PLANE
    word = load(at, inside, EVEN)
    rows: tl.constexpr = word.shape[0]
    runs: tl.constexpr = word.shape[1]
    weight = tl.arange(0, 16).to(tl.uint32)[None, None, :]
    low = ((word << (4 + PLANE))[:, :, None] >> weight) & (16 << PLANE)
    high = (word[:, :, None] >> (weight + (12 - PLANE))) & (16 << PLANE)
    return tl.reshape(low.to(tl.int16), [rows, runs * 16]), tl.reshape(high.to(tl.int16), [rows, runs * 16])


@triton.jit
def decoded_halves(
    base, first, end, high_at, scales_at, beside_at, RUNS: tl.constexpr, like: tl.constexpr, SCHEME: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, WIDE_SCALES: tl.constexpr, MAGIC: tl.constexpr, PTX: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """fp32 weights j and j + 16 (j from 0 to 15) of RUNS runs of 4 to 6 bits: two tiles `[rows, RUNS * 16]`.

    base: row starts `[rows, 1]`. first: the first run; those from `end` on are no weights. like: the dtype in which a zero
    point is subtracted from a code.
    """
    run = first + tl.arange(0, RUNS)[None, :]
    column = first * 16 + tl.arange(0, RUNS * 16)[None, :]
    inside = run < end
    low, high = nibbles(load(base + column, column < end * 16, EVEN), MAGIC, PTX)
    for plane in tl.static_range(BITS - 4):
        low_bit, high_bit = high_bits(base, run, inside, high_at, plane, BITS, EVEN)
        low |= low_bit
        high |= high_bit
    low = decoded(
        number(low, like, MAGIC), base, run, inside, scales_at, beside_at, 0, 16, SCHEME, BITS, GROUP, WIDE_SCALES, MAGIC, EVEN
    )  # fmt: skip
    high = decoded(
        number(high, like, MAGIC), base, run, inside, scales_at, beside_at, 1, 16, SCHEME, BITS, GROUP, WIDE_SCALES, MAGIC, EVEN
    )  # fmt: skip
    return low, high


@triton.jit
def decoded_bytes(
    base, first, end, scales_at, beside_at, RUNS: tl.constexpr, SCHEME: tl.constexpr, GROUP: tl.constexpr,
    WIDE_SCALES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """fp32 weights of RUNS runs of 8 bits, in order: `[rows, RUNS * 32]`; arguments as in `decoded_halves`."""
    run = first + tl.arange(0, RUNS)[None, :]
    column = first * 32 + tl.arange(0, RUNS * 32)[None, :]
    code = byte_number(load(base + column, column < end * 32, EVEN), tl.float32, SCHEME, 0, False)
    return decoded(code, base, run, run < end, scales_at, beside_at, 0, 32, SCHEME, 8, GROUP, WIDE_SCALES, 0, EVEN)
