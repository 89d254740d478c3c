"""The mean over keys and its gradients by tiles: matrix products, exact for finite input, linear in memory.

On a block the weights factor: exp(w + k) = exp(w - a) exp(k - b) exp(a + b), so the sums over keys are one
matrix product, ``exp(w - a) @ exp(k - b) [v, 1]``, and the blocks of a row are joined by their maxima, as in
`aft.ops.sums.join`. The factors lose nothing while the biases of a row or the keys of a channel stay
within e^60 of each other; entries where both are wider are summed again, element by element, in float64
(where a key and a bias of 1e4 still have digits for their sum). The choice is made for each (row, channel)
from what that row sees, so no future key and no other sequence changes a single bit of it.

The same factors give the backward pass. With p the normalised weights, g the gradient of the mean y, and
c = g . y:  dv = sum_t p g,  dk = v . dv - sum_t p c,  dw = sum_channels p (g . v - c). A gradient h of the
logarithm of the denominator adds p h to those of k and w: it is taken off c.

Keys are [G, S, N] and values [G, S, N, P] in float32 or float64: G groups of N channels that share a bias, P
channels of values for each channel of keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from aft.ops.bias_blocks import BlockSource, add_pieces, pieces
from aft.ops.sums import Sums, join, largest, no_sums, scan
from aft.ops.tiles import TILE, Blocks, Far, Plan

# How far, in nats, factors may lie from their reference: e^60 squared still fits float32's range of e^88
# once the other factor is normalised, and what underflows beside it is below 1 ulp.
SPREAD = 60.0
# On the causal diagonal the reference is a key, not the maximum: the distance goes both ways, and hidden
# entries are formed up to its square before a zero takes them out.
DIAGONAL_SPREAD = 30.0
# Elements of a temporary: memory beyond inputs and outputs stays at a few of these plus a multiple of T D.
# A CPU is as fast with what its cache holds; other devices want large calls.
CPU_BUDGET, DEVICE_BUDGET = 1 << 18, 1 << 22


def forward(keys: Tensor, values: Tensor, source: BlockSource, plan: Plan, T: int) -> tuple[Tensor, Sums]:
    """mean [G, T, N, P] and the sums it is a quotient of; a query with nothing to see gives 0.

    The mean takes the place of num in the sums: nobody needs both.
    """
    total = _block_sums(keys, values, source, plan, T)
    if plan.far is not None:
        total = Sums(*(x.contiguous() for x in total))  # written to below
        far = _far_sums(keys, values, plan.far)
        for rows in _spans(T, total.num):
            near = Sums(*(x[:, rows] for x in total))
            seen = Sums(*(_spread(x[:, _tiles_of(rows)], rows.stop - rows.start) for x in far))
            _write(near, join(near, seen))
    mean = total.num.div_(_nonzero(total.den)[..., None])
    return mean, total._replace(num=mean)


def backward(
    grad: Tensor,
    keys: Tensor,
    values: Tensor,
    source: BlockSource,
    plan: Plan,
    result: Tensor,
    sums: Sums,
    grad_log_den: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values, in their dtype; that of the bias is left in ``source``.

    ``result`` [G, T, N, P] and ``sums`` (of which num is not read) are those of `forward`; ``grad_log_den``
    [G, T, N] is the gradient of log sum_s exp(k + w), where that is asked for too.
    """
    source.allocate(keys.dtype)
    # The normalised weights are exp(x - max - bias_max) / den, and 0 in a row that saw nothing.
    seen = (sums.den > 0)[..., None]
    of_weights = -(grad * result).sum(-1, keepdim=True)
    if grad_log_den is not None:
        of_weights += grad_log_den[..., None]
    upstream = torch.cat([grad, of_weights], -1)
    upstream.masked_fill_(~seen, 0.0).div_(_nonzero(sums.den)[..., None])
    top = _Peak(sums.max.masked_fill(~seen[..., 0], torch.inf), sums.bias_max)
    grad_keys, grad_values = keys.new_zeros(keys.shape), values.new_zeros(values.shape)
    for blocks in _affordable(plan, values):
        k, v = _columns(keys, blocks), _columns(values, blocks)
        factors = _factor(source.read(blocks), k, blocks.triangular)
        g, top_here = _rows(upstream, blocks), _Peak(*(_rows(x, blocks) for x in top))
        above = (factors.peak.bias - top_here.bias) + (factors.peak.key - top_here.key)
        above = torch.exp(above.to(keys.dtype))
        if factors.exact is not None:
            above = above.masked_fill(factors.exact, 0.0)
        scaled = g * above[..., None]
        column = _with_one(factors.column, v)
        grad_bias = factors.row * (scaled.flatten(3) @ column.flatten(3).mT)
        inflow = _product(factors.row.mT, scaled) * factors.column[..., None]
        dv = inflow[..., :-1]
        dk = (v * dv).sum(-1) + inflow[..., -1]
        if factors.exact is not None:
            _exact_backward(factors, v, g, top_here, dk, dv, grad_bias)
        add_pieces(grad_keys, blocks.column, blocks.step, dk)
        add_pieces(grad_values, blocks.column, blocks.step, dv)
        source.add(blocks, grad_bias)
    if plan.far is not None:
        _far_backward(keys, values, upstream, top, plan.far, grad_keys, grad_values)
    return grad_keys, grad_values


class _Peak(NamedTuple):
    """Keys and biases [G, ..., N] that exponents are taken relative to; a key of -inf: there is none."""

    key: Tensor
    bias: Tensor


@dataclass(frozen=True)
class _Factors:
    """exp(w + k) on some blocks, as ``row * column * exp(peak)``.

    row [G, n, R, C] and column [G, n, C, N] are exponentials, the peak broadcasts to [G, n, R, N]. ``exact``
    [G, n, R, N] marks entries that the product cannot represent, None if it can represent all.
    """

    bias: Tensor
    keys: Tensor
    row: Tensor
    column: Tensor
    peak: _Peak
    exact: Tensor | None


def _factor(bias: Tensor, keys: Tensor, triangular: bool) -> _Factors:
    """Splits the weights of blocks with biases [G, n, R, C] and keys [G, n, C, N] into factors."""
    later = None
    if triangular:
        later = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).triu(1)
        bias = bias.masked_fill(later, -torch.inf)
    peak = bias.amax(-1)
    blind = torch.isneginf(peak)
    origin = _finite(peak)
    hidden = torch.isneginf(bias)
    lowest = bias.masked_fill(hidden, torch.inf).amin(-1)
    spread = (origin - lowest).masked_fill(blind, 0.0)
    if later is not None:
        hidden = hidden & ~later
    holes = hidden.any(-1) & ~blind
    row = torch.exp(bias - origin[..., None]).to(keys.dtype)
    split = _factor_triangle if triangular else _factor_rectangle
    column, key_peak, exact = split(keys, bias, spread, holes)
    if blind.any():
        key_peak = torch.where(blind[..., None], -torch.inf, key_peak)
    if exact is not None and not exact.any():
        exact = None
    return _Factors(bias, keys, row, column, _Peak(key_peak, origin[..., None].double()), exact)


def _factor_rectangle(
    keys: Tensor, bias: Tensor, row_spread: Tensor, row_holes: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Every row sees every key but hidden ones: factors relative to the largest key of each channel."""
    peak = keys.amax(-2, keepdim=True)
    column = torch.exp(keys - _finite(peak))
    row_fits = (row_spread <= SPREAD) & ~row_holes
    if row_fits.all():
        return column, peak, None
    absent = torch.isneginf(keys)
    spread = (_finite(peak) - keys.masked_fill(absent, torch.inf).amin(-2, keepdim=True)).clamp(min=0.0)
    holes = absent.any(-2, keepdim=True) & ~torch.isneginf(peak)
    # A row whose largest bias lies on an absent key, or a channel whose largest key is hidden from the row,
    # is missing its peak: then both spreads together have to fit.
    fits = row_fits[..., None] | ((spread <= SPREAD) & ~holes) | (row_spread[..., None] + spread <= SPREAD)
    if row_holes.any() and holes.any():
        meet = (~torch.isneginf(bias)).to(keys.dtype) @ (~absent).to(keys.dtype) > 0
        peak = torch.where(meet, peak, -torch.inf)
        fits = fits | ~meet
    return column, peak, ~fits & ~torch.isneginf(peak)


def _factor_triangle(
    keys: Tensor, bias: Tensor, row_spread: Tensor, row_holes: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Row t sees keys 0 to t: factors relative to the first key, which no later key can change."""
    absent = torch.isneginf(keys)
    rows = bias.shape[-2]
    wide_row = (row_spread > SPREAD) | row_holes
    if absent.any():
        position = torch.arange(keys.shape[-2], device=keys.device)[:, None]
        first = torch.where(absent, keys.shape[-2], position).amin(-2, keepdim=True)
        origin = _finite(keys.gather(-2, first.clamp(max=keys.shape[-2] - 1)))
        unseen = _extend(first > position, rows)
        peak = origin.expand(*unseen.shape).masked_fill(unseen, -torch.inf)
        some_absent = _extend(absent.cummax(-2).values, rows)
    else:
        origin = keys.narrow(-2, 0, 1)
        peak, some_absent = origin, None
    distance = keys - origin
    too_far = (distance.abs() > DIAGONAL_SPREAD) & ~absent
    exact = None
    if too_far.any():
        exact = _extend(too_far.cummax(-2).values, rows)
        distance = distance.masked_fill(too_far, -torch.inf)
    if some_absent is not None and wide_row.any():
        hidden_peak = wide_row[..., None] & some_absent
        exact = hidden_peak if exact is None else exact | hidden_peak
    return torch.exp(distance), peak, exact


def _extend(running: Tensor, rows: int) -> Tensor:
    """What holds for row t = key t, for the rows after the last key too: [..., C, N] to [..., rows, N]."""
    missing = rows - running.shape[-2]
    if missing <= 0:
        return running
    last = running.narrow(-2, running.shape[-2] - 1, 1)
    return torch.cat([running, last.expand(*last.shape[:-2], missing, last.shape[-1])], -2)


def _finite(x: Tensor) -> Tensor:
    """-inf, the maximum of an empty set, replaced by 0, which can be subtracted."""
    return x.masked_fill(torch.isneginf(x), 0.0)


def _nonzero(den: Tensor) -> Tensor:
    """The denominator, 1 where nothing was summed: 0 / 1 is the mean of nothing."""
    return den.masked_fill(den == 0, 1.0)


def _with_one(column: Tensor, values: Tensor) -> Tensor:
    """[column * v, column] along a new last axis: what a product with the row factors sums to (num, den)."""
    return torch.cat([column[..., None] * values, column[..., None]], -1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left [G or 1, n or 1, R, C] times right [G, n, C, N, Q], summed over C."""
    return (left @ right.flatten(3)).unflatten(3, right.shape[3:])


def _exact_subset(factors: _Factors) -> tuple[Tensor, Tensor]:
    """Rows and channels that hold an entry to sum exactly, as indices."""
    assert factors.exact is not None
    return (
        factors.exact.any(3).flatten(0, 1).any(0).nonzero()[:, 0],
        factors.exact.flatten(0, 2).any(0).nonzero()[:, 0],
    )


def _exact_blocks(
    factors: _Factors, values: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """A few rows at a time: rows, channels, and in float64 biases [G, n, r, C, 1], keys [G, n, 1, C, m] and
    values [G, n, C, m, P]."""
    all_rows, channels = _exact_subset(factors)
    keys = factors.keys.index_select(-1, channels).double()
    values = values.index_select(-2, channels).double()
    at_once = max(1, _budget(keys) // max(1, keys.numel()))
    for rows in all_rows.split(at_once):
        bias = factors.bias.index_select(-2, rows).double()
        yield rows, channels, bias[..., None], keys[:, :, None], values


def _sums(factors: _Factors, values: Tensor) -> Sums:
    """The sums of the blocks' weights: num [G, n, R, N, P], den, max and bias_max [G, n, R, N]."""
    total = _product(factors.row, _with_one(factors.column, values))
    num, den = total[..., :-1], total[..., -1]
    key, bias = (x.expand(den.shape) for x in factors.peak)
    if factors.exact is None:
        return Sums(num, den, key, bias)
    state = Sums(num, den, key.clone(), bias.clone())
    for rows, channels, w, k, v in _exact_blocks(factors, values):
        peak = largest(w, k, 3)
        w, k = torch.broadcast_tensors(w, k)
        top_bias, top_key = _finite(w.gather(3, peak)), _finite(k.gather(3, peak))
        weight = torch.exp((w - top_bias) + (k - top_key))
        sums = weight.sum(3)
        top_key = top_key[:, :, :, 0].masked_fill(sums == 0, -torch.inf)
        exact = Sums(torch.einsum("gbrcn,gbcnp->gbrnp", weight, v), sums, top_key, top_bias[:, :, :, 0])
        at = (slice(None), slice(None), rows[:, None], channels)
        where = factors.exact[at]
        for whole, part in zip(state, exact, strict=True):
            keep = where if whole.ndim == 4 else where[..., None]
            whole[at] = torch.where(keep, part.to(whole.dtype), whole[at])
    return state


def _block_sums(keys: Tensor, values: Tensor, source: BlockSource, plan: Plan, T: int) -> Sums:
    """For each query, the sums over the keys in the plan's blocks: [G, T, N] states."""
    G, _, N = keys.shape
    P = values.shape[-1]
    total = None
    for blocks in _affordable(plan, values):
        factors = _factor(source.read(blocks), _columns(keys, blocks), blocks.triangular)
        sums = _sums(factors, _columns(values, blocks))
        if blocks.count == 1 and blocks.rows == T and blocks.fresh:
            total = Sums(*(x.squeeze(1) for x in sums))  # a short sequence is one block: nothing to join
            continue
        if total is None:
            total = no_sums(keys, G, T, N, values=P)
        total = Sums(*(x.contiguous() for x in total))  # written to below
        rows = Sums(*(_rows(x, blocks) for x in total))
        _write(rows, sums if blocks.fresh else join(rows, sums))
    return no_sums(keys, G, T, N, values=P) if total is None else total


def _exact_backward(
    factors: _Factors, values: Tensor, upstream: Tensor, top: _Peak, dk: Tensor, dv: Tensor, dw: Tensor
) -> None:
    """Adds the gradients that flow through entries marked exact."""
    assert factors.exact is not None
    for rows, channels, w, k, v in _exact_blocks(factors, values):
        at = (slice(None), slice(None), rows[:, None], channels)
        weight = torch.exp((w - top.bias[at][..., None, :]) + (k - top.key[at][..., None, :]))
        weight = weight * factors.exact[at][..., None, :]
        g = upstream[at].double()
        inner = torch.einsum("gbrnp,gbcnp->gbrcn", g[..., :-1], v) + g[..., None, :, -1]
        flow = weight * inner
        dv[..., channels, :] += torch.einsum("gbrcn,gbrnp->gbcnp", weight, g[..., :-1]).to(dv.dtype)
        dk[..., channels] += flow.sum(2).to(dk.dtype)
        dw[:, :, rows] += flow.sum(4).to(dw.dtype)


def _write(views: Sums, sums: Sums) -> None:
    """Puts sums where views of a larger state are."""
    for view, part in zip(views, sums, strict=True):
        view.copy_(part)


def _far_sums(keys: Tensor, values: Tensor, far: Far) -> Sums:
    """For each tile of queries, the sums over the tiles of keys where its bias is zero: [G, tiles, N]."""
    tiles = _joined(_tile_sums(keys[:, rows], values[:, rows]) for rows in _spans(keys.shape[1], values))
    return join(_union_before(tiles, far.before), _union_from(tiles, far.after))


def _far_backward(
    keys: Tensor, values: Tensor, upstream: Tensor, top: _Peak, far: Far, dk: Tensor, dv: Tensor
) -> None:
    """Adds the gradients through `_far_sums`: the same sums with the roles of queries and keys exchanged.

    In exp(k - max - bias_max) the query's -max plays the key, -bias_max the bias, the upstream gradient the
    value, and each tile of keys sums over the tiles of queries that see it from afar.
    """
    T, S = upstream.shape[1], keys.shape[1]
    queries = _joined(
        _query_tile_sums(_Peak(*(x[:, rows] for x in top)), upstream[:, rows]) for rows in _spans(T, upstream)
    )
    # Key tile j is far behind query tile i when j < before[i], far ahead when j >= after[i]; both bounds grow
    # with i, so the queries concerned are all from some i on, and all up to some i.
    tiles = range(-(-S // TILE))
    behind = tuple(sum(bound <= j for bound in far.before) for j in tiles)
    ahead = tuple(sum(bound <= j for bound in far.after) for j in tiles)
    flow = join(_union_from(queries, behind), _union_before(queries, ahead))
    for rows in _spans(S, values):
        column, peak = _tile_columns(keys[:, rows])
        tile = _tiles_of(rows)
        scale = torch.exp(((flow.max[:, tile] + peak) + flow.bias_max[:, tile]).to(keys.dtype))
        inflow = _spread(flow.num[:, tile] * scale[..., None], column.shape[1]) * column[..., None]
        dk[:, rows] += (values[:, rows] * inflow[..., :-1]).sum(-1) + inflow[..., -1]
        dv[:, rows] += inflow[..., :-1]


def _spans(length: int, like: Tensor) -> Iterator[slice]:
    """Whole tiles of ``length`` positions, as many at once as the budget allows for slices of ``like``."""
    at_once = max(1, _budget(like) // max(1, like[:, :1].numel() * TILE)) * TILE
    return (slice(start, min(start + at_once, length)) for start in range(0, length, at_once))


def _joined(spans: Iterator[Sums]) -> Sums:
    """The states of consecutive spans of tiles as those of all tiles."""
    return Sums(*(torch.cat(parts, 1) for parts in zip(*spans, strict=True)))


def _tiled(x: Tensor, padding: float) -> Tensor:
    """[G, L, ...] as tiles [G, tiles, TILE, ...], the last one filled up."""
    missing = -x.shape[1] % TILE
    if missing:
        x = torch.cat([x, x.new_full((x.shape[0], missing, *x.shape[2:]), padding)], 1)
    return x.reshape(x.shape[0], x.shape[1] // TILE, TILE, *x.shape[2:])


def _tile_columns(keys: Tensor) -> tuple[Tensor, Tensor]:
    """exp(k - peak) [G, S, N] and peak [G, tiles, N], the largest key of each tile of `TILE` keys."""
    tiles = _tiled(keys, -torch.inf)
    peak = tiles.amax(2)
    return torch.exp(tiles - _finite(peak)[:, :, None]).flatten(1, 2)[:, : keys.shape[1]], peak


def _tile_sums(keys: Tensor, values: Tensor) -> Sums:
    """The state of each tile of `TILE` keys without a bias: [G, tiles, N]."""
    column, peak = _tile_columns(keys)
    total = _tiled(_with_one(column, values), 0.0).sum(2)
    return Sums(total[..., :-1], total[..., -1], peak, torch.zeros_like(peak, dtype=torch.float64))


def _query_tile_sums(top: _Peak, upstream: Tensor) -> Sums:
    """The state of each tile of `TILE` queries for `_far_backward`; a query that saw nothing is absent."""
    keys, biases = _tiled(-top.key, -torch.inf), _tiled(-top.bias, 0.0)
    peak = largest(biases, keys, 2)
    top_key, top_bias = keys.gather(2, peak), biases.gather(2, peak)
    weight = torch.exp(((biases - top_bias) + (keys - _finite(top_key))).to(upstream.dtype))
    total = (weight[..., None] * _tiled(upstream, 0.0)).sum(2)
    # The denominator is not asked for: exchanged sums are not divided.
    return Sums(total, weight.sum(2), top_key[:, :, 0], top_bias[:, :, 0])


def _union_before(tiles: Sums, bounds: tuple[int, ...]) -> Sums:
    """Entry i: the union of tiles 0 to bounds[i] - 1."""
    return _pick(_after_empty(scan(tiles, 1)), bounds)


def _union_from(tiles: Sums, bounds: tuple[int, ...]) -> Sums:
    """Entry i: the union of the tiles from bounds[i] on."""
    reverse = Sums(*(x.flip(1) for x in tiles))
    count = tiles.max.shape[1]
    return _pick(_after_empty(scan(reverse, 1)), tuple(count - bound for bound in bounds))


def _after_empty(states: Sums) -> Sums:
    """The states with an empty one put before them."""
    G, _, N, P = states.num.shape
    empty = no_sums(states.num, G, 1, N, values=P)
    return Sums(*(torch.cat([x, y], 1) for x, y in zip(empty, states, strict=True)))


def _pick(states: Sums, index: tuple[int, ...]) -> Sums:
    at = torch.tensor(index, dtype=torch.long, device=states.max.device)
    return Sums(*(x.index_select(1, at) for x in states))


def _tiles_of(rows: slice) -> slice:
    """The tiles that a span of `_spans` covers."""
    return slice(rows.start // TILE, -(-rows.stop // TILE))


def _spread(x: Tensor, length: int) -> Tensor:
    """[G, tiles, ...] repeated for each of the first ``length`` positions: [G, length, ...]."""
    return x.repeat_interleave(TILE, 1)[:, :length]


def _rows(x: Tensor, blocks: Blocks) -> Tensor:
    return pieces(x, blocks.row, blocks.step, blocks.rows, blocks.count)


def _columns(x: Tensor, blocks: Blocks) -> Tensor:
    return pieces(x, blocks.column, blocks.step, blocks.columns, blocks.count)


def _affordable(plan: Plan, values: Tensor) -> Iterator[Blocks]:
    """The plan's blocks, cut so that no temporary exceeds the budget."""
    groups, _, N, P = values.shape
    channels = N * (P + 1)
    for blocks in plan.blocks:
        size = groups * max(blocks.rows * blocks.columns, max(blocks.rows, blocks.columns) * channels)
        at_once = max(1, _budget(values) // max(1, size))
        for start in range(0, blocks.count, at_once):
            yield blocks.narrow(start, min(at_once, blocks.count - start))


def _budget(like: Tensor) -> int:
    return CPU_BUDGET if like.device.type == "cpu" else DEVICE_BUDGET
