import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from aft.data import DataError
from aft.models import AFTConfig, AFTForCausalLM
from aft.training.errors import SamplingError
from aft.training.pixel_sampling import (
    HIDDEN,
    complete_images,
    completions_png,
    grid_png,
    image_shape,
    read_images,
    sample_images,
)


def pixel_model(height: int = 4, width: int = 3, channels: int = 1, **changes) -> AFTForCausalLM:
    config = AFTConfig(
        mixer="simple",
        hidden_size=16,
        num_hidden_layers=1,
        max_position_embeddings=height * width * channels,
        image_shape=[height, width, channels],
        bos_token_id=0,
        **changes,
    )
    return AFTForCausalLM(config).eval()


@torch.no_grad()
def greedy_by_hand(model: AFTForCausalLM, known: list[int], length: int) -> list[int]:
    """Each sub-pixel the likeliest after START and those before it."""
    tokens = [0, *known]
    while len(tokens) < length + 1:
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[1:]


@pytest.mark.parametrize("channels", [1, 3])
def test_samples_have_the_models_shape_and_follow_the_seed(channels: int) -> None:
    model = pixel_model(channels=channels)
    drawn = sample_images(model, 3, seed=1)
    assert drawn.shape == (3, 4, 3, channels)
    assert drawn.dtype == np.uint8
    assert np.array_equal(drawn, sample_images(model, 3, seed=1))
    assert not np.array_equal(drawn, sample_images(model, 3, seed=2))
    assert not np.array_equal(drawn[0], drawn[1])


def test_the_likeliest_image_is_each_subpixel_after_start_and_those_before() -> None:
    model = pixel_model(channels=3, initializer_range=0.5)
    drawn = sample_images(model, 2, temperature=0)
    assert drawn[0].reshape(-1).tolist() == greedy_by_hand(model, [], 36)
    assert np.array_equal(drawn[0], drawn[1])
    assert len(np.unique(drawn)) > 1


def test_completions_keep_the_first_rows_and_draw_the_rest_after_them() -> None:
    model = pixel_model(initializer_range=0.5)
    images = np.random.default_rng(0).integers(0, 256, (3, 4, 3, 1), dtype=np.uint8)
    given = images.copy()
    masked, completed = complete_images(model, images, keep=0.5, temperature=0, batch_size=2)
    assert np.array_equal(images, given)
    assert np.array_equal(masked[:, :2], images[:, :2])
    assert (masked[:, 2:] == HIDDEN).all()
    for image, made in zip(images, completed, strict=True):
        assert made.reshape(-1).tolist() == greedy_by_hand(model, image[:2].reshape(-1).tolist(), 12)


def test_keeping_nothing_is_sampling() -> None:
    model = pixel_model()
    images = np.zeros((2, 4, 3, 1), dtype=np.uint8)
    masked, completed = complete_images(model, images, keep=0.0, seed=3)
    assert (masked == HIDDEN).all()
    assert np.array_equal(completed, sample_images(model, 2, seed=3))


def test_progress_rises_to_the_number_of_subpixels() -> None:
    seen: list[tuple[int, int]] = []
    sample_images(pixel_model(), 5, batch_size=2, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) == 3 * 12
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (60, 60)
    seen.clear()
    images = np.zeros((2, 4, 3, 1), dtype=np.uint8)
    complete_images(pixel_model(), images, 0.75, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 6), (4, 6), (6, 6)]


def test_a_model_of_text_is_refused() -> None:
    text = AFTForCausalLM(AFTConfig(mixer="simple", hidden_size=16, num_hidden_layers=1))
    text.config.name_or_path = "runs/prose"
    for use in (
        lambda: sample_images(text, 1),
        lambda: complete_images(text, np.zeros((1, 4, 3, 1), dtype=np.uint8)),
        lambda: read_images(text, []),
    ):
        with pytest.raises(SamplingError, match=r"^runs/prose is a model of text"):
            use()


def test_options_out_of_range_are_named() -> None:
    model = pixel_model()
    images = np.zeros((1, 4, 3, 1), dtype=np.uint8)
    for keep in (-0.1, 1.0, float("nan")):
        with pytest.raises(SamplingError, match=r"keep is .*0 <= keep < 1"):
            complete_images(model, images, keep)
    with pytest.raises(SamplingError, match=r"keep 0.9 of 4 rows leaves none"):
        complete_images(model, images, 0.9)
    with pytest.raises(SamplingError, match=r"images are \[1, 3, 4, 1\].*\[N, 4, 3, 1\]"):
        complete_images(model, images.transpose(0, 2, 1, 3))
    with pytest.raises(SamplingError, match="count is 0"):
        sample_images(model, 0)
    with pytest.raises(SamplingError, match="batch_size is 0"):
        sample_images(model, 1, batch_size=0)
    with pytest.raises(SamplingError, match="temperature is -1"):
        sample_images(model, 1, temperature=-1)


def test_image_files_come_in_the_models_shape(tmp_path: Path) -> None:
    model = pixel_model()
    assert image_shape(model) == (4, 3, 1)
    Image.new("RGB", (3, 4), (255, 255, 255)).save(tmp_path / "right.png")
    Image.new("L", (6, 8), 7).save(tmp_path / "large.png")
    assert (read_images(model, [tmp_path / "right.png"]) == 255).all()
    with pytest.raises(DataError, match=r"large.png is 8 x 6 pixels .*4 x 3 was expected"):
        read_images(model, [tmp_path / "right.png", tmp_path / "large.png"])
    read = read_images(model, [tmp_path / "right.png", tmp_path / "large.png"], resize=True)
    assert read.shape == (2, 4, 3, 1)
    assert (read[1] == 7).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_a_grid_shows_every_pixel_enlarged(channels: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 6, channels), dtype=np.uint8)
    grid = np.asarray(Image.open(io.BytesIO(grid_png(images, columns=2)))).reshape(-1, 102, channels)
    assert grid.shape[:2] == (2 + 3 * 66, 2 + 2 * 50)  # 8 x 6 pixels, 8 times as large, and margins of 2
    assert (grid[:2] == 255).all()
    for index, image in enumerate(images):
        top, left = 2 + index // 2 * 66, 2 + index % 2 * 50
        shown = grid[top : top + 64, left : left + 48]
        assert np.array_equal(shown[::8, ::8], image)
        assert np.array_equal(shown[7::8, 7::8], image)
    assert (grid[2 + 2 * 66 :, 52:] == 255).all()


def test_large_images_are_shown_as_they_are_and_columns_end_with_the_images() -> None:
    images = np.zeros((2, 100, 70, 3), dtype=np.uint8)
    assert Image.open(io.BytesIO(grid_png(images, columns=9))).size == (2 + 2 * 72, 2 + 102)


def test_completions_stand_side_by_side() -> None:
    original, masked, completed = (np.full((2, 64, 64, 1), level, dtype=np.uint8) for level in (1, 2, 3))
    original[1] = 9
    shown = np.asarray(Image.open(io.BytesIO(completions_png(original, masked, completed))))
    assert shown[40, [40, 110, 170]].tolist() == [1, 2, 3]
    assert shown[110, [40, 110, 170]].tolist() == [9, 2, 3]
