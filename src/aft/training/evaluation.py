"""Bits per byte, exactly: every byte of a text is predicted and counted once, and sums are float64."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from aft.models import AFTForCausalLM
from aft.training.scores import ByteScore

_TOKENS_A_BATCH = 16_384  # logits of a batch are [16384, 256] float64, 32 MB


@dataclass(frozen=True)
class Window:
    """Tokens `[start, end)` go in; the predictions from token `counted_from` on are counted."""

    start: int
    counted_from: int
    end: int


def windows(length: int, context: int, stride: int) -> Iterator[Window]:
    """Windows of at most `context` inputs, `stride` apart, that count each of `length` inputs exactly once.

    An input counted in any window but the first has at least `context - stride` inputs before it.
    """
    counted = 0
    for start in range(0, length, stride):
        end = min(start + context, length)
        yield Window(start, counted, end)
        counted = end
        if end == length:
            return


@torch.no_grad()
def score(
    model: AFTForCausalLM,
    tokens: np.ndarray,
    *,
    before: int | None = None,
    stride: int | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> ByteScore:
    """Bits that `model` spends on `tokens`, uint8 `[n]`, n >= 1, on the device where the model is.

    Args:
        before: the token that precedes the first one. Without it the first costs `log2(vocab_size)` bits.
        stride: distance between windows, at most the context; by default the context, so that none overlap.
        rank, world_size: count only every `world_size`-th batch; the scores of all ranks add up to the whole.
    """
    context = model.config.max_position_embeddings
    stride = context if stride is None else stride
    if not 1 <= stride <= context:
        raise ValueError(f"stride is {stride}; expected 1 to the model's context, {context}")
    if len(tokens) == 0:
        raise ValueError("there are no tokens to score")
    bits, count = 0.0, 0
    if before is not None:
        text = np.concatenate([np.array([before], dtype=np.uint8), tokens])
    else:
        text = tokens
        if rank == 0:
            bits, count = math.log2(model.config.vocab_size), 1
    was_training = model.training
    model.eval()
    try:
        batches = _batches(list(windows(len(text) - 1, context, stride)), max(1, _TOKENS_A_BATCH // context))
        for batch in batches[rank::world_size]:
            nats, n = _cost(model, text, batch)
            bits, count = bits + nats / math.log(2), count + n
    finally:
        model.train(was_training)
    return ByteScore(count, bits)


def _batches(all_windows: list[Window], size: int) -> list[list[Window]]:
    """Consecutive windows of one length, at most `size` together: only the tail of a text is shorter."""
    batches: list[list[Window]] = []
    for window in all_windows:
        length = window.end - window.start
        if batches and len(batches[-1]) < size and batches[-1][0].end - batches[-1][0].start == length:
            batches[-1].append(window)
        else:
            batches.append([window])
    return batches


def _cost(model: AFTForCausalLM, text: np.ndarray, batch: list[Window]) -> tuple[float, int]:
    """Nats and number of the predictions that a batch of windows counts."""
    pieces = np.stack([text[window.start : window.end + 1] for window in batch]).astype(np.int64)
    pieces = torch.from_numpy(pieces).to(model.device)
    logits = model(input_ids=pieces[:, :-1], use_cache=False).logits
    # MPS has no float64; there the sum over a window is float32 and only the sum over windows is wider.
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    nats = F.cross_entropy(logits.to(wide).transpose(1, 2), pieces[:, 1:], reduction="none")
    uncounted = torch.tensor([[window.counted_from - window.start] for window in batch], device=nats.device)
    counted = torch.arange(nats.shape[1], device=nats.device) >= uncounted
    return float(nats.masked_fill(~counted, 0).sum()), sum(
        window.end - window.counted_from for window in batch
    )
