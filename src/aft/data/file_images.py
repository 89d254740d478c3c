"""Image files, checked when they are opened: decoded once and kept where there is room, else when read."""

import contextlib
import hashlib
import io
import math
import os
from collections.abc import Callable, Iterator

import numpy as np

from aft.data.errors import DataError
from aft.data.file_trees import FileTree
from aft.data.image_parts import ImageSet
from aft.data.images import as_channels, decode_image, image_size, read_image

SMALL = 256 * 2**20  # bytes of files up to which all are decoded, and hashed, at opening
KEPT = 2**30  # bytes of pixels up to which they then stay in memory
_ENDS = (b"\xff\xd9", b"IEND\xaeB`\x82")  # the last bytes of every whole JPEG and PNG
_NAMED = 3  # bad images that an error names
_MOST = 100  # bad images after which no more are looked for


class FileImages(ImageSet):
    """Images that are files; `pixels` holds them decoded, where they were kept."""

    def __init__(self, tree: FileTree, paths: list[str], gray: bool, pixels: "PackedPixels | None") -> None:
        self.labels = None
        self.gray = gray
        self.in_memory = pixels is not None
        self._tree = tree
        self._paths = paths
        self._pixels = pixels

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, index: int, channels: int = 3) -> np.ndarray:
        if self._pixels is not None:
            return as_channels(self._pixels[index], channels)
        with self._tree.open(self._paths[index]) as file:
            return read_image(file, channels, self.name(index))

    def name(self, index: int) -> str:
        return self._tree.name(self._paths[index])


class PackedPixels:
    """Images of any sizes in one piece of memory, which a worker gets whole rather than array by array."""

    def __init__(self) -> None:
        self.size = 0
        self._bytes = bytearray()
        self._places: list[tuple[int, tuple[int, ...]]] = []

    def append(self, image: np.ndarray) -> None:
        """Add uint8 `[H, W, C]`."""
        self._places.append((self.size, image.shape))
        self._bytes += image.tobytes()
        self.size += image.size

    def __getitem__(self, index: int) -> np.ndarray:
        start, shape = self._places[index]
        return np.frombuffer(self._bytes, np.uint8, math.prod(shape), start).reshape(shape).copy()


def open_parts(tree: FileTree, top: str, paths: dict[str, list[str]]) -> tuple[dict[str, FileImages], str]:
    """The set of each part, every file of it checked, and the digest of them all.

    Args:
        top: folder that names in the digest begin below.
        paths: of the files of each part.

    Raises:
        DataError: files that are no images; the message names the first ones and how many more there are.
    """
    small = sum(tree.sizes[path] for found in paths.values() for path in found) <= SMALL
    digest = hashlib.sha256()
    sets = {}
    bad = _BadImages()
    room = KEPT
    for part, found in paths.items():
        for path in found:
            name = path.removeprefix(f"{top}/")
            digest.update(f"{name}\0{tree.sizes[path]}\0".encode("utf-8", "surrogateescape"))
        if small:
            sets[part], taken = _decode_all(tree, found, bad, room, digest.update)
            room -= taken
        else:
            sets[part] = _read_headers(tree, found, bad)
    bad.complain()
    return sets, digest.hexdigest()


class _BadImages:
    """Images that cannot be read, gathered to be told in one line."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._first: DataError | None = None

    @contextlib.contextmanager
    def gather(self, name: str) -> Iterator[None]:
        """Note the error of an image and go on to the next, unless there were too many."""
        try:
            yield
        except DataError as error:
            self._names.append(name)
            self._first = self._first or error
        if len(self._names) >= _MOST:
            self.complain()

    def complain(self) -> None:
        """Raise a DataError if there was any bad image."""
        if self._first is None:
            return
        others, more = self._names[1:_NAMED], len(self._names) - _NAMED
        if more > 0:
            others.append(f"{'at least ' if len(self._names) >= _MOST else ''}{more} more")
        *listed, last = others or [""]
        also = f"{', '.join(listed)} and {last}" if listed else last
        raise DataError(
            f"{self._first}; nor can {also} be read" if also else str(self._first)
        ) from self._first


def _decode_all(
    tree: FileTree, paths: list[str], bad: _BadImages, room: int, hash_content: Callable[[bytes], None]
) -> tuple[FileImages, int]:
    """A set whose images all have been decoded, and the bytes of pixels that it keeps, `room` at most."""
    pixels: PackedPixels | None = PackedPixels()
    gray = True
    for path in paths:
        with bad.gather(tree.name(path)):
            content = tree.read(path)
            hash_content(content)
            image = decode_image(io.BytesIO(content), tree.name(path))
            gray &= image.shape[2] == 1
            if pixels is not None and pixels.size + image.size > room:
                pixels = None
            if pixels is not None:
                pixels.append(image)
    return FileImages(tree, paths, gray, pixels), 0 if pixels is None else pixels.size


def _read_headers(tree: FileTree, paths: list[str], bad: _BadImages) -> FileImages:
    """A set whose images are decoded when they are read: their headers and their ends say that they can be.

    To decode ImageNet once would take hours. A file that was cut short lacks its end, and is decoded here.
    """
    gray = True
    for path in paths:
        with bad.gather(tree.name(path)), tree.open(path) as file:
            gray &= image_size(file, tree.name(path))[2] == 1
            file.seek(-len(_ENDS[-1]), os.SEEK_END)
            if not file.read().endswith(_ENDS):
                file.seek(0)
                read_image(file, name=tree.name(path))
    return FileImages(tree, paths, gray, None)
