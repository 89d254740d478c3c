"""Attention replaced by AFT in other people's models: what is copied, what acts, and what is refused."""

import copy

import pytest
import timm
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

import aft
from aft.integrations.conversion_report import Part, Transfer
from aft.integrations.convert import convert
from aft.integrations.timm import AFTVisionTransformer
from aft.layers.base import AFTLayer
from aft.models import AFTConfig, AFTForCausalLM, AFTForImageClassification, AFTImageConfig

D = 16
MIXERS = ("full", "simple", "local", "conv")


def timm_vit(**options):
    sizes = {"embed_dim": D, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 8, "num_classes": 5}
    return timm.create_model("deit_tiny_patch16_224", **{**sizes, **options})


def vit(**options):
    sizes = {
        "hidden_size": D,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "image_size": 32,
        "patch_size": 8,
        "num_labels": 5,
    }
    return ViTForImageClassification(ViTConfig(**{**sizes, **options}))


def gpt2(**options):
    sizes = {"vocab_size": 50, "n_positions": 12, "n_embd": D, "n_layer": 2, "n_head": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **tokens, **options}))


def image_baseline(**options):
    return AFTForImageClassification(
        AFTImageConfig(
            image_size=32,
            patch_size=8,
            hidden_size=D,
            num_hidden_layers=2,
            mixer="attention",
            num_attention_heads=2,
            kernel_size=3,
            num_labels=5,
            **options,
        )
    )


def causal_baseline(**options):
    return AFTForCausalLM(
        AFTConfig(
            hidden_size=D,
            num_hidden_layers=2,
            max_position_embeddings=12,
            mixer="attention",
            num_attention_heads=2,
            **options,
        )
    )


def encoder(**options):
    layer = nn.TransformerEncoderLayer(D, 2, 24, **{"batch_first": True, **options})
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def decoder(**options):
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 2, 24, batch_first=True, **options), 2)


IMAGES, TOKENS = torch.randn(3, 3, 32, 32), torch.randint(50, (3, 12))
SEQUENCE, MEMORY = torch.randn(3, 12, D), torch.randn(3, 7, D)
LENGTHS = {"max_seq_len": 12}
RUNS = {
    "timm": (timm_vit, lambda m: m(IMAGES), {}),
    "vit": (vit, lambda m: m(IMAGES).logits, {}),
    "gpt2": (gpt2, lambda m: m(TOKENS).logits, {}),
    "image_baseline": (image_baseline, lambda m: m(IMAGES).logits, {}),
    "causal_baseline": (causal_baseline, lambda m: m(TOKENS).logits, {}),
    "encoder": (encoder, lambda m: m(SEQUENCE), LENGTHS),
    "decoder": (decoder, lambda m: m(SEQUENCE, MEMORY), {**LENGTHS, "max_source_len": 7}),
}
KINDS = pytest.mark.parametrize("kind", RUNS)


def make(kind):
    build, run, options = RUNS[kind]
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # zeros and ones copied to the wrong place would not be noticed
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, run, options


def aft_layers(model):
    return [module for module in model.modules() if isinstance(module, AFTLayer)]


@torch.no_grad()
def attend_to_all_alike(model):
    """Queries of 0: attention that weighs all values alike."""
    for name, tensor in model.state_dict().items():
        if name.endswith(("qkv.weight", "qkv.bias", "in_proj_weight", "in_proj_bias")):
            tensor[:D] = 0
        elif "c_attn" in name:
            tensor[..., :D] = 0
        elif ".q_proj." in name:
            tensor.zero_()
    return model


@torch.no_grad()
def weigh_all_alike(model):
    """Keys and biases of 0, gates of 1: AFT that weighs all values alike."""
    for layer in aft_layers(model):
        for name, parameter in layer.named_parameters():
            if "kernel" in name or "position_bias" in name or name.split(".")[0] in ("q_proj", "k_proj"):
                parameter.zero_()
        layer.q_proj.bias.fill_(100.0)
    return model


# What is copied


@KINDS
@pytest.mark.parametrize("mixer", ["full", "simple", "local"])
def test_the_copied_weights_act_as_they_did(kind, mixer):
    model, run, options = make(kind)
    converted = convert(attend_to_all_alike(model), mixer, **options)
    assert aft_layers(converted)
    torch.testing.assert_close(run(weigh_all_alike(converted)), run(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "causal_baseline", "encoder", "decoder"])
def test_the_copied_weights_act_in_conv_as_they_did(kind):
    model, run, options = make(kind)
    converted = convert(attend_to_all_alike(model), "conv", **options)
    torch.testing.assert_close(run(weigh_all_alike(converted)), run(model), rtol=1e-4, atol=1e-5)


def test_the_copied_weights_act_in_image_conv_as_they_did():
    model = attend_to_all_alike(timm_vit(class_token=False, pos_embed="none", global_pool="avg")).eval()
    converted = weigh_all_alike(convert(model, "conv", kernel_size=3))
    torch.testing.assert_close(converted(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-5)


def test_values_and_outputs_make_the_layer():
    """The new layer, without keys and with gates of one half, is half the mean of the source's values."""
    model = timm_vit()
    layer = convert(model, "conv", kernel_size=3).blocks[1].attn
    weigh_all_alike(layer)
    layer.mixer.q_proj.bias.data.zero_()
    old, x = model.blocks[1].attn, torch.randn(2, 16, D)
    values = x @ old.qkv.weight[2 * D :].T + old.qkv.bias[2 * D :]
    expected = (values.mean(1, keepdim=True) / 2) @ old.proj.weight.T + old.proj.bias
    torch.testing.assert_close(layer(x), expected.expand(2, 16, D))


@KINDS
@pytest.mark.parametrize("mixer", MIXERS)
def test_the_report_accounts_for_every_tensor(kind, mixer):
    model, _, options = make(kind)
    before = copy.deepcopy(model.state_dict())
    converted = convert(model, mixer, **options)
    report = converted.conversion_report
    after = converted.state_dict()
    assert {row.source for row in report.rows} - {None} == set(before)
    targets = [row.target for row in report.rows if row.target is not None]
    assert sorted(targets) == sorted(after)

    total = sum(p.numel() for p in converted.parameters())
    assert report.count("copied") + report.count("resampled") + report.count("new") == total
    assert report.count("copied") + report.count("dropped") == sum(p.numel() for p in model.parameters())
    for row in report.rows:
        if row.action == "copied" and row.source is not None:
            source = before[row.source] if row.part is None else row.part.of(before[row.source])
            source = source.T if row.why == "transposed" else source
            assert torch.equal(source.reshape(after[row.target].shape), after[row.target]), row
    text = str(report)
    assert f"copied {report.count('copied'):,}" in text
    assert type(model).__name__ in text
    for tensor in ("q_proj", "k_proj", "query and key projections"):
        assert tensor in text


@KINDS
@pytest.mark.parametrize("mixer", MIXERS)
def test_only_queries_keys_and_positions_are_new_or_dropped(kind, mixer):
    model, _, options = make(kind)
    report = convert(model, mixer, **options).conversion_report
    new = ("q_proj", "k_proj", "position_bias", "position_bias_u", "position_bias_v")
    kernels = ("kernel", "kernel_gain", "kernel_shift")
    tokens = ("cls_token", "class_token", "pos_embed", "position_embedding", "position_embeddings")
    images = kind in ("timm", "vit", "image_baseline")
    for row in report.rows:
        if row.action == "new":
            assert set(row.target.split(".")) & {*new, *kernels}, row
        if row.action == "dropped" and row.count:
            dropped_tokens = images and mixer == "conv" and row.source.endswith(tokens)
            assert dropped_tokens or row.why == "query and key projections", row


@KINDS
@pytest.mark.parametrize("mixer", MIXERS)
def test_the_original_is_left_as_it_was(kind, mixer):
    model, run, options = make(kind)
    before, outputs = copy.deepcopy(model.state_dict()), run(model)
    converted = convert(model, mixer, **options)
    with torch.no_grad():
        for parameter in converted.parameters():
            parameter.zero_()
    assert not aft_layers(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(run(model), outputs, rtol=0, atol=0)


# What is new


@KINDS
@pytest.mark.parametrize("mixer", MIXERS)
def test_gradients_reach_every_parameter(kind, mixer):
    model, run, options = make(kind)
    converted = convert(model, mixer, **options).train()
    with torch.no_grad():
        for name, parameter in converted.named_parameters():
            if "position_bias" in name or "kernel_gain" in name:
                parameter.normal_()
    run(converted).square().sum().backward()
    for name, parameter in converted.named_parameters():
        assert parameter.grad is not None, name
        # A bias of the keys shifts them all and changes no weight; of GPT-2's 50 tokens some do not occur.
        if not name.endswith("k_proj.bias"):
            assert parameter.grad.any(), name


def test_new_projections_start_as_the_family_starts_them():
    timms = convert(timm_vit(embed_dim=64), "simple").blocks[0].attn.mixer
    assert timms.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not timms.q_proj.bias.any()
    ours = convert(vit(hidden_size=64, initializer_range=0.05), "simple").model.layers[0].mixer
    assert ours.k_proj.weight.std().item() == pytest.approx(0.05, rel=0.1)
    gpts = convert(gpt2(n_embd=64), "conv", num_heads=64).model.layers[0].mixer
    assert gpts.k_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not gpts.kernel_gain.any()
    torchs = convert(encoder(), "simple").layers[0].self_attn
    assert torchs.q_proj.weight.abs().max() <= (6 / (2 * D)) ** 0.5


# Images


def test_conv_needs_neither_class_token_nor_position_embedding():
    for model in (timm_vit(), vit(), image_baseline()):
        names = set(convert(model, "conv", kernel_size=3).state_dict())
        assert not [n for n in names if "cls_token" in n or "class_token" in n or "pos" in n]


@pytest.mark.parametrize("size", [(32, 32), (16, 48), (8, 8)])
def test_conv_takes_images_of_any_size(size):
    images = torch.randn(2, 3, *size)
    for model in (timm_vit(), vit(), image_baseline()):
        outputs = convert(model, "conv", kernel_size=5)(images)
        assert getattr(outputs, "logits", outputs).shape == (2, 5)


def test_a_converted_deit_is_the_model_of_the_registry():
    sizes = {"embed_dim": D, "depth": 2, "img_size": 32, "patch_size": 8, "num_classes": 5}
    converted = convert(timm_vit(), "conv", num_heads=4, kernel_size=5).eval()
    registered = timm.create_model("aft_conv_tiny_k11_h32_patch16_224", num_heads=4, kernel_size=5, **sizes)
    registered.eval().load_state_dict(converted.state_dict())
    assert type(converted) is AFTVisionTransformer
    torch.testing.assert_close(registered(IMAGES), converted(IMAGES))
    _, grids = converted.forward_intermediates(IMAGES)
    assert [y.shape for y in grids] == [(3, D, 4, 4)] * 2


def test_timm_and_native_conversions_are_one_function():
    """The same weights in timm's form and in Transformers': two conversions, the same outputs."""
    theirs = image_baseline(layer_norm_eps=1e-6)
    timms = timm_vit()
    names = {"patch_embed": "patch_embed.proj", "norm": "norm"}
    weights = {}
    for name, tensor in theirs.state_dict().items():
        if name.startswith("classifier"):
            weights[name.replace("classifier", "head")] = tensor
        elif name in ("model.class_token", "model.position_embedding"):
            weights[{"c": "cls_token", "p": "pos_embed"}[name[6]]] = tensor[None]
        elif name.startswith("model.layers"):
            _, _, i, module, *rest = name.split(".")
            if module != "mixer":
                new = {"mixer_norm": "norm1", "mlp_norm": "norm2", "mlp_in": "mlp.fc1", "mlp_out": "mlp.fc2"}
                weights[f"blocks.{i}.{new[module]}.{rest[0]}"] = tensor
            elif rest[0] == "out_proj":
                weights[f"blocks.{i}.attn.proj.{rest[1]}"] = tensor
        else:
            _, module, kind = name.split(".")
            weights[f"{names[module]}.{kind}"] = tensor
    for i in range(2):
        for kind in ("weight", "bias"):
            mixer = theirs.model.layers[i].mixer
            parts = [getattr(getattr(mixer, p), kind) for p in ("q_proj", "k_proj", "v_proj")]
            weights[f"blocks.{i}.attn.qkv.{kind}"] = torch.cat(parts)
    timms.load_state_dict(weights)
    torch.testing.assert_close(timms.eval()(IMAGES), theirs.eval()(IMAGES).logits)

    native, foreign = convert(theirs, "conv"), convert(timms, "conv", kernel_size=3)
    for old, new in zip(native.model.layers, foreign.blocks, strict=True):
        new.attn.mixer.load_state_dict(old.mixer.state_dict())
        new.attn.mixer.kernel_gain.data.fill_(2.0)
        old.mixer.kernel_gain.data.fill_(2.0)
    torch.testing.assert_close(foreign(IMAGES), native(IMAGES).logits)


@pytest.mark.parametrize("mixer", ["full", "conv"])
def test_another_image_size(mixer):
    images = torch.randn(2, 3, 48, 64)
    for model in (timm_vit(), vit(), image_baseline()):
        converted = convert(model, mixer, image_size=(48, 64), bias_rank=4)
        outputs = converted(images)
        assert getattr(outputs, "logits", outputs).shape == (2, 5)
        report = converted.conversion_report
        resampled = [row for row in report.rows if row.action == "resampled"]
        assert [row.why for row in resampled] == (["4 x 4 patches to 6 x 8"] if mixer == "full" else [])


def test_position_embeddings_are_resampled_alike_everywhere():
    theirs, ours, timms = vit(), image_baseline(), timm_vit()
    table = torch.randn(17, D)
    theirs.vit.embeddings.position_embeddings.data.copy_(table)
    ours.model.position_embedding.data.copy_(table)
    timms.pos_embed.data.copy_(table)
    resampled = [
        convert(theirs, "full", image_size=48).model.position_embedding,
        convert(ours, "full", image_size=48).model.position_embedding,
        convert(timms, "full", image_size=48).pos_embed[0],
    ]
    for other in resampled[1:]:
        torch.testing.assert_close(other, resampled[0])
    assert torch.equal(resampled[0][0], table[0])


def test_pooling_of_a_converted_vit():
    converted = convert(timm_vit(), "conv", kernel_size=3).eval()
    assert converted.global_pool == "avg"
    assert any("mean over patches" in note for note in converted.conversion_report.notes)
    features = converted.forward_features(IMAGES)
    torch.testing.assert_close(converted(IMAGES), converted.head(features.mean(1)))
    assert convert(timm_vit(), "full").global_pool == "token"
    assert convert(timm_vit(global_pool="avg"), "full").global_pool == "avg"


@pytest.mark.parametrize(
    ("options", "dropped"),
    [
        ({"init_values": 0.1}, ()),
        ({"qk_norm": True}, ("q_norm", "k_norm")),
        ({"reg_tokens": 2}, ()),
        ({"no_embed_class": True, "reg_tokens": 2}, ()),
        ({"qkv_bias": False}, ()),
        ({"global_pool": "map"}, ()),
        ({"block_fn": timm.models.vision_transformer.ResPostBlock}, ()),
        ({"dynamic_img_pad": True}, ()),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
@pytest.mark.parametrize("mixer", ["full", "conv"])
def test_vits_of_many_kinds(mixer, options, dropped):
    model = timm_vit(**options)
    converted = convert(model, mixer, kernel_size=3, bias_rank=4)
    assert converted(IMAGES).shape == (3, 5)
    names = {row.source for row in converted.conversion_report.rows if row.action == "dropped"}
    for name in dropped:
        assert any(name in source for source in names)
    kept = {row.target for row in converted.conversion_report.rows if row.action == "copied"}
    assert any("ls1" in name for name in kept) == ("init_values" in options)
    assert ("reg_token" in kept) == ("reg_tokens" in options and mixer == "full")


def test_a_distilled_deit_keeps_both_heads():
    model = timm.create_model(
        "deit_tiny_distilled_patch16_224", embed_dim=D, depth=1, num_heads=2, img_size=32, patch_size=8
    )
    converted = convert(attend_to_all_alike(model.eval()), "full")
    torch.testing.assert_close(weigh_all_alike(converted)(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="VisionTransformerDistilled classifies two tokens"):
        convert(model, "conv")


def test_a_vit_without_biases_of_queries_and_values():
    model = attend_to_all_alike(vit(qkv_bias=False)).eval()
    converted = convert(model, "simple")
    zeros = [row for row in converted.conversion_report.rows if row.why == "zero: there was none"]
    assert len(zeros) == 2
    torch.testing.assert_close(
        weigh_all_alike(converted)(IMAGES).logits, model(IMAGES).logits, rtol=1e-4, atol=1e-5
    )


# Language


def test_gpt2_keeps_its_shape():
    model = gpt2(n_inner=20, activation_function="relu", layer_norm_epsilon=1e-3)
    config = convert(model, "local", window_size=3, bias_rank=4).config
    assert (config.intermediate_size, config.hidden_act, config.layer_norm_eps) == (20, "relu", 1e-3)
    assert (config.window_size, config.bias_rank, config.max_position_embeddings) == (3, 4, 12)
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)


def test_gpt2_with_a_head_of_its_own():
    model = attend_to_all_alike(gpt2(tie_word_embeddings=False)).eval()
    converted = convert(model, "simple")
    assert converted.lm_head.weight is not converted.model.embed_tokens.weight
    assert torch.equal(converted.lm_head.weight, model.lm_head.weight)
    logits = weigh_all_alike(converted)(TOKENS).logits
    torch.testing.assert_close(logits, model(TOKENS).logits, rtol=1e-4, atol=1e-5)


def test_a_converted_gpt2_is_causal_and_generates():
    converted = convert(gpt2().eval(), "conv", kernel_size=4)
    changed = TOKENS.clone()
    changed[:, 6:] = 7
    before, after = converted(TOKENS).logits, converted(changed).logits
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6:], after[:, 6:])
    assert converted.generate(TOKENS[:, :4], max_new_tokens=3, do_sample=False, eos_token_id=None).shape == (
        3,
        7,
    )


def test_what_a_gpt2_loses_is_noted():
    notes = convert(gpt2(attn_pdrop=0.2, embd_pdrop=0.3, resid_pdrop=0.1), "simple").conversion_report.notes
    assert notes == (
        "dropped: dropout 0.2 of attention weights",
        "dropout of embeddings is 0.1 as elsewhere, it was 0.3",
    )


@pytest.mark.parametrize("mixer", MIXERS)
def test_native_results_are_saved_and_loaded(mixer, tmp_path):
    for kind, auto in (("vit", AutoModelForImageClassification), ("gpt2", AutoModelForCausalLM)):
        model, run, _ = make(kind)
        converted = convert(model, mixer)
        converted.save_pretrained(tmp_path / kind)
        again = auto.from_pretrained(tmp_path / kind).eval()
        assert type(again) is type(converted)
        torch.testing.assert_close(run(again), run(converted), rtol=0, atol=0)


# torch


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_encoders_train_and_evaluate(mixer, norm_first, batch_first):
    model = convert(encoder(norm_first=norm_first, batch_first=batch_first), mixer, **LENGTHS)
    x = SEQUENCE if batch_first else SEQUENCE.transpose(0, 1)
    padding = torch.zeros(3, 12, dtype=torch.bool)
    padding[1, 7:] = True
    model.train()(x, src_key_padding_mask=padding).sum().backward()
    model.eval()
    with torch.no_grad():
        inside = model(x, src_key_padding_mask=padding)
    outside = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(inside, outside)
    rows = inside if batch_first else inside.transpose(0, 1)
    shorter = SEQUENCE[1:2, :7] if batch_first else SEQUENCE[1:2, :7].transpose(0, 1)
    alone = model(shorter) if batch_first else model(shorter).transpose(0, 1)
    torch.testing.assert_close(rows[1, :7], alone[0], rtol=1e-4, atol=1e-5)


def test_an_encoder_prepared_for_nested_tensors():
    layer = nn.TransformerEncoderLayer(D, 2, 24, batch_first=True)
    model = convert(nn.TransformerEncoder(layer, 2).eval(), "simple")
    padding = torch.zeros(3, 12, dtype=torch.bool)
    padding[1:, 7:] = True
    with torch.no_grad():
        outputs = model(SEQUENCE, src_key_padding_mask=padding)
    assert outputs.shape == SEQUENCE.shape
    assert torch.isfinite(outputs).all()


@pytest.mark.parametrize("mixer", MIXERS)
def test_causal_encoders_see_no_future(mixer):
    model = convert(encoder().eval(), mixer, causal=True, **LENGTHS)
    changed = SEQUENCE.clone()
    changed[:, 6:] = 1.0
    assert torch.equal(model(SEQUENCE)[:, :6], model(changed)[:, :6])


def test_decoders_attend_to_another_sequence():
    simple = convert(decoder().eval(), "local", **LENGTHS)
    assert type(simple.layers[0].multihead_attn) is aft.AFTSimple
    full = convert(decoder().eval(), "full", max_source_len=7, **LENGTHS)
    assert type(full.layers[0].multihead_attn) is aft.AFTFull
    assert full.layers[0].multihead_attn.position_bias.shape == (12, 7)
    mask = nn.Transformer.generate_square_subsequent_mask(12)
    for model in (simple, full):
        changed = SEQUENCE.clone()
        changed[:, 6:] = 1.0
        before = model(SEQUENCE, MEMORY, tgt_mask=mask)[:, :6]
        torch.testing.assert_close(before, model(changed, MEMORY, tgt_mask=mask)[:, :6])
        assert not torch.allclose(before, model(SEQUENCE, MEMORY + MEMORY.flip(2), tgt_mask=mask)[:, :6])


def test_values_of_another_width():
    layer = nn.TransformerDecoderLayer(D, 2, 24, batch_first=True).eval()
    layer.multihead_attn = nn.MultiheadAttention(D, 2, kdim=5, vdim=6, batch_first=True)
    converted = convert(layer, "simple")
    attention, values = converted.multihead_attn, torch.randn(2, 7, 6)
    assert torch.equal(attention.v_proj.weight, layer.multihead_attn.v_proj_weight)
    assert attention.k_proj.weight.shape == (D, 5)
    weigh_all_alike(attention)
    expected = attention.out_proj(attention.v_proj(values).mean(1, keepdim=True))
    outputs, _ = attention(torch.randn(2, 4, D), torch.randn(2, 7, 5), values)
    torch.testing.assert_close(outputs, expected.expand(2, 4, D))


@pytest.mark.parametrize("bias", [True, False])
def test_single_layers_and_whole_transformers(bias):
    layer = convert(nn.TransformerEncoderLayer(D, 2, 24, batch_first=True, bias=bias), "conv", kernel_size=3)
    assert layer(SEQUENCE).shape == SEQUENCE.shape
    layer = convert(nn.TransformerDecoderLayer(D, 2, 24, batch_first=True, bias=bias), "simple")
    assert layer(SEQUENCE, MEMORY).shape == SEQUENCE.shape
    whole = nn.Transformer(D, 2, 1, 1, 24, batch_first=True)
    assert len(aft_layers(convert(whole, "full", **LENGTHS))) == 3


# What cannot be converted


@pytest.mark.parametrize(
    "build",
    [
        lambda: BertModel(BertConfig(hidden_size=D, num_hidden_layers=1, num_attention_heads=2)),
        lambda: ViTModel(vit().config),
        lambda: GPT2Model(gpt2().config),
        lambda: nn.MultiheadAttention(D, 2),
        lambda: nn.Linear(2, 2),
        lambda: timm.create_model("resnet18"),
        lambda: "deit_tiny_patch16_224",
    ],
    ids=["bert", "vit", "gpt2", "attention", "linear", "resnet", "name"],
)
def test_a_model_of_another_kind_is_refused_by_name(build):
    model = build()
    with pytest.raises(TypeError, match=r"timm VisionTransformer .* GPT2LMHeadModel") as refusal:
        convert(model)
    assert str(refusal.value).endswith(f"got {type(model).__name__}")
    assert "\n" not in str(refusal.value)


class _OwnLayer(nn.Module):
    pass


def _encoder_with(**options):
    model = encoder()
    model.layers[1].self_attn = nn.MultiheadAttention(D, 2, batch_first=True, **options)
    return model


def _own_encoder():
    model = encoder()
    model.layers[1] = _OwnLayer()
    return model


class _OwnViT(timm.models.VisionTransformer):
    pass


@pytest.mark.parametrize(
    ("build", "options", "error", "message"),
    [
        (timm_vit, {"mixer": "attention"}, ValueError, "mixer must be one of full, simple, local, conv"),
        (
            timm_vit,
            {"max_seq_len": 3},
            TypeError,
            "max_seq_len is no option for VisionTransformer, which has",
        ),
        (gpt2, {"image_size": 3}, TypeError, "image_size is no option for GPT2LMHeadModel"),
        (timm_vit, {"num_heads": 3}, ValueError, "multiple of num_heads, got 16 and 3"),
        (vit, {"num_heads": 3}, ValueError, "multiple of num_attention_heads"),
        (encoder, {"mixer": "full"}, ValueError, "mixer 'full' needs max_seq_len"),
        (_own_encoder, {}, TypeError, "layers of TransformerEncoder must be PyTorch's own, got _OwnLayer"),
        (lambda: _encoder_with(add_bias_kv=True), {}, ValueError, "layers.1.self_attn has add_bias_kv"),
        (lambda: _encoder_with(add_zero_attn=True), {}, ValueError, "layers.1.self_attn has add_zero_attn"),
        (_OwnViT, {}, TypeError, "VisionTransformerDistilled are converted; got _OwnViT"),
        (
            lambda: timm_vit(block_fn=timm.models.vision_transformer.ParallelScalingBlock),
            {},
            ValueError,
            "got ParallelScalingBlock",
        ),
        (lambda: timm_vit(attn_layer="diff"), {}, ValueError, "timm's Attention, got DiffAttention"),
        (lambda: timm_vit(scale_attn_norm=True), {}, ValueError, "scale_norm"),
        (lambda: convert(timm_vit()), {}, ValueError, "AFTVisionTransformer has AFT in it already"),
        (lambda: convert(encoder()), {}, ValueError, "layers.0.self_attn is AFTConv1d already"),
        (lambda: convert(image_baseline()), {}, ValueError, "must be 'attention', got 'conv'"),
        (lambda: convert(causal_baseline()), {}, ValueError, "must be 'attention', got 'conv'"),
        (lambda: gpt2(add_cross_attention=True), {}, ValueError, "add_cross_attention must be False"),
        (lambda: vit(num_labels=0), {}, ValueError, "no classifier"),
    ],
)
def test_what_aft_cannot_stand_for_is_refused_by_name(build, options, error, message):
    model = build()
    with pytest.raises(error, match=message):
        convert(model, **options)


def test_a_conversion_that_forgets_a_tensor_is_an_error_of_ours():
    one, other = nn.Linear(4, 2), nn.Linear(4, 2)

    def report(*steps):
        transfer = Transfer(one, other)
        for step in steps:
            step(transfer)
        return transfer.report()

    def weight(transfer):
        transfer.copy("weight", "weight")

    def bias(transfer):
        transfer.new("bias")
        transfer.drop("bias")

    assert report(weight, bias).count("copied") == 8
    with pytest.raises(AssertionError, match=r"\['bias', 'bias'\]"):
        report(weight)
    with pytest.raises(AssertionError, match=r"\['bias'\]"):
        report(weight, lambda t: t.new("bias"), lambda t: t.drop("bias", part=Part(0, 1)))
    with pytest.raises(AssertionError, match="weight"):
        report(weight, weight, bias)
    with pytest.raises(AssertionError, match=r"weight gives \(2, 4\), bias is \(2,\)"):
        report(lambda t: t.copy("weight", "bias"))
    with pytest.raises(ValueError, match="action must be one of copied, resampled, new, dropped"):
        report(weight, bias).count("lost")


# The call


def test_it_is_a_name_of_the_package(capsys):
    assert aft.convert is convert
    converted = aft.convert(encoder(), "simple", verbose=True)
    assert capsys.readouterr().out == f"{converted.conversion_report}\n"
    assert aft.convert(encoder(), "simple").conversion_report is not None
    assert not capsys.readouterr().out


@KINDS
def test_mode_and_precision_are_those_of_the_original(kind):
    model, _, options = make(kind)
    converted = convert(model.double().train(), "simple", **options)
    assert {p.dtype for p in converted.parameters()} == {torch.float64}
    assert all(module.training for module in converted.modules())
    assert not any(module.training for module in convert(model.eval(), "simple", **options).modules())


@pytest.mark.parametrize("mixer", ["full", "simple", "local", "conv"])
def test_a_converted_timm_model_becomes_one_of_transformers(mixer, tmp_path):
    source = timm.models.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3
    )
    converted = aft.convert(source, mixer).eval()
    with torch.no_grad():
        for parameter in converted.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    native = converted.to_transformers(id2label={0: "a", 1: "b", 2: "c"})
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(native(x).logits, converted(x), rtol=1e-5, atol=1e-6)
    native.save_pretrained(tmp_path)
    again = AFTForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(again(x).logits, native(x).logits)
    assert again.config.id2label == {0: "a", 1: "b", 2: "c"}


def test_what_transformers_model_has_not_is_refused():
    source = timm.models.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=16, depth=1, num_heads=2, init_values=0.1
    )
    with pytest.raises(ValueError, match=r"to_transformers: the model has blocks.0.ls[12].gamma"):
        aft.convert(source, "conv").to_transformers()


def test_what_was_frozen_stays_frozen():
    source = timm.models.VisionTransformer(img_size=16, patch_size=4, embed_dim=16, depth=1, num_heads=2)
    source.requires_grad_(False)
    source.head.requires_grad_(True)
    converted = aft.convert(source, "conv")
    trained = {name for name, parameter in converted.named_parameters() if parameter.requires_grad}
    new = {row.target for row in converted.conversion_report.rows if row.action == "new"}
    assert trained == new | {"head.weight", "head.bias"}


def test_a_dense_table_can_be_asked_for():
    sizes = {"image_size": 16, "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 1}
    config = AFTImageConfig(**sizes, num_attention_heads=2, mixer="attention", bias_rank=3)
    source = AFTForImageClassification(config)
    assert aft.convert(source, "full").config.bias_rank == 3
    assert aft.convert(source, "full", bias_rank=None).config.bias_rank is None


def test_of_a_transformer_only_the_decoder_is_causal():
    source = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    converted = aft.convert(source, "simple", causal=True)
    assert not converted.encoder.layers[0].self_attn.causal
    assert converted.decoder.layers[0].self_attn.causal


def test_a_shared_attention_is_refused_by_name():
    source = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    source.layers[1].self_attn = source.layers[0].self_attn
    with pytest.raises(ValueError, match=r"layers.1.self_attn is shared"):
        aft.convert(source, "simple")


def test_a_vit_of_any_size_is_refused_for_biases_of_one():
    source = timm.models.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=8, depth=1, num_heads=2, dynamic_img_size=True
    )
    with pytest.raises(ValueError, match="dynamic_img_size must be False, mixer 'full'"):
        aft.convert(source, "full")
    assert aft.convert(source, "conv", num_heads=2)(torch.randn(1, 3, 8, 24)).shape == (1, 1000)
