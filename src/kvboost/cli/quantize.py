"""`kvboost quantize`: a plain model to a 4-bit AWQ checkpoint that other programs load too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kvboost.cli.options import ModelArgument, announce


def quantize(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(help="Directory to write. It appears when all is done.", show_default=False)],
    method: Annotated[
        str, typer.Option(help="awq (scales and ranges chosen on calibration text) or rtn (round to nearest, seconds).")
    ] = "awq",
    group_size: Annotated[
        int, typer.Option(help="Weights that share a scale: 128, 64 or 32. Must divide all layers.")
    ] = 128,
    calibration: Annotated[
        str | None,
        typer.Option(help="Text file like what the model will read. Default: a built-in mixture.", show_default=False),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Most pieces of 512 tokens to use of it. Default: all.", show_default=False)
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where one layer at a time is worked on: auto, cpu, cuda or cuda:N.")
    ] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is there.")] = False,
) -> None:
    """Quantise a model to 4 bits: kvboost quantize smollm2 smollm2-awq --group-size 64

    An interrupted run goes on where it stopped when it is started again. Any model that kvboost runs may be the input,
    as long as its layers are made of plain linears.
    """
    from kvboost.weights.quantize.run import Settings

    settings = Settings(method, group_size, calibration, samples)
    from kvboost.models.loading import load_plain, load_tokenizer, locate, resolve_device
    from kvboost.models.smollm2 import resolve_model
    from kvboost.weights.quantize.output import Output
    from kvboost.weights.quantize.run import quantize as run

    Output(out, overwrite)  # before the wait
    chosen = resolve_device(device)
    source = locate(resolve_model(model))
    announce(f"Loading {model} ...")
    loaded, tokenizer = load_plain(source), load_tokenizer(source)
    with _bar() as progress:
        run(loaded, tokenizer, out, settings, chosen, overwrite, progress)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    typer.echo(f"wrote {out} ({size / 1e6:,.0f} MB of weights). Try it: kvboost chat {out}")


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """Layers done, on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("layers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("layers", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
