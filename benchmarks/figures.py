"""Figures and tables of docs/benchmarks.md from the CSVs in benchmarks/results.

    python benchmarks/figures.py

Takes the newest ops_*.csv and decode_*.csv by the date in their names, draws docs/figures/*.svg, and writes
the tables of the page between its `<!-- begin NAME -->` and `<!-- end NAME -->` lines. The same CSVs give the
same bytes.
"""

import argparse
import io
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import matplotlib
from contest import read_rows
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from aft.benchmark.tables import Row, figure, markdown
from aft.benchmark.work import BOTH, FORWARD
from aft.training.rundir import write_whole

MEMORY = "peak memory"
COLOURS = {
    "AFT-simple": "#0072b2",
    "AFT-local": "#009e73",
    "AFT-conv": "#56b4e9",
    "AFT-full, low rank": "#e69f00",
    "AFT-full": "#d55e00",
    "dot product": "#000000",
    "attention by its weights": "#999999",
}
MARKS = dict(zip(COLOURS, "osv^DxP", strict=True))
MET, MISSED = "#009e73", "#d55e00"
TABLE_1 = {  # the paper's, time and space
    "AFT-simple": ("T d", "T d"),
    "AFT-local": ("T s d", "T d"),
    "AFT-conv": ("T s d", "T d"),
    "AFT-full": ("T² d", "T d"),
    "dot product": ("T² d", "T² + T d"),
    "attention by its weights": ("T² d", "T² + T d"),
}
DECODERS = {  # of decode_*.csv: what it is called here, and whose colour it has
    ("simple", "stream"): ("AFT-simple", "AFT-simple"),
    ("local-32", "stream"): ("AFT-local, window 32", "AFT-local"),
    ("conv-32", "stream"): ("AFT-conv, kernel 32", "AFT-conv"),
    ("full", "stream"): ("AFT-full, rank 32", "AFT-full, low rank"),
    ("gpt2", "generate"): ("GPT-2 with its KV cache", "dot product"),
}


def newest(results: Path, name: str) -> list[Row]:
    """The rows of the CSV of that name with the latest date."""
    found = sorted(results.glob(f"{name}_*.csv"), key=lambda path: path.stem.rpartition("_")[2])
    if not found:
        raise SystemExit(f"{results} has no {name}_*.csv; benchmarks/{name}.py --csv writes one")
    return read_rows(found[-1])


def of_group(rows: Iterable[Row], group: str) -> list[Row]:
    return [row for row in rows if row["group"] == group]


def svg(drawn: Figure) -> bytes:
    file = io.BytesIO()
    # Text as text: a fifth of the size, and a browser's own fonts are narrower than the one that is laid out.
    with matplotlib.rc_context({"svg.hashsalt": "attention-free", "svg.fonttype": "none"}):
        drawn.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def ratios(rows: Sequence[Row]) -> Figure:
    """A bar for each target: how much of what is allowed was taken."""
    chosen = [row for row in rows if row["target"]]
    drawn = Figure(figsize=(8.5, 0.27 * len(chosen) + 1.1), layout="constrained")
    axes = drawn.subplots()
    for place, row in enumerate(chosen):
        taken = float(row["ratio"]) / float(row["target"]) if row["ratio"] else 1.0
        # From what is just met, to the left where there is room left.
        axes.barh(place, taken - 1, left=1, color=MET if row["met"] == "yes" else MISSED, height=0.7)
        says = f"{figure(float(row['ratio']))} of {row['target']}" if row["ratio"] else "refused: wrong"
        axes.annotate(
            says, (max(taken, 1), place), (5, 0), textcoords="offset points", va="center", fontsize=8
        )
    labels = [f"{_subject(row)}, T = {int(row['length']):,}, {_short(row['measure'])}" for row in chosen]
    axes.set_yticks(range(len(chosen)), labels, fontsize=8)
    axes.set_ylim(len(chosen) - 0.5, -0.5)
    axes.axvline(1, color="black", lw=1)
    axes.set_xscale("log")
    _plain(axes.xaxis, (1, 2, 5))
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.5), max(high, 1.5) * 2)
    axes.set_xlabel("ratio, divided by the largest that is aimed at (left of 1: met)")
    _bare(axes)
    return drawn


def growth(rows: Sequence[Row], measure: str, label: str) -> Figure:
    """A measure against length and against width, with the fitted exponents in the legend."""
    points = [row for row in of_group(rows, "scaling") if row["measure"] == measure]
    exponents = {
        (row["name"], row["unit"]): float(row["value"])
        for row in of_group(rows, "scaling")
        if row["measure"] == f"exponent of {measure}"
    }
    drawn = Figure(figsize=(10, 5.2), layout="constrained")
    for axes, varied, letter in zip(drawn.subplots(1, 2), ("length", "width"), "Td", strict=True):
        chosen = [row for row in points if row["note"] == f"varied: {varied}" and float(row["value"]) > 0]
        for name in sorted(
            {row["name"] for row in chosen}, key=lambda name: list(COLOURS).index(_family(name))
        ):
            own = [row for row in chosen if row["name"] == name]
            e = exponents.get((name, f"power of {varied}"))
            fitted = "" if e is None else f": {letter}^{e:.2f}"
            axes.plot(
                [int(row[varied]) for row in own],
                [float(row["value"]) for row in own],
                marker=MARKS[_family(name)],
                ms=5,
                lw=1.4,
                color=COLOURS[_family(name)],
                label=name + fitted,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sorted({int(row[varied]) for row in chosen}))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        _plain(axes.yaxis, (1, 2, 5) if measure == BOTH else (1,))
        axes.set_xlabel("T, positions" if varied == "length" else "d, channels")
        fixed = {row["width" if varied == "length" else "length"] for row in chosen}
        axes.set_title(
            " ".join(f"{'d' if varied == 'length' else 'T'} = {int(x):,}" for x in fixed), fontsize=10
        )
        axes.grid(alpha=0.25)
        _bare(axes)
        # Below the panel, where no line can run through it.
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), fontsize=8, frameon=False)
    drawn.axes[0].set_ylabel(label)
    return drawn


def peers(rows: Sequence[Row]) -> Figure:
    """Milliseconds of forward and backward, a panel for each length; hatched where results are wrong."""
    chosen = [row for row in of_group(rows, "peers") if row["measure"] == BOTH and row["value"]]
    lengths = sorted({int(row["length"]) for row in chosen})
    names = list(dict.fromkeys(row["name"] for row in chosen))
    drawn = Figure(figsize=(10, 0.29 * len(names) + 1.3), layout="constrained")
    panels = drawn.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    for axes, length in zip(panels, lengths, strict=True):
        for row in (row for row in chosen if int(row["length"]) == length):
            place, value = names.index(row["name"]), float(row["value"])
            wrong = row["exact"] == "no"
            axes.barh(
                place,
                value,
                height=0.7,
                color="white" if wrong else _peer_colour(row["name"]),
                edgecolor=_peer_colour(row["name"]),
                hatch="////" if wrong else None,
            )
            axes.annotate(
                figure(value), (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8
            )
        axes.set_xscale("log")
        _plain(axes.xaxis, (1,))
        low, high = axes.get_xlim()
        axes.set_xlim(low, high * 1.8)
        axes.set_title(f"T = {length:,}", fontsize=10)
        axes.set_xlabel("ms, forward and backward")
        _bare(axes)
    panels[0].set_yticks(
        range(len(names)),
        [f"{name} (operation)" if name.startswith(("AFT-", "composed")) else name for name in names],
        fontsize=8,
    )
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    return drawn


def decode(rows: Sequence[Row]) -> Figure:
    """Milliseconds a token against the position that it stands at."""
    drawn = Figure(figsize=(7, 4.2), layout="constrained")
    axes = drawn.subplots()
    for (model, way), (label, family) in DECODERS.items():
        own = [row for row in rows if (row["model"], row["way"]) == (model, way)]
        axes.plot(
            [int(row["position"]) for row in own],
            [float(row["milliseconds"]) for row in own],
            marker=MARKS[family],
            ms=5,
            lw=1.4,
            color=COLOURS[family],
            label=label,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({int(row["position"]) for row in rows if row["way"] == "stream"}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    _plain(axes.yaxis, (1, 2, 5))
    axes.set_xlabel("position of the token")
    axes.set_ylabel("ms a token")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9, frameon=False)
    _bare(axes)
    return drawn


def machine_table(rows: Sequence[Row]) -> str:
    """Where and when each group was measured."""
    groups: dict[tuple[str, ...], list[str]] = {}
    names = ("processor", "threads", "python", "torch", "attention-free", "date")
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row["group"])
    lines = [[", ".join(dict.fromkeys(members)), *about] for about, members in groups.items()]
    return markdown(["group", *names], lines)


def target_table(rows: Sequence[Row]) -> str:
    head = [
        "what",
        "T",
        "pass",
        "measured",
        "relative to",
        "ratio",
        "quartiles",
        "at most",
        "met",
        "implementation",
    ]
    lines = []
    for row in (row for row in rows if row["target"]):
        quartiles = f"{_number(row['ratio_low'])} to {_number(row['ratio_high'])}" if row["ratio_low"] else ""
        lines.append(
            [
                _subject(row),
                f"{int(row['length']):,}",
                row["measure"],
                _measured(row),
                row["relative_to"].removesuffix(f", {row['measure']}"),
                _number(row["ratio"]),
                quartiles,
                row["target"],
                "yes" if row["met"] == "yes" else "**no**",
                row["implementation"].partition(":")[0],
            ]
        )
    return markdown(head, lines)


def peer_table(rows: Sequence[Row]) -> str:
    """A line for each contestant and length: both passes."""
    chosen = of_group(rows, "peers")
    lines = []
    for name, length in dict.fromkeys((row["name"], row["length"]) for row in chosen):
        own = {row["measure"]: row for row in chosen if (row["name"], row["length"]) == (name, length)}
        first = next(iter(own.values()))
        relative = first["relative_to"].rpartition(", ")[0]
        cells = [_measured(own[each]) for each in (FORWARD, BOTH)]
        ratio = " / ".join(_number(own[each]["ratio"]) for each in (FORWARD, BOTH)) if relative else ""
        lines.append(
            [
                name,
                f"{int(length):,}",
                *cells,
                relative,
                ratio,
                first["exact"] or "–",
                first["error"] or "–",
                first["note"],
            ]
        )
    head = ["what", "T", "forward", "forward and backward", "relative to", "ratios", "exact", "error", "note"]
    return markdown(head, lines)


def training_table(rows: Sequence[Row]) -> str:
    lines = [
        [
            row["name"],
            f"{row['batch']} x {int(row['length']):,}",
            f"{_number(row['value'])} ({_number(row['low'])} to {_number(row['high'])})",
            _number(row["ratio"]),
            row["note"],
        ]
        for row in of_group(rows, "training")
    ]
    return markdown(["recipe", "batch x T", "steps a second (quartiles)", "times the transformer", ""], lines)


def exponent_table(rows: Sequence[Row]) -> str:
    """Fitted exponents of each contestant beside the paper's orders."""
    found = {
        (row["name"], row["measure"], row["unit"]): row["value"]
        for row in of_group(rows, "scaling")
        if row["measure"].startswith("exponent")
    }
    lines = []
    for name in dict.fromkeys(name for name, _, _ in found):
        time, space = next(orders for known, orders in TABLE_1.items() if name.startswith(known))
        cells = [
            _number(found.get((name, f"exponent of {measure}", f"power of {varied}"), ""))
            for measure in (BOTH, MEMORY)
            for varied in ("length", "width")
        ]
        lines.append([name, time, *cells[:2], space, *cells[2:]])
    head = ["", "time, Table 1", "in T", "in d", "space, Table 1", "in T", "in d"]
    return markdown(head, lines)


FIGURES: dict[str, Callable[[Sequence[Row]], Figure]] = {
    "ratios": ratios,
    "time": lambda rows: growth(rows, BOTH, "ms, forward and backward"),
    "memory": lambda rows: growth(rows, MEMORY, "MiB at the peak, less inputs and outputs"),
    "peers": peers,
}
TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "machine": machine_table,
    "targets": target_table,
    "peers": peer_table,
    "training": training_table,
    "exponents": exponent_table,
}


def filled(page: str, tables: dict[str, str]) -> str:
    """The page with the text between each pair of marks replaced.

    Raises:
        ValueError: the page has no place for a table.
    """
    for name, table in tables.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(page):
            raise ValueError(f"the page has no {begin} and {end} for its table")
        page = pattern.sub(lambda _, text=f"{begin}\n{table}\n{end}": text, page)
    return page


def _subject(row: Row) -> str:
    return row["name"] + (" (layer)" if row["group"] in ("layers", "full", "conv2d") else "")


def _short(measure: str) -> str:
    return {FORWARD: "forward", BOTH: "fwd + bwd"}.get(measure, measure)


def _measured(row: Row) -> str:
    return f"{_number(row['value'])} {row['unit']}" if row["value"] else "refused"


def _number(text: str) -> str:
    return figure(float(text)) if text else ""


def _family(name: str) -> str:
    return next(known for known in COLOURS if name.startswith(known))


def _peer_colour(name: str) -> str:
    if name.startswith("AFT"):
        return COLOURS["AFT-simple"]
    return COLOURS["AFT-full, low rank"] if "aft-pytorch" in name or "composed" in name else "#666666"


def _plain(axis: matplotlib.axis.Axis, steps: Sequence[int]) -> None:
    """Numbers as people write them, at these steps of each decade."""
    axis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
    axis.set_minor_locator(NullLocator())


def _bare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    home = Path(__file__).parents[1]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, default=home / "benchmarks/results", help="folder of the CSVs"
    )
    parser.add_argument(
        "--docs", type=Path, default=home / "docs", help="folder of benchmarks.md and figures/"
    )
    options = parser.parse_args()
    ops, tokens = newest(options.results, "ops"), newest(options.results, "decode")
    drawn = {name: draw(ops) for name, draw in FIGURES.items()} | {"decode": decode(tokens)}
    (options.docs / "figures").mkdir(parents=True, exist_ok=True)
    for name, each in drawn.items():
        write_whole(options.docs / "figures" / f"{name}.svg", svg(each))
    page = options.docs / "benchmarks.md"
    tables = {name: make(ops) for name, make in TABLES.items()}
    write_whole(page, filled(page.read_text(), tables).encode())


if __name__ == "__main__":
    main()
