import gzip
import io
import pickle
import struct
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from aft.data import (
    DataError,
    open_image_set,
    open_images,
    pixel_array,
)
from made_images import noise

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


def old_bytes(value: bytes) -> bytes:
    """A Python 2 string in a pickle."""
    return b"T" + struct.pack("<i", len(value)) + value


def old_array(pixels: np.ndarray, code: bytes = b"u1") -> bytes:
    """An array as Python 2's NumPy pickles it."""
    shape = b"M" + struct.pack("<H", pixels.shape[0]) + b"M" + struct.pack("<H", pixels.shape[1]) + b"\x86"
    dtype = b"cnumpy\ndtype\n" + old_bytes(code) + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + old_bytes(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + old_bytes(b"b") + b"\x87R"
    return made + b"(K\x01" + shape + dtype + b"\x89" + old_bytes(pixels.tobytes()) + b"tb"


def old_batch(pixels: np.ndarray, labels: list[int], code: bytes = b"u1") -> bytes:
    """A batch as CIFAR-10's authors wrote it: a Python 2 pickle of protocol 2."""
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    entries = old_bytes(b"data") + old_array(pixels, code) + old_bytes(b"labels") + numbers
    return b"\x80\x02}(" + entries + old_bytes(b"batch_label") + old_bytes(b"a batch") + b"u."


def cifar_files() -> dict[str, bytes]:
    names = [b"airplane", b"automobile", b"bird"]
    meta = b"\x80\x02}" + old_bytes(b"label_names") + b"](" + b"".join(map(old_bytes, names)) + b"es."
    files = {"batches.meta": meta, "test_batch": old_batch(noise(2, 3072, seed=9), [2, 1])}
    for i in range(1, 6):
        files[f"data_batch_{i}"] = old_batch(noise(2, 3072, seed=i), [i % 3, 0])
    return files


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def write_archive(path: Path, files: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}" if "/" not in name else name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_cifar10_from_archive_and_folder(tmp_path: Path) -> None:
    files = cifar_files()
    sources = [
        write_archive(tmp_path / "cifar-10-python.tar.gz", files),
        write_archive(tmp_path / "cifar-10-python.tar", files, mode="w"),
        write_folder(tmp_path / "above" / "cifar-10-batches-py", files),
        tmp_path / "above",
    ]
    digests = set()
    for source in sources:
        corpus = open_images(source, labelled=True)
        digests.add(corpus.digest)
        assert corpus.classes == ("airplane", "automobile", "bird")
        assert corpus.held_out == "test"
        assert corpus.parts["train"].labels.tolist() == [1, 0, 2, 0, 0, 0, 1, 0, 2, 0]
        assert corpus.parts["test"].labels.tolist() == [2, 1]
        planes = noise(2, 3072, seed=3)[1].reshape(3, 32, 32)
        assert np.array_equal(corpus.parts["train"].read(5), np.stack(list(planes), axis=2))
        assert corpus.parts["train"].name(5).endswith("train, image 5")
    assert len(digests) == 1
    assert (
        open_image_set(sources[0], labelled=True, classes=["bird", "automobile", "airplane"]).labels[0] == 0
    )


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_cifar10_written_again_by_python_3(tmp_path: Path, protocol: int) -> None:
    pixels = np.asfortranarray(noise(2, 3072)) if protocol == 4 else noise(2, 3072)
    files = cifar_files()
    files["data_batch_2"] = pickle.dumps({"data": pixels, "labels": [0, 1]}, protocol=protocol)
    files["batches.meta"] = (
        b"(dp1\nS'label_names'\np2\n(lp3\nS'cat'\np4\naS'dog'\np5\naS'cow'\np6\nas."  # in text
    )
    if protocol == 5:  # there NumPy asks for a function of its own, which is refused like any other
        with pytest.raises(DataError, match=r"asks for 'numpy\.\S*_frombuffer'"):
            open_images(write_folder(tmp_path, files), labelled=True)
        return
    corpus = open_images(write_folder(tmp_path, files), labelled=True)
    assert corpus.classes == ("cat", "dog", "cow")
    images = corpus.parts["train"]
    assert np.array_equal(images.read(2), pixels[0].reshape(3, 32, 32).transpose(1, 2, 0))


class Opens:
    """Pickles to a call of `open` that leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable, tuple[str, str]]:
        return open, (str(self.path), "w")


def test_no_pickle_is_executed(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    for content in (
        pickle.dumps({"data": Opens(trap), "labels": [0]}, protocol=2),
        b"cos\nsystem\n(S'touch " + str(trap).encode() + b"'\ntR.",
        b"\x80\x02cnumpy\ntesting.os.system\n.",
        b"\x80\x04\x8c\x05numpy\x8c\x11ndarray.__class__\x93.",
    ):
        files = cifar_files() | {"data_batch_3": content}
        with pytest.raises(DataError, match=r"data_batch_3 asks for .*refused"):
            open_images(write_folder(tmp_path / "set", files), labelled=True)
    assert not trap.exists()


def test_damaged_batches_are_named(tmp_path: Path) -> None:
    whole = cifar_files()["data_batch_1"]
    for content, message in {
        whole[: len(whole) // 2]: "is damaged",
        b"": "is damaged",
        b"<!DOCTYPE html>": "is damaged",
        pickle.dumps([1, 2]): "holds no CIFAR-10 batch",
        pickle.dumps({"data": 1, "labels": [0]}): r"data is of type int; uint8 \[n, 3072\]",
        old_batch(noise(2, 3071), [0, 1]): r"data is an array \(2, 3071\)",
        old_batch(noise(2, 3072), [0]): "holds 2 images and 1 labels",
        old_batch(noise(2, 3072), [0, 3]): "label 3; a number from 0 to 2",
        old_batch(noise(2, 3072), [0, 1], code=b"i1"): "holds an array of type b'i1'",
        whole.replace(b"M\x02\x00M\x00\x0c", b"M\x03\x00M\x00\x0c"): "holds an array whose shape",
    }.items():
        files = cifar_files() | {"data_batch_1": content}
        with pytest.raises(DataError, match=f"data_batch_1:? {message}") as raised:
            open_images(write_folder(tmp_path, files), labelled=True)
        assert "\n" not in str(raised.value)
    with pytest.raises(DataError, match="holds no label_names"):
        open_images(write_folder(tmp_path, cifar_files() | {"batches.meta": pickle.dumps({})}), labelled=True)


def test_damaged_archives_are_named(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "cifar-10-python.tar.gz", cifar_files())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="ends in the middle; is the download complete"):
        open_images(path, labelled=True)
    for where in (len(whole) // 2, len(whole) - 6):  # in a batch, and in the checksum
        path.write_bytes(whole[:where] + bytes([whole[where] ^ 4]) + whole[where + 1 :])
        with pytest.raises(DataError, match=r"tar.gz cannot be unpacked") as raised:
            open_images(path, labelled=True)
        assert "\n" not in str(raised.value)
    for page in (b"<!DOCTYPE html><html>404</html>", gzip.compress(b"<!DOCTYPE html><html>404</html>")):
        path.write_bytes(page)
        with pytest.raises(DataError, match="begins with b'<!DOCTYPE html>"):
            open_images(path, labelled=True)
    files = cifar_files()
    del files["data_batch_4"]
    for source in (write_archive(path, files), write_folder(tmp_path / "set", files)):
        with pytest.raises(DataError, match=r"lacks data_batch_4; CIFAR-10 has batches\.meta, data"):
            open_images(source, labelled=True)


@pytest.mark.parametrize("name", ["../escaped", "/escaped", "cifar-10-batches-py/../../escaped"])
def test_members_that_point_outside_are_refused(tmp_path: Path, name: str) -> None:
    path = write_archive(tmp_path / "x.tar.gz", {name: b"x"})
    with pytest.raises(DataError, match=r"x.tar.gz: its member '.*escaped' points outside"):
        open_images(path, labelled=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.tar.gz"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_members_that_are_links_or_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        member.type = kind
        member.linkname = "/etc/passwd"
        archive.addfile(member)
    with pytest.raises(DataError, match="data_batch_1' is a link or a device"):
        open_images(tmp_path / "x.tar.gz", labelled=True)


def test_cifar100_is_refused_by_name(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "x.tar.gz", {"cifar-100-python/train": b"x"})
    with pytest.raises(DataError, match="is CIFAR-100; CIFAR-10 was expected"):
        open_images(path, labelled=True)


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def idx_files() -> dict[str, bytes]:
    return {
        "train-images-idx3-ubyte": idx(noise(6, 5, 4)),
        "train-labels-idx1-ubyte": idx(np.array([3, 1, 0, 2, 1, 3], np.uint8)),
        "t10k-images-idx3-ubyte": idx(noise(2, 5, 4, seed=1)),
        "t10k-labels-idx1-ubyte": idx(np.array([1, 0], np.uint8)),
    }


def test_idx_folder_and_file(tmp_path: Path) -> None:
    plain = write_folder(tmp_path / "plain", idx_files())
    packed = {f"{name}.gz": gzip.compress(content) for name, content in idx_files().items()}
    digests = set()
    for folder in (plain, write_folder(tmp_path / "packed", packed)):
        corpus = open_images(folder, labelled=True)
        digests.add(corpus.digest)
        assert corpus.classes == ("0", "1", "2", "3")
        assert corpus.held_out == "test"
        assert corpus.parts["train"].labels.tolist() == [3, 1, 0, 2, 1, 3]
        assert corpus.parts["train"].gray
        assert np.array_equal(corpus.parts["test"].read(1, 1)[..., 0], noise(2, 5, 4, seed=1)[1])
    assert len(digests) == 1
    (tmp_path / "packed" / "t10k-images-idx3-ubyte.gz").rename(tmp_path / "packed" / "renamed")
    assert len(open_image_set(tmp_path / "packed" / "renamed", labelled=False)) == 2
    corpus = open_images(tmp_path / "packed" / "train-images-idx3-ubyte.gz", split=0.5, labelled=True)
    assert [len(part) for part in corpus.parts.values()] == [3, 3]
    assert sorted(np.concatenate([part.labels for part in corpus.parts.values()])) == [0, 1, 1, 2, 3, 3]


def test_idx_without_labels_is_for_pixel_models(tmp_path: Path) -> None:
    path = tmp_path / "anything"
    path.write_bytes(idx(noise(4, 2, 2)))
    assert open_images(path, labelled=False).classes is None
    with pytest.raises(DataError, match="anything has no labels beside it"):
        open_images(path, labelled=True)


def test_damaged_idx_files_are_named(tmp_path: Path) -> None:
    images, labels = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
    whole = idx_files()[images]
    for content, message in {
        whole[:-1]: r"header tells \(6, 5, 4\), 120 bytes; 119 came",
        whole + b"x": "120 bytes; more came",
        whole[:9]: "ends within its header",
        b"\0\0\x09\x03" + whole[4:]: "begins with",
        b"": "begins with b''",
        whole[:4] + b"\xff" * 12 + whole[16:]: "bytes; 120 came",
        whole[:4] + b"\0" * 12 + whole[16:]: r"holds no images: its header tells the shape \(0, 0, 0\)",
    }.items():
        folder = write_folder(tmp_path / "set", idx_files() | {images: content})
        with pytest.raises(DataError, match=rf"{images}:? .*{message}"):
            open_images(folder, labelled=True)
    packed = write_folder(tmp_path / "packed", {f"{labels}.gz": gzip.compress(idx_files()[labels])})
    for file in (tmp_path / "set" / labels, packed / f"{labels}.gz"):
        with pytest.raises(DataError, match=f"{file} holds IDX labels; give the images or their folder"):
            open_images(file, labelled=False)
    folder = write_folder(tmp_path / "set", idx_files() | {labels: idx(np.zeros(5, np.uint8))})
    with pytest.raises(DataError, match=f"{labels} holds 5 labels; .*{images} holds 6 images"):
        open_images(folder, labelled=True)


def test_damaged_packed_idx_files_are_named(tmp_path: Path) -> None:
    files = {f"{name}.gz": gzip.compress(content) for name, content in idx_files().items()}
    name = "train-images-idx3-ubyte.gz"
    whole = files[name]
    for content, message in {
        whole[: len(whole) // 2]: "ends in the middle",
        whole[:-6] + bytes([whole[-6] ^ 1]) + whole[-5:]: "cannot be read: CRC check failed",
        whole[:60] + bytes([whole[60] ^ 1]) + whole[61:]: "cannot be read",
        b"<html>": "begins with b'<htm'; an IDX file",
    }.items():
        with pytest.raises(DataError, match=f"{name} {message}"):
            open_images(write_folder(tmp_path, files | {name: content}), labelled=True)


def test_fashion_mnist_as_debian_ships_it() -> None:
    if not FASHION_MNIST.is_dir():
        pytest.skip("the package dataset-fashion-mnist is not installed")
    corpus = open_images(FASHION_MNIST, labelled=True)
    assert {part: len(images) for part, images in corpus.parts.items()} == {"train": 60_000, "test": 10_000}
    assert corpus.parts["train"].read(0, 1).shape == (28, 28, 1)
    assert np.bincount(corpus.parts["test"].labels).tolist() == [1000] * 10


def test_digits_are_at_hand() -> None:
    corpus = open_images(None, labelled=True)
    assert corpus.path == "digits"
    assert corpus.classes == tuple("0123456789")
    assert {part: len(images) for part, images in corpus.parts.items()} == {"train": 1617, "validation": 180}
    images = pixel_array(corpus.parts["train"], None, "digits", resize=False)
    assert images.shape == (1617, 8, 8, 1)
    levels = np.unique(images)
    assert np.array_equal(np.rint(levels * (16 / 255)), np.arange(17))
    assert (levels[0], levels[-1]) == (0, 255)


def test_without_scikit_learn_the_default_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="come with scikit-learn, which is not installed"):
        open_images(None, labelled=True)
