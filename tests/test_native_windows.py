"""The C++ kernels of AFT-local and AFT-conv, and their steps: what windows have and AFT-simple has not.

What holds for every operation that has a kernel is in test_native.py.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aft.ops import AFTState, aft_conv, aft_full_step, aft_local, native
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
)

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

SCALES = [0.1, 1.0, 10.0, 100.0, 1e4]
SEQUENCES = [local(9), local(9, by_sequence=True), local_low_rank(9), conv(9), conv(10, heads=1)]
FULL = [full(), full(by_sequence=True), full_low_rank()]
GRIDS = [conv_grid((9, 8), (4, 5)), conv_grid((3, 20), (7, 7))]
TABLES = [*SEQUENCES[:2], *FULL[:2]]
each_operation = pytest.mark.parametrize("operation", SEQUENCES + FULL + GRIDS, ids=str)
each_sequence = pytest.mark.parametrize("operation", SEQUENCES, ids=str)
each_stream = pytest.mark.parametrize("operation", [*SEQUENCES, conv_grid((14, 10), (4, 5))], ids=str)
each_table = pytest.mark.parametrize("operation", TABLES, ids=str)
each_window = pytest.mark.parametrize("operation", TABLES[:2], ids=str)

lengths = st.integers(0, 200)
scales = st.sampled_from(SCALES)
seeds = st.integers(0, 2**16)
heads = st.integers(1, 4)
# Windows within a tile, over several chunks, and beyond the sequence; AFT-local's kernels are for short ones.
sizes = st.one_of(st.integers(1, 12), st.integers(1, 260))
windows = st.one_of(st.integers(1, 12), st.integers(1, 64))
any_sequence = st.one_of(
    st.builds(local, windows, st.booleans()),
    st.builds(local_low_rank, windows),
    st.builds(conv, sizes, heads),
)
any_full = st.one_of(st.builds(full, st.booleans()), st.builds(full_low_rank))
few = st.integers(1, 13)
shapes = st.one_of(st.tuples(few, few), st.tuples(st.just(1), sizes), st.tuples(sizes, st.just(1)))
any_grid = st.builds(conv_grid, shapes, st.tuples(few, few), heads)


@settings(max_examples=150)
@given(
    st.one_of(any_sequence, any_grid, any_full), st.integers(0, 3), lengths, st.one_of(st.none(), lengths),
    st.integers(0, 70), scales, scales, seeds, st.booleans(), st.booleans(), st.integers(1, 3),
)  # fmt: skip
def test_agrees_with_the_reference_at_any_shape(
    operation, B, T, S, D, key_scale, bias_scale, seed, causal, masked, threads
):
    """Lengths that differ, from none on; any window, kernel, grid and number of channels; all scales."""
    T = operation.length(T)
    S = None if "T" in operation.settings else S
    if operation.name.startswith("full"):
        T, S = min(T, 181), S and min(S, 181)
    D -= D % (operation.heads or 1)
    inputs = operation.inputs(B=B, T=T, S=S, D=D, key_scale=key_scale, bias_scale=bias_scale, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(B, T, D, generator=generator)
    mask = torch.rand(inputs[1].shape[:2], generator=generator) < 0.4 if masked else None
    torch.set_num_threads(threads)
    try:
        check_native(operation, inputs, upstream, causal=causal, key_padding_mask=mask)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T", [1, 8, 60])
@pytest.mark.parametrize("build", [local, local_low_rank, conv])
def test_windows_beyond_the_sequence(build, T, causal):
    for size in (T, T + 1, 2 * T, 5000):
        inputs = build(size).inputs(T=T, D=20)
        check_native(build(size), inputs, torch.randn_like(inputs[0]), causal=causal)


@pytest.mark.parametrize("bias_scale", SCALES)
@pytest.mark.parametrize("key_scale", SCALES)
@each_operation
def test_keys_and_biases_of_any_scale(operation, key_scale, bias_scale):
    inputs = operation.inputs(B=1, T=operation.length(100), D=18, key_scale=key_scale, bias_scale=bias_scale)
    for causal in (False, True):
        check_native(operation, inputs, torch.randn_like(inputs[0]), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [39.0, 60.0, 200.0, 1e4, 1e30])
@each_operation
def test_one_key_above_the_rest(operation, size, causal):
    """All other weights vanish beside its own, and so do most gradients."""
    T = operation.length(130)
    for where in (0, T // 2, T - 1):
        inputs = operation.inputs(B=1, T=T, D=8)
        inputs[1][:, where] += size
        check_native(operation, inputs, torch.randn_like(inputs[0]), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [1.0, 30.0, 100.0])
@each_operation
def test_biases_and_keys_of_minus_infinity(operation, scale, causal):
    q, k, v, *bias = operation.inputs(T=operation.length(130), D=20, key_scale=scale, bias_scale=scale)
    upstream = torch.randn_like(q)
    k = k.masked_fill(torch.rand(k.shape) < 0.2, -torch.inf)
    if len(bias) == 1:
        hidden = torch.rand(bias[0].shape) < 0.4
        bias = [bias[0].masked_fill(hidden, -torch.inf)]
    check_native(operation, (q, k, v, *bias), upstream, causal=causal)
    if len(bias) == 1:
        _, grads = gradients(operation, (q, k, v, *bias), upstream, causal=causal, impl="native")
        assert (grads[3][hidden] == 0).all()


@pytest.mark.parametrize("scale", [1.0, 100.0])
@each_table
def test_rows_with_nothing_to_see(operation, scale):
    """Zeros, to the bit, and no gradient: at the start of a sequence, and over more than a chunk."""
    q, k, v, w = operation.inputs(T=140, D=20, key_scale=scale, bias_scale=scale)
    w[..., :3, :] = -torch.inf
    k[:, :3] = -torch.inf
    upstream = torch.randn_like(q)
    for causal in (False, True):
        blind = torch.zeros(140, dtype=torch.bool)
        blind[:3] = causal or operation in FULL
        check_native(operation, (q, k, v, w), upstream, causal=causal)
        y, grads = gradients(operation, (q, k, v, w), upstream, causal=causal, impl="native")
        assert ((y == 0).all(2) == blind).all()
        assert (grads[0][:, blind] == 0).all()
    padding = torch.full((2, 140), True)
    padding[:, 70] = False  # the only key there is, which biases hide from the rows whose windows reach it
    w[..., 66:76, 70] = -torch.inf
    options = {"key_padding_mask": padding, "causal": True}
    y, grads = gradients(operation, (q, k, v, w), upstream, impl="native", **options)
    wanted, wanted_grads = gradients(operation, (q, k, v, w), upstream, impl="reference", **options)
    assert (y[:, :76] == 0).all()
    assert all(relative_error(a, b) < 1e-5 for a, b in zip((y, *grads), (wanted, *wanted_grads), strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("where", [0, 3, 8, 63, 64, 139])
@each_table
def test_one_rare_bias_among_many(operation, where, causal):
    """Its row is computed again, with care, and no other."""
    plain = operation.inputs(B=1, T=140, D=40)
    upstream = torch.randn_like(plain[0])
    others = operation(*plain, causal=causal, impl="native")
    for rare in (31.0, -200.0, 1e4):
        inputs = [x.clone() for x in plain]
        inputs[3][..., where, max(where - 2, 0)] = rare
        check_native(operation, tuple(inputs), upstream, causal=causal)
        y = operation(*inputs, causal=causal, impl="native")
        rows = torch.arange(140) != where
        assert torch.equal(y[:, rows], others[:, rows])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rare", [29.0, 31.0, -31.0, 200.0, -200.0, 1e4, -1e30])
@pytest.mark.parametrize("operation", [conv(4), conv(9), conv_grid((9, 8), (4, 5))], ids=str)
def test_one_rare_cell_of_a_kernel(operation, rare, causal):
    inputs = operation.inputs(T=operation.length(140), D=40)
    upstream = torch.randn_like(inputs[0])
    others = operation(*inputs, causal=causal, impl="native")
    inputs[3].flatten(1)[1, 2] = rare
    check_native(operation, inputs, upstream, causal=causal)
    y = operation(*inputs, causal=causal, impl="native")
    assert torch.equal(y[..., :20], others[..., :20]) or abs(rare) > 30
    assert relative_error(y[..., :20], others[..., :20]) < 1e-6


@pytest.mark.parametrize("causal", [False, True])
@each_window
def test_a_bias_outside_its_window_is_never_read(operation, causal):
    q, k, v, w = operation.inputs(T=140, D=20)
    upstream = torch.randn_like(q)
    outside = (torch.arange(140)[:, None] - torch.arange(140)[None, :]).abs() >= 9
    wanted, wanted_grads = gradients(operation, (q, k, v, w), upstream, causal=causal, impl="native")
    w = w.masked_fill(outside, torch.nan)
    y, grads = gradients(operation, (q, k, v, w), upstream, causal=causal, impl="native")
    assert torch.equal(y, wanted)
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted_grads, strict=True))
    assert (grads[3][..., outside] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_operation
def test_biases_of_another_dtype(operation, dtype):
    """Half precision beside keys in float32, and the other way round: as the same numbers in float32."""
    inputs = operation.inputs(T=operation.length(100), D=20, dtype=dtype)
    upstream = torch.randn(inputs[0].shape).to(dtype)
    wide = tuple(x.float() for x in inputs)
    wanted, wanted_grads = gradients(operation, wide, upstream.float(), causal=True, impl="native")
    for mixed in ((*wide[:3], *inputs[3:]), (*inputs[:3], *wide[3:])):
        y, grads = gradients(operation, mixed, upstream.to(mixed[0].dtype), causal=True, impl="native")
        for a, b, x in zip((y, *grads), (wanted, *wanted_grads), (mixed[0], *mixed), strict=True):
            assert a.dtype == x.dtype
            assert torch.equal(a, b.to(x.dtype))


def test_a_batch_shares_an_expanded_table():
    """Its gradient is that of each sequence, as of a table that is not expanded."""
    q, k, v, w = local(9, by_sequence=True).inputs(B=3, T=70)
    upstream = torch.randn_like(q)
    one = w[:1].expand(3, -1, -1).detach().requires_grad_()
    y = aft_local(q, k, v, one, 9, impl="native")
    wanted, wanted_grads = gradients(
        local(9, by_sequence=True), (q, k, v, one.detach().contiguous()), upstream, impl="native"
    )
    assert torch.equal(y, wanted)
    assert torch.equal(torch.autograd.grad(y, one, upstream)[0], wanted_grads[3])


def test_what_it_cannot_do_is_named():
    q, k, v, w = local(3).inputs(T=8)
    kernel = torch.zeros(2, 3, 3)
    tall, wide = torch.zeros(1, 4, 2, 4), torch.zeros(1, 2, 4, 4)
    hidden = torch.zeros(8, 8, dtype=torch.bool)
    for message, call in {
        r"position biases must be float32, bfloat16 or float16, got torch.float64": lambda impl: aft_local(
            q, k, v, w.double(), 3, impl=impl
        ),
        r"queries and keys must share one grid, got \(4, 2\) and \(2, 4\)": lambda impl: aft_conv(
            tall, wide[..., :2], wide, kernel, impl=impl
        ),
        "it has no kernel for an attn_mask": lambda impl: aft_local(
            q, k, v, w, 3, attn_mask=hidden, impl=impl
        ),
        "it has no kernel for this step": lambda impl: aft_full_step(q, k, v, w, impl=impl)[0],
    }.items():
        with pytest.raises(ValueError, match="impl='native' cannot run this: " + message):
            call("native")
        assert torch.equal(call("auto"), call("eager"))


def _arguments(operation, T, causal, query, state=None):
    """Those of ``torch.ops.aft.native_window``."""
    q, k, v, *bias = operation.inputs(T=T, D=6)
    tensors = dict.fromkeys(("table", "left", "right", "kernel"))
    width = anchor_row = anchor_column = offset = 0
    if operation.heads:
        tensors["kernel"] = bias[0].view(operation.heads, -1, bias[0].shape[-1])
        height, across = tensors["kernel"].shape[1:]
        anchor_row, anchor_column = (
            (height - 1) // 2,
            across - 1 if causal and height == 1 else (across - 1) // 2,
        )
        width = operation.settings.get("width", 0)
    else:
        tensors |= dict(zip(("left", "right") if len(bias) == 2 else ("table",), bias, strict=False))
    past = (None, None, None)
    if state is not None:
        offset = T // 2
        q, tensors["table"] = q[:, offset:], None if tensors["table"] is None else tensors["table"][offset:]
        past = (
            torch.rand(2, 6).double(),
            torch.rand(2, k.shape[2]).double() + 1,
            torch.zeros(2, k.shape[2]).double(),
        )
    hidden = torch.rand(2, T) < 0.3
    settings = (
        q.shape[1],
        causal,
        offset,
        operation.settings.get("window"),
        width,
        anchor_row,
        anchor_column,
    )
    return (q if query else None, k, v, *tensors.values(), hidden, *past, *settings)


@pytest.mark.parametrize("query", [True, False])
@each_operation
def test_the_operators_pass_opcheck(operation, query):
    arguments = _arguments(operation, operation.length(40), query, query)
    torch.library.opcheck(torch.ops.aft.native_window.default, arguments)
    y = torch.ops.aft.native_window(*arguments)
    torch.library.opcheck(torch.ops.aft.native_window_backward.default, (torch.randn_like(y), *arguments))


@pytest.mark.parametrize("operation", [local(9), conv(9)], ids=str)
def test_the_operators_of_a_stream_pass_opcheck(operation):
    arguments = _arguments(operation, 16, True, False, "state")
    torch.library.opcheck(torch.ops.aft.native_window.default, arguments)
    y = torch.ops.aft.native_window(*arguments)
    torch.library.opcheck(torch.ops.aft.native_window_backward.default, (torch.randn_like(y), *arguments))


# Streams


def _stream(operation, pieces, padding=None):
    """A call of q, k, v, biases and the fields of a state, over pieces: their outputs, 0 for what is padding.

    A piece is how many positions each sequence has.
    """

    def call(q, k, v, *rest, impl):
        *bias, num, den, top, keys, values = rest
        state = AFTState(num, den, top, keys, values, torch.full((len(q),), START))
        outputs, done = [], torch.zeros(len(q), dtype=torch.int64)
        for piece in pieces:
            n = max(piece)
            rows = torch.arange(len(q))[:, None], (done[:, None] + torch.arange(n)).clamp(max=q.shape[1] - 1)
            here = torch.tensor(piece)
            options = {"key_padding_mask": None if padding is None else padding[rows]}
            if len(set(piece)) > 1:
                options["lengths"] = here
            y, state = operation.step(q[rows], k[rows], v[rows], *bias, state=state, impl=impl, **options)
            outputs.append(y.masked_fill((torch.arange(n) >= here[:, None])[..., None], 0.0))
            done = done + here
        return torch.cat(outputs, 1)

    return call


START = 5
ragged = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=4)
even = st.lists(st.integers(0, 70).map(lambda n: (n, n)), min_size=1, max_size=5)


@settings(max_examples=80)
@given(
    st.one_of(any_sequence, any_grid), st.one_of(ragged, even), st.integers(0, 34), scales, scales, seeds,
    st.booleans(),
)  # fmt: skip
def test_a_stream_in_pieces(operation, pieces, D, key_scale, bias_scale, seed, masked):
    """Outputs, and the gradients of all that went in, the state before included."""
    pieces = [(1, 1), *pieces, (1, 1)]
    T = max(sum(row) for row in zip(*pieces, strict=True))
    D -= D % (operation.heads or 1)
    scaled = {"D": D, "key_scale": key_scale, "bias_scale": bias_scale, "seed": seed}
    q, k, v, *bias = operation.inputs(T=START + T, **scaled)
    old = [x[:, :START] for x in (q, k, v)]
    state = operation.step(*old, *bias, impl="reference")[1]
    generator = torch.Generator().manual_seed(seed)
    padding = torch.rand(2, T, generator=generator) < 0.3 if masked else None
    inputs = (*(x[:, START:] for x in (q, k, v)), *bias, *state[:5])
    call = _stream(operation, pieces, padding)
    upstream = torch.randn(2, sum(max(piece) for piece in pieces), D, generator=generator)
    check_native(call, inputs, upstream)
    assert torch.equal(call(*inputs, impl="auto"), call(*inputs, impl="native"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [[1] * 140, [1, 8, 63, 64, 4], [100, 1, 39]], ids=str)
@each_stream
def test_a_stream_agrees_with_the_whole(operation, sizes, dtype):
    inputs = operation.inputs(T=140, D=20, dtype=dtype)
    padding = torch.rand(2, 140) < 0.3
    wanted = operation(*inputs, causal=True, key_padding_mask=padding, impl="native")
    for impl in ("native", "auto"):
        y, _ = in_pieces(operation, inputs, sizes, key_padding_mask=padding, impl=impl)
        assert y.dtype == dtype
        assert relative_error(y, wanted) < max(1e-6, torch.finfo(dtype).eps)


@each_stream
def test_a_later_piece_changes_no_bit_of_an_earlier_one(operation):
    """Nor does what a state holds depend on it, whatever comes."""
    q, k, v, *bias = operation.inputs(T=140, D=20)
    _, state = operation.step(q[:, :70], k[:, :70], v[:, :70], *bias, impl="native")
    later, _ = operation.step(q[:, 70:], k[:, 70:], v[:, 70:], *bias, state=state, impl="native")
    for change in (lambda x: x * 3 + 40, lambda x: x * 1e30, lambda x: x * torch.nan):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, 100:] = change(x[:, 100:])
        piece = [x[:, 70:] for x in changed]
        again, _ = operation.step(*piece, *bias, state=state, impl="native")
        assert torch.equal(again[:, :30], later[:, :30])


def test_a_step_compiles_and_maps():
    operation = conv(5)
    q, k, v, kernel = operation.inputs(B=3, T=20)
    old = [x[:, :8] for x in (q, k, v)]
    state = operation.step(*old, kernel)[1]

    def step(q, k, v, kernel, state):
        y, state = operation.step(q, k, v, kernel, state=state, impl="native")
        return y, state.num, state.den

    inputs = (*(x[:, 8:] for x in (q, k, v)), kernel)
    wanted = step(*inputs, state)
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(compiled(*inputs, state), wanted, strict=True))
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    grads = [torch.autograd.grad(f(*leaves, state)[0].square().sum(), leaves) for f in (step, compiled)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    whole = tuple(x[:, None] for x in inputs[:3]), AFTState(*(x[:, None] for x in state))
    mapped = torch.vmap(lambda x, state: step(*x, kernel, state))(*whole)
    assert all(torch.equal(a[:, 0], b) for a, b in zip(mapped, wanted, strict=True))


@each_window
def test_a_compiled_step_of_a_window(operation):
    """Where the sequence is cannot be asked in a graph: "auto" leaves the kernels aside there."""
    q, k, v, w = operation.inputs(T=20)
    state = operation.step(q[:, :8], k[:, :8], v[:, :8], w)[1]
    new = [x[:, 8:9] for x in (q, k, v)]
    torch.compiler.reset()
    step = lambda *x, state: operation.step(*x, state=state)[0]  # noqa: E731
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert relative_error(compiled(*new, w, state=state), step(*new, w, state=state)) < 1e-6
