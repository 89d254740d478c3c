"""The interface of a task."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedModel

from aft.data.errors import DataError
from aft.training import rundir
from aft.training.errors import RunError
from aft.training.recipes import Recipe
from aft.training.reporting import Speed
from aft.training.scores import Score


@dataclass(frozen=True)
class EvaluationRequest:
    """What `aft evaluate` asks for; None is what the command's help says.

    Attributes:
        data: other data than the run's own.
        split: a part of the data.
        stride: distance between windows of a text.
        image_size: height and width of the images that go in.
    """

    data: str | None = None
    split: str | None = None
    stride: int | None = None
    image_size: int | None = None


@dataclass(frozen=True)
class Evaluation:
    """A score, and what it is the score of."""

    score: Score
    label: str


class Task(ABC):
    """A recipe with its data opened.

    Attributes:
        model_type: what it trains.
        score_type: what its models are scored by.
        default_path: what recipe.json says of the kind's default data, where a path would stand.
        options: fields of an `EvaluationRequest` beside `data` and `split` that mean something to its models.
        examples: how many there are to train on.
        held_out: name of the part that training is validated on.
        speed: what the speed of training is counted in.
        workers: processes that prepare batches; 0: none but the one that trains.
    """

    model_type: ClassVar[type[PreTrainedModel]]
    score_type: ClassVar[type[Score]]
    default_path: ClassVar[str]
    options: ClassVar[tuple[str, ...]]
    examples: int
    held_out: str
    speed: Speed
    workers: int

    @abstractmethod
    def __init__(self, recipe: Recipe, data: str | None) -> None:
        """Open the data at a path, or the kind's default data."""

    @abstractmethod
    def data_record(self) -> dict[str, Any]:
        """What recipe.json says of the data: at least `path` and `sha256`."""

    @abstractmethod
    def describe_data(self) -> str:
        """The data in a few words."""

    @abstractmethod
    def new_config(self) -> Any:
        """The configuration of the model that the recipe describes."""

    def new_model(self, config: Any = None) -> PreTrainedModel:
        """A model with initial values from torch's generator: the recipe's, or that of a configuration."""
        return self.model_type(self.new_config() if config is None else config)

    @abstractmethod
    def train_set(self, draws: int) -> Dataset[Any]:
        """What training draws `draws` examples from."""

    @abstractmethod
    def sampler(self, train_set: Dataset[Any], draws: int) -> Sampler[int]:
        """In which order."""

    @abstractmethod
    def collator(self) -> Callable[[Any], Any]:
        """What makes a batch of what is drawn."""

    @abstractmethod
    def score(self, model: Any, *, whole: bool, rank: int, world_size: int) -> Score:
        """This rank's share of the score of the held-out part or, unless `whole`, of some of it."""

    @abstractmethod
    def save_processor(self, folder: Path) -> None:
        """Write what Transformers needs to know beside the model, if anything."""

    @classmethod
    def reopen(cls, record: dict[str, Any], run: Path, data: str | None = None) -> Self:
        """The task of a run, with its data from where recipe.json says or from `data`, and the same ones."""
        wanted = record["data"]
        source = None if wanted["path"] == cls.default_path else wanted["path"]
        try:
            task = cls(rundir.recipe_of(record, run), data or source)
        except DataError as error:
            if data is not None or source is None:
                raise
            raise RunError(f"{error}; if the data were moved, give them with --data") from error
        found = task.data_record()
        if found["sha256"] != wanted["sha256"]:
            raise RunError(
                f"{found['path']} is not the data of {run}: {cls.data_identity(found)}; "
                f"expected {cls.data_identity(wanted)}"
            )
        return task

    @classmethod
    @abstractmethod
    def data_identity(cls, record: dict[str, Any]) -> str:
        """The size and checksum in a `data_record`, in words."""

    @classmethod
    @abstractmethod
    def evaluate(cls, run: Path, model: Any, request: EvaluationRequest) -> Evaluation:
        """Answer a request for a model that lies in `run`."""
