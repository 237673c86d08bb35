"""`kvboost cache`: what is kept on this machine between starts."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of it.")] = False,
    older_than_days: Annotated[
        float | None, typer.Option(min=0, help="With --clear: only what was not used for so many days.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what is kept between starts: layers of streamed models, compiled kernels. KVBOOST_CACHE_DIR says where."""
    from kvboost.cache.kept import kept, remove
    from kvboost.errors import ConfigError

    if older_than_days is not None and not clear:
        raise ConfigError("older_than_days", "only says what --clear removes. Add --clear.")
    items = kept()
    if clear:
        if older_than_days is not None:
            items = [item for item in items if item.used < time.time() - older_than_days * 86_400]
        for item in items:
            try:
                remove(item)
            except OSError as error:
                raise ConfigError("KVBOOST_CACHE_DIR", f"{item.path} could not be removed: {error.strerror}") from error
    rows: list[dict[str, Any]] = [
        {"kind": item.kind, "name": item.name, "gib": item.nbytes / 2**30, "used": item.used, "path": str(item.path)}
        for item in items
    ]
    verb = "removed" if clear else "kept"
    if as_json:
        typer.echo(json.dumps({verb: rows}, indent=2))
    elif not rows:
        typer.echo(f"Nothing {'was' if clear else 'is'} {verb}.")
    else:
        _print_table(rows, verb)


def _print_table(rows: list[dict[str, Any]], verb: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("what", "of", "GiB", "last used", "where"):
        table.add_column(title, justify="right" if title == "GiB" else "left", overflow="fold")
    for row in rows:
        day = time.strftime("%Y-%m-%d", time.localtime(row["used"]))
        table.add_row(row["kind"], row["name"], f"{row['gib']:.3f}", day, row["path"])
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{sum(row['gib'] for row in rows):.3f} GiB {verb}", markup=False)
