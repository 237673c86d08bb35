"""`kvboost info`: how a model would be run, and why."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer

from kvboost.cli.options import ModelArgument, announce
from kvboost.config import EngineConfig

SPELLED = {"kv": "KV", "gib": "GiB"}


def info(
    model: ModelArgument,
    load: Annotated[
        bool,
        typer.Option(
            "--load/--no-load",
            help="Load the weights and try the model's attention. Without, only its config is read.",
        ),
    ] = True,
    weights_budget_gib: Annotated[
        float | None,
        typer.Option(help="Plan streaming with this much RAM for weights, as --weights-budget-gib of serve."),
    ] = None,
    vram_budget_gib: Annotated[
        float | None, typer.Option(help="Plan streaming with this much GPU memory, as --vram-budget-gib of serve.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show which path serves a model, why, and what its KV costs. With a budget: which of its layers would be streamed."""
    from kvboost.models.smollm2 import resolve_model

    path = resolve_model(model)
    announce(f"Looking at {model} ...")
    from kvboost.models.info import describe_model

    config = EngineConfig(weights_budget_gib=weights_budget_gib, vram_budget_gib=vram_budget_gib)
    budget = weights_budget_gib is not None or vram_budget_gib is not None
    facts = dataclasses.asdict(describe_model(path, load=load and not budget))
    if budget:
        from kvboost.weights.streaming import describe_streaming

        facts["streaming"] = describe_streaming(path, config)
    if as_json:
        typer.echo(json.dumps(facts, indent=2, default=str))
    else:
        _print_table(facts)


def _print_table(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value is not None:
            table.add_row(_label(name), _readable(value))
    Console().print(table)


def _label(name: str) -> str:
    """A field's name as words: `kv_gib_at_max_length` reads `KV GiB at max length`."""
    return " ".join(SPELLED.get(word, word) for word in name.split("_"))


def _readable(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_readable, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_readable(item)}" for key, item in value.items())
    return str(value)
