"""Attention of pieces of prompts on Hopper GPUs: `prompt_attention.cu`, compiled for the case at hand and launched."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvboost.kernels.cuda.attempts import can_be_had
from kvboost.kernels.cuda.compiler import cubin
from kvboost.kernels.cuda.driver import Kernel, address_of
from kvboost.kernels.cuda.tensor_map import fits, tensor_map

if TYPE_CHECKING:
    from kvboost.kernels.triton.attention import PackedBatch

SOURCE = "prompt_attention.cu"
DTYPES = (torch.bfloat16, torch.float16)
CAPABILITY = (9, 0)
"""Its instructions are those of Hopper alone."""

ROWS = KEYS = DIM = 128
"""Rows of a tile, keys that are brought at a time, and numbers of a head."""

MOST_SPLITS = 8
"""Unless even these leave multiprocessors idle."""

MERGING = 0.05
"""What each split but the first costs, in parts of the time that attention takes."""

BOX_KEYS = 16
THREADS = 384
SHARED_BYTES = 2 * 2 * KEYS * DIM * 2 + ROWS * DIM * 2 + 1024
"""Keys and values in two places each, queries, and barriers."""


@dataclass(frozen=True, slots=True)
class Splits:
    """How keys are shared out: among `count` blocks, whose results are those from `first` on of `all`, in `partial [T, heads,
    all, 128]` and their log2-sum-exp2 `[T, heads, all]`, both fp32."""

    count: int
    first: int
    all: int
    partial: Tensor
    partial_lse: Tensor


class Launch(ctypes.Structure):
    """`Launch` of prompt_attention.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("query_token", "query_head", "out_token", "out_head")),
        *((name, ctypes.c_int) for name in ("seqs", "decode_seqs", "heads", "blocks", "splits", "first_split",
                                           "all_splits")),
        ("scale", ctypes.c_float),
    )  # fmt: skip


def serves(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> bool:
    """Whether the kernel knows the layout, and can be had. query `[T, Hq, 128]`, keys and values `[blocks, page, Hkv, 128]`."""
    if query.device.type != "cuda" or torch.cuda.get_device_capability(query.device) != CAPABILITY:
        return False
    plain = query.dtype in DTYPES and query.shape[2] == values.shape[3] == DIM and keys.shape[1] % BOX_KEYS == 0
    aligned = fits(query) and fits(keys) and fits(values)
    return plain and aligned and _has_kernel(query.device, _definitions(query, keys, positions))


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PackedBatch,
    out: Tensor,
    scale: float,
    tiles: int,
    splits: Splits | None,
) -> None:
    """The rows of all sequences but decoded ones, for what `serves` tells; see `paged_attention` and `attention_kernel`.

    scale: of scores, in units of log2(e), above 0. tiles: `tiles_of`, or more. Raises `CudaUnavailable` when it cannot be launched.
    """
    kernel = _kernel(query.device, _definitions(query, keys, batch.positions), splits is not None)
    box = (1, BOX_KEYS, 1, DIM // 2)
    shape = Launch(
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), batch.kv_len.shape[0], batch.decode_seqs,
        query.shape[1], keys.shape[0], *((1, 0, 1) if splits is None else (splits.count, splits.first, splits.all)), scale,
    )  # fmt: skip
    pointers = (
        query, out, *((None, None) if splits is None else (splits.partial, splits.partial_lse)), batch.positions,
        batch.query_start, batch.tables, batch.table_start, batch.kv_len,
    )  # fmt: skip
    grid = (tiles, keys.shape[2], 1 if splits is None else splits.count)
    arguments = (tensor_map(keys, box), tensor_map(values, box), *map(address_of, pointers), shape)
    kernel.launch(grid, SHARED_BYTES, arguments)


def tiles_of(tokens: int, group: int, seqs: int) -> int:
    """That so many tokens of `seqs` sequences take at most, of one key head."""
    return tokens * group // ROWS + seqs


def splits_of(there: int, processors: int, most: int) -> int:
    """Among how many blocks, at most `most`, each of `there` shares its keys out, of which a multiprocessor holds one."""
    if there >= processors:
        return 1
    counts = range(1, max(MOST_SPLITS, min(processors // there, most)) + 1)
    return min(counts, key=lambda count: -(-there * count // processors) / count * (1 + MERGING * (count - 1)))


Definitions = tuple[tuple[str, int], ...]


def _definitions(query: Tensor, keys: Tensor, positions: Tensor) -> Definitions:
    return (
        ("BF16", query.dtype is torch.bfloat16), ("GROUP", query.shape[1] // keys.shape[2]), ("PAGE", keys.shape[1]),
        ("WIDE", positions.dtype is torch.int64),
    )  # fmt: skip


_failed: dict[tuple[torch.device, Definitions], str] = {}
"""Kernels that could not be had, and why; they are not tried again."""


def _has_kernel(device: torch.device, definitions: Definitions) -> bool:
    def make() -> None:
        for split in (False, True):
            _kernel(device, definitions, split)

    return can_be_had(_failed, (device, definitions), make, "attention of prompts uses Triton, which is slower")


@cache
def _kernel(device: torch.device, definitions: Definitions, split: bool) -> Kernel:
    with torch.cuda.device(device):
        code = cubin(SOURCE, {**dict(definitions), "SPLIT": split}, CAPABILITY, only=True)
        return Kernel(code, "prompt_attention", THREADS, SHARED_BYTES)
