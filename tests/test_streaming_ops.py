"""The streaming operations and layers: however a sequence is cut, the pieces are the whole."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load, save
from torch.utils import _pytree

from aft import AFTConv1d, AFTConv2d, AFTFull, AFTLocal, AFTSimple
from aft.ops import (
    AFTState,
    aft_conv_step,
    aft_full_step,
    aft_local,
    aft_local_step,
    aft_simple,
    aft_simple_step,
    combine,
)
from operations import (
    conv,
    conv_grid,
    full,
    full_low_rank,
    gradients,
    in_pieces,
    local,
    local_low_rank,
    relative_error,
    simple,
)

T = 64
OPERATIONS = [
    full(),
    full(by_sequence=True),
    full_low_rank(),
    simple(),
    local(1),
    local(5),
    local(5, by_sequence=True),
    local(70),
    local_low_rank(6),
    conv(1),
    conv(4),
    conv(90),
    conv(5, heads=1),
    conv_grid((8, 8), (3, 3)),
    conv_grid((8, 8), (4, 5)),
    conv_grid((16, 4), (5, 9)),
    conv_grid((64, 1), (3, 2)),
]
ONE_OF_EACH = [
    full(),
    full_low_rank(),
    simple(),
    local(5),
    local_low_rank(6),
    conv(4),
    conv_grid((8, 8), (3, 3)),
]
CONSTANT = [op for op in ONE_OF_EACH if not op.name.startswith("full")]
CUTS = {
    "1 + 63": [1, 63],
    "63 + 1": [63, 1],
    "16 x 4": [4] * 16,
    "tokens": [1] * 64,
    "irregular": [5, 1, 1, 30, 0, 2, 9, 16],
    "rows of a grid, and not": [8, 3, 5, 1, 7, 0, 24, 16],
}
IRREGULAR = CUTS["irregular"]
SCALES = [1.0, 10.0, 100.0, 1e4]
each_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=str)
one_of_each = pytest.mark.parametrize("operation", ONE_OF_EACH, ids=str)
each_impl = pytest.mark.parametrize("impl", ["auto", "reference"])


def _double(tensors):
    return tuple(x.double() for x in tensors)


def _pieces(operation, sizes):
    """The operation in pieces, as a function of its inputs."""
    return lambda *inputs, **options: in_pieces(operation, inputs, sizes, **options)[0]


def _check_gradients(grads, wanted, tolerance=1e-5, floor_scale=1e-3):
    """A gradient that vanishes beside the others (a saturated softmax's) is held to their size instead."""
    floor = floor_scale * max(g.double().norm().item() for g in wanted)
    for grad, wanted_grad in zip(grads, wanted, strict=True):
        assert relative_error(grad, wanted_grad, floor) < tolerance


def _check_pieces(operation, inputs, sizes, impl="auto", upstream=None, floor_scale=1e-3, **options):
    """Outputs and all gradients of the pieces against the specification of the whole, in float64."""
    upstream = torch.randn_like(inputs[0]) if upstream is None else upstream
    wanted, wanted_grads = gradients(
        operation, _double(inputs), upstream.double(), causal=True, impl="reference", **options
    )
    y, grads = gradients(_pieces(operation, sizes), inputs, upstream, impl=impl, **options)
    assert y.dtype == inputs[2].dtype
    assert relative_error(y, wanted) < 1e-5
    _check_gradients(grads, wanted_grads, floor_scale=floor_scale)


def _check_states(state, wanted, tolerance=1e-6):
    """Equal states, whatever the sums are relative to and how many empty slots lie before growing keys."""
    assert torch.equal(state.length, wanted.length)
    slots = min(state.keys.shape[1], wanted.keys.shape[1])
    for name, empty in (("keys", -torch.inf), ("values", 0.0)):
        a, b = getattr(state, name), getattr(wanted, name)
        assert torch.equal(a[:, a.shape[1] - slots :], b[:, b.shape[1] - slots :])
        assert all((x[:, : x.shape[1] - slots] == empty).all() for x in (a, b))
    assert torch.equal(torch.isneginf(state.max), torch.isneginf(wanted.max))
    shift = torch.exp(state.max - wanted.max).nan_to_num(1.0)
    assert relative_error(state.den * shift, wanted.den) < tolerance
    assert relative_error(state.num * shift[..., None], wanted.num) < tolerance


# However a sequence is cut


@pytest.mark.parametrize("sizes", CUTS.values(), ids=CUTS)
@each_impl
@each_operation
def test_any_cut_equals_the_whole(operation, impl, sizes):
    _check_pieces(operation, operation.inputs(T=T), sizes, impl)


@each_operation
def test_random_cuts_equal_the_whole(operation):
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        ends = torch.randint(0, T + 1, (8,), generator=generator).sort().values.tolist()
        sizes = [b - a for a, b in zip([0, *ends], [*ends, T], strict=True)]
        _check_pieces(operation, operation.inputs(T=T, D=2, seed=seed), sizes)


@each_operation
def test_the_state_does_not_depend_on_the_cut(operation):
    inputs = operation.inputs(T=T)
    _, k, v, *_ = inputs
    state = in_pieces(operation, inputs, [T])[1]
    for sizes in CUTS.values():
        _check_states(in_pieces(operation, inputs, sizes)[1], state)
    assert state.length.tolist() == [T, T]
    assert state.num.dtype == state.den.dtype == state.max.dtype == torch.float64
    recent = state.keys.shape[1]
    seen = min(recent, T)
    assert torch.equal(state.keys[:, recent - seen :], k[:, T - seen :])
    assert torch.equal(state.values[:, recent - seen :], v[:, T - seen :])
    if not state.grows:
        old = k[:, : T - seen].double()
        assert relative_error(state.den * torch.exp(state.max), torch.exp(old).sum(1)) < 1e-6


@each_operation
def test_scales_of_keys_and_biases(operation):
    for key_scale in SCALES:
        for bias_scale in SCALES:
            inputs = operation.inputs(B=1, T=T, D=2, key_scale=key_scale, bias_scale=bias_scale)
            # Joined sums carry float32's rounding into a bias's gradient, which factors of 100 multiply.
            _check_pieces(operation, inputs, IRREGULAR, floor_scale=1e-2)


@each_operation
def test_one_key_far_above_the_rest(operation):
    for position in (0, 6, 20, 63):
        inputs = operation.inputs(T=T, D=2)
        inputs[1][:, position] += 200.0
        _check_pieces(operation, inputs, IRREGULAR)


@each_operation
def test_keys_far_below_zero(operation):
    """Nothing old yet, and every weight below what float64 can hold."""
    q, k, v, *bias = operation.inputs(T=T, D=2)
    k = (k * 8).round() / 8 - 65536.0
    _check_pieces(operation, (q, k, v, *bias), IRREGULAR)


@each_operation
def test_every_element_of_positive_values(operation):
    for scale in SCALES:
        q, k, v, *bias = operation.inputs(T=T, D=2, key_scale=scale, bias_scale=scale)
        inputs = (q, k, v.abs() + 0.1, *bias)
        wanted = operation(*_double(inputs), causal=True, impl="reference")
        y = in_pieces(operation, inputs, IRREGULAR)[0]
        assert ((y - wanted).abs() / wanted.abs()).max() < 1e-5


@each_operation
def test_float64(operation):
    inputs = operation.inputs(T=T, D=2, dtype=torch.float64)
    upstream = torch.randn_like(inputs[0])
    wanted, wanted_grads = gradients(operation, inputs, upstream, causal=True, impl="reference")
    y, grads = gradients(_pieces(operation, IRREGULAR), inputs, upstream)
    assert relative_error(y, wanted) < 1e-13
    _check_gradients(grads, wanted_grads, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_operation
def test_half_precision_rounds_only_the_result(operation, dtype):
    inputs = operation.inputs(T=T, dtype=dtype)
    y, state = in_pieces(operation, inputs, IRREGULAR)
    wanted, wide = in_pieces(operation, tuple(x.float() for x in inputs), IRREGULAR)
    assert y.dtype == state.keys.dtype == state.values.dtype == dtype
    assert torch.equal(y, wanted.to(dtype))
    assert all(torch.equal(a, b) for a, b in zip(state[:3], wide[:3], strict=True))


@each_operation
def test_a_result_does_not_depend_on_later_pieces_or_other_rows(operation):
    inputs = operation.inputs(B=3, T=T, key_scale=10.0)
    q, k, v, *bias = inputs
    y = in_pieces(operation, inputs, IRREGULAR)[0]
    k2, v2 = k.clone(), v.clone()
    k2[:, 40:] += 500.0
    k2[0] += 300.0
    v2[0] *= -7.0
    other = in_pieces(operation, (q, k2, v2, *bias), IRREGULAR)[0]
    assert torch.equal(other[1:, :39], y[1:, :39])


@each_impl
def test_the_gate_is_the_one_asked_for(impl):
    q, k, v = simple().inputs(T=T)
    for gate in (None, torch.tanh):
        wanted = aft_simple(q, k, v, causal=True, query_gate=gate)
        y = in_pieces(simple(), (q, k, v), IRREGULAR, query_gate=gate, impl=impl)[0]
        assert relative_error(y, wanted) < 1e-6


# Extremes: finite in, finite out


@pytest.mark.parametrize("size", [1e4, 1e20, 3e38])
@each_operation
def test_finite_in_finite_out(operation, size):
    inputs = operation.inputs(T=T, D=2)
    sign = [torch.sign(x) for x in inputs]
    inputs = (inputs[0] * 50, sign[1] * size, inputs[2], *(s * min(size, 1e19) for s in sign[3:]))
    y, grads = gradients(_pieces(operation, IRREGULAR), inputs, torch.randn_like(inputs[0]))
    assert y.isfinite().all()
    assert y.abs().max() <= inputs[2].abs().max()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("sizes", [IRREGULAR, [1] * T], ids=["irregular", "tokens"])
@pytest.mark.parametrize("size", [1e38, -1e38, 3e38])
@one_of_each
def test_equal_keys_of_any_size_leave_the_choice_to_the_bias(operation, size, sizes):
    q, k, v, *bias = operation.inputs(T=T, D=2)
    wanted = operation(*_double((q, k * 0, v, *bias)), causal=True, impl="reference")
    assert relative_error(in_pieces(operation, (q, k * 0 + size, v, *bias), sizes)[0], wanted) < 1e-5


@pytest.mark.parametrize("sizes", [IRREGULAR, [1] * T], ids=["irregular", "tokens"])
@pytest.mark.parametrize("operation", [full(), full(by_sequence=True), local(5), local(70)], ids=str)
def test_a_huge_bias_on_an_absent_key_hides_nothing(operation, sizes):
    for size in (1e38, -1e38):
        q, k, v, w = operation.inputs(T=T, D=2)
        k[:, 10], k[:, 33, 0] = -torch.inf, -torch.inf
        w[..., 10], w[..., 33] = size, size
        _check_pieces(operation, (q, k, v, w), sizes)


@pytest.mark.parametrize("sizes", [IRREGULAR, [1] * T], ids=["irregular", "tokens"])
@pytest.mark.parametrize("operation", [full(), full(by_sequence=True), local(5), local(70)], ids=str)
def test_a_bias_of_minus_infinity_hides_the_key(operation, sizes):
    for scale in (1.0, 100.0):
        q, k, v, w = operation.inputs(T=T, D=2, key_scale=scale, bias_scale=scale)
        w = w.masked_fill(torch.rand(w.shape) < 0.4, -torch.inf)
        w[..., :7, :] = -torch.inf  # queries that see nothing
        _check_pieces(operation, (q, k, v, w), sizes)


@pytest.mark.parametrize("size", [1e10, 1e28, 1e38, 1e-15, 1e-30, 1e-37])
@one_of_each
def test_values_of_any_size(operation, size):
    q, k, v, *bias = operation.inputs(T=T, D=2, key_scale=3.0)
    inputs = q, k, (v.abs().clamp(max=3.0) + 0.1) * size, *bias
    _check_pieces(operation, inputs, IRREGULAR, upstream=torch.randn_like(q) * 1e-2)


@one_of_each
def test_values_up_to_the_largest_float(operation):
    q, k, v, *bias = operation.inputs(T=T)
    v = torch.sign(v) * torch.finfo(torch.float32).max
    _check_pieces(operation, (q, k, v, *bias), IRREGULAR, upstream=torch.full_like(q, 1e-3))


@pytest.mark.parametrize("sizes", [IRREGULAR, [1] * T], ids=["irregular", "tokens"])
@pytest.mark.parametrize("operation", [full(), full(by_sequence=True), local(70)], ids=str)
def test_a_hidden_key_of_any_size_hides_nothing(operation, sizes):
    """A bias of -inf takes a key of 1e38 away, and the digits of the others stay."""
    q, k, v, w = operation.inputs(T=T, D=2)
    k[:, 10], w[..., 10] = 1e38, -torch.inf
    _check_pieces(operation, (q, k, v, w), sizes)


# Absent keys


@each_impl
@each_operation
def test_a_padding_mask_inside_the_pieces(operation, impl):
    for scale in (1.0, 100.0):
        inputs = operation.inputs(T=T, key_scale=scale, bias_scale=scale)
        padding = torch.rand(2, T) < 0.3
        padding[0, :7] = True
        padding[1, 7:39] = True  # a whole piece and more
        _check_pieces(operation, inputs, IRREGULAR, impl, key_padding_mask=padding)


@each_impl
@each_operation
def test_nan_behind_a_padding_mask_reaches_nothing(operation, impl):
    q, k, v, *bias = operation.inputs(T=T)
    padding = torch.rand(2, T) < 0.4
    padding[0] = True
    poison = padding[..., None]
    options = {"impl": impl, "key_padding_mask": padding}
    call, upstream = _pieces(operation, IRREGULAR), torch.randn_like(q)
    y, grads = gradients(call, (q, k, v, *bias), upstream, **options)
    poisoned = (q, k.masked_fill(poison, torch.nan), v.masked_fill(poison, torch.nan), *bias)
    y_poisoned, grads_poisoned = gradients(call, poisoned, upstream, **options)
    assert (y[0] == 0).all()
    assert torch.equal(y, y_poisoned)
    for grad, other in zip(grads, grads_poisoned, strict=True):
        assert torch.equal(grad, other)


@each_impl
@each_operation
def test_absent_keys_have_no_weight_and_no_gradient(operation, impl):
    q, k, v, *bias = operation.inputs(T=T)
    absent = torch.rand(k.shape) < 0.3
    k = k.masked_fill(absent, -torch.inf)
    _check_pieces(operation, (q, k, v, *bias), IRREGULAR, impl)
    absent_values = absent.repeat_interleave(v.shape[2] // k.shape[2], 2)
    v = v.masked_fill(absent_values, torch.nan)
    _, grads = gradients(_pieces(operation, IRREGULAR), (q, k, v, *bias), torch.randn_like(q), impl=impl)
    assert (grads[1][absent] == 0).all()
    assert (grads[2][absent_values] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)


# Sequences of different lengths

RAGGED = [[7, 3, 0], [1, 0, 1], [5, 0, 2], [0, 0, 0], [30, 16, 2], [1, 1, 1], [20, 20, 19], [0, 1, 0]]


def _ragged(operation, inputs, filling, impl="auto"):
    """The operation over pieces of `RAGGED` lengths; where a row has nothing more, ``filling`` follows."""
    q, k, v, *bias = inputs
    B = q.shape[0]
    done, state, outputs = [0] * B, None, [[] for _ in range(B)]
    for lengths in RAGGED:
        n = max(*lengths, 1) + (len(outputs[0]) % 2)

        def piece(x, lengths=lengths, n=n):
            rows = []
            for row, length in enumerate(lengths):
                new = x[row, done[row] : done[row] + length]
                rows.append(torch.cat([new, x.new_full((n - length, x.shape[2]), filling)]))
            return torch.stack(rows)

        y, state = operation.step(
            piece(q), piece(k), piece(v), *bias, state=state, lengths=torch.tensor(lengths), impl=impl
        )
        for row, length in enumerate(lengths):
            outputs[row].append(y[row, :length])
            done[row] += length
    return [torch.cat(rows) for rows in outputs], state


@pytest.mark.parametrize("filling", [0.0, 50.0, torch.nan])
@each_impl
@each_operation
def test_each_ragged_row_is_the_row_alone(operation, impl, filling):
    """The longest ends with the bias, and its padding lies beyond."""
    inputs = operation.inputs(B=3, T=T)
    upstream = torch.randn_like(inputs[0])
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    outputs, state = _ragged(operation, leaves, filling, impl)
    done = [len(y) for y in outputs]
    assert state.length.tolist() == done == [64, 41, 25]
    grads = torch.autograd.grad(
        sum((y * upstream[row, : len(y)]).sum() for row, y in enumerate(outputs)), leaves
    )
    for row, length in enumerate(done):
        upstream[row, length:] = 0.0
    wanted, wanted_grads = gradients(
        operation, _double(inputs), upstream.double(), causal=True, impl="reference"
    )
    for row, y in enumerate(outputs):
        assert relative_error(y, wanted[row, : len(y)]) < 1e-5
    _check_gradients(grads, wanted_grads)
    for row, length in enumerate(done):
        alone = [x[row : row + 1, :length] for x in inputs[:3]]
        bias = inputs[3:]
        if "each" in operation.name:
            bias = [bias[0][row : row + 1]]
        alone = operation.step(*alone, *bias)[1]
        _check_states(state.select(torch.tensor([row])), alone)


@each_operation
def test_rows_at_different_places_without_padding(operation):
    """After a ragged start all rows get as many positions."""
    q, k, v, *bias = inputs = operation.inputs(B=3, T=T)
    wanted = operation(*inputs, causal=True, impl="reference")
    lengths = torch.tensor([20, 3, 0])
    _, state = operation.step(q[:, :20], k[:, :20], v[:, :20], *bias, lengths=lengths)
    for n in (1, 6, 1, 9):
        rows = torch.arange(3)[:, None], lengths[:, None] + torch.arange(n)
        y, state = operation.step(q[rows], k[rows], v[rows], *bias, state=state)
        assert relative_error(y, wanted[rows]) < 1e-5
        lengths = lengths + n


@each_operation
def test_a_ragged_start_longer_than_the_bias(operation):
    """Padding takes no position, so that it may lie beyond the last."""
    q, k, v, *bias = inputs = operation.inputs(T=T)
    wanted, state = in_pieces(operation, inputs, [T])
    more = [torch.cat([x, torch.ones_like(x)], 1) for x in (q, k, v)]
    y, longer = operation.step(*more, *bias, lengths=torch.tensor([T, T]))
    assert relative_error(y[:, :T], wanted) < 1e-6
    _check_states(longer, state)


def test_ragged_lengths_and_a_padding_mask():
    for operation in OPERATIONS:
        q, k, v, *bias = inputs = operation.inputs(T=T)
        mask = torch.rand(2, T) < 0.3
        wanted = operation(*inputs, causal=True, key_padding_mask=mask)
        y, state = operation.step(
            q[:, :9], k[:, :9], v[:, :9], *bias, key_padding_mask=mask[:, :9], lengths=torch.tensor([9, 4])
        )
        rows = torch.arange(2)[:, None], torch.tensor([[9], [4]]) + torch.arange(12)
        y2, _ = operation.step(q[rows], k[rows], v[rows], *bias, state=state, key_padding_mask=mask[rows])
        assert relative_error(y[1, :4], wanted[1, :4]) < 1e-6
        assert relative_error(y2, wanted[rows]) < 1e-5


# Degenerate sizes


@each_impl
@each_operation
def test_pieces_and_batches_of_nothing(operation, impl):
    inputs = operation.inputs(B=2, T=T)
    q, k, v, *bias = inputs
    y, state = operation.step(q[:, :0], k[:, :0], v[:, :0], *bias, impl=impl)
    assert y.shape == (2, 0, 4)
    assert state.length.tolist() == [0, 0]
    _, later = operation.step(q, k, v, *bias, state=state, impl=impl)
    _check_states(later, in_pieces(operation, inputs, [T])[1])
    y, same = operation.step(q[:, :0], k[:, :0], v[:, :0], *bias, state=later, impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(same, later, strict=True))

    none = operation.inputs(B=0, T=T)
    y, state = in_pieces(operation, none, IRREGULAR, impl=impl, lengths=None)
    assert y.shape == (0, T, 4)
    assert state.length.shape == (0,)


@each_impl
@pytest.mark.parametrize("operation", [full(), full_low_rank(), simple(), local(5)], ids=str)
def test_no_channels(operation, impl):
    inputs = operation.inputs(T=T, D=0)
    y, state = in_pieces(operation, inputs, IRREGULAR, impl=impl)
    assert y.shape == (2, T, 0)
    assert state.length.tolist() == [T, T]


@each_impl
def test_heads_without_values(impl):
    q, v, k = torch.ones(2, 6, 0), torch.ones(2, 6, 0), torch.ones(2, 6, 2)
    y, state = in_pieces(conv(4), (q, k, v, torch.ones(2, 4)), [1, 3, 2], impl=impl)
    assert y.shape == (2, 6, 0)
    assert state.den.shape == (2, 2)


# Very long sequences


def _exact(v, rise, kernel):
    """y_t for keys ``rise * t``, values [T], and a bias for the last K distances (the query itself last)."""
    K = len(kernel)
    num = den = 0.0
    nums, dens = [0.0] * K, [0.0] * K
    decay = float(torch.exp(torch.tensor(-rise, dtype=torch.float64)))
    for value in v.tolist()[: len(v) - K]:
        num, den = num * decay + value, den * decay + 1.0
        nums.append(num)
        dens.append(den)
    far = torch.tensor([nums, dens], dtype=torch.float64) * decay**K
    for back in range(K):
        weight = torch.exp(kernel[K - 1 - back].double() - rise * back)
        far[0, back:] += weight * v[: len(v) - back]
        far[1, back:] += weight
    return far[0] / far[1]


LONG = 65_536
LONG_KERNEL = torch.tensor([0.5, -1.0, 2.0, 0.1])


def _long(kind, dtype=torch.float32):
    """A step over positions of a long sequence, [1, n, 1] keys and values; and its bias by distance."""

    def constant(bias):
        return torch.full((LONG, 1), bias, dtype=dtype), torch.ones(LONG, 1, dtype=dtype)

    steps = {
        "simple": (lambda k, v, state: aft_simple_step(k, k, v, state, query_gate=None), torch.zeros(1)),
        "local": (
            lambda k, v, state: aft_local_step(k, k, v, constant(0.75), 3, state, query_gate=None),
            torch.full((3,), 0.75),
        ),
        "conv": (
            lambda k, v, state: aft_conv_step(k, k, v, LONG_KERNEL[None].to(dtype), state, query_gate=None),
            LONG_KERNEL,
        ),
    }
    return steps[kind]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["simple", "local", "conv"])
@pytest.mark.parametrize("rise", [0.0, 1e-4, 1.0, -1e-4])
def test_65536_tokens_neither_stall_nor_drift(kind, rise, dtype):
    if dtype == torch.bfloat16 and rise:
        return  # its keys would not be the same
    step, kernel = _long(kind, dtype)
    generator = torch.Generator().manual_seed(0)
    v = torch.randint(1, 3, (LONG,), generator=generator).double()
    k = torch.arange(LONG).double() * rise
    k_given, v_given = k.to(dtype)[None, :, None], v.to(dtype)[None, :, None]
    sizes = [1] * 200 + [4096, 3, 1000] * 12 + [1] * 200
    sizes.append(LONG - sum(sizes))
    state, start, outputs = None, 0, []
    with torch.no_grad():
        for size in sizes:
            y, state = step(k_given[:, start : start + size], v_given[:, start : start + size], state)
            outputs.append(y[0, :, 0])
            start += size
    wanted = _exact(v, rise, kernel)
    error = ((torch.cat(outputs).double() - wanted) / wanted).abs()
    # Keys of 1e-4 t are rounded to float32's digits before the operation sees them.
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-8
    assert error.max() < tolerance
    assert state.length.tolist() == [LONG]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["simple", "local", "conv"])
@pytest.mark.parametrize("rise", [0.0, 1.0])
def test_65536_single_tokens(kind, rise):
    step, kernel = _long(kind)
    v = torch.randint(1, 3, (LONG,)).double()
    state, outputs = None, []
    with torch.no_grad():
        for t in range(LONG):
            k = torch.full((1, 1, 1), t * rise)
            y, state = step(k, v[t].float().view(1, 1, 1), state)
            outputs.append(y.view(1))
    wanted = _exact(v, rise, kernel)
    assert ((torch.cat(outputs).double() - wanted) / wanted).abs().max() < 1e-5


_FLAT = """
import gc, sys, torch
from aft.ops import aft_conv_step, aft_local_step, aft_simple_step
torch.set_num_threads(1)
name, D = sys.argv[1], 512
x, bias = torch.randn(1, 1, D), torch.randn(8192, 1)
step = {
    "simple": lambda s: aft_simple_step(x, x, x, s),
    "local": lambda s: aft_local_step(x, x, x, (bias, bias), 8, s),
    "conv": lambda s: aft_conv_step(x, x[..., :8], x, bias[:64].view(8, 8), s),
}[name]
def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096
state = None
with torch.no_grad():
    for t in range(5500):
        state = step(state)[1]
        if t == 500:
            before, size = resident(), state.nbytes
assert state.nbytes == size and int(state.length) == 5500
print((resident() - before) / size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["simple", "local", "conv"])
def test_5000_steps_keep_memory_flat(name):
    """Growth in units of the state, of which each step made a new one."""
    out = subprocess.run([sys.executable, "-c", _FLAT, name], capture_output=True, text=True, check=True)
    assert float(out.stdout) < 100


@pytest.mark.parametrize("operation", CONSTANT, ids=str)
def test_a_state_holds_no_more_than_it_says(operation):
    """No view of a piece's keys: that would keep the piece."""
    q, k, v, *bias = operation.inputs(T=T)
    first = operation.step(q[:, :40], k[:, :40], v[:, :40], *bias)[1]
    ragged = operation.step(q[:, :40], k[:, :40], v[:, :40], *bias, lengths=torch.tensor([40, 17]))[1]
    token = operation.step(q[:, 40:41], k[:, 40:41], v[:, 40:41], *bias, state=first)[1]
    for state in (first, ragged, token, combine(first, first), first.select(torch.tensor([1]))):
        assert all(x.is_contiguous() for x in state)
        assert sum(x.untyped_storage().nbytes() for x in state) == state.nbytes


# The state as a value


def _start(operation, n=20, B=2, D=4, dtype=torch.float32, **options):
    """Inputs, and the state after n positions."""
    inputs = operation.inputs(B=B, T=T, D=D, dtype=dtype, **options)
    q, k, v, *bias = inputs
    return inputs, operation.step(q[:, :n], k[:, :n], v[:, :n], *bias)[1]


def _rest(operation, inputs, state, start=20, sizes=(1, 3, 40), **options):
    q, k, v, *bias = inputs
    return in_pieces(operation, (q[:, start:], k[:, start:], v[:, start:], *bias), sizes, state, **options)


@each_impl
@each_operation
def test_gradients_to_the_initial_state(operation, impl):
    """They do not depend on the cut, and a shift of what the sums are relative to goes to both."""
    inputs, state = _start(operation, dtype=torch.float64)
    upstream = torch.randn_like(inputs[0][:, 20:])
    found = []
    for sizes in ([44], [1] * 44, [3, 41], [40, 4], [0, 1, 2, 20, 21]):
        fields = [x.clone().requires_grad_() for x in state[:5]]
        y, _ = _rest(operation, inputs, AFTState(*fields, state.length), sizes=sizes, impl=impl)
        found.append(torch.autograd.grad((y * upstream).sum(), fields, materialize_grads=True))
    for grads in found[1:]:
        for grad, wanted in zip(grads, found[0], strict=True):
            assert torch.allclose(grad, wanted, rtol=1e-9, atol=1e-12)
    if state.max.isfinite().any():
        num, den, top = found[0][:3]
        assert torch.allclose(top, den * state.den + (num * state.num).sum(-1), rtol=1e-9, atol=1e-12)
        assert (num != 0).any()


@each_impl
@one_of_each
def test_gradcheck_through_the_state(operation, impl):
    inputs, state = _start(operation, B=1, D=2, dtype=torch.float64)
    fields = [x.clone().requires_grad_(x.numel() > 0) for x in state[:5]]

    def later(num, den, top, keys, values, k):
        state_in = AFTState(num, den, top, keys, values, state.length)
        here = (inputs[0][:, :32], k[:, :32], inputs[2][:, :32], *inputs[3:])
        return _rest(operation, here, state_in, sizes=[1, 4, 1, 6], impl=impl)[0]

    torch.autograd.gradcheck(later, (*fields, inputs[1].requires_grad_()), fast_mode=True)


@each_operation
def test_truncated_backpropagation(operation):
    """Detached, a state hands on its past and no gradient."""
    inputs = operation.inputs(T=T)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    state, outputs = None, []
    for start in range(0, T, 16):
        q, k, v = (x[:, start : start + 16] for x in leaves)
        y, state = operation.step(q, k, v, *inputs[3:], state=state)
        state = state.detach()
        assert not any(x.requires_grad for x in state)
        outputs.append(y)
    grads = torch.autograd.grad(outputs[2].sum(), leaves, allow_unused=True)
    for grad in grads:
        assert (grad[:, 32:48] != 0).any()
        assert (grad[:, :32] == 0).all()
        assert (grad[:, 48:] == 0).all()
    assert relative_error(torch.cat(outputs, 1), operation(*inputs, causal=True)) < 1e-5


@each_operation
def test_rows_of_a_state_are_picked_and_repeated(operation):
    inputs, state = _start(operation, B=3)
    order = torch.tensor([2, 0, 0, 1])
    wanted, _ = _rest(operation, inputs, state)
    picked = [x[order] for x in inputs[:3]]
    bias = [b[order] if "each" in operation.name else b for b in inputs[3:]]
    y, _ = _rest(operation, (*picked, *bias), state.select(order))
    assert relative_error(y, wanted[order]) < 1e-6


@each_operation
def test_a_state_survives_a_file(operation, tmp_path):
    inputs, state = _start(operation)
    wanted, _ = _rest(operation, inputs, state)
    torch.save(state._asdict(), tmp_path / "state.pt")
    for restored in (
        AFTState(**load(save(state._asdict()))),
        AFTState(**torch.load(tmp_path / "state.pt", weights_only=True)),
    ):
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(restored, state, strict=True))
        assert torch.equal(_rest(operation, inputs, restored)[0], wanted)


def test_states_of_transposed_and_ragged_inputs_go_into_a_file():
    for operation in ONE_OF_EACH:
        q, k, v, *bias = operation.inputs(T=T)
        q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
        for n in (1, 3, 4, 5, 40):
            for lengths in (None, torch.tensor([n, 0])):
                _, state = operation.step(q[:, :n], k[:, :n], v[:, :n], *bias, lengths=lengths)
                save(state._asdict())
                save(combine(state, state)._asdict())


def test_a_state_is_a_pytree_and_moves():
    _, state = _start(local(5))
    doubled = _pytree.tree_map(lambda x: x + x, state)
    assert isinstance(doubled, AFTState)
    assert torch.equal(doubled.keys, state.keys * 2)
    meta = state.to("meta")
    assert all(x.device.type == "meta" and x.dtype == y.dtype for x, y in zip(meta, state, strict=True))
    assert meta.nbytes == state.nbytes
    assert all(torch.equal(a, b) for a, b in zip(state.to("cpu"), state, strict=True))


@each_operation
def test_a_step_changes_no_state_that_it_is_given(operation):
    inputs, state = _start(operation)
    before = [x.clone() for x in state]
    for sizes in ([1] * 44, [44], [3, 41]):
        _rest(operation, inputs, state, sizes=sizes)
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))


@pytest.mark.parametrize("operation", [simple(), conv(4), local(5), full_low_rank()], ids=str)
def test_functional_gradients(operation):
    inputs, state = _start(operation, dtype=torch.float64)

    def loss(keys, values, k):
        replaced = state._replace(keys=keys, values=values)
        here = (inputs[0], k, *inputs[2:])
        return _rest(operation, here, replaced)[0].square().sum()

    arguments = (state.keys, state.values, inputs[1])
    grads = torch.func.grad(loss, (0, 1, 2))(*arguments)
    leaves = [x.clone().requires_grad_() for x in arguments]
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    for grad, wanted_grad in zip(grads, wanted, strict=True):
        assert torch.allclose(grad, wanted_grad)


@pytest.mark.parametrize("operation", [simple(), conv(4)], ids=str)
def test_states_under_vmap(operation):
    q, k, v, *bias = operation.inputs(B=6, T=T)
    wanted = operation(q, k, v, *bias, causal=True)

    def both(q, k, v):
        y, state = operation.step(q[:, :20], k[:, :20], v[:, :20], *bias)
        z, state = operation.step(q[:, 20:60], k[:, 20:60], v[:, 20:60], *bias, state=state)
        last, state = operation.step(q[:, 60:61], k[:, 60:61], v[:, 60:61], *bias, state=state)
        return torch.cat([y, z, last], 1), state

    y, state = torch.func.vmap(both)(*(x.unflatten(0, (3, 2)) for x in (q, k, v)))
    assert isinstance(state, AFTState)
    assert relative_error(y.flatten(0, 1), wanted[:, :61]) < 1e-6


# Neighbouring pieces


@each_operation
def test_states_of_neighbours_combine_to_that_of_the_whole(operation):
    q, k, v, *bias = inputs = operation.inputs(T=T, key_scale=5.0)

    def state(start, stop):
        """The state of a piece on its own: no state depends on the bias."""
        x = [y[:, start:stop] for y in (q, k, v)]
        return operation.step(*x, *bias)[1]

    whole = state(0, T)
    empty = state(0, 0)
    for a, b in ((0, 0), (1, 2), (3, 30), (3, 5), (30, 31), (60, 62), (64, 64), (10, 54)):
        first, second, third = state(0, a), state(a, b), state(b, T)
        left, right = combine(combine(first, second), third), combine(first, combine(second, third))
        _check_states(left, whole)
        _check_states(right, whole)
        _check_states(left, right)
        _check_states(combine(empty, second), second)
        _check_states(combine(second, empty), second)
    # The combined state is one to go on from.
    wanted = operation(*inputs, causal=True)
    y, _ = _rest(operation, inputs, combine(state(0, 3), state(3, 20)))
    assert relative_error(y, wanted[:, 20:]) < 1e-5


@each_operation
def test_ragged_states_combine(operation):
    q, k, v, *bias = operation.inputs(B=3, T=T)
    lengths = torch.tensor([[10, 2, 0], [3, 12, 5], [0, 1, 20]])

    def state(row, ends):
        y = [x[:, row * 20 : row * 20 + 20] for x in (q, k, v)]
        return operation.step(*y, *bias, lengths=ends)[1]

    states = [state(row, ends) for row, ends in enumerate(lengths)]
    left = combine(combine(states[0], states[1]), states[2])
    _check_states(left, combine(states[0], combine(states[1], states[2])))
    for row in range(3):
        at = torch.cat([torch.arange(20 * i, 20 * i + int(lengths[i, row])) for i in range(3)])
        alone = [x[row : row + 1, at] for x in (q, k, v)]
        b = [bias[0][row : row + 1]] if "each" in operation.name else bias
        _check_states(left.select(torch.tensor([row])), operation.step(*alone, *b)[1])


@each_operation
def test_gradients_flow_through_combine(operation):
    inputs = operation.inputs(T=T)
    upstream = torch.randn(2, 44, 4)
    upstream = torch.cat([torch.zeros(2, 20, 4), upstream], 1)

    def joined(q, k, v, *bias, **_):
        pieces = [
            operation.step(*(x[:, a:b] for x in (q, k, v)), *bias)[1] for a, b in ((0, 3), (3, 18), (18, 20))
        ]
        state = combine(pieces[0], combine(pieces[1], pieces[2]))
        y, _ = _rest(operation, (q, k, v, *bias), state)
        return torch.cat([torch.zeros(2, 20, 4), y], 1)

    wanted = gradients(operation, _double(inputs), upstream.double(), causal=True, impl="reference")[1]
    _check_gradients(gradients(joined, inputs, upstream)[1], wanted)


def test_states_of_different_operations_do_not_combine():
    states = [_start(op)[1] for op in (simple(), local(5), local(7), conv(5), full())]
    states.append(_start(simple(), D=3)[1])
    for i, first in enumerate(states):
        for j, second in enumerate(states):
            if i != j:
                with pytest.raises(
                    ValueError, match="combine: both states must be of one operation, got num"
                ):
                    combine(first, second)


# Refusals


def test_a_state_of_something_else_is_refused_by_name():
    x = torch.randn(2, 3, 4)
    w = torch.randn(T, T)
    calls = {
        "aft_simple_step": lambda state: aft_simple_step(x, x, x, state),
        "aft_local_step": lambda state: aft_local_step(x, x, x, w, 5, state),
        "aft_conv_step": lambda state: aft_conv_step(x, x[..., :2], x, w[:2, :6], state),
        "aft_full_step": lambda state: aft_full_step(x, x, x, w, state),
    }
    states = {name: call(None)[1] for name, call in calls.items()}
    for name, call in calls.items():
        for other, state in states.items():
            if other == name:
                call(state)
                continue
            with pytest.raises(ValueError, match=rf"{name}: state\.\w+ must be"):
                call(state)
        mine = states[name]
        for wrong in (mine.to("meta"), mine.select(torch.tensor([0]))):
            with pytest.raises(ValueError, match=rf"{name}: state\.\w+ must be .* on cpu, got"):
                call(wrong)
        with pytest.raises(TypeError, match=f"{name}: state must be an AFTState or None, got tuple"):
            call(tuple(mine))
        for field in ("num", "den", "max", "length"):
            other = mine._replace(**{field: getattr(mine, field).to(torch.float32)})
            with pytest.raises(
                ValueError, match=rf"{name}: state\.{field} must be .* got .* of torch.float32"
            ):
                call(other)
    with pytest.raises(ValueError, match=r"state\.keys must be \(2, 6, 4\)"):
        aft_local_step(x, x, x, w, 7, states["aft_local_step"])


def test_a_sequence_beyond_its_bias_is_refused():
    for operation in (full(), full(by_sequence=True), full_low_rank(), local(5), local_low_rank(6)):
        inputs = operation.inputs(T=T)
        q, k, v, *bias = inputs
        state = in_pieces(operation, inputs, [T])[1]
        for n in (1, 5):
            with pytest.raises(ValueError, match="the position bias ends at 64 positions, the sequence at 6"):
                operation.step(q[:, :n], k[:, :n], v[:, :n], *bias, state=state)
        with pytest.raises(ValueError, match="the position bias ends at 64 positions, the sequence at 65"):
            operation.step(*(torch.cat([x, x[:, :1]], 1) for x in (q, k, v)), *bias)
        operation.step(q, k, v, *bias, state=state, lengths=torch.tensor([0, 0]))


def test_tensors_on_several_devices_are_refused():
    x, w = torch.randn(2, 3, 4), torch.randn(T, T)
    for call in (
        lambda: aft_simple_step(x, x.to("meta"), x),
        lambda: aft_local_step(x, x, x, w.to("meta"), 3),
        lambda: aft_full_step(x, x, x, (w, w.to("meta"))),
        lambda: aft_conv_step(x, x, x, w[:4].to("meta")),
        lambda: aft_conv_step(x, x, x, w[:4, None].to("meta"), width=3),
        lambda: aft_simple_step(x, x, x, lengths=torch.ones(2, dtype=torch.int64, device="meta")),
    ):
        with pytest.raises(
            ValueError, match=r"_step: all tensors must be on one device, got \['cpu', 'meta'\]"
        ):
            call()


def test_arguments_that_do_not_fit_are_refused():
    x, w = torch.randn(2, 3, 4), torch.randn(T, T)
    with pytest.raises(ValueError, match="aft_simple_step: q and k must have as many positions"):
        aft_simple_step(x[:, :2], x, x)
    with pytest.raises(ValueError, match=r"lengths must be an int64 tensor \[B\] = \(2,\), got torch.int32"):
        aft_simple_step(x, x, x, lengths=torch.tensor([1, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"lengths must be an int64 tensor .* got list"):
        aft_simple_step(x, x, x, lengths=[1, 2])
    for wrong in ([1, 4], [-1, 2]):
        with pytest.raises(ValueError, match="lengths must lie between 0 and n = 3"):
            aft_simple_step(x, x, x, lengths=torch.tensor(wrong))
    with pytest.raises(ValueError, match=r"key_padding_mask must be \[B, n\]"):
        aft_simple_step(x, x, x, key_padding_mask=torch.zeros(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="impl must be one of"):
        aft_simple_step(x, x, x, impl="fast")
    with pytest.raises(ValueError, match="window_size must be at least 1"):
        aft_local_step(x, x, x, w, 0)
    with pytest.raises(TypeError, match="position_bias must be a tensor or a pair"):
        aft_full_step(x, x, x, None)
    with pytest.raises(ValueError, match=r"position_bias must be \[T, S\] or \[B, T, S\]"):
        aft_full_step(x, x, x, w[None].expand(3, T, T))
    k, kernel = x[..., :2], torch.randn(2, 3)
    with pytest.raises(ValueError, match=r"width goes with a kernel \[H, Ky, Kx\]"):
        aft_conv_step(x, k, x, kernel, width=3)
    with pytest.raises(ValueError, match=r"width goes with a kernel \[H, Ky, Kx\]"):
        aft_conv_step(x, k, x, torch.randn(2, 3, 3))
    with pytest.raises(ValueError, match="width must be an int of at least 1"):
        aft_conv_step(x, k, x, torch.randn(2, 3, 3), width=0)
    with pytest.raises(ValueError, match="aft_conv_step"):
        aft_conv_step(x, x, x, torch.randn(2, 3, 3), width=3)
    with pytest.raises(TypeError, match="aft_simple_step: q must be of a floating-point dtype"):
        aft_simple_step(x.long(), x, x)


# Autocast and compilers


@one_of_each
def test_autocast_changes_nothing(operation):
    inputs = operation.inputs(T=T)
    upstream = torch.randn_like(inputs[0])
    call = _pieces(operation, IRREGULAR)
    y, grads = gradients(call, inputs, upstream)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_cast, grads_cast = gradients(call, inputs, upstream)
        state = in_pieces(operation, inputs, IRREGULAR)[1]
    assert state.num.dtype == state.den.dtype == state.max.dtype == torch.float64
    assert torch.equal(y, y_cast)
    for grad, other in zip(grads, grads_cast, strict=True):
        assert torch.equal(grad, other)


@pytest.mark.parametrize(
    "operation", [full(), simple(), local(5), conv(4), conv_grid((8, 8), (3, 3))], ids=str
)
def test_a_token_and_a_start_compile(operation):
    torch._dynamo.reset()
    inputs, state = _start(operation, n=20)
    q, k, v, *bias = inputs

    def step(q, k, v, state=None):
        return operation.step(q, k, v, *bias, state=state)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    start, token = [x[:, :20] for x in (q, k, v)], [x[:, 20:21] for x in (q, k, v)]
    for arguments in ((*start,), (*token, state)):
        y, after = compiled(*arguments)
        wanted, wanted_after = step(*arguments)
        assert relative_error(y, wanted) < 1e-6
        _check_states(after, wanted_after)
    if operation.name == "simple":
        leaf = token[1].clone().requires_grad_()
        grad = torch.autograd.grad(compiled(token[0], leaf, token[2], state)[0].sum(), leaf)[0]
        wanted = torch.autograd.grad(step(token[0], leaf, token[2], state)[0].sum(), leaf)[0]
        assert relative_error(grad, wanted) < 1e-6


# Layers


def _layers(**options):
    D, options = 8, {"causal": True, **options}
    layers = [
        AFTFull(D, T, **options),
        AFTFull(D, T, bias_rank=3, **options),
        AFTSimple(D, **options),
        AFTLocal(D, T, 5, **options),
        AFTLocal(D, T, 5, bias_rank=3, **options),
        AFTConv1d(D, 2, 4, **options),
        AFTConv1d(D, 4, 4, reparameterize=False, **options),
    ]
    if options.get("batch_first", True):
        layers.append(AFTConv2d(D, 2, 3, **options))
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if "position" in name or "kernel" in name:
                torch.nn.init.normal_(parameter)
    return layers


def _layer_in_pieces(layer, x, sizes, **options):
    """Outputs [B, T, D] of a layer, by steps."""
    at = 0 if not layer.batch_first else 1
    place = {"width": 8} if isinstance(layer, AFTConv2d) else {}
    state, outputs = None, []
    for piece in x.split(sizes, at):
        y, state = layer.step(piece, state=state, **place, **options)
        outputs.append(y)
    return torch.cat(outputs, at), state


def _whole_layer(layer, x, **options):
    if isinstance(layer, AFTConv2d):
        return layer(x.unflatten(1, (8, 8)), **options)[0].flatten(1, 2)
    return layer(x, **options)[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": False},
        {"key_activation": torch.tanh},
        {"query_gate": None},
        {"bias": False},
        {"impl": "reference"},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_layers_step_as_they_go_forward(options):
    for layer in _layers(**options):
        x = torch.randn(2, T, 8) if layer.batch_first else torch.randn(T, 2, 8)
        parameters = tuple(layer.parameters())
        upstream = torch.randn_like(x)
        wanted = _whole_layer(layer, x)
        wanted_grads = torch.autograd.grad((wanted * upstream).sum(), parameters)
        y, _ = _layer_in_pieces(layer, x, IRREGULAR)
        assert relative_error(y, wanted) < 1e-5
        grads = torch.autograd.grad((y * upstream).sum(), parameters)
        # That of the bias of the keys' projection is zero, but for rounding.
        _check_gradients(grads, wanted_grads, floor_scale=0.1)


def test_layers_step_over_masks_and_lengths():
    for layer in _layers():
        x = torch.randn(2, T, 8)
        mask = torch.rand(2, T) < 0.3
        grid = mask.unflatten(1, (8, 8)) if isinstance(layer, AFTConv2d) else mask
        place = {"width": 8} if isinstance(layer, AFTConv2d) else {}
        wanted = _whole_layer(layer, x, key_padding_mask=grid)
        y, state = layer.step(x[:, :9], None, mask[:, :9], torch.tensor([9, 4]), **place)
        rows = torch.arange(2)[:, None], torch.tensor([[9], [4]]) + torch.arange(12)
        assert relative_error(y[1, :4], wanted[1, :4]) < 1e-5
        y, state = layer.step(x[rows], state, mask[rows], **place)
        assert relative_error(y, wanted[rows]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_layers(dtype):
    for layer in _layers():
        x = torch.randn(2, T, 8)
        wanted = _whole_layer(layer, x)
        y, state = _layer_in_pieces(layer.to(dtype), x.to(dtype), IRREGULAR)
        assert y.dtype == state.keys.dtype == dtype
        assert state.num.dtype == state.den.dtype == torch.float64
        assert relative_error(y, wanted) < 20 * torch.finfo(dtype).eps
        whole = _whole_layer(layer, x.to(dtype))
        assert relative_error(y, whole) < torch.finfo(dtype).eps


def test_layers_under_autocast():
    for layer in _layers():
        x = torch.randn(2, T, 8)
        wanted = _whole_layer(layer, x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, state = _layer_in_pieces(layer, x, IRREGULAR)
            whole = _whole_layer(layer, x)
        assert state.num.dtype == state.den.dtype == torch.float64
        assert relative_error(y, wanted) < 20 * torch.finfo(torch.bfloat16).eps
        assert relative_error(y, whole) < torch.finfo(torch.bfloat16).eps


def test_layers_keep_nothing():
    for layer in _layers():
        before = set(vars(layer))
        buffers = len(list(layer.buffers()))
        _layer_in_pieces(layer, torch.randn(2, T, 8), IRREGULAR)
        assert set(vars(layer)) == before
        assert len(list(layer.buffers())) == buffers


def test_layers_refuse_what_cannot_stream():
    x = torch.randn(2, 3, 8)
    for layer in _layers(causal=False):
        place = {"width": 8} if isinstance(layer, AFTConv2d) else {}
        with pytest.raises(ValueError, match=f"{type(layer).__name__}: step needs a causal layer"):
            layer.step(x, **place)
    with pytest.raises(ValueError, match=r"AFTSimple: step needs a causal layer .* kdim=3"):
        AFTSimple(8, causal=True, kdim=3).step(x)
    for wrong in (x[0], torch.randn(2, 3, 5)):
        with pytest.raises(ValueError, match=r"AFTSimple: query must be \[B, n, 8\] for a step"):
            AFTSimple(8, causal=True).step(wrong)


def test_a_layer_goes_on_in_the_middle_of_a_window_of_the_whole():
    """The operation itself, in the words of its equation, for one position of AFT-local."""
    q, k, v, w = local(5).inputs(T=T)
    wanted = aft_local(q, k, v, w, 5, causal=True)[:, 30:31]
    _, state = aft_local_step(q[:, :30], k[:, :30], v[:, :30], w, 5)
    y, _ = aft_local_step(q[:, 30:31], k[:, 30:31], v[:, 30:31], w, 5, state)
    near = torch.exp(k[:, 26:31].double() + w[30, 26:31, None])
    far = torch.exp(k[:, :26].double())
    num = (near * v[:, 26:31]).sum(1) + (far * v[:, :26]).sum(1)
    assert relative_error(y[:, 0], torch.sigmoid(q[:, 30]) * num / (near.sum(1) + far.sum(1))) < 1e-6
    assert relative_error(y, wanted) < 1e-6
