"""Which blocks of the [T, S] plane an operation visits, and which regions one sum stands for.

Pure arithmetic on lengths. A triangle on the causal diagonal is kept small, because there every row sees
other keys; below it the squares double, and the rest is covered by tall tiles, each one matrix product.
Where the bias is known to be zero (outside a window) nothing is visited: the sums of whole tiles of keys,
joined from the left and from the right, stand for all of it.
"""

from dataclasses import dataclass
from functools import lru_cache

TILE = 64
TALL = 256
WIDE = 512


@dataclass(frozen=True)
class Blocks:
    """``count`` blocks of equal shape, each ``TILE`` queries and keys below the last one's.

    Block i covers queries row + i * step ... + rows and keys column + i * step ... + columns. ``triangular``
    hides keys later than the query; ``fresh`` says that no earlier blocks touched these queries.
    """

    row: int
    column: int
    rows: int
    columns: int
    step: int
    count: int
    triangular: bool
    fresh: bool

    def narrow(self, start: int, count: int) -> "Blocks":
        """``count`` of the blocks, from ``start``."""
        return Blocks(
            self.row + start * self.step,
            self.column + start * self.step,
            self.rows,
            self.columns,
            self.step,
            count,
            self.triangular,
            self.fresh,
        )


@dataclass(frozen=True)
class Far:
    """The zero-bias part of each tile of queries: key tiles [0, before) and [after, all of them)."""

    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Blocks to visit in order, and the far region, None where there is none."""

    blocks: tuple[Blocks, ...]
    far: Far | None


@lru_cache(maxsize=256)
def dense_plan(T: int, S: int, causal: bool) -> Plan:
    """Every visible pair (t, s) is in exactly one block."""
    squares: list[tuple[int, int, int, int, bool]] = []
    diagonal = min(T, S) if causal else 0
    for start in range(0, diagonal, TILE):
        size = min(TILE, diagonal - start)
        squares.append((start, start, size, size, True))
    half = TILE
    while half < TALL:
        for start in range(0, diagonal - half, 2 * half):
            squares.append((start + half, start, min(half, diagonal - start - half), half, False))
        half *= 2
    for start, stop in _cut(0, diagonal, TALL) + _cut(diagonal, T, TALL):
        seen = start if start < diagonal else S
        squares += [(start, left, stop - start, right - left, False) for left, right in _cut(0, seen, WIDE)]
    return Plan(_gather(squares), None)


@lru_cache(maxsize=256)
def banded_plan(T: int, S: int, causal: bool, behind: int, ahead: int) -> Plan:
    """Blocks cover the pairs with -behind <= s - t <= ahead; the bias of every other pair is zero.

    A band that holds no pair (AFT-simple) is behind = -1.
    """
    empty = behind < 0
    tiles = -(-S // TILE)
    squares: list[tuple[int, int, int, int, bool]] = []
    before, after = [], []
    for start, stop in _cut(0, T, TILE):
        first = 0 if empty else min(max(0, start - behind) // TILE, tiles)
        last = 0 if empty else min(-(-max(0, stop + ahead) // TILE), tiles)
        if causal:
            own = start // TILE
            first, last = min(own, tiles) if empty else min(first, own), min(own, tiles)
            if start < S:
                squares.append((start, start, stop - start, min(stop, S) - start, True))
        squares += [
            (start, left, stop - start, right - left, False)
            for left, right in _cut(first * TILE, min(last * TILE, S), WIDE)
        ]
        before.append(first)
        after.append(tiles if causal else last)
    if not any(before) and all(bound == tiles for bound in after):
        return Plan(_gather(squares), None)
    return Plan(_gather(squares), Far(tuple(before), tuple(after)))


def _cut(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """Consecutive intervals of at most ``size``."""
    return [(left, min(left + size, stop)) for left in range(start, stop, size)]


def _gather(squares: list[tuple[int, int, int, int, bool]]) -> tuple[Blocks, ...]:
    """Joins squares of one shape that follow each other along the diagonal at a constant step."""
    touched: set[int] = set()
    families: dict[tuple[int, int, int, bool, bool], list[int]] = {}
    for row, column, rows, columns, triangular in squares:
        fresh = row not in touched
        touched.update(range(row, row + rows))
        families.setdefault((column - row, rows, columns, triangular, fresh), []).append(row)
    blocks = []
    for (offset, rows, columns, triangular, fresh), starts in families.items():
        while starts:
            step = starts[1] - starts[0] if len(starts) > 1 else 1
            count = 1
            while count < len(starts) and starts[count] == starts[0] + count * step:
                count += 1
            blocks.append(
                Blocks(starts[0], starts[0] + offset, rows, columns, step, count, triangular, fresh)
            )
            starts = starts[count:]
    return tuple(sorted(blocks, key=lambda block: not block.fresh))
