"""Which blocks of the [T, S] plane an operation visits, and which regions one sum stands for.

Pure arithmetic on lengths. A triangle on the causal diagonal is kept small, because there every row sees
other keys; below it the squares double, and the rest is covered by tall tiles, each one matrix product.
Where the bias is known to be zero (outside a window) nothing is visited: the sums of whole tiles of keys,
joined from the left and from the right, stand for all of it.
"""

from dataclasses import dataclass
from functools import lru_cache

TILE = 64
# Sides of the largest tiles of one bias; of several at once half of them.
TALL = 512
WIDE = 1024
# Sides of a block for one plain product, and the rows of those on the diagonal: large, for BLAS is then
# fastest, and small, for half of their last columns is hidden.
STRIP, STRIP_ROWS, STEP = 512, 512, 128


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
    causal: bool


@lru_cache(maxsize=256)
def dense_plan(T: int, S: int, causal: bool, groups: int = 1) -> Plan:
    """Every visible pair (t, s) is in exactly one block, read for ``groups`` biases at once."""
    tall, wide = (TALL, WIDE) if groups == 1 else (TALL // 2, WIDE // 2)
    squares: list[tuple[int, int, int, int, bool]] = []
    diagonal = min(T, S) if causal else 0
    for start in range(0, diagonal, TILE):
        size = min(TILE, diagonal - start)
        squares.append((start, start, size, size, True))
    half = TILE
    while half < tall:
        for start in range(0, diagonal - half, 2 * half):
            squares.append((start + half, start, min(half, diagonal - start - half), half, False))
        half *= 2
    for start, stop in _cut(0, diagonal, tall) + _cut(diagonal, T, tall):
        seen = start if start < diagonal else S
        squares += [(start, left, stop - start, right - left, False) for left, right in _cut(0, seen, wide)]
    return Plan(_gather(squares), None, causal)


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
            for left, right in _cut(first * TILE, min(last * TILE, S), WIDE // 2)
        ]
        before.append(first)
        after.append(tiles if causal else last)
    if not any(before) and all(bound == tiles for bound in after):
        return Plan(_gather(squares), None, causal)
    return Plan(_gather(squares), Far(tuple(before), tuple(after)), causal)


@lru_cache(maxsize=256)
def strips(T: int, S: int, causal: bool, groups: int) -> tuple[tuple[Blocks, ...], ...]:
    """Single blocks for plain products, every visible pair in exactly one, by the keys they begin with.

    The first strip visits every query. A triangular block may begin left of the diagonal. With several
    ``groups`` to a product its blocks are smaller, so that its size stays.
    """
    width = max(TILE, STRIP >> (groups.bit_length() // 2))
    height = max(TILE, STRIP_ROWS * STRIP // (groups * width))
    result = []
    for left, right in _cut(0, min(S, T) if causal else S, width):
        diagonal = _cut(left, min(right, T), STEP) if causal else []
        below = _cut(right if causal else 0, T, height)
        steps = [(top, bottom, min(bottom, right), True) for top, bottom in diagonal]
        steps += [(top, bottom, right, False) for top, bottom in below]
        result.append(
            tuple(
                Blocks(top, left, bottom - top, end - left, 1, 1, triangular, left == 0)
                for top, bottom, end, triangular in steps
            )
        )
    return tuple(result)


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
