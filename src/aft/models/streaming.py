"""Tokens from a model one by one, without what `generate` does around each of them."""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from aft.models.cache import AFTCache
from aft.models.causal_lm import AFTForCausalLM
from aft.models.decoder import Decoder, check_cache, quiet

Choice = Callable[[Tensor], int]

HONOURED = {
    *("do_sample", "temperature", "top_k", "top_p"),
    *("eos_token_id", "max_new_tokens", "max_length"),
}
# What has no bearing on which tokens come: the cache, the form of `generate`'s result, special tokens that
# are never put in here, and settings of methods that other fields turn on.
WITHOUT_EFFECT = {
    *(
        "use_cache",
        "cache_implementation",
        "cache_config",
        "max_cache_len",
        "prefill_chunk_size",
        "low_memory",
    ),
    *("compile_config", "disable_compile", "continuous_batching_config"),
    *(
        "return_dict_in_generate",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
    ),
    *("bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config"),
    *("early_stopping", "length_penalty", "max_matching_ngram_size", "speculation_type"),
    *(
        "is_assistant",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
    ),
    *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
}
# Off at 1; every other field is off at 0, False, None or an empty list.
OFF_AT_ONE = {
    *("num_beams", "num_beam_groups", "num_return_sequences", "guidance_scale"),
    *("repetition_penalty", "encoder_repetition_penalty", "typical_p"),
}


def stream(
    model: AFTForCausalLM,
    prompt: Tensor | Sequence[int],
    max_new_tokens: int | None = None,
    *,
    generation_config: GenerationConfig | None = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    seed: int | None = None,
    cache: AFTCache | None = None,
) -> Iterator[int]:
    """The tokens that follow a prompt, each as soon as it is made; those of ``generate``, sooner.

    Work is done when a token is asked for: the prompt is read for the first one, and an iterator that is put
    aside costs nothing but its memory, which does not grow with AFT-simple, -local and -conv. Each token is
    made on one thread (the number that is set comes back before it is handed on), in float32 or wider.

    Where an argument is left out, ``generation_config`` decides, then ``model.generation_config``, then
    `generate`'s defaults: greedy, and ``top_k=50`` when it samples.

    Args:
        prompt: ids [T] or [1, T], at least one. Of a prompt longer than ``max_position_embeddings`` the model
            reads the end: `aft.models.cache.window_start`.
        max_new_tokens: how many; without a limit, here or in a configuration, there is no end.
        do_sample: draw from the distribution; else the likeliest token is taken.
        temperature: divides the logits; above 0.
        top_k, top_p: draw from the k likeliest, or from the likeliest that together have probability p; 0 and
            1 turn them off.
        eos_token_id: one or several that end the sequence; the one that does is handed on too.
        seed: draws come from a generator of their own; without it from torch's global one.
        cache: what a forward of the model returned for the first tokens of the prompt, which are then not
            read again; it stays as it is. Only for prompts of at most ``max_position_embeddings`` tokens.

    Raises:
        ValueError, TypeError: at the call, not at the first token. An argument is out of range or would have
            no effect, or a configuration sets what would change the tokens and is not supported here (beams,
            penalties, ...).
    """
    vocabulary = model.config.vocab_size
    ids = _ids(prompt, vocabulary)
    given = {
        "max_new_tokens": max_new_tokens,
        "do_sample": do_sample,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "eos_token_id": eos_token_id,
    }
    options = _options(given, generation_config, model.generation_config)
    for name in ("temperature", "top_k", "top_p"):
        if given[name] is not None and not options.get("do_sample", False):
            raise ValueError(f"{name} has no effect without do_sample=True, got {given[name]}")
    choose = _choice(options, vocabulary, seed, model.device)
    limit = options.get("max_new_tokens")
    if limit is not None:
        if isinstance(limit, bool) or not isinstance(limit, int):
            raise TypeError(f"max_new_tokens must be an int or None, got {type(limit).__name__}")
        if limit < 1:
            raise ValueError(f"max_new_tokens must be at least 1, or None for no end; got {limit}")
    elif options.get("max_length") is not None:
        limit = max(0, options["max_length"] - len(ids))
    ends = _ends(options.get("eos_token_id"))
    if cache is not None:
        check_cache(cache, len(ids), model.config.max_position_embeddings)
    return _tokens(model, ids, cache, limit, ends, choose)


def _tokens(
    model: AFTForCausalLM,
    ids: list[int],
    cache: AFTCache | None,
    limit: int | None,
    ends: set[int],
    choose: Choice,
) -> Iterator[int]:
    if limit == 0:
        return
    decoder = Decoder(model)
    logits = decoder.read(ids, cache)
    made = 0
    while True:
        with quiet(model.device):
            token = choose(logits)
        yield token
        made += 1
        if made == limit or token in ends:
            return
        logits = decoder.next(token)


def _ids(prompt: Tensor | Sequence[int], vocabulary: int) -> list[int]:
    if isinstance(prompt, Tensor):
        if prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool:
            raise TypeError(f"prompt must hold ids, ints; got a tensor of {prompt.dtype}")
        if not (prompt.ndim == 1 or (prompt.ndim == 2 and len(prompt) == 1)):
            raise ValueError(f"prompt must be one sequence, [T] or [1, T]; got {tuple(prompt.shape)}")
        ids = prompt.flatten().tolist()
    else:
        try:
            ids = [operator.index(token) for token in prompt]
        except TypeError:
            raise TypeError(
                "prompt must be ids, a tensor or a sequence of ints, as tokenizer(text).input_ids; "
                f"got {type(prompt).__name__}"
            ) from None
    if not ids:
        raise ValueError("prompt must hold at least one token, got none")
    for at, token in enumerate(ids):
        if not 0 <= token < vocabulary:
            raise ValueError(f"prompt must hold ids below vocab_size = {vocabulary}, got {token} at {at}")
    return ids


def _ends(eos_token_id: Any) -> set[int]:
    """The tokens that end a sequence, of one, several or None."""
    if eos_token_id is None:
        return set()
    try:
        several = eos_token_id if isinstance(eos_token_id, Iterable) else [eos_token_id]
        return {operator.index(token) for token in torch.as_tensor(several).flatten().tolist()}
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"eos_token_id must be an id or several, got {eos_token_id!r}") from None


def _options(given: dict[str, Any], *configs: GenerationConfig | None) -> dict[str, Any]:
    """What is set, by name: arguments before configurations, an earlier one of those before a later one."""
    options: dict[str, Any] = {}
    for config in reversed(configs):
        if config is not None:
            options |= {name: value for name, value in config.to_dict().items() if value is not None}
    options |= {name: value for name, value in given.items() if value is not None}
    for name, value in options.items():
        if name in HONOURED or name in WITHOUT_EFFECT:
            continue
        if not (value == 1 if name in OFF_AT_ONE else not value):
            raise ValueError(
                f"stream does not support {name}, got {value!r}; generate() does, or leave it unset"
            )
    return options


def _choice(options: dict[str, Any], vocabulary: int, seed: int | None, device: torch.device) -> Choice:
    """How a token is chosen from logits [V]."""
    temperature, top_k, top_p = (
        options.get(name, default) for name, default in (("temperature", 1.0), ("top_k", 50), ("top_p", 1.0))
    )
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"temperature must be a finite number above 0, got {temperature} (do_sample=False is greedy)"
        )
    if top_k < 0:
        raise ValueError(f"top_k must be at least 0 (0 is off), got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1 (1 is off), got {top_p}")
    if not options.get("do_sample", False) or temperature < 1e-30:  # by less float32 cannot divide
        return lambda logits: int(logits.argmax())

    warpers: list[LogitsProcessor] = []
    if temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(temperature)))
    if 0 < top_k < vocabulary:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(float(top_p)))
    unused = torch.empty(1, 0, dtype=torch.int64)  # ids, which these warpers take and do not read
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)

    def draw(logits: Tensor) -> int:
        scores = logits.float()[None]
        for warp in warpers:
            scores = warp(unused, scores)
        return int(torch.multinomial(scores.softmax(1), 1, generator=generator))

    return draw
