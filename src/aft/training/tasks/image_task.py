"""What the two kinds of models of images share: a data set of images, drawn in epochs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, Sampler, SequentialSampler

from aft.data.image_parts import ImageSet
from aft.data.image_sets import open_image_set, open_images
from aft.training import rundir
from aft.training.draws import whole_batch
from aft.training.errors import RunError
from aft.training.recipes import ClassifierRecipe, PixelRecipe
from aft.training.reporting import Speed
from aft.training.tasks.base import EvaluationRequest, Task


class ImageTask(Task):
    """A data set of images.

    Attributes:
        corpus: the data set; its labels count through `corpus.classes`, if it has any.
    """

    default_path = "digits"
    labelled: bool

    def __init__(self, recipe: PixelRecipe | ClassifierRecipe, data: str | None) -> None:
        self.corpus = open_images(data, split=recipe.split, labelled=self.labelled)
        self.examples = len(self.corpus.parts["train"])
        self.held_out = self.corpus.held_out
        if self.examples < recipe.batch_size:
            raise RunError(
                f"{self.corpus.path}: its train part holds {self.examples:,} images, fewer than a batch of "
                f"{recipe.batch_size:,}; expected --batch-size {self.examples} or less"
            )
        self.speed = Speed("images", recipe.batch_size, lambda speed: f"{speed:.0f}img/s")

    def data_record(self) -> dict[str, Any]:
        sizes = {name: len(part) for name, part in self.corpus.parts.items()}
        return {
            "path": self.corpus.path,
            "images": sum(sizes.values()),
            "sha256": self.corpus.digest,
            **sizes,
        }

    @classmethod
    def data_identity(cls, record: dict[str, Any]) -> str:
        return f"{record['images']:,} images, sha256 {record['sha256'][:12]}…"

    def describe_data(self) -> str:
        parts = (f"{len(part):,} {name}" for name, part in self.corpus.parts.items())
        return f"images of {self.corpus.path}: " + ", ".join(parts)

    def sampler(self, train_set: Dataset[Any], draws: int) -> Sampler[int]:
        return SequentialSampler(train_set)  # type: ignore[arg-type]

    def collator(self) -> Callable[[Any], Any]:
        return whole_batch

    @classmethod
    def requested_images(
        cls, run: Path, request: EvaluationRequest, classes: list[str] | None
    ) -> tuple[ImageSet, str]:
        """The images that a request means, and what to call them."""
        if request.data is not None and request.split is None:
            images = open_image_set(request.data, labelled=cls.labelled, classes=classes)
            return images, request.data
        if request.data is None:
            corpus = cls.reopen(rundir.read_record(run), run).corpus
        else:
            split = cls._split_of(run)
            corpus = open_images(request.data, split=split, labelled=cls.labelled, classes=classes)
        part = request.split or corpus.held_out
        if part not in corpus.parts:
            raise RunError(f"{corpus.path} has the parts {', '.join(corpus.parts)}; there is no {part} part")
        return corpus.parts[part], f"the {part} part of {corpus.path}"

    @staticmethod
    def _split_of(run: Path) -> float:
        """The share of images that the run held out, which other data are cut by too."""
        recipe = rundir.recipe_if_any(run)
        return recipe.split if isinstance(recipe, PixelRecipe | ClassifierRecipe) else ClassifierRecipe.split
