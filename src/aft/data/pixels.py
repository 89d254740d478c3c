"""Images as sequences of sub-pixels, each of them a token from 0 to 255, and back."""

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from aft.data.errors import DataError
from aft.data.image_parts import ImageSet

START = 0  # the token before the first sub-pixel: position 0's own embedding makes it one that is learnt

_SHIFT = 10  # the largest change of brightness in augmentation, from the paper


def pixel_array(
    images: ImageSet, shape: tuple[int, int, int] | None, source: str, *, resize: bool
) -> np.ndarray:
    """All images of a set as uint8 `[N, H, W, C]`.

    Args:
        shape: (H, W, C) to have; None for the size of the first image, in 3 channels unless all are gray.
        source: what an error calls the set.
        resize: whether an image of another size is brought to it by `fit`.

    Raises:
        DataError: no images, or without `resize` one of another size; the message names it.
    """
    if not len(images):
        raise DataError(f"{source} holds no images")
    if shape is None:
        shape = images.read(0, 1 if images.gray else 3).shape
    pixels = np.empty((len(images), *shape), dtype=np.uint8)
    for index in range(len(images)):
        image = images.read(index, shape[2])
        pixels[index] = conform(image, shape, images.name(index), resize=resize)
    return pixels


def conform(image: np.ndarray, shape: tuple[int, int, int], name: str, *, resize: bool) -> np.ndarray:
    """The image `[H, W, C]` if it has the shape asked for; else, with `resize`, what `fit` makes of it.

    Raises:
        DataError: another size, without `resize`; the message calls the image `name`.
    """
    height, width, _ = shape
    if image.shape[:2] == (height, width):
        return image
    if not resize:
        raise DataError(
            f"{name} is {image.shape[0]} x {image.shape[1]} pixels (height x width); "
            f"{height} x {width} was expected, since a pixel model takes images of one size"
        )
    return fit(image, height, width)


def fit(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 `[H, W, C]` cut around its centre to the proportions asked for, then scaled to `height, width`.

    Scaled down by a whole factor each pixel is the mean of a block, else bicubic with antialiasing.
    """
    rows, columns = image.shape[:2]
    kept_rows = min(rows, max(1, round(columns * height / width)))
    kept_columns = min(columns, max(1, round(rows * width / height)))
    top, left = (rows - kept_rows) // 2, (columns - kept_columns) // 2
    cut = image[top : top + kept_rows, left : left + kept_columns]
    picture = Image.fromarray(cut.squeeze(2) if cut.shape[2] == 1 else cut)
    if kept_rows % height == 0 and kept_columns % width == 0:
        scaled = picture.reduce((kept_columns // width, kept_rows // height))
    else:
        scaled = picture.resize((width, height), Image.Resampling.BICUBIC)
    return np.array(scaled).reshape(height, width, image.shape[2])


def to_tokens(images: np.ndarray) -> np.ndarray:
    """`[N, H, W, C]` to `[N, H*W*C]`: row by row, in a row pixel by pixel, in a pixel channel by channel."""
    return images.reshape(len(images), -1)


def to_images(tokens: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """`[N, H*W*C]` to `[N, H, W, C]`, the inverse of `to_tokens`; values outside 0..255 are a ValueError."""
    if tokens.size and not 0 <= tokens.min() <= tokens.max() <= 255:
        raise ValueError(f"tokens must lie in 0..255, got {tokens.min()} to {tokens.max()}")
    return tokens.astype(np.uint8).reshape(len(tokens), *shape)


class PixelSequences(Dataset[dict[str, torch.Tensor]]):
    """Item i is `{"input_ids": [T], "shift_labels": [T]}`, int64, T = H*W*C.

    The labels are image i's sub-pixels, all of them; the input is START and all of them but the last.

    Args:
        images: uint8 `[N, H, W, C]`.
        augment: the paper's augmentation, new at each reading: flipped left to right with probability 1/2,
            then one whole number from -10 to 10 added to all sub-pixels, which stay within 0..255. Its
            randomness is torch's global generator.
    """

    def __init__(self, images: np.ndarray, augment: bool) -> None:
        self.images = images
        self.augment = augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        image = self.images[index]
        if self.augment:
            image = _augment(image)
        labels = torch.from_numpy(image.reshape(-1).astype(np.int64))
        return {"input_ids": torch.cat([labels.new_tensor([START]), labels[:-1]]), "shift_labels": labels}


def _augment(image: np.ndarray) -> np.ndarray:
    if torch.rand(()) < 0.5:
        image = image[:, ::-1]
    shift = int(torch.randint(-_SHIFT, _SHIFT + 1, ()))
    return np.clip(image.astype(np.int16) + shift, 0, 255)
