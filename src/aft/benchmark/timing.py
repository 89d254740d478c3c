"""Times of functions that take turns, and what to say of them."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
SHORTEST = 2e-3  # seconds: a clock and a scheduler tell shorter samples apart badly


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of a sample."""

    middle: float
    low: float
    high: float


def interleaved(
    runs: Mapping[Key, Callable[[], object]],
    seconds: float,
    least: int = 5,
    most: int = 200,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, list[float]]:
    """Seconds a call of each function, one sample a round: in a round each of them has its turn.

    So that a machine that slows down slows all of them. Rounds go on for so many ``seconds``, but ``least``
    are made in any case and ``most`` at most. A sample of a short function is the mean of several calls.
    """
    repeats = {}
    for key, run in runs.items():
        run()
        repeats[key] = max(1, round(SHORTEST / max(_sample(run, 1, clock), 1e-7)))
    taken: dict[Key, list[float]] = {key: [] for key in runs}
    began, rounds = clock(), 0
    while rounds < least or (rounds < most and clock() - began < seconds):
        for key, run in runs.items():
            taken[key].append(_sample(run, repeats[key], clock))
        rounds += 1
    return taken


def _sample(run: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    began = clock()
    for _ in range(repeats):
        run()
    return (clock() - began) / repeats


def spread(sample: Sequence[float]) -> Spread:
    if len(sample) == 1:
        return Spread(sample[0], sample[0], sample[0])
    low, middle, high = statistics.quantiles(sample, n=4, method="inclusive")
    return Spread(middle, low, high)


def spread_of_ratio(times: Sequence[float], of: Sequence[float]) -> Spread:
    """Of the ratio within each round, which a machine that was slow for some rounds does not change."""
    return spread([a / b for a, b in zip(times, of, strict=True)])
