"""Folders of image files, or a zip of them: a folder a class, with or without parts to train and test on."""

import posixpath
import re

import numpy as np

from aft.data.errors import DataError
from aft.data.file_images import open_parts
from aft.data.file_trees import FileTree
from aft.data.image_parts import ImageCorpus
from aft.data.images import EXTENSIONS

_PART_OF_FOLDER = {
    "train": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}


def read_image_folder(tree: FileTree, *, labelled: bool) -> ImageCorpus:
    """The images of class folders `CLASS/...`, or of parts, `train/CLASS/...` and `val/...` or `test/...`.

    Files are images by their extension. One folder around it all is stepped into. Without `labelled`, images
    may lie anywhere. Classes come in natural order: "2" before "10". A folder without parts is all "train".

    Every header is read, and where the files are small together every image is decoded, so that a bad one is
    found now; the pixels are then kept unless there are too many.

    Raises:
        DataError: nothing to read, an image file that is none, a class folder without images, an image
            outside the class folders.
    """
    top = _top(tree)
    folders = _parts(tree, top)
    paths = {part: _images_below(tree, folder) for part, folder in folders.items()}
    if not labelled:
        sets, digest = open_parts(tree, top, paths)
        return ImageCorpus(str(tree.root.resolve()), digest, None, dict(sets))
    names = {part: _class_names(tree, folder, paths[part]) for part, folder in folders.items()}
    classes = tuple(sorted({name for found in names.values() for name in found}, key=natural_order))
    number = {name: i for i, name in enumerate(classes)}
    sets, digest = open_parts(tree, top, paths)
    for part, images in sets.items():
        images.labels = np.array([number[name] for name in names[part]], dtype=np.int64)
    return ImageCorpus(str(tree.root.resolve()), digest, classes, dict(sets))


def natural_order(name: str) -> tuple[object, ...]:
    """A key that sorts numbers inside names by their value."""
    pieces = re.split(r"([0-9]+)", name)
    return (*(int(piece) if i % 2 else piece for i, piece in enumerate(pieces)), name)


def _top(tree: FileTree) -> str:
    """The folder in which parts or classes lie: the root, or the one that is all that there is above them."""
    top = ""
    while True:
        inside = _folders_in(tree, top)
        if len(inside) != 1 or _part_name(inside[0]) or not _folders_in(tree, inside[0]):
            return top
        if _holds_images(tree, top):
            return top
        top = inside[0]


def _folders_in(tree: FileTree, folder: str) -> list[str]:
    return sorted(path for path in tree.folders if posixpath.dirname(path) == folder)


def _holds_images(tree: FileTree, folder: str) -> bool:
    return any(posixpath.dirname(path) == folder and _is_image(path) for path in tree.sizes)


def _part_name(folder: str) -> str | None:
    return _PART_OF_FOLDER.get(posixpath.basename(folder).casefold())


def _parts(tree: FileTree, top: str) -> dict[str, str]:
    """The folder of each part; among classes one may be called "train" if images lie right in it."""
    folders = _folders_in(tree, top)
    named = [folder for folder in folders if _part_name(folder)]
    others = [folder for folder in folders if folder not in named]
    if not named or (others and len(named) == 1 and _holds_images(tree, named[0])):
        return {"train": top}
    names = list(map(posixpath.basename, named))
    if others:
        raise DataError(
            f"{tree.name(others[0])} lies beside {' and '.join(names)}; "
            f"either parts of a data set or classes were expected"
        )
    parts = {part: folder for folder in named if (part := _part_name(folder))}
    if len(parts) < len(named):
        raise DataError(
            f"{tree.name(top)} holds {', '.join(names)}; "
            f"one folder for each of train, validation and test was expected"
        )
    return {part: parts[part] for part in ("train", "validation", "test") if part in parts}


def _is_image(path: str) -> bool:
    return posixpath.splitext(path)[1].lower() in EXTENSIONS


def _below(folder: str) -> str:
    """What the path of everything in a folder begins with."""
    return f"{folder}/" if folder else ""


def _images_below(tree: FileTree, folder: str) -> list[str]:
    found = sorted(path for path in tree.sizes if path.startswith(_below(folder)) and _is_image(path))
    if not found:
        raise DataError(
            f"{tree.name(folder)} holds no images; "
            f"files that end in {', '.join(sorted(EXTENSIONS))} were expected"
        )
    return found


def _class_names(tree: FileTree, folder: str, paths: list[str]) -> list[str]:
    """The class of each image: the name of the folder right below `folder` that it lies in."""
    names = []
    for path in paths:
        name, *deeper = path.removeprefix(_below(folder)).split("/", 1)
        if not deeper:
            expected = tree.name(_below(folder) + "CLASS")
            raise DataError(f"{tree.name(path)} lies in no class folder; a folder {expected} was expected")
        names.append(name)
    known = set(names)
    for inside in _folders_in(tree, folder):
        if posixpath.basename(inside) not in known:
            raise DataError(f"{tree.name(inside)} is a class folder without images")
    return names
