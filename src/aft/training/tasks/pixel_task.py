"""Autoregressive models of pixels."""

from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from aft.data.image_parts import ImageSet
from aft.data.pixels import START, PixelSequences, pixel_array
from aft.models import AFTConfig, AFTForCausalLM
from aft.training import rundir
from aft.training.draws import Batch, Draws, Order
from aft.training.pixel_evaluation import score_pixels
from aft.training.pixel_sampling import image_shape
from aft.training.recipes import PixelRecipe
from aft.training.scores import PixelScore
from aft.training.tasks.base import Evaluation, EvaluationRequest
from aft.training.tasks.image_task import ImageTask


class PixelTask(ImageTask):
    """Images of one size as sequences of sub-pixels.

    Attributes:
        train, validation: uint8 `[N, H, W, C]`.
    """

    model_type = AFTForCausalLM
    score_type = PixelScore
    options = ()
    labelled = False
    workers = 0

    def __init__(self, recipe: PixelRecipe, data: str | None) -> None:
        super().__init__(recipe, data)
        self.recipe = recipe
        path, resize = self.corpus.path, recipe.image_size is not None
        images = self.corpus.parts["train"]
        self.train = pixel_array(images, _shape(recipe, images), path, resize=resize)
        self.shape = list(self.train.shape[1:])
        held_out = self.corpus.parts[self.held_out]
        self.validation = pixel_array(held_out, self.train.shape[1:], path, resize=resize)

    def describe_data(self) -> str:
        return f"{' x '.join(map(str, self.shape))} {super().describe_data()}"

    def new_config(self) -> AFTConfig:
        recipe = self.recipe
        return AFTConfig(
            vocab_size=256,
            hidden_size=recipe.hidden_size,
            num_hidden_layers=recipe.num_layers,
            max_position_embeddings=int(np.prod(self.shape)),
            mixer=recipe.mixer,
            num_attention_heads=recipe.num_heads,
            window_size=recipe.window_size,
            kernel_size=recipe.kernel_size,
            bias_rank=recipe.bias_rank,
            dropout=recipe.dropout,
            tie_word_embeddings=recipe.tie_embeddings,
            image_shape=self.shape,
            bos_token_id=START,
        )

    def train_set(self, draws: int) -> Draws:
        batches = _Batches(PixelSequences(self.train, self.recipe.augment))
        order = Order(self.examples, self.recipe.batch_size, repeats=1, seed=self.recipe.seed)
        return Draws(order, draws, batches, self.recipe.seed)

    def score(self, model: Any, *, whole: bool, rank: int, world_size: int) -> PixelScore:
        images = self.validation if whole else _spread(self.validation, self.recipe.eval_images)
        return score_pixels(model, images, rank=rank, world_size=world_size)

    def save_processor(self, folder: Path) -> None:
        pass  # a token is a sub-pixel, and the config holds the shape

    @classmethod
    def evaluate(cls, run: Path, model: AFTForCausalLM, request: EvaluationRequest) -> Evaluation:
        """Score the run's held-out images, a part of other data, or their held-out part."""
        images, label = cls.requested_images(run, request, None)
        pixels = pixel_array(images, image_shape(model), label, resize=resizes(run))
        return Evaluation(score_pixels(model, pixels), label)


TASK = PixelTask


def resizes(run: Path) -> bool:
    """Whether images were reduced for the model in `run`; without a recipe they are taken as they are."""
    recipe = rundir.recipe_if_any(run)
    return isinstance(recipe, PixelRecipe) and recipe.image_size is not None


class _Batches:
    """Batches of sequences, by the numbers of the images."""

    def __init__(self, sequences: PixelSequences) -> None:
        self._sequences = sequences

    def __call__(self, numbers: list[int]) -> Batch:
        return default_collate([self._sequences[number] for number in numbers])


def _shape(recipe: PixelRecipe, images: ImageSet) -> tuple[int, int, int] | None:
    """What the recipe makes of images; None leaves it to the first image."""
    if recipe.image_size is None and recipe.channels == "auto":
        return None
    height, width = images.read(0).shape[:2] if recipe.image_size is None else [recipe.image_size] * 2
    channels = int(recipe.channels) if recipe.channels != "auto" else 1 if images.gray else 3
    return height, width, channels


def _spread(images: np.ndarray, count: int) -> np.ndarray:
    """`count` images, evenly spread: neighbours in a data set are often of one class."""
    return images[np.linspace(0, len(images) - 1, min(count, len(images))).round().astype(int)]
