"""Portable PyTorch on any device: `aft.ops.tiled` as operators with autograd, under every transform.

The two passes are torch operators without autograd of their own (``torch.ops.aft.eager_mean`` and
``eager_mean_backward``), opaque to ``torch.compile``; an autograd Function joins them, and works under
``torch.func`` too.
"""

import torch
from torch import Tensor

from aft.ops import tiled
from aft.ops.bias_blocks import (
    BlockSource,
    DenseBlocks,
    KernelBlocks,
    LowRankBlocks,
    MaskedBlocks,
    ZeroBlocks,
    spread,
)
from aft.ops.operators import map_over, register
from aft.ops.spec import DenseBias, KernelBias, LowRankBias, Problem, without_autocast
from aft.ops.sums import Sums
from aft.ops.tiles import Plan, banded_plan, dense_plan

# Above this a float32 product of a value (or a gradient) and its factors may overflow; float64 takes over.
LARGE = 1e10
# Distances in nats of keys and of biases above which most weights are 0 or 1: gradients are then small
# differences of large terms, and come from float64.
SATURATED_KEYS = 30.0
SATURATED_BIAS = 16.0
# A product T * S * N * P up to which float64 costs nothing beside the calls themselves.
SMALL = 1 << 14


def mean(problem: Problem) -> Tensor:
    """The weighted mean of the values, [B, T, D] in float32 or wider, before the query gate.

    Time O(T S D) for a full bias, O(T s D) for a window or kernel of s, O(T D) without a bias; memory O(T D).
    """
    return _solve(problem, _EagerMean)[0].flatten(2)


def sums(problem: Problem) -> Sums:
    """The sums of each query: num [B, T, H, P], float64, the others [B, T, H]. Cost as `mean`.

    Gradients flow through num and den, to which the maxima are constants.
    """
    result, den, key_max, bias_max = _solve(problem, _EagerSums)
    # A mean near the end of float32's range times the number of its keys is out of it.
    return Sums(result.double() * den[..., None], den, key_max, bias_max)


def _solve(problem: Problem, function: type[torch.autograd.Function]) -> tuple[Tensor, ...]:
    """The outputs of `eager_mean` for a problem: [B, T, H, P] and [B, T, H]."""
    B, S, H = problem.keys.shape
    P, T = problem.head_channels, problem.target_length
    keys, values = problem.keys, problem.values.unflatten(2, (H, P))
    if problem.key_padding_mask is not None:
        absent = problem.key_padding_mask
        keys = keys.masked_fill(absent[:, :, None], -torch.inf)
        values = values.masked_fill(absent[:, :, None, None], 0.0)

    bias, mask = problem.bias, problem.attn_mask
    table = left = right = kernel = None
    query_width = key_width = anchor_row = anchor_column = 0
    mask_by_sequence = mask is not None and mask.ndim == 3
    one_bias_for_all = not mask_by_sequence
    match bias:
        case DenseBias():
            table = bias.table if bias.table.ndim == 3 else bias.table[None]
            one_bias_for_all = one_bias_for_all and bias.table.ndim == 2
        case LowRankBias():
            left, right = bias.left, bias.right
        case KernelBias():
            kernel = bias.kernel
            query_width, key_width = bias.query_grid[1], bias.key_grid[1]
            anchor_row, anchor_column = bias.anchor
            if bias.query_grid[0] == bias.key_grid[0] == 1:
                query_width = key_width = max(T, S, 1)  # one row, whatever the lengths

    # Fold into G groups of N channels that share a bias: keys [G, S, N], values [G, S, N, P].
    if kernel is not None and mask_by_sequence:
        kernel = kernel.expand(B, *kernel.shape).flatten(0, 1)
        keys, values = keys.mT.reshape(B * H, S, 1), values.transpose(1, 2).reshape(B * H, S, 1, P)
    elif kernel is not None:
        keys, values = keys.permute(2, 1, 0), values.permute(2, 1, 0, 3)
    elif one_bias_for_all:
        keys, values = keys.transpose(0, 1).flatten(1)[None], values.transpose(0, 1).flatten(1, 2)[None]
    if mask is not None and mask.ndim == 2:
        mask = mask[None]

    # Dynamo cannot trace a Function of which no input wants a gradient.
    inputs = (keys, values, table, left, right, kernel)
    tracked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    call = _MEAN if torch.compiler.is_compiling() and not tracked else function.apply
    result, *sums = call(
        keys, values, table, left, right, kernel, mask, T, problem.causal, problem.window_size,
        query_width, key_width, anchor_row, anchor_column,
    )  # fmt: skip

    def unfold(x: Tensor) -> Tensor:
        """[G, T, N, P] as [B, T, H, P]."""
        if kernel is not None and mask_by_sequence:
            return x.view(B, H, T, -1).transpose(1, 2)
        if kernel is not None:
            return x.permute(2, 1, 0, 3)
        if one_bias_for_all:
            return x.view(T, B, H, x.shape[3]).transpose(0, 1)
        return x

    return unfold(result), *(unfold(x[..., None])[..., 0] for x in sums)


def eager_mean(keys: Tensor, values: Tensor, *bias_and_settings) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """keys [G, S, N], values [G, S, N, P] -> mean [G, T, N, P], float32 or wider.

    Also what the backward pass wants of the sums: den, max and bias_max [G, T, N], see `Sums`.
    """
    with without_autocast(keys):
        source, plan, T = _prepare(keys, *bias_and_settings)
        dtype = _result_dtype(keys, values)
        values = _without_absent(keys, values)
        wide = torch.float64 if _is_extreme(values) else dtype
        result, sums = tiled.forward(keys.to(wide), values.to(wide), source, plan, T)
        outputs = (result.to(dtype), sums.den.to(dtype), sums.max.to(dtype), sums.bias_max)
        return tuple(x.contiguous() for x in outputs)  # pyrefly: ignore[bad-return]


def eager_mean_backward(
    grad: Tensor,
    grad_den: Tensor | None,
    result: Tensor,
    den: Tensor,
    key_max: Tensor,
    bias_max: Tensor,
    keys: Tensor,
    values: Tensor,
    *bias_and_settings,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of keys, values and of the bias's one or two tensors (empty where there are none).

    ``grad_den`` is that of the denominator, to which the maxima are constants.
    """
    with without_autocast(keys):
        source, plan, T = _prepare(keys, *bias_and_settings)
        dtype = result.dtype
        values_seen = _without_absent(keys, values)
        sums = Sums(result, den, key_max, bias_max)
        grad_log_den = None if grad_den is None else grad_den * den
        extreme = _is_extreme(values_seen, grad, grad_log_den)
        if T * values.numel() <= SMALL or extreme or _is_saturated(keys, source):
            dtype = torch.float64
        k, v = keys.to(dtype), values_seen.to(dtype)
        if dtype != result.dtype:
            result, sums = tiled.forward(k, v, source, plan, T)
        grad_keys, grad_values = tiled.backward(
            grad.to(dtype), k, v, source, plan, result, sums,
            None if grad_log_den is None else grad_log_den.to(dtype),
        )  # fmt: skip
        of_bias = [x.contiguous() for x in source.gradients()]
        first, second = of_bias + [keys.new_empty(0) for _ in range(2 - len(of_bias))]
        return grad_keys.to(keys.dtype), grad_values.to(values.dtype), first, second


def _prepare(
    keys: Tensor,
    table: Tensor | None,
    left: Tensor | None,
    right: Tensor | None,
    kernel: Tensor | None,
    hidden: Tensor | None,
    T: int,
    causal: bool,
    window_size: int | None,
    query_width: int,
    key_width: int,
    anchor_row: int,
    anchor_column: int,
) -> tuple[BlockSource, Plan, int]:
    """The operators' flat arguments as a bias to read in blocks, the blocks to visit, and T."""
    S = keys.shape[1]
    source: BlockSource
    band: tuple[int, int] | None = None  # s - t of the pairs whose bias may not be zero: behind, ahead
    if table is not None:
        source = DenseBlocks(table, window_size)
    elif left is not None and right is not None:
        source = LowRankBlocks(left, right, window_size)
    elif kernel is not None:
        one_row = query_width == key_width and query_width >= max(T, S)
        source = KernelBlocks(kernel, query_width, key_width, (anchor_row, anchor_column), one_row)
        if query_width == key_width:
            behind = anchor_row * key_width + anchor_column
            cells = (kernel.shape[1] - 1) * key_width + kernel.shape[2] - 1
            band = (behind, cells - behind)
    else:
        source = ZeroBlocks(keys)
        band = (-1, -1)
    if window_size is not None:
        band = (window_size - 1, window_size - 1)
    if hidden is not None:
        source = MaskedBlocks(source, hidden, keys.shape[0])
    if band is None or hidden is not None or (band[0] >= T and band[1] >= S):
        return source, dense_plan(T, S, causal), T
    return source, banded_plan(T, S, causal, *band), T


def _without_absent(keys: Tensor, values: Tensor) -> Tensor:
    """The values, 0 where their key is absent (-inf), lest there be a NaN."""
    absent = torch.isneginf(keys)
    return values.masked_fill(absent[..., None], 0.0) if absent.any() else values


def _is_extreme(values: Tensor, *grads: Tensor | None) -> bool:
    """Whether products of these may leave float32's range on the way to a result inside it.

    Channels of values that are all tiny count as well: their products with small weights would vanish.
    """
    if values.numel() == 0 or values.dtype == torch.float64:
        return False
    low, high = values.detach().aminmax(dim=1)
    size = torch.maximum(-low, high)
    largest = float(size.amax())
    for grad in grads:
        if grad is not None and grad.numel():
            low, high = grad.detach().aminmax()
            largest = max(1.0, largest) * max(1.0, -float(low), float(high))
    if grads:
        largest *= values[:1, :1].numel()
    smallest = float(size.masked_fill(size == 0, 1.0).amin())
    return not (largest <= LARGE and smallest >= 1.0 / LARGE)


def _is_saturated(keys: Tensor, source: BlockSource) -> bool:
    """Whether keys or biases are so far apart that most weights are 0 or 1.

    The gradients of keys and biases are then small differences of large terms, g . v - g . y, and in float32
    would be rounding noise.
    """
    return not (spread(keys, 1) <= SATURATED_KEYS and source.spread() <= SATURATED_BIAS)


def _result_dtype(keys: Tensor, values: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(keys.dtype, values.dtype), torch.float32)


def _fake_mean(keys, values, table, left, right, kernel, hidden, T, *_):
    G, _, N = keys.shape
    result = keys.new_empty(G, T, N, values.shape[3], dtype=_result_dtype(keys, values))
    sums = (result.new_empty(G, T, N), result.new_empty(G, T, N))
    return result, *sums, keys.new_empty(G, T, N, dtype=torch.float64)


def _fake_mean_backward(
    grad, grad_den, result, den, key_max, bias_max, keys, values, table, left, right, kernel, *_
):
    first = table if table is not None else left if left is not None else kernel
    none = keys.new_empty(0)
    of_bias = (none if x is None else x for x in (first, right))
    return tuple(x.new_empty(x.shape) for x in (keys, values, *of_bias))


_CALL = (
    "Tensor keys, Tensor values, Tensor? table, Tensor? left, Tensor? right, Tensor? kernel, Tensor? hidden, "
    "SymInt T, bool causal, SymInt? window_size, SymInt query_width, SymInt key_width, SymInt anchor_row, "
    "SymInt anchor_column"
)
_MEAN = register(eager_mean, _fake_mean, f"({_CALL}) -> (Tensor, Tensor, Tensor, Tensor)")
_MEAN_BACKWARD = register(
    eager_mean_backward,
    _fake_mean_backward,
    f"(Tensor grad, Tensor? grad_den, Tensor result, Tensor den, Tensor key_max, Tensor bias_max, {_CALL}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)


class _EagerMeanBackward(torch.autograd.Function):
    @staticmethod
    def forward(*args):
        return _MEAN_BACKWARD(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            "impl='eager' has no second derivative of an AFT operation; impl='reference' differentiates twice"
        )

    @staticmethod
    def vmap(info, in_dims, *args):
        return map_over(_EagerMeanBackward.apply, info.batch_size, in_dims, args)


class _EagerMean(torch.autograd.Function):
    """The mean; the sums that come with it are constants."""

    @staticmethod
    def forward(*args):
        return _MEAN(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(*output[1:])
        _keep_for_backward(ctx, inputs, output)

    @staticmethod
    def backward(ctx, *grads):
        return _gradients(ctx, grads[0], None)

    @staticmethod
    def vmap(info, in_dims, *args):
        return map_over(_EagerMean.apply, info.batch_size, in_dims, args)


class _EagerSums(torch.autograd.Function):
    """The mean and the denominator; the maxima that the latter is relative to are constants."""

    @staticmethod
    def forward(*args):
        return _MEAN(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(*output[2:])
        _keep_for_backward(ctx, inputs, output)

    @staticmethod
    def backward(ctx, *grads):
        return _gradients(ctx, grads[0], grads[1])

    @staticmethod
    def vmap(info, in_dims, *args):
        return map_over(_EagerSums.apply, info.batch_size, in_dims, args)


def _keep_for_backward(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output, *inputs[:7])
    ctx.settings = inputs[7:]


def _gradients(ctx, grad: Tensor, grad_den: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    _, _, table, left, right, kernel, _ = saved[4:]
    # Dynamo cannot trace a Function inside another's backward, and has no second derivatives anyway.
    differentiate = _MEAN_BACKWARD if torch.compiler.is_compiling() else _EagerMeanBackward.apply
    grad_keys, grad_values, first, second = differentiate(grad, grad_den, *saved, *ctx.settings)
    return (
        grad_keys,
        grad_values,
        None if table is None else first,
        None if left is None else first,
        None if right is None else second,
        None if kernel is None else first,
        *(None,) * 8,
    )
