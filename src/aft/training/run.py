"""Training from beginning to end: data, model, Trainer, run directory. What `aft train` calls."""

import contextlib
import dataclasses
import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import set_seed

from aft.data import DataError, distinct_bytes, encode, open_bytes, split_bytes, standard_library_source
from aft.data.splits import check_lengths
from aft.models import AFTConfig, AFTForCausalLM
from aft.training import rundir
from aft.training.curve import draw_curve
from aft.training.errors import RunError
from aft.training.evaluation import Score
from aft.training.interrupts import stop_on_signals
from aft.training.loading import check_checkpoint, load_model
from aft.training.recipes import NamedRecipe, Recipe
from aft.training.reporting import Reporter, Stopwatch
from aft.training.trainer import ByteTrainer, training_arguments

STDLIB = "stdlib"  # in recipe.json, where a path would stand


@dataclass(frozen=True)
class Corpus:
    """A text as tokens, cut into parts.

    Attributes:
        path: the file, or `stdlib`.
        digest: sha256 of its bytes, hexadecimal.
        alphabet: the byte that each token stands for; None where a token is a byte.
        parts: `train`, `validation` and perhaps `test`, uint8 tokens each.
    """

    path: str
    size: int
    digest: str
    alphabet: list[int] | None
    parts: dict[str, np.ndarray]


@dataclass(frozen=True)
class Outcome:
    """How training ended: at which step, whether it was asked to, and the score of the validation part."""

    run: Path
    step: int
    interrupted: bool
    result: Score | None


def start(entry: NamedRecipe, data: str | None, run: Path, *, overwrite: bool) -> Outcome:
    """Train a recipe from the beginning into a new run directory.

    Raises:
        RunError, DataError: before anything is deleted or written, unless it is the writing that fails.
    """
    corpus = open_corpus(data, entry.recipe, entry.name)
    config = model_config(entry.recipe, corpus.alphabet)
    arguments = training_arguments(entry.recipe, run)
    if is_first_process():
        rundir.prepare(run, overwrite=overwrite)
    set_seed(entry.recipe.seed)
    model = AFTForCausalLM(config)
    record = {
        "name": entry.name,
        "recipe": dataclasses.asdict(entry.recipe),
        "data": {"path": corpus.path, "bytes": corpus.size, "sha256": corpus.digest}
        | {name: len(part) for name, part in corpus.parts.items()},
        "parameters": model.num_parameters(),
        "processes": arguments.world_size,
        "device": str(arguments.device),
        "versions": versions(),
    }
    if is_first_process():
        rundir.write_record(run, record)
    return _train(run, entry.name, entry.recipe, model, arguments, corpus, checkpoint=None)


def resume(run: Path, data: str | None) -> Outcome:
    """Go on from the last checkpoint of a run, exactly as if it had never stopped."""
    record = rundir.read_record(run)
    recipe = rundir.recipe_of(record, run)
    corpus = recorded_corpus(record, run, data)
    checkpoint = rundir.last_checkpoint(run)
    if checkpoint is not None:
        check_checkpoint(checkpoint)
    arguments = training_arguments(recipe, run)
    if record.get("processes", 1) != arguments.world_size:
        raise RunError(
            f"{run} was trained by {record['processes']} processes; {arguments.world_size} are running"
        )
    set_seed(recipe.seed)
    model = AFTForCausalLM(model_config(recipe, corpus.alphabet))
    return _train(run, record["name"], recipe, model, arguments, corpus, checkpoint)


def open_corpus(data: str | None, recipe: Recipe, name: str) -> Corpus:
    """Open a file, or the recipe's default data, and cut it into the recipe's parts."""
    if data is not None:
        return _cut(open_bytes(data), str(Path(data).resolve()), recipe, source=data)
    if recipe.default_data == "none":
        raise RunError(f"recipe {name} has no default data; give a file with --data")
    return _cut(standard_library_source(), STDLIB, recipe, source="the standard library's source")


def recorded_corpus(record: dict[str, Any], run: Path, data: str | None = None) -> Corpus:
    """The data that a run was trained on, from where recipe.json says or from `data`, and the same bytes."""
    recipe = rundir.recipe_of(record, run)
    wanted = record["data"]
    source = None if wanted["path"] == STDLIB else wanted["path"]
    try:
        corpus = open_corpus(data or source, recipe, record["name"])
    except DataError as error:
        if data is not None or source is None:
            raise
        raise RunError(f"{error}; if the data were moved, give them with --data") from error
    if (corpus.size, corpus.digest) != (wanted["bytes"], wanted["sha256"]):
        raise RunError(
            f"{corpus.path} is not the data of {run}: {corpus.size:,} bytes, sha256 {corpus.digest[:12]}…; "
            f"expected {wanted['bytes']:,} bytes, sha256 {wanted['sha256'][:12]}…"
        )
    return corpus


@dataclass(frozen=True)
class Text:
    """Tokens to score, uint8 `[n]`, the token before them if there is one, and what to call them."""

    tokens: np.ndarray
    before: int | None
    label: str


def evaluation_text(run: Path, alphabet: list[int] | None, data: str | None, part: str | None) -> Text:
    """What `aft evaluate` scores: a part of the run's data or of `data`, or `data` alone and whole."""
    if data is not None and part is None:
        return Text(encode(open_bytes(data), alphabet, data), None, f"all of {data}")
    record = rundir.read_record(run)
    if data is None:
        corpus = recorded_corpus(record, run)
        label, parts = corpus.path, corpus.parts
    else:
        recipe = rundir.recipe_of(record, run)
        label, parts = data, split_bytes(encode(open_bytes(data), alphabet, data), recipe.split, data)
    part = part or "validation"
    if part not in parts:
        raise RunError(f"{run}: its data were split into {', '.join(parts)}; there is no {part} part")
    before = list(parts)[list(parts).index(part) - 1] if part != "train" else None
    if len(parts[part]) == 0 or (before and len(parts[before]) == 0):
        raise RunError(f"{label} is too short: one of its parts is empty")
    return Text(parts[part], int(parts[before][-1]) if before else None, f"the {part} part of {label}")


def model_config(recipe: Recipe, alphabet: list[int] | None) -> AFTConfig:
    """The model that a recipe describes."""
    return AFTConfig(
        vocab_size=256 if alphabet is None else len(alphabet),
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        max_position_embeddings=recipe.context,
        mixer=recipe.mixer,
        num_attention_heads=recipe.num_heads,
        window_size=recipe.window_size,
        kernel_size=recipe.kernel_size,
        bias_rank=recipe.bias_rank,
        dropout=recipe.dropout,
        tie_word_embeddings=recipe.tie_embeddings,
        alphabet=alphabet,
    )


def versions() -> dict[str, str]:
    """What the numbers of a run may depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
    }


def is_first_process() -> bool:
    """Whether this process writes and speaks; under torchrun only one does."""
    return int(os.environ.get("RANK", "0")) == 0


def _cut(content: np.ndarray, path: str, recipe: Recipe, source: str) -> Corpus:
    alphabet = distinct_bytes(content) if recipe.alphabet == "distinct" else None
    parts = split_bytes(encode(content, alphabet, source), recipe.split, source)
    check_lengths(parts, recipe.context, source)
    return Corpus(path, len(content), hashlib.sha256(content.data).hexdigest(), alphabet, parts)


def _train(
    run: Path,
    name: str,
    recipe: Recipe,
    model: AFTForCausalLM,
    arguments: transformers.TrainingArguments,
    corpus: Corpus,
    checkpoint: Path | None,
) -> Outcome:
    if checkpoint is not None and (row := _final_row(run)):
        load_model(run)  # which complains where the weights are gone
        return Outcome(run, row["step"], False, Score(row["bpc"] * row["bytes"], row["bytes"]))
    first = is_first_process()
    earlier = 0.0
    if first:
        print(_description(run, name, recipe, model, corpus, checkpoint), flush=True)
        rundir.rewind_rows(run, rundir.step_of(checkpoint) if checkpoint else 0)
        rows = rundir.read_rows(run)
        earlier = rows[-1]["seconds"] if rows else 0.0
    reporter = Reporter(run, recipe.batch_size * recipe.context, Stopwatch(earlier), first=first)
    train, validation = corpus.parts["train"], corpus.parts["validation"]
    with stop_on_signals() as request, contextlib.closing(reporter):
        trainer = ByteTrainer(model, run, recipe, arguments, train, validation, reporter, request)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    step = trainer.state.global_step
    interrupted = step < recipe.steps
    result = None
    if not interrupted:
        result = trainer.score_validation()
        reporter.validation(step, result, final=True)
    if first:
        rundir.write_whole(run / rundir.CURVE, draw_curve(rundir.read_rows(run), name))
    # Processes that leave one by one abort those that are still connected to them.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    return Outcome(run, step, interrupted, result)


def _final_row(run: Path) -> dict[str, Any] | None:
    """The row of metrics.jsonl that a run ends with, if it has ended."""
    rows = rundir.read_rows(run)
    return rows[-1] if rows and rows[-1].get("final") else None


def _description(
    run: Path, name: str, recipe: Recipe, model: AFTForCausalLM, corpus: Corpus, checkpoint: Path | None
) -> str:
    parts = ", ".join(f"{len(part):,} {part_name}" for part_name, part in corpus.parts.items())
    begun = f"from {checkpoint.name}" if checkpoint else "from random weights"
    return (
        f"{name}: {recipe.mixer}, {model.num_parameters():,} parameters, {begun}; "
        f"bytes of {corpus.path}: {parts}; writing to {run}"
    )
