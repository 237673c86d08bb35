"""From the options of a bench command to a report: opens the engines, measures, closes them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvboost.bench import limits as bounds
from kvboost.bench import machine, measures, workloads
from kvboost.bench.data import DataFolder
from kvboost.bench.engines import BenchEngine, ModelSource, open_engine
from kvboost.bench.engines.kvboost import KVBoostEngine
from kvboost.bench.report import Measured, Report
from kvboost.bench.workloads import Frame
from kvboost.errors import ConfigError
from kvboost.models.smollm2 import resolve_model

TTFT_OUTPUT_TOKENS = 8
"""Enough to state a time per token; the bench is about the first one."""


@dataclass(frozen=True)
class Setup:
    """What the four benches have in common. model_options: for `KVBoost.from_pretrained`, dtype and device among them."""

    model: str
    engines: tuple[str, ...]
    data: str | None = None
    repeat: int = 3
    model_options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Session:
    """Engines that are open, and what they share."""

    engines: list[BenchEngine]
    source: ModelSource
    frame: Frame
    data: DataFolder | None

    @property
    def max_model_len(self) -> int:
        """Of KVBoost when it is measured, else what the model's config says."""
        for engine in self.engines:
            if isinstance(engine, KVBoostEngine):
                return engine.max_model_len
        return int(getattr(self.source.config, "max_position_embeddings", 2048))

    @property
    def local_model(self) -> Any:
        """Some instance of the model in this process; None when only endpoints are measured."""
        ours = next((e.model for e in self.engines if isinstance(e, KVBoostEngine)), None)
        if ours is None and not all(e.name.startswith("http") for e in self.engines):
            return self.source.model
        return ours


def ttft(setup: Setup, workload: str) -> Report:
    def measure(session: Session) -> Measured:
        rounds = workloads.prefix_workloads(workload, session.frame, session.data, setup.repeat)
        return measures.measure_ttft(session.engines, rounds, TTFT_OUTPUT_TOKENS)

    def limit(cost: bounds.ModelCost, found: machine.Limits) -> dict[str, str]:
        if workload != "coding":
            return {"hardware": bounds.describe(found)}
        return {"TTFT cold": cost.prefill_text(found, 1050), "TTFT warm": cost.prefill_text(found, 50)}

    return _run("ttft", setup, measure, limit)


def turns(setup: Setup, workload: str, chats: int, max_new_tokens: int) -> Report:
    def measure(session: Session) -> Measured:
        chosen = workloads.chats(workload, session.data, chats)
        return measures.measure_turns(
            session.engines, chosen, session.source.tokenizer, max_new_tokens, session.max_model_len
        )

    def limit(cost: bounds.ModelCost, found: machine.Limits) -> dict[str, str]:
        return {"hardware": bounds.describe(found)}

    return _run("turns", setup, measure, limit)


def throughput(setup: Setup, sizes: Sequence[int], max_new_tokens: int) -> Report:
    def measure(session: Session) -> Measured:
        return measures.measure_throughput(session.engines, session.frame, sizes, max_new_tokens, setup.repeat)

    def limit(cost: bounds.ModelCost, found: machine.Limits) -> dict[str, str]:
        return {f"{n} requests": cost.batch_text(found, n, 300 + n * 50, max_new_tokens) for n in sizes}

    return _run("throughput", setup, measure, limit)


def memory(setup: Setup, sequences: int, shortest: int, longest: int, max_new_tokens: int) -> Report:
    def measure(session: Session) -> Measured:
        engine = session.engines[0]
        if not isinstance(engine, KVBoostEngine):
            raise ConfigError("engines", "memory reads KVBoost's own counters; run it with --engines kvboost.")
        prompts = workloads.mixed_lengths(session.frame, sequences, shortest, longest)
        return measures.measure_memory(engine, prompts, max_new_tokens)

    def limit(cost: bounds.ModelCost, found: machine.Limits) -> dict[str, str]:
        block = setup.model_options.get("block_size", 16)
        return {"waste": f"less than one block of {block} slots per sequence"}

    return _run("memory", setup, measure, limit)


def _run(
    bench: str,
    setup: Setup,
    measure: Callable[[Session], Measured],
    limit: Callable[[bounds.ModelCost, machine.Limits], dict[str, str]],
) -> Report:
    data = None if setup.data is None else DataFolder(setup.data)
    source = ModelSource(resolve_model(setup.model), **setup.model_options)
    if source.tokenizer is None:
        raise ConfigError("model", f"{setup.model} has no tokenizer, and the workloads are texts.")
    with _open(setup.engines, source) as engines:
        session = Session(engines, source, Frame(source.tokenizer), data)
        model = session.local_model
        limits = (
            {}
            if model is None
            else limit(bounds.ModelCost.of(model), machine.measure_limits(model.device, model.dtype))
        )
        measures.shake_out(engines, session.frame)
        with machine.OtherCpu() as others:
            measured = measure(session)
        return Report(
            bench=bench,
            command=command_line(),
            model=setup.model,
            dtype="the endpoint's dtype" if model is None else str(model.dtype).removeprefix("torch."),
            versions=machine.versions(),
            hardware=machine.hardware(source.device),
            limits=limits,
            measured=measured,
            seconds=others.seconds,
            other_cores=others.cores,
        )


@contextmanager
def _open(names: Sequence[str], source: ModelSource) -> Iterator[list[BenchEngine]]:
    """All engines at once, so that they can take turns; closed in any case."""
    if not names:
        raise ConfigError("engines", "the list is empty; name at least one engine.")
    engines: list[BenchEngine] = []
    try:
        for name in names:
            engines.append(open_engine(name, source))
        yield engines
    finally:
        for engine in engines:
            engine.close()


def command_line() -> str:
    """The command that was given, to be repeated."""
    return shlex.join(["kvboost", *sys.argv[1:]])
