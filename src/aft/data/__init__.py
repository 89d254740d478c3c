"""Bytes of a file, as they stand on disk, and images of any source, turned into tensors.

Names are imported when first used: only `windows` and `pixels` need torch, only the images need Pillow.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aft.data.alphabet import decode as decode
    from aft.data.alphabet import distinct_bytes as distinct_bytes
    from aft.data.alphabet import encode as encode
    from aft.data.errors import DataError as DataError
    from aft.data.files import open_bytes as open_bytes
    from aft.data.files import standard_library_source as standard_library_source
    from aft.data.image_parts import ImageCorpus as ImageCorpus
    from aft.data.image_parts import ImageSet as ImageSet
    from aft.data.image_sets import open_image_set as open_image_set
    from aft.data.image_sets import open_images as open_images
    from aft.data.images import read_image as read_image
    from aft.data.pixels import START as START
    from aft.data.pixels import PixelSequences as PixelSequences
    from aft.data.pixels import conform as conform
    from aft.data.pixels import pixel_array as pixel_array
    from aft.data.pixels import to_images as to_images
    from aft.data.pixels import to_tokens as to_tokens
    from aft.data.splits import split_bytes as split_bytes
    from aft.data.windows import ByteWindows as ByteWindows

_HOMES = {
    "START": "pixels",
    "ByteWindows": "windows",
    "DataError": "errors",
    "ImageCorpus": "image_parts",
    "ImageSet": "image_parts",
    "PixelSequences": "pixels",
    "conform": "pixels",
    "decode": "alphabet",
    "distinct_bytes": "alphabet",
    "encode": "alphabet",
    "open_bytes": "files",
    "open_image_set": "image_sets",
    "open_images": "image_sets",
    "pixel_array": "pixels",
    "read_image": "images",
    "split_bytes": "splits",
    "standard_library_source": "files",
    "to_images": "pixels",
    "to_tokens": "pixels",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
