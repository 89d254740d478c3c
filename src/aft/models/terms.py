"""Keys and values kept as the terms of an AFT mean, so that one matrix product makes a token's sums.

A mean over keys is num / den with [num, den] = sum_s exp(w_s) [exp(k_s - M) v_s, exp(k_s - M)], for any
reference M: the bias w_s changes with every token, the term in brackets does not. It is computed once, when
its key comes, and a token costs no exponential but those of its own key and of the biases.

In float32 that is exact as long as the biases of a row spread by at most `SPREAD` nats (0 among them where
keys outside a window count): M follows the largest key, whose own term then weighs at least exp(-SPREAD), and
what is lost of a smaller key is below that by many orders more. Wider rows need a maximum for each row, as
`aft.ops` takes it.
"""

import torch
from torch import Tensor

SPREAD = 40.0
LIFT = 20.0  # how far a key may be above its reference: exp(20) is far from float32's end, and so is exp(60)
CHUNK = 4096  # rows summed in one product: longer float32 sums lose digits
SLACK = 8  # tokens between two moves of a window to the start of its buffer


# Numerators [G, n, P] and denominators, [G, n, 1] to multiply with and [G, n].
Parts = tuple[Tensor, Tensor, Tensor]


class TooWideError(Exception):
    """The position biases of a row spread by more than `SPREAD`, or are not finite."""


class Terms:
    """What is common to all ways of keeping terms, which are rows of n P numerators and n denominators.

    G groups do not share biases (sequences of a batch, heads of AFT-conv). Each has n channels of keys and,
    for each of those, P channels of values.

    Args:
        keys, values: [G, S, n] and [G, S, n * P], the keys so far; -inf for one that is absent. They set the
            references, the largest key of each channel.
        floor: [G, n], references are at least this.
    """

    def __init__(self, keys: Tensor, values: Tensor, floor: Tensor | None = None):
        self._n = keys.shape[2]
        self._dtype = torch.promote_types(keys.dtype, torch.float32)
        self._numerators = values.shape[2]
        largest = [] if floor is None else [floor]
        if keys.shape[1]:
            largest.append(keys.amax(1))
        if not largest:
            raise ValueError(f"keys must hold at least one position, got {tuple(keys.shape)}")
        # Where every key is absent any reference will do.
        top = torch.stack([x.to(self._dtype) for x in largest]).amax(0).nan_to_num(neginf=0.0)
        self._reference = top
        self._lift = torch.empty_like(top)
        self._sums = top.new_empty(len(top), 1, self._numerators + self._n)
        self._num, self._den, _ = self._parts(self._sums[:, 0])

    def _parts(self, row: Tensor) -> Parts:
        """Views of a row [G, n * (P + 1)]."""
        numerators, denominators = row[:, : self._numerators], row[:, self._numerators :]
        return numerators.unflatten(1, (self._n, -1)), denominators[..., None], denominators

    def _terms(self, keys: Tensor, values: Tensor) -> Tensor:
        """Terms [G, S, n * (P + 1)] of keys [G, S, n] and values [G, S, n * P]."""
        weights = torch.exp(keys.to(self._dtype) - self._reference[:, None])
        num = weights[..., None] * values.unflatten(2, (self._n, -1))
        return torch.cat([num.flatten(2), weights], 2)

    def _set_term(self, row: Parts, key: Tensor, value: Tensor) -> None:
        """Makes a row that of one more key [G, n] with value [G, n, P]."""
        lift = torch.sub(key, self._reference, out=self._lift)
        if lift.max().item() > LIFT:
            reference = torch.maximum(self._reference, key)
            factor = torch.exp(self._reference - reference)
            spread = factor.repeat_interleave(self._numerators // self._n, 1)
            self._scale(torch.cat([spread, factor], 1)[:, None])
            self._reference = reference
            torch.sub(key, reference, out=lift)
        numerators, weights, denominators = row
        torch.exp(lift, out=denominators)
        torch.mul(value, weights, out=numerators)

    def _scale(self, factor: Tensor) -> None:
        """Multiplies what is kept by a factor [G, 1, n * (P + 1)]."""
        raise NotImplementedError


class WindowTerms(Terms):
    """Terms of the last ``window`` keys, and the sum of all older ones: memory and time O(window n P).

    A key that has left the window keeps its row for up to `SLACK` tokens, weighing what all old ones do.

    Args:
        keys, values: the most recent ``window - 1`` keys, oldest first.
        num, den, top: [G, n, P], [G, n] and [G, n], the sums over older ones, as in `AFTState`.
    """

    def __init__(self, keys: Tensor, values: Tensor, num: Tensor, den: Tensor, top: Tensor):
        super().__init__(keys, values, floor=top)
        self._recent = keys.shape[1]
        scale = torch.exp(top - self._reference)
        self._set_old(torch.cat([(num * scale[..., None]).flatten(1), den * scale], 1))
        self._rows = self._sums.new_empty(len(keys), self._recent + SLACK, self._sums.shape[2])
        # Views are made once: each costs as much as a product with one.
        self._parts_of = [self._parts(row) for row in self._rows.unbind(1)]
        self._first = [self._rows[:, :end] for end in range(self._rows.shape[1] + 1)]
        self._single = len(keys) == 1
        self._single_sums = self._sums[0, 0]
        if self._single:
            self._first = [rows[0].t() for rows in self._first]
        self._end = self._recent  # where the next key goes
        if self._end:
            self._rows[:, : self._end] = self._terms(keys, values)

    def _set_old(self, old: Tensor) -> None:
        """Old sums [G, n * (P + 1)]: exact ones to add to, and as products take them."""
        self._old, self._old_narrow = old.double(), old[:, None].to(self._dtype)
        self._single_old = self._old_narrow[0, 0]

    def append(self, key: Tensor, value: Tensor) -> None:
        """One more key [G, n] with its value [G, n, P]."""
        if self._end == len(self._parts_of):
            self._set_old(self._old + self._rows[:, :SLACK].sum(1, dtype=torch.float64))
            self._end = _to_the_start(self._rows, self._recent)
        self._set_term(self._parts_of[self._end], key, value)
        self._end += 1

    def mean(self, weights: Tensor, old_weight: float = 1.0) -> Tensor:
        """The mean [G, n, P] of old keys and those of the window.

        ``weights`` [G, 1, SLACK - 1 + window], or for a single group [SLACK - 1 + window], are ``old_weight``
        and then those of the window's keys, oldest first.
        """
        end = self._end
        rows, weights = self._first[end], weights.narrow(-1, weights.shape[-1] - end, end)
        if self._single:
            torch.addmv(self._single_old, rows, weights, beta=old_weight, out=self._single_sums)
        else:
            torch.baddbmm(self._old_narrow, weights, rows, beta=old_weight, out=self._sums)
        return self._num / self._den

    def old(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sums over keys older than the last ``window - 1``, as in `AFTState`: num, den and max."""
        left = self._rows[:, : self._end - self._recent]
        num, _, den = self._parts(self._old + left.sum(1, dtype=torch.float64))
        return num, den, self._reference.double().masked_fill(den == 0, -torch.inf)

    def _scale(self, factor: Tensor) -> None:
        self._set_old(self._old * factor[:, 0])
        self._rows[:, : self._end].mul_(factor)


class RecentRows:
    """The last rows of many: as they are put in, oldest first.

    Args:
        rows: [R, C], the last ones so far.
    """

    def __init__(self, rows: Tensor):
        self._count = self._end = len(rows)
        self._rows = rows.new_empty(1, self._count + SLACK, rows.shape[1])
        self._rows[0, : self._count] = rows

    def append(self, *parts: Tensor) -> None:
        """One more row [C], in parts."""
        if self._end == self._rows.shape[1]:
            self._end = _to_the_start(self._rows, self._count)
        torch.cat(parts, out=self._rows[0, self._end])
        self._end += 1

    def last(self) -> Tensor:
        """A copy of the last rows, [R, C]."""
        return self._rows[0, self._end - self._count : self._end].clone()


def _to_the_start(rows: Tensor, count: int) -> int:
    """Moves the last ``count`` of full rows [G, S, C] to their start; where the next one goes."""
    # A copy in between: the two places may overlap.
    rows[:, :count] = rows[:, rows.shape[1] - count :].clone()
    return count


class GrowingTerms(Terms):
    """Terms of every key, of any number: memory and a token's time O(S n P). Rows are never copied to grow.

    Args:
        keys, values: at least one.
    """

    def __init__(self, keys: Tensor, values: Tensor):
        super().__init__(keys, values)
        self._term = torch.empty_like(self._sums)
        self._term_parts = self._parts(self._term[:, 0])
        self._chunks: list[Tensor] = []
        self._length = 0
        for start in range(0, keys.shape[1], CHUNK):
            part = slice(start, start + CHUNK)
            self._grow(self._terms(keys[:, part], values[:, part]))

    def __len__(self) -> int:
        return self._length

    def append(self, key: Tensor, value: Tensor) -> None:
        """One more key [G, n] with its value [G, n, P]."""
        self._set_term(self._term_parts, key, value)
        self._grow(self._term)

    def mean(self, weights: Tensor) -> Tensor:
        """The mean [G, n, P] with a weight for every key: [G, 1, S]."""
        beta = 0.0
        for chunk, near in zip(self._chunks, weights.split(CHUNK, 2), strict=True):
            self._sums.baddbmm_(near, chunk.narrow(1, 0, near.shape[2]), beta=beta)
            beta = 1.0
        return self._num / self._den

    def _grow(self, rows: Tensor) -> None:
        """Adds rows that all have room in one chunk."""
        used = self._length % CHUNK
        if not used:
            self._chunks.append(rows.new_empty(len(rows), 0, rows.shape[2]))
        chunk, count = self._chunks[-1], rows.shape[1]
        if chunk.shape[1] < used + count:
            # A chunk itself doubles, so that a short sequence does not pay for a whole one.
            room = chunk.new_empty(len(rows), min(CHUNK, max(64, 2 * (used + count))), rows.shape[2])
            room[:, :used] = chunk[:, :used]
            self._chunks[-1] = chunk = room
        chunk[:, used : used + count] = rows
        self._length += count

    def _scale(self, factor: Tensor) -> None:
        for chunk in self._chunks:
            chunk.mul_(factor)
