"""Files opened as bytes: never decoded, never translated, and mapped rather than read where possible."""

import sysconfig
import zipfile
import zlib
from pathlib import Path

import numpy as np

from aft.data.errors import DataError

# Folders of the standard library that hold tests, other people's packages or build products: what is left is
# the source text that every installation of one Python version shares.
_SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}

_ENWIK8 = "enwik8"
_ZIP_MAGICS = (b"PK\x03\x04", b"PK\x05\x06")  # with members, and without any


def open_bytes(path: str | Path) -> np.ndarray:
    """The bytes of a file as a read-only uint8 array `[n]`, n >= 1; of a zip, those of its member `enwik8`.

    Raises:
        DataError: no such file, a directory or a device, empty, unreadable, or a zip without that member.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise DataError(f"{path} is a directory; a file was expected")
        if not path.exists():
            raise DataError(f"{path}: no such file")
        if not path.is_file():
            raise DataError(f"{path} is not a regular file")
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty; at least one byte was expected")
        if _is_zip(path):
            return _open_enwik8(path)
        return np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def standard_library_source() -> np.ndarray:
    """The source text of this Python's standard library as a uint8 array `[n]`: data at hand on any machine.

    Its `.py` files in the order of their paths, one after the other, without tests and installed packages.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in root.rglob("*.py") if _SKIPPED_FOLDERS.isdisjoint(file.relative_to(root).parts)]
    try:
        text = b"".join(file.read_bytes() for file in sorted(files))
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
    if not text:
        raise DataError(f"{root} holds no .py files, so there is no default data; give a file with --data")
    return np.frombuffer(text, dtype=np.uint8)


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.read(4).startswith(_ZIP_MAGICS):
            return False
    if not zipfile.is_zipfile(path):
        size = path.stat().st_size
        raise DataError(f"{path} begins as a zip does, but its {size:,} bytes are not a whole one")
    return True


def _open_enwik8(path: Path) -> np.ndarray:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if _ENWIK8 not in names:
                shown = ", ".join(map(repr, names[:5])) + (
                    f" and {len(names) - 5} more" if len(names) > 5 else ""
                )
                raise DataError(
                    f"{path} is a zip that holds {shown or 'nothing'}; a member '{_ENWIK8}' was expected"
                )
            content = archive.read(_ENWIK8)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise DataError(f"{path}: its member '{_ENWIK8}' cannot be unpacked: {error}") from error
    if not content:
        raise DataError(f"{path}: its member '{_ENWIK8}' is empty; at least one byte was expected")
    return np.frombuffer(content, dtype=np.uint8)
