"""CIFAR-10 in the form its authors publish for Python: an archive, or its folder, of six pickled batches.

https://www.cs.toronto.edu/~kriz/cifar.html
"""

import gzip
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np

from aft.data.errors import DataError
from aft.data.image_parts import ArrayImages, ImageCorpus, digest_of
from aft.data.inert_pickle import load_inert

FOLDER = "cifar-10-batches-py"
_META = "batches.meta"
_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
_TEST = "test_batch"
FILES = (_META, *_TRAIN, _TEST)
_SIDE = 32
_LARGEST = 64 * 2**20  # bytes of one file; a batch of 10,000 has 31 million


def read_cifar_folder(folder: Path) -> ImageCorpus:
    """CIFAR-10 from a folder that holds its batches.

    Raises:
        DataError: a batch is missing or damaged.
    """
    files = {}
    for name in FILES:
        path = folder / name
        try:
            if path.exists() and path.stat().st_size > _LARGEST:
                raise DataError(f"{path} is {path.stat().st_size:,} bytes large; a CIFAR-10 batch is smaller")
            if path.exists():
                files[name] = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    return _corpus(folder, files)


def read_cifar_archive(path: Path) -> ImageCorpus:
    """CIFAR-10 from its tar archive, compressed or not. Nothing is unpacked to disk.

    Raises:
        DataError: the archive is cut short, damaged, or has members that are missing or point outside.
    """
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if not compressed:
                return _corpus(path, _batches_in(path, file))
            with gzip.GzipFile(fileobj=file) as unpacked:
                files = _batches_in(path, unpacked)
                while unpacked.read(2**20):  # the checksum stands at the end, which tarfile need not reach
                    pass
                return _corpus(path, files)
    except EOFError:
        raise DataError(f"{path} ends in the middle; is the download complete?") from None
    except (tarfile.TarError, zlib.error, OSError) as error:
        raise DataError(f"{path} cannot be unpacked: {str(error) or type(error).__name__}") from error


def _batches_in(path: Path, stream: BinaryIO | gzip.GzipFile) -> dict[str, bytes]:
    files = {}
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            inside = PurePosixPath(member.name)
            if inside.is_absolute() or ".." in inside.parts:
                raise DataError(f"{path}: its member {member.name!r} points outside; it is refused")
            if not (member.isfile() or member.isdir()):
                raise DataError(f"{path}: its member {member.name!r} is a link or a device; it is refused")
            if inside.parts[:1] == ("cifar-100-python",):
                raise DataError(f"{path} is CIFAR-100; CIFAR-10 was expected")
            if not member.isfile() or inside.name not in FILES:
                continue
            if member.size > _LARGEST:
                raise DataError(f"{path}: its member {member.name!r} is {member.size:,} bytes large")
            content = archive.extractfile(member)
            assert content is not None
            files[inside.name] = content.read()
    return files


def _corpus(source: Path, files: Mapping[str, bytes]) -> ImageCorpus:
    missing = [name for name in FILES if name not in files]
    if missing:
        raise DataError(f"{source} lacks {', '.join(missing)}; CIFAR-10 has {', '.join(FILES)}")
    classes = _class_names(load_inert(files[_META], f"{source}, {_META}"), f"{source}, {_META}")
    batches = {
        name: _batch(load_inert(files[name], f"{source}, {name}"), len(classes), f"{source}, {name}")
        for name in (*_TRAIN, _TEST)
    }
    pixels = np.concatenate([batches[name][0] for name in _TRAIN])
    labels = np.concatenate([batches[name][1] for name in _TRAIN])
    parts = {
        "train": ArrayImages(pixels, labels, f"{source}, train"),
        "test": ArrayImages(*batches[_TEST], f"{source}, test"),
    }
    digest = digest_of([pixels, labels, *batches[_TEST]])
    return ImageCorpus(str(source.resolve()), digest, classes, dict(parts))


def _class_names(meta: object, name: str) -> tuple[str, ...]:
    found = meta.get("label_names") if isinstance(meta, dict) else None
    if not (isinstance(found, list) and found and all(isinstance(label, bytes | str) for label in found)):
        raise DataError(f"{name} holds no label_names; the names of CIFAR-10's classes were expected")
    return tuple(label.decode("latin-1") if isinstance(label, bytes) else label for label in found)


def _batch(batch: object, num_classes: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 `[n, 32, 32, 3]` and labels int64 `[n]` of one batch."""
    if not isinstance(batch, dict) or not {"data", "labels"} <= batch.keys():
        raise DataError(f"{name} holds no CIFAR-10 batch; data and labels were expected")
    data, labels = batch["data"], batch["labels"]
    if not (isinstance(data, np.ndarray) and data.shape[1:] == (3 * _SIDE * _SIDE,) and len(data)):
        found = f"an array {data.shape}" if isinstance(data, np.ndarray) else f"of type {type(data).__name__}"
        raise DataError(f"{name}: data is {found}; uint8 [n, {3 * _SIDE * _SIDE}] was expected")
    if not isinstance(labels, list):
        raise DataError(f"{name}: labels is of type {type(labels).__name__}; a list was expected")
    if len(labels) != len(data):
        raise DataError(f"{name} holds {len(data):,} images and {len(labels):,} labels")
    for label in labels:
        if type(label) is not int or not 0 <= label < num_classes:
            raise DataError(f"{name}: label {label!r}; a number from 0 to {num_classes - 1} was expected")
    planes = data.reshape(-1, 3, _SIDE, _SIDE)  # stored as three planes of colour
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), np.array(labels, dtype=np.int64)
