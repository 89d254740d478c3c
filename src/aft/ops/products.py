"""The mean over keys and its gradients as plain matrix products, where no exponential needs a maximum.

While every bias stays within e^25 of 1, and the keys of a channel within e^25 of its first key k_0, float32
holds both exponentials and their products. Then the sums of a block of rows are

    [num, den] = exp(w) @ X,   X = [exp(k - k_0) v, exp(k - k_0)],

a product accumulated over blocks of keys, and nothing has to be joined. With g the gradient of the mean y,

    U = [g / den, -(g . y) / den],   dX = exp(w)^T @ U,   dw = exp(w) * (U @ X^T),

from which dv = exp(k - k_0) dX_v and dk = v . dv + exp(k - k_0) dX_1. A gradient h of the logarithm of the
denominator adds h / den to the last part of U.

Rows that see anything wider are those of `aft.ops.tiled`. A causal row is judged by what it sees, and every
product has the same shape whatever its numbers are, so no future key and no other sequence changes a bit of
it.

Keys are [G, S, N] and values [G, S, N, P], as in `aft.ops.tiled`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from aft.ops import tiled
from aft.ops.bias_blocks import BlockSource
from aft.ops.sums import Sums
from aft.ops.tiles import Blocks, Plan, strips

# Nats: of a bias from 0, of a key from its channel's first. Two such factors beside a value of 1e10 and a
# million keys are within float32's range of e^88, and so is their inverse; larger values go to float64.
LIMIT = 25.0


class KeyRange(NamedTuple):
    """The smallest and the largest key of each channel, [G, 1, N]; empty if there are no keys."""

    low: Tensor
    high: Tensor

    @property
    def complete(self) -> bool:
        """Whether no key is absent (-inf) and none is NaN."""
        return self.low.numel() == 0 or float(self.low.amin()) > -torch.inf

    @classmethod
    def of(cls, keys: Tensor) -> "KeyRange":
        if keys.numel() == 0:
            return cls(keys[:, :0], keys[:, :0])
        return cls(keys.amin(1, keepdim=True), keys.amax(1, keepdim=True))


def forward(
    keys: Tensor, values: Tensor, key_range: KeyRange, source: BlockSource, plan: Plan, T: int
) -> tuple[Tensor, Sums]:
    """As `tiled.forward`; the mean [G, T, N, P] takes the place of num in the sums.

    Sums of these products are relative to the first key of a channel and a bias of 0: ``den`` may be as far
    from 1 as e^50 times the number of keys.
    """
    if not _serves(keys, values, plan, T):
        return tiled.forward(keys, values, source, plan, T)
    origin, wide = _origin(keys, key_range)
    tame = _tame_rows(source, wide, plan, keys, T)
    if tame is not None and not tame.any():
        return tiled.forward(keys, values, source, plan, T)
    G, S, N = keys.shape
    P = values.shape[-1]
    num, den = keys.new_empty(G, T, N * P), keys.new_empty(G, T, N)
    needed = T if tame is None else int(tame.max())
    room = _Room(keys, values, plan, T)
    for strip in strips(T, S, plan.causal, G):
        columns = room.columns(strip, origin, wide)
        for blocks in strip:
            if blocks.row >= needed:
                continue
            weights = room.weights(source, blocks)
            for total, part in ((num, columns[..., : N * P]), (den, columns[..., N * P :])):
                rows, part = _rows(total, blocks), part.narrow(1, 0, blocks.columns)
                if blocks.fresh:
                    torch.bmm(weights, part, out=rows)
                else:
                    rows.baddbmm_(weights, part)
    origin = origin.expand(den.shape)
    blind = den == 0 if not float(den.amin()) > 0 else None
    if blind is not None:
        origin = origin.masked_fill(blind, -torch.inf)
    mean = num.view(G, T, N, P).div_((den if blind is None else den.masked_fill(blind, 1.0))[..., None])
    sums = Sums(mean, den, origin, den.new_zeros((), dtype=torch.float64).expand(den.shape))
    if tame is None:
        return mean, sums
    _, other = tiled.forward(keys, values, source, plan, T)
    use = torch.arange(T, device=keys.device)[:, None] < tame[:, None]
    sums = Sums(
        torch.where(use[..., None], mean, other.num),
        *(torch.where(use, x, y) for x, y in zip(sums[1:], other[1:], strict=True)),
    )
    return sums.num, sums


def backward(
    grad: Tensor,
    keys: Tensor,
    values: Tensor,
    key_range: KeyRange,
    source: BlockSource,
    plan: Plan,
    result: Tensor,
    sums: Sums,
    grad_log_den: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `tiled.backward`, from the result and the sums of `forward` for the same keys."""
    T = result.shape[1]
    origin, wide = _origin(keys, key_range) if _serves(keys, values, plan, T) else (None, None)
    if origin is None or _tame_rows(source, wide, plan, keys, T) is not None:
        return tiled.backward(grad, keys, values, source, plan, result, sums, grad_log_den)
    G, S, N = keys.shape
    P = values.shape[-1]
    source.allocate(keys.dtype)
    upstream = _upstream(grad, result, sums.den, grad_log_den)
    grad_keys, grad_values = keys.new_empty(keys.shape), keys.new_empty(values.shape)
    seen = min(S, T) if plan.causal else S
    grad_keys[:, seen:], grad_values[:, seen:] = 0.0, 0.0
    room = _Room(keys, values, plan, T)
    for strip in strips(T, S, plan.causal, G):
        columns = room.columns(strip, origin, wide)
        inflow = room.inflow(columns)
        for blocks in strip:
            weights = room.weights(source, blocks)
            rows, part = _rows(upstream, blocks), columns.narrow(1, 0, blocks.columns)
            inflow.narrow(1, 0, blocks.columns).baddbmm_(weights.mT, rows)
            flow = torch.bmm(rows, part.mT, out=room.flow(weights))
            source.add(blocks, flow.mul_(weights)[:, None])
        here, weight = _span(strip), columns[..., N * P :]
        dv, dk = grad_values[:, here], grad_keys[:, here]
        torch.mul(inflow[..., : N * P].unflatten(2, (N, P)), weight[..., None], out=dv)
        _inner(dv, values[:, here], out=dk).addcmul_(weight, inflow[..., N * P :])
    return grad_keys, grad_values


def _serves(keys: Tensor, values: Tensor, plan: Plan, T: int) -> bool:
    """Whether the plan has a pair to visit, and visits all that can be seen."""
    return plan.far is None and keys.device.type == "cpu" and T > 0 and values.numel() > 0


def _origin(keys: Tensor, key_range: KeyRange) -> tuple[Tensor, Tensor | None]:
    """The first key of each channel [G, 1, N] that is not absent, 0 if all are, and which keys [G, S, N] are
    too far from it; None: no key is."""
    origin = keys[:, :1]
    if float(torch.maximum(key_range.high - origin, origin - key_range.low).amax()) <= LIMIT:
        return origin, None
    absent = torch.isneginf(keys)
    S = keys.shape[1]
    position = torch.arange(S, device=keys.device)[:, None]
    first = torch.where(absent, S, position).amin(1, keepdim=True).clamp(max=S - 1)
    origin = keys.gather(1, first)
    origin = origin.masked_fill(torch.isneginf(origin), 0.0)
    wide = ((keys - origin).abs() <= LIMIT).logical_or_(absent).logical_not_()
    return origin, wide if wide.any() else None


def _tame_rows(source: BlockSource, wide: Tensor | None, plan: Plan, keys: Tensor, T: int) -> Tensor | None:
    """How many of the first rows see nothing but keys and biases within the limit, [G, N]; None: all do."""
    low, high = source.bounds(LIMIT)
    narrow = low >= -LIMIT and high <= LIMIT
    if wide is None and narrow:
        return None
    tame = torch.full((keys.shape[0], keys.shape[2]), T, device=keys.device)
    if wide is not None and plan.causal:
        position = torch.arange(wide.shape[1], device=keys.device)[:, None]
        tame = torch.minimum(tame, torch.where(wide, position, T).amin(1))
    elif wide is not None:
        tame = tame.masked_fill(wide.any(1), 0)
    if not narrow and tame.any():
        tame = torch.minimum(tame, _first_wide_bias(source, plan, keys, T)[:, None])
    return None if int(tame.min()) == T else tame


def _first_wide_bias(source: BlockSource, plan: Plan, keys: Tensor, T: int) -> Tensor:
    """The first row that sees a bias beyond the limit, [G or 1], T where no row does; -inf is within it."""
    first = torch.full((1,), T, device=keys.device)
    for strip in strips(T, keys.shape[1], plan.causal, keys.shape[0]):
        for blocks in strip:
            if blocks.row >= int(first.max()):
                continue
            bias = source.read(blocks)[:, 0]
            wide = (bias.abs() <= LIMIT).logical_or_(torch.isneginf(bias)).logical_not_()
            if blocks.triangular:
                wide = wide.tril(blocks.row - blocks.column)
            row = torch.arange(blocks.row, blocks.row + blocks.rows, device=keys.device)
            first = torch.minimum(first, torch.where(wide.any(2), row, T).amin(1))
    return first


def _upstream(grad: Tensor, result: Tensor, den: Tensor, grad_log_den: Tensor | None) -> Tensor:
    """[g / den, (h - g . y) / den], [G, T, N * P + N]; 0 in a row that saw nothing."""
    N, P = grad.shape[2:]
    share = den.reciprocal()
    if not float(den.amin()) > 0:
        share.masked_fill_(den == 0, 0.0)
    upstream = grad.new_empty(*grad.shape[:2], N * P + N)
    of_values = torch.mul(grad, share[..., None], out=upstream[..., : N * P].unflatten(2, (N, P)))
    of_weights = _inner(of_values, result, out=upstream[..., N * P :]).neg_()
    if grad_log_den is not None:
        of_weights.addcmul_(grad_log_den, share)
    return upstream


def _inner(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """The sum of a b over the last of their axes."""
    return torch.mul(a[..., 0], b[..., 0], out=out) if a.shape[-1] == 1 else torch.sum(a * b, -1, out=out)


class _Room:
    """The operands of products of one strip or block after another, in the same memory.

    Fresh memory for each would cost more than its arithmetic.
    """

    def __init__(self, keys: Tensor, values: Tensor, plan: Plan, T: int):
        self.keys, self.values = keys, values
        G, S, N = keys.shape
        plane = strips(T, S, plan.causal, G)
        self.channels = N * values.shape[3] + N
        self.room_for_columns = keys.new_empty(G, _span(plane[0]).stop, self.channels)
        self.room_for_inflow = self.room_for_flow = keys.new_empty(0)
        self.room_for_weights = keys.new_empty(G * max(x.rows * x.columns for strip in plane for x in strip))

    def columns(self, strip: tuple[Blocks, ...], origin: Tensor, wide: Tensor | None) -> Tensor:
        """[exp(k - origin) v, exp(k - origin)] of a strip's keys, [G, columns, N * P + N]; 0 if wide."""
        here = _span(strip)
        values = self.values[:, here]
        columns = self.room_for_columns[:, : values.shape[1]]
        weight = columns[..., values[0, 0].numel() :]
        torch.sub(self.keys[:, here], origin, out=weight).exp_()
        if wide is not None:
            weight.masked_fill_(wide[:, here], 0.0)
        products = columns[..., : values[0, 0].numel()].unflatten(2, values.shape[2:])
        torch.mul(weight[..., None], values, out=products)
        return columns

    def weights(self, source: BlockSource, blocks: Blocks) -> Tensor:
        """exp(w) [G, rows, columns] of a block, 0 where it is hidden."""
        bias = source.read(blocks)[:, 0]
        weights = self.room_for_weights[: bias.numel()].view(bias.shape)
        if bias.dtype == weights.dtype:
            torch.exp(bias, out=weights)
        else:
            weights.copy_(bias).exp_()
        if blocks.triangular:
            weights.tril_(blocks.row - blocks.column)
        return weights.expand(self.keys.shape[0], -1, -1)

    def inflow(self, columns: Tensor) -> Tensor:
        """Zeros of the shape of a strip's columns."""
        if self.room_for_inflow.numel() == 0:
            self.room_for_inflow = torch.empty_like(self.room_for_columns)
        return self.room_for_inflow[:, : columns.shape[1]].zero_()

    def flow(self, weights: Tensor) -> Tensor:
        """Room for the gradient of a block's weights."""
        if self.room_for_flow.numel() == 0:
            self.room_for_flow = torch.empty_like(self.room_for_weights)
        return self.room_for_flow[: weights.numel()].view(weights.shape)


def _rows(x: Tensor, blocks: Blocks) -> Tensor:
    return x.narrow(1, blocks.row, blocks.rows)


def _span(strip: tuple[Blocks, ...]) -> slice:
    """The keys of a strip."""
    left = strip[0].column
    return slice(left, left + max(blocks.columns for blocks in strip))
