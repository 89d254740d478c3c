import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from aft.data import (
    DataError,
    read_image,
)
from made_images import encoded, noise, write_image


def test_eight_bit_pixels_come_as_they_are() -> None:
    pixels = noise(5, 7, 3)
    assert np.array_equal(read_image(encoded(Image.fromarray(pixels))), pixels)
    gray = noise(5, 7)
    assert np.array_equal(read_image(encoded(Image.fromarray(gray)), channels=1), gray[..., None])
    assert np.array_equal(read_image(encoded(Image.fromarray(gray))), np.stack([gray] * 3, axis=2))


def test_gray_of_colours_is_itu_r_601() -> None:
    pixels = noise(5, 7, 3)
    expected = np.rint(pixels @ np.array([0.299, 0.587, 0.114]))
    gray = read_image(encoded(Image.fromarray(pixels)), channels=1)[..., 0]
    assert abs(gray.astype(float) - expected).max() <= 1


def test_bits_and_palettes_are_spread_to_eight_bits() -> None:
    bits = Image.fromarray(noise(5, 7) > 127)
    assert np.array_equal(read_image(encoded(bits), 1)[..., 0], np.asarray(bits) * 255)
    palette = Image.fromarray(noise(5, 7, 3)).quantize(8)
    assert np.array_equal(read_image(encoded(palette)), np.asarray(palette.convert("RGB")))


def test_what_is_transparent_shows_white() -> None:
    pixels = noise(5, 7, 4)
    alpha = pixels[..., 3:] / 255
    expected = pixels[..., :3] * alpha + 255 * (1 - alpha)
    assert abs(read_image(encoded(Image.fromarray(pixels))) - expected).max() <= 1
    gray = Image.merge("LA", [Image.new("L", (2, 1), 10), Image.fromarray(np.array([[0, 255]], np.uint8))])
    assert read_image(encoded(gray), 1)[0, :, 0].tolist() == [255, 10]
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "L").convert("P")
    palette.putpalette([9, 9, 9, 20, 30, 40])
    assert read_image(encoded(palette, transparency=0))[0].tolist() == [[255, 255, 255], [20, 30, 40]]
    colour = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8))
    assert read_image(encoded(colour, transparency=(1, 2, 3)))[0].tolist() == [[255, 255, 255], [4, 5, 6]]


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_are_scaled_and_not_clipped(form: str) -> None:
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    read = read_image(encoded(Image.fromarray(values), form), channels=1)[..., 0]
    assert np.array_equal(read, np.rint(values * (255 / 65535)))


def test_sixteen_bit_gray_may_have_a_transparent_level() -> None:
    values = np.array([[1000, 2000]], dtype=np.uint16)
    assert read_image(encoded(Image.fromarray(values), transparency=1000), 1)[0, :, 0].tolist() == [255, 8]


def test_sixteen_bit_colours_keep_their_upper_bits(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (3, 5, 3)).astype(">u2")
    (tmp_path / "x.ppm").write_bytes(b"P6 5 3 65535\n" + values.tobytes())
    assert abs(read_image(tmp_path / "x.ppm") - values / 257).max() <= 1


def test_pixels_without_a_known_range_are_refused() -> None:
    for values in (np.array([[0, 70000]], np.int32), np.array([[-1, 5]], np.int32)):
        with pytest.raises(DataError, match=r"x.tif holds values from .* 8 or 16 bits a channel"):
            read_image(encoded(Image.fromarray(values), "TIFF"), name="x.tif")
    with pytest.raises(DataError, match=r"x.tif holds floating-point pixels"):
        read_image(encoded(Image.fromarray(np.zeros((2, 2), np.float32)), "TIFF"), name="x.tif")


def test_printers_and_televisions_colours_become_rgb() -> None:
    for mode, form in (("CMYK", "JPEG"), ("CMYK", "TIFF"), ("YCbCr", "TIFF")):
        image = Image.new("RGB", (8, 8), (200, 40, 90)).convert(mode)
        read = read_image(encoded(image, form))
        assert abs(read.astype(int) - [200, 40, 90]).max() <= 4, (mode, form)


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_of_an_animation_the_first_frame_is_read(form: str) -> None:
    frames = [Image.new("RGB", (6, 4), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if form == "WEBP" else {}
    animation = encoded(frames[0], form, save_all=True, append_images=frames[1:], **options)
    assert np.array_equal(read_image(animation), np.asarray(frames[0]))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(form: str, orientation: int) -> None:
    upright = np.kron(np.array([[0, 80], [160, 240], [40, 200]], np.uint8), np.ones((8, 8), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    # The photograph of which a viewer that follows the tag shows `upright`.
    undo = {6: 8, 8: 6}.get(orientation, orientation)
    tag = Image.Exif()
    tag[0x0112] = undo
    stored = ImageOps.exif_transpose(Image.open(encoded(Image.fromarray(upright), exif=tag)))
    read = read_image(encoded(stored.convert("RGB"), form, exif=exif), channels=1)[..., 0]
    assert read.shape == upright.shape
    assert abs(read.astype(int) - upright).max() < 40


def test_orientation_holds_beside_transparency() -> None:
    pixels = np.array([[[1, 2, 3, 255], [4, 5, 6, 0]]], np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    read = read_image(encoded(Image.fromarray(pixels), exif=exif))
    assert read.tolist() == [[[1, 2, 3]], [[255, 255, 255]]]


@pytest.mark.parametrize(
    "exif", [b"Exif\x00\x00garbage", b"Exif\x00\x00MM\x00*\xff\xff\xff\xff", b"\xff" * 99]
)
def test_damaged_exif_does_not_cost_a_good_image(exif: bytes) -> None:
    assert (read_image(encoded(Image.new("RGB", (8, 8), "white"), "JPEG", exif=exif)) == 255).all()


def test_bad_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encoded(Image.fromarray(noise(64, 64, 3)), "JPEG").getvalue()
    bad = {
        "cut.jpg": (whole[: len(whole) // 2], "cannot be read as an image: image file is truncated"),
        "header.jpg": (whole[:30], "header.jpg cannot be read as an image|header.jpg is not an image"),
        "empty.jpg": (b"", "empty.jpg is empty; an image was expected"),
        "text.jpg": (b"this is no picture", "text.jpg is not an image; it begins with b'this is no"),
    }
    for name, (content, message) in bad.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DataError, match=message) as raised:
            read_image(path)
        assert str(path) in str(raised.value)
        assert "\n" not in str(raised.value)
    with pytest.raises(DataError, match="is a directory; an image file was expected"):
        read_image(tmp_path)
    with pytest.raises(DataError, match=r"none.png: no such file"):
        read_image(tmp_path / "none.png")
    with pytest.raises(DataError, match="/dev/zero is not a regular file"):
        read_image("/dev/zero")
    write_image(tmp_path / "bomb.png", size=(100, 100))
    for limit in (9_000, 1_000):  # where Pillow warns, and where it raises an error of its own
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(DataError, match=r"bomb.png is refused as a decompression bomb"):
            read_image(tmp_path / "bomb.png")


def test_pillow_neither_warns_nor_is_changed(tmp_path: Path) -> None:
    palette = Image.new("P", (2, 2))
    palette.putpalette([1, 2, 3] * 256)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        read_image(encoded(palette, transparency=b"\x00\x80"))  # at which Pillow warns when it becomes RGB
    assert seen == []
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_formats_that_start_other_programs_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    with pytest.raises(DataError, match=r"x.png is not an image; it begins with b'%!PS"):
        read_image(tmp_path / "x.png")


def test_only_gray_and_rgb_can_be_asked_for() -> None:
    with pytest.raises(ValueError, match=r"channels must be 1 .* or 3"):
        read_image(encoded(Image.new("RGB", (2, 2))), channels=4)
