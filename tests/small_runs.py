"""Runs small enough for tests, and the `aft` command as a child process."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from aft.training.recipes import NamedRecipe, Recipe

TINY = Recipe(
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

# The same, spelled for the command line.
TINY_OPTIONS = [
    f"--{field.name.replace('_', '-')}={getattr(TINY, field.name)}"
    for field in dataclasses.fields(Recipe)
    if field.name not in ("split", "bias_rank", "min_lr", "tie_embeddings")
]


def tiny(**changes: Any) -> NamedRecipe:
    """The tiny recipe with some fields changed."""
    return NamedRecipe("tiny", "for tests", dataclasses.replace(TINY, **changes))


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
