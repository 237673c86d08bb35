"""Compiles the Triton kernels for a GPU that is not there, and prints what each takes; a script, run by a unit test.

    python tests/triton_compile.py 90 [--all | --packed | --experts]

A stand-in for the CUDA driver lets the real launch code run on CPU tensors up to the point where a kernel would be
loaded. Fails when a kernel does not compile, needs more shared memory than the GPU gives a block, or spills too much.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

SHARED_BYTES = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448}
"""Shared memory that one block may have, by compute capability."""

STACK_BYTES_ALLOWED = 128
"""Spilled registers of a thread: beyond a few values they cost more than a larger tile gains. Decoding with two warps
spills 40 bytes on an H200 and was measured faster than four warps without: 139 against 152 us for 256 x 1k keys."""


class StandIn:
    """As much of a CUDA driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and stack bytes."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def compile_launches(capability: int) -> None:
    """From now on a launch compiles, prints and launches nothing."""
    driver.set_active(StandIn(capability))
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = original(self, *args, grid=grid, warmup=True, **kwargs)
        registers, stack = usage(kernel.asm["cubin"])
        ptx = kernel.asm["ptx"]
        print(
            f"  {self.__name__:20} grid {grid!s:16} shared {kernel.metadata.shared:6} registers {registers:3} stack {stack:4} "
            f"wgmma {ptx.count('wgmma.mma_async.sync'):3} mma {ptx.count('mma.sync.aligned'):3} "
            f"cp.async {ptx.count('cp.async.cg'):3}",
            flush=True,
        )
        assert kernel.metadata.shared <= SHARED_BYTES[capability], "more shared memory than a block has"
        assert stack <= STACK_BYTES_ALLOWED, "registers are spilled"

    JITFunction.run = run


def compile_packed(capability: int) -> None:
    """Products with packed weights, unpacking and look-up: what models of 4 bits take first, then every packing."""
    from kvboost.kernels.triton import packed, packed_linear
    from kvboost.weights.packing import Packing, Scheme
    from packed_rig import PACKINGS, packing_id

    packed_linear.processors = lambda device: 132  # type: ignore[assignment]
    packed_linear.matrix_units = lambda dtype, device: dtype is not torch.float32 and capability >= 80  # type: ignore[assignment]
    half = torch.bfloat16 if capability >= 80 else torch.float16
    awq = Packing(Scheme.ZEROS, 4, 5120, 128)
    cases = [(awq, rows, half) for rows in (1, 16, 32, 64)]
    if "--all" in sys.argv:
        cases += [(packing, rows, half) for packing in PACKINGS for rows in (1, 64)]
        cases += [(packing, 16, torch.float32) for packing in PACKINGS]
        cases += [(awq, 1, torch.float16)]
    for packing, rows, dtype in cases:
        print(f"{packing_id(packing)}, {rows} rows, {dtype}")
        weight = torch.zeros(300, packing.row_bytes, dtype=torch.uint8)
        packed_linear.packed_few_rows(torch.zeros(rows, packing.k, dtype=dtype), weight, packing)
        packed.unpack(weight, packing, torch.empty(300, packing.k, dtype=dtype))
        packed.look_up(torch.zeros(3, dtype=torch.int64), weight, packing, dtype)


def compile_experts(capability: int) -> None:
    """Mixtures of experts from one token to many; with `--all` sizes that no tile divides, and other dtypes."""
    from kvboost.kernels.triton import experts, router

    half = torch.bfloat16 if capability >= 80 else torch.float16
    cases = [((2048, 768, 8), tokens, half, half) for tokens in (1, 8, 32, 64)]
    if "--all" in sys.argv:
        cases += [((1000, 300, 3), tokens, torch.float16, torch.float16) for tokens in (1, 16)]
        cases += [((4096, 3584, 2), tokens, half, torch.float32) for tokens in (1, 200)]
        cases += [((512, 256, 2), tokens, torch.float32, torch.float32) for tokens in (1, 40, 100, 200)]
    for (hidden, inner, top), tokens, dtype, weights_in in cases:
        print(f"experts of {hidden}x{inner}, {tokens} tokens of {top} choices, {dtype}")
        index = torch.zeros(tokens, top, dtype=torch.int64)
        gate_up = torch.empty(16, 2 * inner, hidden, dtype=dtype)  # never touched: no memory is taken
        down = torch.empty(16, hidden, inner, dtype=dtype)
        x, weights = torch.zeros(tokens, hidden, dtype=dtype), torch.zeros(tokens, top, dtype=weights_in)
        experts.routed_experts(x, index, weights, gate_up, down, "silu", x)
        router.route(torch.zeros(tokens, 128, dtype=dtype), top, True, weights_in)


def main() -> None:
    capability = int(sys.argv[1])
    compile_launches(capability)
    if "--packed" in sys.argv:
        return compile_packed(capability)
    from kvboost.kernels.triton import attention, early, elementwise, greedy, rotary, rotary_tables, skinny, write
    from triton_rig import Case, build, chunk, decode

    early.starts_early = lambda device: capability >= 90  # type: ignore[assignment]
    if "--experts" in sys.argv:
        return compile_experts(capability)
    facts = attention._Facts(132, SHARED_BYTES[capability], capability // 10)
    attention._facts = lambda device: facts  # type: ignore[assignment]
    half = torch.bfloat16 if capability >= 80 else torch.float16
    qwen = {"q_heads": 28, "kv_heads": 4, "dim": 128}
    many = (*decode(20, 30), chunk(0, 40), chunk(7, 33))
    cases: list[tuple[str, Case, Any]] = [("Qwen2.5-7B, mixed", Case(many, **qwen), half)]
    cases.append(("Qwen2.5-7B, a shared prompt", Case(decode(*range(70, 90)), shared=((20, 4),), **qwen), half))
    if "--all" in sys.argv:
        gemma = {"q_heads": 16, "kv_heads": 8, "dim": 256, "window": 512, "softcap": 50.0}
        cases += [
            ("Qwen2.5-7B, speculation", Case((chunk(9, 4), chunk(20, 4)), **qwen), half),
            ("Qwen2.5-7B, 64 sequences", Case(decode(*range(70, 134)), **qwen), half),
            ("Gemma-2", Case(many, **gemma), half),
            ("gpt-oss", Case(many, q_heads=64, kv_heads=8, dim=64, window=128, sinks=True), half),
            ("DeepSeek's heads, alibi", Case(many, dim=192, dim_v=128, alibi=True), half),
            ("heads of 80, 71 on one", Case(many, q_heads=71, kv_heads=1, dim=80), half),
            ("fp32", Case(many, **qwen), torch.float32),
            ("fp32, heads of 256", Case(many, q_heads=4, dim=256), torch.float32),
        ]
    for name, case, dtype in cases:
        for splits in (1, 8):
            print(f"{name}, {splits} splits")
            inputs = build(case, dtype)
            attention.paged_attention(
                inputs.query, inputs.keys, inputs.values, inputs.batch, splits=splits, **inputs.options
            )
    print("elementwise")
    inputs = build(cases[0][1], half)
    tokens = inputs.query.shape[0]
    key, turn, slots = torch.randn(tokens, 4, 128).to(half), torch.zeros(tokens, 128, dtype=half), torch.arange(tokens)
    write.write_slots(key, key, inputs.keys, inputs.values, slots)
    rotary.rotary_write(inputs.query, key, key, turn, turn, inputs.keys, inputs.values, slots)
    for rows in (1, 200):
        x, weight = torch.randn(rows, 3584).to(half), torch.ones(3584, dtype=half)
        elementwise.rms_norm(x, weight, 1e-6)
        elementwise.add_rms_norm(x, x, weight, 1e-6, round_first=False, weight_offset=1.0)
        elementwise.rms_norm(inputs.query[:rows], weight[:128], 1e-6)
        if rows <= skinny.MAX_ROWS:
            for n in (1000, 4608):  # ragged and even
                skinny.skinny_linear(x, torch.randn(n, 3584).to(half), torch.randn(n).to(half))
    rotary_tables.rotary_tables(torch.arange(5), torch.ones(64), 1.0, half)
    for logits in (torch.zeros(1, 152064), torch.zeros(64, 152064, dtype=half), torch.zeros(2, 50257, dtype=half)):
        greedy.best_tokens(logits)
    if "--all" in sys.argv:
        compile_packed(capability)
        compile_experts(capability)
    for activation in elementwise.ACTIVATIONS:
        elementwise.act_mul(torch.randn(3, 2 * 18944).to(half), activation)


if __name__ == "__main__":
    main()
