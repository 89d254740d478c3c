import csv
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aft.benchmark import quick, work
from aft.benchmark.fit import exponent
from aft.benchmark.gate import LIMIT, Verdict, judge
from aft.benchmark.tables import aligned, csv_text, figure, markdown
from aft.benchmark.timing import interleaved, spread, spread_of_ratio
from aft.benchmark.work import BOTH, FORWARD, Work, normal_inputs
from aft.cli import main

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
KINDS: list[Callable[..., Work]] = [work.simple, work.full, work.local, work.conv]


@pytest.fixture
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts in benchmarks/ are no package: they find one another by the folder that they lie in."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


# Growth


@pytest.mark.parametrize("e", [-1.0, 0.0, 1.0, 2.0, 1.58])
def test_an_exponent_is_found_again(e: float) -> None:
    sizes = [64, 100, 1024, 5000]
    assert exponent(sizes, [3e-5 * size**e for size in sizes]) == pytest.approx(e, abs=1e-12)


def test_an_exponent_is_the_best_in_logarithms() -> None:
    assert exponent([1, 10, 100], [1, 100, 100]) == pytest.approx(1.0)


@pytest.mark.parametrize(("sizes", "values"), [([8, 8], [1, 2]), ([8, 16], [1, 0]), ([0, 16], [1, 2])])
def test_what_has_no_exponent_is_refused(sizes: list[float], values: list[float]) -> None:
    with pytest.raises(ValueError, match="an exponent needs"):
        exponent(sizes, values)


# Times


class Clock:
    """A clock that moves when something is run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def __call__(self) -> float:
        return self.now

    def taking(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds
            self.order.append(name)

        return run


def test_contestants_take_turns() -> None:
    clock = Clock()
    runs = {"a": clock.taking("a", 1.0), "b": clock.taking("b", 0.5)}
    taken = interleaved(runs, seconds=0.0, least=3, clock=clock)
    assert taken == {"a": [1.0] * 3, "b": [0.5] * 3}
    assert clock.order[-6:] == ["a", "b"] * 3


def test_rounds_go_on_for_so_many_seconds_and_no_more_than_the_most() -> None:
    clock = Clock()
    assert len(interleaved({"a": clock.taking("a", 1.0)}, seconds=7.5, least=3, clock=clock)["a"]) == 8
    assert len(interleaved({"a": clock.taking("a", 1.0)}, 100.0, most=4, least=3, clock=clock)["a"]) == 4


def test_a_short_call_is_made_several_times_a_sample() -> None:
    clock = Clock()
    taken = interleaved({"a": clock.taking("a", 1e-4)}, seconds=0.0, least=2, clock=clock)
    assert taken["a"] == pytest.approx([1e-4, 1e-4])
    assert len(clock.order) == 2 + 2 * 20


def test_a_ratio_is_taken_within_each_round() -> None:
    slow_twice = [1.0, 1.0, 50.0, 50.0, 1.0]
    found = spread_of_ratio([2 * t for t in slow_twice], slow_twice)
    assert (found.low, found.middle, found.high) == (2.0, 2.0, 2.0)
    assert spread([3.0, 1.0, 2.0, 5.0, 4.0]).middle == 3.0
    assert spread([1.5]).high == 1.5


# The gate


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", [2**22, 0], ids=["reference", "eager"])
def test_the_operations_pass_the_gate(kind: Callable[..., Work], weights: int) -> None:
    verdict = judge(kind(normal_inputs(2, 40, 16)), weights)
    assert verdict.passed
    assert 0 < verdict.error < LIMIT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0 + 1e-4, math.nan])
def test_a_wrong_output_is_refused(kind: Callable[..., Work], scale: float) -> None:
    right = kind(normal_inputs(1, 20, 8))
    wrong = Work(right.name, right.leaves, lambda: right.outputs()[0] * scale, right.variant, right.pairs)
    verdict = judge(wrong)
    assert not verdict.passed
    assert math.isnan(verdict.error) == math.isnan(scale)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("leaf", [0, 1, 2, -1])
def test_a_wrong_gradient_is_refused(kind: Callable[..., Work], leaf: int) -> None:
    right = kind(normal_inputs(1, 20, 8))
    held = list(right.leaves.values())[leaf]

    def call() -> torch.Tensor:
        y = right.outputs()[0]
        return y + 1e-3 * (held.sum() - held.sum().detach())

    assert not judge(Work(right.name, right.leaves, call, right.variant, right.pairs)).passed


def test_a_missing_gradient_is_refused() -> None:
    right = work.simple(normal_inputs(1, 20, 8))
    values = right.leaves["v"].detach()
    names = {**right.leaves, "v": torch.zeros_like(values).requires_grad_()}
    q, k = names["q"], names["k"]

    def call() -> torch.Tensor:
        return work.aft_simple(q, k, values, causal=True)

    verdict = judge(Work(right.name, names, call, right.variant, right.pairs))
    assert verdict == Verdict(1.0, LIMIT)


def test_what_has_no_counterpart_cannot_be_judged() -> None:
    with pytest.raises(ValueError, match="addcmul has no exact counterpart"):
        judge(work.one_pass(normal_inputs(1, 4, 8)))


def test_fused_attention_is_attention() -> None:
    inputs = normal_inputs(2, 12, 16, heads=4)
    mine = work.dot_product(inputs)
    q, k, v = (x.unflatten(2, (4, 4)).transpose(1, 2) for x in mine.leaves.values())
    scores = (q @ k.transpose(2, 3) / 2).masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -torch.inf)
    assert torch.allclose(mine.outputs()[0], (scores.softmax(-1) @ v).transpose(1, 2).flatten(2), atol=1e-6)


# Tables


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.12345, "0.123"),
        (1.0, "1"),
        (12.345, "12.3"),
        (99.96, "100"),
        (123.4, "123"),
        (12345.6, "12,346"),
        (2e-5, "2.0e-05"),
        (-0.5, "-0.5"),
        (math.nan, "nan"),
    ],
)
def test_figures(value: float, text: str) -> None:
    assert figure(value) == text


def test_tables() -> None:
    head, rows = ["", "ms"], [["simple", "1.5"], ["conv", "12"]]
    assert aligned(head, rows).splitlines() == ["         ms", "simple  1.5", "conv     12"]
    assert markdown(head, rows) == "|  | ms |\n| --- | --- |\n| simple | 1.5 |\n| conv | 12 |"
    assert csv_text(["a", "b"], [{"b": 2, "a": "x, y"}, {"a": 1}]) == 'a,b\n"x, y",2\n1,\n'


# The scripts


@pytest.mark.usefixtures("_scripts")
def test_a_group_that_is_measured_again_replaces_its_rows(tmp_path: Path) -> None:
    from contest import new_row, read_rows, save  # pyrefly: ignore[missing-import]

    path = tmp_path / "folder" / "ops.csv"
    first = [new_row("simple", name, (1, 8, 4), FORWARD) for name in ("a", "b")]
    save(path, [*first, new_row("full", "c", (1, 8, 4), FORWARD)])
    save(path, [new_row("simple", "d, with a comma", (1, 16, 4), FORWARD)])
    rows = read_rows(path)
    assert [(row["group"], row["name"]) for row in rows] == [("simple", "d, with a comma"), ("full", "c")]
    assert rows[0]["torch"] == torch.__version__.partition("+")[0]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.usefixtures("_scripts")
def test_a_wrong_contestant_has_no_time_and_a_wrong_peer_has() -> None:
    from contest import Entry, contest  # pyrefly: ignore[missing-import]

    inputs = normal_inputs(1, 16, 8)
    right = work.simple(inputs)

    def doubled(name: str) -> Work:
        return Work(name, right.leaves, lambda: 2 * right.outputs()[0], right.variant, right.pairs)

    entries = [
        Entry(right),
        Entry(doubled("ours"), relative_to=right.name, targets={FORWARD: 1e9, BOTH: 1e9}),
        Entry(doubled("theirs"), relative_to=right.name, is_peer=True),
    ]
    rows = {(row["name"], row["measure"]): row for row in contest("g", (1, 16, 8), entries, 0.0, 2)}
    assert len(rows) == 6
    for which in (FORWARD, BOTH):
        ours, theirs = rows["ours", which], rows["theirs", which]
        assert (ours["value"], ours["ratio"], ours["met"], ours["exact"]) == ("", "", "no", "no")
        assert theirs["value"] > 0
        assert theirs["ratio"] > 0
        assert theirs["exact"] == "no"
        assert rows[right.name, which]["exact"] == "yes"


@pytest.mark.usefixtures("_scripts")
def test_a_target_is_met_or_not() -> None:
    from contest import Entry, contest  # pyrefly: ignore[missing-import]

    inputs = normal_inputs(1, 16, 8)
    entries = [
        Entry(work.one_pass(inputs), passes=(FORWARD,)),
        Entry(work.simple(inputs), relative_to="addcmul", by=FORWARD, targets={FORWARD: 1e9, BOTH: 1e-9}),
    ]
    rows = contest("g", (1, 16, 8), entries, 0.0, 2)
    assert [row["met"] for row in rows] == ["", "yes", "no"]


@pytest.mark.usefixtures("_scripts")
def test_the_tables_of_the_page_are_replaced() -> None:
    from figures import filled  # pyrefly: ignore[missing-import]

    page = "before\n<!-- begin a -->\nold\n<!-- end a -->\nafter\n"
    once = filled(page, {"a": r"| \1 |"})
    assert once == "before\n<!-- begin a -->\n| \\1 |\n<!-- end a -->\nafter\n"
    assert filled(once, {"a": r"| \1 |"}) == once
    with pytest.raises(ValueError, match="no <!-- begin b -->"):
        filled(page, {"b": ""})


@pytest.mark.usefixtures("_scripts")
def test_exponents_are_of_what_varies() -> None:
    from contest import new_row  # pyrefly: ignore[missing-import]
    from ops import MEMORY, exponents  # pyrefly: ignore[missing-import]

    def point(varied: str, length: int, width: int, measure: str, value: float) -> dict:
        return new_row("scaling", "x", (1, length, width), measure, f"varied: {varied}") | {"value": value}

    points = [point("length", T, 64, BOTH, 1e-3 * T**2 * 64) for T in (512, 1024, 2048)]
    points += [point("width", 2048, d, BOTH, 3.0 * d) for d in (64, 128)]
    points += [point("length", T, 64, MEMORY, max(0, T - 512)) for T in (512, 1024)]  # one point above 0
    found = {(row["measure"], row["unit"]): row for row in exponents(points)}
    assert {key: row["value"] for key, row in found.items()} == {
        ("exponent of forward and backward", "power of length"): 2.0,
        ("exponent of forward and backward", "power of width"): 1.0,
    }
    assert [(row["length"], row["width"]) for row in found.values()] == [("", 64), (2048, "")]


@pytest.mark.usefixtures("_scripts")
def test_the_script_measures_a_group_into_a_file(tmp_path: Path) -> None:
    from contest import read_rows  # pyrefly: ignore[missing-import]

    path = tmp_path / "ops.csv"
    options = [
        "--only",
        "simple",
        "--lengths",
        "32",
        "48",
        "--seconds",
        "0",
        "--rounds",
        "2",
        "--threads",
        "1",
    ]
    command = [sys.executable, str(BENCHMARKS / "ops.py"), *options, "--csv", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    rows = read_rows(path)
    assert [(row["name"], row["length"], row["measure"]) for row in rows] == [
        (name, length, measure)
        for length in ("32", "48")
        for name, measure in [("addcmul", FORWARD), ("AFT-simple", FORWARD), ("AFT-simple", BOTH)]
    ]
    assert {row["exact"] for row in rows if row["name"] == "AFT-simple"} == {"yes"}
    assert {row["threads"] for row in rows} == {"1"}


@pytest.mark.usefixtures("_scripts")
def test_the_page_shows_what_the_newest_results_say() -> None:
    from figures import TABLES, filled, newest  # pyrefly: ignore[missing-import]

    page = (BENCHMARKS.parent / "docs/benchmarks.md").read_text()
    rows = newest(BENCHMARKS / "results", "ops")
    assert filled(page, {name: table(rows) for name, table in TABLES.items()}) == page


@pytest.mark.usefixtures("_scripts")
def test_the_newest_results_are_those_of_the_latest_date(tmp_path: Path) -> None:
    from contest import new_row, save  # pyrefly: ignore[missing-import]
    from figures import newest  # pyrefly: ignore[missing-import]

    for name, label in [
        ("ops_z_2026-01-02", "old"),
        ("ops_a_2026-11-30", "new"),
        ("decode_b_2027-01-01", "other"),
    ]:
        save(tmp_path / f"{name}.csv", [new_row("simple", label, (1, 8, 4), FORWARD)])
    assert [row["name"] for row in newest(tmp_path, "ops")] == ["new"]
    with pytest.raises(SystemExit, match=r"has no training_\*\.csv"):
        newest(tmp_path, "training")


@pytest.mark.usefixtures("_scripts")
def test_the_same_results_make_the_same_figures() -> None:
    from figures import FIGURES, newest, svg  # pyrefly: ignore[missing-import]

    rows = newest(BENCHMARKS / "results", "ops")
    drawn = {name: svg(draw(rows)) for name, draw in FIGURES.items()}
    assert len(set(drawn.values())) == len(FIGURES)
    assert svg(FIGURES["time"](rows)) == drawn["time"]


@pytest.mark.usefixtures("_scripts")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="read from Linux's /proc")
def test_peak_memory_leaves_out_inputs_and_outputs() -> None:
    from peak_memory import peak  # pyrefly: ignore[missing-import]

    length, width, heads = 2048, 64, 8
    weights = heads * length**2 * 4
    by_weights, queries = peak("attention", length, width, threads=1)
    assert queries == length * width * 4
    assert weights < by_weights < 5 * weights
    assert peak("dot-product", length, width, threads=1)[0] < weights / 10


@pytest.mark.usefixtures("_scripts")
def test_a_child_that_fails_says_why() -> None:
    from peak_memory import peak  # pyrefly: ignore[missing-import]

    with pytest.raises(RuntimeError, match="fill at 8 x 8: KeyError: 'fill'"):
        peak("fill", 8, 8, threads=1)


# aft bench


def bench(capture: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    capture.readouterr()
    with pytest.raises(SystemExit) as exit_request:
        main(["bench", *args])
    out, err = capture.readouterr()
    return int(str(exit_request.value.code or 0)), out, err


def test_bench_shows_and_writes_all_contestants(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "bench.csv"
    options = ["--length", "1", "24", "--dim", "12", "--batch", "1", "--seconds", "0"]
    status, out, err = bench(capsys, *options, "--csv", str(path))
    assert (status, err) == (0, "")
    version = torch.__version__.partition("+")[0]
    for text in ("1 thread;", f"torch {version}", "T = 24, d = 12", "error"):
        assert text in out
    with path.open() as file:
        rows = list(csv.DictReader(file))
    names = {row["name"] for row in rows}
    assert {name.partition(",")[0] for name in names} == {
        *("addcmul", "AFT-simple", "AFT-local", "AFT-conv", "AFT-full", "dot product")
    }
    for length in ("1", "24"):
        own = {(row["name"], row["pass"]): row for row in rows if row["length"] == length}
        assert len(own) == 16  # three passes each, but for addcmul's one
        for (name, _), row in own.items():
            assert float(row["milliseconds"]) > 0
            assert (float(row["error"]) <= float(row["allowed"])) if "AFT" in name else not row["error"]
            assert row["implementation"].startswith(("native", "eager")) == ("AFT" in name)
            if "dot product" in name:
                assert float(row["ratio_to_dot_product"]) == 1.0


def test_bench_takes_as_many_threads_as_it_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, seen = torch.get_num_threads(), []

    def measure(length: int, width: int, batch: int, seconds: float) -> list[quick.Measured]:
        seen.append((length, width, batch, seconds, torch.get_num_threads()))
        return []

    monkeypatch.setattr(quick, "measure", measure)
    try:
        options = ["--threads", str(before + 1), "--seconds", "6", "--length", "3", "5", "--dim", "8"]
        assert bench(capsys, *options, "--batch", "7")[0] == 0
        assert seen == [(3, 8, 7, 3.0, before + 1), (5, 8, 7, 3.0, before + 1)]
    finally:
        torch.set_num_threads(before)


def test_a_length_that_no_memory_holds_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object) -> list[quick.Measured]:
        torch.empty(2**50, dtype=torch.float64)
        return []

    monkeypatch.setattr(quick, "measure", measure)
    status, _, err = bench(capsys, "--length", "4096")
    assert (status, err) == (2, "aft: length 4,096 takes more memory than there is\n")


def test_the_bias_of_a_long_sequence_is_of_low_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "LONGEST_TABLE", 15)
    names = [each.name for each in quick.measure(16, 8, 1, 0.0)]
    assert [name for name in names if "low rank" in name] == [
        "AFT-local, window 32, low rank",
        "AFT-full, low rank",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--length", "0"], "length is 0; expected at least 1"),
        (["--length", "8", "-3"], "length is -3; expected at least 1"),
        (["--length", "many"], "--length: Could not find valid parse for arguments: ['many']"),
        (["--dim", "0"], "dim is 0; expected at least 1"),
        (["--batch", "-1"], "batch is -1; expected at least 1"),
        (["--threads", "0"], "threads is 0; expected at least 1"),
        (["--seconds", "nan"], "seconds is nan; expected a finite number, at least 0"),
        (["--seconds=-1"], "seconds is -1; expected a finite number, at least 0"),
        (["--csv", "nowhere/bench.csv"], "nowhere: no such directory to write bench.csv in"),
        (["--csv", "."], ". is a directory; a file to write was expected"),
        (["--lenght", "8"], "has no option --lenght; did you mean --length"),
        (["fast"], "does not take a further argument, 'fast'"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    status, out, err = bench(capsys, *args)
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("aft: ")
    assert err.count("\n") == 1


def test_the_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom aft.cli import main\n"
        "try: main(['bench', '--help'])\nexcept SystemExit as e: assert not e.code, e.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    assert "--length" in done.stdout
