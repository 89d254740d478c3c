"""From an image to a classifier's input, the same in training, evaluation and Transformers' pipelines."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2
from transformers import BitImageProcessor

from aft.training.errors import RunError
from aft.training.rundir import PROCESSOR, read_json

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preprocessing:
    """Resize the shorter side, crop the middle, then subtract and divide the colours of [0, 1].

    Attributes:
        crop: height and width of what goes into the model, in pixels.
        shorter_side: what the shorter side is resized to before (bicubic), at least `crop`.
        mean, std: three numbers each, of red, green and blue.
    """

    crop: int
    shorter_side: int
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    @classmethod
    def for_size(cls, image_size: int, crop_ratio: float) -> "Preprocessing":
        """A crop of `image_size` from a side of image_size / crop_ratio."""
        return cls(image_size, round(image_size / crop_ratio))

    def at(self, image_size: int) -> "Preprocessing":
        """The same at another size."""
        side = round(image_size * self.shorter_side / self.crop)
        return Preprocessing(image_size, side, self.mean, self.std)

    def crops(self, images: list[np.ndarray]) -> Tensor:
        """The middles of images, uint8 `[H, W, 3]` each: uint8 `[B, 3, crop, crop]`."""
        return torch.stack([self._crop(as_tensor(image)) for image in images])

    def normalised(self, images: Tensor) -> Tensor:
        """Float32 `[B, 3, H, W]` of uint8 `[B, 3, H, W]`."""
        return v2.functional.normalize(
            v2.functional.to_dtype(images, torch.float32, scale=True), list(self.mean), list(self.std)
        )

    def __call__(self, images: list[np.ndarray]) -> Tensor:
        """The model's input, float32 `[B, 3, crop, crop]`, of images uint8 `[H, W, 3]` of any sizes."""
        return self.normalised(self.crops(images))

    def _crop(self, image: Tensor) -> Tensor:
        if image.shape[1:] == (self.crop, self.crop) == (self.shorter_side, self.shorter_side):
            return image
        resized = v2.functional.resize(
            image, [self.shorter_side], interpolation=v2.InterpolationMode.BICUBIC, antialias=True
        )
        return v2.functional.center_crop(resized, [self.crop, self.crop])

    def save(self, folder: Path) -> None:
        """Write preprocessor_config.json, which Transformers reads as an image processor."""
        # BiT's is the processor of Transformers that takes these very steps.
        BitImageProcessor(
            size={"shortest_edge": self.shorter_side},
            crop_size={"height": self.crop, "width": self.crop},
            image_mean=list(self.mean),
            image_std=list(self.std),
        ).save_pretrained(folder)

    @classmethod
    def load(cls, folder: Path) -> "Preprocessing":
        """What preprocessor_config.json says.

        Raises:
            RunError: there is none, or one that takes other steps.
        """
        path = folder / PROCESSOR
        fields = read_json(path, f"{folder} has no {PROCESSOR}, which says how images go into its model")
        try:
            crop, side = fields["crop_size"]["height"], fields["size"]["shortest_edge"]
            mean, std = tuple(map(float, fields["image_mean"])), tuple(map(float, fields["image_std"]))
            if not 1 <= crop <= side or (len(mean), len(std)) != (3, 3) or min(std) <= 0:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            kind = fields.get("image_processor_type")
            raise RunError(
                f"{path} holds a {kind}; one with size.shortest_edge, a crop_size no larger than that, and "
                f"image_mean and image_std of three numbers each was expected"
            ) from None
        return cls(crop, side, mean, std)


def as_tensor(image: np.ndarray) -> Tensor:
    """uint8 `[H, W, C]` as `[C, H, W]`."""
    return torch.from_numpy(image).permute(2, 0, 1).contiguous()
