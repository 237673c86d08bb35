"""`kvboost demo`: a real model answers faster, with the same tokens."""

from __future__ import annotations

import typer


def demo() -> None:
    """Show reuse on SmolLM2, beside Transformers: about two minutes on two cores.

    Ends with 1 when an answer of KVBoost is not Transformers' own, token for token.
    """
    from rich.console import Console

    from kvboost.models.smollm2 import find_smollm2

    find_smollm2()  # its absence is told before torch loads
    from kvboost.bench.demo import run_demo

    if not run_demo(Console()):
        raise typer.Exit(1)
