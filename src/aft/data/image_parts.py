"""Images that are read by their number, and the named parts of a data set that hold them."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aft.data.images import as_channels


class ImageSet(ABC):
    """A sequence of images, in memory or decoded when asked for; it pickles, and workers may share it.

    Attributes:
        labels: int64 `[N]`, numbers of classes; None where the images have none.
        gray: whether no image has colours.
        in_memory: whether reading an image is a copy, and not the decoding of a file.
    """

    labels: np.ndarray | None
    gray: bool
    in_memory: bool

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int, channels: int = 3) -> np.ndarray:
        """Image `index` as uint8 `[H, W, channels]` of its own memory: RGB for 3 channels, gray for 1."""

    @abstractmethod
    def name(self, index: int) -> str:
        """What an error calls image `index`: its path, or "FILE, image 17"."""


class ArrayImages(ImageSet):
    """Images of one size in one array.

    Args:
        images: uint8 `[N, H, W, 1 or 3]`.
        labels: int64 `[N]`, or None.
        source: what an error calls the array.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray | None, source: str) -> None:
        self.images = images
        self.labels = labels
        self.gray = images.shape[3] == 1
        self.in_memory = True
        self._source = source

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int, channels: int = 3) -> np.ndarray:
        return as_channels(self.images[index].copy(), channels)

    def name(self, index: int) -> str:
        return f"{self._source}, image {index}"


class Selection(ImageSet):
    """Some images of a set, with its labels or with others in their place.

    Args:
        indices: int64 `[n]`, of images in the set.
        labels: int64 `[n]`; the set's own where left out.
    """

    def __init__(self, images: ImageSet, indices: np.ndarray, labels: np.ndarray | None = None) -> None:
        self._images = images
        self._indices = indices
        self.labels = images.labels[indices] if labels is None and images.labels is not None else labels
        self.gray = images.gray
        self.in_memory = images.in_memory

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, index: int, channels: int = 3) -> np.ndarray:
        return self._images.read(int(self._indices[index]), channels)

    def name(self, index: int) -> str:
        return self._images.name(int(self._indices[index]))


@dataclass(frozen=True)
class ImageCorpus:
    """A data set.

    Attributes:
        path: where it lies, resolved; "digits" for scikit-learn's.
        digest: sha256 in hexadecimal digits that identifies the data.
        classes: names in the order of the labels; None where the images have no labels.
        parts: "train", and "validation" or "test" or both.
    """

    path: str
    digest: str
    classes: tuple[str, ...] | None
    parts: dict[str, ImageSet]

    @property
    def held_out(self) -> str:
        """The part that training validates on: "validation" if there is one, else "test"."""
        return "validation" if "validation" in self.parts else "test"


def digest_of(arrays: Sequence[np.ndarray | None]) -> str:
    """sha256 over the shapes and contents of arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        if array is not None:
            digest.update(repr((array.shape, array.dtype.str)).encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
