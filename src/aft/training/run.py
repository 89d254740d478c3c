"""Training from beginning to end: data, model, Trainer, run directory. What `aft train` calls."""

import contextlib
import dataclasses
import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainingArguments, set_seed

from aft.training import rundir
from aft.training.curve import draw_curve
from aft.training.errors import RunError
from aft.training.initialisation import config_from, initialise_from, with_inherited
from aft.training.interrupts import stop_on_signals
from aft.training.loading import check_checkpoint, load_model, read_config
from aft.training.recipes import NamedRecipe, Pace, Recipe
from aft.training.reporting import Reporter, Stopwatch
from aft.training.scores import Score
from aft.training.tasks import Task, open_task, task_type
from aft.training.trainer import TaskTrainer, training_arguments


@dataclass(frozen=True)
class Outcome:
    """How training ended.

    Attributes:
        step: the last one.
        interrupted: whether it was asked to stop there.
        was_finished: whether it had come to its end before, so that there was nothing to go on with.
        result: the score of the held-out part, where training came to its end.
        part: the name of that part.
    """

    run: Path
    step: int
    interrupted: bool
    was_finished: bool
    result: Score | None
    part: str


def start(
    entry: NamedRecipe, data: str | None, run: Path, *, overwrite: bool, init_from: Path | None = None
) -> Outcome:
    """Train a recipe from the beginning, or from the weights in `init_from`, into a new run directory.

    Raises:
        RunError, DataError: before anything is deleted or written, unless it is the writing that fails.
    """
    recipe = entry.recipe
    task = open_task(recipe, data, entry.name)
    pace = recipe.pace(task.examples)
    arguments = training_arguments(recipe, pace, task.workers, run)
    model = _initial_model(recipe, task, init_from)
    if is_first_process():
        rundir.prepare(run, overwrite=overwrite)
    record = {
        "name": entry.name,
        "kind": recipe.kind,
        "recipe": dataclasses.asdict(recipe),
        "data": task.data_record(),
        "init_from": None if init_from is None else str(init_from.resolve()),
        "parameters": model.num_parameters(),
        "processes": arguments.world_size,
        "device": str(arguments.device),
        "versions": versions(),
    }
    if is_first_process():
        rundir.write_record(run, record)
        _warn_of_warmup(recipe, pace)
    return _train(run, record, recipe, task, model, arguments, checkpoint=None)


def resume(run: Path, data: str | None) -> Outcome:
    """Go on from the last checkpoint of a run, exactly as if it had never stopped."""
    record = rundir.read_record(run)
    recipe = rundir.recipe_of(record, run)
    task = task_type(recipe.kind).reopen(record, run, data)
    checkpoint = rundir.last_checkpoint(run)
    if checkpoint is not None:
        check_checkpoint(checkpoint)
        if row := _final_row(run):
            load_model(run)  # which complains where the weights are gone
            return Outcome(run, row["step"], False, True, task.score_type.of_row(row), task.held_out)
    arguments = training_arguments(recipe, recipe.pace(task.examples), task.workers, run)
    if record.get("processes", 1) != arguments.world_size:
        raise RunError(
            f"{run} was trained by {record['processes']} processes; {arguments.world_size} are running"
        )
    source = record.get("init_from")
    model = _initial_model(recipe, task, None if source is None else Path(source), checkpoint)
    return _train(run, record, recipe, task, model, arguments, checkpoint)


def versions() -> dict[str, str]:
    """What the numbers of a run may depend on."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in ("torch", "transformers", "numpy", "torchvision", "pillow"):
        with contextlib.suppress(metadata.PackageNotFoundError):  # the last two are for images alone
            found[package] = metadata.version(package)
    return found


def is_first_process() -> bool:
    """Whether this process writes and speaks; under torchrun only one does."""
    return int(os.environ.get("RANK", "0")) == 0


def _initial_model(
    recipe: Recipe, task: Task, init_from: Path | None, checkpoint: Path | None = None
) -> PreTrainedModel:
    """A model as training begins with it; what a checkpoint holds, the Trainer loads into it."""
    config, notes = task.new_config(), []
    if checkpoint is not None:
        config = with_inherited(config, read_config(checkpoint))
    elif init_from is not None:
        config, notes = config_from(config, init_from)
    set_seed(recipe.seed)
    model = task.new_model(config)
    if checkpoint is None and init_from is not None:
        notes += initialise_from(model, init_from)
    for line in notes if is_first_process() else ():
        print(line, flush=True)
    return model


def _train(
    run: Path,
    record: dict[str, Any],
    recipe: Recipe,
    task: Task,
    model: PreTrainedModel,
    arguments: TrainingArguments,
    checkpoint: Path | None,
) -> Outcome:
    first = is_first_process()
    earlier = 0.0
    if first:
        print(_description(run, record, recipe, task, model, checkpoint), flush=True)
        rundir.rewind_rows(run, rundir.step_of(checkpoint) if checkpoint else 0)
        rows = rundir.read_rows(run)
        earlier = rows[-1]["seconds"] if rows else 0.0
    measure = task.score_type.measure
    reporter = Reporter(run, measure, task.speed, Stopwatch(earlier), first=first)
    with stop_on_signals() as request, contextlib.closing(reporter):
        trainer = TaskTrainer(model, run, task, arguments, reporter, request)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    step = trainer.state.global_step
    interrupted = step < arguments.max_steps
    result = None
    if not interrupted:
        result = trainer.score_held_out(whole=True)
        reporter.validation(step, task.held_out, result, final=True)
    if first:
        picture = draw_curve(rundir.read_rows(run), record["name"], measure)
        rundir.write_whole(run / rundir.CURVE, picture)
    # Processes that leave one by one abort those that are still connected to them.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    return Outcome(run, step, interrupted, False, result, task.held_out)


def _warn_of_warmup(recipe: Recipe, pace: Pace) -> None:
    if pace.steps <= pace.warmup_steps:
        print(
            f"aft: the learning rate never reaches lr, {recipe.lr:g}: it rises for {pace.warmup_steps:,} "
            f"warmup_steps, and steps is {pace.steps:,}",
            file=sys.stderr,
        )


def _final_row(run: Path) -> dict[str, Any] | None:
    """The row of metrics.jsonl that a run ends with, if it has ended."""
    rows = rundir.read_rows(run)
    return rows[-1] if rows and rows[-1].get("final") else None


def _description(
    run: Path,
    record: dict[str, Any],
    recipe: Recipe,
    task: Task,
    model: PreTrainedModel,
    checkpoint: Path | None,
) -> str:
    weights = record.get("init_from") or "random weights"
    begun = f"from {checkpoint.name if checkpoint else weights}"
    return (
        f"{record['name']}: {recipe.mixer}, {model.num_parameters():,} parameters, {begun}; "
        f"{task.describe_data()}; writing to {run}"
    )
