"""The layout of packed rows, read back byte by byte by code that shares nothing with `Packing`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvboost.weights.modules import PackedEmbedding, PackedLinear
from kvboost.weights.packing import Packing, Scheme, in_pieces
from packed_rig import PACKINGS, packing_id, random_rows


def weight_at(row: bytes, p: Packing, i: int) -> float:
    """Weight i of a row, as the layout's description says."""
    run, place = divmod(i, 32)
    if p.bits == 8:
        code: float = row[i]
        if p.scheme is Scheme.FLOAT8:
            code = float(torch.tensor([row[i]], dtype=torch.uint8).view(torch.float8_e4m3fn).float())
        elif p.scheme is Scheme.SYMMETRIC and code > 127:
            code -= 256
        at = p.k
    else:
        byte = row[run * 16 + place % 16]
        code = byte >> 4 if place >= 16 else byte & 15
        at = p.k // 2
        planes = p.bits - 4
        for plane in range(planes):
            word = int.from_bytes(row[at + (run * planes + plane) * 4 :][:4], "little")
            code += (word >> place & 1) << (4 + plane)
        at += p.k // 8 * planes

    def number(offset: int, count: int) -> float:
        kind = np.float16 if p.scale_bytes == 2 else np.float32
        return float(np.frombuffer(row, kind, 1, offset + count * p.scale_bytes)[0])

    group, groups = i // p.group, p.k // p.group
    if p.scheme is Scheme.TWO_LEVEL:
        d, dmin = number(at, i // 256 * 2), number(at, i // 256 * 2 + 1)
        beside = at + p.k // 256 * 4
        return d * row[beside + 2 * group] * code - dmin * row[beside + 2 * group + 1]
    if p.scheme is Scheme.TWO_LEVEL_SIGNED:
        sub = row[at + p.k // 256 * 2 + group]
        return number(at, i // 256) * (sub - 256 if sub > 127 else sub) * (code - 32)
    beside, scale = at + groups * p.scale_bytes, number(at, group)
    if p.scheme is Scheme.MINIMUM:
        return scale * code + number(beside, group)
    if p.scheme is Scheme.ZEROS:
        zero = row[beside + group] if p.bits == 8 else row[beside + group // 2] >> 4 * (group % 2) & 15
        return scale * (code - zero)
    return scale * (code if p.bits == 8 else code - (1 << (p.bits - 1)))


def written_out(rows: Tensor, p: Packing) -> Tensor:
    return torch.tensor(
        [[weight_at(bytes(row), p, i) for i in range(p.k)] for row in rows.numpy()], dtype=torch.float64
    )


@pytest.mark.parametrize("packing", PACKINGS, ids=packing_id)
def test_every_byte_means_what_the_layout_says(packing: Packing) -> None:
    rows = random_rows(packing, 3)
    expected = written_out(rows, packing)
    allowed = 1e-6 * expected.abs().amax(dim=1, keepdim=True)
    assert ((packing.dense(rows).double() - expected).abs() <= allowed).all()
    a, b = (part.repeat_interleave(packing.group, dim=1).double() for part in packing.affine(rows))
    assert ((a * packing.codes(rows).double() + b - expected).abs() <= 4 * allowed).all()
    assert packing.dense(rows, torch.bfloat16).equal(packing.dense(rows).bfloat16())


@pytest.mark.parametrize("packing", PACKINGS, ids=packing_id)
def test_rows_are_whole_by_themselves(packing: Packing) -> None:
    rows = random_rows(packing, 5)
    order = torch.tensor([4, 0, 2])
    assert packing.dense(rows[order]).equal(packing.dense(rows)[order])
    assert rows.shape == (5, packing.row_bytes) and packing.row_bytes % 16 == 0
    assert packing.row_bytes < packing.beside_at + 2 * packing.groups * packing.scale_bytes + 16


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((Scheme.SYMMETRIC, 3, 64, 32), "bits"),
        ((Scheme.ZEROS, 5, 64, 32), "bits"),
        ((Scheme.SYMMETRIC, 4, 48, 48), "multiple of 32"),
        ((Scheme.SYMMETRIC, 4, 0, 32), "multiple of 32"),
        ((Scheme.TWO_LEVEL, 4, 288, 32), "multiple of 256"),
        ((Scheme.SYMMETRIC, 4, 64, 16), "groups of 16"),
        ((Scheme.SYMMETRIC, 4, 96, 64), "groups of 64"),
        ((Scheme.TWO_LEVEL, 4, 256, 64), "groups of 64"),
        ((Scheme.ZEROS, 4, 64, 128), "groups of 128"),
        ((Scheme.SYMMETRIC, 4, 64, 32, 8), "8 bytes"),
        ((Scheme.TWO_LEVEL_SIGNED, 6, 256, 16, 4), "4 bytes"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Packing(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [0, 1, 7, 100])
def test_pieces_cover_all_rows_once(rows: int) -> None:
    pieces: list[tuple[int, int]] = []
    in_pieces(rows, 10, 35, lambda start, end: pieces.append((start, end)))
    assert [i for start, end in pieces for i in range(start, end)] == list(range(rows))
    assert all(end - start <= 3 for start, end in pieces)


def test_modules_keep_their_bytes_and_their_ties() -> None:
    packing = Packing(Scheme.ZEROS, 4, 64, 32)
    table = PackedEmbedding(random_rows(packing, 9), packing, torch.bfloat16, scale=8.0)
    head = PackedLinear(table.weight, packing, torch.ones(9))
    assert head.weight is table.weight and (head.in_features, head.out_features) == (64, 9)
    assert not head.weight.requires_grad and table.num_embeddings == 9 and table.embedding_dim == 64
    whole = torch.nn.ModuleList([table, head]).to(torch.float16)
    assert head.weight.dtype == torch.uint8 and head.bias.dtype == torch.float16  # type: ignore[union-attr]
    assert len(list(whole.parameters())) == 2
    looked_up = table(torch.tensor([[1, 8]]))
    assert looked_up.dtype == torch.bfloat16 and looked_up.shape == (1, 2, 64)
    assert looked_up[0].equal(packing.dense(table.weight[[1, 8]], torch.bfloat16) * 8)
