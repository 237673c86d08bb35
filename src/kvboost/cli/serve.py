"""`kvboost serve`: the OpenAI-compatible server. What it needs is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvboost.cli.options import (
    MODEL_OPTIONS,
    ModelArgument,
    dataclass_parameters,
    open_model,
    uncollected,
    with_model_options,
)
from kvboost.config import EngineConfig
from kvboost.errors import ConfigError
from kvboost.server.settings import ServerConfig

SERVER_PANEL = "Server"

MISSING = "kvboost serve needs {}. Run: pip install 'kvboost[server]'"


def read_config(context: typer.Context, path: str | None) -> str | None:
    """Make the values of a YAML file the defaults of the flags that are not given. Raises `ConfigError`."""
    if path is None:
        return None
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError("config", f"cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError("config", f"{path} must hold lines like `port: 8000`, named as the flags are.")
    named = {str(name).replace("-", "_"): value for name, value in values.items()}
    known = {p.name for p in context.command.params} - {"config"}
    for name in named:
        if name not in known:
            raise ConfigError(
                "config", f"{path} sets {name!r}, which is no option. There are: {', '.join(sorted(known))}."
            )
    lists = {p.name for p in context.command.params if getattr(p, "multiple", False)}
    context.default_map = {k: [v] if k in lists and isinstance(v, str) else v for k, v in named.items()}
    return path


@with_model_options(server_options=dataclass_parameters(ServerConfig, SERVER_PANEL))
def serve(
    model: ModelArgument,
    config: Annotated[
        str | None,
        typer.Option(
            help="YAML file with options, named as the flags are; flags come first.",
            callback=read_config,
            is_eager=True,
            show_default=False,
            metavar="FILE",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    *,
    model_options: dict[str, Any],
    server_options: dict[str, Any],
) -> None:
    """Serve a model over HTTP, as OpenAI's API: kvboost serve smollm2 --port 8000"""
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in server_options.items()}
    settings = ServerConfig(**given)
    EngineConfig.from_kwargs(**{k: v for k, v in model_options.items() if k not in MODEL_OPTIONS})
    try:
        with uncollected():
            from kvboost.server import run
    except ImportError as error:
        raise ConfigError("serve", MISSING.format(error.name or "more packages")) from error
    run.configure_logging(settings.log_level)
    run.serve(lambda: open_model(model, model_options), settings, model)
