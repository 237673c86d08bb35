"""Shared by the tests of packed weights on GPUs: random rows of every scheme, and what unpacking must make of them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvboost.weights.packing import Packing, Scheme

PACKINGS = (
    Packing(Scheme.ZEROS, 4, 256, 128),
    Packing(Scheme.ZEROS, 4, 576, 64),
    Packing(Scheme.ZEROS, 4, 96, 96, 4),
    Packing(Scheme.ZEROS, 4, 576, 32),
    Packing(Scheme.SYMMETRIC, 4, 96, 32),
    Packing(Scheme.SYMMETRIC, 4, 128, 128),
    Packing(Scheme.SYMMETRIC, 5, 576, 32),
    Packing(Scheme.SYMMETRIC, 8, 96, 32),
    Packing(Scheme.SYMMETRIC, 8, 576, 576, 4),
    Packing(Scheme.ZEROS, 8, 576, 64),
    Packing(Scheme.ZEROS, 8, 96, 32),
    Packing(Scheme.MINIMUM, 4, 96, 32),
    Packing(Scheme.MINIMUM, 5, 160, 32, 4),
    Packing(Scheme.TWO_LEVEL, 4, 768, 32),
    Packing(Scheme.TWO_LEVEL, 5, 256, 32),
    Packing(Scheme.TWO_LEVEL_SIGNED, 6, 768, 16),
    Packing(Scheme.FLOAT8, 8, 576, 576, 4),
    Packing(Scheme.FLOAT8, 8, 96, 32),
)


def packing_id(packing: Packing) -> str:
    return f"{packing.scheme.value}-{packing.bits}-g{packing.group}-k{packing.k}"


def random_rows(packing: Packing, n: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """uint8 `[n, row_bytes]`: all codes, zero points and sub-scales occur; weights are of the order of 0.1."""
    generator = torch.Generator(device).manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.int16)

    def scales(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device) * 0.02 + 0.001

    k, groups, top = packing.k, packing.groups, 1 << packing.bits
    codes = integers(0, top, n, k).to(torch.uint8)
    match packing.scheme:
        case Scheme.TWO_LEVEL:
            return packing.pack(codes, scales(n, k // 256, 2) / 32, integers(0, 64, n, groups, 2).to(torch.uint8))
        case Scheme.TWO_LEVEL_SIGNED:
            return packing.pack(codes, scales(n, k // 256) / 64, integers(-128, 128, n, groups).to(torch.int8))
        case Scheme.FLOAT8:
            codes[codes & 0x7F == 0x7F] = 0  # NaN
            return packing.pack(codes.view(torch.float8_e4m3fn), scales(n, groups) / 8)
        case Scheme.ZEROS:
            return packing.pack(codes, scales(n, groups), integers(0, top, n, groups).to(torch.uint8))
        case Scheme.MINIMUM:
            minima = torch.randn(n, groups, generator=generator, device=device) * 0.1
            return packing.pack(codes, scales(n, groups), minima)
    return packing.pack(codes.view(torch.int8) if packing.bits == 8 else codes, scales(n, groups))


def unpacked_exactly(out: Tensor, rows: Tensor, packing: Packing) -> None:
    """`out` is the weights of `rows`: the same bits, or in schemes that add something to a product, an ulp of its parts."""
    reference = packing.dense(rows, out.dtype)
    if packing.scheme in (Scheme.MINIMUM, Scheme.TWO_LEVEL):
        exact = packing.dense(rows)
        a, b = (part.repeat_interleave(packing.group, dim=1).abs() for part in packing.affine(rows))
        parts = a * packing.codes(rows).float() + b
        info = torch.finfo(out.dtype)
        allowed = parts * 2.0**-23 + exact.abs() * info.eps + info.smallest_normal * info.eps
        assert ((out.float() - exact).abs() <= allowed).all()
    else:
        assert torch.equal(out, reference)
