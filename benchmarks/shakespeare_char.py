"""The mixers side by side on tiny Shakespeare: validation loss by learning rate and seed, as CSV.

Every run is `aft train shakespeare-char` with the same budget (4 layers, width 128, context 64, batch 12,
2,000 steps), each in a process of its own with one thread, two at a time. Runs that the CSV already holds are
not repeated.

    python benchmarks/shakespeare_char.py --data tinyshakespeare.txt --csv results.csv
"""

import argparse
import itertools
import tempfile
from pathlib import Path

from sweep import Row, sweep, train

MIXERS = {
    "conv": ["--num-heads", "64", "--kernel-size", "16"],
    "attention": ["--num-heads", "4"],
    "local": ["--window-size", "16"],
    "full": [],
    "simple": [],
}
COLUMNS = ("mixer", "lr", "seed", "validation_loss_nats", "bits_per_character", "parameters", "seconds")


def measure(data: str, mixer: str, lr: str, seed: str) -> Row:
    """One run in a directory that is thrown away."""
    options = ["--mixer", mixer, *MIXERS[mixer], "--lr", lr, "--seed", seed, "--eval-every", "0"]
    with tempfile.TemporaryDirectory() as folder:
        last, record = train("shakespeare-char", data, Path(folder, "run"), options)
    figures = (round(last["loss"], 4), round(last["bpc"], 4), record["parameters"], round(last["seconds"]))
    return dict(zip(COLUMNS[3:], figures, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--csv", required=True, type=Path)
    parser.add_argument("--mixers", nargs="+", default=list(MIXERS), choices=MIXERS)
    parser.add_argument("--lrs", nargs="+", default=["0.003", "0.0045", "0.006"])
    parser.add_argument("--seeds", nargs="+", default=["1", "2", "3"])
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    jobs = [(m, lr, s) for s, lr, m in itertools.product(options.seeds, options.lrs, options.mixers)]
    sweep(options.csv, COLUMNS, jobs, lambda job: measure(options.data, *job), options.jobs)


if __name__ == "__main__":
    main()
