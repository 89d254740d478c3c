"""What every recipe has in common: the mixer, the optimiser, seeds and intervals, and their validation."""

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

Mixer = Literal["full", "simple", "local", "conv", "attention"]


class RecipeError(Exception):
    """A recipe that cannot be followed: names the field, its value and what was expected.

    Not a ValueError on purpose: tyro catches those while it builds a dataclass, and draws a box round them.
    """


@dataclass(frozen=True)
class Pace:
    """When training does what, in steps of the optimiser; an interval of 0 is never."""

    steps: int
    warmup_steps: int
    eval_every: int
    save_every: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model and how it is trained."""

    kind: ClassVar[str]  # which task follows the recipe; recipe.json holds it

    mixer: Mixer = "local"
    """What mixes positions: the paper's AFT variants, or `attention` (scaled dot product), the baseline."""
    num_layers: int = 6
    """Blocks: LayerNorm, mixer, LayerNorm, MLP."""
    hidden_size: int = 256
    """Width of the model; the MLP is four times as wide."""
    num_heads: int = 8
    """Heads of mixers `conv` and `attention`; the others have none."""
    window_size: int = 32
    """Mixer `local`: positions closer than this have a learned bias (the paper's s)."""
    kernel_size: int = 32
    """Mixer `conv`: length of the kernel."""
    bias_rank: int | None = None
    """Mixers `full` and `local`: rank of the factorised bias (the paper's d'); None keeps a dense table."""
    dropout: float = 0.0
    """Share of activations dropped in training, 0 <= dropout < 1."""

    default_data: str = "none"
    """Without --data: `none` refuses."""

    batch_size: int = 32
    """Examples a step (windows of a text, or images), over all processes together."""
    lr: float = 3e-3
    """Highest learning rate of AdamW, for this batch size."""
    min_lr: float | None = None
    """Learning rate that the cosine ends at; None is a tenth of lr."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """What follows the warm-up, in which the learning rate rises linearly to lr."""
    weight_decay: float = 0.1
    """Decay of the weights of linear and convolution layers; nothing else is decayed."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.99
    """AdamW's decay of the second moment."""
    grad_clip: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 runs forward and backward under autocast; weights stay float32."""
    seed: int = 1337
    """Seed of the initial weights, the order and changes of the data, and dropout."""

    log_every: int = 10
    """Steps between two rows of metrics.jsonl."""

    def pace(self, examples: int) -> Pace:
        """When training does what, with `examples` examples to train on."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        self._check_choices()
        self._at_least(1, "num_layers", "hidden_size", "num_heads", "window_size", "kernel_size")
        self._at_least(1, "batch_size", "log_every")
        self._at_least(0, "seed")
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

    def _check(self, field: str, holds: bool, expected: str) -> None:
        if not holds:
            raise RecipeError(f"{field} is {getattr(self, field)!r}; expected {expected}")

    def _at_least(self, least: int, *fields: str) -> None:
        for field in fields:
            self._check(field, getattr(self, field) >= least, f"at least {least}")

    def _check_share(self, *fields: str) -> None:
        for field in fields:
            self._check(field, 0 <= getattr(self, field) <= 1, "a share, 0 to 1")

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
