"""The demo: three everyday workloads, three engines, one small real model, in about two minutes on two cores."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvboost.bench import texts, workloads
from kvboost.bench.agreement import Difference, find_difference
from kvboost.bench.engines import Answer, BenchEngine, ModelSource, open_engine
from kvboost.bench.machine import NOISY_CORES, OtherCpu
from kvboost.bench.measures import in_turn, shake_out
from kvboost.bench.workloads import Frame, message
from kvboost.models.smollm2 import find_smollm2

ENGINES = ("transformers", "transformers-pkv", "kvboost")
TITLES = {"transformers": "Transformers", "transformers-pkv": "with its\nown cache", "kvboost": "KVBoost"}

ANSWER_TOKENS = 16
CHAT_TOKENS = 24
"""Short answers: the demo is about the time before them, and a minute goes into decoding as it is."""

NEXT = (
    ("kvboost chat smollm2", "talk to it, see what each turn reuses"),
    ('kvboost run smollm2 "Who are you?"', "one prompt, streamed"),
    ("kvboost info MODEL", "how your own model would be served"),
    ("kvboost bench throughput", "many requests at once"),
    ("kvboost bench --help", "measure your model, with your data"),
)


@dataclass(frozen=True)
class Request:
    """One prompt, and what every engine made of it."""

    label: str
    ids: list[int]
    answers: dict[str, Answer]


@dataclass
class Part:
    """One section of the demo. intro: what the table below it shows."""

    title: str
    intro: str
    requests: list[Request] = field(default_factory=list)


def run_demo(console: Console) -> bool:
    """Prints as it goes. Returns whether all answers were equal. Raises `ModelLoadError` when SmolLM2 is missing."""
    source = ModelSource(str(find_smollm2()), dtype="float32")  # greedy tokens are comparable there
    started = time.perf_counter()
    console.print(
        "[bold]KVBoost demo.[/bold] SmolLM2-135M-Instruct answers the same prompts three times: with Transformers, with "
        "Transformers and its own cache (past_key_values kept by hand between requests, its best case), and with KVBoost. "
        "The tables show milliseconds from sending a prompt to the first token of its answer.\n"
    )
    with Console(stderr=True).status("Loading the model twice, once for Transformers and once for KVBoost ..."):
        frame = Frame(source.tokenizer)
        engines = [open_engine(name, source) for name in ENGINES]
        shake_out(engines, frame)
    try:
        with OtherCpu() as others:
            parts = [_show(part, console) for part in _parts(engines, source, frame)]
    finally:
        for engine in engines:
            engine.close()
    equal = _compare(parts, source, console)
    _finish(parts, time.perf_counter() - started, others, console)
    return equal


def _parts(engines: list[BenchEngine], source: ModelSource, frame: Frame) -> Any:
    """Each part when it is complete."""
    total = len(texts.CODING_QUESTIONS) + len(texts.CHAT_TURNS) + len(texts.RAG_REQUESTS)
    # Silent where nobody looks at a terminal; the tables go to standard output.
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), disable=not Console(stderr=True).is_terminal, transient=True,
    )  # fmt: skip
    coding, rag = workloads.coding(frame), workloads.rag(frame)
    part = Part(
        "A coding assistant",
        f"Five questions, each after the same {coding.shared_tokens:,} tokens of instructions and source code.",
    )
    with progress:
        task = progress.add_task("coding assistant", total=total)
        for i, ids in enumerate(coding.requests):
            part.requests.append(_ask(engines, ids, f"question {i + 1}", i, ANSWER_TOKENS))
            progress.advance(task)
    yield part
    with progress:
        part = Part(
            "A chat",
            "Six turns of one conversation, sent whole each time, as chat clients do.",
        )
        progress.update(task, description="chat")
        history = [message("system", texts.CHAT_SYSTEM)]
        for i, user in enumerate(texts.CHAT_TURNS):
            history.append(message("user", user))
            request = _ask(
                engines, workloads.chat_ids(source.tokenizer, history), f"turn {i + 1}", i, CHAT_TOKENS, False
            )
            part.requests.append(request)
            # One history for all, so that every engine gets the same tokens.
            answer = request.answers["transformers"].token_ids
            history.append(message("assistant", source.tokenizer.decode(answer, skip_special_tokens=True)))
            progress.advance(task)
    yield part
    with progress:
        part = Part(
            "Retrieved documents",
            "Six questions over the same four documents, in changing order: reuse is exact, so it reaches as far as the "
            "order was seen before, in any earlier question.",
        )
        progress.update(task, description="documents")
        for i, (ids, (order, _)) in enumerate(zip(rag.requests, texts.RAG_REQUESTS, strict=True)):
            label = " ".join("ABCD"[d] for d in order)
            part.requests.append(_ask(engines, ids, label, i, ANSWER_TOKENS))
            progress.advance(task)
    yield part


def _ask(
    engines: Sequence[BenchEngine], ids: list[int], label: str, number: int, tokens: int, ignore_eos: bool = True
) -> Request:
    answers = {e.name: e.generate(ids, tokens, ignore_eos) for e in in_turn(engines, number)}
    return Request(label, ids, answers)


def _show(part: Part, console: Console) -> Part:
    console.print(f"[bold]{part.title}.[/bold] {part.intro}")
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("prompt\ntokens", justify="right")
    for name in ENGINES:
        table.add_column(TITLES[name], justify="right")
    table.add_column("KVBoost\nreused", justify="right")
    table.add_column("times\nfaster", justify="right")
    for request in part.requests:
        ttfts = {name: request.answers[name].ttft_ms for name in ENGINES}
        table.add_row(request.label, f"{len(request.ids):,}", *_cells(ttfts, _reused([request])))
    later = part.requests[1:]
    medians = {name: statistics.median(r.answers[name].ttft_ms for r in later) for name in ENGINES}
    table.add_section()
    table.add_row("from the 2nd on", "median", *_cells(medians, _reused(later)), style="bold")
    console.print(table)
    return part


def _cells(ttfts_ms: dict[str, float], reused: float) -> list[str]:
    """The last one compares KVBoost with Transformers without reuse."""
    times = ttfts_ms["transformers"] / ttfts_ms["kvboost"]
    return [*(f"{ttfts_ms[name]:,.0f}" for name in ENGINES), f"{reused:.0%}", f"{times:.1f}"]


def _reused(requests: Sequence[Request]) -> float:
    """Share of the prompt tokens that KVBoost found."""
    cached = sum(r.answers["kvboost"].cached_tokens or 0 for r in requests)
    return cached / sum(len(r.ids) for r in requests)


def _compare(parts: list[Part], source: ModelSource, console: Console) -> bool:
    """Every answer against Transformers without reuse, token by token."""
    requests = [(part, request) for part in parts for request in part.requests]
    console.print(
        f"[bold]Same answers?[/bold] All {len(requests)} answers, token by token, against Transformers without reuse."
    )
    all_equal = True
    for name in ENGINES[1:]:
        differences = []
        for part, request in requests:
            expected, got = request.answers["transformers"].token_ids, request.answers[name].token_ids
            difference = find_difference(source.model, request.ids, expected, got)
            if difference is not None:
                differences.append(f"  {part.title}, {request.label}: {_describe(difference, source.tokenizer)}")
        title = " ".join(TITLES[name].split())
        console.print(f"  {title}: {len(requests) - len(differences)} of {len(requests)} equal")
        for line in differences:
            console.print(line, highlight=False)
        all_equal &= not (differences and name == "kvboost")
    console.print()
    return all_equal


def _describe(difference: Difference, tokenizer: Any) -> str:
    words = [repr(tokenizer.decode([t])) if t >= 0 else "the end" for t in (difference.expected, difference.got)]
    verdict = "a tie within rounding" if difference.is_tie else "more than rounding"
    return (
        f"token {difference.position + 1} is {words[1]} (logit {difference.got_logit:.6f}) instead of {words[0]} "
        f"({difference.expected_logit:.6f}); rounding is {difference.rounding:.1e}: {verdict}"
    )


def _finish(parts: list[Part], seconds: float, others: OtherCpu, console: Console) -> None:
    requests = [r for part in parts for r in part.requests]
    prompt = sum(len(r.ids) for r in requests)
    console.print(f"KVBoost found {_reused(requests):.0%} of all {prompt:,} prompt tokens instead of computing them.")
    console.print(f"The demo took {seconds:.0f} s.")
    if others.cores is not None and others.cores > NOISY_CORES:
        console.print(
            f"[yellow]Other programs used {others.cores:.1f} cores meanwhile, so the times are too high.[/yellow]"
        )
    console.print("\n[bold]What to try next[/bold]")
    table = Table(box=None, show_header=False, padding=(0, 2))
    for command, what in NEXT:
        table.add_row(command, what)
    console.print(table)
