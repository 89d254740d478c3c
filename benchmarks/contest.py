"""Works that take turns, judged and compared, as rows of a CSV."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from aft.benchmark.gate import Verdict, judge
from aft.benchmark.machine import record
from aft.benchmark.tables import Row, csv_text, figure
from aft.benchmark.timing import interleaved, spread, spread_of_ratio
from aft.benchmark.work import PASSES, Work
from aft.training.rundir import write_whole

COLUMNS = (
    *("group", "name", "relative_to", "batch", "length", "width", "measure", "value", "unit", "low", "high"),
    *("ratio", "ratio_low", "ratio_high", "target", "met", "exact", "error", "allowed", "implementation"),
    *("note", "date", "processor", "threads", "python", "attention-free", "torch"),
)
REFERENCE_WEIGHTS = 2**25  # a reference of T = 256 at B = 2, d = 256


@dataclass(frozen=True)
class Entry:
    """A work in a contest.

    Attributes:
        relative_to: the name of the work that its time is divided by.
        by: the pass of that one; None is the same pass.
        targets: the ratio to reach, by pass.
        verdict: where somebody has judged it already.
        is_peer: whether it is reported though its results are wrong.
    """

    work: Work
    passes: Sequence[str] = PASSES
    relative_to: str | None = None
    by: str | None = None
    targets: dict[str, float] = field(default_factory=dict)
    verdict: Verdict | None = None
    is_peer: bool = False
    note: str = ""


def contest(
    group: str, shape: tuple[int, int, int], entries: Sequence[Entry], seconds: float, least: int
) -> list[Row]:
    """A row for every pass of every entry; ``shape`` is batch, length and width, for the record."""
    runs = {(entry.work.name, which): entry.work.runner(which) for entry in entries for which in entry.passes}
    taken = interleaved(runs, seconds * len(runs), least)
    rows = []
    for entry in entries:
        verdict = entry.verdict
        if verdict is None and entry.work.variant is not None:
            verdict = judge(entry.work, REFERENCE_WEIGHTS)
        for which in entry.passes:
            times = taken[entry.work.name, which]
            row = new_row(group, entry.work.name, shape, which, note=entry.note)
            row["implementation"] = entry.work.solver
            _enter(row, "value", [1e3 * t for t in times])
            row["unit"] = "ms"
            if entry.relative_to is not None:
                other = entry.by or which
                row["relative_to"] = f"{entry.relative_to}, {other}"
                _enter(row, "ratio", times, taken[entry.relative_to, other])
            if verdict is not None:
                _enter_verdict(row, verdict)
            if which in entry.targets:
                row["target"] = entry.targets[which]
                row["met"] = yes(row["ratio"] <= entry.targets[which])
            if verdict is not None and not verdict.passed and not entry.is_peer:
                refuse(row)
            rows.append(row)
            show(row)
    return rows


def new_row(group: str, name: str, shape: tuple[int, int, int], measure: str, note: str = "") -> Row:
    batch, length, width = shape
    row: Row = dict.fromkeys(COLUMNS, "")
    row |= {"group": group, "name": name, "batch": batch, "length": length, "width": width}
    return row | {"measure": measure, "note": note, "date": date.today().isoformat(), **record()}


def refuse(row: Row) -> None:
    """No figure for a wrong result."""
    row |= dict.fromkeys(("value", "low", "high", "ratio", "ratio_low", "ratio_high"), "")
    row["met"] = "no" if row["target"] != "" else ""


def _enter(row: Row, name: str, times: Sequence[float], of: Sequence[float] | None = None) -> None:
    found = spread(times) if of is None else spread_of_ratio(times, of)
    before = "" if name == "value" else f"{name}_"
    row |= {
        name: rounded(found.middle),
        f"{before}low": rounded(found.low),
        f"{before}high": rounded(found.high),
    }


def _enter_verdict(row: Row, verdict: Verdict) -> None:
    row |= {
        "exact": yes(verdict.passed),
        "error": f"{verdict.error:.1e}",
        "allowed": f"{verdict.allowed:.1e}",
    }


def rounded(value: float) -> float:
    return float(f"{value:.5g}")


def yes(holds: bool) -> str:
    return "yes" if holds else "no"


def show(row: Row) -> None:
    """A line for people to read while measuring goes on."""
    value = "refused" if row["value"] == "" else f"{figure(row['value'])} {row['unit']}"
    line = f"{row['name']:<42} {row['length']:>8} x {row['width']:<4} {row['measure']:<22} {value:>12}"
    if row["ratio"] != "":
        line += f"  {row['ratio']:8.3f}"
    if row["ratio_low"] != "":
        line += f" ({row['ratio_low']:.3f} to {row['ratio_high']:.3f})"
    if row["target"] != "":
        line += f" at most {row['target']}: {'met' if row['met'] == 'yes' else 'NOT MET'}"
    if row["exact"] != "":
        line += f"  error {row['error']}" + ("" if row["exact"] == "yes" else f", allowed {row['allowed']}")
    print(line, flush=True)


def merged(old: Iterable[Row], new: Sequence[Row]) -> list[Row]:
    """The old rows with those of the new rows' groups replaced, so that a group is always of one run."""
    groups: dict[str, list[Row]] = {}
    for row in old:
        groups.setdefault(row["group"], []).append(row)
    groups |= {row["group"]: [] for row in new}
    for row in new:
        groups[row["group"]].append(row)
    return [row for rows in groups.values() for row in rows]


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def save(path: Path, new: Sequence[Row]) -> None:
    """Merge rows into the CSV at ``path``, which is whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, csv_text(COLUMNS, merged(read_rows(path), new)).encode())
