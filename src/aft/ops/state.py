"""What a causal operation remembers of the keys it has seen, to go on from there."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor


class AFTState(NamedTuple):
    r"""The past of a causal operation: sums of the old keys, and the recent ones as they are.

    A key counts with a position bias only for its last R positions; older ones are in the sums for good, so
    that the state does not grow. R is 0 for AFT-simple, ``window_size - 1`` for AFT-local and
    ``kernel_size - 1`` for AFT-conv. AFT-full has a bias for every pair: it keeps all keys and values, sums
    none of them (num, den and max are [B, 0, 0], [B, 0] and [B, 0]), and grows with the sequence.

    Symbol                                     field     shape          dtype
    sum_s exp(k_s - max) v_s, over old keys    num       [B, N, P]      float64
    sum_s exp(k_s - max)                       den       [B, N]         float64
    max_s k_s, -inf where there are none       max       [B, N]         float64
    k_s of the last R positions, oldest first  keys      [B, R, N]      that of k
    v_s of the same                            values    [B, R, N * P]  that of v
    positions seen                             length    [B]            int64

    N counts channels of keys (H for AFT-conv, else D), P channels of values for each of them. Slots that a
    sequence has not filled yet come first, with keys of -inf (absent) and values of 0. The sums are float64
    because a term of 1 is lost in a float32 sum of 10^7, and long before that each addition rounds alike.

    A pytree of tensors whose first dimension is the batch; save it as ``state._asdict()`` and restore it as
    ``AFTState(**tensors)``.
    """

    num: Tensor
    den: Tensor
    max: Tensor
    keys: Tensor
    values: Tensor
    length: Tensor

    @property
    def grows(self) -> bool:
        """Whether it keeps every key, as AFT-full's does: then there are no sums, not even empty ones."""
        return self.num.shape[1:] == (0, 0)

    @property
    def nbytes(self) -> int:
        """Memory of all tensors, in bytes."""
        return sum(x.nbytes for x in self)

    def detach(self) -> Self:
        """The state without its history: gradients end here."""
        return self._make(x.detach() for x in self)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The state on another device; dtypes stay as they are."""
        return self._make(x.to(device, non_blocking=non_blocking) for x in self)

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """The sequences that an index [B'] of ints names, in its order, as often as it names them."""
        rows = torch.as_tensor(rows, dtype=torch.int64, device=self.length.device)
        return self._make(x.index_select(0, rows) for x in self)


def empty_state(keys: Tensor, values: Tensor, recent: int | None) -> AFTState:
    """The state before the first position, for keys [B, ..., N] and values [B, ..., N * P] to come.

    ``recent`` is R; None keeps every key and sums none, which is AFT-full.
    """
    B, N = keys.shape[0], keys.shape[-1]
    summed, P = (0, 0) if recent is None else (N, head_channels(N, values.shape[-1]))
    wide = {"dtype": torch.float64, "device": keys.device}
    return AFTState(
        torch.zeros(B, summed, P, **wide),
        torch.zeros(B, summed, **wide),
        torch.full((B, summed), -torch.inf, **wide),
        keys.new_full((B, recent or 0, N), -torch.inf),
        values.new_zeros(B, recent or 0, values.shape[-1]),
        torch.zeros(B, dtype=torch.int64, device=keys.device),
    )


def check_state(
    name: str, state: object, B: int, N: int, D: int, recent: int | None, device: torch.device
) -> None:
    """Raises unless it is a state of B sequences, N channels of keys and D of values, as `empty_state` begins
    one; the message begins with ``name``."""
    if not isinstance(state, AFTState):
        raise TypeError(f"{name}: state must be an AFTState or None, got {type(state).__name__}")
    summed = 0 if recent is None else N
    slots = state.keys.shape[1] if recent is None and state.keys.ndim == 3 else recent
    sums, P = (B, summed), 0 if recent is None else head_channels(N, D)
    wanted = ((*sums, P), sums, sums, (B, slots, N), (B, slots, D), (B,))
    dtypes = (*(torch.float64,) * 3, state.keys.dtype, state.values.dtype, torch.int64)
    for field, x, size, dtype in zip(state._fields, state, wanted, dtypes, strict=True):
        if x.shape != size or x.device != device or x.dtype != dtype:
            raise ValueError(
                f"{name}: state.{field} must be {size} of {dtype} on {device}, "
                f"got {tuple(x.shape)} of {x.dtype} on {x.device}: "
                "is it another operation's, or of other sequences?"
            )


def extend(state: AFTState, keys: Tensor, values: Tensor, padding: Tensor | None = None) -> AFTState:
    """The state after n more positions with keys [B, n, N] and values [B, n, N * P], 0 where a key is -inf.

    ``padding`` [B] counts the positions at the end of each row that are none: they leave no trace.
    """
    n, recent = keys.shape[1], state.keys.shape[1]
    length = state.length + n
    if padding is not None:
        length = length - padding
        keys, values = torch.cat([state.keys, keys], 1), torch.cat([state.values, values], 1)
        keys, values = _shift(keys, padding, -torch.inf), _shift(values, padding, 0.0)
        if state.grows:
            return state._replace(keys=keys, values=values, length=length)
        state = with_keys(state, keys[:, :n], values[:, :n])
        keys, values = _copy(keys[:, n:]), _copy(values[:, n:])
    elif state.grows:
        keys, values = torch.cat([state.keys, keys], 1), torch.cat([state.values, values], 1)
    elif n < recent:
        state = with_keys(state, state.keys[:, :n], state.values[:, :n])
        keys, values = torch.cat([state.keys[:, n:], keys], 1), torch.cat([state.values[:, n:], values], 1)
    else:
        old = n - recent
        state = with_keys(with_keys(state, state.keys, state.values), keys[:, :old], values[:, :old])
        keys, values = _copy(keys[:, old:]), _copy(values[:, old:])
    return state._replace(keys=keys, values=values, length=length)


def combine(first: AFTState, second: AFTState) -> AFTState:
    """The state of two neighbouring pieces of a sequence from those of each: associative, O(R N P).

    Keys of the first piece that are no longer recent go to the sums. AFT-full sums none: its keys are laid
    end to end.

    Raises:
        ValueError: the states are of different operations or sizes.
    """
    shapes = [(state.num.shape, state.keys.shape[2:], state.values.shape[2:]) for state in (first, second)]
    recent = first.keys.shape[1]
    if shapes[0] != shapes[1] or not (first.grows or recent == second.keys.shape[1]):
        raise ValueError(
            "combine: both states must be of one operation, got "
            + " and ".join(
                f"num {tuple(x.num.shape)}, keys {tuple(x.keys.shape)}, values {tuple(x.values.shape)}"
                for x in (first, second)
            )
        )
    slots = second.keys.shape[1]
    fresh = second.length.clamp(max=slots)
    empty = (slots - fresh)[:, None]
    keys, values = torch.cat([first.keys, second.keys], 1), torch.cat([first.values, second.values], 1)
    # The slots that the second has not filled lie in the middle: what is before them moves up.
    slot = torch.arange(keys.shape[1], device=keys.device)
    source = torch.where(slot >= recent + empty, slot, slot - empty)
    keys, values = _take(keys, source, -torch.inf), _take(values, source, 0.0)
    length = first.length + second.length
    if first.grows:
        return first._replace(keys=keys, values=values, length=length)
    state = with_keys(first, keys[:, :slots], values[:, :slots])
    num, den, top = _union(state, second.num, second.den, second.max)
    return AFTState(num, den, top, _copy(keys[:, slots:]), _copy(values[:, slots:]), length)


def with_keys(state: AFTState, keys: Tensor, values: Tensor) -> AFTState:
    """The state with keys [B, n, N] and values [B, n, N * P] in its sums too; a key of -inf adds nothing."""
    if keys.shape[1] == 0:
        return state
    # All in float64: the gradient of a key is a difference of terms, and values may be of any size.
    keys, values = keys.double(), by_key(values, keys.shape[2])
    if keys.shape[1] == 1:  # its own largest: a token makes no more operations than it needs
        top = keys[:, 0]
        num, den = values[:, 0].double(), torch.ones_like(top)
    else:
        top = keys.detach().amax(1)
        terms = torch.exp(keys - finite(top)[:, None])
        num, den = (terms[..., None] * values).sum(1), terms.sum(1)
    num, den, top = _union(state, num, den, top)
    return state._replace(num=num, den=den, max=top)


def _union(state: AFTState, num: Tensor, den: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The state's sums and others of the same form, as one: num, den and max.

    The result's max is a constant to autograd, whatever it was computed from: the sums are relative to it.
    """
    largest = torch.maximum(state.max, top).detach()
    origin = finite(largest)
    a, b = torch.exp(state.max - origin), torch.exp(top - origin)
    num = torch.addcmul(state.num * a[..., None], num, b[..., None])
    return num, torch.addcmul(state.den * a, den, b), largest


def head_channels(N: int, D: int) -> int:
    """P, how many of D channels of values belong to each of N channels of keys."""
    return D // N if N else 1


def by_key(values: Tensor, N: int) -> Tensor:
    """[..., N * P] as [..., N, P]."""
    return values.unflatten(-1, (N, head_channels(N, values.shape[-1])))


def _copy(x: Tensor) -> Tensor:
    """Its own memory: a view would keep the whole piece that it is a part of."""
    return x.clone(memory_format=torch.contiguous_format)


def finite(x: Tensor) -> Tensor:
    """-inf, the largest of nothing, as a number far below all others: what it is taken from stays -inf."""
    return x.clamp(min=torch.finfo(x.dtype).min)


def _shift(x: Tensor, by: Tensor, fill: float) -> Tensor:
    """[B, L, C] moved ``by`` [B] positions towards the end; what moves out is lost."""
    return _take(x, torch.arange(x.shape[1], device=x.device) - by[:, None], fill)


def _take(x: Tensor, source: Tensor, fill: float) -> Tensor:
    """x [B, L, C] at positions ``source`` [B, L'], ``fill`` where that is negative."""
    taken = x.gather(1, source.clamp(min=0)[..., None].expand(-1, -1, x.shape[2]))
    return taken.masked_fill((source < 0)[..., None], fill)
