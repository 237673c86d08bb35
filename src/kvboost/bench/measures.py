"""The four measurements. Each runs every engine on the same token ids and returns rows; none prints.

Rules: the clock starts at submission and stops with the token in the caller's hands; every round uses a prompt prefix
that no engine has seen, so its first request is cold and the later ones are warmed by different requests; engines
take turns, and the one that begins changes with each round.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvboost.bench import workloads
from kvboost.bench.agreement import count_agreement
from kvboost.bench.engines.base import Answer, BenchEngine
from kvboost.bench.report import Measured, Ratio, Row, Value
from kvboost.bench.workloads import Chat, Frame, PrefixWorkload, message
from kvboost.errors import KVBoostError

if TYPE_CHECKING:
    from kvboost.bench.engines.kvboost import KVBoostEngine

SHAKE_OUT_TOKENS = 4
"""Generated once per engine before the clock runs, so that kernels, allocators and threads exist."""

POLL_S = 0.005
"""How often `memory` looks at the pool: below the time of a step."""


def in_turn(engines: Sequence[BenchEngine], number: int) -> list[BenchEngine]:
    """The engines, beginning with another one for each number."""
    start = number % len(engines)
    return [*engines[start:], *engines[:start]]


def shake_out(engines: Iterable[BenchEngine], frame: Frame) -> None:
    """Nothing of this prompt occurs in a workload, not even the chat template."""
    ids = frame.encode(
        "One two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen."
    )
    for engine in engines:
        engine.generate(ids, SHAKE_OUT_TOKENS)


def measure_ttft(engines: Sequence[BenchEngine], rounds: Iterable[PrefixWorkload], max_new_tokens: int) -> Measured:
    """Time to first token of the first request over a prefix (cold) and of the later ones (warm)."""
    found: dict[tuple[str, str], list[tuple[Answer, int]]] = {}
    answers: dict[str, list[list[int]]] = {e.name: [] for e in engines}
    name, count = "", 0
    for count, workload in enumerate(rounds, start=1):
        name = workload.name
        for engine in in_turn(engines, count - 1):
            for i, ids in enumerate(workload.requests):
                answer = engine.generate(ids, max_new_tokens)
                found.setdefault((engine.name, "warm" if i else "cold"), []).append((answer, len(ids)))
                answers[engine.name].append(answer.token_ids)
    rows = [
        Row(engine, case, _summary(runs)) for (engine, case), runs in sorted(found.items(), key=lambda item: item[0][1])
    ]
    medians = {(r.engine, r.case): float(r.values["ttft_ms"] or 0) for r in rows}
    return Measured(
        rows,
        "ttft_ms",
        _ttft_ratios(medians),
        count_agreement(answers),
        [f"{name}: {count} prefixes, medians; cold is the first request over a prefix, warm the later, different ones"],
    )


def _summary(runs: list[tuple[Answer, int]]) -> dict[str, Value]:
    ttfts = [a.ttft_ms for a, _ in runs]
    tpots = [t for a, _ in runs if (t := a.tpot_ms) is not None]
    prompt = sum(n for _, n in runs)
    known = all(a.cached_tokens is not None for a, _ in runs)
    return {
        "requests": len(runs),
        "prompt_tokens": round(prompt / len(runs)),
        "cached": sum(a.cached_tokens or 0 for a, _ in runs) / prompt if known else None,
        "ttft_ms": statistics.median(ttfts),
        "range_ms": f"{min(ttfts):,.0f}–{max(ttfts):,.0f}" if len(ttfts) > 1 else None,
        "tpot_ms": statistics.median(tpots) if tpots else None,
    }


def _ttft_ratios(medians: dict[tuple[str, str], float]) -> list[Ratio]:
    ours = medians.get(("kvboost", "warm"))
    if ours is None:
        return []
    others = sorted({engine for engine, _ in medians} - {"kvboost"})
    ratios = [Ratio(f"TTFT, {e} warm to kvboost warm", medians[e, "warm"], ours) for e in others]
    if "transformers" in others:
        ratios.insert(0, Ratio("TTFT, transformers cold to kvboost warm", medians["transformers", "cold"], ours))
    cold = medians["kvboost", "cold"]
    return ratios + [Ratio(f"TTFT, {e} cold to kvboost cold", medians[e, "cold"], cold) for e in others]


@dataclass
class _Turn:
    """What one turn cost, over all chats. seen: tokens that the engine had computed before in this chat; found: those
    of them that were cached. A first turn has seen nothing: what it finds is another chat's system prompt."""

    prompt: int = 0
    cached: int = 0
    seen: int = 0
    found: int = 0
    shares: list[float] = field(default_factory=list)
    ttfts_ms: list[float] = field(default_factory=list)
    reports_hits: bool = True


def measure_turns(
    engines: Sequence[BenchEngine], chats: Sequence[Chat], tokenizer: object, max_new_tokens: int, max_model_len: int
) -> Measured:
    """Hit rate per turn of chats sent as messages: rendered and tokenised anew each turn, as a server would."""
    turns: dict[tuple[str, int], _Turn] = {}
    answers: dict[str, list[list[int]]] = {e.name: [] for e in engines}
    for number, chat in enumerate(chats):
        for engine in in_turn(engines, number):
            answers[engine.name] += _run_chat(engine, chat, tokenizer, max_new_tokens, max_model_len, turns)
    rows = [Row(engine, f"turn {i + 1}", _turn_values(turn)) for (engine, i), turn in sorted(turns.items())]
    names = dict.fromkeys(engine for engine, _ in sorted(turns))
    rows += [Row(name, "all turns", _turn_values(_sum_turns(turns, name))) for name in names]
    kind = "recorded answers" if chats and chats[0].recorded else "each engine's own answers"
    notes = [
        f"{len(chats)} chats, {kind} as history",
        "found of seen: cached tokens by those of the previous prompt and answer",
    ]
    medians = {(r.engine, "warm"): float(r.values["ttft_ms"] or 0) for r in rows if r.case == "all turns"}
    ours = medians.get(("kvboost", "warm"))
    ratios = [
        Ratio(f"TTFT over all turns, {engine} to kvboost", value, ours)
        for (engine, _), value in medians.items()
        if ours and engine != "kvboost"
    ]
    return Measured(rows, "hit_rate", ratios, count_agreement(answers), notes)


def _run_chat(
    engine: BenchEngine,
    chat: Chat,
    tokenizer: object,
    max_new_tokens: int,
    max_model_len: int,
    turns: dict[tuple[str, int], _Turn],
) -> list[list[int]]:
    """The answers of one chat. Stops before a prompt that would not fit the model."""
    history = list(chat.opening)
    before: list[int] = []
    answers = []
    for i, user in enumerate(chat.turns):
        history.append(message("user", user))
        ids = workloads.chat_ids(tokenizer, history)
        if len(ids) + max_new_tokens > max_model_len:
            break
        answer = engine.generate(ids, max_new_tokens, ignore_eos=False)
        answers.append(answer.token_ids)
        text = answer.text if answer.text is not None else tokenizer.decode(answer.token_ids, skip_special_tokens=True)  # type: ignore[attr-defined]
        turn = turns.setdefault((engine.name, i), _Turn())
        _note_turn(turn, answer, ids, _seen(chat, before, ids))
        before = ids + answer.token_ids
        history.append(message("assistant", text if chat.recorded is None else chat.recorded[i]))
    return answers


def _seen(chat: Chat, before: list[int], ids: list[int]) -> int:
    """With its own answers as history an engine has seen all of its last prompt and answer, whatever re-tokenising does
    to them; with recorded ones, what the two prompts and its answer really have in common."""
    return len(before) if chat.recorded is None else workloads.common_prefix(before, ids)


def _note_turn(turn: _Turn, answer: Answer, ids: list[int], seen: int) -> None:
    turn.prompt += len(ids)
    turn.ttfts_ms.append(answer.ttft_ms)
    if answer.cached_tokens is None:
        turn.reports_hits = False
        return
    turn.cached += answer.cached_tokens
    if seen:
        turn.seen += seen
        turn.found += answer.cached_tokens
        turn.shares.append(answer.cached_tokens / seen)


def _turn_values(turn: _Turn) -> dict[str, Value]:
    known = turn.reports_hits
    return {
        "chats": len(turn.ttfts_ms),
        "prompt_tokens": round(turn.prompt / len(turn.ttfts_ms)),
        "hit_rate": turn.cached / turn.prompt if known else None,
        "found_of_seen": turn.found / turn.seen if known and turn.seen else None,
        "lowest": min(turn.shares) if known and turn.shares else None,
        "ttft_ms": statistics.median(turn.ttfts_ms),
    }


def _sum_turns(turns: dict[tuple[str, int], _Turn], engine: str) -> _Turn:
    total = _Turn()
    for (name, _), turn in turns.items():
        if name == engine:
            total.prompt += turn.prompt
            total.cached += turn.cached
            total.seen += turn.seen
            total.found += turn.found
            total.shares += turn.shares
            total.ttfts_ms += turn.ttfts_ms
            total.reports_hits &= turn.reports_hits
    return total


def measure_throughput(
    engines: Sequence[BenchEngine], frame: Frame, sizes: Sequence[int], max_new_tokens: int, repeat: int
) -> Measured:
    """Output tokens per second of requests submitted together, a shared beginning computed within the clock."""
    rates: dict[tuple[str, int], list[float]] = {}
    cached: dict[tuple[str, int], Value] = {}
    how: dict[str, str] = {}
    answers: dict[str, list[list[int]]] = {e.name: [] for e in engines}
    for round_number in range(repeat):
        for size in sizes:
            prompts = workloads.concurrent(frame, size, variant=round_number)
            for engine in in_turn(engines, round_number):
                batch = engine.batch(prompts, max_new_tokens)
                key = engine.name, size
                rates.setdefault(key, []).append(batch.output_tokens / batch.total_s)
                cached[key] = sum(batch.cached_tokens) / sum(map(len, prompts)) if batch.cached_tokens else None
                how[engine.name] = batch.how
                answers[engine.name] += batch.token_ids
    rows = [
        Row(
            engine,
            f"{size} requests",
            {"tokens_per_s": statistics.median(r), "runs": len(r), "cached": cached[engine, size]},
        )
        for (engine, size), r in sorted(rates.items(), key=lambda item: item[0][1])
    ]
    ratios = [
        Ratio(
            f"output tokens/s at {size}, kvboost to {engine}",
            statistics.median(rates["kvboost", size]),
            statistics.median(r),
        )
        for (engine, size), r in sorted(rates.items(), key=lambda item: item[0][1])
        if engine != "kvboost" and ("kvboost", size) in rates
    ]
    notes = [f"300 tokens of each request are shared, 20 to 80 its own, {max_new_tokens} output; EOS ignored"]
    notes += [f"{engine}: {what}" for engine, what in how.items()]
    return Measured(rows, "tokens_per_s", ratios, count_agreement(answers), notes)


def measure_memory(engine: KVBoostEngine, prompts: list[list[int]], max_new_tokens: int) -> Measured:
    """Token slots allocated and used while all prompts run at once, beside two static allocations (computed, not run)."""
    samples: list[tuple[int, int, int]] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            engine.batch(prompts, max_new_tokens)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="bench-memory")
    thread.start()
    while thread.is_alive():
        stats = engine.stats()
        samples.append((stats.num_running, stats.kv_slots_allocated, stats.kv_slots_used))
        time.sleep(POLL_S)
    thread.join()
    if failure:
        raise failure[0]
    most = max(running for running, _, _ in samples)
    full = [(allocated, used) for running, allocated, used in samples if running == most and allocated]
    if not full:
        raise KVBoostError("the run was over before its memory was looked at. Ask for more output tokens.")
    shares = [used / allocated for allocated, used in full]
    mean_used = statistics.mean(used for _, used in full)
    size = engine.slot_bytes
    ours = _slots("kvboost", f"{most} running", statistics.mean(a for a, _ in full), mean_used, size)
    ours.values.update(lowest=min(shares), samples=len(full))
    rows = [ours]
    longest = max(map(len, prompts)) + max_new_tokens
    for case, length in (("longest row", longest), ("max_model_len", engine.max_model_len)):
        rows.append(_slots("static", case, len(prompts) * length, mean_used, size))
    notes = [
        f"prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, nothing shared, {max_new_tokens} output",
        "static rows are computed: sequences times length, with the same tokens used",
    ]
    if most < len(prompts):
        notes.append(f"only {most} of {len(prompts)} ran at once: the pool or max_num_seqs is too small for more")
    allocated = [float(r.values["allocated_slots"] or 0) for r in rows]
    ratios = [
        Ratio(f"slots, static ({r.case}) to kvboost", n, allocated[0])
        for r, n in zip(rows[1:], allocated[1:], strict=True)
    ]
    return Measured(rows, "filled", ratios, {}, notes)


def _slots(engine: str, case: str, allocated: float, used: float, slot_bytes: int) -> Row:
    return Row(
        engine,
        case,
        {
            "allocated_slots": round(allocated),
            "used_slots": round(used),
            "filled": used / allocated,
            "mib": allocated * slot_bytes / 2**20,
        },
    )
