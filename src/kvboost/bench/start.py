"""`python -m kvboost.bench.start`: from the start of a process to the first token, weights on a local drive.

A model of a real shape with random bf16 weights is written once to a folder (Qwen2.5-7B: 15 GB) and started several
times, each in a process of its own. The first start also compiles kernels and fills the page cache; the second is what
a restarted server takes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from kvboost.bench.shapes import SHAPES

PROMPT_TOKENS = 64


def write_model(shape: str, folder: Path) -> None:
    """Random weights, as `save_pretrained` writes them; nothing when the folder holds a model."""
    if (folder / "config.json").is_file():
        return
    import torch

    from kvboost.bench.gpu import build

    build(shape, device="cuda" if torch.cuda.is_available() else "cpu").save_pretrained(folder)


def start(folder: Path, began: float) -> dict[str, Any]:
    """Load, build and answer in this process; seconds since `began` (`time.time()` of its parent) at each stage."""
    import torch

    from kvboost import KVBoost
    from kvboost.models.loading import load_model, locate, resolve_device

    told = {"imported_s": time.time() - began}
    device = resolve_device("auto")
    model = load_model(locate(folder), "auto", device)  # there is no tokenizer beside random weights
    told["loaded_s"] = time.time() - began
    with KVBoost.from_model(model, max_model_len=8192) as kv:
        told["built_s"] = time.time() - began
        kv.generate(list(range(10, 10 + PROMPT_TOKENS)), max_new_tokens=1, temperature=0, ignore_eos=True)
        told["first_token_s"] = time.time() - began
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return {**told, "device": name, "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-7b")
    parser.add_argument("--folder", type=Path, required=True, help="where the model is, or is to be written")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(start(options.folder, options.child)))
        return
    write_model(options.shape, options.folder)
    rows = []
    for number in range(options.starts):
        command = [
            sys.executable,
            "-m",
            "kvboost.bench.start",
            "--folder",
            str(options.folder),
            "--child",
            str(time.time()),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(
            f"start {number + 1}:",
            ", ".join(f"{k} {v:.1f}" for k, v in rows[-1].items() if isinstance(v, float)),
            flush=True,
        )
    if options.json:
        report = {"shape": options.shape, "weights": "random bf16", "date": date.today().isoformat(),
                  "command": "python -m kvboost.bench.start " + " ".join(sys.argv[1:]), "starts": rows}  # fmt: skip
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
