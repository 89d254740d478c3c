"""Consecutive parts of one array: training, validation and, where there is one, test."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aft.data.errors import DataError

if TYPE_CHECKING:  # recipes check their split with this module, and `aft --help` need not wait for numpy
    import numpy as np

PART_NAMES = ("train", "validation", "test")


def check_sizes(sizes: Sequence[float]) -> None:
    """Raise ValueError unless `sizes` are two or three fractions that add up to 1, or numbers of bytes."""
    if len(sizes) not in (2, 3):
        raise ValueError(f"two or three parts were expected ({', '.join(PART_NAMES)}), got {len(sizes)}")
    if not all(math.isfinite(size) and size > 0 for size in sizes):
        raise ValueError(f"every part must be larger than 0, got {tuple(sizes)}")
    if all(size < 1 for size in sizes):
        if not math.isclose(sum(sizes), 1.0, abs_tol=1e-9):
            raise ValueError(f"fractions must add up to 1, got {tuple(sizes)}")
    elif not all(size >= 1 and size == int(size) for size in sizes):
        raise ValueError(
            f"all fractions below 1 or all whole numbers of bytes were expected, got {tuple(sizes)}"
        )


def split_bytes(tokens: "np.ndarray", sizes: Sequence[float], source: str) -> "dict[str, np.ndarray]":
    """Cut `tokens [n]` into views named `train`, `validation` and, if three sizes are given, `test`.

    Args:
        sizes: fractions that add up to 1: a part ends at `int(n * sum so far)`, the last takes what is left;
            or whole numbers of bytes, taken from the beginning, so that bytes beyond the last part go unused.
        source: what an error calls the data.
    """
    check_sizes(sizes)
    if sizes[0] < 1:
        ends = [int(len(tokens) * sum(sizes[: i + 1])) for i in range(len(sizes) - 1)] + [len(tokens)]
    else:
        ends = [int(sum(sizes[: i + 1])) for i in range(len(sizes))]
        if ends[-1] > len(tokens):
            wanted = " + ".join(f"{int(size):,}" for size in sizes)
            raise DataError(f"{source} holds {len(tokens):,} bytes; the split {wanted} needs {ends[-1]:,}")
    starts = [0, *ends[:-1]]
    return {name: tokens[a:b] for name, a, b in zip(PART_NAMES, starts, ends, strict=False)}


def check_lengths(parts: "dict[str, np.ndarray]", context: int, source: str) -> None:
    """Raise DataError unless the whole and each of its parts hold a context and the byte that follows it."""
    total = sum(map(len, parts.values()))
    named = {source: total} | {f"the {name} part of {source}": len(part) for name, part in parts.items()}
    for name, length in named.items():
        if length < context + 1:
            raise DataError(
                f"{name} holds {length:,} bytes; a context of {context:,} needs at least {context + 1:,}"
            )
