"""The C++ kernels: against the specification at any shape, stride, length, level and number of threads."""

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
from operations import gradients, relative_error, simple

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

SCALES = [0.1, 1.0, 10.0, 100.0, 1e4]
LEVELS = [] if native.unavailable() else native.library.kernels.levels()
BLOCK = 1 if native.unavailable() else native.library.kernels.BLOCK


def _check(inputs, upstream, tolerance=1e-5, **options):
    """Output and every gradient against the specification in float64, and no worse than twice eager's."""
    wide = tuple(x.double() for x in inputs)
    wanted, wanted_grads = gradients(simple(), wide, upstream.double(), impl="reference", **options)
    eager, eager_grads = gradients(simple(), inputs, upstream, impl="eager", **options)
    got, grads = gradients(simple(), inputs, upstream, impl="native", **options)
    floor = 1e-3 * max(g.norm().item() for g in wanted_grads)
    # A mean that cancels is right to the size of its values.
    size = 0.3 * wide[2].abs().amax().item() * wanted.numel() ** 0.5 if wide[2].numel() else 0.0
    rounding = 2e-7 if got.dtype == torch.float32 else 0.0
    everything = zip((got, *grads), (wanted, *wanted_grads), (eager, *eager_grads), strict=True)
    for i, (a, b, c) in enumerate(everything):
        assert a.isfinite().all()
        least = floor if i else size
        error = relative_error(a, b, least)
        assert error < tolerance
        assert error <= 2 * relative_error(c, b, least) + rounding


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
        _check(inputs, upstream, causal=causal, key_padding_mask=mask)
    finally:
        torch.set_num_threads(1)


@given(st.integers(1, 70), st.integers(1, 20), seeds, st.booleans(), st.data())
def test_any_strides_without_a_copy_where_channels_are_neighbours(T, D, seed, causal, data):
    order = data.draw(st.permutations(range(3)))
    generator = torch.Generator().manual_seed(seed)
    joined = torch.randn(2, T, 3 * D + 5, generator=generator)
    starts = [x * D + data.draw(st.integers(0, 5)) for x in order]
    split = [joined[..., start : start + D] for start in starts]
    turned = torch.randn(T, D, 2, generator=generator).permute(2, 0, 1)  # its channels are far apart
    expanded = torch.randn(1, 1, D, generator=generator).expand(2, T, D)
    every_other = torch.randn(2, 2 * T, D, generator=generator)[:, ::2]
    pool = [*split, turned, expanded, every_other, every_other.flip(1)]
    inputs = [data.draw(st.sampled_from(pool)) for _ in range(3)]
    upstream = data.draw(st.sampled_from(pool))
    mask = (torch.rand(T, 1, generator=generator) < 0.3).T.expand(2, T)
    options = {"causal": causal, "key_padding_mask": mask, "impl": "native"}
    wanted, wanted_grads = gradients(simple(), tuple(x.contiguous() for x in inputs), upstream, **options)
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = aft_simple(*leaves, **options)
    assert torch.equal(y, wanted)
    for a, b in zip(torch.autograd.grad(y, leaves, upstream), wanted_grads, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T", [1, BLOCK - 1, BLOCK, BLOCK + 1, 300])
@pytest.mark.parametrize("scale", SCALES)
def test_keys_of_any_scale(scale, T, causal):
    inputs = simple().inputs(T=T, D=37, key_scale=scale)
    _check(inputs, torch.randn_like(inputs[0]), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("step", [0.01, 1.0, 7.9, 50.0])
def test_keys_that_rise_or_fall_with_time(step, sign, causal):
    """The origin of the exponents moves again and again, or stays far above all later keys."""
    q, k, v = simple().inputs(T=400, D=17)
    k = k + sign * step * torch.arange(400.0)[None, :, None]
    _check((q, k, v), torch.randn_like(q), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_sums_do_not_drift(causal):
    """Each addition of a plain float32 sum of so many terms would round alike."""
    T = 65536
    q, k, v = simple().inputs(B=1, T=T, D=16)
    v = v + 1
    wanted = aft_simple(q.double(), k.double(), v.double(), causal=causal, impl="eager")
    got = aft_simple(q, k, v, causal=causal, impl="native")
    assert ((got - wanted).abs() / wanted.abs().clamp(min=1e-3)).max() < 1e-5
    upstream = torch.randn_like(q)
    wide = tuple(x.double() for x in (q, k, v))
    _, wanted_grads = gradients(simple(), wide, upstream.double(), causal=causal, impl="eager")
    _, grads = gradients(simple(), (q, k, v), upstream, causal=causal, impl="native")
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(grads, wanted_grads, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-15, 1e15, 1e28, 1e36])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_values_of_any_size(size, scale, causal):
    q, k, v = simple().inputs(T=150, key_scale=scale)
    upstream = torch.randn_like(q) * (1e-3 if size > 1 else 1.0)
    _check((q, k, v * size), upstream, causal=causal)
    _check((q, k, v), upstream * min(max(size, 1e-30), 1e30), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1e4, 1e20, 3.4e38])
def test_finite_in_finite_out(size, causal):
    q, k, v = simple().inputs(T=100, D=20)
    upstream = torch.randn_like(q)
    for inputs in ((torch.sign(q) * size, torch.sign(k) * size, v), (q, k, torch.sign(v) * size)):
        y, grads = gradients(simple(), inputs, upstream * 1e-3, causal=causal, impl="native")
        assert y.isfinite().all()
        assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("where", [0, 1, 40, 95])
@pytest.mark.parametrize("rare", [39.0, 41.0, 60.0, 85.0, 200.0])
def test_one_rare_number_among_many(rare, where, causal):
    """The rows of its block are computed again, with care, for its vector of channels alone."""
    for i, sign in ((0, 1), (0, -1), (1, 1), (1, -1)):
        inputs = simple().inputs(T=100, D=70)
        inputs[i][1, where, 33] = sign * rare
        upstream = torch.randn_like(inputs[0])
        _check(inputs, upstream, causal=causal)
        plain = [x.clone() for x in inputs]
        plain[i][1, where, 33] = 0.0
        y, grads = gradients(simple(), tuple(inputs), upstream, causal=causal, impl="native")
        others, other_grads = gradients(simple(), tuple(plain), upstream, causal=causal, impl="native")
        here = torch.zeros_like(y, dtype=torch.bool)
        here[1, where if causal else 0 :, 33] = True
        assert torch.equal(y[~here], others[~here])
        assert all(torch.equal(a[0], b[0]) for a, b in zip(grads, other_grads, strict=True))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, -0x400000, -1])
def test_any_nan_shows(bits, level, monkeypatch):
    """Whatever its sign and payload, also where nothing is computed with care but for its sake."""
    monkeypatch.setenv(native.library.LEVEL_VARIABLE, level)
    for i in range(3):
        inputs = [x.clone() for x in simple().inputs(T=64, D=64)]
        inputs[i].view(torch.int32)[1, 40, 5] = bits
        y = aft_simple(*inputs, causal=True, impl="native")
        shows = torch.zeros_like(y, dtype=torch.bool)
        shows[1, 40 : 41 if i == 0 else None, 5] = True
        assert torch.equal(y.isnan(), shows)


@pytest.mark.parametrize("causal", [False, True])
def test_absent_keys_and_hidden_nans(causal):
    q, k, v = simple().inputs(T=100, D=20)
    upstream = torch.randn_like(q)
    absent = torch.rand(k.shape) < 0.3
    absent[:, :5] = True
    _check((q, k.masked_fill(absent, -torch.inf), v), upstream, causal=causal)
    options = {"causal": causal, "impl": "native"}
    k = k.masked_fill(absent, -torch.inf)
    wanted, wanted_grads = gradients(simple(), (q, k, v), upstream, **options)
    y, grads = gradients(simple(), (q, k, v.masked_fill(absent, torch.nan)), upstream, **options)
    assert torch.equal(y, wanted)
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted_grads, strict=True))
    assert (grads[1][absent] == 0).all()
    assert (grads[2][absent] == 0).all()

    padding = torch.rand(2, 100) < 0.4
    padding[0] = True
    poisoned = tuple(x.masked_fill(padding[..., None], torch.nan) for x in (k, v))
    wanted, wanted_grads = gradients(simple(), (q, k, v), upstream, key_padding_mask=padding, **options)
    y, grads = gradients(simple(), (q, *poisoned), upstream, key_padding_mask=padding, **options)
    assert torch.equal(y, wanted)
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted_grads, strict=True))
    assert (y[0] == 0).all()
    assert all((grad[0] == 0).all() for grad in grads)


def test_a_nan_that_is_not_hidden_shows():
    q, k, v = simple().inputs(T=40)
    for i in range(3):
        inputs = [x.clone() for x in (q, k, v)]
        inputs[i][0, 10, 1] = torch.nan
        y = aft_simple(*inputs, causal=True, impl="native")
        assert y[0, 10, 1].isnan()
        assert not y[0, :10].isnan().any()
        assert not y[1].isnan().any()


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_causal_means_causal(scale):
    q, k, v = simple().inputs(T=200, D=20, key_scale=scale)
    y = aft_simple(q, k, v, causal=True, impl="native")
    for cut in (1, 63, 64, 199):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, cut:] = x[:, cut:] * 3 + 40
        assert torch.equal(aft_simple(*changed, causal=True, impl="native")[:, :cut], y[:, :cut])
        upstream = torch.zeros_like(q)
        upstream[:, cut - 1] = 1.0
        _, grads = gradients(simple(), (q, k, v), upstream, causal=True, impl="native")
        assert all((grad[:, cut:] == 0).all() for grad in grads)


@pytest.mark.parametrize("gate", [None, torch.tanh])
@pytest.mark.parametrize("causal", [False, True])
def test_other_gates(gate, causal):
    inputs = simple().inputs(T=70, D=20)
    _check(inputs, torch.randn_like(inputs[0]), causal=causal, query_gate=gate) if gate else None
    y = aft_simple(*inputs, causal=causal, query_gate=gate, impl="native")
    wanted = aft_simple(*inputs, causal=causal, query_gate=gate, impl="reference")
    assert relative_error(y, wanted) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision_rounds_only_the_results(causal, dtype):
    inputs = simple().inputs(T=300, D=20, dtype=dtype)
    upstream = torch.randn(inputs[0].shape).to(dtype)
    wide = tuple(x.float() for x in inputs)
    wanted, wanted_grads = gradients(simple(), wide, upstream.float(), causal=causal, impl="native")
    y, grads = gradients(simple(), inputs, upstream, causal=causal, impl="native")
    assert torch.equal(y, wanted.to(dtype))
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(grads, wanted_grads, strict=True))


def test_bfloat16_rounds_to_even_and_keeps_its_extremes():
    v = torch.tensor([3.39e38, -3.39e38, 1e-40, 0.0, -1.0039, 1.0117]).bfloat16()[None, None]
    y = aft_simple(v, torch.zeros_like(v), v, impl="native", query_gate=None)
    assert torch.equal(y, v)


@pytest.mark.parametrize("causal", [False, True])
def test_threads_and_repetition_change_no_bit(causal):
    inputs = simple().inputs(B=3, T=500, D=100)
    upstream = torch.randn_like(inputs[0])
    options = {"causal": causal, "impl": "native"}
    wanted, wanted_grads = gradients(simple(), inputs, upstream, **options)
    try:
        for threads in (1, 2, 3, 3, 7):
            torch.set_num_threads(threads)
            y, grads = gradients(simple(), inputs, upstream, **options)
            assert torch.equal(y, wanted)
            assert all(torch.equal(a, b) for a, b in zip(grads, wanted_grads, strict=True))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_every_level_of_instructions(level, scale, monkeypatch):
    monkeypatch.setenv(native.library.LEVEL_VARIABLE, level)
    for causal in (False, True):
        for D in (1, 20, 33):
            inputs = simple().inputs(T=100, D=D, key_scale=scale)
            _check(inputs, torch.randn_like(inputs[0]), causal=causal)
            assert native.library.kernels.level() == level
            half = tuple(x.bfloat16() for x in inputs)
            y = aft_simple(*half, causal=causal, impl="native")
            wanted = aft_simple(*(x.float() for x in half), causal=causal, impl="native").bfloat16()
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
    with pytest.raises(ValueError, match="no kernel for AFT-full"):
        aft_full(q, k, v, torch.zeros(8, 8), impl="native")
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


def test_compiles_whole_with_a_dynamic_length():
    torch.compiler.reset()
    call = lambda *x: aft_simple(*x, causal=True, impl="native")  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (9, 70, 33):
        inputs = simple().inputs(T=T)
        upstream = torch.randn_like(inputs[0])
        wanted, wanted_grads = gradients(simple(), inputs, upstream, causal=True, impl="native")
        leaves = tuple(x.clone().requires_grad_() for x in inputs)
        y = compiled(*leaves)
        assert torch.equal(y, wanted)
        for a, b in zip(torch.autograd.grad((y * upstream).sum(), leaves), wanted_grads, strict=True):
            assert torch.equal(a, b)
        with torch.no_grad():
            assert torch.equal(compiled(*inputs), wanted)


def test_torch_func():
    inputs = simple().inputs(T=40)

    def loss(*x):
        return aft_simple(*x, causal=True, impl="native").square().sum()

    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    got = torch.func.grad(loss, (0, 1, 2))(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))

    batches = tuple(torch.stack([x, 2 * x, -x]) for x in inputs)
    mapped = torch.vmap(lambda *x: aft_simple(*x, causal=True, impl="native"))(*batches)
    per_sample = torch.vmap(torch.func.grad(loss, (0, 1, 2)))(*batches)
    of_the_sum = torch.func.grad(lambda *x: torch.vmap(loss)(*x).sum(), (0, 1, 2))(*batches)
    for i in range(3):
        each = tuple(x[i] for x in batches)
        assert torch.equal(mapped[i], aft_simple(*each, causal=True, impl="native"))
        wanted = torch.func.grad(loss, (0, 1, 2))(*each)
        assert all(torch.equal(a[i], b) for a, b in zip(per_sample, wanted, strict=True))
        assert all(torch.equal(a[i], b) for a, b in zip(of_the_sum, wanted, strict=True))


def test_a_second_derivative_is_refused_by_name():
    inputs = tuple(x.requires_grad_() for x in simple().inputs(T=4))
    y = aft_simple(*inputs, impl="native")
    grad = torch.autograd.grad(y.sum(), inputs[1], create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="impl='reference' differentiates twice"):
        grad.sum().backward()


def test_only_what_needs_a_gradient_gets_one():
    inputs = simple().inputs(T=9)
    for i in range(3):
        leaves = [x.clone() for x in inputs]
        leaves[i].requires_grad_()
        aft_simple(*leaves, impl="native").sum().backward()
        assert [x.grad is not None for x in leaves] == [j == i for j in range(3)]


def test_mixed_dtypes_and_autocast():
    q, k, v = simple().inputs(T=40)
    wanted = aft_simple(q.double(), k, v, impl="eager")
    assert relative_error(aft_simple(q.double(), k, v, impl="native"), wanted) < 1e-6
    plain = aft_simple(q, k, v, impl="native")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(aft_simple(q, k, v, impl="native"), plain)


_FORK = """
import os, sys, torch
from aft.ops import aft_simple
torch.set_num_threads(2)
q, k, v = torch.randn(3, 4, 512, 64)
wanted = aft_simple(q, k, v, causal=True, impl="native")
child = os.fork()
if child == 0:
    y = aft_simple(q, k, v, causal=True, impl="native")
    grandchild = os.fork()
    again = aft_simple(q, k, v, causal=True, impl="native")
    torch.set_num_threads(1)  # torch's own threads do not survive a fork
    same = torch.equal(y, wanted) and torch.equal(again, wanted)
    if grandchild:
        same = same and os.waitpid(grandchild, 0)[1] == 0
    os._exit(0 if same else 1)
status = os.waitpid(child, 0)[1]
again = aft_simple(q, k, v, causal=True, impl="native")
sys.exit(status or not torch.equal(again, wanted))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_forked_process_does_not_hang():
    subprocess.run([sys.executable, "-W", "ignore", "-c", _FORK], check=True, timeout=60)


class _Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        x = torch.full((1, 2000, 20), float(i))
        return aft_simple(x, x, x, causal=True, query_gate=None, impl="native")


def test_a_data_loaders_workers_call_it():
    _Rows()[0]
    loader = torch.utils.data.DataLoader(_Rows(), num_workers=2, timeout=60)
    assert [float(x.mean()) for x in loader] == [0.0, 1.0, 2.0, 3.0]


_THREADS = """
import threading, torch
from aft.ops import aft_simple
torch.set_num_threads(2)
q, k, v = torch.randn(3, 4, 256, 64)
wanted = aft_simple(q, k, v, causal=True, impl="native")
def work():
    for _ in range(50):
        assert torch.equal(aft_simple(q, k, v, causal=True, impl="native"), wanted)
threads = [threading.Thread(target=work) for _ in range(4)]
failures = []
threading.excepthook = lambda args: failures.append(args)
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failures
"""


def test_calls_from_many_threads_at_once():
    subprocess.run([sys.executable, "-c", _THREADS], check=True, timeout=60)


def _in_pieces(inputs, sizes, state, **options):
    q, k, v = inputs
    outputs, start = [], 0
    for size in sizes:
        here = slice(start, start + size)
        y, state = aft_simple_step(q[:, here], k[:, here], v[:, here], state, **options)
        outputs.append(y)
        start += size
    return torch.cat(outputs, 1), state


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
        y, state = _in_pieces(leaves[:3], sizes, start, query_gate=gate, impl=impl)
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
    q, k, v = inputs
    state, outputs = None, []
    for t in range(130):
        here = slice(t, t + 1)
        y, state = aft_simple_step(
            q[:, here], k[:, here], v[:, here], state, key_padding_mask=padding[:, here], impl="native"
        )
        outputs.append(y)
    assert relative_error(torch.cat(outputs, 1), wanted) < 1e-6


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
