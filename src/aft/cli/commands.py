"""The commands: each parses its arguments, calls the function that does the work, and says how it went.

What a command needs is imported inside it, so that `--help` waits for neither torch nor Transformers.
"""

import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aft.cli.options import (
    TRAIN_OPTIONS,
    BenchOptions,
    ClassifyOptions,
    CompleteOptions,
    EvaluateOptions,
    GenerateOptions,
    NoOptions,
    PixelChoices,
    ResumeOptions,
    SampleOptions,
)
from aft.cli.parsing import CommandError, parse
from aft.training.recipes import GROUPS, RECIPES, find_recipe

if TYPE_CHECKING:
    from pathlib import Path

INTERRUPTED = 130  # what shells report for a process that Ctrl-C ended

_PACKAGES = ("torch", "transformers", "accelerate", "numpy", "safetensors", "tyro")
_PACKAGES_FOR_IMAGES = ("torchvision", "timm", "pillow", "scikit-learn")


def train(args: list[str]) -> int:
    if any(arg == "--resume" or arg.startswith("--resume=") for arg in args):
        if "-h" in args or "--help" in args:
            args = ["--help"]  # also without the run that --resume asks for
        options = parse(ResumeOptions, args, "aft train")
        _quieten()
        from pathlib import Path

        from aft.training.run import resume

        return _report(resume(Path(options.resume), options.data))
    if not args:
        raise CommandError("train needs a recipe: aft train RECIPE [--data PATH]; `aft recipes` lists them")
    if args[0] in ("-h", "--help"):
        print("usage: aft train RECIPE [OPTIONS]\n       aft train --resume RUN\n")
        print(_recipe_lines())
        print("\n`aft train RECIPE --help` explains the fields of a recipe.")
        return 0
    if args[0].startswith("-"):
        raise CommandError(
            f"the recipe comes before {args[0]}: aft train RECIPE [--data PATH] [--field value ...]"
        )
    entry = find_recipe(args[0])
    known = TRAIN_OPTIONS[entry.recipe.kind]
    kind = known[type(entry.recipe)]  # type: ignore[index]
    options = parse(kind, args[1:], f"aft train {entry.name}", default=known(entry.recipe))
    _quieten()
    from pathlib import Path

    from aft.training.run import start

    changed = dataclasses.replace(entry, recipe=options.recipe)
    out = Path(options.out if options.out is not None else f"runs/{entry.name}")
    init_from = None if options.init_from is None else Path(options.init_from)
    return _report(start(changed, options.data, out, overwrite=options.overwrite, init_from=init_from))


def _report(outcome: Any) -> int:
    from aft.training.run import is_first_process

    if outcome.interrupted:
        if is_first_process():
            how = f"`aft train --resume {outcome.run}` goes on"
            print(f"aft: stopped after step {outcome.step:,}, saved; {how}", file=sys.stderr)
        return INTERRUPTED
    if is_first_process():
        result = outcome.result
        before = f"{outcome.run} is finished at step {outcome.step:,}: " if outcome.was_finished else ""
        print(f"{before}{result.summary()} over all {result.counted(outcome.part)}; saved in {outcome.run}")
    return 0


def evaluate(args: list[str]) -> int:
    options = parse(EvaluateOptions, args, "aft evaluate")
    _quieten()
    from pathlib import Path

    from aft.training.loading import NAMES, kind_of, load_model
    from aft.training.tasks import EvaluationRequest, task_type

    run = Path(options.run)
    model = load_model(run)
    kind = kind_of(model.config)
    task = task_type(kind)
    request = EvaluationRequest(options.data, options.split, options.stride, options.image_size)
    for name in ("stride", "image_size"):
        if getattr(request, name) is not None and name not in task.options:
            raise CommandError(f"--{name.replace('_', '-')} means nothing to {run}: it holds {NAMES[kind]}")
    found = task.evaluate(run, _on_device(model), request)
    print(f"{found.score.summary()} over {found.score.counted()} ({found.label})")
    return 0


def generate(args: list[str]) -> int:
    options = parse(GenerateOptions, args, "aft generate")
    _quieten()
    from pathlib import Path

    from aft.training.loading import load_model
    from aft.training.sampling import generate_text, generation_config

    if options.max_new_tokens < 0:
        raise CommandError(f"max_new_tokens is {options.max_new_tokens}; expected at least 0")
    _check_seed(options.seed)
    model = load_model(Path(options.run), "bytes")
    choice = generation_config(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        vocab_size=model.config.vocab_size,
    )
    # Bytes that are not UTF-8 come from a shell as surrogates, and go to the model as the bytes they were.
    prompt = options.prompt.encode("utf-8", "surrogateescape")
    generate_text(_on_device(model), prompt, options.max_new_tokens, choice, options.seed, write_stdout)
    if sys.stdout.isatty():
        print()
    return 0


def sample(args: list[str]) -> int:
    options = parse(SampleOptions, args, "aft sample")
    _quieten()
    from pathlib import Path

    from aft.training.loading import load_model
    from aft.training.pixel_sampling import grid_png, sample_images
    from aft.training.rundir import write_whole

    _check_at_least_1(options, "count", "batch_size")
    if options.columns is not None:
        _check_at_least_1(options, "columns")
    _check_seed(options.seed)
    model = load_model(Path(options.run), "pixels")
    out = _picture(options, "samples.png")
    with _Bar() as bar:
        images = sample_images(_on_device(model), options.count, **_choices(options), progress=bar)
    columns = options.columns or math.ceil(math.sqrt(options.count))
    write_whole(out, grid_png(images, columns))
    print(f"{options.count} images of {' x '.join(map(str, images.shape[1:]))} in {out}")
    return 0


def complete(args: list[str]) -> int:
    options = parse(CompleteOptions, args, "aft complete")
    _quieten()
    from pathlib import Path

    from aft.training.loading import load_model
    from aft.training.pixel_sampling import complete_images, completions_png, read_images
    from aft.training.rundir import write_whole
    from aft.training.tasks.pixel_task import resizes

    _check_images(options.images)
    _check_at_least_1(options, "batch_size")
    _check_seed(options.seed)
    run = Path(options.run)
    model = load_model(run, "pixels")
    images = read_images(model, options.images, resize=resizes(run))
    out = _picture(options, "completions.png")
    with _Bar() as bar:
        masked, completed = complete_images(
            _on_device(model), images, options.keep, **_choices(options), progress=bar
        )
    write_whole(out, completions_png(images, masked, completed))
    print(f"original, masked and completed, a row for each of {len(images)} images, in {out}")
    return 0


def classify(args: list[str]) -> int:
    options = parse(ClassifyOptions, args, "aft classify")
    _quieten()
    from pathlib import Path

    from aft.training.loading import load_model
    from aft.training.tasks.class_task import classify_files

    _check_images(options.images)
    _check_at_least_1(options, "top")
    run = Path(options.run)
    model = load_model(run, "classes")
    answers = classify_files(run, _on_device(model), options.images, options.image_size)
    for path, classes in zip(options.images, answers, strict=True):
        lines = [f"  {100 * probability:6.2f} %  {name}" for name, probability in classes[: options.top]]
        write_stdout("\n".join([path, *lines]) + "\n")
    return 0


def recipes(args: list[str]) -> int:
    parse(NoOptions, args, "aft recipes")
    print(_recipe_lines())
    return 0


def _recipe_lines() -> str:
    width = max(map(len, RECIPES))
    return "\n\n".join(
        "\n".join([f"{title}:", *(f"  {entry.name:<{width}}  {entry.summary}" for entry in group)])
        for title, group in GROUPS.items()
    )


def info(args: list[str]) -> int:
    parse(NoOptions, args, "aft info")
    _quieten()
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from aft import __version__
    from aft.ops import available_impls

    print(f"attention-free {__version__}, Python {sys.version.split()[0]}")
    for package in (*_PACKAGES, *_PACKAGES_FOR_IMAGES):
        try:
            print(f"  {package} {version(package)}")
        except PackageNotFoundError:
            print(f"  {package} is not installed")
    print(f"devices: cpu ({os.cpu_count()} cores, {torch.get_num_threads()} threads)")
    for index in range(torch.cuda.device_count()):
        print(f"         cuda:{index} ({torch.cuda.get_device_name(index)})")
    if torch.backends.mps.is_available():
        print("         mps")
    print("implementations:")
    for name, reason in available_impls().items():
        print(f"  {name}: {'available' if reason is None else f'not available, {reason}'}")
    return 0


def bench(args: list[str]) -> int:
    options = parse(BenchOptions, args, "aft bench")
    if not options.length:
        raise CommandError("length has no value; at least one was expected")
    for length in options.length:
        if length < 1:
            raise CommandError(f"length is {length}; expected at least 1")
    _check_at_least_1(options, "dim", "batch", *(["threads"] if options.threads is not None else []))
    if not (math.isfinite(options.seconds) and options.seconds >= 0):
        raise CommandError(f"seconds is {options.seconds:g}; expected a finite number, at least 0")
    from pathlib import Path

    out = None if options.csv is None else _file_to_write(Path(options.csv), "csv")
    import torch

    from aft.benchmark import quick
    from aft.benchmark.machine import description, record
    from aft.benchmark.tables import csv_text
    from aft.training.rundir import write_whole

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    print(f"{description()}\n{quick.EXPLANATION}")
    rows, measured = [], []
    for length in options.length:
        try:
            measured = quick.measure(
                length, options.dim, options.batch, options.seconds / len(options.length)
            )
        except RuntimeError as error:
            # What torch says of more memory than there is, and of more than can be counted.
            if not re.search("can't allocate memory|overflowed", str(error)):
                raise
            raise CommandError(f"length {length:,} takes more memory than there is") from None
        rows += quick.rows(measured, options.batch, options.dim, record())
        print(f"\nT = {length:,}, d = {options.dim}, batch {options.batch}, causal, float32")
        print(quick.table(measured), flush=True)
    print("\n" + quick.solvers(measured))
    if out is not None:
        write_whole(out, csv_text(quick.COLUMNS, rows).encode())
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    command.__name__: command
    for command in (train, evaluate, generate, sample, complete, classify, bench, recipes, info)
}


def write_stdout(text: str) -> None:
    """Write UTF-8 whatever the locale says, as the bytes that were learnt are."""
    # A path that is not UTF-8 came as surrogates, and goes out as the bytes it was.
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
    sys.stdout.buffer.flush()


class _Bar:
    """A bar on stderr that shows how much of a picture is drawn."""

    _bar: Any = None

    def __enter__(self) -> "_Bar":
        return self

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="sub-pixel", dynamic_ncols=True)
        self._bar.update(done - self._bar.n)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _choices(options: PixelChoices) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "seed", "batch_size")
    return {name: getattr(options, name) for name in names}


def _picture(options: Any, name: str) -> "Path":
    """Where the picture goes, which has to be a place that can be written: it takes a while to draw."""
    from pathlib import Path

    out = Path(options.run, name) if options.out is None else Path(options.out)
    if out.suffix.lower() != ".png" and not out.is_dir():
        raise CommandError(f"{out}: pictures are written as PNG; a name that ends in .png was expected")
    return _file_to_write(out, "out")


def _file_to_write(out: "Path", option: str) -> "Path":
    """The file, which has to be in a place that can be written."""
    if out.is_dir():
        raise CommandError(f"{out} is a directory; a file to write was expected")
    if not out.parent.is_dir():
        raise CommandError(f"{out.parent}: no such directory to write {out.name} in")
    if not os.access(out.parent, os.W_OK):
        raise CommandError(
            f"{out} cannot be saved: {out.parent} may not be written; give another with --{option}"
        )
    return out


def _check_images(images: tuple[str, ...]) -> None:
    if not images:
        raise CommandError("at least one IMAGE was expected")


def _check_at_least_1(options: Any, *names: str) -> None:
    for name in names:
        if getattr(options, name) < 1:
            raise CommandError(f"{name} is {getattr(options, name)}; expected at least 1")


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise CommandError(f"seed is {seed}; expected at least 0 and below 2**32")


def _on_device(model: Any) -> Any:
    """The model on the accelerator, where there is one: the device that the Trainer would take."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return model if accelerator is None else model.to(accelerator)


def _quieten() -> None:
    """Have Transformers report errors only, and show no progress bars of its own."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
