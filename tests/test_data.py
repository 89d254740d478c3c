import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from aft.data import (
    ByteWindows,
    DataError,
    decode,
    distinct_bytes,
    encode,
    open_bytes,
    split_bytes,
    standard_library_source,
)
from aft.data.splits import check_lengths


@pytest.mark.parametrize(
    "content",
    [bytes(range(256)), "\ufeffwörd\n".encode("utf-16"), b"one\rtwo\rthree", b"a\r\nb\n\x1a\x00", b"\xff"],
    ids=["every byte", "UTF-16 with a BOM", "lone CR", "CRLF, ^Z and NUL", "one byte"],
)
def test_bytes_are_opened_as_they_are(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data"
    path.write_bytes(content)
    data = open_bytes(path)
    assert data.dtype == np.uint8
    assert data.tobytes() == content
    assert decode(encode(data, None, "data").tolist(), None) == content
    alphabet = distinct_bytes(data)
    tokens = encode(data, alphabet, "data")
    assert tokens.max() == len(alphabet) - 1
    assert decode(tokens.tolist(), alphabet) == content


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing-here: no such file"):
        open_bytes(tmp_path / "nothing-here")
    with pytest.raises(DataError, match="is a directory; a file was expected"):
        open_bytes(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="empty is empty; at least one byte"):
        open_bytes(tmp_path / "empty")
    with pytest.raises(DataError, match="is not a regular file"):
        open_bytes("/dev/null")


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_bytes(b"x")

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match="secret cannot be read: Permission denied"):
        open_bytes(tmp_path / "secret")


def test_enwik8_zip_is_its_member(tmp_path: Path) -> None:
    path = tmp_path / "enwik8.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("enwik8", b"\x00\r\nwiki\xff" * 100)
    assert open_bytes(path).tobytes() == b"\x00\r\nwiki\xff" * 100


def test_other_zips_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("text8", b"words")
    with pytest.raises(
        DataError, match=r"other.zip is a zip that holds 'text8'; a member 'enwik8' was expected"
    ):
        open_bytes(path)
    with zipfile.ZipFile(path, "w"):
        pass
    with pytest.raises(DataError, match="holds nothing"):
        open_bytes(path)


def test_damaged_enwik8_zip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "enwik8.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("enwik8", bytes(range(256)) * 40)
    content = bytearray(path.read_bytes())
    content[60:90] = bytes(30)
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be unpacked"):
        open_bytes(path)


def test_half_a_zip_is_refused_and_text_that_begins_like_one_is_bytes(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_bytes(b"PK are a zip's first letters")
    assert open_bytes(path).tobytes() == b"PK are a zip's first letters"
    path.write_bytes(b"PK\x03\x04 and then a download that stopped")
    with pytest.raises(DataError, match="begins as a zip does, but its 37 bytes are not a whole one"):
        open_bytes(path)


def test_standard_library_source_is_the_same_each_time() -> None:
    text = standard_library_source()
    assert len(text) > 1_000_000
    assert b"import argparse" in text.tobytes()
    np.testing.assert_array_equal(text, standard_library_source())


def test_fractions_cut_as_nanogpt_does() -> None:
    data = np.arange(101, dtype=np.uint8)
    parts = split_bytes(data, (0.9, 0.1), "data")
    assert [len(part) for part in parts.values()] == [int(0.9 * 101), 101 - int(0.9 * 101)]
    parts = split_bytes(data, (0.5, 0.25, 0.25), "data")
    assert list(parts) == ["train", "validation", "test"]
    np.testing.assert_array_equal(np.concatenate(list(parts.values())), data)


def test_sizes_cut_exactly_and_leave_the_rest() -> None:
    parts = split_bytes(np.arange(101, dtype=np.uint8), (90, 5, 5), "data")
    assert [(int(part[0]), int(part[-1])) for part in parts.values()] == [(0, 89), (90, 94), (95, 99)]
    with pytest.raises(DataError, match=r"data holds 101 bytes; the split 90 \+ 5 \+ 7 needs 102"):
        split_bytes(np.arange(101, dtype=np.uint8), (90, 5, 7), "data")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1.0,), "two or three parts"),
        ((0.9, 0.2), "add up to 1"),
        ((0.5, 0.5, 0.0), "larger than 0"),
        ((float("nan"), 0.5), "larger than 0"),
        ((90.5, 5), "whole numbers"),
        ((0.9, 10), "whole numbers"),
    ],
)
def test_impossible_splits_are_refused(sizes: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_bytes(np.zeros(200, dtype=np.uint8), sizes, "data")


def test_short_parts_are_named_with_both_numbers() -> None:
    part = np.zeros(64, dtype=np.uint8)
    with pytest.raises(DataError, match=r"short.txt holds 64 bytes; a context of 64 needs at least 65"):
        check_lengths({"train": part}, 64, "short.txt")
    whole = np.zeros(650, dtype=np.uint8)
    with pytest.raises(DataError, match=r"the validation part of short.txt holds 64 bytes; .* at least 65"):
        check_lengths({"train": whole, "validation": part}, 64, "short.txt")


@pytest.mark.parametrize(("stride", "count"), [(1, 7), (3, 3), (10, 1)])
def test_windows_hold_tokens_and_their_followers(stride: int, count: int) -> None:
    tokens = np.arange(100, 111, dtype=np.uint8)
    windows = ByteWindows(tokens, context=4, stride=stride)
    assert len(windows) == count
    for i in range(count):
        item = windows[i]
        start = 100 + i * stride
        assert item["input_ids"].dtype == item["shift_labels"].dtype == torch.int64
        assert item["input_ids"].tolist() == list(range(start, start + 4))
        assert item["shift_labels"].tolist() == list(range(start + 1, start + 5))
    with pytest.raises(IndexError, match=f"window {count} of {count}"):
        windows[count]


def test_windows_of_too_few_tokens_are_refused() -> None:
    assert len(ByteWindows(np.zeros(5, dtype=np.uint8), context=4)) == 1
    with pytest.raises(DataError, match="4 bytes; a context of 4 needs at least 5"):
        ByteWindows(np.zeros(4, dtype=np.uint8), context=4)


def test_windows_read_a_read_only_map(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(range(32)))
    assert ByteWindows(open_bytes(tmp_path / "data"), context=8)[3]["input_ids"].tolist() == list(
        range(3, 11)
    )


def test_byte_outside_the_alphabet_is_named() -> None:
    with pytest.raises(DataError, match="held-out: byte 0x63 at offset 2 is not one of the 2 bytes"):
        encode(np.frombuffer(b"abcab", dtype=np.uint8), [97, 98], "held-out")
