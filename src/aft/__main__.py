"""`aft` and `python -m aft`."""

import os
import sys

_FOR_IMAGES = ("PIL", "sklearn", "timm", "torchvision")


def main() -> None:
    """Run the command line; where an extra is missing, say which."""
    share_cores()
    try:
        from aft.cli import main as run

        run()
    except ModuleNotFoundError as error:
        package = (error.name or "aft").split(".")[0]
        if package == "aft":
            raise
        extra = "images" if package in _FOR_IMAGES else "train"
        print(
            f"aft: the package {package} is missing; pip install 'attention-free[{extra}]' brings it",
            file=sys.stderr,
        )
        sys.exit(2)


def share_cores() -> None:
    """Have torch's threads wait asleep, unless the user has chosen how they wait.

    By default they spin at every barrier, and beside another process on the same cores a training step of
    0.15 s was seen to take 7 s; with a short spin it takes 0.25 to 0.5 s, and on an idle machine as long as
    before. The OpenMP runtime reads this once, when torch is imported.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = "1000"


if __name__ == "__main__":
    main()
