"""The image classifiers as users of Transformers know them, and as the paper counts them."""

import pytest
import torch

from operations import relative_error

pytest.importorskip("transformers", reason="needs the extra `models`")

from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

from aft.layers import AFTFull, AFTLocal, AFTSimple
from aft.layers.resampling import resample_position_bias, resample_positions
from aft.models import MIXERS, AFTForImageClassification, AFTImageConfig, AFTImageModel

SETTINGS = {
    "image_size": [24, 16],
    "patch_size": 4,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "kernel_size": 3,
    "window_size": 5,
    "bias_rank": 3,
    "num_labels": 7,
}


def build(mixer, **options):
    model = AFTForImageClassification(AFTImageConfig(**SETTINGS | options, mixer=mixer)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.fixture(params=MIXERS)
def model(request):
    return build(request.param)


def images(B=2, H=24, W=16):
    return torch.randn(B, 3, H, W)


TINY, SMALL = {"hidden_size": 192}, {"hidden_size": 384}

# reference/paper.md gives thousands; the integers are those of its formula (test below derives them anew).
COUNTS = [
    (6_323, {"mixer": "full", **TINY}),
    (22_656, {"mixer": "full", **SMALL}),
    (5_356, {"num_attention_heads": 32, **TINY}),
    (5_963, {"num_attention_heads": 192, **TINY}),
    (20_298, {"num_attention_heads": 16, **SMALL}),
    (22_541, {"num_attention_heads": 384, **SMALL}),
    (23_021, {"num_attention_heads": 384, "kernel_size": 15, **SMALL}),
]


def counted(d, mixer="conv", heads=0, cells=121):
    """Parameters of the paper's models at 224 pixels, patch 16 and 1,000 classes, by hand."""
    patches, around = 3 * 16 * 16 * d + d, 2 * d + (d * 1000 + 1000)
    mlp_and_norms = 8 * d * d + 5 * d + 4 * d
    projection = d * d + d
    match mixer:
        case "conv":
            layer = 3 * projection + (d * heads + heads) + heads * cells + 2 * heads
            return patches + around + 12 * (mlp_and_norms + layer)
        case "full":
            layer = 4 * projection + 2 * 197 * 128
        case "attention":
            layer = 4 * projection
    return patches + 198 * d + around + 12 * (mlp_and_norms + layer)


@pytest.mark.parametrize(("thousands", "options"), COUNTS)
def test_as_many_parameters_as_the_paper(thousands, options):
    with torch.device("meta"):
        config = AFTImageConfig(num_labels=1000, **options)
        found = AFTForImageClassification(config).num_parameters()
    by_hand = counted(config.hidden_size, config.mixer, config.num_attention_heads, config.kernel_size**2)
    assert found == by_hand
    assert round(found / 1000) == thousands


def test_attention_is_deit_tiny():
    with torch.device("meta"):
        config = AFTImageConfig(mixer="attention", num_attention_heads=3, num_labels=1000)
        assert AFTForImageClassification(config).num_parameters() == counted(192, "attention") == 5_717_416


def test_attention_computes_what_timm_s_deit_does():
    timm = pytest.importorskip("timm", reason="needs the extra `images`")
    ours = build("attention", image_size=24)
    theirs = timm.models.VisionTransformer(
        img_size=24, patch_size=4, embed_dim=16, depth=2, num_heads=4, num_classes=7
    ).eval()
    state, d = ours.state_dict(), {}
    d["cls_token"] = state["model.class_token"][None]
    d["pos_embed"] = state["model.position_embedding"][None]
    for ending in ("weight", "bias"):
        d[f"patch_embed.proj.{ending}"] = state[f"model.patch_embed.{ending}"]
        d[f"norm.{ending}"] = state[f"model.norm.{ending}"]
        d[f"head.{ending}"] = state[f"classifier.{ending}"]
        for i in range(2):
            layer = f"model.layers.{i}"
            d[f"blocks.{i}.attn.qkv.{ending}"] = torch.cat(
                [state[f"{layer}.mixer.{x}_proj.{ending}"] for x in "qkv"]
            )
            d[f"blocks.{i}.attn.proj.{ending}"] = state[f"{layer}.mixer.out_proj.{ending}"]
            d[f"blocks.{i}.norm1.{ending}"] = state[f"{layer}.mixer_norm.{ending}"]
            d[f"blocks.{i}.norm2.{ending}"] = state[f"{layer}.mlp_norm.{ending}"]
            d[f"blocks.{i}.mlp.fc1.{ending}"] = state[f"{layer}.mlp_in.{ending}"]
            d[f"blocks.{i}.mlp.fc2.{ending}"] = state[f"{layer}.mlp_out.{ending}"]
    theirs.load_state_dict(d)
    x = images(H=24, W=24)
    assert relative_error(ours(x).logits, theirs(x)) < 1e-5


def test_conv_starts_as_simple():
    options = {"num_attention_heads": 16, "class_token": False, "position_embedding": False}
    conv = AFTForImageClassification(AFTImageConfig(**SETTINGS | options, mixer="conv")).eval()
    simple = AFTForImageClassification(AFTImageConfig(**SETTINGS | options, mixer="simple")).eval()
    fit = simple.load_state_dict(conv.state_dict(), strict=False)
    assert not fit.missing_keys
    assert {name.split(".")[-1] for name in fit.unexpected_keys} == {"kernel", "kernel_gain", "kernel_shift"}
    x = images()
    assert relative_error(conv(x).logits, simple(x).logits) < 1e-5


def test_every_parameter_learns(model):
    model.train()
    model(images(), labels=torch.tensor([1, 6])).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters())


def test_labels_are_classes_or_probabilities(model):
    x, classes = images(), torch.tensor([1, 6])
    hard = model(x, labels=classes).loss
    soft = model(x, labels=torch.nn.functional.one_hot(classes, 7).float()).loss
    assert torch.allclose(hard, soft)
    assert torch.allclose(hard, torch.nn.functional.cross_entropy(model(x).logits, classes))


def test_the_outputs_of_a_transformers_model(model):
    outputs = model(images(), output_hidden_states=True)
    T = 24 + int(model.config.class_token)
    assert [tuple(state.shape) for state in outputs.hidden_states] == [(2, T, 16)] * 3
    pooled = outputs.hidden_states[-1]
    pooled = pooled[:, 0] if model.config.class_token else pooled.mean(1)
    assert torch.equal(model.classifier(pooled), outputs.logits)
    assert torch.equal(model(images(), return_dict=False)[0].isfinite(), torch.ones(2, 7, dtype=torch.bool))


def test_saved_and_found_by_the_auto_classes(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), AFTImageConfig)
    again = AutoModelForImageClassification.from_pretrained(tmp_path)
    x = images()
    assert torch.equal(again(x).logits, model(x).logits)
    assert isinstance(AutoModel.from_pretrained(tmp_path), AFTImageModel)


def test_initial_values_are_those_of_random_weights_and_of_missing_ones(tmp_path):
    """What `from_pretrained` must initialise itself starts as in a new model: the head, here."""
    model = build("conv")
    model.save_pretrained(tmp_path)
    again = AutoModelForImageClassification.from_pretrained(
        tmp_path, num_labels=3, ignore_mismatched_sizes=True
    )
    assert again.classifier.weight.shape == (3, 16)
    assert 0 < again.classifier.weight.std() < 0.04
    assert torch.equal(again.model.norm.weight, model.model.norm.weight)


@pytest.mark.parametrize("size", [(24, 16), (40, 20), (8, 52), (4, 4), (30, 23), (12, 64)])
def test_any_image_size_goes_into_conv(size):
    model = build("conv", kernel_size=11)
    x = images(H=size[0], W=size[1])
    logits = model(x).logits
    assert logits.shape == (2, 7)
    whole = x[..., : size[0] // 4 * 4, : size[1] // 4 * 4]
    assert torch.equal(model(whole).logits, logits)
    assert torch.equal(model(x, interpolate_pos_encoding=True).logits, logits)


@pytest.mark.parametrize("mixer", ["full", "attention", "simple"])
@pytest.mark.parametrize("rank", [None, 3])
def test_another_image_size_is_resampled_when_asked(mixer, rank):
    model, x = build(mixer, bias_rank=rank), images(H=32, W=12)
    with pytest.raises(ValueError, match=r"8 x 3 patches.*6 x 4.*interpolate_pos_encoding"):
        model(x)
    assert model(x, interpolate_pos_encoding=True).logits.shape == (2, 7)
    same = images()
    assert torch.equal(model(same, interpolate_pos_encoding=True).logits, model(same).logits)


def test_resampled_forward_is_that_of_a_model_built_for_the_size():
    model = build("full")
    other = AFTForImageClassification(
        AFTImageConfig(**SETTINGS | {"image_size": [32, 12]}, mixer="full")
    ).eval()
    state = model.state_dict()
    old, new = (6, 4), (8, 3)
    state["model.position_embedding"] = resample_positions(state["model.position_embedding"], old, new, 1)
    for i, layer in enumerate(model.model.layers):
        for name, bias in resample_position_bias(layer.mixer, old, new, 1).items():
            state[f"model.layers.{i}.mixer.{name}"] = bias
    other.load_state_dict(state)
    x = images(H=32, W=12)
    assert relative_error(model(x, interpolate_pos_encoding=True).logits, other(x).logits) < 1e-6


def test_local_refuses_another_grid():
    with pytest.raises(ValueError, match=r"AFTLocal: its window .* 6 x 4 to one of 8 x 3"):
        build("local")(images(H=32, W=12), interpolate_pos_encoding=True)


@pytest.mark.parametrize("prefix", [0, 1])
def test_a_product_is_resampled_as_its_factors(prefix):
    n = prefix + 24
    pair, table = AFTFull(8, n, bias_rank=3).double(), AFTFull(8, n).double()
    torch.nn.init.normal_(pair.position_bias_u)
    torch.nn.init.normal_(pair.position_bias_v)
    table.position_bias.data = pair.position_bias_u @ pair.position_bias_v.T
    factors = resample_position_bias(pair, (6, 4), (8, 9), prefix)
    whole = resample_position_bias(table, (6, 4), (8, 9), prefix)["position_bias"]
    assert relative_error(factors["position_bias_u"] @ factors["position_bias_v"].T, whole) < 1e-5


def test_resampling_keeps_constants_prefix_and_gradients():
    rows = torch.cat([torch.tensor([[5.0, -1.0]]), torch.full((24, 2), 3.0)]).requires_grad_()
    out = resample_positions(rows, (6, 4), (3, 7), 1)
    assert torch.equal(out[0], rows[0])
    assert torch.allclose(out[1:], torch.full((21, 2), 3.0))
    out.sum().backward()
    assert rows.grad.abs().min() > 0


def test_resampling_follows_timm_s_rule():
    layers = pytest.importorskip("timm.layers", reason="needs the extra `images`")
    rows = torch.randn(25, 5)
    theirs = layers.resample_abs_pos_embed(rows[None], [9, 3], [6, 4], num_prefix_tokens=1)[0]
    assert torch.allclose(resample_positions(rows, (6, 4), (9, 3), 1), theirs, atol=1e-6)


def test_stochastic_depth_skips_whole_samples_and_keeps_the_mean():
    model = build("simple", drop_path_rate=0.5, num_hidden_layers=2).train()
    first, last = model.model.layers
    assert (first.drop_path, last.drop_path) == (0.0, 0.5)
    kept = last._kept(torch.ones(4000, 3, 2))
    per_sample = kept.flatten(1)
    assert set(per_sample.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(per_sample.amin(1), per_sample.amax(1))
    assert abs(float(kept.mean()) - 1) < 0.1
    assert torch.equal(last.eval()._kept(kept), kept)


def test_gradient_checkpointing_changes_nothing(model):
    x, y = images(), torch.tensor([0, 3])
    model.train()
    model(x, labels=y).loss.backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.activation_checkpointing_enable()
    model(x, labels=y).loss.backward()
    assert all(relative_error(p.grad, plain[name]) < 1e-5 for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixer": "conv", "class_token": True}, "class_token must be False for mixer"),
        ({"mixer": "none"}, "mixer must be one of full, simple, local, conv, attention; got 'none'"),
        ({"image_size": 3}, "image_size must be at least patch_size = 4"),
        ({"image_size": [8, 8, 3]}, r"image_size must be a number or \[height, width\]"),
        ({"num_attention_heads": 5}, "hidden_size must be a multiple of num_attention_heads, got 16 and 5"),
        ({"hidden_act": "jelu"}, "hidden_act must be one of .* got 'jelu'"),
        ({"drop_path_rate": 1.0}, "drop_path_rate must be a probability"),
        ({"bias_rank": 0}, "bias_rank must be at least 1"),
    ],
)
def test_a_wrong_configuration_names_its_field(options, message):
    with pytest.raises(Exception, match=message):
        AFTImageConfig(**SETTINGS | {"mixer": "conv"} | options)


@pytest.mark.parametrize("shape", [(3, 24, 16), (2, 1, 24, 16), (2, 3, 24, 3)])
def test_wrong_images_are_named(shape):
    with pytest.raises(ValueError, match="pixel_values"):
        build("conv")(torch.randn(shape))


def test_the_mixers_are_the_layers_of_this_package():
    kinds = {"full": AFTFull, "simple": AFTSimple, "local": AFTLocal}
    for mixer, kind in kinds.items():
        assert type(build(mixer).model.layers[0].mixer) is kind
