"""Runs of `aft train` side by side, each in a process of its own with one thread, as rows of a CSV."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

Row = dict[str, Any]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def train(recipe: str, data: str, run: Path, options: Sequence[str]) -> tuple[Row, Row]:
    """Train into `run`; the last row of its metrics.jsonl, and its recipe.json."""
    command = [sys.executable, "-m", "aft", "train", recipe, "--data", data, "--out", str(run), *options]
    done = subprocess.run(command, env=ONE_THREAD, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1]}")
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return last, json.loads((run / "recipe.json").read_text())


def sweep(
    path: Path,
    columns: Sequence[str],
    jobs: Sequence[tuple[str, ...]],
    run: Callable[[tuple[str, ...]], Row],
    at_once: int,
) -> None:
    """Add a row to the CSV at `path` for every job that it does not hold yet.

    The first columns are the job itself, the others are what `run` measures.
    """
    if path.exists():
        with path.open() as file:
            done = {tuple(row[name] for name in columns[: len(jobs[0])]) for row in csv.DictReader(file)}
    else:
        done = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(",".join(columns) + "\n")
    lock = Lock()

    def run_and_write(job: tuple[str, ...]) -> None:
        row = dict(zip(columns, job, strict=False)) | run(job)
        with lock, path.open("a", newline="") as file:
            csv.DictWriter(file, columns, lineterminator="\n").writerow(row)
        print(row, flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run_and_write, (job for job in jobs if job not in done)))
