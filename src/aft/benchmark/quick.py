"""The table of `aft bench`: the four operations and fused attention, at some lengths, in about a minute."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aft.benchmark import work
from aft.benchmark.gate import Verdict, judge
from aft.benchmark.tables import Row, aligned, figure
from aft.benchmark.timing import Spread, interleaved, spread, spread_of_ratio
from aft.benchmark.work import BOTH, FORWARD, PASSES, Leaves, Work, normal_inputs
from aft.ops import aft_conv_step, aft_full_step, aft_local_step, aft_simple_step

WINDOW = 32
HEADS = 8
LONGEST_TABLE = (
    8192  # positions: a table of twice as many is a gigabyte, so that beyond it biases are factors
)
TOKEN = "token"
EXPLANATION = """\
Random inputs; medians of rounds in which all take turns; the ratio is to the dot product's time.
"one token": one more position after T - 1, with the state (or attention's keys and values) kept of them.
"error": the largest relative error of output and gradients against float64. addcmul reads three tensors and
writes one, about the least that any operation has to do."""
COLUMNS = (
    *("length", "batch", "width", "name", "pass", "milliseconds", "low", "high", "ratio_to_dot_product"),
    *("error", "allowed", "implementation", "threads", "processor", "python", "attention-free", "torch"),
)


@dataclass(frozen=True)
class Measured:
    """One line of the table.

    Attributes:
        milliseconds, ratios: by pass (FORWARD, BOTH, TOKEN): the median with its quartiles, and the ratio to
            the dot product's.
        verdict: None for what has no counterpart in float64.
    """

    length: int
    name: str
    milliseconds: dict[str, Spread]
    ratios: dict[str, float]
    verdict: Verdict | None
    solver: str


def measure(length: int, width: int, batch: int, seconds: float) -> list[Measured]:
    """All contestants at one length, taking turns for about so many seconds.

    The last pass is one more token: a call of `aft_*_step` on the last position, with the state after those
    before it, and of attention on its query with all keys and values.
    """
    heads = math.gcd(width, HEADS)
    inputs = normal_inputs(batch, length, width, heads)
    low_rank = length > LONGEST_TABLE
    works = [
        work.one_pass(inputs),
        work.simple(inputs),
        work.local(inputs, WINDOW, low_rank=low_rank),
        work.conv(inputs, WINDOW),
        work.full(inputs, low_rank=low_rank),
        work.dot_product(inputs),
    ]
    baseline = works[-1].name
    runs = {(each.name, which): each.runner(which) for each in works for which in _passes(each)}
    for name, run in zip([each.name for each in works[1:]], _tokens(inputs, low_rank), strict=True):
        runs[name, TOKEN] = run
    taken = interleaved(runs, seconds, least=3)
    measured = []
    for each in works:
        passes = [which for which in (*PASSES, TOKEN) if (each.name, which) in taken]
        measured.append(
            Measured(
                length,
                each.name,
                {which: spread([1e3 * t for t in taken[each.name, which]]) for which in passes},
                {
                    which: spread_of_ratio(taken[each.name, which], taken[baseline, which]).middle
                    for which in passes
                },
                None if each.variant is None else judge(each),
                each.solver,
            )
        )
    return measured


def _passes(each: Work) -> tuple[str, ...]:
    return (FORWARD,) if each.name == "addcmul" else PASSES


def _tokens(inputs: Leaves, low_rank: bool) -> list[Callable[[], object]]:
    """For each operation, in the table's order, a function that reads the last position after the others."""
    before = {name: x[:, :-1] for name, x in inputs.items() if x.ndim == 3}
    last = {name: x[:, -1:] for name, x in inputs.items() if x.ndim == 3}
    bias: Any = (inputs["left"], inputs["right"])
    if not low_rank:
        bias = inputs["left"] @ inputs["right"].T
    heads = inputs["keys_of_heads"].shape[2]
    kernel = torch.randn(heads, WINDOW, generator=torch.Generator().manual_seed(2))
    steps: list[tuple[Callable[..., Any], str, tuple[Any, ...]]] = [
        (aft_simple_step, "k", ()),
        (aft_local_step, "k", (bias, WINDOW)),
        (aft_conv_step, "keys_of_heads", (kernel,)),
        (aft_full_step, "k", (bias,)),
    ]

    def one_token(step: Callable[..., Any], key: str, settings: tuple[Any, ...]) -> Callable[[], object]:
        with torch.no_grad():
            state = step(before["q"], before[key], before["v"], *settings)[1]
        return torch.no_grad()(lambda: step(last["q"], last[key], last["v"], *settings, state))

    keys, values = inputs["k"], inputs["v"]
    attention = torch.no_grad()(lambda: work.attend(last["q"], keys, values, heads, causal=False))
    return [*(one_token(*step) for step in steps), attention]


def table(measured: Sequence[Measured]) -> str:
    """The lines of one length, for people to read."""
    head = ["", "forward", "ratio", "forward and backward", "ratio", "one token", "ratio", "error"]
    lines = []
    for each in measured:
        cells = [each.name]
        for which in (FORWARD, BOTH, TOKEN):
            if which in each.milliseconds:
                cells += [f"{figure(each.milliseconds[which].middle)} ms", f"{each.ratios[which]:.3f}"]
            else:
                cells += ["", ""]
        lines.append([*cells, _says(each.verdict)])
    return aligned(head, lines)


def solvers(measured: Sequence[Measured]) -> str:
    """Which implementation each operation ran by, and why not by the kernels."""
    return aligned(["", ""], [[each.name, each.solver] for each in measured if each.solver]).lstrip("\n")


def _says(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    return f"{verdict.error:.0e}" if verdict.passed else f"WRONG: {verdict.error:.0e}"


def rows(measured: Sequence[Measured], batch: int, width: int, about: Row) -> list[Row]:
    """A row of COLUMNS for each pass of each contestant; ``about`` has those that all of them share."""
    return [
        {
            "length": each.length,
            "batch": batch,
            "width": width,
            "name": each.name,
            "pass": which,
            "milliseconds": f"{times.middle:.5g}",
            "low": f"{times.low:.5g}",
            "high": f"{times.high:.5g}",
            "ratio_to_dot_product": f"{each.ratios[which]:.4g}",
            "error": "" if each.verdict is None else f"{each.verdict.error:.1e}",
            "allowed": "" if each.verdict is None else f"{each.verdict.allowed:.1e}",
            "implementation": each.solver,
        }
        | about
        for each in measured
        for which, times in each.milliseconds.items()
    ]
