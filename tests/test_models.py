"""The causal language model as users of Transformers know one."""

import copy
import os
import subprocess
import sys

import pytest
import torch

from operations import relative_error

pytest.importorskip("transformers", reason="needs the extra `models`")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from aft.models import MIXERS, AFTConfig, AFTForCausalLM, AFTModel

SETTINGS = {
    "vocab_size": 11,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 24,
    "num_attention_heads": 4,
    "window_size": 5,
    "kernel_size": 3,
}


def build(mixer, **options):
    model = AFTForCausalLM(AFTConfig(**SETTINGS, mixer=mixer, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.fixture(params=MIXERS)
def model(request):
    return build(request.param)


def tokens(B=2, T=20):
    return torch.randint(11, (B, T))


def test_causal_to_the_bit(model):
    x = tokens()
    logits = model(x).logits
    changed = x.clone()
    changed[:, 13:] = (changed[:, 13:] + 1) % 11
    assert torch.equal(model(changed).logits[:, :13], logits[:, :13])
    assert not torch.equal(model(changed).logits[:, 13:], logits[:, 13:])


def test_the_outputs_of_a_transformers_model(model):
    x = tokens()
    outputs = model(x, output_hidden_states=True)
    assert len(outputs.hidden_states) == 3
    assert torch.equal(model.lm_head(outputs.hidden_states[-1]), outputs.logits)
    assert torch.equal(model(x, return_dict=False)[0], outputs.logits)
    assert torch.equal(model(x, logits_to_keep=3).logits, outputs.logits[:, -3:])
    assert torch.equal(model(x, logits_to_keep=torch.tensor([0, 7])).logits, outputs.logits[:, [0, 7]])
    assert model(x[:0]).logits.shape == (0, 20, 11)


def test_the_loss_is_the_mean_over_shifted_labels(model):
    x = tokens()
    logits = model(x).logits
    wanted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    assert torch.allclose(model(x, labels=x).loss, wanted)
    ahead = torch.cat([x[:, 1:], torch.full((2, 1), -100)], 1)
    assert torch.allclose(model(x, shift_labels=ahead).loss, wanted)


def test_padding_on_any_side_changes_nothing(model):
    x = tokens(1, 12)
    wanted = model(x).logits
    for left, right in ((4, 0), (0, 5), (3, 3)):
        padded = torch.nn.functional.pad(x, (left, right), value=7)
        mask = torch.nn.functional.pad(torch.ones(1, 12, dtype=torch.long), (left, right))
        got = model(padded, attention_mask=mask).logits[:, left : left + 12]
        assert relative_error(got, wanted) < 1e-5


def test_saved_and_loaded(model, tmp_path):
    x = tokens()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, AFTForCausalLM)
    assert isinstance(AutoModel.from_pretrained(tmp_path), AFTModel)
    assert torch.equal(again(x).logits, model(x).logits)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == again.config.to_dict()


@pytest.mark.parametrize("tie", [False, True])
def test_tied_embeddings_by_choice(tie, tmp_path):
    model = build("simple", tie_word_embeddings=tie)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
    model.save_pretrained(tmp_path)
    again = AFTForCausalLM.from_pretrained(tmp_path)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tie
    x = tokens()
    assert torch.equal(again(x).logits, model(x).logits)


def test_initial_values_survive_construction_through_transformers():
    torch.manual_seed(0)
    model = AFTForCausalLM(AFTConfig(hidden_size=64, mixer="full", bias_rank=32, num_hidden_layers=2))
    assert 0.009 < model.model.layers[0].mixer.position_bias_u.std() < 0.011
    assert 0.019 < model.model.layers[0].mixer.q_proj.weight.std() < 0.021
    assert 0.009 < model.model.layers[0].mlp_out.weight.std() < 0.011
    conv = AFTForCausalLM(AFTConfig(hidden_size=64, mixer="conv", num_hidden_layers=1))
    assert (conv.model.layers[0].mixer.kernel_gain == 0).all()
    assert 0.8 < conv.model.layers[0].mixer.kernel.std() < 1.2


def test_gradient_checkpointing_changes_nothing(model):
    x = tokens()
    model.train()
    model(x, labels=x).loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.activation_checkpointing_enable()
    model(x, labels=x).loss.backward()
    for name, parameter in model.named_parameters():
        assert name not in wanted or relative_error(parameter.grad, wanted[name]) < 1e-6


def test_it_learns(model):
    model = copy.deepcopy(model).train()
    x = torch.arange(24).repeat(4, 1) % 7
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = model(x, labels=x).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    continued = model.eval().generate(x[:1, :9], max_new_tokens=10, do_sample=False)
    assert torch.equal(continued, x[:1, :19])


def test_half_precision(model):
    x = tokens()
    wanted = model(x).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert relative_error(model(x).logits, wanted) < 3e-2
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert relative_error(half(x).logits, wanted) < 5e-2


def test_a_sequence_longer_than_the_positions_is_an_error(model):
    with pytest.raises(ValueError, match="positions end at 24, got a sequence of 25"):
        model(tokens(1, 25))


def test_bad_arguments_of_a_call(model):
    with pytest.raises(ValueError, match="either input_ids"):
        model()
    with pytest.raises(ValueError, match=r"attention_mask must be \[B, T\] = \(2, 20\), got \(2, 7\)"):
        model(tokens(), attention_mask=torch.ones(2, 7))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixer": "attn"}, "mixer must be one of full, simple, local, conv, attention; got 'attn'"),
        ({"dropout": 1.5}, "dropout must be a probability"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"mixer": "conv", "hidden_size": 30}, "multiple of num_attention_heads, got 30 and 8"),
        ({"bias_rank": 0}, "bias_rank must be at least 1"),
        ({"alphabet": [1, 2]}, "alphabet must hold vocab_size = 256 different bytes, got 2"),
        ({"vocab_size": 3, "alphabet": [1, 1, 999]}, "got 3 numbers, 1 different bytes"),
        ({"intermediate_size": -5}, "intermediate_size must be at least 1, got -5"),
        ({"initializer_range": -1.0}, "initializer_range must be at least 0"),
    ],
)
def test_bad_configurations_are_named(options, message):
    with pytest.raises(Exception, match=message):
        AFTConfig(**options)


def test_the_package_itself_needs_torch_alone():
    """Operations and layers work with nothing but torch, and importing the package costs nothing."""
    script = """
import sys
for name in ("transformers", "accelerate", "tyro", "matplotlib", "tqdm", "safetensors"):
    sys.modules[name] = None
import aft
assert "torch" not in sys.modules
import torch
x = torch.randn(1, 4, 8)
assert aft.AFTFull(8, 4)(x, x, x)[0].shape == x.shape
assert aft.aft_simple(x, x, x).shape == x.shape
"""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
