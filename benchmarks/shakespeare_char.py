"""The mixers side by side on tiny Shakespeare: validation loss by learning rate and seed, as CSV.

Every run is `aft train shakespeare-char` with the same budget (4 layers, width 128, context 64, batch 12,
2,000 steps), each in a process of its own with one thread, two at a time. Runs that the CSV already holds are
not repeated.

    python benchmarks/shakespeare_char.py --data tinyshakespeare.txt --csv results.csv
"""

import argparse
import csv
import itertools
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

MIXERS = {
    "conv": ["--num-heads", "64", "--kernel-size", "16"],
    "attention": ["--num-heads", "4"],
    "local": ["--window-size", "16"],
    "full": [],
    "simple": [],
}
COLUMNS = ("mixer", "lr", "seed", "validation_loss_nats", "bits_per_character", "parameters", "seconds")


def train(data: str, mixer: str, lr: str, seed: str) -> dict[str, object]:
    """One run in a directory that is thrown away: the row of the CSV."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [
            sys.executable,
            "-m",
            "aft",
            "train",
            "shakespeare-char",
            "--data",
            data,
            "--out",
            str(run),
        ]
        options = ["--mixer", mixer, *MIXERS[mixer], "--lr", lr, "--seed", seed, "--eval-every", "0"]
        subprocess.run(
            command + options,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        parameters = json.loads((run / "recipe.json").read_text())["parameters"]
    figures = (round(last["loss"], 4), round(last["bpc"], 4), parameters, round(last["seconds"]))
    return dict(zip(COLUMNS, (mixer, lr, seed, *figures), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--csv", required=True, type=Path)
    parser.add_argument("--mixers", nargs="+", default=list(MIXERS), choices=MIXERS)
    parser.add_argument("--lrs", nargs="+", default=["0.003", "0.0045", "0.006"])
    parser.add_argument("--seeds", nargs="+", default=["1", "2", "3"])
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()

    done = set()
    if options.csv.exists():
        with options.csv.open() as file:
            done = {(row["mixer"], row["lr"], row["seed"]) for row in csv.DictReader(file)}
    else:
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        options.csv.write_text(",".join(COLUMNS) + "\n")
    lock = Lock()

    def run_and_write(job: tuple[str, str, str]) -> None:
        row = train(options.data, *job)
        with lock, options.csv.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(row)
        print(row, flush=True)

    jobs = [(m, lr, s) for s, lr, m in itertools.product(options.seeds, options.lrs, options.mixers)]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run_and_write, (job for job in jobs if job not in done)))


if __name__ == "__main__":
    main()
