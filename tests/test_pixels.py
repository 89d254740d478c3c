from pathlib import Path

import numpy as np
import pytest
import torch

from aft.data import (
    START,
    DataError,
    PixelSequences,
    open_image_set,
    pixel_array,
    to_images,
    to_tokens,
)
from aft.data.image_parts import ArrayImages
from aft.data.pixels import fit
from made_images import noise, write_image


@pytest.mark.parametrize("channels", [1, 3])
def test_tokens_and_images_are_the_same_for_all_levels(channels: int) -> None:
    images = np.arange(256, dtype=np.uint8).repeat(channels).reshape(2, 16, 8, channels)
    images = np.concatenate([images, noise(3, 16, 8, channels)])
    tokens = to_tokens(images)
    assert tokens.shape == (5, 16 * 8 * channels)
    assert np.array_equal(to_images(tokens.astype(np.int64), (16, 8, channels)), images)
    assert tokens[4, (3 * 8 + 5) * channels + channels - 1] == images[4, 3, 5, channels - 1]


def test_tokens_that_are_no_levels_are_refused() -> None:
    for tokens in ([[256, 0]], [[-1, 0]]):
        with pytest.raises(ValueError, match=r"tokens must lie in 0\.\.255"):
            to_images(np.array(tokens), (1, 2, 1))


def test_images_of_other_sizes_are_named(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", 1, size=(6, 4))
    write_image(tmp_path / "b.png", 2, size=(4, 6))
    images = open_image_set(tmp_path, labelled=False)
    with pytest.raises(DataError, match=r"b.png is 6 x 4 pixels \(height x width\); 4 x 6 was expected"):
        pixel_array(images, None, "set", resize=False)
    with pytest.raises(DataError, match=r"a.png is 4 x 6 pixels .* 8 x 8 was expected"):
        pixel_array(images, (8, 8, 3), "set", resize=False)
    resized = pixel_array(images, (3, 2, 1), "set", resize=True)
    assert resized.shape == (2, 3, 2, 1)
    assert resized[0].max() == resized[0].min() == 1
    assert resized[1].max() == resized[1].min() == 2
    with pytest.raises(DataError, match="set holds no images"):
        pixel_array(ArrayImages(np.empty((0, 2, 2, 1), np.uint8), None, "x"), None, "set", resize=False)


def test_shrinking_by_a_whole_factor_takes_means_of_blocks_around_the_centre() -> None:
    image = noise(8, 14, 3)
    expected = image[:, 3:11].reshape(4, 2, 4, 2, 3).mean(axis=(1, 3))
    assert abs(fit(image, 4, 4) - expected).max() <= 0.5
    assert fit(noise(5, 7, 1), 9, 3).shape == (9, 3, 1)
    assert np.array_equal(fit(image, 8, 14), image)


@pytest.mark.parametrize("channels", [1, 3])
def test_every_subpixel_is_a_label_once_and_the_input_starts_with_start(channels: int) -> None:
    images = noise(3, 4, 5, channels)
    data = PixelSequences(images, augment=False)
    assert len(data) == 3
    for i in range(3):
        item = data[i]
        assert item["input_ids"].dtype == item["shift_labels"].dtype == torch.int64
        assert item["shift_labels"].tolist() == images[i].reshape(-1).tolist()
        assert item["input_ids"].tolist() == [START, *item["shift_labels"].tolist()[:-1]]
    with pytest.raises(IndexError, match="image 3 of 3"):
        data[3]


def test_augmentation_flips_half_of_the_time_and_shifts_all_alike() -> None:
    images = noise(1, 4, 5, 3) // 2 + 60  # far enough from 0 and 255 that nothing is clipped
    data = PixelSequences(images, augment=True)
    seen = []
    for _ in range(600):
        made = data[0]["shift_labels"].numpy().reshape(4, 5, 3).astype(int)
        straight, flipped = made - images[0], made - images[0][:, ::-1]
        turned = np.ptp(flipped) == 0
        assert turned or np.ptp(straight) == 0
        seen.append((bool(turned), int((flipped if turned else straight)[0, 0, 0])))
    assert {shift for _, shift in seen} == set(range(-10, 11))
    assert 240 < sum(turned for turned, _ in seen) < 360
    torch.manual_seed(5)
    once = data[0]["shift_labels"]
    torch.manual_seed(5)
    assert torch.equal(data[0]["shift_labels"], once)


def test_augmentation_stays_within_the_levels() -> None:
    images = np.stack([np.zeros((2, 2, 1), np.uint8), np.full((2, 2, 1), 255, np.uint8)])
    data = PixelSequences(images, augment=True)
    levels = {int(data[i]["shift_labels"][0]) for i in (0, 1) for _ in range(200)}
    assert levels == set(range(11)) | set(range(245, 256))
    assert images[0].max() == 0
