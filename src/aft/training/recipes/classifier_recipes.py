"""Image classifiers: the recipe, small ones and the rows of the paper's ImageNet table."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from aft.training.recipes.base import Mixer, NamedRecipe, Pace, Recipe


@dataclass(frozen=True, kw_only=True)
class ClassifierRecipe(Recipe):
    """An image classifier and how it is trained. The defaults are DeiT's."""

    kind: ClassVar[str] = "classes"

    mixer: Mixer = "conv"
    """What mixes patches: `conv` without class token and position embedding, the others with both."""
    num_layers: int = 12
    """Blocks: LayerNorm, mixer, LayerNorm, MLP."""
    hidden_size: int = 192
    """Width of the model; the MLP is four times as wide."""
    num_heads: int = 32
    """Heads of mixers `conv` and `attention`; the others have none."""
    kernel_size: int = 11
    """Mixer `conv`: height and width of the kernel, in patches."""
    bias_rank: int | None = 128
    """Mixers `full` and `local`: rank of the factorised bias (the paper's d'); None keeps a dense table."""
    patch_size: int = 16
    """Height and width of a patch in pixels."""
    image_size: int = 224
    """Height and width of the images that go in, a multiple of patch_size."""
    drop_path: float = 0.1
    """Share of the last block's branches dropped in training, growing linearly from 0 (stochastic depth)."""

    crop: Literal["resized", "padded"] = "resized"
    """Training crops: a random part, resized; or, for small images, the whole one shifted by its padding."""
    padding: int = 4
    """Crop `padded`: pixels added at each side, the image's own, mirrored."""
    flip: bool = True
    """Mirror half of the images."""
    randaugment_ops: int = 2
    """RandAugment: changes to each image; 0 is off."""
    randaugment_magnitude: int = 9
    """RandAugment: strength of the changes, 0 to 30."""
    erasing: float = 0.25
    """Share of the images of which a rectangle is replaced by noise."""
    mixup: float = 0.8
    """MixUp's alpha; 0 is off. Where MixUp and CutMix are both on, each batch takes one of them."""
    cutmix: float = 1.0
    """CutMix's alpha; 0 is off."""
    mix_prob: float = 1.0
    """Share of the batches that MixUp or CutMix changes."""
    label_smoothing: float = 0.1
    """Share of each label that is spread over all classes."""
    repeated_augmentation: int = 3
    """Changed copies of an image in a batch; an epoch then takes that many times fewer images. 1 is off."""
    crop_ratio: float = 0.875
    """Evaluation crops the middle: image_size / crop_ratio is what the shorter side is resized to."""
    workers: int | None = None
    """Processes that prepare images; None: one a core if they are decoded on reading, 0 if in memory."""

    split: float = 0.1
    """Share of the images held out, where the data have no validation or test part of their own."""
    default_data: Literal["none", "digits"] = "none"
    """Without --data: refuse, or train on scikit-learn's 8 x 8 digits."""

    batch_size: int = 1024
    """Images a step, over all processes together."""
    epochs: int = 300
    """How many times as many images are taken as there are."""
    warmup_epochs: int = 5
    """Epochs in which the learning rate rises linearly to lr."""
    lr: float = 1e-3
    """Highest learning rate of AdamW, for this batch size; DeiT's is 5e-4 * batch_size / 512."""
    min_lr: float | None = 1e-5
    """Learning rate that the cosine ends at; None is a tenth of lr."""
    weight_decay: float = 0.05
    """Decay of the weights of linear and convolution layers; nothing else is decayed."""
    beta2: float = 0.999
    """AdamW's decay of the second moment."""
    grad_clip: float = 0.0
    """Largest norm of the gradient; 0 does not clip."""
    eval_every_epochs: int = 1
    """Epochs between two validations on all held-out images; 0 validates at the end alone."""
    save_every_epochs: int = 1
    """Epochs between two checkpoints; 0 saves at the end alone (and when interrupted)."""

    def pace(self, examples: int) -> Pace:
        steps, warmup, evaluation, saving = (
            math.ceil(epochs * examples / self.batch_size)
            for epochs in (self.epochs, self.warmup_epochs, self.eval_every_epochs, self.save_every_epochs)
        )
        return Pace(steps, min(warmup, steps - 1), evaluation, saving)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "patch_size", "image_size", "epochs", "repeated_augmentation")
        self._at_least(0, "warmup_epochs", "eval_every_epochs", "save_every_epochs", "padding")
        fits = self.image_size % self.patch_size == 0
        self._check("image_size", fits, f"a multiple of patch_size ({self.patch_size})")
        self._check("padding", self.padding < self.image_size, f"less than image_size ({self.image_size})")
        self._check("split", 0 < self.split < 1, "a share above 0 and below 1")
        self._check("crop_ratio", 0 < self.crop_ratio <= 1, "a share above 0, up to 1")
        self._check_share("erasing", "mix_prob")
        for field in ("drop_path", "label_smoothing"):
            self._check(field, 0 <= getattr(self, field) < 1, f"0 <= {field} < 1")
        for field in ("mixup", "cutmix"):
            value = getattr(self, field)
            self._check(field, math.isfinite(value) and value >= 0, "a finite number, at least 0")
        self._at_least(0, "randaugment_ops")
        self._check("randaugment_magnitude", 0 <= self.randaugment_magnitude <= 30, "0 to 30")
        self._check("workers", self.workers is None or self.workers >= 0, "at least 0, or None")


def _imagenet_rows() -> list[NamedRecipe]:
    """Table 7, with the paper's top-1; DeiT's training."""

    def row(name: str, summary: str, hidden_size: int, **fields: object) -> NamedRecipe:
        recipe = ClassifierRecipe(hidden_size=hidden_size, **fields)  # type: ignore[arg-type]
        return NamedRecipe(f"imagenet-{name}", f"ImageNet, {summary}", recipe)

    return [
        row("aft-full-tiny", "AFT-full, 12 x 192 (Table 7: 72.4)", 192, mixer="full"),
        row("aft-full-small", "AFT-full, 12 x 384 (Table 7: 79.8)", 384, mixer="full"),
        row("aft-conv-tiny-h32", "AFT-conv, 12 x 192, 32 heads, kernel 11 (Table 7: 73.9)", 192),
        row(
            "aft-conv-tiny-h192",
            "AFT-conv, 12 x 192, 192 heads, kernel 11 (Table 7: 74.8)",
            192,
            num_heads=192,
        ),
        row(
            "aft-conv-small-h16", "AFT-conv, 12 x 384, 16 heads, kernel 11 (Table 7: 80.2)", 384, num_heads=16
        ),
        row(
            "aft-conv-small-h384-k11",
            "AFT-conv, 12 x 384, 384 heads, kernel 11 (Table 7: 80.8)",
            384,
            num_heads=384,
        ),
        row(
            "aft-conv-small-h384-k15",
            "AFT-conv, 12 x 384, 384 heads, kernel 15 (Table 7: 81.0)",
            384,
            num_heads=384,
            kernel_size=15,
        ),
        row("deit-tiny", "attention, 12 x 192, 3 heads (Table 7: 72.2)", 192, mixer="attention", num_heads=3),
        row(
            "deit-small", "attention, 12 x 384, 6 heads (Table 7: 79.9)", 384, mixer="attention", num_heads=6
        ),
    ]


_SMALL = [
    NamedRecipe(
        "classify-digits",
        "scikit-learn's 8 x 8 digits, or any folders of small images, a minute",
        ClassifierRecipe(
            num_layers=4,
            hidden_size=64,
            num_heads=64,
            kernel_size=5,
            bias_rank=None,
            patch_size=2,
            image_size=8,
            drop_path=0.0,
            crop="padded",
            padding=0,
            flip=False,
            randaugment_ops=0,
            erasing=0.0,
            mixup=0.0,
            cutmix=0.0,
            label_smoothing=0.0,
            repeated_augmentation=1,
            crop_ratio=1.0,
            default_data="digits",
            batch_size=32,
            epochs=20,
            warmup_epochs=2,
            lr=8e-3,
            grad_clip=1.0,
            eval_every_epochs=5,
            save_every_epochs=10,
        ),
    ),
    NamedRecipe(
        "classify-cifar10-small",
        "CIFAR10 or any folders of images, at 32 x 32: AFT-conv, 6 x 64, patches of 4",
        ClassifierRecipe(
            num_layers=6,
            hidden_size=64,
            num_heads=32,
            kernel_size=7,
            bias_rank=None,
            patch_size=4,
            image_size=32,
            drop_path=0.0,
            crop="padded",
            randaugment_ops=0,
            erasing=0.0,
            mixup=0.0,
            cutmix=0.0,
            repeated_augmentation=1,
            crop_ratio=1.0,
            batch_size=64,
            epochs=10,
            warmup_epochs=1,
            lr=3e-3,
            min_lr=3e-5,
            grad_clip=1.0,
            eval_every_epochs=1,
            save_every_epochs=1,
        ),
    ),
]

CLASSIFIER_RECIPES = _SMALL + _imagenet_rows()
