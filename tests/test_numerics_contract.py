"""The numerics contract, point by point, of every implementation against the specification."""

import subprocess
import sys

import pytest
import torch

from aft.ops import aft_conv, aft_full, aft_local, aft_simple, available_impls
from operations import (
    GRID_OPERATIONS,
    SEQUENCE_OPERATIONS,
    by_each_impl,
    by_the_sums,
    conv,
    full,
    full_low_rank,
    gradients,
    local,
    relative_error,
    simple,
    solves,
)

SCALES = [1.0, 10.0, 100.0, 1e4]
ONE_OF_EACH = [full(), full_low_rank(), simple(), local(5), conv(4)]
OPERATIONS = SEQUENCE_OPERATIONS + GRID_OPERATIONS
EACH_OPERATION, EACH_OF_SOME = by_each_impl(OPERATIONS), by_each_impl(ONE_OF_EACH)
EVERY_IMPL = ["reference", "eager", "native"]


def _gradient_floor(references, tolerance_scale=1e-3):
    """A gradient that vanishes beside the others (a saturated softmax's) is held to their size instead."""
    return tolerance_scale * max(g.double().norm().item() for g in references)


# 1. Finite in, finite out, in the outputs and in every gradient.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1e4, 1e20, 3e38])
@pytest.mark.parametrize("operation", EACH_OPERATION, ids=str)
def test_1_finite_in_finite_out(operation, size, causal):
    inputs = operation.inputs(T=operation.length(70))
    sign = [torch.sign(x) for x in inputs]
    extremes = (inputs[0] * 50, sign[1] * size, inputs[2], *(s * min(size, 1e19) for s in sign[3:]))
    y, grads = gradients(operation, extremes, torch.randn_like(inputs[0]), causal=causal)
    assert y.isfinite().all()
    for grad in grads:
        assert grad.isfinite().all()
    assert y.abs().max() <= inputs[2].abs().max()


@pytest.mark.parametrize("operation", EACH_OF_SOME, ids=str)
def test_1_values_up_to_the_largest_float(operation):
    q, k, v, *bias = operation.inputs(T=70)
    v = torch.sign(v) * torch.finfo(torch.float32).max
    y, grads = gradients(operation, (q, k, v, *bias), torch.full_like(q, 1e-3), causal=True)
    assert relative_error(y, operation(q, k, v, *bias, causal=True, impl="reference")) < 1e-6
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("size", [1e10, 1e16, 1e28, 1e36])
@pytest.mark.parametrize("operation", ONE_OF_EACH, ids=str)
def test_1_large_values(operation, size):
    q, k, v, *bias = operation.inputs(T=70, key_scale=10.0, bias_scale=10.0)
    _check_against_reference(operation, (q, k, v * size, *bias), causal=True)


@pytest.mark.parametrize("size", [1e-15, 1e-22, 1e-30])
@pytest.mark.parametrize("causal", [False, True])
def test_1_small_values_do_not_vanish(size, causal):
    """Weights of e^-55 times values of 1e-22 are below float32's range, and their quotient is not."""
    T = 200
    k = torch.linspace(0, 55, T)[None, :, None].expand(1, T, 2).contiguous()
    w = -torch.linspace(0, 55, T).expand(T, T).contiguous()
    v = (torch.rand(1, T, 2) + 1) * size
    _check_against_reference(full(), (k, k, v, w), causal=causal)


def test_1_hidden_products_do_not_overflow():
    """Later keys of e^30, earlier ones of e^-29, large values: what causality hides is never infinite."""
    N = 2048
    k = torch.full((1, 64, N), 30.0)
    k[:, 0], k[:, 1:32] = 0.0, -29.0
    w = torch.zeros(64, 64)
    w[:, 0] = -59.0
    v = torch.full((1, 64, N), 1e10)
    v[:, ::2] *= 0.5
    _, grads = gradients(full(), (k, k, v, w), torch.ones_like(k), causal=True)
    assert all(grad.isfinite().all() for grad in grads)


def test_1_a_low_rank_bias_of_any_size():
    q, k, v, left, right = full_low_rank().inputs(T=70)
    _, grads = gradients(
        full_low_rank(), (q, k, v, left * 0, torch.full_like(right, 3e38)), torch.randn_like(q)
    )
    assert all(grad.isfinite().all() for grad in grads)


def test_1_no_epsilon_biases_the_result():
    """A mean of equal values is that value, however small the weights are."""
    k = torch.full((1, 40, 3), -80.0)
    v = torch.full((1, 40, 3), 0.7)
    y = aft_simple(k, k, v, causal=True, query_gate=None)
    assert torch.allclose(y, v, rtol=1e-6, atol=0)


# 2. Against the float64 reference the relative error stays under 1e-5 in float32.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_scale", SCALES)
@pytest.mark.parametrize("bias_scale", SCALES)
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_2_error_at_every_scale(operation, key_scale, bias_scale, causal):
    inputs = operation.inputs(B=2, T=operation.length(63), key_scale=key_scale, bias_scale=bias_scale)
    _check_against_reference(operation, inputs, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (2, 2), (64, 65), (200, 1), (1, 200), (300, 130), (130, 300)])
@pytest.mark.parametrize("operation", SEQUENCE_OPERATIONS, ids=str)
def test_2_error_at_odd_lengths(operation, T, S, causal):
    for scale in (1.0, 100.0):
        inputs = operation.inputs(B=2, T=T, S=S, key_scale=scale, bias_scale=scale)
        _check_against_reference(operation, inputs, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("operation", [*ONE_OF_EACH, local(32), conv(32)], ids=str)
def test_2_error_over_a_thousand_positions(operation, scale, causal):
    inputs = operation.inputs(B=1, T=1000, D=2, key_scale=scale, bias_scale=scale)
    _check_against_reference(operation, inputs, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("position", [0, 31, 62])
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_2_error_with_one_key_200_above_the_rest(operation, position, causal):
    inputs = operation.inputs(T=operation.length(63))
    inputs[1][:, min(position, inputs[1].shape[1] - 1)] += 200.0
    _check_against_reference(operation, inputs, causal=causal)


@pytest.mark.parametrize("operation", EACH_OF_SOME, ids=str)
def test_2_error_against_a_loop_over_the_sums(operation):
    for scale in SCALES:
        inputs = operation.inputs(B=1, T=150, key_scale=scale, bias_scale=scale)
        wanted = by_the_sums(operation, *inputs, causal=True)
        assert relative_error(operation(*inputs, causal=True), wanted) < 1e-5


@pytest.mark.parametrize("operation", EACH_OF_SOME, ids=str)
def test_2_every_element_of_positive_values(operation):
    """Without cancellation among the values the bound holds for each element, not only for the norm."""
    for scale in SCALES:
        q, k, v, *bias = operation.inputs(B=1, T=150, key_scale=scale, bias_scale=scale)
        inputs = (q, k, v.abs() + 0.1, *bias)
        wanted = operation(*(x.double() for x in inputs), causal=True, impl="reference")
        assert ((operation(*inputs, causal=True) - wanted).abs() / wanted.abs()).max() < 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("operation", EACH_OF_SOME, ids=str)
def test_2_bfloat16_errs_at_most_twice_as_much_as_its_formula(operation, causal):
    inputs = operation.inputs(B=2, T=130, dtype=torch.bfloat16)
    exact = operation(*(x.double() for x in inputs), causal=causal, impl="reference")
    table = operation.table(130, 130, causal, *inputs[3:])
    formula = _formula(*inputs[:3], table, causal)
    assert formula.dtype == torch.bfloat16
    got = operation(*inputs, causal=causal)
    assert got.dtype == torch.bfloat16
    assert relative_error(got, exact) <= 2 * relative_error(formula, exact)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T", [4, 600])
@pytest.mark.parametrize("size", [1e14, 1e17, 3e38])
@pytest.mark.parametrize("operation", [full(), full(by_sequence=True), local(70), conv(40)], ids=str)
def test_2_a_bias_does_not_swallow_the_keys(operation, size, T, causal):
    """A row of -3e38, as a mask's is, or a third of the keys at 1e17: the small parts still decide."""
    q, k, v, bias = operation.inputs(T=T, B=1)
    k[:, ::3] += size
    _check_against_reference(operation, (q, k, v, bias), causal=causal)
    if operation.name.startswith("full"):
        q, k, v, bias = operation.inputs(T=T, B=1)
        bias[..., 2, :] = -size
        bias[..., 1::4, ::2] = size
        inputs = (q, k, v, bias)
        _check_against_reference(operation, inputs, causal=causal)
        assert (
            relative_error(operation(*inputs, causal=causal), by_the_sums(operation, *inputs, causal=causal))
            < 1e-5
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias_scale", [1.0, 30.0, 100.0])
def test_2_padding_beside_wide_biases(bias_scale, causal):
    """The largest bias of a row may lie on a key that is not there."""
    for operation in (full(), full(by_sequence=True)):
        inputs = operation.inputs(T=130, key_scale=0.1, bias_scale=bias_scale)
        padding = torch.rand(2, 130) < 0.5
        _check_against_reference(operation, inputs, causal=causal, key_padding_mask=padding)
        hidden = torch.rand(130, 130) < 0.5
        _check_against_reference(operation, inputs, causal=causal, key_padding_mask=padding, attn_mask=hidden)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("operation", [full_low_rank(), simple(), local(32), conv(32, heads=1)], ids=str)
def test_2_error_over_16384_positions(operation, scale, causal):
    T = 16384
    inputs = operation.inputs(B=1, T=T, D=1, key_scale=scale, bias_scale=scale)
    y = operation(*inputs, causal=causal)
    rows = torch.cat([torch.arange(0, T, 997), torch.tensor([T - 1])])
    q, k, v, *bias = (x.double() for x in inputs)
    wanted = []
    for t in rows.tolist():
        exponent = k[0] + _bias_row(operation, t, T, causal, bias)
        if causal:
            exponent = exponent[: t + 1]
        weight = torch.softmax(exponent, 0)
        wanted.append(torch.sigmoid(q[0, t]) * (weight * v[0, : len(weight)]).sum(0))
    assert relative_error(y[0, rows], torch.stack(wanted)) < 1e-5


def _bias_row(operation, t, T, causal, bias):
    """w[t, :] as a column [T, 1]."""
    distance = torch.arange(T) - t
    if operation.name == "simple":
        return torch.zeros(T, 1, dtype=torch.float64)
    if operation.heads:
        size = operation.settings["size"]
        cell = distance + (size - 1 if causal else (size - 1) // 2)
        inside = (cell >= 0) & (cell < size)
        return torch.where(inside, bias[0][0, cell.clamp(0, size - 1)], 0.0)[:, None]
    if len(bias) == 2:
        return (bias[1] @ bias[0][t])[:, None]
    return torch.where(distance.abs() < operation.settings["window"], bias[0][t], 0.0)[:, None]


def _formula(q, k, v, table, causal):
    """Equation 2 in the dtype of its inputs, with the row maximum subtracted."""
    exponent = k[:, None] + (table if table is not None else torch.zeros(1, 1, 1, 1, dtype=k.dtype))
    T = q.shape[1]
    if causal:
        later = torch.ones(T, T, dtype=torch.bool).triu(1)[None, :, :, None]
        exponent = exponent.expand(-1, T, -1, -1).masked_fill(later, -torch.inf)
    weight = torch.exp(exponent - exponent.amax(2, keepdim=True))
    values = v.unflatten(2, (k.shape[2], -1))[:, None]
    ratio = (weight[..., None] * values).sum(2) / weight.sum(2)[..., None]
    return torch.sigmoid(q) * ratio.flatten(2)


def _check_against_reference(operation, inputs, **options):
    upstream = torch.randn_like(inputs[0])
    wanted, wanted_grads = gradients(operation, inputs, upstream, impl="reference", **options)
    floor = _gradient_floor(wanted_grads)
    for impl in ("eager", "native"):
        if impl == "native" and not solves(impl, operation, inputs, **options):
            continue
        got, grads = gradients(operation, inputs, upstream, impl=impl, **options)
        assert relative_error(got, wanted) < 1e-5
        for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
            assert relative_error(grad, wanted_grad, floor) < 1e-5


# 3. Shifts change nothing; a key of -inf is absent.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("operation", EACH_OPERATION, ids=str)
def test_3_a_shift_of_all_keys_changes_nothing(operation, causal):
    q, k, v, *bias = operation.inputs(T=operation.length(70))
    k = (k * 8).round() / 8  # so that the shifted keys are the same numbers, exactly
    wanted = operation(q, k, v, *bias, causal=causal)
    for shift in (-1024.0, 65536.0):
        assert relative_error(operation(q, k + shift, v, *bias, causal=causal), wanted) < 1e-5


@pytest.mark.parametrize("causal", [False, True])
def test_3_a_shift_of_a_bias_row_changes_nothing(causal):
    q, k, v, w = full().inputs(T=70)
    w = (w * 8).round() / 8
    shift = torch.randint(-4096, 4096, (70, 1)).float()
    assert (
        relative_error(aft_full(q, k, v, w + shift, causal=causal), aft_full(q, k, v, w, causal=causal))
        < 1e-5
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("operation", EACH_OPERATION, ids=str)
def test_3_an_absent_key_has_no_weight_and_no_gradient(operation, causal):
    q, k, v, *bias = operation.inputs(T=operation.length(70))
    absent = torch.rand(k.shape) < 0.3
    k = k.masked_fill(absent, -torch.inf)
    _check_against_reference(operation, (q, k, v, *bias), causal=causal)
    _, grads = gradients(operation, (q, k, v, *bias), torch.randn_like(q), causal=causal)
    channels = v.shape[2] // k.shape[2]
    assert (grads[1][absent] == 0).all()
    assert (grads[2][absent.repeat_interleave(channels, 2)] == 0).all()


@pytest.mark.parametrize("operation", by_each_impl(ONE_OF_EACH, EVERY_IMPL), ids=str)
def test_3_what_an_absent_key_has_for_a_value_is_never_read(operation):
    q, k, v, *bias = operation.inputs(T=70)
    k[:, 3] = -torch.inf
    wanted = operation(q, k, v * 1e38, *bias, causal=True)
    v = v * 1e38
    v[:, 3] = torch.nan
    assert torch.equal(operation(q, k, v, *bias, causal=True), wanted)


@pytest.mark.parametrize("bias_scale", SCALES)
@pytest.mark.parametrize("key_scale", SCALES)
@pytest.mark.parametrize("causal", [False, True])
def test_3_a_bias_of_minus_infinity_hides_the_key(causal, key_scale, bias_scale):
    q, k, v, w = full().inputs(T=70, key_scale=key_scale, bias_scale=bias_scale)
    hidden = torch.rand(70, 70) < 0.4
    w = w.masked_fill(hidden, -torch.inf)
    _check_against_reference(full(), (q, k, v, w), causal=causal)
    _, grads = gradients(full(), (q, k, v, w), torch.randn_like(q), causal=causal)
    assert (grads[3][hidden] == 0).all()


# 4. A row with nothing to see gives zeros; a NaN behind a padding mask reaches nothing.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("operation", by_each_impl(OPERATIONS, EVERY_IMPL), ids=str)
def test_4_a_row_with_nothing_to_see(operation, causal):
    T = operation.length(70)
    inputs = operation.inputs(T=T)
    padding = torch.zeros(2, T, dtype=torch.bool)
    padding[0] = True
    y, grads = gradients(
        operation, inputs, torch.randn_like(inputs[0]), causal=causal, key_padding_mask=padding
    )
    assert (y[0] == 0).all()
    assert (y[1] != 0).all()
    assert all((grad[0] == 0).all() for grad in grads[:3])
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("operation", by_each_impl(OPERATIONS, EVERY_IMPL), ids=str)
def test_4_nan_behind_a_padding_mask_reaches_nothing(operation, causal):
    T = operation.length(70)
    q, k, v, *bias = operation.inputs(T=T)
    padding = torch.rand(2, T) < 0.4
    poisoned = (q, k.masked_fill(padding[..., None], torch.nan), v.masked_fill(padding[..., None], torch.nan))
    upstream = torch.randn_like(q)
    options = {"causal": causal, "key_padding_mask": padding}
    y, grads = gradients(operation, (q, k, v, *bias), upstream, **options)
    y_poisoned, grads_poisoned = gradients(operation, (*poisoned, *bias), upstream, **options)
    assert torch.equal(y, y_poisoned)
    for a, b in zip(grads, grads_poisoned, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
@pytest.mark.parametrize("shape", ["shared", "by sequence"])
def test_4_masks_hide(operation, causal, shape):
    T = operation.length(70)
    for scale in (1.0, 100.0):
        inputs = operation.inputs(T=T, key_scale=scale, bias_scale=scale)
        mask = torch.rand(2, T, T) < 0.5
        mask[0, :3] = True
        padding = torch.rand(2, T) < 0.3
        attn_mask = mask if shape == "by sequence" else mask[0]
        _check_against_reference(
            operation, inputs, causal=causal, attn_mask=attn_mask, key_padding_mask=padding
        )
        wanted = by_the_sums(operation, *inputs, causal=causal, attn_mask=attn_mask, key_padding_mask=padding)
        got = operation(*inputs, causal=causal, attn_mask=attn_mask, key_padding_mask=padding)
        assert relative_error(got, wanted) < 1e-5


# 5. Exponentials and sums are float32 or wider whatever the dtype, under autocast too.


@pytest.mark.parametrize("operation", EACH_OF_SOME, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_5_half_precision_rounds_only_the_result(operation, dtype):
    inputs = operation.inputs(T=300, dtype=dtype)
    wanted = operation(*(x.float() for x in inputs), causal=True)
    assert torch.equal(operation(*inputs, causal=True), wanted.to(dtype))


@pytest.mark.parametrize("operation", by_each_impl(ONE_OF_EACH, EVERY_IMPL), ids=str)
def test_5_autocast_changes_nothing(operation):
    inputs = operation.inputs(T=130)
    upstream = torch.randn_like(inputs[0])
    y, grads = gradients(operation, inputs, upstream, causal=True)
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_cast = operation(*leaves, causal=True)
        grads_cast = torch.autograd.grad((y_cast * upstream).sum(), leaves)
    assert torch.equal(y, y_cast)
    for a, b in zip(grads, grads_cast, strict=True):
        assert torch.equal(a, b)


def test_5_ten_thousand_equal_keys_do_not_stall_a_bfloat16_sum():
    """In bfloat16 a running sum of ones stops at 256; the mean of 0, 1, 0, 1 ... stays 1/2."""
    T = 10_000
    k = torch.zeros(1, T, 1, dtype=torch.bfloat16)
    v = (torch.arange(T) % 2).to(torch.bfloat16)[None, :, None]
    y = aft_simple(k, k, v, causal=True, query_gate=None)
    assert torch.equal(y[0, 999::1000, 0], torch.full((10,), 0.5, dtype=torch.bfloat16))


# 6. Causal means causal, and rows of a batch never mix.


@pytest.mark.parametrize("operation", EACH_OPERATION, ids=str)
def test_6_no_gradient_flows_from_the_future(operation):
    T = operation.length(130)
    inputs = operation.inputs(T=T)
    for t in (0, T // 2, T - 2):
        upstream = torch.zeros_like(inputs[0])
        upstream[:, t] = 1.0
        _, grads = gradients(operation, inputs, upstream, causal=True)
        for grad in grads[:3]:
            assert (grad[:, t + 1 :] == 0).all()
        assert (grads[2][:, : t + 1] != 0).any()


@pytest.mark.parametrize("shift", [1.0, 100.0, 1e20])
@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("operation", EACH_OPERATION, ids=str)
def test_6_a_changed_future_changes_no_bit_of_the_past(operation, scale, shift):
    T = operation.length(330)
    q, k, v, *bias = operation.inputs(T=T, key_scale=scale, bias_scale=scale)
    # Values beyond 1e10 send the whole call to float64, whose last bit may round otherwise: see the README.
    y = operation(q, k, v, *bias, causal=True)
    for cut in {1, T // 3, T - 1}:
        changed = [x.clone() for x in (q, k, v)]
        for x, sign in zip(changed, (1, 1, -1), strict=True):
            x[:, cut:] += sign * min(shift, 1e9)
        changed[1][:, cut:] *= shift
        assert torch.equal(operation(*changed, *bias, causal=True)[:, :cut], y[:, :cut])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("operation", EACH_OPERATION, ids=str)
def test_6_rows_of_a_batch_never_mix(operation, scale, causal):
    T = operation.length(70)
    q, k, v, *bias = operation.inputs(B=3, T=T, key_scale=scale, bias_scale=scale)
    order = torch.tensor([2, 0, 1])
    y = operation(q, k, v, *bias, causal=causal)
    permuted = [b[order] if operation.name == "full, a table each" else b for b in bias]
    # Not to the bit: where a channel lies in a vector register decides how its exponential is rounded.
    assert relative_error(operation(q[order], k[order], v[order], *permuted, causal=causal), y[order]) < 1e-6
    k2, v2 = k.clone(), v.clone()
    k2[0] = k2[0] * 50 + 300
    v2[0] *= -7
    assert torch.equal(operation(q, k2, v2, *bias, causal=causal)[1:], y[1:])
    upstream = torch.zeros_like(q)
    upstream[1] = 1.0
    _, grads = gradients(operation, (q, k, v, *bias), upstream, causal=causal)
    assert all((grad[[0, 2]] == 0).all() for grad in grads[:3])


# 7. Memory beyond inputs and outputs grows as T d, never as T^2 or T^2 d.

_PEAK = """
import resource, sys, torch
from aft.ops import aft_conv, aft_full, aft_local, aft_simple
torch.set_num_threads(1)
name, T, causal = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "causal"
D = 16
def leaf(*shape): return torch.randn(*shape).requires_grad_()
q, k, v = leaf(1, T, D), leaf(1, T, D), leaf(1, T, D)
pair = leaf(T, 4), leaf(T, 4)
run = {
    "full": lambda q, k, v, *pair: aft_full(q, k, v, pair, causal=causal),
    "local": lambda q, k, v, *pair: aft_local(q, k, v, pair, 32, causal=causal),
    "simple": lambda q, k, v, *pair: aft_simple(q, k, v, causal=causal),
    "conv": lambda q, k, v, *pair: aft_conv(q, k[..., :4], v, pair[0][:4].T.contiguous(), causal=causal),
}[name]
def short(x): return x.detach()[..., :64, :].clone().requires_grad_() if x.shape[-2] == T else x
run(short(q), short(k), short(v), *(p.detach()[:64].requires_grad_() for p in pair)).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(q, k, v, *pair).sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / (T * D * 4))
"""


@pytest.mark.parametrize("causal", ["causal", "both ways"])
@pytest.mark.parametrize("name", ["full", "simple", "local", "conv"])
def test_7_memory_is_linear_in_length(name, causal):
    """Peak memory in units of one [T, D] tensor, where one [T, T] tensor would be 1,024 of them."""
    T = 16384
    out = subprocess.run(
        [sys.executable, "-c", _PEAK, name, str(T), causal], capture_output=True, text=True, check=True
    )
    assert float(out.stdout) < 300


def test_operations_take_one_query_at_a_time_where_lengths_differ():
    """Cross-attention: fewer queries than keys, more, one, none."""
    impls = [impl for impl, reason in available_impls().items() if reason is None]
    for T in (0, 1, 5, 40):
        for S in (0, 1, 5, 40):
            for causal in (False, True):
                q, k, v = torch.randn(2, T, 4), torch.randn(2, S, 4), torch.randn(2, S, 4)
                w = torch.randn(T, S)
                for impl in impls:
                    options = {"causal": causal, "impl": impl}
                    assert aft_full(q, k, v, w, **options).shape == q.shape
                    assert aft_simple(q, k, v, **options).shape == q.shape
                    assert aft_local(q, k, v, w, 3, **options).shape == q.shape
                    assert aft_conv(q, k[..., :2], v, torch.randn(2, 3), **options).shape == q.shape
