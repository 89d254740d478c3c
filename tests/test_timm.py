"""The models that timm creates, held to what timm's own tests expect of a ViT."""

import copy
import io
import math

import pytest
import timm
import torch
from timm.models import create_feature_extractor, get_model_traits
from timm.models._hub import save_for_hf
from timm.optim import param_groups_layer_decay, param_groups_weight_decay

import aft.integrations.timm
from aft.integrations.timm import AFTAttention, AFTVisionTransformer, aft_attention
from aft.models import AFTForImageClassification, AFTImageConfig

NAMES = {
    "aft_full_tiny_patch16_224",
    "aft_full_small_patch16_224",
    "aft_conv_tiny_k11_h32_patch16_224",
    "aft_conv_tiny_k11_h192_patch16_224",
    "aft_conv_small_k11_h16_patch16_224",
    "aft_conv_small_k11_h384_patch16_224",
    "aft_conv_small_k15_h384_patch16_224",
    "aft_conv_base_k25_h32_patch16_384",
}
CONV, FULL = "aft_conv_tiny_k11_h32_patch16_224", "aft_full_tiny_patch16_224"
SMALL = {"depth": 3, "embed_dim": 32, "num_heads": 4, "patch_size": 8, "img_size": 32, "num_classes": 42}


def small(name, **options):
    """A registered model of 3 blocks of 32 channels on 4 x 4 patches."""
    return timm.create_model(name, **{**SMALL, **options})


def positional(model, scale=1.0):
    """The model with position biases that matter: at the start they are (nearly) none."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("position_bias", "position_bias_u", "position_bias_v", "kernel_gain")):
                parameter.normal_(std=scale)
    return model


@pytest.fixture(params=[CONV, FULL], ids=["conv", "full"])
def name(request):
    return request.param


# Registry and sizes


def test_the_models_of_the_paper_are_listed():
    assert set(timm.list_models("aft_*")) == NAMES
    assert timm.list_models("aft_*", pretrained=True) == []


def vit_parameters(d, layers=12, classes=1000):
    """A ViT with 16 x 16 patches without class token, position embedding and token mixers."""
    block = 2 * 2 * d + (4 * d * d + 4 * d) + (4 * d * d + d)
    return (3 * 16 * 16 * d + d) + layers * block + 2 * d + (d * classes + classes)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("aft_conv_tiny_k11_h32_patch16_224", 5.356),
        ("aft_conv_tiny_k11_h192_patch16_224", 5.963),
        ("aft_conv_small_k11_h16_patch16_224", 20.298),
        ("aft_conv_small_k11_h384_patch16_224", 22.541),
        ("aft_conv_small_k15_h384_patch16_224", 23.021),
    ],
)
def test_conv_has_exactly_the_parameters_of_the_paper(name, millions):
    size, kernel, heads = name.split("_")[2:5]
    d, k, h = {"tiny": 192, "small": 384}[size], int(kernel[1:]), int(heads[1:])
    mixer = 3 * (d * d + d) + (d * h + h) + h * k * k + 2 * h
    count = sum(p.numel() for p in timm.create_model(name, device="meta").parameters())
    assert count == vit_parameters(d) + 12 * mixer
    assert round(count / 1e6, 3) == millions


@pytest.mark.parametrize(("size", "d", "millions"), [("tiny", 192, 6.323), ("small", 384, 22.656)])
def test_full_has_exactly_the_parameters_of_the_paper(size, d, millions):
    tokens = 14 * 14 + 1
    mixer = 4 * (d * d + d) + 2 * tokens * 128
    model = timm.create_model(f"aft_full_{size}_patch16_224", device="meta")
    count = sum(p.numel() for p in model.parameters())
    assert count == vit_parameters(d) + 12 * mixer + d + tokens * d
    assert round(count / 1e6, 3) == millions


@pytest.mark.parametrize("name", sorted(NAMES))
def test_models_have_the_parameters_of_their_native_twins(name):
    model = timm.create_model(name, device="meta")
    attention = model.blocks[0].attn
    conv = {}
    if attention.mixer_name == "conv":
        conv = {
            "num_attention_heads": attention.mixer.num_heads,
            "kernel_size": attention.mixer.kernel_size[0],
        }
    config = AFTImageConfig(
        image_size=model.patch_embed.img_size[0],
        hidden_size=model.embed_dim,
        mixer=attention.mixer_name,
        num_labels=1000,
        **conv,
    )
    with torch.device("meta"):
        native = AFTForImageClassification(config)
    counts = [sum(p.numel() for p in m.parameters()) for m in (model, native)]
    assert counts[0] == counts[1]


def test_the_baseline_that_the_paper_compares_with():
    count = sum(p.numel() for p in timm.create_model("deit_tiny_patch16_224", device="meta").parameters())
    assert count == 5_717_416 == vit_parameters(192) + 12 * 4 * (192 * 192 + 192) + 192 + 197 * 192


def test_no_weights_are_on_any_hub():
    with pytest.raises(RuntimeError, match="No pretrained weights exist"):
        timm.create_model(CONV, pretrained=True)


def test_default_configuration(name):
    model = small(name)
    cfg = model.default_cfg
    assert cfg["architecture"] == name
    assert (cfg["input_size"], cfg["num_classes"], cfg["crop_pct"]) == ((3, 224, 224), 1000, 0.9)
    assert cfg["fixed_input_size"] == (name == FULL)
    assert cfg["mean"] == timm.data.IMAGENET_DEFAULT_MEAN
    state = model.state_dict()
    assert cfg["classifier"] + ".weight" in state
    assert cfg["first_conv"] + ".weight" in state
    assert timm.data.resolve_data_config(model=model)["interpolation"] == "bicubic"


# What timm expects of a ViT


def test_forward_and_backward_reach_every_parameter(name):
    model = positional(small(name)).train()
    outputs = model(torch.randn(2, 3, 32, 32))
    assert outputs.shape == (2, 42)
    outputs.square().mean().backward()
    unreached = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # A key bias shifts all keys alike, which changes no weight; kernels are cut to the grid.
    assert all(n.endswith("k_proj.bias") for n in unreached), unreached


def test_features_head_and_classifier(name):
    model = small(name).eval()
    images = torch.randn(2, 3, 32, 32)
    tokens = model.forward_features(images)
    assert tokens.shape == (2, 16 + (name == FULL), 32)
    assert model.forward_head(tokens).shape == (2, 42)
    pooled = model.forward_head(tokens, pre_logits=True)
    torch.testing.assert_close(pooled, tokens.mean(1) if name == CONV else tokens[:, 0])
    assert model.get_classifier() is model.head

    model.reset_classifier(7)
    assert model(images).shape == (2, 7)
    model.reset_classifier(0)
    torch.testing.assert_close(model(images), pooled)
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(images), tokens)
    model.reset_classifier(5, "max")
    assert model(images).shape == (2, 5)

    headless = small(name, num_classes=0)
    assert headless(images).shape == (2, headless.num_features)
    unpooled = small(name, num_classes=0, global_pool="")
    assert unpooled(images).shape == tokens.shape


@pytest.mark.parametrize("pool", ["avg", "max", "avgmax", "map"])
def test_poolings(name, pool):
    assert small(name, global_pool=pool)(torch.randn(2, 3, 32, 32)).shape == (2, 42)


def test_input_channels(name):
    model = small(name, in_chans=1)
    assert model.patch_embed.proj.weight.shape == (32, 1, 8, 8)
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 42)


def test_images_that_are_not_square(name):
    model = positional(small(name, img_size=(24, 40)).eval())
    images = torch.randn(2, 3, 24, 40)
    assert model(images).shape == (2, 42)
    _, intermediates = model.forward_intermediates(images)
    assert all(y.shape == (2, 32, 3, 5) for y in intermediates)


def test_features_only(name):
    model = small(name, features_only=True, out_indices=(0, 2)).eval()
    assert model.feature_info.channels() == [32, 32]
    assert model.feature_info.reduction() == [8, 8]
    assert [y.shape for y in model(torch.randn(2, 3, 32, 32))] == [(2, 32, 4, 4)] * 2


def test_intermediates_in_every_form(name):
    model = positional(small(name)).eval()
    images = torch.randn(2, 3, 32, 32)
    tokens = model.forward_features(images)
    final, grids = model.forward_intermediates(images)
    torch.testing.assert_close(final, tokens)
    assert [y.shape for y in grids] == [(2, 32, 4, 4)] * 3

    flat = model.forward_intermediates(images, output_fmt="NLC", intermediates_only=True)
    for grid, sequence in zip(grids, flat, strict=True):
        torch.testing.assert_close(grid.flatten(2).transpose(1, 2), sequence)
    (last,) = model.forward_intermediates(images, [-1], norm=True, output_fmt="NLC", intermediates_only=True)
    torch.testing.assert_close(last, tokens[:, model.num_prefix_tokens :])

    named = model.forward_intermediates(images, 1, output_dict=True, output_fmt="NLC")
    torch.testing.assert_close(named["image_features"], tokens)
    torch.testing.assert_close(named["image_intermediates"][0], flat[-1])
    assert len(model.forward_intermediates(images, [0], stop_early=True, intermediates_only=True)) == 1


def test_gradient_checkpointing_changes_no_gradient(name):
    model = positional(small(name)).train()
    images = torch.randn(2, 3, 32, 32)
    model(images).square().sum().backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model.set_grad_checkpointing(True)
    assert model.grad_checkpointing
    model(images).square().sum().backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, plain[n], msg=n)


def test_compiles(name):
    model = positional(small(name, depth=1)).eval()
    images = torch.randn(2, 3, 32, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), model(images))


def test_features_through_a_traced_graph(name):
    model = positional(small(name)).eval()
    images = torch.randn(2, 3, 32, 32)
    graph = create_feature_extractor(model, ["blocks.1.attn", "head"])
    outputs = graph(images)
    assert outputs["blocks.1.attn"].shape[-1] == 32
    torch.testing.assert_close(outputs["head"], model(images))
    outputs["head"].sum().backward()
    assert all(p.grad is not None for p in graph.parameters())


def test_exports(name):
    model = positional(small(name, depth=1)).eval()
    images = torch.randn(2, 3, 32, 32)
    exported = torch.export.export(model, (images,)).module()
    torch.testing.assert_close(exported(images), model(images))


def test_weight_decay_spares_positions_and_kernels(name):
    model = small(name)
    spared = model.no_weight_decay()
    assert {"pos_embed", "cls_token"} <= spared
    groups = param_groups_weight_decay(model, 0.1, no_weight_decay_list=spared)
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    names = {n for n, p in model.named_parameters() if id(p) in decayed}
    assert "blocks.0.attn.mixer.v_proj.weight" in names
    assert not [n for n in names if "position_bias" in n or "kernel" in n or n in ("pos_embed", "cls_token")]


def test_layers_are_grouped_for_layer_decay(name):
    model = small(name)
    depth = timm.models.group_parameters(model, model.group_matcher(), reverse=True)
    assert set(depth) == {n for n, _ in model.named_parameters()}
    assert depth["patch_embed.proj.weight"] == 0
    assert depth["blocks.0.attn.mixer.v_proj.weight"] == 1
    assert depth["blocks.2.mlp.fc1.weight"] == 3
    assert depth["head.weight"] > depth["norm.weight"] == 3
    groups = param_groups_layer_decay(model, layer_decay=0.5)
    assert {g["lr_scale"] for g in groups} >= {0.5**k for k in range(3)}


def test_stochastic_depth_and_dropout_act_while_training_only(name):
    model = small(name, drop_path_rate=0.5, proj_drop_rate=0.3, drop_rate=0.1)
    images = torch.randn(8, 3, 32, 32)
    model.eval()
    torch.testing.assert_close(model(images), model(images), rtol=0, atol=0)
    model.train()
    assert not torch.allclose(model(images), model(images))


def test_half_precision(name):
    model = positional(small(name)).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        half = model(images)
    assert torch.isfinite(half).all()
    torch.testing.assert_close(half.float(), model(images), rtol=0.1, atol=0.1)
    assert small(name, dtype=torch.bfloat16)(images.bfloat16()).dtype == torch.bfloat16


# Initial values


@pytest.mark.parametrize("mode", ["", "jax", "moco", "reset"])
def test_initial_values_survive_timm(mode):
    model = small(CONV, weight_init="" if mode == "reset" else mode)
    for again in (False, True):
        if again:
            model.init_weights(mode)
        for block in model.blocks:
            mixer = block.attn.mixer
            assert not mixer.kernel_gain.any()
            assert not mixer.kernel_shift.any()
            # "reset" leaves every module to its own initial values.
            scale = 1.0 if again and mode == "reset" else 0.02
            assert mixer.kernel.std().item() == pytest.approx(scale, rel=0.1)
            assert not mixer.v_proj.bias.any()
            if not mode:
                assert mixer.v_proj.weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_initial_values_of_the_bias_survive_timm():
    model = small(FULL)
    for again in (False, True):
        if again:
            positional(model).init_weights()
        for block in model.blocks:
            assert block.attn.mixer.position_bias_u.std().item() == pytest.approx(0.01, rel=0.2)
            assert block.attn.mixer.v_proj.weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_conv_starts_as_simple():
    conv = small(CONV, num_heads=32).eval()  # as many key channels as AFT-simple
    simple = small(
        FULL, mixer="simple", class_token=False, pos_embed="none", global_pool="avg", fc_norm=False
    )
    weights = {n: w for n, w in conv.state_dict().items() if "kernel" not in n}
    simple.eval().load_state_dict(weights)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(conv(images), simple(images))
    assert not torch.allclose(positional(conv)(images), simple(images), atol=1e-4)


# Sizes


@pytest.mark.parametrize("size", [(8, 8), (16, 48), (56, 24), (64, 64)])
def test_conv_takes_any_size_and_agrees_with_a_model_built_for_it(size):
    model = positional(small(CONV, kernel_size=5)).eval()
    other = small(CONV, kernel_size=5, img_size=size).eval()
    other.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, *size)
    torch.testing.assert_close(model(images), other(images))


@pytest.mark.parametrize("fixed", [True, False])
def test_conv_sees_where_patches_lie(fixed):
    model = small(CONV, img_size=(24, 40), dynamic_img_size=not fixed).eval()
    grids = []
    model.blocks[0].attn.mixer.register_forward_pre_hook(lambda _, inputs: grids.append(inputs[0]))
    images = torch.randn(2, 3, 24, 40)
    model(images)
    patches = model.patch_embed.proj(images).permute(0, 2, 3, 1)
    assert patches.shape == (2, 3, 5, 32)
    torch.testing.assert_close(grids[0], model.blocks[0].norm1(patches))


def test_conv_pads_where_asked():
    model = small(CONV, dynamic_img_pad=True).eval()
    padded = torch.zeros(1, 3, 32, 40)
    padded[..., :30, :33] = images = torch.randn(1, 3, 30, 33)
    torch.testing.assert_close(model(images), model(padded))
    with pytest.raises(AssertionError, match="divisible"):
        small(CONV)(images)


def test_conv_of_a_fixed_size():
    fixed = small(CONV, dynamic_img_size=False, img_size=(24, 40)).eval()
    free = small(CONV).eval()
    free.load_state_dict(positional(fixed).state_dict())
    images = torch.randn(1, 3, 24, 40)
    torch.testing.assert_close(fixed(images), free(images))
    with pytest.raises(AssertionError, match="doesn't match"):
        fixed(torch.randn(1, 3, 40, 24))


def smooth(model):
    """Position biases of full that change slowly over the grid: the sum of row and column."""
    Y, X = model.patch_embed.grid_size
    rows = torch.linspace(-1, 1, 2 * Y + 1)[1::2].repeat_interleave(X)
    columns = torch.linspace(-1, 1, 2 * X + 1)[1::2].repeat(Y)
    with torch.no_grad():
        for block in model.blocks:
            for name in ("position_bias_u", "position_bias_v"):
                bias = getattr(block.attn.mixer, name)
                bias[1:] = (rows + columns)[:, None]
                bias[0] = 7.0
    return model


@pytest.mark.parametrize("rank", [4, 0])
def test_full_is_resampled_to_another_size(rank):
    model = small(FULL, bias_rank=rank).eval()
    if rank:
        smooth(model)
    model.set_input_size((64, 48))
    assert model.pos_embed.shape == (1, 1 + 8 * 6, 32)
    mixer = model.blocks[0].attn.mixer
    assert mixer.max_seq_len == 49
    if rank:
        assert mixer.position_bias_u.shape == (49, 4)
        expected = smooth(small(FULL, bias_rank=rank, img_size=(64, 48))).blocks[0].attn.mixer
        assert (mixer.position_bias_u[0] == 7.0).all()
        inner = expected.position_bias_u[1:].view(8, 6, 4)[2:-2, 2:-2]
        torch.testing.assert_close(
            mixer.position_bias_u[1:].view(8, 6, 4)[2:-2, 2:-2], inner, atol=0.1, rtol=0
        )
    else:
        assert mixer.position_bias.shape == (49, 49)
    outputs = model(torch.randn(2, 3, 64, 48))
    outputs.sum().backward()
    assert all(p.grad is not None for p in mixer.parameters())


def test_a_pair_and_its_table_are_resampled_alike():
    model = positional(small(FULL, bias_rank=4))
    table = small(FULL, bias_rank=0)
    weights = {n: w for n, w in model.state_dict().items() if "position_bias" not in n}
    for i, block in enumerate(model.blocks):
        mixer = block.attn.mixer
        weights[f"blocks.{i}.attn.mixer.position_bias"] = mixer.position_bias_u @ mixer.position_bias_v.T
    table.load_state_dict(weights)
    for m in (model.eval(), table.eval()):
        m.set_input_size((48, 24))
    images = torch.randn(2, 3, 48, 24)
    torch.testing.assert_close(model(images), table(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [4, 0])
def test_a_checkpoint_of_another_size_is_resampled_as_set_input_size_does(rank, tmp_path):
    model = positional(small(FULL, bias_rank=rank)).eval()
    torch.save(model.state_dict(), tmp_path / "model.pth")
    overlay = {"file": str(tmp_path / "model.pth"), "num_classes": 42}
    larger = small(FULL, bias_rank=rank, img_size=48, pretrained=True, pretrained_cfg_overlay=overlay).eval()
    model.set_input_size((48, 48))
    images = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(larger(images), model(images))


def test_a_checkpoint_goes_into_other_classes_and_channels(name, tmp_path):
    model = positional(small(name, num_classes=1000)).eval()
    torch.save(model.state_dict(), tmp_path / "model.pth")
    overlay = {"file": str(tmp_path / "model.pth")}
    other = small(name, num_classes=5, in_chans=1, pretrained=True, pretrained_cfg_overlay=overlay)
    assert other(torch.randn(1, 1, 32, 32)).shape == (1, 5)
    torch.testing.assert_close(
        other.blocks[0].attn.mixer.v_proj.weight, model.blocks[0].attn.mixer.v_proj.weight
    )


def test_a_resized_model_goes_through_the_form_of_the_hub(name, tmp_path):
    model = positional(small(name, in_chans=4)).eval()
    traits = {"fixed_input_size": name == FULL, "first_conv": "patch_embed.proj", "in_chans": 4}
    assert get_model_traits(model) == {**traits, "img_size": (32, 32), "num_classes": 42}
    model.set_input_size((64, 96), patch_size=16)
    model.reset_classifier(7)
    assert get_model_traits(model) == {**traits, "img_size": (64, 96), "num_classes": 7}
    save_for_hf(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert type(again) is AFTVisionTransformer
    assert again.patch_embed.patch_size == (16, 16)
    images = torch.randn(2, 4, 64, 96)
    torch.testing.assert_close(again(images), model(images), rtol=0, atol=0)


def test_local_is_never_resampled(tmp_path):
    model = small(FULL, mixer="local", window_size=3)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"AFTLocal: its window .* 4 x 4 to one of 6 x 6"):
        model.set_input_size((48, 48))
    assert all(torch.equal(w, before[n]) for n, w in model.state_dict().items())
    torch.save(before, tmp_path / "model.pth")
    overlay = {"file": str(tmp_path / "model.pth")}
    with pytest.raises(ValueError, match="4 x 4 patches: AFT-local"):
        small(FULL, mixer="local", img_size=48, pretrained=True, pretrained_cfg_overlay=overlay)


# AFT inside timm's own ViTs


def plain_vit(mixer, prefix=1, **options):
    attention = aft_attention(mixer, grid_size=(4, 4), num_prefix_tokens=prefix, **options)
    conv = {"class_token": False, "global_pool": "avg", "pos_embed": "none"} if not prefix else {}
    return small("vit_tiny_patch16_224", attn_layer=attention, **conv)


@pytest.mark.parametrize(("mixer", "prefix"), [("full", 1), ("local", 1), ("simple", 1), ("conv", 0)])
def test_any_vit_takes_it(mixer, prefix):
    model = positional(plain_vit(mixer, prefix, kernel_size=3, window_size=4, bias_rank=8))
    assert type(model) is timm.models.VisionTransformer
    assert type(model.blocks[0].attn) is AFTAttention
    outputs = model(torch.randn(2, 3, 32, 32))
    outputs.square().sum().backward()
    assert outputs.shape == (2, 42)
    assert all(p.grad is not None for p in model.parameters())


def test_a_vit_with_conv_is_the_model_of_the_registry():
    model = positional(plain_vit("conv", 0, kernel_size=5)).eval()
    registered = small(CONV, kernel_size=5, fc_norm=True).eval()
    registered.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(registered(images), model(images))


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "deit3_small_patch16_224"])
def test_deit_takes_it(name):
    prefix = 2 if "distilled" in name else 1
    attention = aft_attention("full", grid_size=(4, 4), num_prefix_tokens=prefix, bias_rank=4)
    assert small(name, attn_layer=attention).eval()(torch.randn(2, 3, 32, 32)).shape == (2, 42)


def test_models_can_be_copied_and_saved_whole(name):
    images = torch.randn(1, 3, 32, 32)
    for model in (small(name).eval(), plain_vit("full").eval()):
        torch.testing.assert_close(copy.deepcopy(model)(images), model(images))
    model = small(name).eval()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.load(buffer, weights_only=False)(images), model(images))


def test_projections_without_biases():
    model = small(CONV, qkv_bias=False, proj_bias=False).eval()
    mixer = model.blocks[0].attn.mixer
    assert all(p.bias is None for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.out_proj))
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 42)
    half = small(CONV, qkv_bias=False).blocks[0].attn.mixer
    assert half.v_proj.bias is None
    assert half.out_proj.bias is not None


def test_masks_mean_what_timm_means_by_them(name):
    model = positional(small(name)).eval()
    images = torch.randn(2, 3, 32, 32)
    N = 16 + model.num_prefix_tokens
    everything = torch.ones(N, N, dtype=torch.bool)
    torch.testing.assert_close(model(images, attn_mask=everything), model(images))
    past = everything.tril()
    causal = model(images, is_causal=True)
    torch.testing.assert_close(model(images, attn_mask=past), causal)
    torch.testing.assert_close(model(images, attn_mask=past[None, None].expand(2, 1, N, N)), causal)
    additive = torch.zeros(N, N).masked_fill(~past, -math.inf)
    torch.testing.assert_close(model(images, attn_mask=additive), causal)
    assert not torch.allclose(causal, model(images), atol=1e-4)


def test_fix_init_scales_the_output_projection():
    plain, scaled = (small(CONV, fix_init=fix, depth=8) for fix in (False, True))
    ratio = plain.blocks[7].attn.proj.weight.std() / scaled.blocks[7].attn.proj.weight.std()
    assert ratio.item() == pytest.approx(4.0, rel=0.2)


# What cannot be built


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixer": "convolution"}, "mixer must be one of full, simple, local, conv; got 'convolution'"),
        ({"class_token": True}, "class_token=True"),
        ({"reg_tokens": 4}, "reg_tokens=4"),
        ({"patch_drop_rate": 0.5}, "patch_drop_rate=0.5"),
        ({"mixer": "full", "dynamic_img_size": True}, "dynamic_img_size=True"),
        ({"qk_norm": True}, "qk_norm belongs to dot-product attention"),
        ({"scale_attn_norm": True}, "scale_norm belongs to dot-product attention"),
        ({"attn_drop_rate": 0.1}, "attn_drop belongs to dot-product attention, got 0.1"),
        ({"num_heads": 5}, "embed_dim must be a multiple of num_heads, got 32 and 5"),
    ],
)
def test_what_cannot_be_built_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        small(CONV, **options)


def test_an_attention_that_cannot_know_its_grid_says_so():
    with pytest.raises(ValueError, match="mixer 'full' needs grid_size"):
        small("vit_tiny_patch16_224", attn_layer=aft_attention("full"))
    images = torch.randn(1, 3, 32, 32)
    conv = aft_attention("conv")
    unaware = small("vit_tiny_patch16_224", attn_layer=conv, class_token=False, global_pool="avg")
    with pytest.raises(ValueError, match="no known grid; build with grid_size"):
        unaware(images)
    with_class_token = small("vit_tiny_patch16_224", attn_layer=aft_attention("conv", grid_size=(4, 4)))
    with pytest.raises(ValueError, match=r"must have 0 \+ 4 x 4 = 16 tokens .* got 17"):
        with_class_token(images)
    with pytest.raises(ValueError, match="mixer 'conv' takes no class"):
        plain_vit("conv", 1)
    with pytest.raises(ValueError, match="aft_attention: mixer must be one of"):
        aft_attention("attention")
    with pytest.raises(ValueError, match=r"x must be \[B, N, 8\], got \(1, 2, 2, 8\)"):
        AFTAttention(8, mixer="simple")(torch.randn(1, 2, 2, 8))


def test_the_module_names_what_it_offers():
    assert aft.integrations.timm.__all__ == ["AFTAttention", "AFTVisionTransformer", "aft_attention"]
    assert isinstance(small(CONV), AFTVisionTransformer)
