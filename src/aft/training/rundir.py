"""The run directory: what lies in it, how it is written so that it is always whole, and how it is read again.

RUN/recipe.json             the whole configuration: recipe, data, sizes, versions
    model.safetensors       the weights, with config.json and what else `from_pretrained(RUN)` reads
    metrics.jsonl           a JSON object a line
    curve.png               the learning curve
    checkpoints/checkpoint-N/   what resuming needs: optimiser, schedule, random states
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from aft.training.errors import RunError
from aft.training.recipes import KINDS, ByteRecipe, Recipe, RecipeError

RECIPE = "recipe.json"
METRICS = "metrics.jsonl"
CURVE = "curve.png"
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
PROCESSOR = "preprocessor_config.json"
TOKENIZER = "tokenizer_config.json"
CHECKPOINTS = "checkpoints"
STAGING = ".staging"
MODEL_FILES = (CONFIG, "generation_config.json", PROCESSOR, TOKENIZER, WEIGHTS)
_OWN = {RECIPE, METRICS, CURVE, CHECKPOINTS, *MODEL_FILES}
_CHECKPOINT = re.compile(r"checkpoint-\d+")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside `path` and rename it: whoever reads `path` finds the old content or the new.

    Raises:
        RunError: the disk is full or the folder cannot be written; `path` is as it was.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with saving(path):
        try:
            with beside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)


@contextlib.contextmanager
def saving(what: Path) -> Iterator[None]:
    """Turn any failure to write, whichever library found it, into one line."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk to Python, torch and safetensors
        reason = (
            error.strerror if isinstance(error, OSError) and error.strerror else str(error).split("\n")[0]
        )
        raise RunError(f"{what} cannot be saved: {reason}; what was saved before is whole") from error


def prepare(run: Path, *, overwrite: bool) -> None:
    """Make an empty run directory; with `overwrite`, clear the one that stands there.

    Only files that a run writes are deleted, and only from a directory that holds a run's recipe.json.
    """
    if run.exists() and not run.is_dir():
        raise RunError(f"{run} is a file; a directory for the run was expected")
    if run.is_dir() and any(run.iterdir()):
        if not overwrite:
            hint = (
                f"--overwrite replaces it, `aft train --resume {run}` goes on"
                if is_run(run)
                else "choose another"
            )
            raise RunError(f"{run} exists and is not empty; {hint}")
        if not is_run(run):
            raise RunError(
                f"{run} is not a run directory (no {RECIPE} of a run in it), so it is not overwritten"
            )
        for name in _OWN - {RECIPE}:
            _remove(run / name)
        _remove(run / RECIPE)  # last: a clearing cut short leaves what can still be overwritten
    with saving(run):
        run.mkdir(parents=True, exist_ok=True)


def is_run(run: Path) -> bool:
    """Whether the directory holds the recipe.json of a run."""
    try:
        read_record(run)
    except RunError:
        return False
    return True


def write_record(run: Path, record: dict[str, Any]) -> None:
    """Write recipe.json."""
    write_whole(run / RECIPE, (json.dumps(record, indent=2) + "\n").encode())


def read_record(run: Path) -> dict[str, Any]:
    """recipe.json of a run, an object with at least `name`, `recipe` and `data`."""
    if not run.exists():
        raise RunError(f"{run}: no such run directory")
    if not run.is_dir():
        raise RunError(f"{run} is a file; a run directory was expected")
    record = read_json(run / RECIPE, f"{run} is not a run directory: it has no {RECIPE}")
    missing = [key for key in ("name", "recipe", "data") if key not in record]
    if missing:
        raise RunError(f"{run / RECIPE} lacks {', '.join(missing)}; the {RECIPE} of a run was expected")
    return record


def read_json(path: Path, if_missing: str) -> dict[str, Any]:
    """A JSON object from a file, or a RunError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(if_missing) from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RunError(f"{path} holds a JSON {type(found).__name__}; an object was expected")
    return found


def recipe_of(record: dict[str, Any], run: Path) -> Recipe:
    """The recipe that recipe.json holds."""
    kind = record.get("kind", ByteRecipe.kind)  # which was the only one once, and went without saying
    if kind not in KINDS:
        raise RunError(f"{run / RECIPE}: kind is {kind!r}; expected one of {', '.join(KINDS)}")
    fields = record["recipe"]
    known = {field.name for field in dataclasses.fields(KINDS[kind])}
    if not isinstance(fields, dict) or not set(fields) <= known:
        unknown = sorted(set(fields) - known) if isinstance(fields, dict) else type(fields).__name__
        raise RunError(f"{run / RECIPE}: unknown recipe fields {unknown}; was it written by another version?")
    # JSON has lists where a recipe has tuples.
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    try:
        return KINDS[kind](**values)
    except (RecipeError, TypeError) as error:
        raise RunError(f"{run / RECIPE}: {error}") from error


def recipe_if_any(run: Path) -> Recipe | None:
    """The recipe of a folder with a model, None where it is not a run's."""
    return recipe_of(read_record(run), run) if is_run(run) else None


def last_checkpoint(run: Path) -> Path | None:
    """The checkpoint of the highest step. A half-written one lies in the staging folder and is not found."""
    found = [path for path in (run / CHECKPOINTS).glob("*") if _CHECKPOINT.fullmatch(path.name)]
    return max(found, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """N of a folder `checkpoint-N`."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def adopt_checkpoint(run: Path, staged: Path) -> None:
    """Move a complete checkpoint from the staging folder to its place, publish its weights, drop older."""
    _flush_files(staged)
    final = run / CHECKPOINTS / staged.name
    _remove(final)
    os.replace(staged, final)
    for name in MODEL_FILES:
        if (final / name).exists():
            _publish(final / name, run / name)
    for path in (run / CHECKPOINTS).iterdir():
        if path != final:  # older checkpoints, and what a killed process left in the staging folder
            _remove(path)


def append_row(run: Path, row: dict[str, Any]) -> None:
    """Add a line to metrics.jsonl."""
    with saving(run / METRICS), (run / METRICS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a line that a killed process cut short is left out."""
    try:
        lines = (run / METRICS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return list(_decodable(lines))


def rewind_rows(run: Path, step: int) -> None:
    """Drop the rows after `step`, which a run resumed from there will write again."""
    rows = [row for row in read_rows(run) if row["step"] <= step]
    write_whole(run / METRICS, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _decodable(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def _publish(source: Path, target: Path) -> None:
    """Give a file a second name, by a hard link where there are such, replacing an older file whole."""
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            os.link(source, beside)
        except OSError:
            shutil.copyfile(source, beside)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def _flush_files(folder: Path) -> None:
    """Have the disk hold a folder's files before their names change, lest a power cut leave names alone."""
    mode = (folder / "trainer_state.json").stat().st_mode
    for path in folder.iterdir():
        path.chmod(mode)  # safetensors makes its file readable to the owner alone, whatever the umask
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
