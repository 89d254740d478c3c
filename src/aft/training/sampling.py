"""Text from a model, byte by byte, as `AFTForCausalLM.stream` makes it."""

import codecs
import math
from collections.abc import Callable

import numpy as np
import torch
from transformers import GenerationConfig

from aft.data import decode, encode
from aft.models import AFTForCausalLM
from aft.training.errors import SamplingError

START = b"\n"  # stands in for an empty prompt: a text begins where a line begins


def generation_config(*, temperature: float, top_k: int, top_p: float, vocab_size: int) -> GenerationConfig:
    """How to choose a byte. Temperature 0 takes the likeliest; top_k 0, or above the vocabulary, is off.

    Raises:
        SamplingError: an option that is negative, not a number or out of its range.
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise SamplingError(
            f"temperature is {temperature:g}; expected a finite number, at least 0 (0 is greedy)"
        )
    if top_k < 0:
        raise SamplingError(f"top_k is {top_k}; expected at least 0 (0 is off)")
    if not 0 < top_p <= 1:
        raise SamplingError(f"top_p is {top_p:g}; expected 0 < top_p <= 1 (1 is off)")
    if temperature < 1e-6:  # logits divided by less overflow
        return GenerationConfig(do_sample=False)
    return GenerationConfig(
        do_sample=True, temperature=temperature, top_k=min(top_k, vocab_size), top_p=top_p
    )


class Utf8Writer:
    """Hands on text as its bytes come, holding unfinished UTF-8 back; what is not UTF-8 becomes U+FFFD."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._write = write

    def put(self, data: bytes, *, last: bool = False) -> None:
        text = self._decoder.decode(data, final=last)
        if text:
            self._write(text)


def generate_text(
    model: AFTForCausalLM,
    prompt: bytes,
    max_new_tokens: int,
    choice: GenerationConfig,
    seed: int,
    write: Callable[[str], None],
) -> None:
    """Write `prompt` and the `max_new_tokens` bytes that the model adds to it, as they come.

    An empty prompt starts after a newline, which is not written. With 0 new bytes only the prompt is.

    Raises:
        DataError: a byte of the prompt that the model's alphabet lacks.
    """
    alphabet = model.config.alphabet
    source = "--prompt" if prompt else "the newline that stands in for an empty --prompt"
    tokens = encode(np.frombuffer(prompt or START, dtype=np.uint8), alphabet, source)
    writer = Utf8Writer(write)
    writer.put(prompt)
    if max_new_tokens:
        start = torch.from_numpy(tokens.astype(np.int64))
        for token in model.stream(start, max_new_tokens, generation_config=choice, seed=seed):
            writer.put(decode([token], alphabet))
    writer.put(b"", last=True)
