"""Autoregressive models of pixels: the recipe, small ones and the rows of the paper's CIFAR10 tables."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from aft.training.recipes.base import NamedRecipe, Pace, Recipe


@dataclass(frozen=True, kw_only=True)
class PixelRecipe(Recipe):
    """A model of images as sequences of sub-pixels, 256 symbols each, and how it is trained."""

    kind: ClassVar[str] = "pixels"

    image_size: int | None = None
    """Height and width that images are reduced to; None takes them as they are, all of one size."""
    channels: Literal["auto", "1", "3"] = "auto"
    """1 is gray, 3 is RGB; auto: as the first image has it."""
    tie_embeddings: bool = True
    """Predict with the transposed token embedding."""
    augment: bool = True
    """The paper's: flip half of the images; then add one value from [-10, 10] to all sub-pixels, clipped."""

    split: float = 0.1
    """Share of the images held out, where the data have no validation or test part of their own."""
    default_data: Literal["none", "digits"] = "none"
    """Without --data: refuse, or train on scikit-learn's 8 x 8 digits."""

    steps: int = 1000
    """Steps of the optimiser."""
    warmup_steps: int = 100
    """Steps in which the learning rate rises linearly to lr."""
    eval_every: int = 250
    """Steps between two validations on eval_images; 0 validates at the end alone."""
    eval_images: int = 64
    """Held-out images of a validation while training; the last one always takes them all."""
    save_every: int = 0
    """Steps between two checkpoints; 0 saves at the end alone (and when interrupted)."""

    def pace(self, examples: int) -> Pace:
        return Pace(self.steps, self.warmup_steps, self.eval_every, self.save_every)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "steps", "eval_images")
        self._at_least(0, "warmup_steps", "eval_every", "save_every")
        self._check("image_size", self.image_size is None or self.image_size >= 1, "at least 1, or None")
        self._check("split", 0 < self.split < 1, "a share above 0 and below 1")


def _cifar10(name: str, summary: str, **fields: object) -> NamedRecipe:
    """A row of the paper's CIFAR10 tables.

    The paper has "the usual Transformer warm-up" and leaves its length and what follows open: here it is
    1,000 steps, then a cosine to a tenth, as for enwik8. The paper's 200 epochs are counted in steps.
    """
    batch_size, epochs, images = 128, 200, 50_000
    defaults = {
        "num_layers": 24,
        "hidden_size": 256,
        "num_heads": 2,
        "window_size": 256,
        "bias_rank": 64,
        "dropout": 0.1,
        "batch_size": batch_size,
        "steps": epochs * images // batch_size,
        "lr": 3e-3,
        "warmup_steps": 1000,
        "weight_decay": 0.1,
        "log_every": 50,
        "eval_every": 2000,
        "eval_images": 500,
        "save_every": 2000,
    }
    return NamedRecipe(name, f"CIFAR10 pixels, {summary}", PixelRecipe(**(defaults | fields)))  # type: ignore[arg-type]


def _cifar10_rows() -> list[NamedRecipe]:
    """Tables 2 and 3, with the paper's test bits per dim."""
    wide = {"num_layers": 12, "hidden_size": 512, "num_heads": 4}
    return [
        _cifar10("pixels-cifar10-local-256", "24 x 256, AFT-local, window 256 (Table 2: 2.74)"),
        _cifar10(
            "pixels-cifar10-local-256-12x512", "12 x 512, AFT-local, window 256 (Table 2: 2.80)", **wide
        ),
        _cifar10("pixels-cifar10-simple", "24 x 256, AFT-simple (Table 2: 2.89)", mixer="simple"),
        _cifar10(
            "pixels-cifar10-transformer", "24 x 256, attention, 2 heads (Table 2: 2.86)", mixer="attention"
        ),
        _cifar10(
            "pixels-cifar10-transformer-12x512",
            "12 x 512, attention, 4 heads (Table 2: 2.88)",
            mixer="attention",
            **wide,
        ),
        _cifar10(
            "pixels-cifar10-local-256-dense",
            "24 x 256, AFT-local, window 256, dense bias (Table 3: 2.84)",
            bias_rank=None,
        ),
    ]


_SMALL = [
    NamedRecipe(
        "pixels-digits",
        "scikit-learn's 8 x 8 digits, or any images of one size, about two minutes on two cores",
        PixelRecipe(
            mixer="local",
            num_layers=4,
            hidden_size=96,
            num_heads=4,
            window_size=24,
            kernel_size=24,
            augment=False,
            default_data="digits",
            batch_size=32,
            steps=1000,
            lr=4e-3,
            dropout=0.1,
            eval_every=200,
            save_every=500,
        ),
    ),
    NamedRecipe(
        "pixels-small",
        "any images, brought to 32 x 32 pixels in colour: 3,072 sub-pixels",
        PixelRecipe(
            mixer="local",
            image_size=32,
            channels="3",
            num_layers=4,
            hidden_size=64,
            num_heads=2,
            window_size=128,
            kernel_size=128,
            bias_rank=32,
            batch_size=4,
            steps=500,
            lr=3e-3,
            eval_every=250,
            save_every=250,
        ),
    ),
]

PIXEL_RECIPES = _SMALL + _cifar10_rows()
