"""What the benches run: token ids that every engine gets alike. Built from texts.py, or from a data folder.

The tokenizer is the model's own; a model without a chat template gets plain text with blank lines between the parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost.bench import texts
from kvboost.errors import ConfigError

Message = dict[str, str]


@dataclass(frozen=True)
class PrefixWorkload:
    """Requests that share a beginning. The first one is cold; each later one is warmed by different requests only.

    shared_tokens: length of the beginning that all requests have in common.
    """

    name: str
    requests: list[list[int]]
    shared_tokens: int


@dataclass(frozen=True)
class Chat:
    """A conversation, sent as messages. recorded: the answers to put into the history, or None for the engine's own."""

    name: str
    opening: list[Message]
    turns: list[str]
    recorded: list[str] | None = None


class Frame:
    """Where a chat template puts the system text and the question: token ids before, between and after them.

    Joining ids part by part gives exact lengths, and a shared beginning that is shared to the last token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        before, between, after = "", "\n\n", "\n\n"
        if getattr(tokenizer, "chat_template", None):
            slots = ["\u2402system\u2403", "\u2402user\u2403"]
            try:
                rendered = render(tokenizer, [message("system", slots[0]), message("user", slots[1])])
                before, rest = rendered.split(slots[0])
                between, after = rest.split(slots[1])
            except Exception:  # a template without system messages: both parts go into the user's message
                rendered = render(tokenizer, [message("user", slots[1])])
                before, after = rendered.split(slots[1])
        self.before, self.between, self.after = (self.encode(part) for part in (before, between, after))

    def encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text) if text else []

    def prefix(self, system: str | list[int]) -> list[int]:
        return self.before + (self.encode(system) if isinstance(system, str) else system)

    def question(self, text: str | list[int]) -> list[int]:
        return self.between + (self.encode(text) if isinstance(text, str) else text) + self.after

    def exact_prefix(self, text: str, tokens: int) -> list[int]:
        """A beginning of exactly `tokens` ids: the text is cut, or goes round again."""
        return self.prefix(_cut(self.encode(text), tokens - len(self.before)))

    def exact_question(self, text: str, tokens: int) -> list[int]:
        return self.question(_cut(self.encode(text), tokens - len(self.between) - len(self.after)))


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def render(tokenizer: Any, messages: Sequence[Message]) -> str:
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))


def chat_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """A conversation as a server would tokenise it: rendered whole, then encoded whole."""
    if getattr(tokenizer, "chat_template", None):
        return encode(tokenizer, render(tokenizer, messages))
    return encode(tokenizer, "".join(f"{m['role']}: {m['content']}\n\n" for m in messages) + "assistant:")


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading ids that are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def coding(frame: Frame, variant: int = 0, exact: tuple[int, int] | None = None) -> PrefixWorkload:
    """The coding assistant's five questions. variant: another repository state, so that it starts cold.

    exact: (shared, own) tokens of every request, for measurements that name their lengths.
    """
    system = texts.CODING_SYSTEM
    if variant:
        system = f"Repository state number {variant}.\n\n{system}"
    if exact is None:
        prefix = frame.prefix(system)
        questions = [frame.question(q) for q in texts.CODING_QUESTIONS]
    else:
        prefix = frame.exact_prefix(system, exact[0])
        questions = [frame.exact_question(q, exact[1]) for q in texts.CODING_QUESTIONS]
    return _with_prefix("coding", prefix, questions)


def rag(frame: Frame, variant: int = 0) -> PrefixWorkload:
    """Four documents in changing order before six questions."""
    start = frame.prefix((f"Collection {variant}. " if variant else "") + texts.RAG_SYSTEM + "\n\n")
    documents = [frame.encode(text + "\n\n") for text in texts.RAG_DOCUMENTS]
    requests = [
        start + [i for d in order for i in documents[d]] + frame.question(question)
        for order, question in texts.RAG_REQUESTS
    ]
    return PrefixWorkload("rag", requests, _shared(requests))


def chat() -> Chat:
    """Six turns about a balcony."""
    return Chat("chat", [message("system", texts.CHAT_SYSTEM)], list(texts.CHAT_TURNS))


def concurrent(frame: Frame, count: int, variant: int = 0, shared: int = 300) -> list[list[int]]:
    """`count` requests with `shared` tokens in common and 20 to 80 of their own, for one batch."""
    prefix = frame.exact_prefix(f"House number {count}-{variant}. {texts.CONCURRENT_SYSTEM}", shared)
    return [prefix + _own(frame, i, 20 + i * 37 % 61) for i in range(count)]


def mixed_lengths(frame: Frame, count: int, shortest: int, longest: int) -> list[list[int]]:
    """`count` requests with nothing in common, of lengths spread evenly over [shortest, longest] in mixed order."""
    requests = []
    for i in range(count):
        length = shortest + (longest - shortest) * (i * 29 % count) // max(1, count - 1)
        text = f"Visitor {i} of {count} wrote: " + _remark(i) + " " + texts.CONCURRENT_SYSTEM
        requests.append(_cut(frame.encode(text), length))
    return requests


def prefix_workloads(name: str, frame: Frame, data: Any, limit: int) -> Iterator[PrefixWorkload]:
    """Workloads of one name, each starting cold. data: a `DataFolder` or None. Raises `ConfigError`."""
    if name == "coding":
        yield from (coding(frame, variant, exact=(1000, 50)) for variant in range(1, limit + 1))
    elif name == "rag":
        yield from (rag(frame, variant) for variant in range(1, limit + 1))
    else:
        yield from itertools.islice(_of_folder(data, name, PREFIX_SETS).prefix_sets(name, frame), limit)


def chats(name: str, data: Any, limit: int) -> list[Chat]:
    """Conversations of one name. Raises `ConfigError`."""
    if name == "chat":
        return [chat()]
    return list(itertools.islice(_of_folder(data, name, CHAT_SETS).chats(name), limit))


PREFIX_SETS = ("coding", "rag", "qmsum", "requests", "tau")
CHAT_SETS = ("chat", "mtbench-own", "mtbench-recorded", "tau-recorded")


def _of_folder(data: Any, name: str, known: tuple[str, ...]) -> Any:
    if name not in known:
        raise ConfigError("workload", f"got {name!r}; this bench has: {', '.join(known)}.")
    if data is None:
        raise ConfigError(
            "data", f"workload {name} reads files that are not part of KVBoost. Give their folder: --data DIR"
        )
    return data


def _with_prefix(name: str, prefix: list[int], questions: list[list[int]]) -> PrefixWorkload:
    requests = [prefix + q for q in questions]
    return PrefixWorkload(name, requests, len(prefix))


def _shared(requests: list[list[int]]) -> int:
    return min(common_prefix(requests[0], r) for r in requests[1:])


def _remark(number: int) -> str:
    return texts.CONCURRENT_REMARKS[number % len(texts.CONCURRENT_REMARKS)]


def _own(frame: Frame, number: int, tokens: int) -> list[int]:
    """At least four tokens of text, also where the chat template alone needs more than the shortest request."""
    tokens = max(tokens, len(frame.between) + len(frame.after) + 4)
    return frame.exact_question(f"Card {number + 1}: {_remark(number)}", tokens)


def _cut(ids: list[int], tokens: int) -> list[int]:
    """The first `tokens` ids, going round when there are fewer."""
    if tokens < 1:
        raise ValueError(f"no room for text: {tokens} tokens are left beside the chat template's own")
    return list(itertools.islice(itertools.cycle(ids), tokens))
