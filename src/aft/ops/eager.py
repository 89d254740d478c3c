"""Portable PyTorch on any device: `aft.ops.products` as operators with autograd, under every transform.

The two passes are torch operators without autograd of their own (``torch.ops.aft.eager_mean`` and
``eager_mean_backward``), opaque to ``torch.compile``; an autograd Function joins them, and works under
``torch.func`` too.
"""

import torch
from torch import Tensor

from aft.ops import products
from aft.ops.bias_blocks import (
    BlockSource,
    DenseBlocks,
    KernelBlocks,
    LowRankBlocks,
    MaskedBlocks,
    ZeroBlocks,
    spread,
)
from aft.ops.operators import map_over, register, without_derivative
from aft.ops.products import KeyRange
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
# A gradient over its denominator that is not much above the smallest normal float32.
VANISHING = 1e-30


def mean(problem: Problem) -> Tensor:
    """The weighted mean of the values, [B, T, D] in float32 or wider, before the query gate.

    Time O(T S D) for a full bias, O(T s D) for a window or kernel of s, O(T D) without a bias; memory O(T D).
    """
    # Nothing reads the sums of a mean but its backward pass.
    return _solve(problem, _EagerMean, with_sums=torch.is_grad_enabled())[0].flatten(2)


def sums(problem: Problem) -> Sums:
    """The sums of each query: num [B, T, H, P], float64, the others [B, T, H]. Cost as `mean`.

    Gradients flow through num and den, to which the maxima are constants.
    """
    result, den, key_max, bias_max = _solve(problem, _EagerSums, with_sums=True)
    # Sums near the ends of float32's range cannot be joined with others in it, so all of their size is put
    # into the maximum. A mean near its end times the number of its keys is out of it.
    size = den.detach().masked_fill(den == 0, 1.0)
    den, bias_max = den / size, bias_max + size.double().log()
    return Sums(result.double() * den[..., None], den, key_max, bias_max)


def _solve(problem: Problem, function: type[torch.autograd.Function], with_sums: bool) -> tuple[Tensor, ...]:
    """The outputs of `eager_mean` for a problem: [B, T, H, P] and, ``with_sums``, [B, T, H]."""
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
    call = _mean_operator if torch.compiler.is_compiling() and not tracked else function.apply
    result, *sums = call(
        with_sums, keys, values, table, left, right, kernel, mask, T, problem.causal, problem.window_size,
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

    return unfold(result), *(unfold(x[..., None])[..., 0] for x in sums if with_sums)


def eager_mean(
    keys: Tensor, values: Tensor, *bias_and_settings, with_sums: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """keys [G, S, N], values [G, S, N, P] -> mean [G, T, N, P], float32 or wider.

    Also what the backward pass wants of the sums: den, max and bias_max [G, T, N], see `Sums`; empty without
    ``with_sums``.
    """
    with without_autocast(keys):
        source, plan, T = _prepare(keys, *bias_and_settings)
        dtype = _result_dtype(keys, values)
        key_range = KeyRange.of(keys)
        values = _without_absent(keys, values, key_range)
        wide = torch.float64 if _is_extreme(values) else dtype
        result, sums = products.forward(keys.to(wide), values.to(wide), key_range, source, plan, T)
        if not with_sums:
            none = result.new_empty(0, dtype=dtype)
            return result.to(dtype).contiguous(), none, none.clone(), none.double()
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
        key_range = KeyRange.of(keys)
        values_seen = _without_absent(keys, values, key_range)
        sums = Sums(result, den, key_max, bias_max)
        grad_log_den = None if grad_den is None else grad_den * den
        if (
            T * values.numel() <= SMALL
            or _is_extreme(values_seen, grad, grad_log_den)
            or _vanishes(grad, grad_log_den, den)
            or _is_saturated(keys, key_range, source)
        ):
            dtype = torch.float64
        k, v = keys.to(dtype), values_seen.to(dtype)
        if dtype != result.dtype:
            result, sums = products.forward(k, v, key_range, source, plan, T)
        grad_keys, grad_values = products.backward(
            grad.to(dtype), k, v, key_range, source, plan, result, sums,
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
        return source, dense_plan(T, S, causal, keys.shape[0]), T
    return source, banded_plan(T, S, causal, *band), T


def _without_absent(keys: Tensor, values: Tensor, key_range: KeyRange) -> Tensor:
    """The values, 0 where their key is absent (-inf), lest there be a NaN."""
    return values if key_range.complete else values.masked_fill(torch.isneginf(keys)[..., None], 0.0)


def _is_extreme(values: Tensor, *grads: Tensor | None) -> bool:
    """Whether products of these may leave float32's range on the way to a result inside it.

    Channels of values that are all tiny count as well: their products with small weights would vanish.
    """
    if values.numel() == 0 or values.dtype == torch.float64:
        return False
    values = values.detach()
    size = torch.maximum(-values.amin(1), values.amax(1))
    largest = float(size.amax())
    for grad in grads:
        if grad is not None and grad.numel():
            largest = max(1.0, largest) * max(1.0, _largest(grad))
    if grads:
        largest *= values[:1, :1].numel()
    smallest = float(size.masked_fill(size == 0, 1.0).amin())
    return not (largest <= LARGE and smallest >= 1.0 / LARGE)


def _vanishes(grad: Tensor, grad_log_den: Tensor | None, den: Tensor) -> bool:
    """Whether all gradients may be too small for float32 once they are divided by the denominator."""
    if grad.numel() == 0 or grad.dtype == torch.float64:
        return False
    largest = max(_largest(x) for x in (grad, grad_log_den) if x is not None)
    return 0.0 < largest < VANISHING * float(den.amax())


def _largest(x: Tensor) -> float:
    """The largest absolute value."""
    low, high = x.detach().aminmax()
    return max(-float(low), float(high))


def _is_saturated(keys: Tensor, key_range: KeyRange, source: BlockSource) -> bool:
    """Whether keys or biases are so far apart that most weights are 0 or 1.

    The gradients of keys and biases are then small differences of large terms, g . v - g . y, and in float32
    would be rounding noise.
    """
    near = keys.numel() == 0 or float((key_range.high - key_range.low).amax()) <= SATURATED_KEYS
    if not near and (key_range.complete or not spread(keys, 1) <= SATURATED_KEYS):
        return True
    low, high = source.bounds(SATURATED_BIAS / 2)
    return not (high - low <= SATURATED_BIAS or source.spread() <= SATURATED_BIAS)


def _result_dtype(keys: Tensor, values: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(keys.dtype, values.dtype), torch.float32)


def _fake_mean(keys, values, table, left, right, kernel, hidden, T, *_, with_sums=True):
    G, _, N = keys.shape
    result = keys.new_empty(G, T, N, values.shape[3], dtype=_result_dtype(keys, values))
    shape = (G, T, N) if with_sums else (0,)
    sums = (result.new_empty(shape), result.new_empty(shape))
    return result, *sums, keys.new_empty(shape, dtype=torch.float64)


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
_MEAN = register(
    eager_mean, _fake_mean, f"({_CALL}, *, bool with_sums=True) -> (Tensor, Tensor, Tensor, Tensor)"
)
_MEAN_BACKWARD = register(
    eager_mean_backward,
    _fake_mean_backward,
    f"(Tensor grad, Tensor? grad_den, Tensor result, Tensor den, Tensor key_max, Tensor bias_max, {_CALL}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)


_GRADIENTS = without_derivative(_MEAN_BACKWARD, "eager")


def _mean_operator(with_sums: bool, *args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _MEAN(*args, with_sums=with_sums)


class _EagerMean(torch.autograd.Function):
    """The mean; the sums that come with it are constants."""

    @staticmethod
    def forward(*args):
        return _mean_operator(*args)

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
        return _mean_operator(*args)

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
    _, *tensors = inputs[:8]
    ctx.save_for_backward(*output, *tensors)
    ctx.settings = inputs[8:]


def _gradients(ctx, grad: Tensor, grad_den: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    _, _, table, left, right, kernel, _ = saved[4:]
    # Dynamo cannot trace a Function inside another's backward, and has no second derivatives anyway.
    differentiate = _MEAN_BACKWARD if torch.compiler.is_compiling() else _GRADIENTS.apply
    grad_keys, grad_values, first, second = differentiate(grad, grad_den, *saved, *ctx.settings)
    return (
        None,
        grad_keys,
        grad_values,
        None if table is None else first,
        None if left is None else first,
        None if right is None else second,
        None if kernel is None else first,
        *(None,) * 8,
    )
