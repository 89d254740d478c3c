"""An AFT pixel model against the attention baseline on CIFAR-10 images: bits per dim, time and memory.

Bits: `aft train pixels-small` with each mixer and seed, everything else equal, as rows of a CSV. Seconds a
step: training steps of all mixers in turn, in one process, medians. Memory: for each mixer a process of its
own, the highest resident size while it trains less that before its first step; for attention also with its
weights formed, as the paper's baseline had them, where PyTorch's fused kernel recomputes them.

    python benchmarks/cifar10_pixels.py bits --data cifar10_20k_jpeg.zip --csv results.csv
    python benchmarks/cifar10_pixels.py cost --data cifar10_20k_jpeg.zip
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from sweep import ONE_THREAD, Row, sweep, train
from torch.nn.attention import SDPBackend, sdpa_kernel

from aft.training.recipes import find_recipe
from aft.training.tasks import open_task
from aft.training.trainer import parameter_groups

RECIPE = "pixels-small"
MIXERS = ("local", "attention")
COLUMNS = ("mixer", "seed", "bits_per_dim", "train_bits_per_dim", "parameters", "steps", "seconds")


def bits(options: argparse.Namespace) -> None:
    def measure(job: tuple[str, ...]) -> Row:
        mixer, seed = job
        chosen = ["--mixer", mixer, "--seed", seed, "--eval-every", "0"]
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder, "run")
            last, record = train(RECIPE, options.data, run, chosen)
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        trained = [row["bpd"] for row in rows if row["split"] == "train"][-10:]
        figures = (
            round(last["bpd"], 4),
            round(statistics.mean(trained), 4),
            record["parameters"],
            record["recipe"]["steps"],
            round(last["seconds"]),
        )
        return dict(zip(COLUMNS[2:], figures, strict=True))

    jobs = list(itertools.product(MIXERS, options.seeds))
    jobs.sort(key=lambda job: options.seeds.index(job[1]))
    sweep(options.csv, COLUMNS, jobs, measure, options.jobs)


def trainer_of(mixer: str, data: str) -> Callable[[], None]:
    """A function that takes one training step."""
    recipe = dataclasses.replace(find_recipe(RECIPE).recipe, mixer=mixer)
    task = open_task(recipe, data, RECIPE)
    torch.manual_seed(0)
    model = task.new_model().train()
    optimizer = torch.optim.AdamW(parameter_groups(model, recipe.weight_decay), lr=recipe.lr, fused=True)
    batches = task.train_set(recipe.batch_size * 1000)
    drawn = iter(range(1000))

    def step() -> None:
        at = next(drawn) * recipe.batch_size
        batch = batches.__getitems__(list(range(at, at + recipe.batch_size)))
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def resident(field: str) -> int:
    """A field of this process's status in bytes: VmRSS, or VmHWM, the highest since it was last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def peak(options: argparse.Namespace) -> None:
    step = trainer_of(options.mixer, options.data)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    with sdpa_kernel(SDPBackend.MATH) if options.unfused else contextlib.nullcontext():
        for _ in range(3):
            step()
    print(resident("VmHWM") - before)


def cost(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    steps = {mixer: trainer_of(mixer, options.data) for mixer in MIXERS}
    seconds: dict[str, list[float]] = {mixer: [] for mixer in MIXERS}
    for _ in range(options.steps):
        for mixer, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[mixer].append(time.perf_counter() - began)
    for mixer in MIXERS:
        median = statistics.median(seconds[mixer][1:])
        print(f"{mixer:<10} {median:.3f} s a step, {memory(options, mixer):.0f} MiB beyond the model at rest")
    print(f"attention, its weights formed: {memory(options, 'attention', '--unfused'):.0f} MiB")


def memory(options: argparse.Namespace, mixer: str, *more: str) -> float:
    """MiB, measured by `peak` in a process of its own."""
    command = [sys.executable, __file__, "peak", "--mixer", mixer, "--data", options.data, *more]
    done = subprocess.run(command, env=ONE_THREAD, check=True, capture_output=True, text=True)
    return int(done.stdout) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["bits", "cost", "peak"])
    parser.add_argument("--data", required=True)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--seeds", nargs="+", default=["1", "2", "3"])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mixer", choices=MIXERS)
    parser.add_argument("--unfused", action="store_true")
    options = parser.parse_args()
    if options.what == "bits" and options.csv is None:
        parser.error("bits needs --csv")
    {"bits": bits, "cost": cost, "peak": peak}[options.what](options)


if __name__ == "__main__":
    main()
