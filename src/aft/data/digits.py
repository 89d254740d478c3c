"""scikit-learn's handwritten digits, which lie in its package: images at hand on any machine."""

from typing import Any

import numpy as np

from aft.data.errors import DataError
from aft.data.image_parts import ArrayImages, ImageCorpus, digest_of

NAME = "digits"


def read_digits() -> ImageCorpus:
    """1,797 gray images of 8 x 8 pixels, whose 17 levels are spread over 0..255, in classes "0" to "9"."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "the default images come with scikit-learn, which is not installed; "
            "install it, or give images with --data"
        ) from error
    found: Any = load_digits()
    images = np.rint(found.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = found.target.astype(np.int64)
    digest = digest_of([images, labels])
    classes = tuple(str(digit) for digit in found.target_names)
    return ImageCorpus(NAME, digest, classes, {"train": ArrayImages(images, labels, NAME)})
