"""Command-line options that several commands share, and how a command gets its model. Knows no torch.

Engine options are read off the fields of `EngineConfig`, so a new field is a new flag everywhere.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
import typer.core

from kvboost.config import EngineConfig

if TYPE_CHECKING:
    from kvboost.api.kvboost import KVBoost

ENGINE_PANEL = "Engine"
SAMPLING_PANEL = "Sampling (default: what the model's generation_config says)"
MODEL_PANEL = "Loading"

ModelArgument = Annotated[
    str,
    typer.Argument(help="A model directory, a .gguf file, a Hub id, or smollm2.", show_default=False),
]

SAMPLING_OPTIONS: dict[str, tuple[Any, str]] = {
    "max_tokens": (int, "Most tokens to generate."),
    "temperature": (float, "0 always takes the likeliest token."),
    "top_p": (float, "Keep the likeliest tokens up to this probability."),
    "top_k": (int, "Keep this many of the likeliest tokens; 0 keeps all."),
    "min_p": (float, "Drop tokens below this share of the likeliest one's probability."),
    "repetition_penalty": (float, "Above 1 makes tokens that occurred less likely."),
    "seed": (int, "Same seed, same tokens."),
    "stop": (list[str], "Text that ends the answer; may be given several times."),
}

MODEL_OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "dtype": (
        str,
        "auto",
        "auto (on a GPU the checkpoint's own; on a CPU bfloat16 where it is native, else float32), float32, float16 or bfloat16.",
    ),
    "device": (str, "auto", "auto, cpu, cuda or cuda:N."),
    "tokenizer": (str | None, None, "Path or Hub id of a tokenizer that is not the model's own."),
}


class SectionedCommand(typer.core.TyperCommand):
    """A command whose help shows its flags whole and under headings, however narrow the terminal."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                heading = getattr(parameter, "rich_help_panel", None) or (
                    "Arguments" if parameter.param_type_name == "argument" else "Options"
                )
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def _keyword(name: str, annotation: Any, default: Any, help_text: str, panel: str) -> inspect.Parameter:
    """One flag. Typer names it `--like-this`; a bool also gets `--no-like-this`."""
    metavar = "TEXT" if "str" in str(annotation) else None
    option = typer.Option(metavar=metavar, help=help_text, rich_help_panel=panel, show_default=default is not None)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, option]
    )


def engine_parameters() -> list[inspect.Parameter]:
    """A flag for each field of `EngineConfig`, with its default and help."""
    return dataclass_parameters(EngineConfig, ENGINE_PANEL)


def dataclass_parameters(config: type[Any], panel: str) -> list[inspect.Parameter]:
    """A flag for each field of a dataclass of options; a tuple of strings may be given several times."""
    types = get_type_hints(config)
    parameters = []
    for f in dataclasses.fields(config):
        many = types[f.name] == tuple[str, ...]
        kind, default = (list[str] | None, None) if many else (types[f.name], f.default)
        parameters.append(_keyword(f.name, kind, default, f.metadata["help"], panel))
    return parameters


def model_parameters() -> list[inspect.Parameter]:
    return [_keyword(name, kind, default, text, MODEL_PANEL) for name, (kind, default, text) in MODEL_OPTIONS.items()]


def sampling_parameters() -> list[inspect.Parameter]:
    """Flags that are passed on only when given."""
    # The engine's `seed` is where requests without one get theirs; a command with both has the request's.
    return [_keyword(name, kind | None, None, text, SAMPLING_PANEL) for name, (kind, text) in SAMPLING_OPTIONS.items()]


def with_model_options(
    *, sampling: bool = False, **more: list[inspect.Parameter]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the flags of the model and the engine, and with `sampling` those of a request.

    The command declares `model_options: dict[str, Any]` and, with `sampling`, `sampling_options: dict[str, Any]`:
    they arrive as keyword arguments for `KVBoost.from_pretrained` and `KVBoost.generate`. more: further groups of
    flags, by the name of the argument that takes those that were given.
    """
    groups = {"model_options": [*model_parameters(), *engine_parameters()], **more}
    if sampling:
        groups["sampling_options"] = sampling_parameters()
        names = {p.name for p in groups["sampling_options"]}
        groups["model_options"] = [p for p in groups["model_options"] if p.name not in names]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def run(**values: Any) -> Any:
            for group, parameters in groups.items():
                taken = {p.name: values.pop(p.name) for p in parameters}
                values[group] = {k: v for k, v in taken.items() if group == "model_options" or v not in (None, [])}
            return command(**values)

        own = inspect.signature(command, eval_str=True)
        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.parameters.values() if p.name not in groups]
        added = [p for parameters in reversed(groups.values()) for p in parameters]
        run.__signature__ = inspect.Signature([*kept, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in [*kept, *added]}
        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        return run

    return decorate


def open_model(model: str, model_options: dict[str, Any]) -> KVBoost:
    """Load `model`. On a terminal the wait is announced; a spinner would fight with the bars of downloads."""
    from kvboost.models.smollm2 import resolve_model

    path = resolve_model(model)
    EngineConfig.from_kwargs(**{k: v for k, v in model_options.items() if k not in MODEL_OPTIONS})  # before the wait
    announce(f"Loading {model} ...")
    with uncollected():
        from kvboost import KVBoost

        return KVBoost.from_pretrained(path, **model_options)


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection, and without it ever looking at what was made meanwhile.

    Imports and loading make a million objects that stay: walking them again and again is an eighth of a start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def announce(message: str) -> None:
    """One dim line on standard error, when that is a terminal."""
    if sys.stderr.isatty():
        typer.secho(message, dim=True, err=True)
