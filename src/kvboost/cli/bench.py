"""`kvboost bench`: engines side by side, on the same token ids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvboost.cli.options import with_model_options
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from kvboost.bench.report import Report
    from kvboost.bench.runs import Setup

bench_app = typer.Typer(
    help="Measure engines side by side: ttft, turns, throughput, memory; and models: perplexity.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Option(help="A model directory, a .gguf file, a Hub id, or smollm2.")]
Engines = Annotated[
    str,
    typer.Option(
        help="Comma-separated: kvboost, transformers, transformers-pkv (its past_key_values kept by hand), "
        "transformers-static, transformers-cb, or the URL of an OpenAI endpoint (http://host:port/v1@model)."
    ),
]
Data = Annotated[
    str | None, typer.Option(help="Folder of public data sets, for the workloads that read them.", show_default=False)
]
Json = Annotated[
    Path | None, typer.Option("--json", help="Write everything that was found to this file.", show_default=False)
]
Plot = Annotated[Path | None, typer.Option(help="Draw the main figures into this PNG.", show_default=False)]
Repeat = Annotated[int, typer.Option(min=1, help="Rounds, each over a prefix that no engine has seen.")]


@bench_app.command()
@with_model_options()
def ttft(
    model: Model = "smollm2",
    engines: Engines = "kvboost,transformers,transformers-pkv",
    workload: Annotated[
        str, typer.Option(help="coding (1,000 shared tokens and 50 own), rag; with --data: qmsum, requests, tau.")
    ] = "coding",
    data: Data = None,
    json: Json = None,
    plot: Plot = None,
    repeat: Repeat = 3,
    *,
    model_options: dict[str, Any],
) -> None:
    """Time to first token: cold, and warm after different requests over the same prefix."""
    from kvboost.bench import runs

    _show(runs.ttft(_setup(model, engines, data, repeat, model_options), workload), json, plot)


@bench_app.command()
@with_model_options()
def turns(
    model: Model = "smollm2",
    engines: Engines = "kvboost,transformers-pkv",
    workload: Annotated[
        str,
        typer.Option(
            help="chat; with --data: mtbench-own, mtbench-recorded (whose answers are the history), tau-recorded."
        ),
    ] = "chat",
    chats: Annotated[int, typer.Option(min=1, help="Conversations to run.")] = 10,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    data: Data = None,
    json: Json = None,
    plot: Plot = None,
    *,
    model_options: dict[str, Any],
) -> None:
    """Hit rate turn by turn, in chats that are sent as messages."""
    from kvboost.bench import runs

    _show(runs.turns(_setup(model, engines, data, 1, model_options), workload, chats, max_tokens), json, plot)


@bench_app.command()
@with_model_options()
def throughput(
    model: Model = "smollm2",
    engines: Engines = "kvboost,transformers,transformers-pkv,transformers-static",
    concurrency: Annotated[str, typer.Option(help="Requests at once, comma-separated.")] = "16,64",
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of each request.")] = 64,
    data: Data = None,
    json: Json = None,
    plot: Plot = None,
    repeat: Repeat = 1,
    *,
    model_options: dict[str, Any],
) -> None:
    """Output tokens per second of concurrent requests with a shared beginning."""
    from kvboost.bench import runs

    setup = _setup(model, engines, data, repeat, model_options)
    _show(runs.throughput(setup, _sizes(concurrency), max_tokens), json, plot)


@bench_app.command()
@with_model_options()
def memory(
    model: Model = "smollm2",
    sequences: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 64,
    shortest: Annotated[int, typer.Option(min=16, help="Shortest prompt, in tokens.")] = 40,
    longest: Annotated[int, typer.Option(min=16, help="Longest prompt, in tokens.")] = 600,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of each sequence.")] = 96,
    json: Json = None,
    plot: Plot = None,
    *,
    model_options: dict[str, Any],
) -> None:
    """KV slots allocated and used, beside static allocation."""
    from kvboost.bench import runs

    if longest < shortest:
        raise ConfigError("longest", f"got {longest}, below shortest={shortest}.")
    setup = _setup(model, "kvboost", None, 1, model_options)
    _show(runs.memory(setup, sequences, shortest, longest, max_tokens), json, plot)


@bench_app.command()
@with_model_options()
def perplexity(
    models: Annotated[
        list[str],
        typer.Argument(help="Models to compare; @int4 behind one (or @int8, @dense) says how its weights are held."),
    ],
    text: Annotated[
        str, typer.Option(help="A UTF-8 text file, such as the test part of WikiText-2.", show_default=False)
    ],
    tokens: Annotated[int, typer.Option(min=2, help="How many of its tokens, at most.")] = 30_000,
    window: Annotated[int, typer.Option(min=16, help="Tokens of a window; half of them are context.")] = 1024,
    json: Json = None,
    plot: Plot = None,
    *,
    model_options: dict[str, Any],
) -> None:
    """How well models predict a text, and how often they agree with the first: what quantising has cost."""
    from kvboost.bench.perplexity import perplexity as measure

    _show(measure(models, text, tokens, window, model_options), json, plot)


def _setup(model: str, engines: str, data: str | None, repeat: int, model_options: dict[str, Any]) -> Setup:
    from kvboost.bench.runs import Setup

    names = tuple(dict.fromkeys(name.strip() for name in engines.split(",") if name.strip()))
    return Setup(model, names, data, repeat, model_options)


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ConfigError("concurrency", f"got {text!r}; give whole numbers from 1, such as 16,64.")
    return sizes


def _show(report: Report, json: Path | None, plot: Path | None) -> None:
    from rich.console import Console

    from kvboost.bench import report as reports

    reports.print_report(report, Console())
    # JSON first: a missing matplotlib must not lose the numbers.
    if json is not None:
        reports.write_json(report, json)
        typer.echo(f"  wrote {json}")
    if plot is not None:
        reports.plot(report, plot)
        typer.echo(f"  wrote {plot}")
