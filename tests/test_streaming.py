"""`stream`: the tokens of `generate` by a way of its own, which must not show in any logit."""

import copy
import gc
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch

from operations import relative_error

pytest.importorskip("transformers", reason="needs the extra `models`")

from transformers import GenerationConfig

from aft.models import MIXERS, AFTConfig, AFTForCausalLM
from aft.models.cache import window_start
from aft.models.decoder import Decoder, is_plain, quiet
from aft.models.lean import with_old
from aft.models.streaming import stream
from aft.models.terms import LIFT, SPREAD, GrowingTerms, WindowTerms

SETTINGS = {
    "vocab_size": 11,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 24,
    "num_attention_heads": 4,
    "window_size": 5,
    "kernel_size": 3,
}
PROMPT = [3, 1, 4, 1, 5]


def build(mixer, **options):
    model = AFTForCausalLM(AFTConfig(**{**SETTINGS, "mixer": mixer, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4)
    return model


@pytest.fixture(params=[*MIXERS, "full low-rank", "local low-rank"])
def model(request):
    mixer, *low_rank = request.param.split()
    return build(mixer, bias_rank=3 if low_rank else None)


@torch.no_grad()
def whole(model, ids):
    """Logits after a sequence, from a forward over the whole context."""
    start = window_start(len(ids), model.config.max_position_embeddings)
    return model(torch.tensor([ids[start:]])).logits[0, -1]


def decoded(model, ids, prompt=3):
    """Logits after ``prompt`` tokens and after each one of the others; the decoder too."""
    decoder = Decoder(model)
    logits = [decoder.read(ids[:prompt])]
    logits += [decoder.next(token) for token in ids[prompt:]]
    return torch.stack(logits), decoder


def check_logits(model, ids, tolerance=1e-5, prompt=3):
    """Compares each row of logits with those of a float64 copy of the model; returns the decoder."""
    logits, decoder = decoded(model, ids, prompt)
    exact = copy.deepcopy(model).double()
    expected = torch.stack([whole(exact, ids[:n]) for n in range(prompt, len(ids) + 1)])
    errors = (logits - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max() < tolerance
    return decoder


def random_ids(count):
    return torch.randint(11, (count,)).tolist()


def is_lean(decoder):
    return decoder._lean is not None


# Logits


def test_logits_of_the_whole_sequence(model):
    assert is_lean(check_logits(model, random_ids(60)))


@pytest.mark.parametrize("prompt", [1, 23, 24, 25, 36, 50])
def test_a_prompt_of_any_length(model, prompt):
    check_logits(model, random_ids(prompt + 3), prompt=prompt)


@pytest.mark.parametrize("longest", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("mixer", MIXERS)
def test_few_positions(mixer, longest):
    check_logits(build(mixer, max_position_embeddings=longest), random_ids(17), prompt=1)


@pytest.mark.parametrize(("window_size", "kernel_size"), [(1, 1), (2, 2), (70, 70), (200, 199)])
@pytest.mark.parametrize("mixer", ["local", "conv"])
def test_windows_of_any_size(mixer, window_size, kernel_size):
    model = build(mixer, window_size=window_size, kernel_size=kernel_size, max_position_embeddings=190)
    assert is_lean(check_logits(model, random_ids(185)))


def scale_keys(model, by):
    with torch.no_grad():
        for block in model.model.layers:
            block.mixer.k_proj.weight.mul_(by)
            block.mixer.k_proj.bias.mul_(by)


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0, 1e4])
def test_keys_of_any_scale(model, scale):
    """In float64, where rounding of the keys themselves does not hide an error of the sums."""
    scale_keys(model, scale)
    check_logits(model.double(), random_ids(60), tolerance=1e-9)


def widen(model, rows=slice(None)):
    """Biases that spread over hundreds of nats."""
    with torch.no_grad():
        for block in model.model.layers:
            mixer = block.mixer
            if hasattr(mixer, "kernel_gain"):
                mixer.kernel_gain.fill_(200.0)
            elif mixer.position_bias is not None:
                mixer.position_bias[rows].mul_(1000)
            else:
                mixer.position_bias_u[rows].mul_(3000)


@pytest.mark.parametrize("mixer", ["full", "local", "conv"])
@pytest.mark.parametrize("rank", [None, 3])
def test_biases_that_spread_too_far(mixer, rank):
    model = build(mixer, bias_rank=rank)
    widen(model)
    check_logits(model.double(), random_ids(40), tolerance=1e-9)


@pytest.mark.parametrize("mixer", ["full", "local"])
@pytest.mark.parametrize("rank", [None, 3])
def test_biases_that_spread_too_far_from_some_row_on(mixer, rank):
    model = build(mixer, bias_rank=rank, max_position_embeddings=200)
    widen(model, slice(140, None))
    ids = random_ids(160)
    assert is_lean(decoded(model, ids[:120])[1])
    assert not is_lean(check_logits(model.double(), ids, tolerance=1e-9))


@pytest.mark.parametrize("level", [-900.0, 900.0])
@pytest.mark.parametrize("mixer", ["local", "conv"])
def test_windows_far_from_what_is_outside_them(mixer, level):
    model = build(mixer)
    with torch.no_grad():
        for block in model.model.layers:
            (block.mixer.position_bias if mixer == "local" else block.mixer.kernel_shift).add_(level)
    check_logits(model.double(), random_ids(40), tolerance=1e-9)


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("mixer", ["full", "local", "conv"])
def test_biases_that_spread_nearly_too_far(mixer, rank):
    model = build(mixer, bias_rank=rank)
    with torch.no_grad():
        for block in model.model.layers:
            layer = block.mixer
            for name in ("position_bias", "position_bias_u", "kernel_gain"):
                if getattr(layer, name, None) is not None:
                    getattr(layer, name).mul_(9.0)
    assert is_lean(check_logits(model, random_ids(60)))


def test_a_hidden_pair_of_positions():
    model = build("full")
    with torch.no_grad():
        model.model.layers[0].mixer.position_bias[10:, 4] = -torch.inf
    check_logits(model, random_ids(20))


def test_half_precision_is_computed_in_float32(model):
    model = model.bfloat16()
    ids = random_ids(20)
    logits = decoded(model, ids, prompt=1)[0]
    wide = copy.deepcopy(model).float()
    assert logits.dtype == torch.float32 or not is_plain(model)
    assert relative_error(logits[-1], whole(wide, ids)) < 0.05


def test_autocast_changes_nothing(model):
    ids = random_ids(20)
    plain, _ = decoded(model, ids)
    decoder = Decoder(model)
    decoder.read(ids[:3])
    with torch.autocast("cpu", torch.bfloat16):
        cast = torch.stack([decoder.next(token) for token in ids[3:]])
    assert torch.equal(cast, plain[1:])


def test_a_decoder_reads_another_sequence(model):
    decoder = Decoder(model)
    decoder.read(random_ids(30))
    decoder.next(1)
    ids = random_ids(12)
    decoder.read(ids[:-1])
    assert torch.equal(decoder.next(ids[-1]), decoded(model, ids, prompt=11)[0][-1])


# What a model may be made of


def test_modules_of_another_kind_are_called(model):
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    layer = model.model.layers[1].mlp_in
    doubled = Doubled(16, 64)
    doubled.load_state_dict(layer.state_dict())
    model.model.layers[1].mlp_in = doubled
    assert not is_lean(check_logits(model, random_ids(40)))


def test_hooks_are_called(model):
    model.model.layers[0].mixer.out_proj.register_forward_hook(lambda module, inputs, output: 3 * output)
    assert not is_lean(check_logits(model, random_ids(40)))


def test_a_patched_forward_is_called(model):
    layer = model.model.layers[0].mlp_out
    plain = layer.forward
    layer.forward = lambda x: 3 * plain(x)
    assert not is_plain(model)


def test_dropout_is_not_left_out():
    assert is_plain(build("local", dropout=0.5))
    assert not is_plain(build("local", dropout=0.5).train())
    assert is_plain(build("local").train())


def test_projections_without_bias_and_layers_without_gate():
    model = build("local")
    for block in model.model.layers:
        for name in ("k_proj", "v_proj", "out_proj"):
            getattr(block.mixer, name).bias = None
        block.mixer.q_proj.bias = None
        block.mixer.key_activation = torch.tanh
    model.model.layers[1].mixer.q_proj = model.model.layers[1].mixer.query_gate = None
    assert is_lean(check_logits(model, random_ids(40)))


# Terms


def mean_by_the_sums(keys, values, weights):
    """sum exp(k + w) v / sum exp(k + w) over the first dimension, float64: keys [S, G, n], values [.., P]."""
    exponent = keys.double() + weights.double()
    terms = torch.exp(exponent - exponent.amax(0))[..., None]
    return (terms * values.double()).sum(0) / terms.sum(0)


KEYS = {
    "1": lambda S: torch.randn(S, 3, 2),
    "10": lambda S: torch.randn(S, 3, 2) * 10,
    "100": lambda S: torch.randn(S, 3, 2) * 100,
    "1e4": lambda S: torch.randn(S, 3, 2) * 1e4,
    "rising": lambda S: torch.randn(S, 3, 2) + torch.arange(S)[:, None, None],
    "falling": lambda S: torch.randn(S, 3, 2) - torch.arange(S)[:, None, None],
    "in leaps": lambda S: torch.randn(S, 3, 2) + 200.0 * (torch.arange(S)[:, None, None] // 50),
    "just below a lift": lambda S: torch.full((S, 3, 2), LIFT) * (torch.arange(S) > 4)[:, None, None],
}


@pytest.mark.parametrize("spread", [0.0, 1.0, SPREAD])
@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("window", [1, 7, 90])
def test_window_terms(kind, window, spread):
    S, start = 500, 100
    keys, values = KEYS[kind](S), torch.randn(S, 3, 2, 4)
    bias = -torch.rand(3, 1, window) * spread
    bias[0, 0, 0] = -spread
    split = start - (window - 1)
    old, top = keys[:split].double(), keys[:split].double().amax(0)
    scaled = torch.exp(old - top)
    recent = keys[split:start].transpose(0, 1), values[split:start].transpose(0, 1).flatten(2)
    num, den = (scaled[..., None] * values[:split]).sum(0), scaled.sum(0)
    terms = WindowTerms(*recent, num, den, top)
    for t in range(start, S):
        terms.append(keys[t], values[t])
        if t % 13 == 0 or t == S - 1:
            weights = torch.zeros(t + 1, 3, 1)
            weights[t + 1 - window :] = bias.permute(2, 0, 1)
            weights += 3.0  # of all: must cancel
            mean = terms.mean(with_old(torch.exp(bias[:, 0]), 1.0)[:, None])
            expected = mean_by_the_sums(keys[: t + 1], values[: t + 1], weights)
            assert relative_error(mean, expected) < 1e-5


@pytest.mark.parametrize("spread", [0.0, 1.0, SPREAD])
@pytest.mark.parametrize("kind", KEYS)
def test_growing_terms(kind, spread, monkeypatch):
    monkeypatch.setattr("aft.models.terms.CHUNK", 160)
    S, start = 500, 100
    keys, values = KEYS[kind](S), torch.randn(S, 3, 2, 4)
    bias = torch.rand(3, 1, S) * spread
    terms = GrowingTerms(keys[:start].transpose(0, 1), values[:start].transpose(0, 1).flatten(2))
    for t in range(start, S):
        terms.append(keys[t], values[t])
        if t % 13 == 0 or t == S - 1:
            weights = bias[..., : t + 1]
            mean = terms.mean(torch.exp(weights - weights.amax()))
            expected = mean_by_the_sums(keys[: t + 1], values[: t + 1], weights.permute(2, 0, 1))
            assert len(terms) == t + 1
            assert relative_error(mean, expected) < 1e-5


# The iterator


def argmax_chain(model, ids, count):
    ids = list(ids)
    for _ in range(count):
        ids.append(int(whole(model, ids).argmax()))
    return ids[-count:]


def test_greedy_is_the_argmax_chain(model):
    assert list(stream(model, PROMPT, 60)) == argmax_chain(model, PROMPT, 60)


def test_greedy_is_what_generate_does(model):
    generated = model.generate(torch.tensor([PROMPT]), max_new_tokens=60, do_sample=False)[0, 5:].tolist()
    assert list(stream(model, PROMPT, 60)) == generated


@pytest.mark.parametrize("prompt", [torch.tensor(PROMPT), torch.tensor([PROMPT]), bytes(PROMPT)])
def test_forms_of_a_prompt(prompt):
    model = build("local")
    assert list(stream(model, prompt, 9)) == list(stream(model, PROMPT, 9))


def test_a_cache_of_the_beginning(model):
    ids = random_ids(15)
    with torch.inference_mode():
        cache = model(torch.tensor([ids[:9]]), use_cache=True).cache
    before = copy.deepcopy(cache.states)
    for _ in range(2):
        assert list(stream(model, ids, 30, cache=cache)) == list(stream(model, ids, 30))
    for after, at_first in zip(cache.states, before, strict=True):
        assert all(map(torch.equal, after, at_first))
    assert cache.columns == 9


def test_caches_that_are_of_something_else():
    model = build("local")
    with torch.inference_mode():
        cache = model(torch.tensor([PROMPT]), use_cache=True).cache
        two = model(torch.tensor([PROMPT, PROMPT]), use_cache=True).cache
        empty = model(torch.tensor([PROMPT]), use_cache=True).cache
    empty.reset()
    for wrong, prompt in ((cache, PROMPT), (cache, 5 * PROMPT), (two, 2 * PROMPT), (empty, PROMPT)):
        with pytest.raises(ValueError, match="cache must hold one sequence"):
            stream(model, prompt, cache=wrong)


def test_it_ends_where_it_should():
    model = build("simple")

    def tokens(*limit, **options):
        return list(itertools.islice(stream(model, PROMPT, *limit, **options), 70))

    endless = tokens()
    assert len(endless) == 70
    end = endless[6]
    first = endless.index(end)
    assert tokens(eos_token_id=end) == endless[: first + 1]
    for ends in ([end, 11], torch.tensor(end), torch.tensor([11, end])):
        assert tokens(eos_token_id=ends) == endless[: first + 1]
    for ends in ("a", [1.5]):
        with pytest.raises(TypeError, match="eos_token_id must be an id or several"):
            tokens(eos_token_id=ends)
    for longest, count in ((3, 0), (5, 0), (6, 1), (9, 4)):
        assert tokens(generation_config=GenerationConfig(max_length=longest)) == endless[:count]
    assert tokens(3, generation_config=GenerationConfig(max_length=9)) == endless[:3]
    model.generation_config.eos_token_id = end
    assert tokens() == endless[: first + 1]


def test_the_method_is_the_function():
    model = build("local")
    tokens = model.stream(PROMPT, 20, do_sample=True, seed=5)
    assert list(tokens) == list(stream(model, PROMPT, 20, do_sample=True, seed=5))


def test_streams_side_by_side(model):
    alone = [list(stream(model, prompt, 30)) for prompt in (PROMPT, [7])]
    together = zip(stream(model, PROMPT, 30), stream(model, [7], 30), strict=True)
    assert [list(tokens) for tokens in zip(*together, strict=True)] == alone


def test_threads_and_modes_are_as_before_between_tokens(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tokens = stream(build("local"), PROMPT)
        for _ in range(30):
            next(tokens)
            assert torch.get_num_threads() == 2
            assert not torch.is_inference_mode_enabled()
            assert not torch.is_autocast_enabled("cpu")
        del tokens
        assert torch.get_num_threads() == 2

        tokens = stream(build("local"), PROMPT)
        next(tokens)

        def broken(*_):
            assert torch.get_num_threads() == 1
            raise RuntimeError("broken")

        monkeypatch.setattr("aft.models.lean.LeanModel.__call__", broken)
        with pytest.raises(RuntimeError, match="broken"):
            next(tokens)
        assert torch.get_num_threads() == 2
        assert not torch.is_inference_mode_enabled()
    finally:
        torch.set_num_threads(threads)


def test_the_number_of_threads_comes_back_after_work_that_overlapped():
    threads = torch.get_num_threads()
    first_is_in, second_is_in, first_is_out = Event(), Event(), Event()

    def first():
        with quiet(torch.device("cpu")):
            first_is_in.set()
            second_is_in.wait()
        first_is_out.set()

    def second():
        first_is_in.wait()
        with quiet(torch.device("cpu")):
            second_is_in.set()
            first_is_out.wait()

    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(first), pool.submit(second)]:
                done.result(timeout=30)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_num_threads(threads)


def test_streams_in_threads(model):
    prompts = [[1, 2, 3], [4], [5, 6], [7]]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda prompt: list(stream(model, prompt, 40)), prompts))
    assert got == [list(stream(model, prompt, 40)) for prompt in prompts]


def test_an_abandoned_stream_is_gone():
    gc.collect()
    gc.disable()
    try:
        before = decoders_alive()
        tokens = stream(build("full"), PROMPT)
        next(tokens)
        next(tokens)
        assert decoders_alive() == before + 1
        del tokens
        assert decoders_alive() == before
    finally:
        gc.enable()


def decoders_alive():
    return sum(type(x) is Decoder for x in gc.get_objects())


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident size is read from /proc")
@pytest.mark.parametrize("mixer", MIXERS)
def test_memory_does_not_grow(mixer):
    tokens = stream(build(mixer, num_hidden_layers=1, max_position_embeddings=512), PROMPT)
    for _ in range(1200):
        next(tokens)
    gc.collect()
    before = resident()
    for _ in range(4000):
        next(tokens)
    gc.collect()
    assert resident() - before < 2 * 2**20


# Sampling


def sampled(model, count=200, **options):
    return list(stream(model, PROMPT, count, do_sample=True, **options))


def test_a_seed_repeats_itself_and_leaves_the_global_generator_alone():
    model = build("local")
    state = torch.get_rng_state()
    first = sampled(model, seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    assert sampled(model, seed=7) == first
    assert sampled(model, seed=8) != first


def test_without_a_seed_the_global_generator_counts():
    model = build("local")
    torch.manual_seed(3)
    first = sampled(model)
    assert sampled(model) != first
    torch.manual_seed(3)
    assert sampled(model) == first


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.7}, {"temperature": 1.7, "top_k": 6, "top_p": 0.9}],
    ids=str,
)
def test_draws_are_those_of_generate(model, options):
    torch.manual_seed(11)
    config = GenerationConfig(do_sample=True, max_new_tokens=60, **options)
    generated = model.generate(torch.tensor([PROMPT]), generation_config=config)[0, 5:].tolist()
    assert list(stream(model, PROMPT, generation_config=config, seed=11)) == generated
    assert list(stream(model, PROMPT, 60, do_sample=True, seed=11, **options)) == generated


def test_top_k_is_50_where_nobody_says_so_as_in_generate():
    model = build("simple", vocab_size=100)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.01)
    likeliest = set(whole(model, PROMPT).topk(50).indices.tolist())
    first, of_all = (
        {token for seed in range(30) for token in sampled(model, 1, seed=seed, **options)}
        for options in ({}, {"top_k": 0})
    )
    assert first <= likeliest
    assert not of_all <= likeliest


@pytest.mark.parametrize("temperature", [1e-4, 1e-12, 1e-45, 1e-300])
def test_no_temperature_is_too_small(model, temperature):
    assert sampled(model, 40, temperature=temperature) == list(stream(model, PROMPT, 40))
    assert sampled(model, 40, top_k=1) == list(stream(model, PROMPT, 40))


def test_frequencies_are_the_probabilities():
    model = build("simple")
    config = GenerationConfig(do_sample=True, temperature=1.3, top_k=0)
    probabilities = torch.softmax(whole(model, PROMPT) / 1.3, 0)
    draws = torch.tensor(
        [next(stream(model, PROMPT, generation_config=config, seed=seed)) for seed in range(600)]
    )
    frequencies = torch.bincount(draws, minlength=11) / 600
    deviation = (probabilities * (1 - probabilities) / 600).sqrt()
    assert ((frequencies - probabilities).abs() < 4.5 * deviation + 1e-9).all()


# Refusals: all of them at the call, before a token is asked for


@pytest.mark.parametrize(
    ("prompt", "error", "match"),
    [
        ([], ValueError, "prompt must hold at least one token"),
        (torch.empty(0, dtype=torch.int64), ValueError, "prompt must hold at least one token"),
        ([1, 11], ValueError, "vocab_size = 11, got 11 at 1"),
        ([-1], ValueError, "vocab_size = 11, got -1 at 0"),
        (torch.zeros(2, 3, dtype=torch.int64), ValueError, r"\[1, T\]; got \(2, 3\)"),
        (torch.zeros(3), TypeError, "torch.float32"),
        ("text", TypeError, "got str"),
        ([0.5], TypeError, "sequence of ints"),
        (3, TypeError, "got int"),
    ],
)
def test_prompts_that_are_none(prompt, error, match):
    with pytest.raises(error, match=match):
        stream(build("simple"), prompt)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"temperature": 0.0, "do_sample": True}, "temperature must be a finite number above 0"),
        ({"temperature": math.nan, "do_sample": True}, "temperature must be a finite number above 0"),
        ({"top_k": -1, "do_sample": True}, "top_k must be at least 0"),
        ({"top_p": 0.0, "do_sample": True}, "top_p must be above 0"),
        ({"top_p": 1.5, "do_sample": True}, "top_p must be above 0"),
        ({"temperature": 0.5}, "temperature has no effect without do_sample=True"),
        ({"top_k": 5, "do_sample": False}, "top_k has no effect without do_sample=True"),
    ],
)
def test_arguments_out_of_range(options, match):
    with pytest.raises(ValueError, match=match):
        stream(build("simple"), PROMPT, **options)


@pytest.mark.parametrize("count", [2.0, True, "2"])
def test_a_count_that_is_no_int(count):
    with pytest.raises(TypeError, match="max_new_tokens must be an int"):
        stream(build("simple"), PROMPT, count)


@pytest.mark.parametrize(
    "option",
    [
        {"num_beams": 2},
        {"num_return_sequences": 2, "do_sample": True},
        {"repetition_penalty": 1.2},
        {"no_repeat_ngram_size": 3},
        {"min_p": 0.1},
        {"typical_p": 0.9},
        {"min_new_tokens": 4},
        {"bad_words_ids": [[3]]},
        {"suppress_tokens": [1]},
        {"stop_strings": ["a"]},
        {"max_time": 1.0},
        {"penalty_alpha": 0.6},
    ],
    ids=lambda option: next(iter(option)),
)
def test_what_is_not_supported_is_refused_by_name(option):
    model = build("simple")
    name = next(iter(option))
    with pytest.raises(ValueError, match=f"stream does not support {name}"):
        stream(model, PROMPT, generation_config=GenerationConfig(**option))
    model.generation_config.update(**option)
    with pytest.raises(ValueError, match=f"stream does not support {name}"):
        stream(model, PROMPT)


def test_defaults_spelt_out_are_no_refusal():
    defaults = GenerationConfig(**GenerationConfig._get_default_generation_params())
    model = build("simple")
    assert len(list(stream(model, PROMPT, 4, generation_config=defaults))) == 4
