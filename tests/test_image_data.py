import gc
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from aft.data import (
    DataError,
    ImageSet,
    file_images,
    open_image_set,
    open_images,
    pixel_array,
)
from aft.data.file_trees import ZipTree
from made_images import class_folders, encoded, noise, write_image, zipped

SHARED = Path(__file__).parents[1] / ".." / "shared" / "data"


def test_class_folders_split_by_seed(tmp_path: Path) -> None:
    class_folders(tmp_path / "set", {"cat": 6, "dog": 4})
    corpus = open_images(tmp_path / "set", split=0.3, seed=1, labelled=True)
    assert corpus.classes == ("cat", "dog")
    assert corpus.held_out == "validation"
    train, held_out = corpus.parts["train"], corpus.parts["validation"]
    assert (len(train), len(held_out)) == (7, 3)
    seen = {}
    for part in (train, held_out):
        for i in range(len(part)):
            level = int(part.read(i)[0, 0, 0])
            seen[level] = part.name(i)
            assert part.labels[i] == level // 10
            assert part.name(i) == str(tmp_path / "set" / ("cat", "dog")[level // 10] / f"{level % 10}.png")
    assert len(seen) == 10
    names = [held_out.name(i) for i in range(3)]
    again = open_images(tmp_path / "set", split=0.3, seed=1, labelled=True).parts["validation"]
    other = open_images(tmp_path / "set", split=0.3, seed=2, labelled=True).parts["validation"]
    assert [again.name(i) for i in range(3)] == names
    assert [other.name(i) for i in range(3)] != names


@pytest.mark.parametrize("held_out", [["val"], ["valid"], ["validation"], ["test"], ["val", "test"]])
def test_parts_of_a_folder(tmp_path: Path, held_out: list[str]) -> None:
    class_folders(tmp_path / "train", {"a": 2, "b": 1})
    for count, part in enumerate(held_out, start=1):
        class_folders(tmp_path / part, {"b": count})
    corpus = open_images(tmp_path, labelled=True)
    names = ["test" if part == "test" else "validation" for part in held_out]
    assert list(corpus.parts) == ["train", *names]
    assert corpus.held_out == names[0]
    assert corpus.parts["train"].labels.tolist() == [0, 0, 1]
    assert corpus.parts["train"].labels.dtype == np.int64
    assert open_image_set(tmp_path, labelled=True).labels.tolist() == [1]


def test_a_zip_is_read_as_the_folder_is(tmp_path: Path) -> None:
    class_folders(tmp_path / "set" / "train", {"a": 2, "b": 1})
    class_folders(tmp_path / "set" / "test", {"a": 1})
    folder = open_images(tmp_path / "set", labelled=True)
    for path in (
        zipped(tmp_path / "set", tmp_path / "flat.zip"),
        zipped(tmp_path / "set", tmp_path / "deep.zip", below="some/where/"),
    ):
        corpus = open_images(path, labelled=True)
        assert corpus.digest == folder.digest
        assert corpus.classes == folder.classes
        for part, images in folder.parts.items():
            assert corpus.parts[part].labels.tolist() == images.labels.tolist()
            for i in range(len(images)):
                assert np.array_equal(corpus.parts[part].read(i), images.read(i))
    assert "deep.zip, member some/where/train/a/0.png" in corpus.parts["train"].name(0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep.zip", "flat.zip", "set"]


def test_digest_follows_names_and_contents(tmp_path: Path) -> None:
    class_folders(tmp_path / "set", {"a": 2, "b": 2})
    digests = [open_images(tmp_path / "set", labelled=False).digest]
    write_image(tmp_path / "set" / "a" / "0.png", 99)
    digests.append(open_images(tmp_path / "set", labelled=False).digest)
    (tmp_path / "set" / "a" / "0.png").rename(tmp_path / "set" / "a" / "7.png")
    digests.append(open_images(tmp_path / "set", labelled=False).digest)
    assert len(set(digests)) == 3
    assert open_images(tmp_path / "set", labelled=False).digest == digests[-1]


def test_numeric_class_names_come_in_order_and_stay_text(tmp_path: Path) -> None:
    class_folders(tmp_path, {"10": 1, "2": 1, "1": 1, "x10": 1, "x9": 1})
    corpus = open_images(tmp_path, labelled=True)
    assert corpus.classes == ("1", "2", "10", "x9", "x10")


def test_hidden_and_foreign_files_are_passed_over(tmp_path: Path) -> None:
    class_folders(tmp_path / "set", {"a": 1, "b": 1})
    for name in (".DS_Store", "a/._0.png", "a/Thumbs.db", "b/desktop.ini", "a/notes.txt", "README.md"):
        (tmp_path / "set" / name).write_bytes(b"no image")
    write_image(tmp_path / "set" / "__MACOSX" / "a" / "0.png")
    write_image(tmp_path / "set" / ".cache" / "0.png")
    for source in (tmp_path / "set", zipped(tmp_path / "set", tmp_path / "set.zip")):
        corpus = open_images(source, labelled=True)
        assert corpus.classes == ("a", "b")
        assert [len(part) for part in corpus.parts.values()] == [1, 1]


def test_extensions_count_in_any_case_and_depth(tmp_path: Path) -> None:
    write_image(tmp_path / "a" / "X.PNG")
    write_image(tmp_path / "a" / "deeper" / "still" / "y.JpEg")
    write_image(tmp_path / "b" / "z.bmp")
    assert len(open_image_set(tmp_path, labelled=True)) == 3
    assert open_image_set(tmp_path, labelled=True).labels.tolist() == [0, 0, 1]


def test_without_labels_images_may_lie_anywhere(tmp_path: Path) -> None:
    write_image(tmp_path / "one.png")
    write_image(tmp_path / "below" / "two.png")
    (tmp_path / "empty").mkdir()
    corpus = open_images(tmp_path, split=0.5, labelled=False)
    assert corpus.classes is None
    assert [len(part) for part in corpus.parts.values()] == [1, 1]
    assert corpus.parts["train"].labels is None


def test_folders_that_are_no_classes_are_named(tmp_path: Path) -> None:
    class_folders(tmp_path / "set", {"a": 2})
    (tmp_path / "set" / "nothing").mkdir()
    for source in (tmp_path / "set", zipped(tmp_path / "set", tmp_path / "set.zip")):
        with pytest.raises(DataError, match="nothing is a class folder without images"):
            open_images(source, labelled=True)
    (tmp_path / "set" / "nothing").rmdir()
    write_image(tmp_path / "set" / "stray.png")
    with pytest.raises(DataError, match=r"stray.png lies in no class folder"):
        open_images(tmp_path / "set", labelled=True)
    (tmp_path / "none").mkdir()
    for labelled in (True, False):
        with pytest.raises(DataError, match="none holds no images; files that end in"):
            open_images(tmp_path / "none", labelled=labelled)


def test_parts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    class_folders(tmp_path / "train", {"a": 1, "b": 1})
    class_folders(tmp_path / "val", {"a": 1, "c": 1})
    with pytest.raises(DataError, match="class 'c' has images in the validation part, but none in the train"):
        open_images(tmp_path, labelled=True)
    class_folders(tmp_path / "validation", {"a": 1})
    with pytest.raises(DataError, match="holds train, val, validation; one folder for each"):
        open_images(tmp_path, labelled=True)


def test_a_part_beside_classes_is_not_guessed_at(tmp_path: Path) -> None:
    class_folders(tmp_path / "vehicles", {"bus": 1, "train": 1, "plane": 1})
    assert open_images(tmp_path / "vehicles", labelled=True).classes == ("bus", "plane", "train")
    class_folders(tmp_path / "vehicles", {"test": 1})
    with pytest.raises(DataError, match=r"bus lies beside test and train; either parts .* or classes"):
        open_images(tmp_path / "vehicles", labelled=True)
    class_folders(tmp_path / "set" / "train", {"a": 1, "b": 1})
    class_folders(tmp_path / "set", {"unlabelled": 3})
    with pytest.raises(DataError, match="unlabelled lies beside train"):
        open_images(tmp_path / "set", labelled=True)


def test_a_part_without_images_and_one_without_training_are_named(tmp_path: Path) -> None:
    class_folders(tmp_path / "test", {"a": 1})
    with pytest.raises(DataError, match="holds test, but no part to train on"):
        open_images(tmp_path, labelled=True)
    assert len(open_image_set(tmp_path, labelled=True)) == 1
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="train holds no images"):
        open_images(tmp_path, labelled=True)


def test_labels_follow_the_classes_of_a_trained_model(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 1, "b": 2})
    images = open_image_set(tmp_path, labelled=True, classes=["z", "b", "a"])
    assert images.labels.tolist() == [2, 1, 1]
    assert images.labels.dtype == np.int64
    corpus = open_images(tmp_path, labelled=True, classes=["z", "b", "a"])
    assert corpus.classes == ("z", "b", "a")
    with pytest.raises(DataError, match="holds class 'b'; the 2 known are a, c"):
        open_image_set(tmp_path, labelled=True, classes=["a", "c"])


def test_bad_images_are_found_at_opening(tmp_path: Path) -> None:
    class_folders(tmp_path / "set", {"a": 3})
    bad = tmp_path / "set" / "a" / "1.png"
    for content in (b"", b"text", bad.read_bytes()[:50]):
        bad.write_bytes(content)
        for source in (tmp_path / "set", zipped(tmp_path / "set", tmp_path / "set.zip")):
            with pytest.raises(DataError, match=r"a/1.png (is|cannot)"):
                open_images(source, labelled=False)


@pytest.mark.parametrize("limit", [0, file_images.SMALL])
def test_many_bad_images_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(file_images, "SMALL", limit)
    for part in ("train", "test"):
        class_folders(tmp_path / part, {"a": 9})
    first = f"{tmp_path}/train/a/0.png is empty; an image was expected"

    def message(part: str, count: int) -> str:
        for number in range(count):
            (tmp_path / part / "a" / f"{number}.png").write_bytes(b"")
        with pytest.raises(DataError) as refused:
            open_images(tmp_path, labelled=True)
        return str(refused.value)

    assert message("train", 1) == first
    assert message("train", 2) == f"{first}; nor can {tmp_path}/train/a/1.png be read"
    three = f"{first}; nor can {tmp_path}/train/a/1.png, {tmp_path}/train/a/2.png and"
    assert message("train", 6) == f"{three} 3 more be read"
    assert message("test", 4) == f"{three} 7 more be read"
    monkeypatch.setattr(file_images, "_MOST", 5)
    assert message("test", 4) == f"{three} at least 2 more be read"


@pytest.mark.parametrize("limit", ["SMALL", "KEPT"])
def test_large_data_are_decoded_when_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    class_folders(tmp_path, {"a": 3, "b": 2})
    kept = open_image_set(tmp_path, labelled=True)
    monkeypatch.setattr(file_images, limit, 100)
    images = open_image_set(tmp_path, labelled=True)
    for i in range(5):
        assert np.array_equal(images.read(i), kept.read(i))
        assert np.array_equal(images.read(i, 1), kept.read(i, 1))
    path = tmp_path / "a" / "1.png"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match=r"a/1.png cannot be read"):
        images.read(1)
    assert (kept.read(1) == 1).all()
    path.write_bytes(b"text")
    with pytest.raises(DataError, match=r"a/1.png is not an image"):
        open_image_set(tmp_path, labelled=True)


def test_a_set_is_gray_if_all_its_images_are(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Image.new("L", (2, 2)).save(tmp_path / f"{name}.png")
    assert open_image_set(tmp_path, labelled=False).gray
    write_image(tmp_path / "c.png")
    assert not open_image_set(tmp_path, labelled=False).gray


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    class_folders(tmp_path / "elsewhere", {"a": 2})
    (tmp_path / "set" / "b").mkdir(parents=True)
    (tmp_path / "set" / "a").symlink_to(tmp_path / "elsewhere" / "a")
    (tmp_path / "set" / "b" / "0.png").symlink_to(tmp_path / "elsewhere" / "a" / "1.png")
    (tmp_path / "set" / "b" / "up").symlink_to(tmp_path / "set")
    assert open_image_set(tmp_path / "set", labelled=True).labels.tolist() == [0, 0, 1]
    (tmp_path / "set" / "b" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(DataError, match=r"b/gone.png cannot be read: No such file"):
        open_images(tmp_path / "set", labelled=True)
    (tmp_path / "set" / "b" / "gone.png").unlink()
    os.mkfifo(tmp_path / "set" / "b" / "pipe.png")
    with pytest.raises(DataError, match=r"pipe.png is not a regular file"):
        open_images(tmp_path / "set", labelled=True)


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        open_images(tmp_path, labelled=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_enough(tmp_path: Path) -> None:
    class_folders(tmp_path / "set", {"a": 2})
    (tmp_path / "set").chmod(0o555)
    assert len(open_image_set(tmp_path / "set", labelled=True)) == 2


def test_nothing_is_written_beside_the_data(tmp_path: Path) -> None:
    class_folders(tmp_path / "set", {"a": 2})
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")}
    pixel_array(open_image_set(tmp_path / "set", labelled=True), None, "set", resize=False)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")} == before


def test_bad_zips_are_named(tmp_path: Path) -> None:
    class_folders(tmp_path / "set", {"a": 3})
    whole = zipped(tmp_path / "set", tmp_path / "set.zip").read_bytes()
    bad = tmp_path / "bad.zip"
    bad.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"bad.zip cannot be read as a zip"):
        open_images(bad, labelled=True)
    where = whole.index(b"IDAT") + 6  # a byte of the first image
    bad.write_bytes(whole[:where] + bytes([whole[where] ^ 1]) + whole[where + 1 :])
    with pytest.raises(DataError, match=r"bad.zip, member a/0.png cannot be unpacked: Bad CRC"):
        open_images(bad, labelled=True)
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr("../a/0.png", b"")
    with pytest.raises(DataError, match=r"member '../a/0.png' points outside"):
        open_images(bad, labelled=True)
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr("readme.txt", b"")
    with pytest.raises(DataError, match="holds no images"):
        open_images(bad, labelled=False)


class Means(Dataset[float]):
    def __init__(self, images: ImageSet) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> float:
        return float(self.images.read(index).mean())


def test_workers_read_from_one_zip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class_folders(tmp_path / "set", {"a": 9, "b": 9})
    monkeypatch.setattr(file_images, "SMALL", 0)
    images = open_image_set(zipped(tmp_path / "set", tmp_path / "set.zip"), labelled=True)
    expected = [float(images.read(i).mean()) for i in range(18)]
    for shared in (images, pickle.loads(pickle.dumps(images))):  # as forked workers and spawned ones get it
        loader = DataLoader(Means(shared), num_workers=2, multiprocessing_context="fork")
        assert [float(mean) for mean in loader] == expected


def test_each_process_opens_the_zip_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process shares its parent's place in an open file, and would read where that one stands."""
    tree = ZipTree(zipped(class_folders(tmp_path / "set", {"a": 1}), tmp_path / "set.zip"))
    opened = []
    open_zip = zipfile.ZipFile
    monkeypatch.setattr(zipfile, "ZipFile", lambda path: opened.append(path) or open_zip(path))
    content = tree.read("a/0.png")
    assert opened == []
    monkeypatch.setattr(os, "getpid", lambda: 0)
    assert tree.read("a/0.png") == tree.read("a/0.png") == content
    assert opened == [tmp_path / "set.zip"]


def test_a_zip_is_closed_with_its_tree(tmp_path: Path) -> None:
    """Also where only the collector of cycles finds it, as after an error."""
    tree = ZipTree(zipped(class_folders(tmp_path / "set", {"a": 1}), tmp_path / "set.zip"))
    archive, cycle = tree._archive(), [tree]
    cycle.append(cycle)  # type: ignore[arg-type]
    del tree, cycle
    gc.collect()
    assert archive.fp is None


def test_sources_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: no such file or folder"):
        open_images(tmp_path / "nowhere", labelled=True)
    with pytest.raises(DataError, match="/dev/null is not a regular file"):
        open_images("/dev/null", labelled=True)
    for content, message in ((b"", "is empty"), (b"<html>", "begins with b'<html>'")):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(DataError, match=f"x {message}; a folder or a zip of images"):
            open_images(tmp_path / "x", labelled=True)
    image = write_image(tmp_path / "a.png").rename(tmp_path / "renamed")
    with pytest.raises(DataError, match="renamed is an image; a folder or a zip of images"):
        open_images(image, labelled=False)
    for split in (0.0, 1.0, float("nan")):
        with pytest.raises(DataError, match=r"split is .* between 0 and 1"):
            open_images(None, split=split, labelled=True)
    class_folders(tmp_path / "one", {"a": 1})
    with pytest.raises(DataError, match=r"holds 1 images; with 0.1 of them held out none is left"):
        open_images(tmp_path / "one", labelled=True)


def test_the_shared_cifar10_images(monkeypatch: pytest.MonkeyPatch) -> None:
    path = SHARED / "cifar10_20k_jpeg.zip"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    monkeypatch.setattr(file_images, "SMALL", 0)
    corpus = open_images(path, labelled=True)
    assert corpus.classes[:2] == ("airplane", "automobile")
    assert {part: np.bincount(images.labels).tolist() for part, images in corpus.parts.items()} == {
        "train": [2000] * 10,
        "test": [500] * 10,
    }
    assert corpus.parts["test"].read(0).shape == (32, 32, 3)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP"])
def test_a_cut_image_of_a_large_set_is_found_at_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(file_images, "SMALL", 0)
    class_folders(tmp_path, {"a": 3, "b": 3})
    whole = encoded(Image.fromarray(noise(32, 32, 3)), form).getvalue()
    place = tmp_path / "a" / f"last.{form.lower()}"
    place.write_bytes(whole)
    assert len(open_image_set(tmp_path, labelled=True)) == 7
    place.write_bytes(whole[:-200])
    with pytest.raises(DataError, match=rf"last\.{form.lower()} cannot be read as an image"):
        open_image_set(tmp_path, labelled=True)


class Unreadable(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        raise DataError("x/y.jpg cannot be read")


def test_an_error_in_a_worker_stays_one_line() -> None:
    with pytest.raises(DataError) as caught:
        list(DataLoader(Unreadable(), num_workers=1))
    assert str(caught.value) == "x/y.jpg cannot be read"


def test_no_class_is_held_out_as_a_whole(tmp_path: Path) -> None:
    class_folders(tmp_path, {f"c{i}": 1 for i in range(9)} | {"many": 11})
    for seed in range(5):
        parts = open_images(tmp_path, split=0.3, seed=seed, labelled=True).parts
        assert len(set(parts["train"].labels.tolist())) == 10
        assert len(parts["validation"]) == 6
    assert len(open_images(tmp_path, split=0.6, labelled=True).parts["train"]) == 8


@pytest.mark.parametrize("error", [NotImplementedError, UnicodeDecodeError, "lzma"])
def test_a_zip_that_python_cannot_read_is_named(tmp_path: Path, error: object) -> None:
    class_folders(tmp_path / "set", {"a": 2, "b": 2})
    archive = zipped(tmp_path / "set", tmp_path / "set.zip")
    damaged = bytearray(archive.read_bytes())
    directory = damaged.rindex(b"PK\x01\x02")
    if error is UnicodeDecodeError:
        damaged[directory + 9] |= 0x08  # names are UTF-8, says the flag
        damaged[directory + 46] = 0xFF
    else:  # a method of compression that is none, or not the one that the member is packed by
        damaged[directory + 10] = 99 if error is NotImplementedError else 14
    archive.write_bytes(damaged)
    with pytest.raises(DataError, match=r"set\.zip"):
        open_images(archive, labelled=True)
