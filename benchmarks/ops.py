"""The operations, the layers and training beside what they are measured by: ratios, memory, growth.

Float32, random inputs, causal unless a name says otherwise. In a group all contestants take turns in one
process; a row has the median and the quartiles of its milliseconds, and of its ratio within each round to
what it is relative to. A result whose error against float64 is larger than 1e-5 and twice that of
impl="eager" is refused: no time is given. Peers are reported all the same; `exact` says whether they are
right.

    python benchmarks/ops.py --csv benchmarks/results/ops_PROCESSOR_DATE.csv
    python benchmarks/ops.py --only memory scaling --quick

Each group is written as soon as it is measured, in place of what the CSV held of it. `python
benchmarks/figures.py` makes figures and tables of it.

simple    AFT-simple beside one addcmul of q, k, v
layers    layers beside their four projections alone
full      layers AFTFull and AFTLocal beside the same projections around scaled_dot_product_attention
conv2d    AFTConv2d on 14 x 14 beside DeiT-small's attention
memory    peak memory beyond inputs and outputs (see peak_memory.py)
peers     aft-pytorch, formulas by hand, nn.MultiheadAttention, nn.GRU
training  steps a second of two of the paper's enwik8 recipes
scaling   time and memory against length and width, with fitted exponents
"""

import argparse
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from contest import Entry, contest, new_row, rounded, save, show, yes
from modules import DotProduct, layer, of_module, projections
from peak_memory import HEADS, KERNEL, KINDS, WINDOW, draw, peak
from torch import Tensor

from aft.benchmark import work
from aft.benchmark.fit import exponent
from aft.benchmark.machine import description
from aft.benchmark.tables import Row
from aft.benchmark.timing import interleaved, spread, spread_of_ratio
from aft.benchmark.work import BOTH, FORWARD, Work, normal_inputs
from aft.layers import AFTConv1d, AFTConv2d, AFTFull, AFTLocal, AFTSimple

BATCH, WIDTH = 2, 256
MIB = 2**20
MEMORY = "peak memory"
QUADRATIC = ("full", "full-low-rank", "dot-product", "attention")
Options = argparse.Namespace


def simple(options: Options) -> list[Row]:
    rows = []
    for length in options.lengths or (1024, 4096, 16384, 65536):
        inputs = normal_inputs(BATCH, length, WIDTH)
        entries = [
            Entry(work.one_pass(inputs), passes=(FORWARD,)),
            Entry(
                work.simple(inputs),
                relative_to="addcmul",
                by=FORWARD,
                targets={FORWARD: 2.0, BOTH: 7.0},
            ),
        ]
        rows += contest("simple", (BATCH, length, WIDTH), entries, options.seconds, options.rounds)
    return rows


def layers(options: Options) -> list[Row]:
    rows = []
    for length in options.lengths or (4096,):
        x = _input(BATCH, length, WIDTH)
        modules = {
            "AFTSimple": (AFTSimple(WIDTH, causal=True), 1.4),
            f"AFTLocal, window {WINDOW}": (AFTLocal(WIDTH, length, WINDOW, causal=True), 1.8),
            f"AFTConv1d, kernel {KERNEL}, {HEADS} heads": (AFTConv1d(WIDTH, HEADS, KERNEL, causal=True), 1.8),
        }
        entries = []
        for name, (module, target) in modules.items():
            alone = f"projections of {name.partition(',')[0]}"
            entries.append(Entry(projections(alone, module, x)))
            entries.append(Entry(layer(name, module, x), relative_to=alone, targets={BOTH: target}))
        rows += contest("layers", (BATCH, length, WIDTH), entries, options.seconds, options.rounds)
    return rows


def full(options: Options) -> list[Row]:
    rows = []
    for length in options.lengths or (256, 1024, 4096):
        x = _input(BATCH, length, WIDTH)
        attention = of_module(f"dot product layer, {HEADS} heads", DotProduct(WIDTH, HEADS), x)
        entries = [
            Entry(attention),
            Entry(
                layer("AFTFull", AFTFull(WIDTH, length, causal=True), x),
                relative_to=attention.name,
                targets={FORWARD: 1.0, BOTH: 1.0},
            ),
            Entry(
                layer(f"AFTLocal, window {WINDOW}", AFTLocal(WIDTH, length, WINDOW, causal=True), x),
                relative_to=attention.name,
                targets={BOTH: 0.3} if length == 4096 else {},
            ),
        ]
        rows += contest("full", (BATCH, length, WIDTH), entries, options.seconds, options.rounds)
    return rows


def conv2d(options: Options) -> list[Row]:
    from timm.layers.attention import Attention

    side, width, kernel, batch = 14, 384, 11, options.images
    x = _input(batch, side * side, width).unflatten(1, (side, side))
    tokens = _input(batch, side * side + 1, width)  # DeiT has a class token
    deit = of_module("DeiT-small's attention", Attention(width, num_heads=6, qkv_bias=True), tokens)
    entries = [Entry(deit)]
    for heads in (width, 16):
        name = f"AFTConv2d, kernel {kernel} x {kernel}, {heads} heads"
        made = layer(name, AFTConv2d(width, heads, kernel), x)
        entries.append(
            Entry(made, relative_to=deit.name, targets={FORWARD: 1.0, BOTH: 1.0}, note="not causal")
        )
    return contest("conv2d", (batch, side * side, width), entries, options.seconds, options.rounds)


def memory(options: Options) -> list[Row]:
    rows = []
    width = 64
    for kind, length, target in (
        ("simple", 2**20, 10),
        ("local", 2**20, 10),
        ("conv", 2**20, 10),
        ("full-low-rank", 2**15, 24),
    ):
        length = min(options.lengths) if options.lengths else length
        row = _memory_row("memory", kind, length, width, options.threads)
        row |= {"target": target, "met": yes(row["ratio"] <= target)}
        show(row)
        rows.append(row)
    return rows


def peers(options: Options) -> list[Row]:
    from peers import entries

    warnings.filterwarnings("ignore", message="Converting a tensor with requires_grad=True")  # aft-pytorch
    rows = []
    for length in options.lengths or (1024, 4096):
        shape = (BATCH, length, WIDTH)
        rows += contest("peers", shape, entries(*shape), options.seconds, options.rounds)
    return rows


def training(options: Options) -> list[Row]:
    from training_steps import PAPER, stepper

    context = min(options.lengths) if options.lengths else 1024
    steps = {name: stepper(name, options.windows, context, options.data) for name in PAPER}
    taken = interleaved(steps, options.seconds * 20, max(2, options.rounds - 2))
    baseline = taken["enwik8-transformer"]
    rows = []
    for name, times in taken.items():
        row = new_row("training", name, (options.windows, context, WIDTH), "training steps")
        found = spread([1 / t for t in times])
        faster = spread_of_ratio(baseline, times)
        row |= {"value": rounded(found.middle), "low": rounded(found.low), "high": rounded(found.high)}
        row |= {"unit": "steps/s", "relative_to": "enwik8-transformer", "ratio": rounded(faster.middle)}
        row |= {"ratio_low": rounded(faster.low), "ratio_high": rounded(faster.high)}
        row["note"] = f"24 layers; the paper has {PAPER[name]} steps/s at batch 128 on 8 V100"
        show(row)
        rows.append(row)
    return rows


def scaling(options: Options) -> list[Row]:
    """Rows for each point, whose note says what varies, and after them the exponents."""
    rows = []
    lengths = options.lengths or [2**power for power in range(10, 18)]
    # What grows as T is long beyond the caches at 131,072; what grows as T^2 takes minutes there.
    short, long = lengths[:4], lengths[-4:]
    for length in lengths:
        kinds = [kind for kind in KINDS if length in (short if kind in QUADRATIC else long)]
        rows += _points("length", kinds, length, 64, options)
    for width in options.widths or (64, 128, 256, 512):
        rows += _points("width", list(KINDS), min(2048, short[-1]), width, options)
    return rows + exponents(rows)


def _points(varied: str, kinds: Sequence[str], length: int, width: int, options: Options) -> list[Row]:
    entries = [Entry(_without_gate(draw(kind, length, width)), passes=(BOTH,)) for kind in kinds]
    rows = contest("scaling", (1, length, width), entries, options.seconds, options.rounds)
    for kind in kinds:
        row = _memory_row("scaling", kind, length, width, options.threads)
        show(row)
        rows.append(row)
    for row in rows:
        row["note"] = f"varied: {varied}"
    return rows


def exponents(points: Sequence[Row]) -> list[Row]:
    """A row for each contestant, measure and direction; points that are not above 0 have no logarithm."""
    rows = []
    for varied in ("length", "width"):
        for measure in (BOTH, MEMORY):
            chosen = [
                row for row in points if row["note"] == f"varied: {varied}" and row["measure"] == measure
            ]
            for name in dict.fromkeys(row["name"] for row in chosen):
                own = [row for row in chosen if row["name"] == name and row["value"] > 0]
                sizes, values = [row[varied] for row in own], [row["value"] for row in own]
                if len(set(sizes)) < 2:
                    continue
                shape = (1, own[0]["length"], own[0]["width"])
                row = new_row("scaling", name, shape, f"exponent of {measure}") | {varied: ""}
                row |= {"value": rounded(exponent(sizes, values)), "unit": f"power of {varied}"}
                row["note"] = f"{varied} {min(sizes)} to {max(sizes)}"
                show(row)
                rows.append(row)
    return rows


def _memory_row(group: str, kind: str, length: int, width: int, threads: int) -> Row:
    found, queries = peak(kind, length, width, threads)
    small = draw(kind, min(length, 256), width)
    row = new_row(group, small.name, (1, length, width), MEMORY)
    row |= {"value": rounded(found / MIB), "unit": "MiB", "relative_to": "bytes of q"}
    return row | {"ratio": rounded(found / queries), "implementation": small.solver}


def _without_gate(given: Work) -> Work:
    """The same operations were judged in their own groups."""
    return Work(given.name, given.leaves, given.call, solver=given.solver)


def _input(batch: int, length: int, width: int) -> Tensor:
    return normal_inputs(batch, length, width)["q"]


GROUPS: dict[str, Callable[[Options], list[Row]]] = {
    group.__name__: group for group in (simple, layers, full, conv2d, memory, peers, training, scaling)
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--csv", type=Path, help="merged into it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each contestant's pass, about")
    parser.add_argument("--rounds", type=int, default=7, help="at least")
    parser.add_argument("--lengths", nargs="+", type=int, help="in place of each group's own")
    parser.add_argument("--widths", nargs="+", type=int, help="of scaling, in place of its own")
    parser.add_argument("--images", type=int, default=32, help="batch of conv2d")
    parser.add_argument("--windows", type=int, default=4, help="batch of training")
    parser.add_argument("--data", help="file to train on; the source of Python's library if not given")
    parser.add_argument("--quick", action="store_true", help="short lengths, few rounds: whether it all runs")
    options = parser.parse_args()
    if options.quick:
        options.lengths, options.widths = options.lengths or [128, 256], options.widths or [32, 64]
        options.seconds, options.rounds, options.images, options.windows = 0.0, 2, 2, 1
    torch.set_num_threads(options.threads)
    print(description())
    for name in options.only:
        print(f"\n{name}")
        torch.manual_seed(0)
        rows = GROUPS[name](options)
        if options.csv is not None:
            save(options.csv, rows)


if __name__ == "__main__":
    main()
