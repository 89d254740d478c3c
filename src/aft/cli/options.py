"""What each command may be given: dataclasses, whose fields and their explanations are the options."""

from dataclasses import dataclass
from typing import Annotated, Generic, Literal, TypeVar

import tyro

from aft.training.recipes import Recipe

AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)
Run = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
Data = Annotated[str | None, tyro.conf.arg(metavar="PATH")]
Images = Annotated[
    tyro.conf.Positional[tuple[str, ...]],
    tyro.conf.arg(metavar="IMAGE...", help_behavior_hint="(at least one)"),
]


@dataclass(frozen=True)
class TrainOptions(Generic[AnyRecipe]):
    """Train a model by a recipe, whose fields can be changed one by one, into a run directory."""

    recipe: tyro.conf.OmitArgPrefixes[AnyRecipe]
    data: Data = None
    """A file, read as bytes; of enwik8's zip its member enwik8. None: the recipe's own."""
    out: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Run directory; runs/RECIPE if not given."""
    init_from: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Run or folder of save_pretrained to take the weights from; not the head, if that has other classes."""
    overwrite: tyro.conf.FlagCreatePairsOff[bool] = False
    """Replace the run that stands in the run directory."""


@dataclass(frozen=True)
class PixelTrainOptions(TrainOptions[AnyRecipe]):
    __doc__ = TrainOptions.__doc__
    data: Annotated[
        Data,
        tyro.conf.arg(
            help="Folder or zip of images, with or without train and val or test in it; CIFAR-10's python "
            "archive or folder; MNIST's folder, which has both parts, or an IDX file of images. "
            "None: the recipe's own."
        ),
    ] = None


@dataclass(frozen=True)
class ClassifierTrainOptions(TrainOptions[AnyRecipe]):
    __doc__ = TrainOptions.__doc__
    data: Annotated[
        Data,
        tyro.conf.arg(
            help="Folder or zip of CLASS/..., or of train/CLASS/... and val or test; CIFAR-10's python "
            "archive or folder; MNIST's folder, which has both parts, or an IDX file of images beside its "
            "labels. None: the recipe's own."
        ),
    ] = None


TRAIN_OPTIONS: dict[str, type[TrainOptions]] = {
    "bytes": TrainOptions,
    "pixels": PixelTrainOptions,
    "classes": ClassifierTrainOptions,
}


@dataclass(frozen=True)
class ResumeOptions:
    """Go on with a run from its last checkpoint, exactly as if it had not been stopped."""

    resume: Annotated[str, tyro.conf.arg(metavar="RUN")]
    """Run directory of the run that was stopped."""
    data: Data = None
    """Where the run's data are now, if they were moved; they must be the same."""


@dataclass(frozen=True)
class EvaluateOptions:
    """Exact bits per byte, bits per dim, or top-1 and top-5: each byte, sub-pixel, image is counted once."""

    run: Run
    """Run directory."""
    data: Data = None
    """Other data. Without --split all of a text is scored; of images their held-out part, if there is one."""
    split: Literal["train", "validation", "test"] | None = None
    """Part of the run's data, or of --data cut the same way. Without both: what was held out in training."""
    stride: int | None = None
    """Text: distance between windows; bytes have at least context - stride before them. None: the context."""
    image_size: int | None = None
    """Classifiers: height and width of the images that go in. None: as in training."""


@dataclass(frozen=True)
class GenerateOptions:
    """Sample text from a trained model and write it to stdout as it comes."""

    run: Run
    """Run directory."""
    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT")] = ""
    """Text to go on from. An empty prompt starts after a newline, which is not shown."""
    max_new_tokens: int = 400
    """Bytes to add; 0 writes the prompt alone."""
    temperature: float = 0.8
    """Below 1 keeps to what is likely; 0 (or below 1e-6) always takes the likeliest byte."""
    top_k: int = 0
    """Choose among the k likeliest bytes; 0 is off."""
    top_p: float = 1.0
    """Choose among the likeliest bytes that make up this probability; 1 is off."""
    seed: int = 0
    """Seed of the choices."""


@dataclass(frozen=True, kw_only=True)
class PixelChoices:
    """How sub-pixels are chosen, and where the picture goes."""

    out: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """PNG to write, in place of an older one; RUN/samples.png or RUN/completions.png if not given."""
    temperature: float = 1.0
    """Below 1 keeps to what is likely; 0 (or below 1e-6) always takes the likeliest value."""
    top_k: int = 0
    """Choose among the k likeliest values; 0 is off."""
    top_p: float = 1.0
    """Choose among the likeliest values that make up this probability; 1 is off."""
    seed: int = 0
    """Seed of the choices."""
    batch_size: int = 16
    """Images at once; the draws depend on it, and so does the speed."""


@dataclass(frozen=True, kw_only=True)
class SampleOptions(PixelChoices):
    """Draw images from a trained pixel model and write them as a grid."""

    run: Run
    """Run directory."""
    count: int = 16
    """Images to draw."""
    columns: int | None = None
    """Images in a row of the grid; None makes it about square."""


@dataclass(frozen=True, kw_only=True)
class CompleteOptions(PixelChoices):
    """Complete images whose lower part is hidden: original, masked and completed side by side, a row each."""

    run: Run
    """Run directory."""
    images: Images
    """Image files, of the model's size, or of any size if images were resized in its training."""
    keep: float = 0.5
    """Share of the rows that the model is shown, from the top."""


@dataclass(frozen=True)
class ClassifyOptions:
    """Classify images: the likeliest classes of each, with their probabilities."""

    run: Run
    """Run directory."""
    images: Images
    """Image files."""
    top: int = 5
    """Classes to show."""
    image_size: int | None = None
    """Height and width of the images that go in. None: as in training."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Time the four operations beside PyTorch's fused attention, and check them against float64."""

    length: tuple[int, ...] = (1024, 4096)
    """Positions, a table for each."""
    dim: int = 256
    """Channels."""
    batch: int = 2
    """Sequences at once."""
    threads: int | None = None
    """Threads of the processor; None: as many as torch takes by itself."""
    seconds: float = 40.0
    """About how long to time, all tables together; checking takes half as long again."""
    csv: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """CSV to write as well, in place of an older one."""


@dataclass(frozen=True)
class NoOptions:
    """This command has no options."""
