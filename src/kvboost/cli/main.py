"""The `kvboost` command: mounts its subcommands and prints errors as one line. Imports no torch until one runs."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from kvboost import __version__
from kvboost.cli.bench import bench_app
from kvboost.cli.cache import cache
from kvboost.cli.chat import chat
from kvboost.cli.demo import demo
from kvboost.cli.info import info
from kvboost.cli.options import SectionedCommand
from kvboost.cli.quantize import quantize
from kvboost.cli.run import run
from kvboost.cli.serve import serve
from kvboost.errors import KVBoostError

app = typer.Typer(
    name="kvboost",
    help="Run Hugging Face language models; what was computed once is found again.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvboost {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Run Hugging Face language models; what was computed once is found again."""


app.command("demo", cls=SectionedCommand)(demo)
app.command("run", cls=SectionedCommand)(run)
app.command("chat", cls=SectionedCommand)(chat)
app.command("info", cls=SectionedCommand)(info)
app.command("serve", cls=SectionedCommand)(serve)
app.command("quantize", cls=SectionedCommand)(quantize)
app.command("cache", cls=SectionedCommand)(cache)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Entry point. Exit codes: 0, 1 for an error that is told in one line, 2 for wrong usage, 130 after Ctrl-C.

    With KVBOOST_DEBUG=1 errors come with their traceback.
    """
    try:
        app()
    except KVBoostError as error:
        if os.environ.get("KVBOOST_DEBUG", "0") not in ("", "0"):
            raise
        _print_error(str(error))
        sys.exit(1)


def _print_error(message: str) -> None:
    line = " ".join(f"kvboost: {message}".split())
    typer.secho(line, fg=typer.colors.RED, err=True)


if __name__ == "__main__":
    main()
