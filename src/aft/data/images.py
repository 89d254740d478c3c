"""One image file to an array of 8-bit pixels, whatever it holds, by Pillow."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageFile

from aft.data.errors import DataError

# Pillow knows more formats; among those left out are some that start other programs or open other files.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
EXTENSIONS = frozenset(
    [".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"]
)

_GRAY_MODES = ("1", "L", "LA", "La", "I", "I;16", "I;16L", "I;16B", "I;16N")
_ORIENTATION = 0x0112  # the EXIF tag; what undoes each of its values, from the EXIF standard
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def read_image(file: str | Path | BinaryIO, channels: int = 3, name: str | None = None) -> np.ndarray:
    """The pixels of an image file as uint8 `[H, W, channels]`: RGB for 3 channels, gray (ITU-R 601) for 1.

    Of an animation the first frame; turned upright as its EXIF orientation says; what is transparent shows
    white behind it. Gray of 16 bits is scaled by 255 / 65535; of 16-bit colours the upper 8 bits are taken.

    Args:
        file: a path, or a binary file that can seek.
        name: what an error calls the image, where not its path.

    Raises:
        DataError: no file, or none that holds a whole image of 8 or 16 bits; the message names it.
    """
    return as_channels(decode_image(file, name), channels)


def decode_image(file: str | Path | BinaryIO, name: str | None = None) -> np.ndarray:
    """`read_image` with the channels that the file has: uint8 `[H, W, 3]`, or `[H, W, 1]` if it is gray."""
    with _opened(file, name) as image:
        gray = image.mode in _GRAY_MODES
        image.load()
        plain = _on_white(_to_8_bits(image)).convert("L" if gray else "RGB")
        return _pixels(_upright(plain, _orientation(image)))


def image_size(file: str | Path | BinaryIO, name: str | None = None) -> tuple[int, int, int]:
    """(height, width, channels 1 or 3) that a file's header tells, before its orientation is applied."""
    with _opened(file, name) as image:
        return image.height, image.width, 1 if image.mode in _GRAY_MODES else 3


def as_channels(image: np.ndarray, channels: int) -> np.ndarray:
    """uint8 `[H, W, 1 or 3]` as gray (`channels` 1) or RGB (3)."""
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 (gray) or 3 (RGB), got {channels}")
    if image.shape[2] == channels:
        return image
    if channels == 3:
        return np.repeat(image, 3, axis=2)
    return _pixels(Image.fromarray(image).convert("L"))


@contextlib.contextmanager
def _opened(file: str | Path | BinaryIO, name: str | None) -> Iterator[ImageFile.ImageFile]:
    """The image with its header read; whatever goes wrong with it inside the block becomes a DataError."""
    if isinstance(file, (str, Path)):
        name = name or str(file)
        _check_is_file(Path(file), name)
    name = name or str(getattr(file, "name", "the image"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=_FORMATS) as image:
                yield image
    except DataError as error:
        raise DataError(f"{name} {error}") from None
    except Image.UnidentifiedImageError:
        first = _first_bytes(file)
        found = f"is not an image; it begins with {first}" if first else "is empty; an image was expected"
        raise DataError(f"{name} {found}") from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(f"{name} is refused as a decompression bomb: {_one_line(error)}") from None
    except Exception as error:  # damaged bytes make Pillow's decoders raise errors of many kinds
        raise DataError(f"{name} cannot be read as an image: {_one_line(error)}") from error


def _check_is_file(path: Path, name: str) -> None:
    try:
        exists, is_folder, is_file = path.exists(), path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise DataError(f"{name} cannot be read: {_one_line(error)}") from error
    if not exists:
        raise DataError(f"{name}: no such file")
    if is_folder:
        raise DataError(f"{name} is a directory; an image file was expected")
    if not is_file:
        raise DataError(f"{name} is not a regular file; an image file was expected")


def _to_8_bits(image: Image.Image) -> Image.Image:
    """16-bit gray scaled to 8 bits; an image of 8 bits as it is."""
    if image.mode == "F":
        raise DataError("holds floating-point pixels; 8 or 16 bits a channel were expected")
    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise DataError(
            f"holds values from {values.min():,} to {values.max():,}; 8 or 16 bits a channel were expected"
        )
    scaled = (values * 255 + 32767) // 65535
    transparent = image.info.get("transparency")
    return Image.fromarray(np.where(values == transparent, 255, scaled).astype(np.uint8))


def _on_white(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image
    coloured = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", coloured.size, "white"), coloured)


def _orientation(image: ImageFile.ImageFile) -> int:
    """The EXIF orientation; 1, upright, where there is none or it cannot be read."""
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except Exception:  # the pixels are good, and a damaged remark about them is no reason to refuse them
        return 1


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    turn = _UPRIGHT.get(orientation)
    return image if turn is None else image.transpose(turn)


def _pixels(image: Image.Image) -> np.ndarray:
    pixels = np.array(image)  # a copy: torch warns of the read-only array that Pillow hands out
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _first_bytes(file: str | Path | BinaryIO) -> bytes:
    if isinstance(file, (str, Path)):
        with Path(file).open("rb") as stream:
            return stream.read(16)
    file.seek(0)
    return file.read(16)


def _one_line(error: BaseException) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return reason.split("\n")[0] or type(error).__name__
