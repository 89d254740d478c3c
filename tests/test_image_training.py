import dataclasses
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoImageProcessor, pipeline

import aft.models
from aft.data import DataError, open_images
from aft.data.image_parts import ArrayImages
from aft.models import AFTConfig, AFTForCausalLM, AFTForImageClassification, AFTImageConfig
from aft.training import run as training_run
from aft.training import rundir
from aft.training.augmentation import Augmentation
from aft.training.classification import class_logits, score_classes
from aft.training.curve import draw_curve
from aft.training.draws import Draws, Order
from aft.training.errors import RunError
from aft.training.loading import load_model
from aft.training.pixel_evaluation import score_pixels
from aft.training.preprocessing import Preprocessing
from aft.training.recipes import RECIPES, ClassifierRecipe, PixelRecipe, RecipeError
from aft.training.run import Outcome, resume, start
from aft.training.scores import ClassScore, PixelScore
from aft.training.tasks import open_task
from aft.training.tasks.class_task import classify_files
from aft.training.trainer import parameter_groups
from small_runs import (  # pyrefly: ignore[missing-import]
    TINY_CLASSES,
    TINY_PIXELS,
    picture,
    spelled,
    tiny,
    write_images,
)

PLAIN = {  # changes that turn off all that is random in training, but for the order of the images
    "dropout": 0.0,
    "drop_path": 0.0,
    "padding": 0,
    "flip": False,
    "randaugment_ops": 0,
    "erasing": 0.0,
    "mixup": 0.0,
    "cutmix": 0.0,
    "label_smoothing": 0.0,
    "repeated_augmentation": 1,
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_images(tmp_path_factory.mktemp("images"), {"train": 18, "val": 7})


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, images: str) -> Path:
    run = tmp_path_factory.mktemp("classes") / "run"
    start(tiny(TINY_CLASSES), images, run, overwrite=False)
    return run


@pytest.fixture(scope="module")
def pixel_model(tmp_path_factory: pytest.TempPathFactory, images: str) -> Path:
    run = tmp_path_factory.mktemp("pixels") / "run"
    start(tiny(TINY_PIXELS), images, run, overwrite=False)
    return run


def small_classifier(classes: int = 7, **fields: Any) -> AFTForImageClassification:
    torch.manual_seed(0)
    config = AFTImageConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        kernel_size=3,
        initializer_range=0.5,
        num_labels=classes,
        **fields,
    )
    return AFTForImageClassification(config).eval()


def image_array(count: int, classes: int, size: int = 8) -> ArrayImages:
    rng = np.random.default_rng(count)
    pixels = rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    return ArrayImages(pixels, rng.integers(0, classes, count), "an array")


# Recipes


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (ClassifierRecipe, {"patch_size": 16, "image_size": 40}, r"image_size is 40; expected a multiple of"),
        (ClassifierRecipe, {"drop_path": 1.0}, "drop_path is 1.0; expected 0 <= drop_path < 1"),
        (ClassifierRecipe, {"mixup": -1.0}, "mixup is -1.0; expected a finite number, at least 0"),
        (ClassifierRecipe, {"cutmix": math.inf}, "cutmix is inf"),
        (ClassifierRecipe, {"mix_prob": 1.5}, "mix_prob is 1.5; expected a share, 0 to 1"),
        (ClassifierRecipe, {"erasing": math.nan}, "erasing is nan"),
        (ClassifierRecipe, {"label_smoothing": 1.0}, "label_smoothing is 1.0"),
        (ClassifierRecipe, {"repeated_augmentation": 0}, "repeated_augmentation is 0; expected at least 1"),
        (ClassifierRecipe, {"crop_ratio": 0.0}, "crop_ratio is 0.0; expected a share above 0, up to 1"),
        (ClassifierRecipe, {"crop": "random"}, "crop is 'random'; expected one of resized, padded"),
        (ClassifierRecipe, {"randaugment_magnitude": 31}, "randaugment_magnitude is 31; expected 0 to 30"),
        (ClassifierRecipe, {"epochs": 0}, "epochs is 0"),
        (ClassifierRecipe, {"workers": -1}, "workers is -1"),
        (ClassifierRecipe, {"num_heads": 5}, r"num_heads is 5; expected a divisor of hidden_size \(192\)"),
        (PixelRecipe, {"image_size": 0}, "image_size is 0; expected at least 1, or None"),
        (PixelRecipe, {"channels": "4"}, "channels is '4'; expected one of auto, 1, 3"),
        (PixelRecipe, {"split": 1.0}, "split is 1.0"),
        (PixelRecipe, {"eval_images": 0}, "eval_images is 0"),
        (PixelRecipe, {"default_data": "stdlib"}, "default_data is 'stdlib'; expected one of none, digits"),
    ],
)
def test_impossible_recipes_name_field_value_and_expectation(
    kind: type, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        kind(**fields)


def test_registry_holds_the_papers_cifar10_rows() -> None:
    names = [
        "local-256",
        "local-256-12x512",
        "simple",
        "transformer",
        "transformer-12x512",
        "local-256-dense",
    ]
    recipes = {name: RECIPES[f"pixels-cifar10-{name}"].recipe for name in names}
    for recipe in recipes.values():
        assert isinstance(recipe, PixelRecipe)
        assert (recipe.lr, recipe.weight_decay, recipe.dropout, recipe.batch_size) == (3e-3, 0.1, 0.1, 128)
        assert (recipe.augment, recipe.window_size, recipe.image_size) == (True, 256, None)
        assert recipe.steps * recipe.batch_size == 200 * 50_000
    shapes = {name: (r.mixer, r.num_layers, r.hidden_size, r.bias_rank) for name, r in recipes.items()}
    assert shapes["local-256"] == ("local", 24, 256, 64)
    assert shapes["local-256-12x512"] == ("local", 12, 512, 64)
    assert shapes["local-256-dense"] == ("local", 24, 256, None)
    assert shapes["simple"][0] == "simple"
    assert (shapes["transformer"][0], recipes["transformer"].num_heads) == ("attention", 2)
    assert (shapes["transformer-12x512"][1], recipes["transformer-12x512"].num_heads) == (12, 4)


def test_registry_holds_the_papers_imagenet_rows_with_deits_training() -> None:
    rows = {
        "aft-full-tiny": ("full", 192, None, None, "72.4"),
        "aft-full-small": ("full", 384, None, None, "79.8"),
        "aft-conv-tiny-h32": ("conv", 192, 32, 11, "73.9"),
        "aft-conv-tiny-h192": ("conv", 192, 192, 11, "74.8"),
        "aft-conv-small-h16": ("conv", 384, 16, 11, "80.2"),
        "aft-conv-small-h384-k11": ("conv", 384, 384, 11, "80.8"),
        "aft-conv-small-h384-k15": ("conv", 384, 384, 15, "81.0"),
        "deit-tiny": ("attention", 192, 3, None, "72.2"),
        "deit-small": ("attention", 384, 6, None, "79.9"),
    }
    for name, (mixer, width, heads, kernel, top1) in rows.items():
        entry = RECIPES[f"imagenet-{name}"]
        recipe = entry.recipe
        assert isinstance(recipe, ClassifierRecipe)
        assert top1 in entry.summary
        assert (recipe.mixer, recipe.hidden_size, recipe.num_layers) == (mixer, width, 12)
        assert heads in (None, recipe.num_heads)
        assert kernel in (None, recipe.kernel_size)
        assert recipe.bias_rank == 128
        assert (recipe.lr, recipe.min_lr, recipe.weight_decay, recipe.grad_clip) == (1e-3, 1e-5, 0.05, 0.0)
        assert (recipe.epochs, recipe.warmup_epochs, recipe.batch_size) == (300, 5, 1024)
        assert (recipe.mixup, recipe.cutmix, recipe.erasing, recipe.label_smoothing) == (0.8, 1.0, 0.25, 0.1)
        assert (recipe.drop_path, recipe.repeated_augmentation, recipe.crop_ratio) == (0.1, 3, 0.875)


def test_epochs_are_counted_in_steps() -> None:
    pace = ClassifierRecipe(batch_size=100, epochs=3, warmup_epochs=1, eval_every_epochs=2).pace(1010)
    assert (pace.steps, pace.warmup_steps, pace.eval_every, pace.save_every) == (31, 11, 21, 11)
    assert ClassifierRecipe(batch_size=100, epochs=1, warmup_epochs=5).pace(100).warmup_steps == 0


# The order of images, and chance


@pytest.mark.parametrize(("images", "batch"), [(10, 4), (7, 7), (12, 3), (5, 1)])
def test_an_epoch_takes_every_image_once(images: int, batch: int) -> None:
    order = Order(images, batch, repeats=1, seed=3)
    drawn = [order.image(draw) for draw in range(3 * images)]
    epochs = [drawn[i * images : (i + 1) * images] for i in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(images))
    assert images == 1 or len(set(map(tuple, epochs))) > 1


def test_repeated_augmentation_takes_fewer_images_several_times() -> None:
    order = Order(60, 12, repeats=3, seed=0)
    batches = np.array([order.image(draw) for draw in range(60)]).reshape(-1, 12)
    images, copies = np.unique(batches, return_counts=True)
    assert (len(images), set(copies)) == (20, {3})
    for batch in batches:
        assert set(np.unique(batch, return_counts=True)[1]) == {3}
        assert (batch != np.roll(batch, 1)).all()  # or MixUp would mix an image with itself
        # Three processes that share the batch each see every image of it once, as timm's sampler has it.
        for share in batch.reshape(3, 4):
            assert len(set(share)) == 4


def test_order_does_not_depend_on_where_it_is_entered() -> None:
    straight = Order(9, 4, repeats=2, seed=1)
    expected = [straight.image(draw) for draw in range(40)]
    backwards = Order(9, 4, repeats=2, seed=1)
    assert [backwards.image(draw) for draw in reversed(range(40))][::-1] == expected
    assert [Order(9, 4, repeats=2, seed=2).image(draw) for draw in range(40)] != expected


def test_chance_follows_from_the_place_alone_and_leaves_torchs_own_be() -> None:
    draws = Draws(Order(8, 4, 1, 0), 100, lambda numbers: {"x": torch.rand(len(numbers))}, seed=5)
    first = draws.__getitems__([4, 5, 6, 7])["x"]
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    again = draws.__getitems__([4, 5, 6, 7])["x"]
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, again)
    assert not torch.equal(first, draws.__getitems__([8, 9, 10, 11])["x"])


# What goes into a classifier


@pytest.mark.parametrize("size", [(8, 8), (20, 13), (13, 20), (5, 6), (64, 48)])
@pytest.mark.parametrize("ratio", [1.0, 0.875])
def test_preprocessing_is_that_of_transformers(tmp_path: Path, size: tuple[int, int], ratio: float) -> None:
    preprocessing = Preprocessing.for_size(8, ratio)
    preprocessing.save(tmp_path)
    assert Preprocessing.load(tmp_path) == preprocessing
    image = picture(1, size)
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    expected = processor(Image.fromarray(image), return_tensors="pt")["pixel_values"]
    found = preprocessing([image])
    assert found.shape == (1, 3, 8, 8)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_preprocessing_of_one_size_is_the_image_itself() -> None:
    preprocessing = Preprocessing.for_size(8, 1.0)
    image = picture(2)
    plain = (
        torch.from_numpy(image).permute(2, 0, 1) / 255 - torch.tensor(preprocessing.mean)[:, None, None]
    ) / (torch.tensor(preprocessing.std)[:, None, None])
    torch.testing.assert_close(preprocessing([image])[0], plain)
    assert preprocessing.at(16).crop == 16
    assert Preprocessing.for_size(224, 0.875).at(384).shorter_side == 439


@pytest.mark.parametrize(
    "change",
    [
        {"crop_size": None},
        {"size": {"height": 8, "width": 8}},
        {"image_mean": [0.5]},
        {"image_std": [1.0, 1.0, 0.0]},
        {"size": {"shortest_edge": 4}},
    ],
)
def test_a_processor_of_another_kind_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    Preprocessing.for_size(8, 1.0).save(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(
        RunError, match=r"preprocessor_config.json holds a BitImageProcessor; one with size.shortest"
    ):
        Preprocessing.load(tmp_path)
    path.unlink()
    with pytest.raises(RunError, match=r"has no preprocessor_config\.json"):
        Preprocessing.load(tmp_path)


# Changes of images


def augmentation(classes: int = 3, **changes: Any) -> Augmentation:
    recipe = dataclasses.replace(TINY_CLASSES, **changes)
    return Augmentation(recipe, Preprocessing.for_size(recipe.image_size, recipe.crop_ratio), classes)


def test_without_changes_training_sees_what_evaluation_sees() -> None:
    batch = [picture(number) for number in range(4)]
    inputs, targets = augmentation(**PLAIN)(batch, np.array([0, 1, 2, 0]))
    torch.testing.assert_close(inputs, Preprocessing.for_size(8, 1.0)(batch))
    assert targets.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("changes", [{}, {"mixup": 0.0}, {"cutmix": 0.0}, {"mix_prob": 0.5}])
def test_batches_of_any_length_are_mixed(count: int, changes: dict[str, Any]) -> None:
    torch.manual_seed(count)
    batch = [picture(number, (10, 12)) for number in range(count)]
    inputs, targets = augmentation(**changes)(batch, np.arange(count) % 3)
    assert inputs.shape == (count, 3, 8, 8)
    assert inputs.isfinite().all()
    assert targets.shape == (count, 3)
    torch.testing.assert_close(targets.sum(1), torch.ones(count))
    assert (targets >= 0.1 / 3 - 1e-6).all()


def test_mixing_mixes_neighbours_and_their_labels_alike() -> None:
    torch.manual_seed(0)
    black, white = np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 3), 255, np.uint8)
    for mixing in ({"mixup": 0.8}, {"cutmix": 1.0}):
        inputs, targets = augmentation(**PLAIN | mixing)([black, white], np.array([0, 1]))
        darkest, brightest = (Preprocessing.for_size(8, 1.0)([image])[0].mean() for image in (black, white))
        share = (inputs.mean((1, 2, 3)) - darkest) / (brightest - darkest)
        torch.testing.assert_close(share, targets[:, 1], atol=1e-5, rtol=0)
        assert targets[0, 1] == pytest.approx(float(targets[1, 0]), abs=1e-6)


def test_smoothed_labels() -> None:
    changes = PLAIN | {"label_smoothing": 0.1}
    _, targets = augmentation(classes=5, **changes)([picture(0)], np.array([3]))
    expected = torch.full((1, 5), 0.02)
    expected[0, 3] = 0.92
    torch.testing.assert_close(targets, expected)


def test_padded_crops_are_shifted_images() -> None:
    torch.manual_seed(0)
    image = picture(0)
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)), mode="reflect")
    windows = {padded[y : y + 8, x : x + 8].tobytes() for y in range(5) for x in range(5)}
    preprocessing = Preprocessing.for_size(8, 1.0)
    allowed = preprocessing([np.frombuffer(w, np.uint8).reshape(8, 8, 3).copy() for w in sorted(windows)])
    inputs, _ = augmentation(**PLAIN | {"padding": 2})([image] * 20, np.zeros(20, np.int64))
    nearest = torch.cdist(inputs.flatten(1), allowed.flatten(1)).min(1)
    assert nearest.values.max() < 1e-3
    assert len(set(nearest.indices.tolist())) > 5


@pytest.mark.parametrize(
    "changes", [{"erasing": 1.0}, {"randaugment_ops": 2}, {"crop": "resized"}, {"flip": True}]
)
def test_each_change_changes_some_images(changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    batch, labels = [picture(number) for number in range(6)], np.zeros(6, np.int64)
    plain, _ = augmentation(**PLAIN)(batch, labels)
    changed, _ = augmentation(**PLAIN | changes)(batch, labels)
    assert plain.shape == changed.shape
    assert not torch.equal(plain, changed)


# Exact scores


@pytest.mark.parametrize("classes", [3, 7])
def test_class_score_is_that_of_a_plain_loop(classes: int) -> None:
    model, images = small_classifier(classes), image_array(11, classes)
    preprocessing = Preprocessing.for_size(8, 1.0)
    nats, first, five = 0.0, 0, 0
    assert images.labels is not None
    for number, label in enumerate(images.labels.tolist()):
        logits = class_logits(model, preprocessing([images.read(number)]))[0]
        nats -= float(F.log_softmax(logits, 0)[label])
        rank = int((logits > logits[label]).sum())
        first, five = first + (rank == 0), five + (rank < 5)
    found = score_classes(model.train(), images, preprocessing)
    assert model.training
    assert (found.count, found.first, found.among_five) == (11, first, five)
    assert found.nats == pytest.approx(nats, rel=1e-6)
    assert classes > 5 or found.top5 == 1.0
    assert ClassScore.of_row(found.row()) == dataclasses.replace(
        found, nats=ClassScore.of_row(found.row()).nats
    )


def test_class_scores_of_ranks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from aft.training import classification

    monkeypatch.setattr(classification, "_PIXELS_A_BATCH", 3 * 64)
    model, images = small_classifier(), image_array(11, 7)
    preprocessing = Preprocessing.for_size(8, 1.0)
    whole = score_classes(model, images, preprocessing)
    shares = [score_classes(model, images, preprocessing, rank=rank, world_size=5) for rank in range(5)]
    sums = np.sum([share.sums() for share in shares], axis=0)
    assert whole.sums() == pytest.approx(sums.tolist(), rel=1e-12)
    assert shares[-1].count == 0


class UniformPixels(nn.Module):
    """A model that finds every value equally likely."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.config = AFTConfig(max_position_embeddings=length)
        self.device = torch.device("cpu")

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        return type("Output", (), {"logits": torch.full((*input_ids.shape, 256), 2.0)})


@pytest.mark.parametrize("shape", [(1, 3, 2, 3), (5, 8, 8, 1), (3, 1, 1, 1)])
def test_uniform_model_scores_eight_bits_per_dim(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    found = score_pixels(UniformPixels(int(np.prod(shape[1:]))), pixels)
    assert found.count == pixels.size
    assert found.bpd == pytest.approx(8.0, abs=1e-12)


def test_pixel_score_counts_every_sub_pixel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from aft.training import pixel_evaluation

    torch.manual_seed(0)
    config = AFTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        mixer="simple",
        max_position_embeddings=12,
        image_shape=[2, 2, 3],
        initializer_range=0.5,
    )
    model = AFTForCausalLM(config).eval()
    pixels = np.random.default_rng(0).integers(0, 256, (5, 2, 2, 3), dtype=np.uint8)
    bits = 0.0
    for image in pixels.reshape(5, 12).tolist():
        for position, value in enumerate(image):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[0, *image[:position]]])).logits[0, -1].double()
            bits -= float(F.log_softmax(logits, 0)[value]) / math.log(2)
    monkeypatch.setattr(pixel_evaluation, "_TOKENS_A_BATCH", 24)
    assert score_pixels(model, pixels).bits == pytest.approx(bits, rel=1e-6)
    shares = [score_pixels(model, pixels, rank=rank, world_size=2) for rank in range(2)]
    assert sum(share.bits for share in shares) == pytest.approx(bits, rel=1e-6)
    assert [share.count for share in shares] == [36, 24]


# Optimiser


@pytest.mark.parametrize("mixer", ["full", "simple", "local", "conv", "attention"])
def test_only_weights_of_linear_and_convolution_layers_decay(mixer: str) -> None:
    model = small_classifier(mixer=mixer, bias_rank=2)
    decayed, kept = parameter_groups(model, 0.5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {names[id(parameter)] for parameter in decayed["params"]}
    assert {"model.patch_embed.weight", "classifier.weight", "model.layers.0.mlp_in.weight"} <= found
    assert all(
        name.endswith(("proj.weight", "mlp_in.weight", "mlp_out.weight"))
        for name in found - {"model.patch_embed.weight", "classifier.weight"}
    )
    assert {names[id(parameter)] for parameter in kept["params"]} == set(names.values()) - found


# Runs


def test_run_directory_of_a_classifier(classifier: Path, images: str) -> None:
    weights = {"model.safetensors", "config.json", "preprocessor_config.json"}
    names = {path.name for path in classifier.iterdir()}
    assert names == weights | {"recipe.json", "metrics.jsonl", "curve.png", "checkpoints"}
    record = rundir.read_record(classifier)
    assert record["kind"] == "classes"
    assert rundir.recipe_of(record, classifier) == TINY_CLASSES
    assert record["data"] == {
        "path": images,
        "images": 25,
        "sha256": open_images(images, labelled=True).digest,
        "train": 18,
        "validation": 7,
    }
    model = aft.models.AFTForImageClassification.from_pretrained(classifier)
    assert model.config.id2label == {0: "blue", 1: "green", 2: "red"}
    rows = rundir.read_rows(classifier)
    assert all(set(row) >= {"loss", "lr", "images_per_second"} for row in rows if row["split"] == "train")
    held_out = [row for row in rows if row["split"] == "validation"]
    assert [(row["step"], row["images"], row.get("final")) for row in held_out] == [
        (4, 7, None),
        (8, 7, True),
    ]
    assert all(set(row) >= {"loss", "top1", "top5"} for row in held_out)


def test_run_directory_of_a_pixel_model(pixel_model: Path, images: str) -> None:
    record = rundir.read_record(pixel_model)
    assert record["kind"] == "pixels"
    assert rundir.recipe_of(record, pixel_model) == TINY_PIXELS
    model = load_model(pixel_model, "pixels")
    assert model.config.image_shape == [8, 8, 3]
    assert (model.config.bos_token_id, model.config.max_position_embeddings) == (0, 192)
    rows = rundir.read_rows(pixel_model)
    for row in rows:
        assert row["bpd"] == pytest.approx(row["loss"] / math.log(2))
    held_out = [row for row in rows if row["split"] == "validation"]
    assert [(row["step"], row["sub_pixels"]) for row in held_out] == [(4, 2 * 192), (8, 7 * 192)]


def test_transformers_pipeline_gives_the_same_probabilities(classifier: Path, images: str) -> None:
    files = [str(path) for path in sorted(Path(images, "val", "red").iterdir())]
    odd = Path(images).parent / "odd.png"
    Image.fromarray(picture(4, (23, 17))).save(odd)
    files.append(str(odd))
    classify = pipeline("image-classification", model=str(classifier))
    answers = classify_files(classifier, load_model(classifier), files, None)
    for file, answer in zip(files, answers, strict=True):
        expected = {found["label"]: found["score"] for found in classify(file)}
        assert dict(answer) == pytest.approx(expected, abs=1e-4)


def test_a_classifier_learns(images: str, tmp_path: Path) -> None:
    recipe = tiny(TINY_CLASSES, **PLAIN, epochs=25, lr=1e-2, eval_every_epochs=0, save_every_epochs=0)
    outcome = start(recipe, images, tmp_path / "run", overwrite=False)
    assert isinstance(outcome.result, ClassScore)
    assert outcome.result.top1 == 1.0
    rows = rundir.read_rows(tmp_path / "run")
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]


def test_a_pixel_model_learns(tmp_path: Path) -> None:
    for number in range(30):
        folder = tmp_path / "data" / ("train" if number < 24 else "test")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), number % 2 * 255, np.uint8)).save(folder / f"{number}.png")
    changes = {"steps": 60, "eval_every": 0, "save_every": 0, "dropout": 0.0, "augment": False}
    outcome = start(tiny(TINY_PIXELS, **changes), str(tmp_path / "data"), tmp_path / "run", overwrite=False)
    assert isinstance(outcome.result, PixelScore)
    # The first sub-pixel says black or white, one bit, and all fifteen others repeat it.
    assert 1 / 16 <= outcome.result.bpd < 0.5
    assert (outcome.part, outcome.result.count) == ("test", 6 * 16)


@pytest.mark.parametrize("mixer", ["full", "simple", "local", "conv", "attention"])
def test_every_mixer_classifies(images: str, tmp_path: Path, mixer: str) -> None:
    recipe = tiny(TINY_CLASSES, mixer=mixer, bias_rank=2, window_size=2, epochs=1, precision="bfloat16")
    outcome = start(recipe, images, tmp_path / "run", overwrite=False)
    assert isinstance(outcome.result, ClassScore)
    assert 0.5 < outcome.result.loss < 5
    config = load_model(tmp_path / "run").config
    assert (config.class_token, config.position_embedding) == (mixer != "conv", mixer != "conv")


def stopped_after(step: int, monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> Outcome:
    """`start` in a process that receives SIGINT while it takes that step."""
    original = training_run.TaskTrainer.training_step

    def training_step(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step == step - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(training_run.TaskTrainer, "training_step", training_step)
        return start(*args, **options)


@pytest.mark.parametrize("stop_at", [2, 5])
@pytest.mark.parametrize("kind", ["classifier", "pixel_model"])
def test_resumed_run_equals_one_that_never_stopped(
    kind: str,
    stop_at: int,
    images: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    finished = request.getfixturevalue(kind)
    recipe = tiny(TINY_CLASSES if kind == "classifier" else TINY_PIXELS)
    outcome = stopped_after(stop_at, monkeypatch, recipe, images, tmp_path / "run", overwrite=False)
    assert (outcome.step, outcome.interrupted, outcome.result) == (stop_at, True, None)
    outcome = resume(tmp_path / "run", None)
    assert not outcome.interrupted
    expected, found = (load_file(run / "model.safetensors") for run in (finished, tmp_path / "run"))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    last, uninterrupted = (rundir.read_rows(run)[-1] for run in (tmp_path / "run", finished))
    assert last | {"seconds": 0} == uninterrupted | {"seconds": 0}
    again = resume(tmp_path / "run", None)
    assert (again.was_finished, outcome.was_finished) == (True, False)
    assert again.result is not None
    assert again.result.row() == pytest.approx(outcome.result.row() if outcome.result else {})


def test_training_data_travel_to_workers_that_are_started_anew(images: str) -> None:
    for recipe in (TINY_CLASSES, TINY_PIXELS):
        data = open_task(recipe, images, "tiny").train_set(40)
        copy = pickle.loads(pickle.dumps(data))
        for batch in ([0, 1, 2], [37, 38, 39]):
            here, there = data.__getitems__(batch), copy.__getitems__(batch)
            assert all(torch.equal(here[name], there[name]) for name in here)


def test_workers_change_nothing(classifier: Path, images: str, tmp_path: Path) -> None:
    start(tiny(TINY_CLASSES, workers=1), images, tmp_path / "run", overwrite=False)
    expected, found = (load_file(run / "model.safetensors") for run in (classifier, tmp_path / "run"))
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def test_digits_are_at_hand(tmp_path: Path) -> None:
    changes = {"epochs": 1, "batch_size": 512, "default_data": "digits", "image_size": 8}
    outcome = start(tiny(TINY_CLASSES, **changes), None, tmp_path / "c", overwrite=False)
    assert (outcome.part, rundir.read_record(tmp_path / "c")["data"]["path"]) == ("validation", "digits")
    pixels = tiny(TINY_PIXELS, steps=1, default_data="digits", eval_every=0)
    start(pixels, None, tmp_path / "p", overwrite=False)
    assert load_model(tmp_path / "p").config.image_shape == [8, 8, 1]
    assert resume(tmp_path / "p", None).step == 1


def test_pixel_models_reduce_images_and_colours(tmp_path: Path) -> None:
    data = write_images(tmp_path / "large", {"": 12}, size=20)
    recipe = tiny(TINY_PIXELS, steps=1, eval_every=0, image_size=4, channels="1")
    start(recipe, data, tmp_path / "run", overwrite=False)
    assert load_model(tmp_path / "run").config.image_shape == [4, 4, 1]
    gray = tiny(TINY_PIXELS, steps=1, eval_every=0, channels="1", mixer="simple")
    start(gray, data, tmp_path / "gray", overwrite=False)
    assert load_model(tmp_path / "gray").config.image_shape == [20, 20, 1]


# What is refused, before anything is written


@pytest.mark.parametrize("recipe", [TINY_CLASSES, TINY_PIXELS])
def test_fewer_images_than_a_batch_are_refused(recipe: Any, images: str, tmp_path: Path) -> None:
    expected = "its train part holds 18 images, fewer than a batch of 19; expected --batch-size 18 or less"
    with pytest.raises(RunError, match=f"{images}: {expected}"):
        start(tiny(recipe, batch_size=19), images, tmp_path / "run", overwrite=False)
    assert not (tmp_path / "run").exists()


def test_one_class_is_refused(tmp_path: Path) -> None:
    data = write_images(tmp_path / "one", {"": 12}, classes=("red",))
    with pytest.raises(RunError, match="holds one class, 'red'; a classifier needs at least two"):
        start(tiny(TINY_CLASSES), data, tmp_path / "run", overwrite=False)


def test_images_of_different_sizes_are_refused_by_a_pixel_model(tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", {"train": 12, "val": 3})
    odd = Path(data, "val", "red", "odd.png")
    Image.fromarray(picture(0, (9, 8))).save(odd)
    with pytest.raises(DataError, match=r"odd\.png is 9 x 8 pixels .*8 x 8 was expected"):
        start(tiny(TINY_PIXELS), data, tmp_path / "run", overwrite=False)
    assert not (tmp_path / "run").exists()


def test_resuming_needs_the_same_images(classifier: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(classifier, tmp_path / "run"))
    other = write_images(tmp_path / "other", {"train": 18, "val": 8})
    with pytest.raises(
        RunError, match=r"other is not the data of .*run: 26 images, sha256 .* expected 25 images"
    ):
        resume(run, other)


def test_a_recipe_of_an_unknown_kind_is_named(classifier: Path) -> None:
    record = rundir.read_record(classifier) | {"kind": "sound"}
    with pytest.raises(
        RunError, match=r"recipe.json: kind is 'sound'; expected one of bytes, pixels, classes"
    ):
        rundir.recipe_of(record, classifier)


# Weights to start from


def initial(run: Path, images: str, tmp_path: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Weights after a step so small that they are those of the start."""
    recipe = tiny(TINY_CLASSES, **{"epochs": 1, "batch_size": 18, "lr": 1e-30, "min_lr": 0.0} | changes)
    start(recipe, images, tmp_path / "from", overwrite=False, init_from=run)
    return load_file(tmp_path / "from" / "model.safetensors")


def test_training_starts_from_given_weights(classifier: Path, images: str, tmp_path: Path) -> None:
    found = initial(classifier, images, tmp_path)
    for name, tensor in load_file(classifier / "model.safetensors").items():
        assert torch.equal(tensor, found[name]), name
    assert rundir.read_record(tmp_path / "from")["init_from"] == str(classifier)
    shutil.rmtree(tmp_path / "from" / "checkpoints")
    resume(tmp_path / "from", None)
    again = load_file(tmp_path / "from" / "model.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in found.items())


def test_a_head_of_other_classes_starts_anew(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_images(tmp_path / "data", {"": 24}, classes=("a", "b"))
    found = initial(classifier, data, tmp_path)
    assert "its classifier of 3 classes is left out; that of 2 starts anew" in capsys.readouterr().out
    assert found["classifier.weight"].shape == (2, 16)
    shutil.rmtree(tmp_path / "from")
    other = write_images(tmp_path / "other", {"": 24}, classes=("a", "x", "y"))
    initial(classifier, other, tmp_path)
    assert "its classifier of other classes is left out; that of 3 starts" in capsys.readouterr().out
    body = {n: t for n, t in load_file(classifier / "model.safetensors").items() if "classifier" not in n}
    assert body
    assert all(torch.equal(tensor, found[name]) for name, tensor in body.items())


def test_weights_that_do_not_fit_are_named(
    classifier: Path, pixel_model: Path, images: str, tmp_path: Path
) -> None:
    def refusal(run: Path, **changes: Any) -> str:
        with pytest.raises(RunError) as refused:
            initial(run, images, tmp_path, **changes)
        assert not (tmp_path / "from").exists()
        return str(refused.value)

    assert refusal(classifier, mixer="attention", num_layers=3) == (
        f"{classifier} has mixer conv, num_layers 2; the recipe has attention, 3: "
        f"add --mixer conv --num-layers 2"
    )
    assert refusal(classifier, kernel_size=5, num_heads=8, patch_size=2) == (
        f"{classifier} has num_heads 4, kernel_size 3, patch_size 4; the recipe has 8, 5, 2: "
        f"add --num-heads 4 --kernel-size 3 --patch-size 4"
    )
    assert "holds a model of pixels; an image classifier was expected" in refusal(pixel_model)
    assert "nowhere: no such run directory" in refusal(tmp_path / "nowhere")
    damaged = Path(shutil.copytree(classifier, tmp_path / "damaged"))
    weights = load_file(damaged / "model.safetensors")
    (damaged / "model.safetensors").unlink()
    save_file(
        {name: t for name, t in weights.items() if name != "model.norm.bias"}, damaged / "model.safetensors"
    )
    assert "lacks model.norm.bias" in refusal(damaged)


def test_what_no_recipe_sets_comes_with_the_weights(
    images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"intermediate_size": 24, "hidden_act": "relu", "layer_norm_eps": 1e-3, "bias_rank": None}
    source = small_classifier(3, mixer="full", class_token=False, **fields)
    source.save_pretrained(tmp_path / "source")
    recipe = tiny(TINY_CLASSES, mixer="full", bias_rank=None, num_layers=1, lr=1e-30, min_lr=0.0)
    outcome = stopped_after(
        4, monkeypatch, recipe, images, tmp_path / "run", overwrite=False, init_from=tmp_path / "source"
    )
    assert outcome.interrupted
    taken = "intermediate_size 24, hidden_act relu, layer_norm_eps 0.001, class_token False"
    assert f"source: taken over, since no recipe sets it: {taken}\n" in capsys.readouterr().out
    # What the checkpoint holds suffices to go on.
    shutil.rmtree(tmp_path / "source")
    resume(tmp_path / "run", None)
    found = load_model(tmp_path / "run")
    assert {name: getattr(found.config, name) for name in fields} == fields
    assert (found.config.class_token, found.config.position_embedding) == (False, True)
    pixels = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(found(pixels).logits, source(pixels).logits)


def small_text_model(**fields: Any) -> AFTForCausalLM:
    defaults = {"hidden_size": 16, "num_hidden_layers": 1, "mixer": "local", "max_position_embeddings": 192}
    return AFTForCausalLM(AFTConfig(**(defaults | fields)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_shape": [8, 8, 3]}, "has window_size 32; the recipe has 8: add --window-size 32"),
        (
            {"image_shape": [4, 4, 1], "max_position_embeddings": 16, "window_size": 8, "bias_rank": 4},
            "has bias_rank 4, image_shape 4 x 4 x 1; the recipe has None, 8 x 8 x 3: "
            "add --bias-rank 4 --image-size 4 --channels 1",
        ),
        (
            {"image_shape": [8, 8, 1], "max_position_embeddings": 64, "window_size": 8},
            "has image_shape 8 x 8 x 1; the recipe has 8 x 8 x 3: add --channels 1",
        ),
        (
            {"image_shape": [4, 2, 1], "max_position_embeddings": 8, "window_size": 8},
            "has image_shape 4 x 2 x 1; the recipe has 8 x 8 x 3: "
            "no option of a recipe sets that image_shape",
        ),
        (
            {"image_shape": [8, 8, 3], "mixer": "attention", "tie_word_embeddings": False},
            "has mixer attention, num_heads 8, tie_embeddings False; the recipe has local, 2, True: "
            "add --mixer attention --num-heads 8 --no-tie-embeddings, or convert it first (aft.convert)",
        ),
        ({"vocab_size": 50257}, "has vocab_size 50257; 256 was expected: models are trained on bytes or"),
    ],
)
def test_fields_of_pixel_models_that_differ_are_named(
    fields: dict[str, Any], message: str, images: str, tmp_path: Path
) -> None:
    small_text_model(**fields).save_pretrained(tmp_path / "source")
    with pytest.raises(RunError) as refused:
        start(tiny(TINY_PIXELS), images, tmp_path / "run", overwrite=False, init_from=tmp_path / "source")
    assert str(refused.value).startswith(f"{tmp_path / 'source'} {message}")


def test_gray_classifiers_and_those_of_oblong_images_are_refused(images: str, tmp_path: Path) -> None:
    for name, fields, message in (
        ("gray", {"num_channels": 1}, "gray has num_channels 1; 3 was expected"),
        (
            "oblong",
            {"image_size": [8, 12]},
            "oblong has image_size 8 x 12; the recipe has 8 x 8: no option of a recipe sets that image_size",
        ),
    ):
        config = AFTImageConfig(**small_classifier(3, mixer="simple").config.to_dict() | fields)
        AFTForImageClassification(config).save_pretrained(tmp_path / name)
        recipe = tiny(TINY_CLASSES, mixer="simple", num_layers=1)
        with pytest.raises(RunError, match=message):
            start(recipe, images, tmp_path / "run", overwrite=False, init_from=tmp_path / name)


# Pictures


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures, in place of the files that they would be."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **options: figures.append(self))
    return figures


def test_curves_of_classifiers_have_a_panel_for_the_loss(drawn: list[Figure]) -> None:
    losses = [9 / step for step in range(1, 31)]
    rows = [{"step": step, "split": "train", "loss": loss} for step, loss in enumerate(losses, 1)]
    rows.append({"step": 30, "split": "test", "final": True, **ClassScore(9, 4.5, 3, 9).row()})
    draw_curve(rows, "a run", ClassScore.measure)
    accuracy, loss = drawn[0].axes
    assert [list(line.get_ydata()) for line in accuracy.lines] == [[3 / 9]]
    assert [list(line.get_ydata()) for line in loss.lines] == [losses, [0.5]]
    assert loss.get_ylim()[1] > 9


@pytest.mark.parametrize(("count", "whole"), [(19, True), (20, False)])
def test_only_curves_of_long_runs_leave_out_the_beginning(
    count: int, whole: bool, drawn: list[Figure]
) -> None:
    rows = [{"step": i, "split": "train", "loss": 5.5, "bpd": 2 + 6 / i} for i in range(1, count + 1)]
    draw_curve(rows, "a run", PixelScore.measure)
    (axes,) = drawn[0].axes
    assert (axes.get_ylim()[1] > 8) == whole


# Several processes


@pytest.mark.slow
def test_two_processes_train_the_model_of_one(images: str, tmp_path: Path) -> None:
    plain = dataclasses.replace(TINY_CLASSES, **PLAIN, batch_size=6)
    start(tiny(plain), images, tmp_path / "one", overwrite=False)
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "aft"]
    train = ["train", "classify-digits", "--data", images, "--out", str(tmp_path / "two"), *spelled(plain)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launch, *train], capture_output=True, check=False, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().count("validation images; saved in") == 1
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-5, rtol=1e-3)
    rows = [rundir.read_rows(tmp_path / name) for name in ("one", "two")]
    for a, b in zip(*rows, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
