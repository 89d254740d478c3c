"""The layers: parameters that learn, and the manners of ``nn.MultiheadAttention``."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from aft.layers import AFTConv1d, AFTConv2d, AFTFull, AFTLocal, AFTSimple
from aft.ops import aft_conv, aft_full, aft_local, aft_simple
from operations import relative_error

D, T = 8, 12
SEQUENCE_LAYERS = {
    "full": lambda **o: AFTFull(D, T, **o),
    "full, low rank": lambda **o: AFTFull(D, T, bias_rank=3, **o),
    "simple": lambda **o: AFTSimple(D, **o),
    "local": lambda **o: AFTLocal(D, T, 4, **o),
    "local, low rank": lambda **o: AFTLocal(D, T, 4, bias_rank=3, **o),
    "conv": lambda **o: AFTConv1d(D, 4, 3, **o),
    "conv, plain kernel": lambda **o: AFTConv1d(D, 4, 3, reparameterize=False, **o),
}


@pytest.fixture(params=SEQUENCE_LAYERS)
def make(request):
    """A constructor of one kind of layer; its parameters are moved off their initial values."""

    def build(**options):
        layer = SEQUENCE_LAYERS[request.param](**options)
        with torch.no_grad():
            for parameter in layer.parameters():
                if not parameter.is_meta:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        return layer

    return build


def _project(layer, x):
    return layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)


def test_full_is_projections_around_the_operation():
    layer, x = AFTFull(D, T, causal=True), torch.randn(2, 7, D)
    nn.init.normal_(layer.position_bias)
    wanted = layer.out_proj(aft_full(*_project(layer, x), layer.position_bias[:7, :7], causal=True))
    assert torch.equal(layer(x)[0], wanted)


def test_local_simple_and_conv_are_projections_around_the_operation():
    x = torch.randn(2, 7, D)
    layer = AFTLocal(D, T, 3, bias_rank=2)
    pair = layer.position_bias_u[:7], layer.position_bias_v[:7]
    assert torch.equal(layer(x, x, x)[0], layer.out_proj(aft_local(*_project(layer, x), pair, 3)))
    simple = AFTSimple(D)
    assert torch.equal(simple(x, x, x)[0], simple.out_proj(aft_simple(*_project(simple, x))))
    conv = AFTConv1d(D, 4, 3, causal=True)
    nn.init.normal_(conv.kernel_gain)
    mixed = aft_conv(*_project(conv, x), conv.position_kernel(), causal=True)
    assert torch.equal(conv(x, x, x)[0], conv.out_proj(mixed))
    grid = torch.randn(2, 3, 5, D)
    planar = AFTConv2d(D, 2, (3, 2))
    nn.init.normal_(planar.kernel_gain)
    mixed = aft_conv(*_project(planar, grid), planar.position_kernel())
    assert torch.equal(planar(grid, grid, grid)[0], planar.out_proj(mixed))


def test_initial_values_are_the_papers():
    full = AFTFull(64, 128, bias_rank=32)
    assert 0.009 < full.position_bias_u.std() < 0.011
    assert 0.009 < full.position_bias_v.std() < 0.011
    x = torch.randn(1, 9, 64)
    for layer in (AFTConv1d(64, 8, 5), AFTFull(64, 128), AFTLocal(64, 128, 7)):
        simple = AFTSimple(64)
        simple.load_state_dict(
            {k: v for k, v in layer.state_dict().items() if "proj" in k and not k.startswith("k_proj")},
            strict=False,
        )
        weight = layer.k_proj.weight.repeat_interleave(64 // layer.k_proj.out_features, 0)
        bias = layer.k_proj.bias.repeat_interleave(64 // layer.k_proj.out_features, 0)
        simple.k_proj.load_state_dict({"weight": weight, "bias": bias})
        assert relative_error(layer(x)[0], simple(x)[0]) < 1e-6


def test_the_kernel_is_equation_8():
    layer = AFTConv1d(D, 4, 5)
    with torch.no_grad():
        layer.kernel_gain.normal_()
        layer.kernel_shift.normal_()
    for i in range(4):
        w = layer.kernel[i]
        wanted = layer.kernel_gain[i] * (w - w.mean()) / w.std(unbiased=False) + layer.kernel_shift[i]
        assert torch.allclose(layer.position_kernel()[i], wanted, atol=1e-6)


@pytest.mark.parametrize("layer", [AFTConv1d(D, 4, 1), AFTConv2d(D, 2, (1, 1))])
def test_a_kernel_of_one_cell_is_its_shift(layer):
    nn.init.ones_(layer.kernel_gain)
    nn.init.constant_(layer.kernel_shift, 0.25)
    assert (layer.position_kernel() == 0.25).all()
    layer.position_kernel().sum().backward()
    assert layer.kernel.grad.isfinite().all()


@pytest.mark.parametrize("size", [5, 6, 7, 11])
@pytest.mark.parametrize("constant", [0.1, 0.3, 1e20])
def test_a_constant_kernel_is_its_shift(size, constant):
    layer = AFTConv1d(D, 2, size)
    nn.init.constant_(layer.kernel, constant)
    nn.init.ones_(layer.kernel_gain)
    assert (layer.position_kernel() == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-30, 1e-23, 1e-4, 1.0, 1e20])
def test_the_kernel_is_equation_8_at_every_scale(scale, dtype):
    layer = AFTConv1d(D, 2, 7, dtype=dtype)
    w = (layer.kernel.detach().double() * scale).to(dtype)
    if not w.isfinite().all() or w.unique().numel() < 5:
        pytest.skip(f"{dtype} cannot hold a kernel of scale {scale}")
    layer.kernel.data = w
    nn.init.ones_(layer.kernel_gain)
    w = w.double()
    wanted = (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True, unbiased=False)
    assert relative_error(layer.position_kernel(), wanted) < 1e-6
    layer.position_kernel().square().sum().backward()
    assert layer.kernel.grad.isfinite().all()


def test_an_empty_batch(make):
    assert make()(torch.randn(0, 5, D))[0].shape == (0, 5, D)


def test_every_parameter_learns(make):
    layer = make(causal=True)
    target, x = torch.randn(4, T, D), torch.randn(4, T, D)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    assert before
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    first = None
    for _ in range(30):
        loss = (layer(x, x, x)[0] - target).square().mean()
        first = loss.item() if first is None else first
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < first
    # A shift of all keys of a channel changes nothing: the key projection's own bias has nothing to learn.
    for name, parameter in layer.named_parameters():
        assert name == "k_proj.bias" or not torch.equal(parameter, before[name]), name


def test_the_position_bias_is_one_registered_parameter():
    layer = AFTLocal(D, T, 4)
    names = [name for name, _ in layer.named_parameters() if "bias" in name and "proj" not in name]
    assert names == ["position_bias"]
    layer(torch.randn(1, T, D))[0].sum().backward()
    assert sum(p is layer.position_bias for p in layer.parameters()) == 1
    distance = (torch.arange(T)[:, None] - torch.arange(T)).abs()
    assert (layer.position_bias.grad[distance >= 4] == 0).all()
    assert (layer.position_bias.grad[distance < 4] != 0).any()


@pytest.mark.parametrize("batch_first", [False, True])
def test_the_call_of_multihead_attention(make, batch_first):
    layer = make(batch_first=batch_first)
    attention = nn.MultiheadAttention(D, 2, batch_first=batch_first)
    query, key = torch.randn(2, 5, D), torch.randn(2, 9, D)
    if not batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 7:] = True
    mask = torch.zeros(5, 9, dtype=torch.bool)
    mask[0, 3] = True
    arguments = (query, key, key, padding, True, mask)
    got, wanted = layer(*arguments), attention(*arguments)
    assert got[0].shape == wanted[0].shape
    assert got[1].shape == wanted[1].shape == (2, 5, 9)
    assert (got[1][0, :, 7:] == 0).all()
    assert (got[1][:, 0, 3] == 0).all()
    assert torch.allclose(got[1].sum(-1), torch.ones(2, 5), atol=1e-5)
    assert layer(*arguments, average_attn_weights=False)[1].shape[2:] == (5, 9)
    assert layer(query, key, key, need_weights=False)[1] is None


def test_an_unbatched_sequence(make):
    layer, x = make(causal=True), torch.randn(7, D)
    padding = torch.arange(7) > 4
    wanted = layer(x[None], x[None], x[None], padding[None])[0][0]
    assert torch.equal(layer(x, x, x, padding)[0], wanted)


def test_masks_mean_what_they_mean_in_multihead_attention(make):
    """True hides, a float mask of 0 and -inf is a boolean one, is_causal is the triangular mask."""
    layer, x = make(), torch.randn(2, T, D)
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    wanted = layer(x, x, x, attn_mask=causal)[0]
    as_float = torch.zeros(T, T).masked_fill(causal, -torch.inf)
    assert relative_error(layer(x, x, x, attn_mask=as_float)[0], wanted) < 1e-6
    assert relative_error(layer(x, x, x, attn_mask=causal.expand(2, T, T))[0], wanted) < 1e-6
    if not isinstance(layer, AFTConv1d):  # a causal kernel lies otherwise than a centred one that is masked
        assert relative_error(layer(x, x, x, is_causal=True)[0], wanted) < 1e-6
        assert relative_error(layer(x, x, x, attn_mask=causal, is_causal=True)[0], wanted) < 1e-6
    padding = torch.zeros(2, T, dtype=torch.bool)
    padding[:, 9:] = True
    hidden = layer(x, x, x, padding)[0]
    as_float = torch.zeros(2, T).masked_fill(padding, -torch.inf)
    assert torch.equal(layer(x, x, x, as_float)[0], hidden)
    changed = x.clone()
    changed[:, 9:] = torch.randn(2, 3, D)
    assert torch.equal(layer(x, changed, changed, padding)[0], hidden)


BAD_MASKS = {
    "an integer mask": (
        torch.zeros(T, T, dtype=torch.long),
        TypeError,
        "must be a bool tensor, True = hidden; got torch.int64",
    ),
    "a float mask": (torch.rand(T, T), TypeError, "other values than 0 and -inf"),
    "a float mask of large negative numbers": (
        torch.full((T, T), torch.finfo(torch.float32).min),
        TypeError,
        "other values than 0 and -inf",
    ),
    "a list": ([[True]], TypeError, "attn_mask must be a bool tensor, got list"),
    "one a head": (
        torch.zeros(8, T, T, dtype=torch.bool),
        ValueError,
        r"must be \(12, 12\) or \(2, 12, 12\) .* got \(8, 12, 12\)",
    ),
    "a wrong shape": (torch.zeros(T, T + 1, dtype=torch.bool), ValueError, r"got \(12, 13\)"),
}


@pytest.mark.parametrize("what", BAD_MASKS)
def test_a_mask_that_cannot_be_honoured_is_an_error(make, what):
    mask, kind, message = BAD_MASKS[what]
    x = torch.randn(2, T, D)
    with pytest.raises(kind, match=message):
        make()(x, x, x, attn_mask=mask)


def test_a_sequence_longer_than_the_table_is_an_error():
    for layer in (AFTFull(D, T), AFTFull(D, T, bias_rank=2), AFTLocal(D, T, 3)):
        x = torch.randn(1, T + 1, D)
        with pytest.raises(
            ValueError, match=r"reaches 12 target and 12 source positions, got a target of 13"
        ):
            layer(x)
    cross = AFTFull(D, T, max_source_len=30)
    assert cross(torch.randn(1, T, D), torch.randn(1, 30, D))[0].shape == (1, T, D)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: AFTFull(0, T), "embed_dim must be at least 1, got 0"),
        (lambda: AFTFull(D, 2.5), "max_seq_len must be an int, got float"),
        (lambda: AFTFull(D, T, bias_rank=0), "bias_rank must be at least 1, got 0"),
        (lambda: AFTLocal(D, T, 0), "window_size must be at least 1, got 0"),
        (lambda: AFTConv1d(D, 3, 5), "embed_dim must be a multiple of num_heads, got 8 and 3"),
        (lambda: AFTConv1d(D, 4, (3, 3)), "kernel_size must be 1 ints"),
        (lambda: AFTConv2d(D, 4, 0), "kernel_size must be at least 1, got 0"),
        (lambda: AFTConv1d(D, 4, 2.5), "kernel_size must be an int, got float"),
        (lambda: AFTConv2d(D, 4, 3, batch_first=False), "batch_first=False has no meaning for a grid"),
        (lambda: AFTFull(D, T, num_heads=4), "unexpected keyword argument|multiple values"),
        (
            lambda: AFTSimple(D, impl="fast"),
            "impl must be one of 'auto', 'reference', 'eager', 'native', got 'fast'",
        ),
        (lambda: AFTSimple(D, kdim=0), "kdim must be at least 1, got 0"),
        (
            lambda: AFTSimple(D)(torch.randn(1, T, D), attn_mask=torch.zeros(99), is_causal=True),
            r"attn_mask must be \(12, 12\) or \(1, 12, 12\)",
        ),
        (
            lambda: AFTSimple(D)(torch.randn(2, 3, 5)),
            r"query must be \[B, T, 8\] or \[T, 8\], got \(2, 3, 5\)",
        ),
        (lambda: AFTSimple(D)(torch.randn(3)), r"query must be"),
        (lambda: AFTConv2d(D, 4, 3)(torch.randn(2, D)), r"query must be \[B, Y, X, 8\]"),
    ],
)
def test_bad_arguments_are_named(build, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build()


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_inside_a_transformer_encoder(make, batch_first, norm_first):
    """Trains and evaluates, where the encoder's fused path would read projections that AFT has not."""
    layer = nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=batch_first, norm_first=norm_first)
    layer.self_attn = make(batch_first=batch_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(3, T, D)
    x = x if batch_first else x.transpose(0, 1)
    padding = torch.zeros(3, T, dtype=torch.bool)
    padding[1, 8:] = True
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    for options in (
        {},
        {"src_key_padding_mask": padding},
        {"mask": causal},
        {"mask": causal, "is_causal": True},
    ):
        encoder.train()
        trained = encoder(x, **options)
        trained.square().sum().backward()
        encoder.eval()
        with torch.inference_mode():
            evaluated = encoder(x, **options)
        assert relative_error(evaluated, trained.detach()) < 1e-6
    first, second = (layer.self_attn for layer in encoder.layers)
    assert all(p.grad is not None for p in first.parameters())
    assert first.v_proj.weight is not second.v_proj.weight


def test_put_into_an_encoder_that_packs_padded_sequences(make):
    """``nn.TransformerEncoder`` chose nested tensors when it was built, around another attention."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True), 2)
    for layer in encoder.layers:
        layer.self_attn = make()
    x = torch.randn(3, T, D)
    padding = torch.zeros(3, T, dtype=torch.bool)
    padding[0, 9:] = True
    wanted = encoder(x, src_key_padding_mask=padding).detach().masked_fill(padding[..., None], 0.0)
    encoder.eval()
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nested tensors are a prototype
        got = encoder(x, src_key_padding_mask=padding)
    assert relative_error(got, wanted) < 1e-6


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_sequences_are_each_their_own(make):
    layer, lengths = make(), (5, T, 1)
    sequences = [torch.randn(n, D) for n in lengths]
    nested = torch.nested.as_nested_tensor(sequences)
    for is_causal in (False, True):
        got = layer(nested, nested, nested, is_causal=is_causal)[0].unbind()
        for x, y in zip(sequences, got, strict=True):
            assert relative_error(y, layer(x, x, x, is_causal=is_causal)[0]) < 1e-5
    mask = torch.zeros(T, T, dtype=torch.bool)
    for options in ({"attn_mask": mask}, {"need_weights": True}, {"key": torch.randn(3, T, D)}):
        with pytest.raises(ValueError, match="a nested query is taken batch first"):
            layer(nested, **options)


def test_inside_a_transformer_decoder(make):
    layer = nn.TransformerDecoderLayer(D, 2, 16, 0.0, batch_first=True)
    layer.self_attn, layer.multihead_attn = make(), make()
    decoder = nn.TransformerDecoder(layer, 2)
    x, memory = torch.randn(2, 7, D), torch.randn(2, 11, D)
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    trained = decoder(x, memory, tgt_mask=causal, tgt_is_causal=True)
    trained.sum().backward()
    decoder.eval()
    with torch.no_grad():
        assert relative_error(decoder(x, memory, tgt_mask=causal, tgt_is_causal=True), trained) < 1e-6
        changed = x.clone()
        changed[:, 5:] += 1
        again = decoder(changed, memory, tgt_mask=causal, tgt_is_causal=True)
        assert relative_error(again[:, :5], trained[:, :5]) < 1e-6


def test_modules_travel(make):
    """deepcopy, pickle, state_dict, dtype and construction without memory."""
    layer, x = make(causal=True), torch.randn(2, T, D)
    wanted = layer(x)[0]
    assert torch.equal(copy.deepcopy(layer)(x)[0], wanted)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x)[0], wanted)
    other = make(causal=True)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x)[0], wanted)

    double = copy.deepcopy(layer).to(torch.float64)
    assert relative_error(wanted, double(x.double())[0]) < 1e-5
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half(x.bfloat16())[0].dtype == torch.bfloat16

    empty = make(causal=True, device="meta")
    assert all(p.is_meta for p in empty.parameters())
    empty.to_empty(device="cpu")
    empty.reset_parameters()
    assert all(p.isfinite().all() for p in empty.parameters())
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty(x)[0], wanted)


def test_autocast_and_compile(make):
    layer, x = make(causal=True), torch.randn(2, T, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)[0]
    assert relative_error(y, layer(x)[0]) < 2e-2
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    padding = torch.zeros(2, T)
    padding[0, 3] = -torch.inf
    assert relative_error(compiled(x, x, x, padding)[0], layer(x, x, x, padding)[0]) < 1e-6
    with torch.no_grad():
        assert relative_error(compiled(x)[0], layer(x)[0]) < 1e-6


def test_gates_and_activations(make):
    x = torch.randn(2, T, D)
    ungated = make(query_gate=None)
    assert ungated.q_proj is None
    assert ungated(x)[0].shape == x.shape
    bounded = make(key_activation=torch.tanh, query_gate=torch.tanh)
    k = []
    bounded.k_proj.register_forward_hook(lambda *args: k.append(args[2]))
    assert bounded(x)[0].shape == x.shape
    bounded.eval()
    assert torch.equal(bounded(x)[0], bounded.train()(x)[0])
    plain = copy.deepcopy(bounded)
    plain.key_activation = None
    assert not torch.equal(plain(x)[0], bounded(x)[0])


def test_other_channels_for_keys_and_values(make):
    layer = make(kdim=5, vdim=6, bias=False)
    y, _ = layer(torch.randn(2, 7, D), torch.randn(2, 9, 5), torch.randn(2, 9, 6))
    assert y.shape == (2, 7, D)
    assert all("bias" not in name or "position" in name for name, _ in layer.named_parameters())


def test_a_grid_of_any_size():
    layer = AFTConv2d(D, 4, 7)
    for shape in ((14, 14), (3, 20), (1, 1)):
        x = torch.randn(2, *shape, D)
        mask = torch.zeros(2, *shape, dtype=torch.bool)
        mask[0, 0] = shape[0] > 1
        assert layer(x, x, x, mask)[0].shape == x.shape
        assert layer(x, need_weights=True)[1].shape == (2, shape[0] * shape[1], shape[0] * shape[1])
