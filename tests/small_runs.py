"""Runs small enough for tests, and the `aft` command as a child process."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from aft.training.recipes import ByteRecipe, ClassifierRecipe, NamedRecipe, PixelRecipe, Recipe

TINY = ByteRecipe(
    mixer="simple",
    num_layers=1,
    hidden_size=16,
    num_heads=2,
    context=16,
    dropout=0.1,
    split=(0.8, 0.2),
    batch_size=4,
    steps=8,
    warmup_steps=2,
    lr=1e-2,
    log_every=2,
    eval_every=4,
    eval_bytes=64,
    save_every=4,
)

# With all that changes images while training.
TINY_CLASSES = ClassifierRecipe(
    num_layers=2,
    hidden_size=16,
    num_heads=4,
    kernel_size=3,
    patch_size=4,
    image_size=8,
    dropout=0.1,
    drop_path=0.1,
    crop="padded",
    padding=1,
    crop_ratio=1.0,
    repeated_augmentation=2,
    batch_size=5,
    epochs=2,
    warmup_epochs=0,
    lr=3e-3,
    log_every=2,
)

TINY_PIXELS = PixelRecipe(
    mixer="local",
    num_layers=1,
    hidden_size=16,
    num_heads=2,
    window_size=8,
    kernel_size=8,
    dropout=0.1,
    batch_size=5,
    steps=8,
    warmup_steps=2,
    lr=1e-2,
    log_every=2,
    eval_every=4,
    eval_images=2,
    save_every=4,
)


def spelled(recipe: Recipe, *left_out: str) -> list[str]:
    """A recipe for the command line."""
    values = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    return [
        f"--{'no-' * (value is False)}{name.replace('_', '-')}" + f"={value}" * (not isinstance(value, bool))
        for name, value in values.items()
        if name not in left_out
    ]


TINY_OPTIONS = [*spelled(TINY, "split", "bias_rank", "min_lr", "tie_embeddings")]
CLASSES_OPTIONS = [*spelled(TINY_CLASSES)]
PIXELS_OPTIONS = [*spelled(TINY_PIXELS)]


def tiny(recipe: Recipe = TINY, **changes: Any) -> NamedRecipe:
    """A tiny recipe with some fields changed."""
    return NamedRecipe("tiny", "for tests", dataclasses.replace(recipe, **changes))


def picture(number: int, size: tuple[int, int] = (8, 8)) -> np.ndarray:
    """Noise around one of three colours, by the number modulo 3: uint8 `[H, W, 3]`."""
    noise = np.random.default_rng(number).integers(0, 90, (*size, 3))
    noise[..., number % 3] += 150
    return noise.astype(np.uint8)


def write_images(
    root: Path, counts: dict[str, int], classes: tuple[str, ...] = ("red", "green", "blue"), size: int = 8
) -> str:
    """Parts of class folders with that many PNGs a part; "" is no part. The path as a string."""
    for part, count in counts.items():
        for number in range(count):
            folder = root / part / classes[number % len(classes)]
            folder.mkdir(parents=True, exist_ok=True)
            pixels = picture(number % len(classes) + 3 * (number + 1000 * len(part)), (size, size))
            Image.fromarray(pixels).save(folder / f"{number}.png")
    return str(root)


def write_text(path: Path, lines: int = 60) -> str:
    """A file of ASCII text; its path as a string."""
    path.write_bytes(b"".join(b"line %d of a text to learn\n" % (i * i) for i in range(lines)))
    return str(path)


def child(*args: str, code: str | None = None, **options: Any) -> subprocess.Popen[bytes]:
    """`python -m aft ARGS`, or `python -c CODE ARGS`, on one thread, with its output piped."""
    start = ["-m", "aft"] if code is None else ["-c", code]
    return subprocess.Popen(
        [sys.executable, *start, *args],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )
