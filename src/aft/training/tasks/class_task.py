"""Image classifiers."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aft.data.image_parts import ImageSet
from aft.data.images import read_image
from aft.models import AFTForImageClassification, AFTImageConfig
from aft.training.augmentation import Augmentation
from aft.training.classification import class_logits, score_classes
from aft.training.draws import Batch, Draws, Order
from aft.training.errors import RunError
from aft.training.preprocessing import Preprocessing
from aft.training.recipes import ClassifierRecipe
from aft.training.scores import ClassScore
from aft.training.tasks.base import Evaluation, EvaluationRequest
from aft.training.tasks.image_task import ImageTask


class ClassTask(ImageTask):
    """Images with their classes."""

    model_type = AFTForImageClassification
    score_type = ClassScore
    options = ("image_size",)
    labelled = True

    def __init__(self, recipe: ClassifierRecipe, data: str | None) -> None:
        super().__init__(recipe, data)
        self.recipe = recipe
        self.classes = list(self.corpus.classes or ())
        if len(self.classes) < 2:
            raise RunError(
                f"{self.corpus.path} holds one class, {self.classes[0]!r}; a classifier needs at least two"
            )
        self.preprocessing = Preprocessing.for_size(recipe.image_size, recipe.crop_ratio)
        self.workers = _workers(self.corpus.parts["train"]) if recipe.workers is None else recipe.workers

    def describe_data(self) -> str:
        size = self.recipe.image_size
        return f"{super().describe_data()}, of {len(self.classes)} classes, at {size} x {size}"

    def new_config(self) -> AFTImageConfig:
        recipe = self.recipe
        return AFTImageConfig(
            image_size=recipe.image_size,
            patch_size=recipe.patch_size,
            hidden_size=recipe.hidden_size,
            num_hidden_layers=recipe.num_layers,
            mixer=recipe.mixer,
            num_attention_heads=recipe.num_heads,
            kernel_size=recipe.kernel_size,
            window_size=recipe.window_size,
            bias_rank=recipe.bias_rank,
            dropout=recipe.dropout,
            drop_path_rate=recipe.drop_path,
            id2label=dict(enumerate(self.classes)),
            label2id={name: number for number, name in enumerate(self.classes)},
        )

    def train_set(self, draws: int) -> Draws:
        recipe, images = self.recipe, self.corpus.parts["train"]
        batches = _Batches(images, Augmentation(recipe, self.preprocessing, len(self.classes)))
        order = Order(self.examples, recipe.batch_size, recipe.repeated_augmentation, recipe.seed)
        return Draws(order, draws, batches, recipe.seed)

    def score(self, model: Any, *, whole: bool, rank: int, world_size: int) -> ClassScore:
        images = self.corpus.parts[self.held_out]
        return score_classes(
            model, images, self.preprocessing, workers=self.workers, rank=rank, world_size=world_size
        )

    def save_processor(self, folder: Path) -> None:
        self.preprocessing.save(folder)

    @classmethod
    def evaluate(cls, run: Path, model: AFTForImageClassification, request: EvaluationRequest) -> Evaluation:
        """Classify the run's held-out images, a part of other data, or their held-out part."""
        preprocessing = preprocessing_for(run, model, request.image_size)
        images, label = cls.requested_images(run, request, class_names(model))
        score = score_classes(model, images, preprocessing, workers=_workers(images))
        return Evaluation(score, label)


TASK = ClassTask


def classify_files(
    run: Path, model: AFTForImageClassification, files: Sequence[str], image_size: int | None
) -> list[list[tuple[str, float]]]:
    """For each image file the classes and their probabilities, the likeliest first.

    Raises:
        DataError: a file that holds no image, before any is classified.
    """
    preprocessing, names = preprocessing_for(run, model, image_size), class_names(model)
    inputs = [preprocessing([read_image(file)]) for file in files]
    answers = []
    for image in inputs:
        probabilities = class_logits(model, image)[0].softmax(0)
        order = probabilities.argsort(descending=True, stable=True).tolist()
        answers.append([(names[number], float(probabilities[number])) for number in order])
    return answers


def class_names(model: AFTForImageClassification) -> list[str]:
    """The names of a model's classes, in the order of its logits."""
    names: dict[Any, str] = model.config.id2label or {}
    return [names[number] for number in sorted(names)]


def preprocessing_for(run: Path, model: AFTForImageClassification, image_size: int | None) -> Preprocessing:
    """How images go into the model in `run`, at its own size or at another."""
    preprocessing = Preprocessing.load(run)
    if image_size is None:
        return preprocessing
    patch = model.config.patch_size
    if image_size < patch or image_size % patch:
        raise RunError(f"image_size is {image_size}; expected a multiple of the model's patch size, {patch}")
    if model.config.mixer == "local" and image_size != preprocessing.crop:
        raise RunError(
            f"image_size is {image_size}; a model with mixer 'local' takes its own, {preprocessing.crop}: "
            f"its window is over the flattened sequence of patches"
        )
    return preprocessing.at(image_size)


class _Batches:
    """Batches of changed images and their targets, by the numbers of the images."""

    def __init__(self, images: ImageSet, augmentation: Augmentation) -> None:
        self._images = images
        self._augmentation = augmentation

    def __call__(self, numbers: list[int]) -> Batch:
        assert self._images.labels is not None
        images = [self._images.read(number) for number in numbers]
        inputs, targets = self._augmentation(images, self._images.labels[np.array(numbers)])
        return {"pixel_values": inputs, "labels": targets}


def _workers(images: ImageSet) -> int:
    """Processes to prepare images with, where each has to be decoded."""
    if images.in_memory:
        return 0
    # Where the system can say so, the cores that this process may use, which may be fewer than there are.
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1
