"""Growth as an exponent."""

import math
from collections.abc import Sequence


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The e of value = c size^e that fits best: least squares of logarithms.

    Raises:
        ValueError: fewer than two different sizes, or something that is not above 0.
    """
    if len(set(sizes)) < 2:
        raise ValueError(f"an exponent needs two different sizes at least, got {sorted(set(sizes))}")
    if min(*sizes, *values) <= 0:
        raise ValueError("an exponent needs sizes and values above 0")
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    centre, middle = sum(x) / len(x), sum(y) / len(y)
    along = sum((a - centre) * (b - middle) for a, b in zip(x, y, strict=True))
    return along / sum((a - centre) ** 2 for a in x)
