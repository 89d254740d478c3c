"""`generate()` with a cache of states, as users of Transformers know it, and the cache itself."""

import copy
import gc
import pickle
import weakref
from threading import Thread

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `models`")

from transformers import DynamicCache, StoppingCriteria, TextIteratorStreamer, set_seed
from transformers.generation.streamers import BaseStreamer

from aft.models import MIXERS, AFTCache, AFTConfig, AFTForCausalLM, AFTTokenizer
from aft.models.cache import window_start
from aft.ops import AFTState

LONGEST = 24
SETTINGS = {
    "vocab_size": 11,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": LONGEST,
    "num_attention_heads": 4,
    "window_size": 5,
    "kernel_size": 4,
}
VARIANTS = [*((mixer, {}) for mixer in MIXERS), ("local", {"bias_rank": 3}), ("full", {"bias_rank": 3})]
GREEDY = {"do_sample": False}


def build(mixer, seed=0, **options):
    torch.manual_seed(seed)
    model = AFTForCausalLM(AFTConfig(**SETTINGS | options, mixer=mixer)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.fixture(params=VARIANTS, ids=lambda variant: "-".join(map(str, (variant[0], *variant[1]))))
def model(request):
    return build(request.param[0], **request.param[1])


def tokens(B=2, T=20):
    return torch.randint(11, (B, T))


def left_padded():
    """Three sequences of 12, 5 and 10 tokens."""
    ids, mask = tokens(3, 12), torch.ones(3, 12, dtype=torch.int64)
    mask[1, :7], mask[2, :2] = 0, 0
    return ids, mask


# A forward pass with a cache


@pytest.mark.parametrize("cuts", [[1, 19], [19, 1], [4] * 5, [1] * 20, [2, 7, 1, 10], [20]])
def test_pieces_give_the_logits_of_the_whole(model, cuts):
    x = tokens()
    whole = model(x, use_cache=False)
    assert whole.cache is None
    cache, pieces = AFTCache(model.config), []
    for piece in x.split(cuts, 1):
        output = model(piece, cache=cache)
        assert output.cache is cache
        pieces.append(output.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole.logits, atol=1e-5, rtol=1e-5)
    assert cache.get_seq_length() == 20


def test_gradients_flow_through_the_cache(model):
    x = tokens()
    parameters = list(model.parameters())
    whole = torch.autograd.grad(model(x, use_cache=False).logits.square().sum(), parameters)
    cache = AFTCache(model.config)
    pieces = [model(piece, cache=cache).logits for piece in x.split([7, 1, 1, 11], 1)]
    cut = torch.autograd.grad(torch.cat(pieces, 1).square().sum(), parameters)
    for a, b in zip(cut, whole, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("cuts", [[12], [4, 8], [11, 1], [1] * 12])
def test_padding_takes_no_position(model, cuts):
    """Each row's logits are those that it has alone, wherever its padding lies."""
    ids, mask = left_padded()
    mask[0, 3:5] = 0
    cache, pieces, at = AFTCache(model.config), [], 0
    for n in cuts:
        pieces.append(model(ids[:, at : at + n], attention_mask=mask[:, : at + n], cache=cache).logits)
        at += n
    logits = torch.cat(pieces, 1)
    for row, seen in enumerate(mask.bool()):
        alone = model(ids[row, seen][None], use_cache=False).logits[0]
        torch.testing.assert_close(logits[row, seen], alone, atol=1e-5, rtol=1e-5)
    assert cache.states[0].length.tolist() == mask.sum(1).tolist()


def test_a_right_padded_prompt_ends_with_its_last_token(model):
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    output = model(ids, attention_mask=mask, use_cache=True)
    alone = model(ids[1:, :4], use_cache=True)
    torch.testing.assert_close(output.logits[1:, -1], alone.logits[:, -1], atol=1e-5, rtol=1e-5)
    more = tokens(2, 3)
    later = model(more, cache=output.cache).logits[1:]
    torch.testing.assert_close(later, model(more[1:], cache=alone.cache).logits, atol=1e-5, rtol=1e-5)


def test_training_keeps_no_cache_unless_asked(model):
    assert model(tokens()).cache is not None
    model.train()
    assert model(tokens()).cache is None
    assert model(tokens(), use_cache=True).cache is not None
    model.activation_checkpointing_enable()
    assert model(tokens(), use_cache=True).cache is None


def test_gradient_checkpointing_takes_no_cache(model):
    x = tokens()
    model.train().activation_checkpointing_enable()
    model(x, labels=x).loss.backward()
    with pytest.raises(ValueError, match="cache must be None under gradient checkpointing"):
        model(x, cache=AFTCache(model.config))
    with torch.no_grad():  # nothing runs twice
        assert model(x, cache=AFTCache(model.config)).cache.columns == 20


def test_past_the_last_position_a_call_is_an_error(model):
    cache = model(tokens(2, LONGEST), use_cache=True).cache
    with pytest.raises(ValueError, match=f"positions end at {LONGEST}, got a sequence of {LONGEST + 1}"):
        model(tokens(2, 1), cache=cache)
    ids, mask = tokens(2, LONGEST + 5), torch.ones(2, LONGEST + 5)
    mask[:, :5] = 0
    model(ids, attention_mask=mask)  # padding takes none
    with pytest.raises(TypeError, match=r"cache must be an aft\.models\.AFTCache, got DynamicCache"):
        model(tokens(), cache=DynamicCache())


def test_under_compile(model):
    torch.compiler.reset()
    x = tokens(2, 12)
    whole = model(x, use_cache=False).logits
    compiled = torch.compile(model, backend="aot_eager")
    cache = AFTCache(model.config)
    with torch.no_grad():
        pieces = [compiled(piece, cache=cache).logits for piece in x.split([6, 1, 1, 1, 3], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-5, rtol=1e-5)


def test_in_half_precision_the_sums_stay_wide(model):
    x = tokens()
    whole = model(x, use_cache=False).logits
    half = copy.deepcopy(model).bfloat16()
    for low, context in ((half, torch.no_grad()), (model, torch.autocast("cpu", torch.bfloat16))):
        cache = AFTCache(model.config)
        with context:
            pieces = [low(piece, cache=cache).logits for piece in x.split([9, 1, 1, 9], 1)]
        state = cache.states[0]
        assert state.keys.dtype == torch.bfloat16
        assert {state.num.dtype, state.den.dtype, state.max.dtype} == {torch.float64}
        error = (torch.cat(pieces, 1).float() - whole).norm() / whole.norm()
        assert error < 0.1
        assert low.generate(x[:, :4], max_new_tokens=5, **GREEDY).shape == (2, 9)


# generate()


def test_the_context_past_the_last_position(model):
    """The rule of `window_start`, with a cache and without."""
    assert [window_start(n, 24) for n in (1, 24, 25, 36, 37, 48, 49)] == [0, 0, 12, 12, 24, 24, 36]
    assert [window_start(n, 1) for n in (1, 2, 3)] == [0, 1, 2]
    x = tokens(2, 18)
    options = GREEDY | {"max_new_tokens": 45}
    got = model.generate(x, **options)
    assert torch.equal(got, model.generate(x, use_cache=False, **options))
    for length in range(18, got.shape[1]):
        context = got[:, window_start(length, LONGEST) : length]
        assert torch.equal(model(context, use_cache=False).logits[:, -1].argmax(-1), got[:, length])
    long = tokens(2, 80)
    assert torch.equal(model.generate(long, **options), model.generate(long, use_cache=False, **options))


def test_left_padded_prompts_generate_as_alone(model):
    """Each also begins anew where it would alone."""
    ids, mask = left_padded()
    options = GREEDY | {"max_new_tokens": 40}
    together = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(together, model.generate(ids, attention_mask=mask, use_cache=False, **options))
    for row, seen in enumerate(mask.bool()):
        alone = model.generate(ids[row, seen][None], **options)
        assert torch.equal(together[row, 12:], alone[0, int(seen.sum()) :])


def test_right_padded_prompts_generate_as_alone(model):
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    options = GREEDY | {"max_new_tokens": 30}
    together = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(together[1:, 9:], model.generate(ids[1:, :4], **options)[:, 4:])


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 3, "do_sample": True, "num_return_sequences": 3},
        {"do_sample": True, "top_k": 4},
        {"do_sample": True, "top_p": 0.8, "temperature": 1.7, "num_return_sequences": 3},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    ],
    ids=str,
)
def test_with_a_cache_and_without(model, options):
    ids, mask = left_padded()
    options = GREEDY | {"max_new_tokens": 20} | options
    results = []
    for use_cache in (True, False):
        set_seed(5)
        results.append(model.generate(ids, attention_mask=mask, use_cache=use_cache, **options))
    assert torch.equal(*results)


@pytest.mark.parametrize("size", [1, 3, 4, 50])
def test_prefill_in_chunks(model, size):
    ids, mask = left_padded()
    options = GREEDY | {"attention_mask": mask, "max_new_tokens": 8}
    whole = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, prefill_chunk_size=size, **options), whole)


def test_prefill_in_chunks_past_the_last_position_is_refused(model):
    with pytest.raises(ValueError, match=r"prefill_chunk_size.*got 10 of 30"):
        model.generate(tokens(2, 30), prefill_chunk_size=10, max_new_tokens=3, **GREEDY)


def test_going_on_from_a_returned_cache(model):
    x, options = tokens(1, 8), GREEDY | {"max_new_tokens": 5}
    first = model.generate(x, return_dict_in_generate=True, **options)
    assert isinstance(first.cache, AFTCache)
    longer = torch.cat([first.sequences, tokens(1, 4)], 1)
    again = model.generate(longer, cache=first.cache, **options)
    assert torch.equal(again, model.generate(longer, **options))


def test_generation_from_embeddings(model):
    x = tokens(2, 8)
    embedded = model.get_input_embeddings()(x)
    got = model.generate(inputs_embeds=embedded, max_new_tokens=9, **GREEDY)
    assert torch.equal(got, model.generate(x, max_new_tokens=9, **GREEDY)[:, 8:])
    with pytest.raises(ValueError, match="takes all tokens"):
        model.generate(inputs_embeds=embedded, max_new_tokens=30, **GREEDY)


def test_sequences_end_apart(model):
    x = tokens(4, 6)
    free = model.generate(x, max_new_tokens=15, **GREEDY)[:, 6:]
    end = int(free[0, 3])
    options = GREEDY | {"eos_token_id": end, "pad_token_id": 0, "attention_mask": torch.ones_like(x)}
    got = model.generate(x, max_new_tokens=15, **options)[:, 6:]
    for row, wanted in zip(got, free, strict=True):
        stop = (wanted == end).nonzero()
        length = int(stop[0]) + 1 if len(stop) else len(row)
        assert torch.equal(row[:length], wanted[:length])
        assert (row[length:] == 0).all()


class _Count(BaseStreamer):
    def __init__(self):
        self.got = []

    def put(self, value):
        self.got.append(value.flatten().tolist())

    def end(self):
        self.got.append("end")


class _After(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **_):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_streamers_and_stopping_criteria(model):
    x, streamer = tokens(1, 6), _Count()
    got = model.generate(x, max_new_tokens=30, streamer=streamer, stopping_criteria=[_After(11)], **GREEDY)
    assert got.shape == (1, 11)
    assert streamer.got == [x.flatten().tolist(), *([token] for token in got[0, 6:].tolist()), "end"]


def test_text_comes_as_it_is_made():
    model, tokenizer = build("local", vocab_size=256), AFTTokenizer()
    inputs = tokenizer(["To be"], return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    options = GREEDY | {"max_new_tokens": 20}
    thread = Thread(target=model.generate, kwargs={**inputs, **options, "streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(model.generate(**inputs, **options)[0, 5:])


def test_what_a_state_cannot_do_is_refused_by_name(model):
    x = tokens(1, 6)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(x, assistant_model=build("simple"), max_new_tokens=4, **GREEDY)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(x, prompt_lookup_num_tokens=2, max_new_tokens=4, **GREEDY)
    for name in ("static", "quantized", "dynamic", "offloaded"):
        with pytest.raises(ValueError, match=f"keeps an AFTCache; got '{name}'"):
            model.generate(x, cache_implementation=name, max_new_tokens=4, **GREEDY)
    with pytest.raises(TypeError, match="got DynamicCache"):
        model.generate(x, cache=DynamicCache(), max_new_tokens=4, **GREEDY)
    with pytest.raises(NotImplementedError, match="cannot forget tokens"):
        model(x, use_cache=True).cache.crop(-1)


def test_it_cannot_assist_another_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=11, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=None)
    other = GPT2LMHeadModel(config).eval()
    with pytest.raises(ValueError, match="AFTForCausalLM cannot assist another model"):
        other.generate(tokens(1, 6), assistant_model=build("simple"), max_new_tokens=4, **GREEDY)


def test_a_prompt_goes_on_where_the_cache_ends(model):
    x = tokens(1, 6)
    for read in (x, tokens(1, 9)):
        with pytest.raises(ValueError, match=f"got {read.shape[1]} tokens in the cache and none after them"):
            model.generate(x, cache=model(read).cache, max_new_tokens=4, **GREEDY)
    with pytest.raises(ValueError, match="use_cache must not be False where a cache is given"):
        model.generate(x, cache=model(x[:, :3]).cache, use_cache=False, max_new_tokens=4, **GREEDY)


# The cache


@pytest.mark.parametrize("mixer", ["simple", "local", "conv"])
def test_the_state_does_not_grow(mixer):
    model = build(mixer, max_position_embeddings=1000)
    cache = AFTCache(model.config)
    with torch.no_grad():
        model(tokens(1, 8), cache=cache)
        sizes = {cache.nbytes}
        for _ in range(3):
            model(tokens(1, 1), cache=cache)
            model(tokens(1, 200), cache=cache)
            sizes.add(cache.nbytes)
    assert len(sizes) == 1


def test_rows_of_a_cache(model):
    x, y = tokens(3, 9), tokens(3, 4)
    wanted = model(torch.cat([x, y], 1), use_cache=False).logits[:, 9:]

    def read():
        return model(x, use_cache=True).cache

    order = torch.tensor([2, 0, 0, 1])
    cache = read()
    cache.reorder_cache(order)
    torch.testing.assert_close(model(y[order], cache=cache).logits, wanted[order], atol=1e-5, rtol=1e-5)
    cache = read()
    cache.batch_select_indices(order[:2])
    logits = model(y[order[:2]], cache=cache).logits
    torch.testing.assert_close(logits, wanted[order[:2]], atol=1e-5, rtol=1e-5)
    cache = read()
    cache.batch_repeat_interleave(2)
    logits = model(y.repeat_interleave(2, 0), cache=cache).logits
    torch.testing.assert_close(logits, wanted.repeat_interleave(2, 0), atol=1e-5, rtol=1e-5)
    assert cache.batch_size == 6
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(
        model(x, cache=cache).logits, model(x, use_cache=False).logits, atol=1e-5, rtol=1e-5
    )


def test_positions_are_those_of_the_rows_that_are_left(model):
    x, mask = tokens(2, LONGEST), torch.ones(2, LONGEST, dtype=torch.int64)
    mask[1, :10] = 0
    cache = model(x, attention_mask=mask).cache
    cache.batch_select_indices(torch.tensor([1]))
    more = tokens(1, 4)
    wanted = model(torch.cat([x[1:, 10:], more], 1)).logits[:, -4:]
    torch.testing.assert_close(model(more, cache=cache).logits, wanted, atol=1e-5, rtol=1e-5)


def test_a_cache_of_saved_states(model):
    x, y = tokens(2, 9), tokens(2, 4)
    cache = model(x, use_cache=True).cache
    saved = [state._asdict() for state in cache.states]
    wanted = model(y, cache=cache).logits
    restored = AFTCache(states=[AFTState(**tensors) for tensors in saved])
    assert restored.get_seq_length() == 9
    torch.testing.assert_close(model(y, cache=restored).logits, wanted, atol=0, rtol=0)
    with pytest.raises(ValueError, match="either the model's config or the states"):
        AFTCache()


def test_two_branches_from_one_cache(model):
    """A copy of a cache is another past."""
    x, y, z = tokens(2, 9), tokens(2, 1), tokens(2, 1)
    with torch.no_grad():
        cache = model(x, use_cache=True).cache
        branch = copy.deepcopy(cache)
        first, second = model(y, cache=cache).logits, model(z, cache=branch).logits
    for piece, logits in ((y, first), (z, second)):
        whole = model(torch.cat([x, piece], 1), use_cache=False).logits[:, -1:]
        torch.testing.assert_close(logits, whole, atol=1e-5, rtol=1e-5)


# Single tokens of one sequence, which leave the modules for the short way


def one_by_one(model, x, cache):
    """Logits of each token of x [1, n], read alone and without gradients."""
    with torch.no_grad():
        return torch.cat([model(token, cache=cache).logits for token in x.split(1, 1)], 1)


def whole(model, x):
    with torch.no_grad():
        return model(x, use_cache=False).logits


def begun(model, x):
    """A cache that has read x [1, n] and gone the short way for a while."""
    cache = AFTCache(model.config)
    logits = one_by_one(model, x, cache)
    assert cache.shortcut
    torch.testing.assert_close(logits, whole(model, x), atol=1e-5, rtol=1e-5)
    return cache


def test_the_short_way_and_back(model):
    x = tokens(1, LONGEST)
    cache = begun(model, x[:, :14])
    assert cache.longest == cache.columns == 14
    pieces = [
        one_by_one(model, x[:, 14:16], cache),
        model(x[:, 16:19], cache=cache).logits,  # with gradients, through the modules
        one_by_one(model, x[:, 19:20], cache),
        model(x[:, 20:21], cache=cache).logits,
        one_by_one(model, x[:, 21:], cache),
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), whole(model, x)[:, 14:], atol=1e-5, rtol=1e-5)
    assert not any(x.is_inference() for state in cache.states for x in state)
    torch.cat(pieces, 1).sum().backward()
    with pytest.raises(ValueError, match=f"positions end at {LONGEST}"):
        one_by_one(model, x[:, :1], cache)


def test_a_state_on_the_short_way_is_that_of_the_modules(model):
    x = tokens(1, 17)
    cache, other = begun(model, x), AFTCache(model.config)
    whole = model(x, cache=other)
    assert whole.cache is other
    for short, long in zip(cache.states, other.states, strict=True):
        assert torch.equal(short.length, long.length)
        torch.testing.assert_close(short.keys, long.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(short.values, long.values, atol=1e-5, rtol=1e-5)
        scale = torch.exp(short.max - long.max)  # sums may be relative to different keys
        torch.testing.assert_close(short.den * scale, long.den, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(short.num * scale[..., None], long.num, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("change", ["in place", "data", "other parameter", "loaded"])
def test_new_weights_count_at_once(model, change):
    x = tokens(1, 20)
    cache = begun(model, x[:, :12])
    linear = model.model.layers[0].mlp_in
    new = linear.weight.detach() * 1.5
    with torch.no_grad():
        match change:
            case "in place":
                linear.weight.copy_(new)
            case "data":
                linear.weight.data = new
            case "other parameter":
                linear.weight = torch.nn.Parameter(new)
            case "loaded":
                model.load_state_dict(model.state_dict() | {"model.layers.0.mlp_in.weight": new})
    branch = AFTCache(states=cache.states)
    wanted = model(x[:, 12:], cache=branch).logits
    got = one_by_one(model, x[:, 12:], cache)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_caches_share_a_copy_of_the_weights_while_it_is_theirs(model):
    x = tokens(1, 14)
    first, second = begun(model, x[:, :4]), begun(model, x[:, :6])
    assert first.shortcut._weights is second.shortcut._weights
    for t in range(6, 14):  # in turns, and each as if it was alone
        got = [one_by_one(model, x[:, t - ago : t - ago + 1], c) for c, ago in ((first, 2), (second, 0))]
        alone = whole(model, x)
        for logits, at in zip(got, (t - 2, t), strict=True):
            torch.testing.assert_close(logits, alone[:, at : at + 1], atol=1e-5, rtol=1e-5)
    # Without a new version of the parameter: a cache that begins now takes no notice of older ones.
    model.model.layers[0].mlp_in.weight.data.mul_(1.5)
    third = begun(model, x)
    assert third.shortcut._weights is not first.shortcut._weights
    kept = weakref.ref(third.shortcut._weights)
    del third
    gc.collect()
    assert kept() is None


def test_modules_that_came_later_count_at_once(model):
    class Doubled(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x):
            return 2 * self.base(x)

    x = tokens(1, 20)
    cache = begun(model, x[:, :12])
    block = model.model.layers[0]
    block.mlp_in = Doubled(block.mlp_in)
    branch = AFTCache(states=cache.states)
    wanted = model(x[:, 12:], cache=branch).logits
    got = one_by_one(model, x[:, 12:], cache)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_patches_and_hooks_on_all_modules_are_called(model):
    x, seen = tokens(1, 16), []
    cache = begun(model, x[:, :12])
    block = model.model.layers[0]
    forward = block.mlp_in.forward
    block.mlp_in.forward = lambda x: seen.append("patched") or forward(x)
    one_by_one(model, x[:, 12:13], cache)
    assert seen == ["patched"]
    del block.mlp_in.forward
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    one_by_one(model, x[:, 13:14], cache)
    hook.remove()
    assert model.lm_head in seen


def test_a_token_that_is_none_is_an_error_on_the_short_way(model):
    cache = begun(model, tokens(1, 8))
    for token in (-1, 11):
        with pytest.raises(IndexError):
            one_by_one(model, torch.tensor([[token]]), cache)


def test_hooks_and_training_take_the_long_way(model):
    x = tokens(1, 22)
    cache = begun(model, x[:, :12])
    seen = []
    hook = model.model.layers[1].mlp_out.register_forward_hook(lambda *_: seen.append(1))
    one_by_one(model, x[:, 12:14], cache)
    assert len(seen) == 2
    hook.remove()
    for layer in model.model.layers:
        layer.dropout.p = 0.5
    model.train()
    first = one_by_one(model, x[:, 14:15], copy.deepcopy(cache))
    assert not torch.equal(first, one_by_one(model, x[:, 14:15], copy.deepcopy(cache)))


@pytest.mark.parametrize("mixer", ["local", "full"])
def test_biases_that_spread_too_far_take_the_long_way(mixer):
    model = build(mixer)
    with torch.no_grad():
        model.model.layers[1].mixer.position_bias[17, 15] = 90.0
    x = tokens(1, LONGEST)
    cache = AFTCache(model.config)
    logits = one_by_one(model, x, cache)
    torch.testing.assert_close(logits, whole(model, x), atol=1e-5, rtol=1e-5)


def test_copies_and_saved_caches_on_the_short_way(model):
    x = tokens(1, 20)
    cache = begun(model, x[:, :14])
    wanted = whole(model, x)[:, 14:]
    for branch in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), AFTCache(states=cache.states)):
        torch.testing.assert_close(one_by_one(model, x[:, 14:], branch), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(one_by_one(model, x[:, 14:], cache), wanted, atol=1e-5, rtol=1e-5)
    assert cache.get_seq_length() == 20


def test_another_model_may_take_a_cache_over(model):
    x = tokens(1, 18)
    cache = begun(model, x[:, :12])
    twin = copy.deepcopy(model)
    torch.testing.assert_close(
        one_by_one(twin, x[:, 12:], cache), whole(model, x)[:, 12:], atol=1e-5, rtol=1e-5
    )


def test_several_sequences_take_the_long_way(model):
    x, cache = tokens(2, 15), AFTCache(model.config)
    with torch.no_grad():
        logits = torch.cat([model(token, cache=cache).logits for token in x.split(1, 1)], 1)
    assert cache.shortcut is None
    torch.testing.assert_close(logits, whole(model, x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("simple", {}), ("local", {})),
        (("local", {}), ("simple", {})),
        (("local", {}), ("full", {})),
        (("full", {}), ("conv", {})),
        (("conv", {}), ("attention", {})),
        (("local", {"window_size": 5}), ("local", {"window_size": 8})),
        (("local", {"window_size": 8}), ("local", {"window_size": 5})),
        (("conv", {"kernel_size": 4}), ("conv", {"kernel_size": 6})),
        (("simple", {}), ("simple", {"num_hidden_layers": 3})),
    ],
    ids=str,
)
def test_a_cache_of_another_model_is_refused(source, target):
    """On the short way too, and in a stream."""
    x, token = tokens(1, 9), tokens(1, 1)
    first, second = build(source[0], **source[1]), build(target[0], **target[1])
    for mode in (torch.enable_grad, torch.no_grad):
        cache = first(x, use_cache=True).cache
        with (
            mode(),
            pytest.raises(ValueError, match=r"state\.\w+ must be .* is it another|cache must be of 3 layers"),
        ):
            second(token, cache=cache)
    cache = first(x, use_cache=True).cache
    with pytest.raises(ValueError, match=r"is it another|cache must be of 3 layers"):
        next(second.stream(torch.cat([x, token], 1), do_sample=False, cache=cache))


def test_hooks_on_mixers_fire_with_a_cache(model):
    seen = []
    for block in model.model.layers:
        block.mixer.register_forward_hook(lambda *_: seen.append(1))
    output = model(tokens(2, 6), use_cache=True)
    model(tokens(2, 1), cache=output.cache)
    assert len(seen) == 4
