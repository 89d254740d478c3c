"""The mean over keys and its gradients by tiles: matrix products, exact for finite input, linear in memory.

On a block the weights factor: exp(w + k) = exp(w - a) exp(k - b) exp(a + b), so the sums over keys are one
matrix product, ``exp(w - a) @ exp(k - b) [v, 1]``, and the blocks of a row are joined by their maxima, as in
`aft.ops.state.combine`. The factors lose nothing while the biases of a row or the keys of a channel stay
within e^60 of each other; entries where both are wider are summed again, element by element, in float64
(where a key and a bias of 1e4 still have digits for their sum). The choice is made for each (row, channel)
from what that row sees, so no future key and no other sequence changes a single bit of it.

The same factors give the backward pass. With p the normalised weights, g the gradient of the mean y, and
c = g . y:  dv = sum_t p g,  dk = v . dv - sum_t p c,  dw = sum_channels p (g . v - c).

Keys are [G, S, N] and values [G, S, N, P] in float32 or float64: G groups of N channels that share a bias, P
channels of values for each channel of keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from aft.ops.bias_blocks import BlockSource, add_pieces, pieces
from aft.ops.state import AFTState, combine, scan
from aft.ops.tiles import TILE, Blocks, Far, Plan

# How far, in nats, factors may lie from their reference: e^60 squared still fits float32's range of e^88
# once the other factor is normalised, and what underflows beside it is below 1 ulp.
SPREAD = 60.0
# On the causal diagonal the reference is a key, not the maximum, so the distance goes both ways.
DIAGONAL_SPREAD = 40.0
# Elements of a temporary: memory beyond inputs and outputs stays at a few of these plus a multiple of T D.
BUDGET = 1 << 22


def forward(keys: Tensor, values: Tensor, source: BlockSource, plan: Plan, T: int) -> tuple[Tensor, Tensor]:
    """mean [G, T, N, P] and the log of its denominator [G, T, N] in float64 (-inf: nothing to see)."""
    total = _block_sums(keys, values, source, plan, T)
    if plan.far is not None:
        total = combine(total, _far_sums(keys, values, plan.far, T))
    seen = total.den > 0
    result = total.num / torch.where(seen, total.den, 1.0)[..., None]
    logsum = torch.where(seen, total.max + torch.log(total.den.double()), -torch.inf)
    return result, logsum


def backward(
    grad: Tensor,
    keys: Tensor,
    values: Tensor,
    source: BlockSource,
    plan: Plan,
    result: Tensor,
    logsum: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values, in their dtype; that of the bias is left in ``source``."""
    G, _, N = keys.shape
    P = values.shape[-1]
    T = result.shape[1]
    source.allocate(keys.dtype)
    # exp(x - logsum) are the normalised weights; a row that saw nothing has weight 0 everywhere.
    logsum = logsum.masked_fill(torch.isneginf(logsum), torch.inf)
    upstream = torch.cat([grad, -(grad * result).sum(-1, keepdim=True)], -1)
    grad_keys, grad_values = keys.new_zeros(keys.shape), values.new_zeros(values.shape)
    for blocks in _affordable(plan, G, N * (P + 1)):
        k, v = _columns(keys, blocks), _columns(values, blocks)
        factors = _factor(source.read(blocks), k, blocks.triangular)
        above = torch.exp((factors.origin - _rows(logsum, blocks)).to(keys.dtype))
        if factors.exact is not None:
            above = above.masked_fill(factors.exact, 0.0)
        g = _rows(upstream, blocks)
        scaled = g * above[..., None]
        column = _with_one(factors.column, v)
        grad_bias = factors.row * (scaled.flatten(3) @ column.flatten(3).mT)
        inflow = _product(factors.row.mT, scaled) * factors.column[..., None]
        dv = inflow[..., :-1]
        dk = (v * dv).sum(-1) + inflow[..., -1]
        if factors.exact is not None:
            _exact_backward(factors, v, g, _rows(logsum, blocks), dk, dv, grad_bias)
        add_pieces(grad_keys, blocks.column, blocks.step, dk)
        add_pieces(grad_values, blocks.column, blocks.step, dv)
        source.add(blocks, grad_bias)
    if plan.far is not None:
        dk, dv = _far_backward(keys, values, upstream, logsum, plan.far, T)
        grad_keys += dk
        grad_values += dv
    return grad_keys, grad_values


@dataclass(frozen=True)
class _Factors:
    """exp(w + k) on some blocks, as ``row * column * exp(origin)``.

    row [G, n, R, C] and column [G, n, C, N] are exponentials, origin [G, n, R, N] float64 (-inf where a row
    sees no key). ``exact`` [G, n, R, N] marks entries that the product cannot represent, None if all can.
    """

    bias: Tensor
    keys: Tensor
    row: Tensor
    column: Tensor
    origin: Tensor
    exact: Tensor | None


def _factor(bias: Tensor, keys: Tensor, triangular: bool) -> _Factors:
    """Splits the weights of blocks with biases [G, n, R, C] and keys [G, n, C, N] into factors."""
    if triangular:
        rows, columns = bias.shape[-2:]
        later = torch.ones(rows, columns, dtype=torch.bool, device=bias.device).triu(1)
        visible_bias = bias.masked_fill(later, -torch.inf)
    else:
        later, visible_bias = None, bias
    row_peak = visible_bias.amax(-1)
    row_origin = _finite(row_peak)
    row = torch.exp(visible_bias - row_origin[..., None]).to(keys.dtype)
    lowest = bias.masked_fill(later, torch.inf).amin(-1) if later is not None else bias.amin(-1)
    wide_row = (row_origin - lowest > SPREAD) & ~torch.isneginf(row_peak)
    split = _factor_triangle if triangular else _factor_rectangle
    column, column_peak, exact = split(keys, wide_row)
    origin = row_peak[..., None].double() + column_peak.double()
    if exact is not None and not exact.any():
        exact = None
    return _Factors(visible_bias, keys, row, column, origin, exact)


def _factor_rectangle(keys: Tensor, wide_row: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Every row sees every key: factors relative to the largest key of each channel."""
    peak = keys.amax(-2, keepdim=True)
    column = torch.exp(keys - _finite(peak))
    if not wide_row.any():
        return column, peak, None
    # An absent key counts as infinitely far below: a row may have its largest bias there.
    wide_column = (peak - keys.amin(-2, keepdim=True) > SPREAD) & ~torch.isneginf(peak)
    return column, peak, wide_row[..., None] & wide_column


def _factor_triangle(keys: Tensor, wide_row: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Row t sees keys 0 to t: factors relative to the first key, which no later key can change."""
    absent = torch.isneginf(keys)
    rows = wide_row.shape[-1]
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


def _exact_exponents(factors: _Factors, values: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yields (rows, channels, x [G, n, r, C, m] float64, v [G, n, C, m, P] float64), a few rows at a time."""
    all_rows, channels = _exact_subset(factors)
    keys = factors.keys.index_select(-1, channels).double()
    values = values.index_select(-2, channels).double()
    at_once = max(1, BUDGET // max(1, keys.numel()))
    for rows in all_rows.split(at_once):
        bias = factors.bias.index_select(-2, rows).double()
        yield rows, channels, bias[..., None] + keys[:, :, None], values


def _sums(factors: _Factors, values: Tensor) -> AFTState:
    """The sums of the blocks' weights: num [G, n, R, N, P], den and max [G, n, R, N]."""
    total = _product(factors.row, _with_one(factors.column, values))
    num, den, peak = total[..., :-1], total[..., -1], factors.origin
    if factors.exact is None:
        return AFTState(num, den, peak)
    for rows, channels, exponent, v in _exact_exponents(factors, values):
        where = factors.exact[:, :, rows[:, None], channels]
        top = exponent.amax(3)
        weight = torch.exp(exponent - _finite(top)[..., None, :])
        exact = AFTState(torch.einsum("gbrcn,gbcnp->gbrnp", weight, v), weight.sum(3), top)
        for whole, part in zip((num, den, peak), exact, strict=True):
            at = (slice(None), slice(None), rows[:, None], channels)
            keep = where if whole.ndim == 4 else where[..., None]
            whole[at] = torch.where(keep, part.to(whole.dtype), whole[at])
    return AFTState(num, den, peak)


def _block_sums(keys: Tensor, values: Tensor, source: BlockSource, plan: Plan, T: int) -> AFTState:
    """For each query, the sums over the keys in the plan's blocks: num [G, T, N, P], den, max [G, T, N]."""
    G, _, N = keys.shape
    P = values.shape[-1]
    total = None
    for blocks in _affordable(plan, G, N * (P + 1)):
        factors = _factor(source.read(blocks), _columns(keys, blocks), blocks.triangular)
        sums = _sums(factors, _columns(values, blocks))
        if blocks.count == 1 and blocks.rows == T and blocks.fresh:
            total = AFTState(*(x.squeeze(1) for x in sums))  # a short sequence is one block: nothing to join
            continue
        total = _empty_state(keys, G, T, N, P) if total is None else total
        rows = AFTState(*(_rows(x, blocks) for x in total))
        for whole, part in zip(rows, sums if blocks.fresh else combine(rows, sums), strict=True):
            whole.copy_(part)
    return _empty_state(keys, G, T, N, P) if total is None else total


def _empty_state(like: Tensor, G: int, T: int, N: int, P: int) -> AFTState:
    return AFTState(
        like.new_zeros(G, T, N, P),
        like.new_zeros(G, T, N),
        torch.full((G, T, N), -torch.inf, dtype=torch.float64, device=like.device),
    )


def _exact_backward(
    factors: _Factors, values: Tensor, upstream: Tensor, logsum: Tensor, dk: Tensor, dv: Tensor, dw: Tensor
) -> None:
    """Adds the gradients that flow through entries marked exact."""
    assert factors.exact is not None
    for rows, channels, exponent, v in _exact_exponents(factors, values):
        at = (slice(None), slice(None), rows[:, None], channels)
        weight = torch.exp(exponent - logsum[at][..., None, :])
        weight = weight * factors.exact[at][..., None, :]
        g = upstream[at].double()
        inner = torch.einsum("gbrnp,gbcnp->gbrcn", g[..., :-1], v) + g[..., None, :, -1]
        flow = weight * inner
        dv[..., channels, :] += torch.einsum("gbrcn,gbrnp->gbcnp", weight, g[..., :-1]).to(dv.dtype)
        dk[..., channels] += flow.sum(2).to(dk.dtype)
        dw[:, :, rows] += flow.sum(4).to(dw.dtype)


def _far_sums(keys: Tensor, values: Tensor, far: Far, T: int) -> AFTState:
    """For each query, the sums over the tiles of keys where its bias is zero: [G, T, N, ...]."""
    tiles = _tile_sums(keys, values)
    sides = (_union_before(tiles, far.before), _union_from(tiles, far.after))
    per_tile = combine(*sides)
    return AFTState(*(_spread(x, T) for x in per_tile))


def _far_backward(
    keys: Tensor, values: Tensor, upstream: Tensor, logsum: Tensor, far: Far, T: int
) -> tuple[Tensor, Tensor]:
    """Gradients through `_far_sums`: the same sums with the roles of queries and keys exchanged.

    exp(k - logsum) = exp(k) exp(-logsum): -logsum plays the key, the upstream gradient the value, and each
    tile of keys sums over the tiles of queries that see it from afar.
    """
    S = keys.shape[1]
    column, peak = _tile_columns(keys)
    queries = _tile_sums(-logsum, upstream, dtype=keys.dtype)
    tiles = peak.shape[1]
    # Key tile j is far behind query tile i when j < before[i], far ahead when j >= after[i]; both bounds grow
    # with i, so the queries concerned are all from some i on, and all up to some i.
    behind = tuple(sum(bound <= j for bound in far.before) for j in range(tiles))
    ahead = tuple(sum(bound <= j for bound in far.after) for j in range(tiles))
    flow = combine(_union_from(queries, behind), _union_before(queries, ahead))
    scale = torch.exp((flow.max + peak.double()).to(keys.dtype))
    inflow = _spread(flow.num * scale[..., None], S) * column[..., None]
    dv = inflow[..., :-1]
    return (values * dv).sum(-1) + inflow[..., -1], dv


def _tile_columns(keys: Tensor) -> tuple[Tensor, Tensor]:
    """exp(k - peak) [G, S, N] and peak [G, tiles, N], the largest key of each tile of `TILE` keys."""
    S = keys.shape[1]
    padded = torch.nn.functional.pad(keys, (0, 0, 0, -S % TILE), value=-torch.inf)
    tiled = (
        padded.unflatten(1, (-1, TILE)) if S else padded.new_empty(padded.shape[0], 0, TILE, padded.shape[2])
    )
    peak = tiled.amax(2)
    return torch.exp(tiled - _finite(peak)[:, :, None]).flatten(1, 2)[:, :S], peak


def _tile_sums(keys: Tensor, values: Tensor, dtype: torch.dtype | None = None) -> AFTState:
    """The state of each tile of `TILE` keys: num [G, tiles, N, P], den and max [G, tiles, N]."""
    column, peak = _tile_columns(keys)
    total = _with_one(column.to(dtype or column.dtype), values)
    total = torch.nn.functional.pad(total, (0, 0, 0, 0, 0, -total.shape[1] % TILE))
    total = total.unflatten(1, (peak.shape[1], TILE)).sum(2)
    return AFTState(total[..., :-1], total[..., -1], peak.double())


def _union_before(tiles: AFTState, bounds: tuple[int, ...]) -> AFTState:
    """Entry i: the union of tiles 0 to bounds[i] - 1."""
    return _pick(_after_empty(scan(tiles, 1)), bounds)


def _union_from(tiles: AFTState, bounds: tuple[int, ...]) -> AFTState:
    """Entry i: the union of the tiles from bounds[i] on."""
    reverse = AFTState(*(x.flip(1) for x in tiles))
    count = tiles.max.shape[1]
    return _pick(_after_empty(scan(reverse, 1)), tuple(count - bound for bound in bounds))


def _after_empty(states: AFTState) -> AFTState:
    """The states with an empty one put before them."""
    num, den, peak = (
        x.narrow(1, 0, 1) if x.shape[1] else x.new_empty(x.shape[0], 1, *x.shape[2:]) for x in states
    )
    empty = (torch.zeros_like(num), torch.zeros_like(den), torch.full_like(peak, -torch.inf))
    return AFTState(*(torch.cat([x, y], 1) for x, y in zip(empty, states, strict=True)))


def _pick(states: AFTState, index: tuple[int, ...]) -> AFTState:
    at = torch.tensor(index, dtype=torch.long, device=states.max.device)
    return AFTState(*(x.index_select(1, at) for x in states))


def _spread(x: Tensor, length: int) -> Tensor:
    """[G, tiles, ...] repeated for each of the first ``length`` positions: [G, length, ...]."""
    return x.repeat_interleave(TILE, 1)[:, :length]


def _rows(x: Tensor, blocks: Blocks) -> Tensor:
    return pieces(x, blocks.row, blocks.step, blocks.rows, blocks.count)


def _columns(x: Tensor, blocks: Blocks) -> Tensor:
    return pieces(x, blocks.column, blocks.step, blocks.columns, blocks.count)


def _affordable(plan: Plan, groups: int, channels: int) -> Iterator[Blocks]:
    """The plan's blocks, cut so that no temporary exceeds the budget."""
    for blocks in plan.blocks:
        size = groups * max(blocks.rows * blocks.columns, max(blocks.rows, blocks.columns) * channels)
        at_once = max(1, BUDGET // max(1, size))
        for start in range(0, blocks.count, at_once):
            yield blocks.narrow(start, min(at_once, blocks.count - start))
