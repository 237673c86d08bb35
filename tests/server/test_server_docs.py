"""docs/server.md says what the code does: its table of flags is the one that the options make."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kvboost.server.settings import ServerConfig

DOCS = Path(__file__).parents[2] / "docs" / "server.md"
BEGIN, END = "<!-- flags: checked by tests/server/test_server_docs.py -->\n", "<!-- end of flags -->"


def flags_table() -> str:
    """Markdown; `python tests/server/test_server_docs.py` writes it into the document."""
    lines = ["| flag | default | |", "|---|---|---|"]
    for field in dataclasses.fields(ServerConfig):
        default = "" if field.default in (None, ()) else f"`{field.default}`"
        lines.append(f"| `--{field.name.replace('_', '-')}` | {default} | {field.metadata['help']} |")
    return "\n".join(lines) + "\n"


def test_the_table_of_flags_is_current() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == flags_table(), f"run python {__file__}"


if __name__ == "__main__":
    text = DOCS.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    DOCS.write_text(before + BEGIN + flags_table() + END + rest.partition(END)[2], encoding="utf-8")
