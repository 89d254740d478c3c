"""A trained DeiT converted to AFT-conv against the same AFT-conv from random weights: top-1, as CSV.

What the paper's Table 8 asks, on CIFAR-10 images: both are `aft train classify-cifar10-small` with the same
steps and seeds, one of them with `--init-from` the conversion of a run with `--mixer attention`, such as
`benchmarks/cifar10_classifier.py --runs DIR` leaves behind.

    python benchmarks/cifar10_conversion.py --data cifar10_20k_jpeg.zip --source DEIT_RUN --csv results.csv
"""

import argparse
import itertools
import tempfile
from pathlib import Path

from sweep import Row, sweep, train

import aft
from aft.training.loading import load_model

COLUMNS = ("start", "epochs", "seed", "top1", "loss_nats", "seconds")
STARTS = ("random", "converted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--source", required=True, type=Path, help="run directory of the DeiT")
    parser.add_argument("--csv", required=True, type=Path)
    parser.add_argument("--epochs", nargs="+", default=["4"])
    parser.add_argument("--seeds", nargs="+", default=["1", "2"])
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        converted = Path(folder, "converted")
        model = aft.convert(load_model(options.source), mixer="conv", num_heads=32, kernel_size=7)
        print(model.conversion_report)
        model.save_pretrained(converted)

        def measure(job: tuple[str, ...]) -> Row:
            start, epochs, seed = job
            chosen = ["--epochs", epochs, "--warmup-epochs", "1", "--seed", seed, "--eval-every-epochs", "0"]
            if start == "converted":
                chosen += ["--init-from", str(converted)]
            last, _ = train("classify-cifar10-small", options.data, Path(folder, "-".join(job)), chosen)
            figures = round(100 * last["top1"], 2), round(last["loss"], 4), round(last["seconds"])
            return dict(zip(COLUMNS[3:], figures, strict=True))

        jobs = list(itertools.product(STARTS, options.epochs, options.seeds))
        sweep(options.csv, COLUMNS, jobs, measure, options.jobs)


if __name__ == "__main__":
    main()
