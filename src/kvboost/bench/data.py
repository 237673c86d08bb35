"""Workloads from a folder of public data sets, which is not part of KVBoost and is never copied into it.

The folder holds JSON Lines files: MT-bench-101 dialogues, tau-bench airline trajectories, QMSum meetings, the sources of
`requests`. Only the file that a workload needs has to be there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvboost.bench import texts
from kvboost.bench.workloads import Chat, Frame, Message, PrefixWorkload, message
from kvboost.errors import ConfigError

FILES = {
    "mtbench": "chat_mtbench101_*.jsonl",
    "tau": "agent_tau_airline_*.jsonl",
    "qmsum": "longdoc_qmsum_*.jsonl",
    "requests": "code_repo_requests.jsonl",
}

MIN_TURNS = 5
"""MT-bench-101 dialogues shorter than this are left out: the bench is about late turns."""

REQUESTS_FILES_TOKENS = 3000
"""Tokens of `requests` sources in one prefix: what a coding assistant sends as context, and within 4k models."""


class DataFolder:
    """Reads the files of one folder, on demand. Raises `ConfigError` when the folder or a file is missing or damaged."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        if not self.path.is_dir():
            raise ConfigError("data", f"{self.path}: no such folder. Leave out --data to run the built-in workloads.")

    def rows(self, name: str) -> Iterator[dict[str, Any]]:
        pattern = FILES[name]
        files = sorted(self.path.glob(pattern))
        if not files:
            raise ConfigError("data", f"{self.path} holds no {pattern}, which this workload reads.")
        with files[0].open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ConfigError("data", f"{files[0]}, line {number}: not JSON ({error}).") from error

    def chats(self, name: str) -> Iterator[Chat]:
        if name.startswith("mtbench"):
            yield from self._mtbench(own=name == "mtbench-own")
        else:
            yield from self._tau_chats()

    def prefix_sets(self, name: str, frame: Frame) -> Iterator[PrefixWorkload]:
        if name == "qmsum":
            yield from self._qmsum(frame)
        elif name == "requests":
            yield from self._requests(frame)
        else:
            yield self._tau_policy(frame)

    def _mtbench(self, own: bool) -> Iterator[Chat]:
        for row in self.rows("mtbench"):
            history = row["history"]
            if len(history) >= MIN_TURNS:
                recorded = None if own else [t["bot"] for t in history]
                yield Chat(f"mtbench {row['task']} {row['id']}", [], [t["user"] for t in history], recorded)

    def _tau_chats(self) -> Iterator[Chat]:
        """Each model call of a trajectory is a turn: what came in since the last one, and what the model said."""
        for row in self.rows("tau"):
            opening, turns, recorded = [], [], []
            incoming: list[str] = []
            for m in map(_plain, row["messages"]):
                if m["role"] == "system":
                    opening.append(m)
                elif m["role"] == "user":
                    incoming.append(m["content"])
                elif incoming:
                    turns.append("\n".join(incoming))
                    recorded.append(m["content"])
                    incoming = []
            if turns:
                yield Chat(f"tau {row['task_id']}", opening, turns, recorded)

    def _tau_policy(self, frame: Frame) -> PrefixWorkload:
        """The airline's policy before the first question of each customer: one system prompt, many users."""
        rows = list(self.rows("tau"))
        policy = next(m["content"] for m in rows[0]["messages"] if m["role"] == "system")
        first = [next(m["content"] for m in row["messages"] if m["role"] == "user") for row in rows]
        prefix = frame.prefix(policy)
        return PrefixWorkload("tau", [prefix + frame.question(q) for q in first[:20]], len(prefix))

    def _qmsum(self, frame: Frame) -> Iterator[PrefixWorkload]:
        for row in self.rows("qmsum"):
            spoken = "\n".join(f"{t['speaker']}: {t['content']}" for t in row["turns"])
            prefix = frame.prefix(spoken)
            yield PrefixWorkload("qmsum", [prefix + frame.question(q["query"]) for q in row["queries"]], len(prefix))

    def _requests(self, frame: Frame) -> Iterator[PrefixWorkload]:
        prefix: list[int] = frame.prefix([])
        for row in self.rows("requests"):
            prefix += frame.encode(f"File: {row['path']}\n\n{row['text']}\n\n")
            if len(prefix) >= REQUESTS_FILES_TOKENS:
                prefix = prefix[:REQUESTS_FILES_TOKENS]
                yield PrefixWorkload(
                    "requests", [prefix + frame.question(q) for q in texts.DATA_QUESTIONS], len(prefix)
                )
                prefix = frame.prefix([])


def _plain(row: dict[str, Any]) -> Message:
    """A message without tool syntax: calls as JSON text, results as the user's words, so that any template takes them."""
    content = row.get("content") or ""
    if row.get("tool_calls"):
        content += json.dumps([c["function"] for c in row["tool_calls"]], ensure_ascii=False)
    if row["role"] == "tool":
        return message("user", f"Result of {row.get('name', 'the tool')}: {content}")
    return message(row["role"], content)
