"""`aft` and `python -m aft`."""

import sys


def main() -> None:
    """Run the command line; where an extra is missing, say which."""
    try:
        from aft.cli import main as run

        run()
    except ModuleNotFoundError as error:
        package = (error.name or "aft").split(".")[0]
        if package == "aft":
            raise
        print(
            f"aft: the package {package} is missing; pip install 'attention-free[train]' brings it",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
