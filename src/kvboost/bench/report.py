"""What a bench found: plain data that becomes JSON, a table or a picture. Nothing here measures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvboost.bench.machine import NOISY_CORES
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

Value = float | int | str | None

PERCENT = ("hit_rate", "found_of_seen", "cached", "filled", "lowest", "same_best_token")
"""Columns that hold shares."""


@dataclass(frozen=True)
class Row:
    """One engine in one case. Names of values end in their unit."""

    engine: str
    case: str
    values: dict[str, Value]


@dataclass(frozen=True)
class Ratio:
    """`left / right`, both measured in this run."""

    what: str
    left: float
    right: float

    @property
    def value(self) -> float:
        return self.left / self.right if self.right else float("nan")


@dataclass(frozen=True)
class Measured:
    """The outcome of one measurement. main: the value that a picture shows."""

    rows: list[Row]
    main: str
    ratios: list[Ratio] = field(default_factory=list)
    agreement: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """A measurement with what is needed to judge and to repeat it."""

    bench: str
    command: str
    model: str
    dtype: str
    versions: dict[str, str]
    hardware: dict[str, str]
    limits: dict[str, str]
    measured: Measured
    seconds: float
    other_cores: float | None

    @property
    def noisy(self) -> bool:
        return self.other_cores is not None and self.other_cores > NOISY_CORES

    def as_dict(self) -> dict[str, Any]:
        plain = dataclasses.asdict(self)
        for ratio, plain_ratio in zip(self.measured.ratios, plain["measured"]["ratios"], strict=True):
            plain_ratio["value"] = ratio.value
        return {**plain, "noisy": self.noisy}


def write_json(report: Report, path: str | Path) -> None:
    Path(path).write_text(json.dumps(report.as_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def print_report(report: Report, console: Console) -> None:
    """Table, ratios, limits, and the command that repeats it."""
    from rich import box
    from rich.table import Table

    measured = report.measured
    console.print(f"\n[bold]kvboost bench {report.bench}[/bold]: {report.model}, {report.dtype}", soft_wrap=True)
    names = list(dict.fromkeys(name for row in measured.rows for name in row.values))
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("engine", no_wrap=True)
    table.add_column("case", no_wrap=True)
    for name in names:
        table.add_column(name.replace("_", "\n"), justify="right")
    for row in measured.rows:
        table.add_row(row.engine, row.case, *(show(name, row.values.get(name)) for name in names))
    console.print(table)
    lines = [f"{r.what}: {r.left:,.1f} / {r.right:,.1f} = [bold]{r.value:.2f}[/bold]" for r in measured.ratios]
    lines += [f"answers of {engine}: {same}" for engine, same in measured.agreement.items()]
    lines += [f"limit, {name}: {limit}" for name, limit in report.limits.items()]
    lines += [f"note: {note}" for note in measured.notes]
    for line in [*lines, *_environment(report)]:
        console.print(f"  {line}", highlight=False, soft_wrap=True)


def show(name: str, value: Value) -> str:
    """A cell: shares as percent, other numbers with few digits, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if name in PERCENT:
        return f"{value:.1%}"
    if name == "perplexity":
        return f"{value:.3f}"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.1f}"


def plot(report: Report, path: str | Path) -> None:
    """Bars of the main value, grouped by case. Raises `ConfigError` when matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigError("plot", "needs matplotlib. Run: pip install 'kvboost[bench]'") from error
    rows = report.measured.rows
    engines = list(dict.fromkeys(r.engine for r in rows))
    cases = list(dict.fromkeys(r.case for r in rows))
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.5 + 0.5 * len(cases) * len(engines)), 4.0))
    width = 0.8 / len(engines)
    for i, engine in enumerate(engines):
        heights = _main_values([r for r in rows if r.engine == engine], cases, report.measured.main)
        bars = axes.bar(
            [x + (i - (len(engines) - 1) / 2) * width for x in range(len(cases))], heights, width, label=engine
        )
        axes.bar_label(bars, [f"{h:,.0f}" if abs(h) >= 10 else f"{h:.2f}" for h in heights], fontsize=7)
    axes.set_xticks(range(len(cases)), cases)
    axes.set_ylabel(report.measured.main.replace("_", " "))
    axes.set_title(f"kvboost bench {report.bench}: {report.model}, {report.dtype}", fontsize=10)
    axes.legend(fontsize=8)
    figure.text(0.01, 0.01, report.hardware.get("gpu", report.hardware["cpu"]), fontsize=6)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=150)
    finally:
        pyplot.close(figure)


def _main_values(rows: Sequence[Row], cases: Sequence[str], main: str) -> list[float]:
    by_case = {r.case: r.values.get(main) for r in rows}
    return [float(v) if isinstance(v := by_case.get(case), (int, float)) else 0.0 for case in cases]


def _environment(report: Report) -> list[str]:
    if report.other_cores is None:
        others = "CPU used by other processes: not known on this system"
    else:
        others = f"CPU used by other processes: {report.other_cores:.2f} cores, over {report.seconds:.0f} s"
    if report.noisy:
        others += "\n  [yellow]The machine was not quiet: repeat this when nothing else runs.[/yellow]"
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return [versions, "; ".join(report.hardware.values()), others, report.command]
