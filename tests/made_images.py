"""Images and data sets made on the fly."""

import io
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image


def encoded(image: Image.Image, form: str = "PNG", **options) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, form, **options)
    file.seek(0)
    return file


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_image(path: Path, level: int = 0, size: tuple[int, int] = (4, 4)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (level, level, level)).save(path)
    return path


def zipped(folder: Path, target: Path, below: str = "") -> Path:
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, below + path.relative_to(folder).as_posix())
    return target


def class_folders(root: Path, counts: dict[str, int]) -> Path:
    for level, (name, count) in enumerate(counts.items()):
        for i in range(count):
            write_image(root / name / f"{i}.png", level * 10 + i)
    return root
