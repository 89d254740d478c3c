"""Recipes: named, validated training configurations. `--help` reads them, so torch is not imported here."""

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Literal, get_args

from aft.data.splits import check_sizes

Mixer = Literal["full", "simple", "local", "conv", "attention"]


class RecipeError(Exception):
    """A recipe that cannot be followed: names the field, its value and what was expected.

    Not a ValueError on purpose: tyro catches those while it builds a dataclass, and draws a box round them.
    """


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A byte-level language model and how it is trained."""

    mixer: Mixer = "local"
    """What mixes positions: the paper's AFT variants, or `attention` (scaled dot product), the baseline."""
    num_layers: int = 6
    """Blocks: LayerNorm, mixer, LayerNorm, MLP."""
    hidden_size: int = 256
    """Width of the model; the MLP is four times as wide."""
    num_heads: int = 8
    """Heads of mixers `conv` and `attention`; the others have none."""
    context: int = 256
    """Bytes that the model sees at once (T)."""
    window_size: int = 32
    """Mixer `local`: positions closer than this have a learned bias (the paper's s)."""
    kernel_size: int = 32
    """Mixer `conv`: length of the kernel."""
    bias_rank: int | None = None
    """Mixers `full` and `local`: rank of the factorised bias (the paper's d'); None keeps a dense table."""
    tie_embeddings: bool = True
    """Predict with the transposed token embedding."""
    dropout: float = 0.0
    """Share of activations dropped in training, 0 <= dropout < 1."""

    alphabet: Literal["bytes", "distinct"] = "bytes"
    """Symbols: all 256 bytes, or only the distinct ones of the data."""
    split: tuple[float, ...] = (0.9, 0.1)
    """Train, validation and, if wanted, test: fractions that add up to 1, or numbers of bytes."""
    default_data: Literal["none", "stdlib"] = "none"
    """Without --data: refuse, or train on the source text of Python's standard library."""

    batch_size: int = 32
    """Windows a step, over all processes together."""
    steps: int = 1000
    """Steps of the optimiser."""
    lr: float = 3e-3
    """Highest learning rate of AdamW."""
    min_lr: float | None = None
    """Learning rate that the cosine ends at; None is a tenth of lr."""
    warmup_steps: int = 100
    """Steps in which the learning rate rises linearly to lr."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """What follows the warm-up."""
    weight_decay: float = 0.1
    """Decay of the weights of linear layers; nothing else is decayed."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.99
    """AdamW's decay of the second moment."""
    grad_clip: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 runs forward and backward under autocast; weights stay float32."""
    seed: int = 1337
    """Seed of the initial weights, the order of the data and dropout."""

    log_every: int = 10
    """Steps between two rows of metrics.jsonl."""
    eval_every: int = 250
    """Steps between two validations on the first eval_bytes; 0 validates at the end alone."""
    eval_bytes: int = 65_536
    """Held-out bytes of a validation while training; the last one always takes them all."""
    save_every: int = 0
    """Steps between two checkpoints; 0 saves at the end alone (and when interrupted)."""

    def __post_init__(self) -> None:
        self._check_choices()
        for field in ("num_layers", "hidden_size", "num_heads", "context", "window_size", "kernel_size"):
            self._check(field, getattr(self, field) >= 1, "at least 1")
        for field in ("batch_size", "steps", "log_every", "eval_bytes"):
            self._check(field, getattr(self, field) >= 1, "at least 1")
        for field in ("warmup_steps", "eval_every", "save_every", "seed"):
            self._check(field, getattr(self, field) >= 0, "at least 0")
        self._check("seed", self.seed < 2**32, "below 2**32")
        self._check("bias_rank", self.bias_rank is None or self.bias_rank >= 1, "at least 1, or None")
        self._check("dropout", 0 <= self.dropout < 1, "0 <= dropout < 1")
        self._check("lr", math.isfinite(self.lr) and self.lr > 0, "a finite number above 0")
        self._check(
            "min_lr", self.min_lr is None or 0 <= self.min_lr <= self.lr, f"0 to lr ({self.lr:g}), or None"
        )
        for field in ("weight_decay", "grad_clip"):
            value = getattr(self, field)
            self._check(field, math.isfinite(value) and value >= 0, "a finite number, at least 0")
        for field in ("beta1", "beta2"):
            self._check(field, 0 <= getattr(self, field) < 1, f"0 <= {field} < 1")
        if self.mixer in ("conv", "attention"):
            fits = self.hidden_size % self.num_heads == 0
            self._check("num_heads", fits, f"a divisor of hidden_size ({self.hidden_size})")
        try:
            check_sizes(self.split)
        except ValueError as error:
            raise RecipeError(f"split: {error}") from None

    def _check(self, field: str, holds: bool, expected: str) -> None:
        if not holds:
            raise RecipeError(f"{field} is {getattr(self, field)!r}; expected {expected}")

    def _check_choices(self) -> None:
        for field in dataclasses.fields(self):
            choices = get_args(field.type)
            if choices and all(isinstance(choice, str) for choice in choices):
                expected = f"one of {', '.join(choices)}"
                self._check(field.name, getattr(self, field.name) in choices, expected)


@dataclass(frozen=True)
class NamedRecipe:
    """An entry of the registry: what the user types, one line that says what it is, and the recipe."""

    name: str
    summary: str
    recipe: Recipe


def _enwik8(name: str, summary: str, *, context: int = 1024, **fields: object) -> NamedRecipe:
    """A row of the paper's enwik8 tables.

    The paper has "the usual Transformer warm-up" and leaves its length and what follows open: here it is
    1,000 steps, then a cosine to a tenth. Clipping and the betas are ours too. The paper's hundred epochs are
    counted in steps.
    """
    batch_size, epochs, sizes = 128, 100, (90_000_000, 5_000_000, 5_000_000)
    defaults = {
        "num_layers": 24,
        "hidden_size": 256,
        "num_heads": 4,
        "bias_rank": 256,
        "dropout": 0.1,
        "lr": 3e-3,
        "warmup_steps": 1000,
        "weight_decay": 0.5,
        "split": sizes,
        "batch_size": batch_size,
        "context": context,
        "steps": epochs * sizes[0] // (batch_size * context),
        "log_every": 50,
        "eval_every": 1000,
        "eval_bytes": 1_000_000,
        "save_every": 1000,
    }
    return NamedRecipe(name, f"enwik8, {summary}", Recipe(**(defaults | fields)))  # type: ignore[arg-type]


def _enwik8_rows() -> list[NamedRecipe]:
    """Tables 4, 5 and 6, with the paper's test bits per character."""
    wide = {"num_layers": 12, "hidden_size": 512}
    rows = [
        _enwik8("enwik8-local-32", "24 x 256, AFT-local, window 32 (Table 4: 1.154)"),
        _enwik8("enwik8-local-32-12x512", "12 x 512, AFT-local, window 32 (Table 4: 1.180)", **wide),
        _enwik8("enwik8-simple", "24 x 256, AFT-simple (Table 4: 1.209)", mixer="simple"),
        _enwik8("enwik8-transformer", "24 x 256, attention, 4 heads (Table 4: 1.130)", mixer="attention"),
        _enwik8(
            "enwik8-transformer-12x512",
            "12 x 512, attention, 8 heads (Table 4: 1.137)",
            mixer="attention",
            num_heads=8,
            **wide,
        ),
    ]
    table_5 = {
        1: 1.205,
        2: 1.176,
        4: 1.165,
        8: 1.162,
        64: 1.160,
        128: 1.165,
        256: 1.164,
        512: 1.171,
        1024: 1.173,
    }
    for window, bpc in table_5.items():
        summary = f"24 x 256, AFT-local, window {window} (Table 5: {bpc:.3f})"
        rows.append(_enwik8(f"enwik8-local-{window}", summary, window_size=window))
    for context, bpc in {2048: 1.135, 4096: 1.134}.items():
        summary = f"24 x 256, AFT-local, window 32, context {context:,} (Table 6: {bpc:.3f})"
        rows.append(_enwik8(f"enwik8-local-32-{context}", summary, context=context))
    return rows


def _registry() -> dict[str, NamedRecipe]:
    small = [
        NamedRecipe(
            "bytes-tiny",
            "the demo: Python's standard library or any file, about three minutes on two cores",
            Recipe(
                mixer="conv",
                num_layers=4,
                hidden_size=128,
                num_heads=64,
                kernel_size=16,
                context=128,
                split=(0.98, 0.02),
                default_data="stdlib",
                batch_size=8,
                steps=1000,
                lr=4e-3,
                eval_every=200,
                eval_bytes=32_768,
                save_every=500,
            ),
        ),
        NamedRecipe(
            "shakespeare-char",
            "tiny Shakespeare by character, nanoGPT's CPU setting: 0.8M parameters, 2,000 steps",
            Recipe(
                mixer="conv",
                num_layers=4,
                hidden_size=128,
                num_heads=64,
                context=64,
                window_size=16,
                kernel_size=16,
                alphabet="distinct",
                split=(0.9, 0.1),
                batch_size=12,
                steps=2000,
                lr=4.5e-3,
            ),
        ),
    ]
    return {entry.name: entry for entry in small + _enwik8_rows()}


RECIPES = _registry()


def find_recipe(name: str) -> NamedRecipe:
    """The recipe of that name; a RecipeError that names the nearest ones where there is none."""
    if name in RECIPES:
        return RECIPES[name]
    near = difflib.get_close_matches(name, RECIPES, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "`aft recipes` lists them"
    raise RecipeError(f"no recipe is called {name!r}; {hint}")
