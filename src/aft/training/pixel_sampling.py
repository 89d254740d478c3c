"""Images from a pixel model, sub-pixel by sub-pixel, through Transformers' `generate`; and grids of them."""

import io
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import GenerationConfig, PreTrainedModel, set_seed
from transformers.generation.streamers import BaseStreamer

from aft.data import START, conform, read_image, to_images, to_tokens
from aft.models import AFTForCausalLM
from aft.training.errors import SamplingError
from aft.training.sampling import generation_config

HIDDEN = 128  # the gray that stands for what a completion does not see

_MARGIN = 2  # pixels between the images of a grid
_SHOWN = 64  # pixels that the longer side of an image takes at least, as far as a whole factor allows


def image_shape(model: PreTrainedModel) -> tuple[int, int, int]:
    """(height, width, channels) of a pixel model's images.

    Raises:
        SamplingError: the model is one of text.
    """
    shape = getattr(model.config, "image_shape", None)
    if shape is None:
        name = model.config.name_or_path or "the model"
        raise SamplingError(f"{name} is a model of text: its configuration has no image_shape")
    height, width, channels = shape
    return height, width, channels


def sample_images(
    model: AFTForCausalLM,
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 16,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> np.ndarray:
    """Draw `count` images, uint8 `[count, H, W, C]`.

    Args:
        temperature, top_k, top_p: as `generation_config` has them.
        seed: of the draw, which depends on `batch_size` too.
        batch_size: images drawn at once.
        progress: called after every step with the sub-pixels drawn so far and those to draw in all.

    Raises:
        SamplingError: a model of text, or an option out of its range.
    """
    if count < 1:
        raise SamplingError(f"count is {count}; expected at least 1")
    shape = image_shape(model)
    choice = generation_config(
        temperature=temperature, top_k=top_k, top_p=top_p, vocab_size=model.config.vocab_size
    )
    nothing = np.empty((count, 0), dtype=np.uint8)
    return to_images(_continue(model, nothing, choice, seed, batch_size, progress), shape)


def complete_images(
    model: AFTForCausalLM,
    images: np.ndarray,
    keep: float = 0.5,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 16,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the lower part of images anew: (masked, completed), both uint8 `[N, H, W, C]`.

    The first `round(keep * H)` rows stay as they are. Of the masked images the others are gray.

    Args:
        images: uint8 `[N, H, W, C]`, of the model's size.
        keep: share of the rows to keep, from 0 to below 1.
        temperature, top_k, top_p, seed, batch_size, progress: as for `sample_images`.

    Raises:
        SamplingError: a model of text, an option out of its range, or images of another shape.
    """
    shape = image_shape(model)
    if images.ndim != 4 or images.shape[1:] != shape or not len(images):
        wanted = ", ".join(map(str, shape))
        raise SamplingError(f"images are {list(images.shape)}; expected [N, H, W, C] = [N, {wanted}]")
    if not 0 <= keep < 1:
        raise SamplingError(f"keep is {keep:g}; expected a share of the rows, 0 <= keep < 1")
    rows = round(keep * shape[0])
    if rows == shape[0]:
        raise SamplingError(f"keep {keep:g} of {shape[0]} rows leaves none to complete")
    choice = generation_config(
        temperature=temperature, top_k=top_k, top_p=top_p, vocab_size=model.config.vocab_size
    )
    masked = images.copy()
    masked[:, rows:] = HIDDEN
    completed = _continue(model, to_tokens(images[:, :rows]), choice, seed, batch_size, progress)
    return masked, to_images(completed, shape)


def read_images(model: PreTrainedModel, paths: Iterable[str | Path], *, resize: bool = False) -> np.ndarray:
    """Image files as a pixel model takes them, uint8 `[N, H, W, C]`.

    Raises:
        SamplingError: the model is one of text.
        DataError: a file is no image or, without `resize`, of another size; the message names it.
    """
    shape = image_shape(model)
    return np.stack([conform(read_image(path, shape[2]), shape, str(path), resize=resize) for path in paths])


def grid_png(images: np.ndarray, columns: int) -> bytes:
    """A PNG of images `[N, H, W, C]`, uint8, row by row; small ones are enlarged by a whole factor."""
    if images.ndim != 4 or not len(images) or columns < 1:
        raise ValueError(f"images [N, H, W, C] and columns >= 1 were expected, got {images.shape}, {columns}")
    factor = max(1, _SHOWN // max(images.shape[1:3]))
    images = images.repeat(factor, axis=1).repeat(factor, axis=2)
    count, height, width, channels = images.shape
    columns = min(columns, count)
    rows = -(-count // columns)
    down, right = height + _MARGIN, width + _MARGIN
    canvas = np.full((rows * down + _MARGIN, columns * right + _MARGIN, channels), 255, dtype=np.uint8)
    for index, image in enumerate(images):
        top, left = _MARGIN + index // columns * down, _MARGIN + index % columns * right
        canvas[top : top + height, left : left + width] = image
    file = io.BytesIO()
    Image.fromarray(canvas[..., 0] if channels == 1 else canvas).save(file, "PNG")
    return file.getvalue()


def completions_png(originals: np.ndarray, masked: np.ndarray, completed: np.ndarray) -> bytes:
    """A PNG with a row for each image: the original, what the model saw of it, and what it made of that."""
    rows = np.stack([originals, masked, completed], axis=1)
    return grid_png(rows.reshape(-1, *originals.shape[1:]), columns=3)


class _Count(BaseStreamer):
    """Counts what `generate` appends, over several calls; what it puts first is the prompt."""

    def __init__(self, total: int, progress: Callable[[int, int], None]) -> None:
        self._total = total
        self._done = 0
        self._progress = progress
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self._done += value.numel()
            self._progress(self._done, self._total)
        self._is_prompt = False

    def end(self) -> None:
        self._is_prompt = True


def _continue(
    model: AFTForCausalLM,
    known: np.ndarray,
    choice: GenerationConfig,
    seed: int,
    batch_size: int,
    progress: Callable[[int, int], None],
) -> np.ndarray:
    """All tokens, int64 `[N, H*W*C]`, of images whose first ones are known, uint8 `[N, n]`."""
    if batch_size < 1:
        raise SamplingError(f"batch_size is {batch_size}; expected at least 1")
    missing = int(np.prod(image_shape(model))) - known.shape[1]
    streamer = _Count(len(known) * missing, progress)
    set_seed(seed)
    drawn = []
    for first in range(0, len(known), batch_size):
        batch = torch.from_numpy(known[first : first + batch_size].astype(np.int64))
        inputs = torch.nn.functional.pad(batch, (1, 0), value=START).to(model.device)
        output = model.generate(
            inputs, generation_config=choice, max_new_tokens=missing, use_cache=True, streamer=streamer
        )
        drawn.append(output[:, 1:].cpu().numpy())
    return np.concatenate(drawn)
