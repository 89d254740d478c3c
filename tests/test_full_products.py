"""AFT-full as plain matrix products: at the limits of the numbers they serve, and beside other rows."""

import pytest
import torch

from aft.ops import aft_full, eager, products, tiled
from aft.ops.spec import DenseBias, Problem
from aft.ops.sums import join
from aft.ops.tiles import STEP, STRIP, dense_plan, strips
from operations import Operation, conv, full, full_low_rank, gradients, local, relative_error

LIMIT = products.LIMIT


def _check(operation: Operation, inputs, bound=1e-5, **options):
    """Output and every gradient against the specification in float64."""
    upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(inputs[0])
    wanted, wanted_grads = gradients(operation, inputs, upstream, impl="reference", **options)
    got, grads = gradients(operation, inputs, upstream, impl="eager", **options)
    assert relative_error(got, wanted) < bound
    floor = 1e-3 * max(x.double().norm().item() for x in wanted_grads)
    for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
        assert relative_error(grad, wanted_grad, floor) < bound
    return got


@pytest.fixture
def tiles_used(monkeypatch):
    """The calls of `tiled.forward` and `tiled.backward`, by name."""
    calls = []

    def watch(name):
        call = getattr(tiled, name)
        monkeypatch.setattr(tiled, name, lambda *args: (calls.append(name), call(*args))[1])

    watch("forward")
    watch("backward")
    return calls


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 3, 64])
@pytest.mark.parametrize(
    ("T", "S"),
    [(1, 1), (1, 700), (700, 1), (STEP, STEP), (STEP + 1, STEP - 1), (600, 530), (530, 600), (1100, 1100)],
)
def test_every_visible_pair_is_in_one_block(T, S, groups, causal):
    seen = torch.zeros(T, S, dtype=torch.int64)
    touched = torch.zeros(T, dtype=torch.bool)
    for strip in strips(T, S, causal, groups):
        for block in strip:
            rows = slice(block.row, block.row + block.rows)
            assert block.fresh == (not touched[rows].any())
            assert touched[rows].all() or block.fresh
            touched[rows] = True
            pairs = torch.ones(block.rows, block.columns, dtype=torch.int64)
            if block.triangular:
                pairs = pairs.tril(block.row - block.column)
            seen[rows, block.column : block.column + block.columns] += pairs
    assert torch.equal(seen, torch.ones_like(seen).tril() if causal else torch.ones_like(seen))
    assert touched.all()


EDGES = [STEP - 1, STEP, STEP + 1, STRIP - 1, STRIP, STRIP + 1, STRIP + STEP + 1, 2 * STRIP + 1]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", EDGES)
@pytest.mark.parametrize("operation", [full(), full(by_sequence=True), full_low_rank(), local(5000)], ids=str)
def test_lengths_around_the_blocks(operation, length, causal, tiles_used):
    _check(operation, operation.inputs(B=2, T=length, D=2), causal=causal)
    assert not tiles_used


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("T", "S"), [(1, 600), (600, 1), (70, 600), (600, 70), (STRIP, STRIP + 1), (700, 513)]
)
def test_lengths_that_differ(T, S, causal, tiles_used):
    for operation in (full(), full(by_sequence=True), full_low_rank(), conv(2000)):
        _check(operation, operation.inputs(B=2, T=T, S=S, D=2), causal=causal)
    assert not tiles_used


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype, causal, tiles_used):
    inputs = full().inputs(T=150, dtype=dtype)
    _check(full(), inputs, bound=1e-12 if dtype == torch.float64 else 1e-2, causal=causal)
    assert not tiles_used


def _at_the_limit(size: float, T=200) -> tuple[torch.Tensor, ...]:
    """Biases and keys as far from their references as ``size``, everywhere."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, w = (torch.randn(*shape, generator=generator) for shape in ((1, T, 3),) * 3 + ((T, T),))
    k, w = k.sign() * size, w.sign() * size
    k[:, 0] = 0.0
    return q, k, v, w


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1e-10, 1.0, 1e9])
def test_both_factors_at_the_limit(size, causal, tiles_used):
    """exp(w + k) from e^-50 to e^50, beside values as small and as large as float32 is asked to take."""
    q, k, v, w = _at_the_limit(LIMIT)
    inputs = (q, k, v * size * 1.5, w)
    _check(full(), inputs, causal=causal)
    assert not tiles_used
    mean, wanted = (aft_full(*inputs, causal=causal, query_gate=None, impl=x) for x in ("eager", "reference"))
    assert relative_error(mean, wanted) < 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("part", ["bias", "keys"])
def test_inside_and_outside_the_limit(part, causal, tiles_used):
    for size, tame in ((LIMIT - 0.1, True), (LIMIT + 0.1, False)):
        for sign in (-1, 1):
            q, k, v, w = full().inputs(T=100, B=1)
            k[:, 0] = 0.0
            if part == "bias":
                w[70, 20] = sign * size
            else:
                k[0, 20, 1] = sign * size
            tiles_used.clear()
            got = aft_full(q, k, v, w, causal=causal, impl="eager")
            assert bool(tiles_used) is not tame
            assert relative_error(got, aft_full(q, k, v, w, causal=causal, impl="reference")) < 1e-5
            _check(full(), (q, k, v, w), causal=causal)


@pytest.mark.parametrize("place", [1, STEP, 100, STRIP - 1, STRIP, STRIP + 70, 699])
@pytest.mark.parametrize("value", [26.0, -60.0, 300.0, 1e20])
def test_one_wide_key_changes_no_bit_before_it_or_beside_it(place, value):
    T = 700
    q, k, v, w = full().inputs(B=2, T=T, D=3)
    tame = aft_full(q, k, v, w, causal=True, impl="eager")
    k[1, place, 2] = value
    got = aft_full(q, k, v, w, causal=True, impl="eager")
    assert torch.equal(got[:, :place], tame[:, :place])
    assert torch.equal(got[0], tame[0])
    assert torch.equal(got[1, :, :2], tame[1, :, :2])
    assert relative_error(got, aft_full(q, k, v, w, causal=True, impl="reference")) < 1e-5


@pytest.mark.parametrize("place", [1, STEP, 100, STRIP - 1, STRIP, STRIP + 70, 699])
@pytest.mark.parametrize("value", [26.0, -60.0, 300.0, 1e20])
def test_one_wide_bias_changes_no_bit_before_it(place, value, tiles_used):
    T = 700
    q, k, v, w = full().inputs(B=2, T=T, D=3)
    tame = aft_full(q, k, v, w, causal=True, impl="eager")
    assert not tiles_used
    wide = w.clone()
    wide[place, place // 2] = value
    got = aft_full(q, k, v, wide, causal=True, impl="eager")
    assert tiles_used
    assert torch.equal(got[:, :place], tame[:, :place])
    assert relative_error(got, aft_full(q, k, v, wide, causal=True, impl="reference")) < 1e-5
    hidden = w.clone()
    hidden[place - 1, place] = value
    assert torch.equal(aft_full(q, k, v, hidden, causal=True, impl="eager"), tame)


@pytest.mark.parametrize("place", [100, STRIP + 70])
def test_gradients_beside_something_wide(place):
    for part in ("bias", "keys"):
        q, k, v, w = full().inputs(B=2, T=700, D=2)
        if part == "bias":
            w[place, place // 2] = 40.0
        else:
            k[1, place, 1] = -80.0
        _check(full(), (q, k, v, w), causal=True)


def test_one_table_of_a_batch_is_wide():
    q, k, v, w = full(by_sequence=True).inputs(B=3, T=150)
    tame = aft_full(q, k, v, w, causal=True, impl="eager")
    w[1, 20:] *= 50.0
    got = _check(full(by_sequence=True), (q, k, v, w), causal=True)
    assert torch.equal(got[[0, 2]], tame[[0, 2]])
    assert torch.equal(got[1, :20], tame[1, :20])


def test_a_table_of_nan_above_the_diagonal_is_never_read():
    q, k, v, w = full().inputs(B=1, T=600, D=2)
    wanted = aft_full(q, k, v, w, causal=True, impl="eager")
    for what in (torch.nan, torch.inf, 3e38):
        assert torch.equal(
            aft_full(
                q,
                k,
                v,
                w.masked_fill(torch.ones_like(w, dtype=torch.bool).triu(1), what),
                causal=True,
                impl="eager",
            ),
            wanted,
        )


@pytest.mark.parametrize("causal", [False, True])
def test_hidden_and_absent_keys(causal, tiles_used):
    """Biases of -inf, keys of -inf, padding and masks at once, with rows that see nothing."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, w = full().inputs(B=2, T=150)
    w = w.masked_fill(torch.rand(150, 150, generator=generator) < 0.3, -torch.inf)
    w[40] = -torch.inf
    k = k.masked_fill(torch.rand(k.shape, generator=generator) < 0.3, -torch.inf)
    k[:, :3, 1] = -torch.inf
    padding = torch.rand(2, 150, generator=generator) < 0.3
    mask = torch.rand(2, 150, 150, generator=generator) < 0.3
    for options in ({}, {"key_padding_mask": padding}, {"attn_mask": mask[0]}, {"attn_mask": mask}):
        got = _check(full(), (q, k, v, w), causal=causal, **options)
        assert (got[:, 40] == 0).all()
    assert not tiles_used


def test_gradients_far_below_one():
    """Divided by a denominator of e^40 they would not be float32 any more."""
    q, k, v, w = full().inputs(T=100)
    k[:, 1:] += 22.0
    w += 20.0
    upstream = torch.randn_like(q) * 1e-22
    _, wanted = gradients(full(), (q, k, v, w), upstream, causal=True, impl="reference")
    _, grads = gradients(full(), (q, k, v, w), upstream, causal=True, impl="eager")
    for grad, wanted_grad in zip(grads, wanted, strict=True):
        assert relative_error(grad * 1e22, wanted_grad * 1e22) < 1e-5


def test_sums_of_any_size_are_joined():
    """The first half of the keys is e^90 below the second, each half within e^25 of its first key."""
    generator = torch.Generator().manual_seed(0)
    T, S = 80, 100
    k, v = torch.randn(1, 2 * S, 3, generator=generator), torch.randn(1, 2 * S, 3, generator=generator)
    w = torch.randn(T, 2 * S, generator=generator)
    k[:, :S] += torch.linspace(0, 20, S)[:, None]
    k[:, S:] += torch.linspace(110, 90, S)[:, None]
    w[:, S:] -= torch.linspace(60, 80, T)[:, None]

    def problem(keys):
        return Problem(k[:, keys], v[:, keys], T, DenseBias(w[:, keys]), None, False, None, None)

    joined = join(eager.sums(problem(slice(0, S))), eager.sums(problem(slice(S, None))))
    wanted = aft_full(torch.zeros(1, T, 3), k, v, w, query_gate=None, impl="reference")
    assert relative_error((joined.num / joined.den[..., None]).flatten(2), wanted) < 1e-6


def test_nothing_is_kept_for_a_backward_pass_that_will_not_come():
    _, k, v, w = full().inputs(B=1, T=70)
    arguments = (k, v[..., None], w[None], None, None, None, None, 70, True, None, 0, 0, 0, 0)
    whole = torch.ops.aft.eager_mean(*arguments)
    torch.library.opcheck(torch.ops.aft.eager_mean.default, arguments, {"with_sums": False})
    mean, *sums = torch.ops.aft.eager_mean(*arguments, with_sums=False)
    assert torch.equal(mean, whole[0])
    assert [x.numel() for x in sums] == [0, 0, 0]
    assert [x.shape for x in whole[1:]] == [(1, 70, 4)] * 3


def test_products_and_tiles_agree():
    """The same operator pair by both ways, gradients of the denominator included."""
    k, v, w = (
        torch.randn(*shape, dtype=torch.float64) for shape in ((1, 150, 4), (1, 150, 4, 2), (1, 150, 150))
    )
    plan, key_range = dense_plan(150, 150, True, 1), products.KeyRange.of(k)
    grad, grad_log_den = torch.randn(1, 150, 4, 2).double(), torch.randn(1, 150, 4).double()
    results = []
    for module, extra in ((products, (key_range,)), (tiled, ())):
        source = eager.DenseBlocks(w, None)
        mean, sums = module.forward(k, v, *extra, source, plan, 150)
        grads = module.backward(grad, k, v, *extra, source, plan, mean, sums, grad_log_den)
        log_den = sums.den.log() + sums.max + sums.bias_max
        results.append((mean, log_den, *grads, *source.gradients()))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-11)
