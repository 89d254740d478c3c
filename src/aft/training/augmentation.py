"""What a classifier's training does to its images: DeiT's changes, each of which can be turned off."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2

from aft.training.preprocessing import Preprocessing, as_tensor
from aft.training.recipes import ClassifierRecipe


class Augmentation:
    """A batch of images and classes to a batch of inputs and targets, by torchvision's transforms.

    Crop, flip and RandAugment of every image in 8 bits, then colours normalised, parts erased, and images
    mixed with others of the batch. RandAugment is torchvision's, with a fixed magnitude; DeiT's own (timm's)
    draws it around one.
    """

    def __init__(self, recipe: ClassifierRecipe, preprocessing: Preprocessing, classes: int) -> None:
        self._preprocessing = preprocessing
        self._classes = classes
        self._smoothing = recipe.label_smoothing
        self._fit = None if recipe.crop == "resized" else Preprocessing.for_size(recipe.image_size, 1.0)
        self._change = v2.Compose(_changes(recipe))
        noise: Any = "random"  # annotated as if there were numbers alone
        self._erase = v2.RandomErasing(recipe.erasing, value=noise) if recipe.erasing else None
        self._mix = _mixing(recipe, classes)

    def __call__(self, images: list[np.ndarray], labels: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs float32 `[B, 3, S, S]` of images uint8 `[H, W, 3]`; targets int64 `[B]`, or float32
        `[B, classes]` where labels are mixed or smoothed. B is any number."""
        whole = map(as_tensor, images) if self._fit is None else self._fit.crops(images)
        inputs = self._preprocessing.normalised(torch.stack([self._change(image) for image in whole]))
        if self._erase is not None:
            inputs = torch.stack([self._erase(image) for image in inputs])
        targets = torch.from_numpy(labels)
        if self._mix is not None:
            inputs, targets = self._mix(inputs, targets)
        if self._smoothing or self._mix is not None:
            if targets.ndim == 1:
                targets = F.one_hot(targets, self._classes).float()
            targets = (1 - self._smoothing) * targets + self._smoothing / self._classes
        return inputs, targets


def _changes(recipe: ClassifierRecipe) -> list[Any]:
    bicubic, bilinear = v2.InterpolationMode.BICUBIC, v2.InterpolationMode.BILINEAR
    size = recipe.image_size
    changes: list[Any] = [
        v2.RandomResizedCrop(size, interpolation=bicubic, antialias=True)
        if recipe.crop == "resized"
        # Mirrored borders: black ones, which no image has that is evaluated, would teach what they mean.
        else v2.RandomCrop(size, padding=recipe.padding or None, padding_mode="reflect")
    ]
    if recipe.flip:
        changes.append(v2.RandomHorizontalFlip())
    if recipe.randaugment_ops:
        changes.append(
            v2.RandAugment(recipe.randaugment_ops, recipe.randaugment_magnitude, interpolation=bilinear)
        )
    return changes


def _mixing(recipe: ClassifierRecipe, classes: int) -> v2.Transform | None:
    ways: list[Any] = []
    if recipe.mixup:
        ways.append(v2.MixUp(alpha=recipe.mixup, num_classes=classes))
    if recipe.cutmix:
        ways.append(v2.CutMix(alpha=recipe.cutmix, num_classes=classes))
    if not ways or not recipe.mix_prob:
        return None
    return v2.RandomApply([v2.RandomChoice(ways)], p=recipe.mix_prob)
