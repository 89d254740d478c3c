"""The operations as streams: any number of new positions, given the state that the earlier ones left.

Prefill, a chunk and a single token are one call. However a sequence is cut, the pieces' outputs are those of
the causal operation over the whole, and the gradients too: also those of the state that went in.

A single position is a sum over the state and the recent keys. A longer piece is a causal problem of its own
over recent and new keys, solved by the same implementation as ever and joined with the old keys' sums.
"""

import copy
from abc import ABC, abstractmethod
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from aft.ops import eager, native
from aft.ops.checks import (
    check_conv,
    check_devices,
    check_floating,
    check_mask,
    check_position_bias,
    check_sequence,
    check_window,
    shape,
)
from aft.ops.functional import PositionBias, QueryGate, gated, implementation
from aft.ops.spec import Bias, DenseBias, KernelBias, LowRankBias, Problem, without_autocast
from aft.ops.state import AFTState, by_key, check_state, empty_state, extend, finite, head_channels, with_keys
from aft.ops.sums import Sums, join

# Elements of a temporary up to which a single position is summed directly, in float64.
DIRECT = 1 << 18


def aft_full_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_bias: PositionBias,
    state: AFTState | None = None,
    *,
    key_padding_mask: Tensor | None = None,
    lengths: Tensor | None = None,
    query_gate: QueryGate | None = torch.sigmoid,
    impl: str = "auto",
) -> tuple[Tensor, AFTState]:
    r"""Causal AFT-full over n more positions: `aft_full`, continued.

    The bias of a pair is known only when its query comes, so that the state is every key and value so far:
    it grows by 2 D numbers a position. AFT-simple, -local and -conv have a state of constant size.

    Args:
        q, k, v: the new queries, keys and values [B, n, D], n >= 0.
        position_bias: w for all positions that will come: a table [T, T], one for each sequence [B, T, T], or
            a low-rank pair (u [T, R], v [T, R]).
        state: what the call before returned, None at the start of a sequence.
        key_padding_mask: bool [B, n], True where a key is to be ignored; it takes a position all the same.
        lengths: int64 [B], how many of the n positions each sequence has; those after are padding, which
            takes no position and leaves no trace, and their outputs mean nothing. All where left out.
        query_gate, impl: as `aft_full`.

    Returns:
        The outputs [B, n, D] in the dtype of ``v``, and the state after the new positions.

    Raises:
        ValueError, TypeError: an argument has the wrong shape or dtype, the state is another operation's, or
            the position bias ends before the sequence does.

    Time O(n (S + n) D) after S positions, memory O((S + n) D).
    """
    name = "aft_full_step"
    check_sequence(name, q, k, v)
    stream = _Full(check_position_bias(name, position_bias, q.shape[0]))
    return _step(name, stream, q, k, v, state, key_padding_mask, lengths, query_gate, impl)


def aft_simple_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: AFTState | None = None,
    *,
    key_padding_mask: Tensor | None = None,
    lengths: Tensor | None = None,
    query_gate: QueryGate | None = torch.sigmoid,
    impl: str = "auto",
) -> tuple[Tensor, AFTState]:
    r"""Causal AFT-simple over n more positions: `aft_simple`, continued.

    Arguments, results and errors as `aft_full_step`. Time O(n D), state O(D), whatever came before.
    """
    name = "aft_simple_step"
    check_sequence(name, q, k, v)
    return _step(name, _Simple(), q, k, v, state, key_padding_mask, lengths, query_gate, impl)


def aft_local_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_bias: PositionBias,
    window_size: int,
    state: AFTState | None = None,
    *,
    key_padding_mask: Tensor | None = None,
    lengths: Tensor | None = None,
    query_gate: QueryGate | None = torch.sigmoid,
    impl: str = "auto",
) -> tuple[Tensor, AFTState]:
    r"""Causal AFT-local over n more positions: `aft_local`, continued.

    Arguments, results and errors as `aft_full_step`. Time O((n + window_size) window_size D), state
    O(window_size D), whatever came before.
    """
    name = "aft_local_step"
    check_sequence(name, q, k, v)
    check_window(name, window_size)
    stream = _Local(check_position_bias(name, position_bias, q.shape[0]), window_size)
    return _step(name, stream, q, k, v, state, key_padding_mask, lengths, query_gate, impl)


def aft_conv_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    state: AFTState | None = None,
    *,
    width: int | None = None,
    key_padding_mask: Tensor | None = None,
    lengths: Tensor | None = None,
    query_gate: QueryGate | None = torch.sigmoid,
    impl: str = "auto",
) -> tuple[Tensor, AFTState]:
    r"""Causal AFT-conv over n more positions: `aft_conv`, continued, over a sequence or in raster order.

    Args:
        q, k, v: [B, n, D], [B, n, H] and [B, n, D], on a grid too: its cells row after row.
        kernel: w, [H, K], on a grid [H, Ky, Kx].
        width: of the grid, in cells; None for a sequence.

    Other arguments, results and errors as `aft_full_step`. Time O((n + K) K D) (on a grid K is the K_y / 2
    rows of cells before the query), state O(K D), whatever came before.
    """
    name = "aft_conv_step"
    check_floating(name, q=q, k=k, v=v, kernel=kernel)
    space = 2 if kernel.ndim == 3 else 1
    if (width is not None) != (space == 2):
        raise ValueError(
            f"{name}: width goes with a kernel [H, Ky, Kx], and a kernel [H, K] has none; "
            f"got kernel {shape(kernel)} and width {width}"
        )
    if space == 1:
        check_conv(name, q, k, v, kernel)
        stream: _Stream = _Conv(kernel)
    else:
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise ValueError(f"{name}: width must be an int of at least 1, got {width!r}")
        # Each position is checked as a grid of one row.
        q_row, k_row, v_row = (x[:, None] if x.ndim == 3 else x for x in (q, k, v))
        check_conv(name, q_row, k_row, v_row, kernel)
        stream = _Grid(kernel, width)
    return _step(name, stream, q, k, v, state, key_padding_mask, lengths, query_gate, impl)


class _Stream(ABC):
    """An operation's bias, as a stream asks for it."""

    tensors: tuple[Tensor, ...] = ()  # that it is made of
    knows_place = False  # whether biases depend on where in the sequence they are

    @property
    @abstractmethod
    def recent(self) -> int | None:
        """Keys to keep beside the sums; None: all, and no sums."""

    @property
    def reach(self) -> int | None:
        """Positions that it has biases for; None: any number."""
        return None

    @abstractmethod
    def row(self, length: Tensor, recent: int) -> Tensor:
        """Biases [B or 1, recent + 1, N or 1], float64, of the query at position ``length`` [B]: those of
        ``recent`` keys before it, and its own."""

    @abstractmethod
    def bias(self, start: int, size: int) -> Bias:
        """Biases among the ``size`` positions from ``start`` on."""

    def before(self, start: int) -> int:
        """How many recent keys belong into the problem of a piece that starts there."""
        return self.recent or 0

    def select(self, rows: Tensor) -> "_Stream":
        """The same for some of the sequences."""
        return self

    window_size: int | None = None


class _Simple(_Stream):
    @property
    def recent(self) -> int:
        return 0

    def row(self, length: Tensor, recent: int) -> Tensor:
        return torch.zeros(1, 1, 1, dtype=torch.float64, device=length.device)

    def bias(self, start: int, size: int) -> Bias:
        return None


class _ByPlace(_Stream):
    """A bias for each pair of positions."""

    knows_place = True

    def __init__(self, whole: DenseBias | LowRankBias):
        self.whole = whole
        self.tensors = (whole.table,) if isinstance(whole, DenseBias) else (whole.left, whole.right)

    @property
    def reach(self) -> int:
        match self.whole:
            case DenseBias(table):
                return min(table.shape[-2:])
            case LowRankBias(left, right):
                return min(len(left), len(right))

    def before(self, start: int) -> int:
        return min(start, self.recent or 0)

    def select(self, rows: Tensor) -> _Stream:
        match self.whole:
            case DenseBias(table) if table.ndim == 3:
                selected = copy.copy(self)
                selected.whole = DenseBias(table.index_select(0, rows))
                return selected
        return self

    def bias(self, start: int, size: int) -> Bias:
        return self.block(slice(start, start + size), slice(start, start + size))

    def block(self, queries: slice, keys: slice) -> Bias:
        match self.whole:
            case DenseBias(table):
                return DenseBias(table[..., queries, keys])
            case LowRankBias(left, right):
                return LowRankBias(left[queries], right[keys])

    def row(self, length: Tensor, recent: int) -> Tensor:
        # Before its first position, and after the last that has a bias, a sequence has nothing but padding.
        query = length.clamp(max=self.reach - 1)[:, None]
        key = (query + torch.arange(-recent, 1, device=length.device)).clamp(min=0)
        match self.whole:
            case DenseBias(table) if table.ndim == 2:
                row = table[query, key]
            case DenseBias(table):
                row = table[torch.arange(len(table), device=table.device)[:, None], query, key]
            case LowRankBias(left, right):
                row = (left[query].double() * right[key].double()).sum(2)
        return row.double()[..., None]


class _Local(_ByPlace):
    def __init__(self, whole: DenseBias | LowRankBias, window_size: int):
        super().__init__(whole)
        self.window_size = window_size
        self._recent = window_size - 1

    @property
    def recent(self) -> int:
        return self._recent


class _Full(_ByPlace):
    @property
    def recent(self) -> None:
        return None


class _Conv(_Stream):
    """Kernels [H, K] whose last cell lies on the query."""

    def __init__(self, kernel: Tensor):
        self.kernel, self.tensors = kernel, (kernel,)

    @property
    def recent(self) -> int:
        return self.kernel.shape[1] - 1

    def row(self, length: Tensor, recent: int) -> Tensor:
        return self.kernel.T.double()[None]

    def bias(self, start: int, size: int) -> Bias:
        return KernelBias(self.kernel[:, None], (1, size), (1, size), (0, self.kernel.shape[1] - 1))


class _Grid(_Stream):
    """Kernels [H, Ky, Kx] centred on the query, over rows of ``width`` cells."""

    knows_place = True

    def __init__(self, kernel: Tensor, width: int):
        self.kernel, self.tensors, self.width = kernel, (kernel,), width
        height, across = kernel.shape[1:]
        self.anchor = ((height - 1) // 2, (across - 1) // 2)

    @property
    def recent(self) -> int:
        # What the kernel reaches back to, and the rest of that row: a problem starts with a row.
        return self.anchor[0] * self.width + self.anchor[1] + self.width - 1

    def row(self, length: Tensor, recent: int) -> Tensor:
        height, across = self.kernel.shape[1:]
        query = length[:, None]
        key = query + torch.arange(-recent, 1, device=length.device)
        row = key // self.width - query // self.width + self.anchor[0]
        column = key % self.width - query % self.width + self.anchor[1]
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < across)
        cell = torch.where(inside, row * across + column, height * across)
        return pad(self.kernel.flatten(1), (0, 1)).T.double()[cell]

    def bias(self, start: int, size: int) -> Bias:
        grid = (-(-size // self.width), self.width)
        return KernelBias(self.kernel, grid, grid, self.anchor)

    def before(self, start: int) -> int:
        return start if start <= self.recent else self.recent - (self.recent - start) % self.width


def _step(
    name: str,
    stream: _Stream,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: AFTState | None,
    key_padding_mask: Tensor | None,
    lengths: Tensor | None,
    query_gate: QueryGate | None,
    impl: str,
) -> tuple[Tensor, AFTState]:
    B, n = q.shape[:2]
    if k.shape[1] != n:
        raise ValueError(f"{name}: q and k must have as many positions, got q {shape(q)} and k {shape(k)}")
    check_mask(name, "key_padding_mask", key_padding_mask, {"[B, n]": (B, n)})
    check_devices(name, q, k, v, *stream.tensors, key_padding_mask, lengths)
    padding = None if lengths is None else n - _checked_lengths(name, lengths, B, n)
    with without_autocast(q):
        absent = torch.isneginf(k)
        if key_padding_mask is not None:
            absent = absent | key_padding_mask[..., None]
        if padding is not None:
            beyond = (torch.arange(n, device=k.device) >= n - padding[:, None])[..., None]
            absent, q = absent | beyond, q.masked_fill(beyond, 0.0)
        if key_padding_mask is not None or padding is not None:
            k = k.masked_fill(absent, -torch.inf)
        P = head_channels(k.shape[2], v.shape[2])
        v = v.masked_fill(absent if P == 1 else absent.repeat_interleave(P, 2), 0.0)
        past = empty_state(k, v, stream.recent) if state is None else state
        check_state(name, past, k.shape[0], k.shape[2], v.shape[2], stream.recent, k.device)
        _check_reach(name, stream, past, n, padding)
        solver = _solver(impl, stream, k, v, padding)
        if solver is native and isinstance(stream, _Simple):
            return _native_step(_problem(k, v, None), past, q, query_gate)
        if n == 0:
            mean = v.double()
        elif n == 1 and solver is eager and k[:, :1].numel() * (past.keys.shape[1] + 1) * P <= DIRECT:
            mean = _one(stream, past, k, v)
        elif state is None:
            # Only padding may lie where there are no biases any more.
            seen = n if padding is None or stream.reach is None else min(n, stream.reach)
            mean = solver.mean(_problem(k[:, :seen], v[:, :seen], stream.bias(0, seen), stream.window_size))
            mean = _with_padding(mean, n)
        else:
            mean = _piece(solver, stream, past, k, v, padding)
        return gated(mean, q, query_gate, v.dtype), extend(past, k, v, padding)


def _solver(impl: str, stream: _Stream, k: Tensor, v: Tensor, padding: Tensor | None) -> ModuleType:
    """The implementation for a step: the kernels are for windows, and for AFT-simple without padding."""
    if isinstance(stream, (_Local, _Conv, _Grid)) or (isinstance(stream, _Simple) and padding is None):
        # Where a piece is in the sequence cannot be asked while a graph is traced.
        if not (impl == "auto" and stream.knows_place and torch.compiler.is_compiling()):
            return implementation(impl, _problem(k, v, stream.bias(0, 0), stream.window_size))
        return eager
    return implementation(impl)


def _native_step(
    problem: Problem, past: AFTState, q: Tensor, query_gate: QueryGate | None
) -> tuple[Tensor, AFTState]:
    """What the kernels make of a step of AFT-simple, whose padding is in the keys already."""
    dtype = problem.values.dtype
    if query_gate is torch.sigmoid and q.dtype == dtype:
        return native.simple_step(problem, q, past)
    mean, state = native.simple_step(problem, None, past)
    return gated(mean, q, query_gate, dtype), state


def _one(stream: _Stream, past: AFTState, k: Tensor, v: Tensor) -> Tensor:
    """The mean [B, 1, D] at a single new position, in float64."""
    recent = past.keys.shape[1]
    bias, values = stream.row(past.length, recent), torch.cat([past.values, v], 1)
    if past.grows:
        keys = torch.cat([past.keys, k], 1).double()
    else:  # all old keys are as one, without a bias
        keys, bias = torch.cat([past.max[:, None], past.keys, k], 1), pad(bias, (0, 0, 1, 0))
    # Keys and biases are taken relative to their largest apart: in a sum the larger swallows the smaller.
    hidden = torch.isneginf(keys + bias)
    top_key, top_bias = (torch.where(hidden, -torch.inf, x.detach()).amax(1, True) for x in (keys, bias))
    exponent = (keys - finite(top_key)) + (bias - finite(top_bias))
    # In place: a fresh temporary of this size may cost more than the arithmetic.
    exponent -= finite(exponent.detach().amax(1, True))
    terms = exponent.exp_()
    if past.grows:
        den, num = terms.sum(1), _weighted(terms, values)
    else:
        old, terms = terms[:, 0], terms[:, 1:]
        den = terms.sum(1) + past.den * old
        num = _weighted(terms, values) + past.num * old[..., None]
    return (num / _nonzero(den)[..., None]).flatten(1)[:, None]


def _weighted(terms: Tensor, values: Tensor) -> Tensor:
    """sum_s terms [B, S, N] values [B, S, N * P]: [B, N, P]."""
    return (terms[..., None] * by_key(values, terms.shape[2])).sum(1)


def _piece(
    solver: ModuleType, stream: _Stream, past: AFTState, k: Tensor, v: Tensor, padding: Tensor | None
) -> Tensor:
    """The mean [B, n, D] over several new positions; sequences at different places are solved apart."""
    if not stream.knows_place:
        return _piece_at(solver, stream, past, k, v, 0)
    places = past.length.tolist()
    if len(set(places)) == 1 and padding is None:
        return _piece_at(solver, stream, past, k, v, places[0])
    mean = v.new_zeros(v.shape, dtype=torch.float64)
    for place in sorted(set(places)):
        rows = torch.tensor([row for row, other in enumerate(places) if other == place], device=k.device)
        # Padding at the end may lie where there are no biases any more.
        n = k.shape[1] if padding is None else k.shape[1] - int(padding[rows].min())
        if n > 0:
            part = _piece_at(solver, stream.select(rows), past.select(rows), k[rows, :n], v[rows, :n], place)
            mean = mean.index_copy(0, rows, _with_padding(part.double(), k.shape[1]))
    return mean


def _with_padding(mean: Tensor, n: int) -> Tensor:
    """[B, m, D] with as many zeros after it that there are n positions."""
    return pad(mean, (0, 0, 0, n - mean.shape[1])) if mean.shape[1] < n else mean


def _piece_at(
    solver: ModuleType, stream: _Stream, past: AFTState, k: Tensor, v: Tensor, start: int
) -> Tensor:
    """The mean [B, n, D] over new positions that come after ``start`` others."""
    n = k.shape[1]
    if isinstance(stream, _Full):
        sums = solver.sums(_problem(k, v, stream.bias(start, n)))
        if start:
            bias = stream.block(slice(start, start + n), slice(0, start))
            old = _problem(past.keys[:, -start:], past.values[:, -start:], bias, T=n, causal=False)
            sums = join(sums, solver.sums(old))
        return _mean(sums)
    before = stream.before(start)
    skipped = past.keys.shape[1] - before
    if skipped and start > before:  # of a grid: they begin before the row that the problem begins with
        past = with_keys(past, past.keys[:, :skipped], past.values[:, :skipped])
    if solver is native:
        return _continued(stream, past, k, v, start, before)
    if before:
        k = torch.cat([past.keys[:, -before:], k], 1)
        v = torch.cat([past.values[:, -before:], v], 1)
    sums = solver.sums(_problem(k, v, stream.bias(start - before, before + n), stream.window_size))
    return _mean(_with_past(Sums(*(x[:, before:] for x in sums)), past))


def _continued(stream: _Stream, past: AFTState, k: Tensor, v: Tensor, start: int, before: int) -> Tensor:
    """What the kernels make of a piece: only the new queries, over new and recent keys."""
    n = k.shape[1]
    if before:
        k = torch.cat([past.keys[:, -before:], k], 1)
        v = torch.cat([past.values[:, -before:], v], 1)
    if isinstance(stream, _ByPlace):
        bias = stream.block(slice(start, start + n), slice(start - before, start + n))
    else:
        bias = stream.bias(start - before, before + n)
    return native.continued_mean(_problem(k, v, bias, stream.window_size, T=n), past)


def _with_past(near: Sums, past: AFTState) -> Sums:
    """Sums [B, n, N] joined with those of the old keys, whose bias is zero; differentiable in all but near's
    maxima."""
    nothing = torch.isneginf(past.max)[:, None]
    # Both relative to past.max, or where that is larger or the only one to near's.
    ahead = (near.bias_max + (near.max - past.max[:, None])).masked_fill(nothing, 0.0)
    excess = ahead.detach().clamp(min=0.0)
    a, b = torch.exp(-excess).masked_fill(nothing, 0.0), torch.exp(ahead - excess)
    return near._replace(
        num=near.num * b[..., None] + past.num[:, None] * a[..., None],
        den=near.den * b + past.den[:, None] * a,
    )


def _problem(
    k: Tensor,
    v: Tensor,
    bias: Bias,
    window_size: int | None = None,
    T: int | None = None,
    causal: bool = True,
) -> Problem:
    return Problem(k, v, k.shape[1] if T is None else T, bias, window_size, causal, None, None)


def _mean(sums: Sums) -> Tensor:
    """[B, n, N] sums as their quotient [B, n, D]."""
    return (sums.num / _nonzero(sums.den)[..., None]).flatten(2)


def _nonzero(den: Tensor) -> Tensor:
    return den.masked_fill(den == 0, 1.0)


def _checked_lengths(name: str, lengths: Tensor, B: int, n: int) -> Tensor:
    if not isinstance(lengths, Tensor) or lengths.dtype != torch.int64 or lengths.shape != (B,):
        got = f"{lengths.dtype} {shape(lengths)}" if isinstance(lengths, Tensor) else type(lengths).__name__
        raise ValueError(f"{name}: lengths must be an int64 tensor [B] = ({B},), got {got}")
    if not torch.compiler.is_compiling() and B and not 0 <= int(lengths.min()) <= int(lengths.max()) <= n:
        raise ValueError(f"{name}: lengths must lie between 0 and n = {n}, got {lengths.tolist()}")
    return lengths


def _check_reach(name: str, stream: _Stream, past: AFTState, n: int, padding: Tensor | None) -> None:
    if stream.reach is None or torch.compiler.is_compiling():
        return
    end = past.length + (n if padding is None else n - padding)
    last = int(end.max()) if end.numel() else 0
    if last > stream.reach:
        raise ValueError(
            f"{name}: the position bias ends at {stream.reach} positions, the sequence at {last}"
        )
