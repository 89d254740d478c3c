"""Images in IDX files, the format of MNIST and of what took its place, Fashion-MNIST.

http://yann.lecun.com/exdb/mnist/: a big-endian header (0, 0, type, dimensions), the sizes, then the values.
"""

import gzip
import math
import re
import struct
import zlib
from pathlib import Path

import numpy as np

from aft.data.errors import DataError
from aft.data.image_parts import ArrayImages, ImageCorpus, ImageSet, digest_of

IMAGES_MAGIC = b"\x00\x00\x08\x03"  # uint8, three dimensions
LABELS_MAGIC = b"\x00\x00\x08\x01"
_PART_OF_FILE = {"train": "train", "t10k": "test", "test": "test"}
_IMAGES_NAME = re.compile(r"(train|t10k|test)-images[-.]idx3-ubyte(\.gz)?")
_BLOCK = 2**20


def idx_images(folder: Path) -> dict[str, Path]:
    """The image files in a folder that are named as MNIST's, by part; empty where there is none."""
    found = {}
    for path in sorted(folder.iterdir(), reverse=True):  # of x and x.gz the last stays: x
        name = _IMAGES_NAME.fullmatch(path.name)
        if name:
            found[_PART_OF_FILE[name[1]]] = path
    return {part: found[part] for part in ("train", "test") if part in found}


def read_idx(source: Path, images: dict[str, Path], *, labelled: bool) -> ImageCorpus:
    """Files of images by part, each with the labels that lie beside it under the corresponding name.

    The classes are named by their numbers. What gzip compressed is unpacked in memory.

    Raises:
        DataError: a file is damaged or no IDX file, the counts differ, or `labelled` and no labels.
    """
    pixels = {part: _read_array(path, IMAGES_MAGIC) for part, path in images.items()}
    labels = {part: _labels_beside(path, len(pixels[part]), labelled) for part, path in images.items()}
    known = [found for found in labels.values() if found is not None]
    classes = None
    if len(known) == len(images):
        classes = tuple(str(i) for i in range(1 + max(int(found.max()) for found in known)))
    parts: dict[str, ImageSet] = {
        part: ArrayImages(pixels[part][..., None], labels[part] if classes else None, str(images[part]))
        for part in images
    }
    digest = digest_of([*pixels.values(), *labels.values()])
    return ImageCorpus(str(source.resolve()), digest, classes, parts)


def _labels_beside(images: Path, count: int, labelled: bool) -> np.ndarray | None:
    """int64 `[count]` from the file beside `images`; None where there is none and none is needed."""
    name = images.name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
    beside = [images.with_name(name), images.with_name(f"{name}.gz")]
    found = next((path for path in beside if path.exists() and path != images), None)
    if found is None:
        if labelled:
            raise DataError(f"{images} has no labels beside it; {beside[0]} was expected")
        return None
    labels = _read_array(found, LABELS_MAGIC)
    if len(labels) != count:
        raise DataError(f"{found} holds {len(labels):,} labels; {images} holds {count:,} images")
    return labels.astype(np.int64)


def _read_array(path: Path, magic: bytes) -> np.ndarray:
    """The values of an IDX file as uint8, in the shape that its header tells."""
    dimensions = magic[3]
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            header = file.read(4 + 4 * dimensions)
            if header[:4] != magic:
                raise DataError(f"{path} begins with {header[:4]!r}; an IDX file with {magic!r} was expected")
            if len(header) < 4 + 4 * dimensions:
                raise DataError(f"{path} ends within its header")
            shape = struct.unpack(f">{dimensions}I", header[4:])
            if 0 in shape:
                raise DataError(f"{path} holds no images: its header tells the shape {shape}")
            wanted = math.prod(shape)
            content = bytearray()
            while len(content) <= wanted and (
                block := file.read(_BLOCK)
            ):  # what a header claims may be absurd
                content += block
    except EOFError:
        raise DataError(f"{path} ends in the middle; is the download complete?") from None
    except (OSError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(content) != wanted:
        came = f"{len(content):,}" if len(content) < wanted else "more"
        raise DataError(f"{path}: its header tells {shape}, {wanted:,} bytes; {came} came")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)
