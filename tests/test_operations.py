"""What users of PyTorch expect of an operation: gradients, invariants, strides, transforms, clear errors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aft.ops import aft_conv, aft_full, aft_local, aft_simple, available_impls, native
from aft.ops.sums import Sums, join, no_sums
from aft.ops.tiles import banded_plan, dense_plan
from operations import (
    GRID_OPERATIONS,
    SEQUENCE_OPERATIONS,
    by_each_impl,
    conv,
    full,
    full_low_rank,
    gradients,
    local,
    relative_error,
    simple,
    solves,
)

ONE_OF_EACH = [full(), full_low_rank(), simple(), local(3), conv(4)]
OPERATIONS = SEQUENCE_OPERATIONS + GRID_OPERATIONS
EVERY_IMPL = ["reference", "eager", "native"]
EACH_SEQUENCE, EACH_OF_SOME = by_each_impl(SEQUENCE_OPERATIONS), by_each_impl(ONE_OF_EACH)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_gradcheck_of_every_input(operation, causal):
    inputs = operation.inputs(B=2, T=operation.settings.get("T", 5), D=2, dtype=torch.float64)
    inputs = tuple(x.requires_grad_() for x in inputs)
    on_a_grid = "T" in operation.settings
    call = lambda *x: operation(*x, causal=causal, impl="eager")  # noqa: E731
    assert torch.autograd.gradcheck(call, inputs, fast_mode=on_a_grid)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("operation", ONE_OF_EACH, ids=str)
def test_gradcheck_across_tiles_and_lengths(operation, causal):
    inputs = operation.inputs(B=1, T=70, S=67, D=2, dtype=torch.float64)
    inputs = tuple(x.requires_grad_() for x in inputs)
    mask = torch.zeros(1, 67, dtype=torch.bool)
    mask[:, 3] = True
    assert torch.autograd.gradcheck(
        lambda *x: operation(*x, causal=causal, key_padding_mask=mask, impl="eager"), inputs, fast_mode=True
    )


lengths = st.integers(1, 150)
scales = st.sampled_from([0.1, 1.0, 10.0, 100.0, 1e4])
seeds = st.integers(0, 2**16)


@given(lengths, scales, scales, seeds, st.booleans(), st.sampled_from(SEQUENCE_OPERATIONS))
def test_agrees_with_the_reference(T, key_scale, bias_scale, seed, causal, operation):
    S = max(1, (T * (seed % 7 + 1)) // 4)
    inputs = operation.inputs(
        B=1 + seed % 3, T=T, S=S, D=2, key_scale=key_scale, bias_scale=bias_scale, seed=seed
    )
    upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(seed))
    wanted, wanted_grads = gradients(operation, inputs, upstream, causal=causal, impl="reference")
    floor = 1e-3 * max(g.norm().item() for g in wanted_grads)
    for impl in ("eager", "native"):
        if impl == "native" and not solves(impl, operation, inputs, causal=causal):
            continue
        got, grads = gradients(operation, inputs, upstream, causal=causal, impl=impl)
        assert relative_error(got, wanted) < 1e-5
        for a, b in zip(grads, wanted_grads, strict=True):
            assert relative_error(a, b, floor) < 1e-5


def _on_a_lattice(x, step=0.125):
    """Rounded so that shifts by whole numbers are exact."""
    return (x / step).round() * step


@given(lengths, scales, seeds, st.booleans(), st.integers(-5000, 5000), st.sampled_from(SEQUENCE_OPERATIONS))
def test_a_shift_of_all_keys_changes_nothing(T, scale, seed, causal, shift, operation):
    q, k, v, *bias = operation.inputs(T=T, D=2, key_scale=scale, bias_scale=scale, seed=seed)
    k = _on_a_lattice(k)
    wanted = operation(q, k, v, *bias, causal=causal)
    assert relative_error(operation(q, k + shift, v, *bias, causal=causal), wanted) < 1e-5


@given(lengths, scales, seeds, st.booleans(), st.sampled_from([full(), full(by_sequence=True)]))
def test_a_shift_of_a_bias_row_changes_nothing(T, scale, seed, causal, operation):
    q, k, v, w = operation.inputs(T=T, D=2, key_scale=scale, bias_scale=scale, seed=seed)
    w = _on_a_lattice(w)
    shift = torch.randint(-5000, 5000, (T, 1), generator=torch.Generator().manual_seed(seed))
    wanted = operation(q, k, v, w, causal=causal)
    assert relative_error(operation(q, k, v, w + shift, causal=causal), wanted) < 1e-5


@given(st.integers(1, 5), lengths, scales, seeds, st.booleans(), st.sampled_from(SEQUENCE_OPERATIONS))
def test_a_permutation_of_the_batch_permutes_the_result(B, T, scale, seed, causal, operation):
    q, k, v, *bias = operation.inputs(B=B, T=T, D=2, key_scale=scale, bias_scale=scale, seed=seed)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(seed))
    permuted = [b[order] if operation.name == "full, a table each" else b for b in bias]
    wanted = operation(q, k, v, *bias, causal=causal)[order]
    got = operation(q[order], k[order], v[order], *permuted, causal=causal)
    assert relative_error(got, wanted) < 1e-6


@given(st.integers(2, 150), scales, scales, seeds, st.data(), st.sampled_from(SEQUENCE_OPERATIONS))
def test_a_perturbed_future_changes_no_bit_of_the_past(T, scale, shift, seed, data, operation):
    q, k, v, *bias = operation.inputs(T=T, D=2, key_scale=scale, bias_scale=scale, seed=seed)
    cut = data.draw(st.integers(1, T - 1))
    wanted = operation(q, k, v, *bias, causal=True)[:, :cut]
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, cut:] += shift * torch.randn_like(x[:, cut:])
    assert torch.equal(operation(*changed, *bias, causal=True)[:, :cut], wanted)


@given(lengths, seeds, st.booleans())
def test_a_window_that_holds_everything_is_full(T, seed, causal):
    inputs = full().inputs(T=T, seed=seed)
    wanted = aft_full(*inputs, causal=causal)
    assert relative_error(aft_local(*inputs, T, causal=causal), wanted) < 1e-6
    assert relative_error(aft_local(*inputs, T + 100, causal=causal), wanted) < 1e-6


@given(lengths, seeds, st.booleans())
def test_a_bias_of_zero_is_simple(T, seed, causal):
    q, k, v = simple().inputs(T=T, seed=seed)
    wanted = aft_simple(q, k, v, causal=causal)
    zero = torch.zeros(T, T)
    assert relative_error(aft_full(q, k, v, zero, causal=causal), wanted) < 1e-6
    assert relative_error(aft_local(q, k, v, zero, 9, causal=causal), wanted) < 1e-6
    assert relative_error(aft_conv(q, k, v, torch.zeros(4, 5), causal=causal), wanted) < 1e-6


@given(st.integers(1, 100), st.integers(1, 40), seeds, st.booleans())
def test_a_kernel_is_a_bias_by_distance(T, size, seed, causal):
    """One head of AFT-conv is AFT-full with the Toeplitz table of its kernel."""
    q, _, v = simple().inputs(T=T, D=1, seed=seed)
    k, kernel = torch.randn(2, T, 1), torch.randn(1, size)
    table = conv(size, heads=1).table(T, T, causal, kernel)[0, ..., 0]
    assert (
        relative_error(aft_conv(q, k, v, kernel, causal=causal), aft_full(q, k, v, table, causal=causal))
        < 1e-6
    )


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 6), st.integers(1, 6), seeds)
def test_a_grid_turns_and_a_grid_of_one_row_is_a_sequence(Y, X, height, width, seed):
    q, k, v = (torch.randn(1, Y, X, d) for d in (4, 2, 4))
    kernel = torch.randn(2, height, width)
    turned = aft_conv(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), kernel.mT)
    assert relative_error(turned.transpose(1, 2), aft_conv(q, k, v, kernel)) < 1e-6
    line = aft_conv(q[:, 0], k[:, 0], v[:, 0], kernel[:, 0])
    assert relative_error(aft_conv(q[:, :1], k[:, :1], v[:, :1], kernel[:, :1])[:, 0], line) < 1e-6


@pytest.mark.parametrize("operation", EACH_OF_SOME, ids=str)
def test_any_strides(operation):
    """Non-contiguous, expanded and split inputs give the same as their copies."""
    T = 70
    inputs = operation.inputs(T=T, D=4)
    heads = inputs[1].shape[2]
    joined = torch.cat(inputs[:3], 2)
    split = joined.split([4, heads, 4], 2)
    turned = tuple(x.mT.contiguous().mT for x in inputs)
    every_other = tuple(torch.stack([x, x + 1], -1).flatten(-2)[..., ::2] for x in inputs)
    upstream = torch.randn(2, T, 4)
    wanted, wanted_grads = gradients(operation, inputs, upstream, causal=True)
    for variant in ((*split, *inputs[3:]), turned, every_other):
        leaves = tuple(x.detach().requires_grad_() for x in variant)
        y = operation(*leaves, causal=True)
        assert relative_error(y, wanted) < 1e-6
        for a, b in zip(torch.autograd.grad((y * upstream).sum(), leaves), wanted_grads, strict=True):
            assert relative_error(a, b) < 1e-6
    one = tuple(x[:1].expand(2, *x.shape[1:]) for x in inputs[:3])
    expanded = operation(*one, *inputs[3:], causal=True)
    wanted = operation(*(x.contiguous() for x in one), *inputs[3:], causal=True)
    assert relative_error(expanded, wanted) < 1e-6


@pytest.mark.parametrize("operation", EACH_SEQUENCE, ids=str)
def test_one_query_of_many_keys(operation):
    """More keys than a block holds, so that several blocks meet in one row."""
    q, k, v, *bias = operation.inputs(B=2, T=1100)
    if operation.heads is None and bias:
        bias = [bias[0][:1] if len(bias) == 2 else bias[0][..., :1, :], *bias[1:]]
    y = operation(q[:, :1], k, v, *bias)
    assert relative_error(y, operation(q[:, :1], k, v, *bias, impl="reference")) < 1e-5


@pytest.mark.parametrize("operation", by_each_impl(OPERATIONS), ids=str)
def test_an_empty_batch(operation):
    T = operation.settings.get("T", 9)
    q, k, v, *bias = operation.inputs(B=2, T=T)
    bias = [b[:0] if operation.name == "full, a table each" else b for b in bias]
    y, grads = gradients(operation, (q[:0], k[:0], v[:0], *bias), q[:0], causal=True)
    assert y.shape == (0, T, 4)
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("operation", by_each_impl([simple()], EVERY_IMPL), ids=str)
def test_no_queries_of_some_keys(operation):
    inputs = torch.randn(1, 0, 3), torch.randn(1, 5, 3), torch.randn(1, 5, 3)
    y, grads = gradients(operation, inputs, torch.randn(1, 0, 3))
    assert y.shape == (1, 0, 3)
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("operation", EACH_OF_SOME, ids=str)
def test_repeated_calls_are_bit_equal(operation):
    inputs = operation.inputs(T=200, key_scale=30.0, bias_scale=30.0)
    upstream = torch.randn_like(inputs[0])
    first, first_grads = gradients(operation, inputs, upstream, causal=True)
    again, again_grads = gradients(operation, inputs, upstream, causal=True)
    assert torch.equal(first, again)
    assert all(torch.equal(a, b) for a, b in zip(first_grads, again_grads, strict=True))


@pytest.mark.parametrize("operation", EACH_OF_SOME, ids=str)
def test_only_what_needs_a_gradient_gets_one(operation):
    inputs = operation.inputs(T=9)
    for i in range(len(inputs)):
        leaves = [x.clone() for x in inputs]
        leaves[i].requires_grad_()
        operation(*leaves).sum().backward()
        assert [x.grad is not None for x in leaves] == [j == i for j in range(len(inputs))]


def _check_compiled(operation, backend):
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *x: operation(*x, causal=True), fullgraph=True, dynamic=True, backend=backend
    )
    for T in (9, 70, 33):
        inputs = operation.inputs(T=T)
        upstream = torch.randn_like(inputs[0])
        wanted, wanted_grads = gradients(operation, inputs, upstream, causal=True)
        leaves = tuple(x.clone().requires_grad_() for x in inputs)
        for leaf in leaves[:3]:
            torch._dynamo.mark_dynamic(leaf, 1)
        y = compiled(*leaves)
        assert relative_error(y, wanted) < 1e-6
        for a, b in zip(torch.autograd.grad((y * upstream).sum(), leaves), wanted_grads, strict=True):
            assert relative_error(a, b) < 1e-6


@pytest.mark.parametrize("operation", ONE_OF_EACH, ids=str)
@pytest.mark.parametrize("mask", ["key_padding_mask", "attn_mask"])
def test_compiles_without_gradients_and_with_masks(operation, mask):
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *x, **o: operation(*x, causal=True, **o), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for T in (9, 33):
        inputs = operation.inputs(T=T)
        options = {mask: torch.rand(2 if mask == "key_padding_mask" else T, T) < 0.3}
        with torch.no_grad():
            assert (
                relative_error(compiled(*inputs, **options), operation(*inputs, causal=True, **options))
                < 1e-6
            )


@pytest.mark.parametrize("operation", ONE_OF_EACH, ids=str)
def test_compiles_whole_with_a_dynamic_length(operation):
    _check_compiled(operation, "aot_eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("operation", ONE_OF_EACH, ids=str)
def test_compiles_whole_with_inductor(operation):
    _check_compiled(operation, "inductor")


@pytest.mark.parametrize("operation", [full(), full_low_rank(), simple(), local(3), conv(4)], ids=str)
def test_the_operators_pass_opcheck(operation):
    _, k, v, *bias = operation.inputs(B=2, T=70)
    tensors = dict.fromkeys(("table", "left", "right", "kernel"))
    if operation.heads:
        tensors["kernel"] = bias[0][:, None]
        k, v = k.permute(2, 1, 0), v.unflatten(2, (operation.heads, -1)).permute(2, 1, 0, 3)
    else:
        v = v[..., None]
        tensors |= dict(zip(("left", "right") if len(bias) == 2 else ("table",), bias, strict=False))
        if tensors["table"] is not None:
            tensors["table"] = tensors["table"][None]
    window = operation.settings.get("window")
    settings = (70, True, window, 70, 70, 0, 3)
    arguments = (k, v, *tensors.values(), None, *settings)
    torch.library.opcheck(torch.ops.aft.eager_mean.default, arguments)
    mean, *sums = torch.ops.aft.eager_mean(*arguments)
    backward = (torch.randn_like(mean), torch.randn_like(sums[0]), mean, *sums, *arguments)
    torch.library.opcheck(torch.ops.aft.eager_mean_backward.default, backward)
    assert all(x.is_contiguous() for x in (mean, *sums, *torch.ops.aft.eager_mean_backward(*backward)))


def test_exports_with_a_dynamic_length():
    class Mix(torch.nn.Module):
        def forward(self, q, k, v):
            return aft_simple(q, k, v, causal=True)

    T = torch.export.Dim("T", min=2, max=512)
    example = tuple(torch.randn(2, 8, 4) for _ in range(3))
    program = torch.export.export(Mix(), example, dynamic_shapes=[{1: T}] * 3)
    inputs = tuple(torch.randn(2, 77, 4) for _ in range(3))
    assert torch.equal(program.module()(*inputs), aft_simple(*inputs, causal=True))


@pytest.mark.parametrize("impl", ["eager", "reference"])
@pytest.mark.parametrize("operation", ONE_OF_EACH, ids=str)
def test_torch_func(operation, impl):
    inputs = operation.inputs(T=9, dtype=torch.float64)

    def loss(*x):
        return operation(*x, causal=True, impl=impl).square().sum()

    everything = tuple(range(len(inputs)))
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    got = torch.func.grad(loss, everything)(*inputs)
    assert all(relative_error(a, b) < 1e-12 for a, b in zip(got, wanted, strict=True))

    batches = tuple(torch.stack([x, 2 * x, -x]) for x in inputs)
    mapped = torch.vmap(lambda *x: operation(*x, causal=True, impl=impl))(*batches)
    for i in range(3):
        wanted = operation(*(x[i] for x in batches), causal=True, impl=impl)
        assert relative_error(mapped[i], wanted) < 1e-12

    per_sample = torch.vmap(torch.func.grad(loss, everything), (0, 0, 0, *(None,) * (len(inputs) - 3)))
    grads = per_sample(*batches[:3], *inputs[3:])
    for i in range(3):
        wanted = torch.func.grad(loss, everything)(*(x[i] for x in batches[:3]), *inputs[3:])
        assert all(relative_error(a[i], b) < 1e-12 for a, b in zip(grads, wanted, strict=True))


@pytest.mark.parametrize("operation", EACH_OF_SOME, ids=str)
def test_a_second_derivative_is_refused_by_name(operation):
    inputs = tuple(x.requires_grad_() for x in operation.inputs(T=4))
    grad = torch.autograd.grad(operation(*inputs).sum(), inputs[1], create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="impl='reference' differentiates twice"):
        grad.sum().backward()


def test_forward_mode_is_the_references():
    q, k, v = simple().inputs(T=4)
    with pytest.raises(NotImplementedError, match="forward mode AD"):
        torch.func.jvp(lambda k: aft_simple(q, k, v), (k,), (k,))
    torch.func.jvp(lambda k: aft_simple(q, k, v, impl="reference"), (k,), (k,))


def test_tensors_without_data():
    """Shapes can be worked out on the meta device."""
    x = torch.empty(2, 5, 4, device="meta")
    assert aft_simple(x, x, x, causal=True).shape == x.shape
    assert aft_full(x, x, x, torch.empty(5, 5, device="meta"), impl="reference").shape == x.shape


@pytest.mark.parametrize("gate", [None, torch.tanh, torch.nn.functional.relu])
@pytest.mark.parametrize("operation", by_each_impl([simple()], EVERY_IMPL), ids=str)
def test_any_query_gate(gate, operation):
    q, k, v = operation.inputs(T=20)
    plain = operation(torch.zeros_like(q), k, v) * 2  # sigmoid(0) = 1/2
    wanted = plain if gate is None else gate(q) * plain
    assert relative_error(operation(q, k, v, query_gate=gate), wanted) < 1e-6


@given(st.integers(1, 40), st.integers(1, 40), seeds)
def test_states_of_neighbouring_pieces_join(first, second, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(first + second, 3, generator=generator, dtype=torch.float64) * 100
    v = torch.randn(first + second, 3, 1, generator=generator)

    def state(x, v):
        peak = x.amax(0)
        weight = torch.exp(x - peak).float()
        return Sums((weight[..., None] * v).sum(0), weight.sum(0), peak, torch.zeros_like(peak))

    joined = join(state(x[:first], v[:first]), state(x[first:], v[first:]))
    whole = state(x, v)
    assert relative_error(joined.num / joined.den[..., None], whole.num / whole.den[..., None]) < 1e-5
    empty = no_sums(whole.den, 3, values=1)
    assert all(torch.equal(a, b) for a, b in zip(join(whole, empty), whole, strict=True))


@given(st.integers(0, 600), st.integers(0, 600), st.booleans(), st.integers(-1, 300), st.integers(0, 300))
def test_a_plan_covers_every_visible_pair_once(T, S, causal, behind, ahead):
    time, source = torch.arange(T)[:, None], torch.arange(S)[None, :]
    visible = (source <= time) if causal else torch.ones(T, S, dtype=torch.bool)
    for plan in (dense_plan(T, S, causal), banded_plan(T, S, causal, behind, -1 if behind < 0 else ahead)):
        seen = torch.zeros(T, S, dtype=torch.int)
        fresh = torch.zeros(T, dtype=torch.bool)
        for blocks in plan.blocks:
            for i in range(blocks.count):
                row, column = blocks.row + i * blocks.step, blocks.column + i * blocks.step
                block = torch.ones(blocks.rows, blocks.columns, dtype=torch.int)
                seen[row : row + blocks.rows, column : column + blocks.columns] += (
                    block.tril() if blocks.triangular else block
                )
                assert blocks.fresh == (not fresh[row : row + blocks.rows].any())
                fresh[row : row + blocks.rows] = True
        if plan.far is not None:
            for i, (before, after) in enumerate(zip(plan.far.before, plan.far.after, strict=True)):
                rows = slice(64 * i, 64 * (i + 1))
                seen[rows, : 64 * before] += 1
                seen[rows, 64 * after :] += 1
                inside = (source - time >= -behind) & (source - time <= ahead) & (behind >= 0)
                assert not inside[rows, : 64 * before].any()
                assert causal or not inside[rows, 64 * after :].any()
        assert torch.equal(seen > 0, visible)
        assert (seen <= 1).all()


def _tensor(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


BAD_CALLS = {
    "q of two dimensions": (
        lambda: aft_simple(_tensor(3, 4), _tensor(1, 3, 4), _tensor(1, 3, 4)),
        "q must be",
    ),
    "k and v of different lengths": (
        lambda: aft_simple(_tensor(1, 3, 4), _tensor(1, 3, 4), _tensor(1, 5, 4)),
        r"k \(1, 3, 4\), v \(1, 5, 4\)",
    ),
    "another batch": (
        lambda: aft_simple(_tensor(2, 3, 4), _tensor(1, 3, 4), _tensor(1, 3, 4)),
        r"q \(2, 3, 4\)",
    ),
    "integer keys": (
        lambda: aft_simple(_tensor(1, 3, 4), _tensor(1, 3, 4, dtype=torch.long), _tensor(1, 3, 4)),
        "k must be of a floating-point dtype, got torch.int64",
    ),
    "a bias too short": (
        lambda: aft_full(*[_tensor(1, 3, 4)] * 3, _tensor(2, 3)),
        r"position_bias must be \[T, S\] = \(3, 3\) or \[B, T, S\] = \(1, 3, 3\), got \(2, 3\)",
    ),
    "a pair of different ranks": (
        lambda: aft_full(*[_tensor(1, 3, 4)] * 3, (_tensor(3, 2), _tensor(3, 5))),
        r"got \(3, 2\) and \(3, 5\)",
    ),
    "no bias": (lambda: aft_full(*[_tensor(1, 3, 4)] * 3, None), "position_bias must be a tensor or a pair"),
    "a window of zero": (
        lambda: aft_local(*[_tensor(1, 3, 4)] * 3, _tensor(3, 3), 0),
        "window_size must be at least 1, got 0",
    ),
    "a window of 2.5": (
        lambda: aft_local(*[_tensor(1, 3, 4)] * 3, _tensor(3, 3), 2.5),
        "window_size must be an int, got float",
    ),
    "a float mask": (
        lambda: aft_simple(*[_tensor(1, 3, 4)] * 3, key_padding_mask=_tensor(1, 3)),
        r"key_padding_mask must be a bool tensor \[B, S\] = \(1, 3\), True = hidden; got torch.float32",
    ),
    "a mask of another shape": (
        lambda: aft_simple(*[_tensor(1, 3, 4)] * 3, attn_mask=_tensor(3, 4, dtype=torch.bool)),
        r"attn_mask must be \[T, S\] = \(3, 3\) or \[B, T, S\] = \(1, 3, 3\), got \(3, 4\)",
    ),
    "keys of another number of heads": (
        lambda: aft_conv(_tensor(1, 3, 4), _tensor(1, 3, 4), _tensor(1, 3, 4), _tensor(2, 5)),
        "k must have one channel a head, 2 for kernel",
    ),
    "channels that heads do not divide": (
        lambda: aft_conv(_tensor(1, 3, 5), _tensor(1, 3, 2), _tensor(1, 3, 5), _tensor(2, 5)),
        "a multiple of the kernel's heads",
    ),
    "a kernel of one dimension": (
        lambda: aft_conv(*[_tensor(1, 3, 4)] * 3, _tensor(4)),
        r"kernel must be \[H, K\] or \[H, Ky, Kx\], got \(4,\)",
    ),
    "a sequence for a planar kernel": (
        lambda: aft_conv(*[_tensor(1, 3, 4)] * 3, _tensor(4, 3, 3)),
        r"q must be \[B, Y, X, D\]",
    ),
    "a kernel that is a list": (lambda: aft_conv(*[_tensor(1, 3, 4)] * 3, [1.0]), "kernel must be a tensor"),
    "no query": (
        lambda: aft_simple(None, _tensor(1, 3, 4), _tensor(1, 3, 4)),
        "q must be a tensor, got NoneType",
    ),
    "a mask that is a list": (
        lambda: aft_simple(*[_tensor(1, 3, 4)] * 3, key_padding_mask=[True]),
        r"key_padding_mask must be a bool tensor \[B, S\] = \(1, 3\), True = hidden; got list",
    ),
    "an unknown implementation": (
        lambda: aft_simple(*[_tensor(1, 3, 4)] * 3, impl="fast"),
        "impl must be one of 'auto', 'reference', 'eager', 'native', got 'fast'",
    ),
    "two devices": (
        lambda: aft_simple(_tensor(1, 3, 4), _tensor(1, 3, 4).to("meta"), _tensor(1, 3, 4)),
        "all tensors must be on one device",
    ),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_bad_input_is_named(what):
    call, message = BAD_CALLS[what]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_every_implementation_is_available():
    assert available_impls() == {"reference": None, "eager": None, "native": native.unavailable()}
