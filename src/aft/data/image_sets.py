"""Whatever holds images, opened as one data set: what `--data` names."""

import dataclasses
import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from aft.data.cifar import FILES as CIFAR_FILES
from aft.data.cifar import FOLDER as CIFAR_FOLDER
from aft.data.cifar import read_cifar_archive, read_cifar_folder
from aft.data.digits import read_digits
from aft.data.errors import DataError
from aft.data.file_trees import FolderTree, ZipTree
from aft.data.idx import IMAGES_MAGIC, LABELS_MAGIC, idx_images, read_idx
from aft.data.image_folders import read_image_folder
from aft.data.image_parts import ImageCorpus, ImageSet, Selection
from aft.data.images import image_size

_EXPECTED = "a folder or a zip of images, CIFAR-10's python archive, or an IDX file of images"


def open_images(
    source: str | Path | None,
    *,
    split: float = 0.1,
    seed: int = 0,
    labelled: bool,
    classes: Sequence[str] | None = None,
) -> ImageCorpus:
    """A data set with a part to train on and at least one that is held out.

    Args:
        source: CIFAR-10 as its python archive or folder; IDX files, one of images or a folder; a folder of
            images or a zip of one (`read_image_folder` says how they are laid out); None for scikit-learn's
            handwritten digits, 8 x 8.
        split: share of the images to hold out as "validation" where the source holds out none itself.
        seed: of that choice.
        labelled: whether every image needs a class.
        classes: names in the order of the labels, for a model that knows them; else the source's own.

    Raises:
        DataError: the source cannot be read, holds no data set, or one that does not fit what was asked for.
    """
    if not 0 < split < 1:
        raise DataError(f"split is {split:g}; a share of the images between 0 and 1 was expected")
    corpus = _read(source, labelled=labelled)
    if "train" not in corpus.parts:
        raise DataError(f"{corpus.path} holds {' and '.join(corpus.parts)}, but no part to train on")
    if labelled and classes is None:
        _check_held_out_classes(corpus)
    corpus = _with_classes(corpus, classes) if labelled and classes is not None else corpus
    return corpus if len(corpus.parts) > 1 else _split(corpus, split, seed, labelled=labelled)


def open_image_set(
    source: str | Path | None, *, labelled: bool, classes: Sequence[str] | None = None
) -> ImageSet:
    """The held-out part of a source that has one, else all of it; arguments and errors as `open_images`."""
    corpus = _read(source, labelled=labelled)
    if labelled and classes is not None:
        corpus = _with_classes(corpus, classes)
    return corpus.parts["train"] if list(corpus.parts) == ["train"] else corpus.parts[corpus.held_out]


def _read(source: str | Path | None, *, labelled: bool) -> ImageCorpus:
    """A data set as it lies there, recognised by its content; one without parts is all "train"."""
    if source is None:
        return read_digits()
    path = Path(source)
    try:
        if path.is_dir():
            return _read_folder(path, labelled=labelled)
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
        if not path.is_file():
            raise DataError(f"{path} is not a regular file")
        first = _first_bytes(path)
    except (OSError, zlib.error, EOFError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if first.startswith(b"PK"):
        return read_image_folder(ZipTree(path), labelled=labelled)
    if first.startswith(IMAGES_MAGIC):
        return read_idx(path, {"train": path}, labelled=labelled)
    if first.startswith(LABELS_MAGIC):
        raise DataError(f"{path} holds IDX labels; give the images or their folder")
    if first[257:262] == b"ustar" or first.startswith(CIFAR_FOLDER.encode()):
        return read_cifar_archive(path)
    if _is_image(path):
        raise DataError(f"{path} is an image; {_EXPECTED} was expected")
    found = f"begins with {first[:16]!r}" if first else "is empty"
    raise DataError(f"{path} {found}; {_EXPECTED} was expected")


def _read_folder(folder: Path, *, labelled: bool) -> ImageCorpus:
    for inside in (folder, folder / CIFAR_FOLDER):
        if any((inside / name).is_file() for name in CIFAR_FILES):
            return read_cifar_folder(inside)
    images = idx_images(folder)
    if images:
        return read_idx(folder, images, labelled=labelled)
    return read_image_folder(FolderTree(folder), labelled=labelled)


def _is_image(path: Path) -> bool:
    try:
        image_size(path)
    except DataError:
        return False
    return True


def _first_bytes(path: Path) -> bytes:
    """The beginning of a file, unpacked where it is compressed by gzip."""
    with path.open("rb") as file:
        first = file.read(512)
    if not first.startswith(b"\x1f\x8b"):
        return first
    with gzip.open(path) as file:
        return file.read(512)


def _check_held_out_classes(corpus: ImageCorpus) -> None:
    assert corpus.classes is not None
    known = np.unique(_labels(corpus.parts["train"]))
    for part, images in corpus.parts.items():
        unknown = np.setdiff1d(_labels(images), known)
        if unknown.size:
            raise DataError(
                f"{corpus.path}: class {corpus.classes[unknown[0]]!r} has images in the {part} part, "
                f"but none in the train part"
            )


def _with_classes(corpus: ImageCorpus, classes: Sequence[str]) -> ImageCorpus:
    """The same with labels that count through `classes`."""
    number = {name: i for i, name in enumerate(classes)}
    own = corpus.classes or ()
    for name in own:
        if name not in number:
            raise DataError(
                f"{corpus.path} holds class {name!r}; the {len(classes)} known are {_listed(classes)}"
            )
    renumbered = np.array([number[name] for name in own], dtype=np.int64)
    parts: dict[str, ImageSet] = {
        part: Selection(images, np.arange(len(images)), renumbered[_labels(images)])
        for part, images in corpus.parts.items()
    }
    return dataclasses.replace(corpus, classes=tuple(classes), parts=parts)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _labels(images: ImageSet) -> np.ndarray:
    assert images.labels is not None
    return images.labels


def _split(corpus: ImageCorpus, share: float, seed: int, *, labelled: bool) -> ImageCorpus:
    """Images held out at random, but of no class all of them, unless most classes have one image."""
    images = corpus.parts["train"]
    held_out = max(1, round(len(images) * share))
    if held_out >= len(images):
        raise DataError(
            f"{corpus.path} holds {len(images):,} images; "
            f"with {share:g} of them held out none is left to train on"
        )
    order = np.random.default_rng(seed).permutation(len(images))
    if labelled:
        order = _with_each_class_after(order, held_out, _labels(images))
    parts: dict[str, ImageSet] = {
        "train": Selection(images, np.sort(order[held_out:])),
        "validation": Selection(images, np.sort(order[:held_out])),
    }
    return dataclasses.replace(corpus, parts=parts)


def _with_each_class_after(order: np.ndarray, count: int, labels: np.ndarray) -> np.ndarray:
    """An order in which every class occurs after the first ``count``, where there is room for them all.

    The same order, if it is so in it.
    """
    classes, first = np.unique(labels[order], return_index=True)
    complete = len(np.unique(labels[order[count:]])) == len(classes)
    if complete or len(order) - count < len(classes):
        return order
    return np.concatenate([np.delete(order, first), order[first]])
