"""The files below a folder, or inside a zip as if it were one, by their paths relative to it."""

import contextlib
import lzma
import os
import struct
import weakref
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, cast

from aft.data.errors import DataError

_CLUTTER = {"__macosx", "thumbs.db", "desktop.ini"}


class FileTree(ABC):
    """Files to be read by their relative path, with `/` between its parts; hidden ones are left out.

    Attributes:
        root: the folder or the zip.
        sizes: bytes of each file, by its path.
        folders: paths of the folders, empty ones among them.
    """

    root: Path
    sizes: dict[str, int]
    folders: set[str]

    @abstractmethod
    def open(self, path: str) -> AbstractContextManager[BinaryIO]:
        """A file to read and seek in; what fails while it is open becomes a DataError that names it."""

    def read(self, path: str) -> bytes:
        """A file's content, or a DataError that names it."""
        with self.open(path) as file:
            return file.read()

    @abstractmethod
    def name(self, path: str) -> str:
        """What an error calls a file or a folder."""


class FolderTree(FileTree):
    """What lies below a folder. Links are followed, but not back to a folder that leads to them.

    Raises:
        DataError: a folder that cannot be listed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sizes = {}
        self.folders = set()
        try:
            self._add(root, "", ())
        except OSError as error:
            raise DataError(f"{error.filename or root} cannot be read: {error.strerror or error}") from error

    def _add(self, folder: Path, below: str, above: tuple[tuple[int, int], ...]) -> None:
        """Note what lies in `folder`, whose contents' paths begin with `below`."""
        status = folder.stat()
        identity = (status.st_dev, status.st_ino)
        if identity in above:
            return
        if below:
            self.folders.add(below.removesuffix("/"))
        with os.scandir(folder) as entries:
            for entry in entries:
                if _is_hidden(entry.name):
                    continue
                path = below + entry.name
                if entry.is_dir():
                    self._add(Path(entry.path), f"{path}/", (*above, identity))
                elif entry.is_file():
                    self.sizes[path] = entry.stat().st_size
                else:  # a broken link or a device: opening it says so, should it be called an image
                    self.sizes[path] = 0

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        place = self.root / path
        try:
            if place.exists() and not place.is_file():
                raise DataError(f"{place} is not a regular file; an image file was expected")
            with place.open("rb") as file:
                yield file
        except OSError as error:
            raise DataError(f"{place} cannot be read: {error.strerror or error}") from error

    def name(self, path: str) -> str:
        return str(self.root / path)


# What Python's zipfile raises for archives that are damaged, encrypted, or packed in a way it does not know.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    RuntimeError,  # NotImplementedError is one
    ValueError,  # and UnicodeDecodeError
    IndexError,
    OverflowError,
    struct.error,
)


class ZipTree(FileTree):
    """What lies in a zip, read in place: nothing is unpacked to disk.

    Raises:
        DataError: no whole zip, or one with members that point outside.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._opened: tuple[int, zipfile.ZipFile] | None = None
        self._members = {}
        self.sizes = {}
        self.folders = set()
        for member in self._archive().infolist():
            path = member.filename.replace("\\", "/")  # as some programs write them
            parts = [part for part in path.split("/") if part not in ("", ".")]
            if path.startswith("/") or ".." in parts:
                raise DataError(f"{root}: its member {member.filename!r} points outside; it is refused")
            if any(map(_is_hidden, parts)):
                continue
            folders = parts if path.endswith("/") else parts[:-1]
            self.folders.update("/".join(folders[:depth]) for depth in range(1, len(folders) + 1))
            if not path.endswith("/"):
                self.sizes["/".join(parts)] = member.file_size
                self._members["/".join(parts)] = member

    def _archive(self) -> zipfile.ZipFile:
        """The open zip; each process opens its own, since forked ones would move one another's position."""
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                archive = zipfile.ZipFile(self.root)
            except _DAMAGE as error:
                raise DataError(f"{self.root} cannot be read as a zip: {error}") from error
            # Before the collector of cycles gets to the file, which would warn of not being closed.
            weakref.finalize(self, archive.close)
            self._opened = (os.getpid(), archive)
        return self._opened[1]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_opened": None}

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        try:
            with self._archive().open(self._members[path]) as file:
                yield cast(BinaryIO, file)
        except _DAMAGE as error:
            raise DataError(f"{self.name(path)} cannot be unpacked: {error}") from error

    def name(self, path: str) -> str:
        return f"{self.root}, member {path}" if path else str(self.root)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.casefold() in _CLUTTER
