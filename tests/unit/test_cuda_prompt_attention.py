"""Attention of pieces of prompts on Hopper: its source on a CPU (tests/cuda_host), by NVIDIA's compiler, and when it serves.

On a GPU: tests/gpu/test_prompt_attention_gpu.py.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cuda_rig import HostKernel
from kvboost.kernels.cuda import compiler, prompt_attention, tensor_map
from kvboost.kernels.cuda.compiler import CudaUnavailable
from kvboost.kernels.triton.attention import MAX_SPLITS
from triton_rig import Case, build, case_id, chunk, close, decode, expected

LOG2E = 1.4426950408889634
HEADS: dict[str, Any] = {"dim": 128, "q_heads": 7, "kv_heads": 1}

CASES = (
    Case((chunk(0, 23),), dim=128, id="fresh"),
    Case((chunk(300, 40),), **HEADS, id="a group of 7, two tiles and more"),
    Case((chunk(1000, 9),), **HEADS, id="one group of warps"),
    Case((chunk(128, 16), chunk(112, 16), chunk(0, 128)), q_heads=1, kv_heads=1, dim=128, id="whole tiles of keys"),
    Case((chunk(45, 19), chunk(0, 5), chunk(200, 70)), q_heads=6, kv_heads=2, dim=128, id="several"),
    Case((*decode(20, 165), chunk(130, 12), chunk(0, 9)), dim=128, id="beside decoding"),
    Case((chunk(30, 12),), dim=128, pad_seqs=3, pad_tokens=52, id="padded"),
    Case(((400, (3, 4, 17, 50, 51, 98, 250, 399)), (140, (0, 139))), dim=128, id="scattered positions"),
    Case((chunk(150, 33),), dim=128, block_size=32, id="blocks of 32"),
    Case((chunk(150, 33),), dim=128, block_size=128, id="blocks of 128"),
    Case((chunk(260, 3),), q_heads=40, kv_heads=1, dim=128, scaling=0.2, id="a group of 40"),
)


class HostMap(ctypes.Structure):
    """`TensorMap` of tests/cuda_host/hopper.h."""

    _fields_ = (
        ("address", ctypes.c_uint64), ("sizes", ctypes.c_uint64 * 4), ("strides", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint64 * 4),
    )  # fmt: skip

    @classmethod
    def of(cls, tensor: Tensor, box: tuple[int, ...]) -> HostMap:
        strides = (stride * tensor.element_size() for stride in reversed(tensor.stride()))
        numbers = (tuple(reversed(tensor.shape)), tuple(strides), tuple(reversed(box)))
        return cls(tensor.data_ptr(), *((ctypes.c_uint64 * 4)(*given) for given in numbers))


def merged(splits: prompt_attention.Splits, wanted: range) -> Tensor:
    """The mean of the results `wanted`, weighted by what each has seen; what saw nothing may hold anything."""
    lse = splits.partial_lse[..., wanted].double()
    weights = torch.exp2(lse - lse.amax(-1, keepdim=True).clamp_min(-1e30))[..., None]
    parts = splits.partial[..., wanted, :].double().where(weights > 0, torch.zeros((), dtype=torch.float64))
    return (parts * weights).sum(-2) / weights.sum(-2).clamp_min(1e-30)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_attends_as_the_reference(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, and with keys shared out among blocks that take turns by lot, beside results of another launch."""
    dtype = torch.bfloat16 if len(case.sequences) % 2 else torch.float16
    inputs = build(case, dtype, position_dtype=torch.int64 if case.pad_seqs else torch.int32)
    monkeypatch.setattr(prompt_attention, "tensor_map", HostMap.of)
    definitions = dict(prompt_attention._definitions(inputs.query, inputs.keys, inputs.batch.positions))
    tokens, group = inputs.query.shape[0], case.q_heads // case.kv_heads
    tiles = prompt_attention.tiles_of(tokens, group, inputs.batch.num_seqs)
    scale = LOG2E * (case.scaling or case.dim**-0.5)
    reference = expected(case, inputs)
    rows = torch.arange(tokens) >= inputs.batch.decode_seqs
    for count, first, seed in ((1, 0, 1), (3, 2, 2)):
        folder = tmp_path / str(count)
        folder.mkdir()
        kernel = HostKernel("prompt_attention", {**definitions, "SPLIT": count > 1}, folder)
        kernel.seed = seed
        monkeypatch.setattr(prompt_attention, "_kernel", lambda *_, kernel=kernel: kernel)
        out = torch.full_like(inputs.query, torch.nan)
        splits = None
        if count > 1:
            partial = torch.full((*inputs.query.shape[:2], first + count, 128), torch.nan)
            splits = prompt_attention.Splits(count, first, first + count, partial, partial[..., 0].clone())
        prompt_attention.attend(inputs.query, inputs.keys, inputs.values, inputs.batch, out, scale, tiles, splits)
        if splits is not None:
            assert out.isnan().all() and splits.partial_lse[..., :first].isnan().all()
            out = merged(splits, range(first, first + count)).to(dtype)
        close(out[rows], reference[rows], f"{case_id(case)}, {count} splits")
        if splits is None:
            assert out[~rows].isnan().all()  # left to the kernel that decodes


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_compiles_for_hopper(split: bool) -> None:
    """By NVIDIA's compiler, without a GPU."""
    definitions = {"BF16": 1, "GROUP": 7, "PAGE": 16, "WIDE": 0, "SPLIT": int(split)}
    options = ["--gpu-architecture=sm_90a", "--std=c++17", *(f"-D{key}={value}" for key, value in definitions.items())]
    assert compiler.nvrtc().compile("prompt_attention.cu", options)[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("programs", "splits"), [(4, 33), (16, 8), (28, 4), (56, 2), (84, 3), (112, 1), (132, 1), (300, 1)]
)
def test_multiprocessors_are_kept_busy(programs: int, splits: int) -> None:
    assert prompt_attention.splits_of(programs, 132, MAX_SPLITS) == splits


@pytest.mark.parametrize("status", [0, 1])
def test_a_map_is_made_by_the_driver_once(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def encode(made: Any, *given: Any) -> int:
        assert ctypes.addressof(made._obj) % tensor_map.ALIGNMENT == 0
        made._obj.words[0] = 7
        calls.append(given)
        return status

    monkeypatch.setattr(tensor_map, "driver", lambda: SimpleNamespace(cuTensorMapEncodeTiled=encode))
    monkeypatch.setattr(tensor_map, "require", lambda status, what: _raise(what) if status else None)
    tensor_map._tensor_map.cache_clear()
    pool = torch.zeros(5, 40 * 2 * 128, dtype=torch.float16)[:, 128:]
    keys = pool.as_strided((5, 16, 2, 128), (40 * 2 * 128, 2 * 128, 128, 1))
    if status:
        with pytest.raises(CudaUnavailable, match="copy engine"):
            tensor_map.tensor_map(keys, (1, 16, 1, 64))
        return
    assert tensor_map.fits(keys) and not tensor_map.fits(keys[..., 1:])
    made = tensor_map.tensor_map(keys, (1, 16, 1, 64))
    assert made.words[0] == 7 and tensor_map.tensor_map(keys, (1, 16, 1, 64)) is made and len(calls) == 1
    number, rank, address, sizes, strides, box, steps = calls[0][:7]
    assert (number, rank, address.value) == (tensor_map.UINT16, 4, keys.data_ptr())
    assert [list(numbers) for numbers in (sizes, strides, box, steps)] == [
        [128, 2, 16, 5], [256, 512, 40 * 2 * 256], [64, 1, 16, 1], [1, 1, 1, 1],
    ]  # fmt: skip


def _raise(what: str) -> None:
    raise CudaUnavailable(what)


def test_what_cannot_be_compiled_is_left_to_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[Any] = []

    def kernel(*given: Any) -> None:
        tries.append(given)
        _raise("NVRTC was not found")

    monkeypatch.setattr(prompt_attention, "_kernel", kernel)
    monkeypatch.setattr(prompt_attention, "_failed", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    inputs = build(CASES[0], torch.bfloat16)
    definitions = prompt_attention._definitions(inputs.query, inputs.keys, inputs.batch.positions)
    device = torch.device("cpu")
    for _ in range(2):
        assert not prompt_attention._has_kernel(device, definitions)
    assert len(tries) == 1 and caplog.text.count("uses Triton, which is slower: NVRTC was not found") == 1


def test_does_not_serve_what_it_does_not_know() -> None:
    inputs = build(CASES[0], torch.bfloat16)
    assert not prompt_attention.serves(inputs.query, inputs.keys, inputs.values, inputs.batch.positions)  # not on a CPU
