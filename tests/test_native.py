"""The C++ kernels of every operation: against the specification at any stride, size, level and number of
threads; of AFT-simple at any shape, and its steps. For shapes and steps of the others see
test_native_windows.py."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aft.ops import (
    aft_full,
    aft_full_step,
    aft_simple,
    aft_simple_step,
    available_impls,
    native,
)
from operations import (
    check_native,
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

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

SCALES = [0.1, 1.0, 10.0, 100.0, 1e4]
LEVELS = [] if native.unavailable() else native.library.kernels.levels()
BLOCK = 1 if native.unavailable() else native.library.kernels.BLOCK


OPERATIONS = [
    simple(),
    local(5),
    local(5, by_sequence=True),
    local_low_rank(6),
    conv(4),
    conv_grid((9, 8), (4, 5)),
    full(),
    full(by_sequence=True),
    full_low_rank(),
]
FULL = OPERATIONS[-3:]
each_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=str)
one_of_each = pytest.mark.parametrize("operation", [simple(), local_low_rank(6), conv(4)], ids=str)


def _length(operation, T):
    """T, or as near as a grid allows, or the kernels for AFT-full, which are for short sequences."""
    return min(operation.length(T), 181) if operation in FULL else operation.length(T)


lengths = st.integers(0, 3 * BLOCK + 5)
seeds = st.integers(0, 2**16)


@given(
    st.integers(0, 3), lengths, lengths, st.integers(0, 70), st.sampled_from(SCALES), seeds,
    st.booleans(), st.booleans(), st.integers(1, 3),
)  # fmt: skip
def test_agrees_with_the_reference_at_any_shape(B, T, S, D, scale, seed, causal, masked, threads):
    inputs = simple().inputs(B=B, T=T, S=S, D=D, key_scale=scale, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(B, T, D, generator=generator)
    mask = torch.rand(B, S, generator=generator) < 0.4 if masked else None
    torch.set_num_threads(threads)
    try:
        check_native(simple(), inputs, upstream, causal=causal, key_padding_mask=mask)
    finally:
        torch.set_num_threads(1)


LAYOUTS = {
    "beside others": lambda x: torch.nn.functional.pad(x, (3, 2), value=torch.nan)[..., 3:-2],
    "channels far apart": lambda x: x.mT.contiguous().mT,
    "every other": lambda x: torch.stack([x, x * torch.nan], -2).flatten(-3, -2)[..., ::2, :],
    "flipped": lambda x: x.flip(-2).flip(-2),
    "expanded in time": lambda x: x[..., :1, :].expand(x.shape),
    "expanded": lambda x: x[:1].expand(x.shape),
}


@given(st.sampled_from(OPERATIONS), st.integers(1, 70), st.integers(1, 10), seeds, st.booleans(), st.data())
def test_any_strides(operation, T, channels, seed, causal, data):
    """To the bit as their copies; but for low-rank biases, whose products torch sums in another order."""
    inputs = operation.inputs(T=_length(operation, T), D=2 * channels, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(inputs[0].shape, generator=generator)
    *inputs, upstream = (LAYOUTS[data.draw(st.sampled_from(list(LAYOUTS)))](x) for x in (*inputs, upstream))
    mask = (torch.rand(_length(operation, T), 1, generator=generator) < 0.3).T.expand(2, -1)
    options = {"causal": causal, "key_padding_mask": mask, "impl": "native"}
    wanted = gradients(operation, tuple(x.contiguous() for x in inputs), upstream.contiguous(), **options)
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = operation(*leaves, **options)
    for a, b in zip((y, *torch.autograd.grad(y, leaves, upstream)), (wanted[0], *wanted[1]), strict=True):
        if "low rank" in operation.name:
            assert relative_error(a, b) < 1e-6
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T", [1, BLOCK - 1, BLOCK, BLOCK + 1, 300])
@pytest.mark.parametrize("scale", SCALES)
def test_keys_of_any_scale(scale, T, causal):
    inputs = simple().inputs(B=1, T=T, D=37, key_scale=scale)
    check_native(simple(), inputs, torch.randn_like(inputs[0]), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("step", [0.01, 1.0, 7.9, 50.0])
@each_operation
def test_keys_that_rise_or_fall_with_time(operation, step, sign, causal):
    """The origin of the exponents moves again and again, or stays far above all later keys."""
    T = _length(operation, 200)
    q, k, v, *bias = operation.inputs(B=1, T=T, D=18)
    k = k + sign * step * torch.arange(float(T))[None, :, None]
    check_native(operation, (q, k, v, *bias), torch.randn_like(q), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@one_of_each
def test_sums_do_not_drift(operation, causal):
    """Each addition of a plain float32 sum of so many terms would round alike."""
    q, k, v, *bias = operation.inputs(B=1, T=65536, D=16)
    inputs = (q, k, v.abs() + 1, *bias)
    wide = tuple(x.double() for x in inputs)
    upstream = torch.randn_like(q)
    wanted, wanted_grads = gradients(operation, wide, upstream.double(), causal=causal, impl="eager")
    got, grads = gradients(operation, inputs, upstream, causal=causal, impl="native")
    assert ((got - wanted).abs() / wanted.abs().clamp(min=1e-3)).max() < 1e-5
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(grads, wanted_grads, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-15, 1e15, 1e28, 1e36])
@pytest.mark.parametrize("scale", [1.0, 30.0])
@each_operation
def test_values_of_any_size(operation, size, scale, causal):
    q, k, v, *bias = operation.inputs(T=_length(operation, 150), key_scale=scale, bias_scale=scale)
    upstream = torch.randn_like(q) * (1e-3 if size > 1 else 1.0)
    check_native(operation, (q, k, v * size, *bias), upstream, causal=causal)
    upstream = upstream * min(max(size, 1e-30), 1e30)
    check_native(operation, (q, k, v, *bias), upstream, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1e4, 1e20, 3.4e38])
@each_operation
def test_finite_in_finite_out(operation, size, causal):
    inputs = operation.inputs(T=_length(operation, 100), D=20)
    sizes = [size] * 3 + [min(size, 1e19)] * (len(inputs) - 3)
    huge = [torch.sign(x) * y for x, y in zip(inputs, sizes, strict=True)]
    q, k, v, *bias = inputs
    for case in (
        (*huge[:2], v, *bias),
        (q, k, huge[2], *bias),
        (q, k, v, *huge[3:]),
        (*huge[:2], v, *huge[3:]),
    ):
        y, grads = gradients(operation, case, torch.randn_like(q) * 1e-3, causal=causal, impl="native")
        assert y.isfinite().all()
        assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("where", [0, 63, 64])
@each_operation
def test_one_rare_number_among_many(operation, where, causal):
    """What it forces to be computed again, with care, are results that it takes part in."""
    plain = operation.inputs(T=_length(operation, 100), D=40)
    upstream = torch.randn_like(plain[0])
    plain[0][1, where, 33] = plain[1][1, where, 1] = 0.0
    P = operation.values_of_a_key(40)
    options = {"causal": causal, "impl": "native"}
    others, other_grads = gradients(operation, plain, upstream, **options)
    for i, rare in ((0, 60.0), (0, -200.0), (1, 41.0), (1, -60.0), (1, 200.0)):
        inputs = [x.clone() for x in plain]
        inputs[i][1, where, 1 if i else 33] = rare
        check_native(operation, tuple(inputs), upstream, causal=causal)
        y, grads = gradients(operation, tuple(inputs), upstream, **options)
        here = torch.zeros_like(y, dtype=torch.bool)
        if i == 0:
            here[1, where, 33] = True
        else:
            here[1, where if causal else 0 :, P : 2 * P] = True
        assert torch.equal(y[~here], others[~here])
        assert all(torch.equal(a[0], b[0]) for a, b in zip(grads[:3], other_grads[:3], strict=True))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, -0x400000, -1])
@each_operation
def test_any_nan_shows(operation, bits, level, monkeypatch):
    """Whatever its sign and payload, also where nothing is computed with care but for its sake."""
    monkeypatch.setenv(native.library.LEVEL_VARIABLE, level)
    T = _length(operation, 70)
    P = operation.values_of_a_key(64)
    channels = slice(P, 2 * P)
    # The tensor, where in it, and the results that it takes part in: sequences, times, channels.
    cases = [(0, (1, 40, 5), (1, 40, 5)), (2, (1, 40, 5), (1, slice(40, None), 5))]
    cases.append((1, (1, 40, 1), (1, slice(40, None), channels)))
    if operation.heads:
        own = (3,) if operation.settings.get("size") else (1, 2)  # the cell that lies on the query
        cases.append((3, (1, *own), (slice(None), slice(None), channels)))
    elif operation.name != "simple" and "low rank" not in operation.name:
        sequence = 1 if "each" in operation.name else slice(None)
        cases.append((3, (1, 40, 37) if sequence == 1 else (40, 37), (sequence, 40, slice(None))))
    for i, place, seen in cases:
        inputs = [x.clone() for x in operation.inputs(T=T, D=64)]
        inputs[i].view(torch.int32)[place] = bits
        y = operation(*inputs, causal=True, impl="native")
        shows = torch.zeros_like(y, dtype=torch.bool)
        shows[seen] = True
        assert torch.equal(y.isnan(), shows)


@pytest.mark.parametrize("causal", [False, True])
@each_operation
def test_absent_keys_and_hidden_nans(operation, causal):
    T = _length(operation, 100)
    q, k, v, *bias = operation.inputs(T=T, D=20)
    upstream = torch.randn_like(q)
    absent = torch.rand(k.shape) < 0.3
    absent[:, :5] = True
    options = {"causal": causal, "impl": "native"}
    without = k.masked_fill(absent, -torch.inf)
    check_native(operation, (q, without, v, *bias), upstream, causal=causal)
    no_value = absent.repeat_interleave(operation.values_of_a_key(20), 2)
    wanted, wanted_grads = gradients(operation, (q, without, v, *bias), upstream, **options)
    poisoned = (q, without, v.masked_fill(no_value, torch.nan), *bias)
    y, grads = gradients(operation, poisoned, upstream, **options)
    assert torch.equal(y, wanted)
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted_grads, strict=True))
    assert (grads[1][absent] == 0).all()
    assert (grads[2][no_value] == 0).all()

    options["key_padding_mask"] = padding = torch.rand(2, T) < 0.4
    padding[0] = True
    wanted, wanted_grads = gradients(operation, (q, k, v, *bias), upstream, **options)
    poisoned = tuple(x.masked_fill(padding[..., None], torch.nan) for x in (k, v))
    y, grads = gradients(operation, (q, *poisoned, *bias), upstream, **options)
    assert torch.equal(y, wanted)
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted_grads, strict=True))
    assert (y[0] == 0).all()
    assert all((grad[0] == 0).all() for grad in grads[:3])


# What AFT-simple computes with care it does for the whole block, whose last bits may then be others.
CHANGES = [lambda x: x * 3 + 40, lambda x: x * 1e30, lambda x: x * torch.nan]


@pytest.mark.parametrize("scale", [1.0, 100.0])
@each_operation
def test_causal_means_causal(operation, scale):
    T = _length(operation, 200)
    inputs = operation.inputs(T=T, D=20, key_scale=scale, bias_scale=scale)
    y = operation(*inputs, causal=True, impl="native")
    for cut in sorted({1, 63, 64, 70, T - 1}):
        for change in CHANGES[: 1 if operation.name == "simple" else None]:
            changed = [x.clone() for x in inputs]
            for x in changed[:3]:
                x[:, cut:] = change(x[:, cut:])
            assert torch.equal(operation(*changed, causal=True, impl="native")[:, :cut], y[:, :cut])
        upstream = torch.zeros_like(y)
        upstream[:, cut - 1] = 1.0
        _, grads = gradients(operation, inputs, upstream, causal=True, impl="native")
        assert all((grad[:, cut:] == 0).all() for grad in grads[:3])


@pytest.mark.parametrize("gate", [None, torch.tanh])
@pytest.mark.parametrize("causal", [False, True])
@each_operation
def test_other_gates(operation, gate, causal):
    inputs = operation.inputs(T=_length(operation, 70), D=20)
    upstream = torch.randn_like(inputs[0])
    options = {"causal": causal, "query_gate": gate}
    wanted, wanted_grads = gradients(operation, inputs, upstream, impl="reference", **options)
    y, grads = gradients(operation, inputs, upstream, impl="native", **options)
    assert relative_error(y, wanted) < 1e-6
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(grads, wanted_grads, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@each_operation
def test_half_precision_rounds_only_the_results(operation, causal, dtype):
    inputs = operation.inputs(T=_length(operation, 300), D=20, dtype=dtype)
    upstream = torch.randn(inputs[0].shape).to(dtype)
    wide = tuple(x.float() for x in inputs)
    wanted, wanted_grads = gradients(operation, wide, upstream.float(), causal=causal, impl="native")
    y, grads = gradients(operation, inputs, upstream, causal=causal, impl="native")
    assert torch.equal(y, wanted.to(dtype))
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(grads, wanted_grads, strict=True))


@pytest.mark.parametrize("operation", [simple(), local(1), conv(1, heads=6)], ids=str)
def test_bfloat16_rounds_to_even_and_keeps_its_extremes(operation):
    v = torch.tensor([3.39e38, -3.39e38, 1e-40, 0.0, -1.0039, 1.0117]).bfloat16()[None, None]
    bias = operation.inputs(T=1, D=6)[3:]
    y = operation(v, torch.zeros_like(v), v, *bias, impl="native", query_gate=None)
    assert torch.equal(y, v)


@pytest.mark.parametrize("causal", [False, True])
@each_operation
def test_threads_and_repetition_change_no_bit(operation, causal):
    inputs = operation.inputs(B=3, T=_length(operation, 500), D=100)
    upstream = torch.randn_like(inputs[0])
    options = {"causal": causal, "impl": "native"}
    wanted, wanted_grads = gradients(operation, inputs, upstream, **options)
    try:
        for threads in (1, 2, 3, 3, 7):
            torch.set_num_threads(threads)
            y, grads = gradients(operation, inputs, upstream, **options)
            assert torch.equal(y, wanted)
            assert all(torch.equal(a, b) for a, b in zip(grads, wanted_grads, strict=True))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scale", [1.0, 100.0])
@each_operation
def test_every_level_of_instructions(operation, level, scale, monkeypatch):
    monkeypatch.setenv(native.library.LEVEL_VARIABLE, level)
    for causal in (False, True):
        for D in (2, 20, 34):
            inputs = operation.inputs(T=_length(operation, 100), D=D, key_scale=scale, bias_scale=scale)
            check_native(operation, inputs, torch.randn_like(inputs[0]), causal=causal)
            assert native.library.kernels.level() == level
            half = tuple(x.bfloat16() for x in inputs)
            y = operation(*half, causal=causal, impl="native")
            wanted = operation(*(x.float() for x in half), causal=causal, impl="native").bfloat16()
            assert torch.equal(y, wanted)


def test_an_unknown_level_is_named(monkeypatch):
    monkeypatch.setenv(native.library.LEVEL_VARIABLE, "abacus")
    q, k, v = simple().inputs()
    with pytest.raises(ValueError, match=r"AFT_NATIVE_LEVEL must be one of portable.* got 'abacus'"):
        aft_simple(q, k, v, impl="native")
    assert "abacus" in str(available_impls()["native"])
    aft_simple(q, k, v)  # auto is eager then


def test_what_it_cannot_do_is_named():
    q, k, v = simple().inputs(T=8)
    hidden = torch.zeros(8, 8, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"impl='native' cannot run this: .* attn_mask"):
        aft_simple(q, k, v, attn_mask=hidden, impl="native")
    with pytest.raises(
        ValueError, match=r"float32, bfloat16 or float16, got torch.float64 and torch.float64"
    ):
        aft_simple(q.double(), k.double(), v.double(), impl="native")
    long = torch.zeros(1, 1025, 1)
    with pytest.raises(ValueError, match="for AFT-full of up to 1048576 pairs, this one has 1050625"):
        aft_full(long, long, long, torch.zeros(1025, 1025), impl="native")
    assert aft_simple(q.double(), k.double(), v.double()).dtype == torch.float64


@pytest.mark.parametrize("query", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_the_operators_pass_opcheck(causal, query):
    q, k, v = simple().inputs(T=70, D=5)
    hidden = torch.rand(2, 70) < 0.3
    arguments = (q if query else None, k, v, hidden, 70, causal)
    for save in (False, True):
        torch.library.opcheck(torch.ops.aft.native_simple.default, (*arguments, save))
    y, saved = torch.ops.aft.native_simple(*arguments, True)
    backward = (torch.randn_like(y), saved, *arguments)
    torch.library.opcheck(torch.ops.aft.native_simple_backward.default, backward)


@each_operation
def test_compiles_whole_with_a_dynamic_length(operation):
    torch.compiler.reset()
    call = lambda *x: operation(*x, causal=True, impl="native")  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (9, 70, 33):
        inputs = operation.inputs(T=_length(operation, T))
        upstream = torch.randn_like(inputs[0])
        wanted, wanted_grads = gradients(operation, inputs, upstream, causal=True, impl="native")
        leaves = tuple(x.clone().requires_grad_() for x in inputs)
        y = compiled(*leaves)
        assert torch.equal(y, wanted)
        for a, b in zip(torch.autograd.grad((y * upstream).sum(), leaves), wanted_grads, strict=True):
            assert torch.equal(a, b)
        with torch.no_grad():
            assert torch.equal(compiled(*inputs), wanted)


@each_operation
def test_torch_func(operation):
    inputs = operation.inputs(T=_length(operation, 40))
    everything = tuple(range(len(inputs)))

    def call(*x):
        return operation(*x, causal=True, impl="native")

    def loss(*x):
        return call(*x).square().sum()

    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    got = torch.func.grad(loss, everything)(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))

    batches = tuple(torch.stack([x, 2 * x, -x]) for x in inputs)
    mapped = torch.vmap(call)(*batches)
    per_sample = torch.vmap(torch.func.grad(loss, everything))(*batches)
    of_the_sum = torch.func.grad(lambda *x: torch.vmap(loss)(*x).sum(), everything)(*batches)
    shared = torch.vmap(torch.func.grad(loss, everything), (0, 0, 0, *(None,) * (len(inputs) - 3)))
    of_shared_bias = shared(*batches[:3], *inputs[3:])
    for i in range(3):
        each = tuple(x[i] for x in batches)
        assert torch.equal(mapped[i], call(*each))
        wanted = torch.func.grad(loss, everything)(*each)
        assert all(torch.equal(a[i], b) for a, b in zip(per_sample, wanted, strict=True))
        assert all(torch.equal(a[i], b) for a, b in zip(of_the_sum, wanted, strict=True))
        wanted = torch.func.grad(loss, everything)(*each[:3], *inputs[3:])
        assert all(torch.equal(a[i], b) for a, b in zip(of_shared_bias, wanted, strict=True))


@each_operation
def test_a_second_derivative_is_refused_by_name(operation):
    inputs = tuple(x.requires_grad_() for x in operation.inputs(T=_length(operation, 4)))
    y = operation(*inputs, impl="native")
    grad = torch.autograd.grad(y.sum(), inputs[1], create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="impl='reference' differentiates twice"):
        grad.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@each_operation
def test_activation_checkpointing(operation, reentrant):
    inputs = operation.inputs(T=_length(operation, 70))
    upstream = torch.randn_like(inputs[0])
    wanted, wanted_grads = gradients(operation, inputs, upstream, causal=True, impl="native")
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    call = lambda *x: operation(*x, causal=True, impl="native")  # noqa: E731
    y = torch.utils.checkpoint.checkpoint(call, *leaves, use_reentrant=reentrant)
    (y * upstream).sum().backward()
    assert torch.equal(y, wanted)
    assert all(torch.equal(x.grad, b) for x, b in zip(leaves, wanted_grads, strict=True))


@each_operation
def test_only_what_needs_a_gradient_gets_one(operation):
    inputs = operation.inputs(T=_length(operation, 9))
    for i in range(len(inputs)):
        leaves = [x.clone() for x in inputs]
        leaves[i].requires_grad_()
        operation(*leaves, impl="native").sum().backward()
        assert [x.grad is not None for x in leaves] == [j == i for j in range(len(inputs))]


@each_operation
def test_mixed_dtypes_and_autocast(operation):
    q, *rest = operation.inputs(T=_length(operation, 40))
    wanted = operation(q.double(), *rest, impl="eager")
    assert relative_error(operation(q.double(), *rest, impl="native"), wanted) < 1e-6
    plain = operation(q, *rest, impl="native")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(operation(q, *rest, impl="native"), plain)


_ALL = """
import os, sys, threading, torch
from aft.ops import aft_conv, aft_local, aft_simple
torch.set_num_threads(2)
q, k, v = torch.randn(3, 4, 256, 64)
table, kernel, planar = torch.randn(256, 256), torch.randn(64, 6), torch.randn(64, 5, 5)
def call():
    options = {"causal": True, "impl": "native"}
    grids = (x.unflatten(1, (16, 16)) for x in (q, k, v))
    return (
        aft_simple(q, k, v, **options),
        aft_local(q, k, v, table, 9, **options),
        aft_conv(q, k, v, kernel, **options),
        aft_conv(*grids, planar, **options),
    )
def is_right(results):
    return all(torch.equal(a, b) for a, b in zip(results, wanted))
wanted = call()
"""

_FORK = """
child = os.fork()
if child == 0:
    y = call()
    grandchild = os.fork()
    again = call()
    torch.set_num_threads(1)  # torch's own threads do not survive a fork
    same = is_right(y) and is_right(again)
    if grandchild:
        same = same and os.waitpid(grandchild, 0)[1] == 0
    os._exit(0 if same else 1)
status = os.waitpid(child, 0)[1]
sys.exit(status or not is_right(call()))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_forked_process_does_not_hang():
    subprocess.run([sys.executable, "-W", "ignore", "-c", _ALL + _FORK], check=True, timeout=60)


class _Rows(torch.utils.data.Dataset):
    def __init__(self, operation):
        self.operation, (*_, self.bias) = operation, operation.inputs(T=500, D=20)

    def __len__(self):
        return 4

    def __getitem__(self, i):
        x = torch.full((1, 500, 20), float(i))
        return self.operation(x, x, x, self.bias, causal=True, query_gate=None, impl="native")


@pytest.mark.parametrize("operation", [local(30), conv(30, heads=20)], ids=str)
def test_a_data_loaders_workers_call_it(operation):
    rows = _Rows(operation)
    rows[0]
    loader = torch.utils.data.DataLoader(rows, num_workers=2, timeout=60)
    assert [float(x.mean()) for x in loader] == pytest.approx([0.0, 1.0, 2.0, 3.0])


_THREADS = """
def work():
    for _ in range(20):
        assert is_right(call())
threads = [threading.Thread(target=work) for _ in range(4)]
failures = []
threading.excepthook = lambda args: failures.append(args)
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failures
"""


def test_calls_from_many_threads_at_once():
    subprocess.run([sys.executable, "-c", _ALL + _THREADS], check=True, timeout=60)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 40), st.sampled_from(SCALES), seeds,
    st.sampled_from([torch.sigmoid, torch.tanh, None]), st.integers(0, 9),
)  # fmt: skip
def test_a_stream_in_pieces(sizes, D, scale, seed, gate, absent):
    """Outputs, the state, and the gradients of all that went in, the state before included."""
    sizes = [1, *sizes, 1]
    T = sum(sizes)
    inputs = simple().inputs(T=T, D=D, key_scale=scale, seed=seed)
    inputs[1][:, :absent] = -torch.inf
    generator = torch.Generator().manual_seed(seed)
    old = simple().inputs(T=3, D=D, key_scale=scale, seed=seed + 1)
    upstream = torch.randn(2, T, D, generator=generator)
    of_state = torch.randn(2, D, generator=generator, dtype=torch.float64)

    def run(impl):
        start = aft_simple_step(*old, impl="eager")[1]
        leaves = [x.clone().requires_grad_() for x in (*inputs, start.num, start.den, start.max)]
        start = start._replace(num=leaves[3], den=leaves[4], max=leaves[5])
        y, state = in_pieces(simple(), leaves[:3], sizes, start, query_gate=gate, impl=impl)
        loss = (y * upstream).sum() + ((state.num[..., 0] - state.den) * of_state).sum()
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        return (y.detach(), *(x.detach() for x in state)), grads

    (y, *state), grads = run("native")
    (wanted, *wanted_state), wanted_grads = run("eager")
    assert relative_error(y, wanted) < 1e-6
    for a, b in zip(state, wanted_state, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert torch.allclose(a.double(), b.double(), rtol=1e-12, atol=1e-12)
    floor = 1e-3 * max(g.norm().item() for g in wanted_grads)
    for a, b in zip(grads, wanted_grads, strict=True):
        assert relative_error(a, b, floor) < 1e-6


def test_a_stream_agrees_with_the_whole():
    inputs = simple().inputs(T=130, D=20)
    padding = torch.rand(2, 130) < 0.3
    wanted = aft_simple(*inputs, causal=True, key_padding_mask=padding, impl="native")
    y, _ = in_pieces(simple(), inputs, [1] * 130, key_padding_mask=padding, impl="native")
    assert relative_error(y, wanted) < 1e-6


def test_the_operators_of_a_step_pass_opcheck():
    q, k, v = simple().inputs(T=40, D=5)
    state = aft_simple_step(q, k, v)[1]
    tensors = (state.num[..., 0], state.den, state.max)
    for query in (q, None):
        arguments = (query, k, v, torch.rand(2, 40) < 0.3)
        for save in (False, True):
            torch.library.opcheck(torch.ops.aft.native_simple_step.default, (*arguments, *tensors, save))
        y, num, den, _, saved = torch.ops.aft.native_simple_step(*arguments, *tensors, True)
        backward = (torch.randn_like(y), torch.randn_like(num), torch.randn_like(den), saved, *arguments)
        torch.library.opcheck(torch.ops.aft.native_simple_step_backward.default, backward)


def test_a_step_compiles_and_maps():
    q, k, v = simple().inputs(B=3, T=4)
    state = aft_simple_step(q, k, v)[1]

    def step(q, k, v, state):
        y, state = aft_simple_step(q, k, v, state, impl="native")
        return y, state.num, state.den

    wanted = step(q, k, v, state)
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(compiled(q, k, v, state), wanted, strict=True))
    leaves = tuple(x.clone().requires_grad_() for x in (q, k, v))
    grads = [torch.autograd.grad(f(*leaves, state)[0].square().sum(), leaves) for f in (step, compiled)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    whole = tuple(x[:, None] for x in (q, k, v)), type(state)(*(x[:, None] for x in state))
    mapped = torch.vmap(lambda x, state: step(*x, state))(*whole)
    assert all(torch.equal(a[:, 0], b) for a, b in zip(mapped, wanted, strict=True))


def test_a_step_that_it_cannot_do_is_named():
    q, k, v = simple().inputs(T=4)
    w = torch.zeros(4, 4)
    for call in (
        lambda: aft_full_step(q, k, v, w, impl="native"),
        lambda: aft_simple_step(q, k, v, lengths=torch.tensor([2, 4]), impl="native"),
    ):
        with pytest.raises(ValueError, match="impl='native' cannot run this: it has no kernel for this step"):
            call()
