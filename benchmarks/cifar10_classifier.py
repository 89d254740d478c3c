"""AFT-conv against DeiT on CIFAR-10 images: top-1 by seed, as CSV.

Every run is `aft train classify-cifar10-small`: the same width, depth, patches, epochs, batch and
augmentation; the mixer changes, with it what the paper changes too (AFT-conv has no class token and no
position embedding), and the learning rate, 3e-3 for AFT-conv and 2e-3 for attention unless `--lrs` says
otherwise. Each run has a process of its own with one thread, two at a time. Runs that the CSV already holds
are not repeated; `--runs DIR` keeps the models.

    python benchmarks/cifar10_classifier.py --data cifar10_20k_jpeg.zip --csv results.csv
"""

import argparse
import itertools
import tempfile
from pathlib import Path

from sweep import Row, sweep, train

MIXERS = {"conv": [], "attention": ["--num-heads", "4"]}
RATES = {"conv": "0.003", "attention": "0.002"}
COLUMNS = ("mixer", "lr", "seed", "top1", "top5", "loss_nats", "parameters", "epochs", "seconds")


def measure(data: str, runs: Path, mixer: str, lr: str, seed: str) -> Row:
    options = ["--mixer", mixer, *MIXERS[mixer], "--lr", lr, "--seed", seed, "--eval-every-epochs", "0"]
    last, record = train("classify-cifar10-small", data, runs / f"{mixer}-{lr}-{seed}", options)
    figures = (
        round(100 * last["top1"], 2),
        round(100 * last["top5"], 2),
        round(last["loss"], 4),
        record["parameters"],
        record["recipe"]["epochs"],
        round(last["seconds"]),
    )
    return dict(zip(COLUMNS[3:], figures, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--csv", required=True, type=Path)
    parser.add_argument("--mixers", nargs="+", default=list(MIXERS), choices=MIXERS)
    parser.add_argument("--lrs", nargs="+", help="learning rates for all mixers")
    parser.add_argument("--seeds", nargs="+", default=["1", "2", "3"])
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    jobs = [
        (mixer, lr, seed)
        for seed, mixer in itertools.product(options.seeds, options.mixers)
        for lr in options.lrs or [RATES[mixer]]
    ]
    with tempfile.TemporaryDirectory() as folder:
        runs = options.runs or Path(folder)
        sweep(options.csv, COLUMNS, jobs, lambda job: measure(options.data, runs, *job), options.jobs)


if __name__ == "__main__":
    main()
