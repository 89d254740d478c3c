"""Bits per dim, exactly: every sub-pixel of every image is predicted and counted once, sums are float64."""

import math

import numpy as np
import torch
import torch.nn.functional as F

from aft.data.pixels import PixelSequences
from aft.models import AFTForCausalLM
from aft.training.scores import PixelScore

_TOKENS_A_BATCH = 16_384  # logits of a batch are [16384, 256] float64, 32 MB


@torch.no_grad()
def score_pixels(
    model: AFTForCausalLM, images: np.ndarray, *, rank: int = 0, world_size: int = 1
) -> PixelScore:
    """Bits that `model` spends on `images`, uint8 `[N, H, W, C]` of its shape, on the device where it is.

    Args:
        rank, world_size: count only every `world_size`-th batch; the scores of all ranks add up to the whole.
    """
    sequences = PixelSequences(images, augment=False)
    length = model.config.max_position_embeddings
    size = max(1, _TOKENS_A_BATCH // length)
    nats, count = 0.0, 0
    was_training = model.training
    model.eval()
    try:
        for start in range(rank * size, len(sequences), world_size * size):
            items = [sequences[i] for i in range(start, min(start + size, len(sequences)))]
            inputs, labels = (
                torch.stack([item[name] for item in items]).to(model.device)
                for name in ("input_ids", "shift_labels")
            )
            logits = model(input_ids=inputs, use_cache=False).logits
            wide = torch.float32 if logits.device.type == "mps" else torch.float64
            cost = F.cross_entropy(logits.to(wide).transpose(1, 2), labels, reduction="sum")
            nats, count = nats + float(cost), count + labels.numel()
    finally:
        model.train(was_training)
    return PixelScore(count, nats / math.log(2))
