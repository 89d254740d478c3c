"""`python -m aft`."""

from aft.cli import main

if __name__ == "__main__":
    main()
