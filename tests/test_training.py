import dataclasses
import json
import math
import os
import re
import resource
import shutil
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from aft.data import DataError
from aft.models import AFTConfig, AFTForCausalLM
from aft.models.cache import window_start
from aft.training import run as training_run
from aft.training import rundir
from aft.training.errors import RunError, SamplingError
from aft.training.evaluation import score, windows
from aft.training.interrupts import stop_on_signals
from aft.training.loading import load_model
from aft.training.recipes import RECIPES, ByteRecipe, RecipeError, find_recipe
from aft.training.reporting import Stopwatch
from aft.training.run import resume, start
from aft.training.sampling import Utf8Writer, generate_text, generation_config
from aft.training.scores import ByteScore
from aft.training.trainer import parameter_groups, training_arguments
from small_runs import TINY, child, tiny, write_text  # pyrefly: ignore[missing-import]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return write_text(folder / "text.txt")


@pytest.fixture(scope="module")
def finished(folder: Path, text: str) -> Path:
    start(tiny(), text, folder / "finished", overwrite=False)
    return folder / "finished"


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def small_model(vocab_size: int = 256, context: int = 8) -> AFTForCausalLM:
    torch.manual_seed(0)
    config = AFTConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        num_hidden_layers=1,
        max_position_embeddings=context,
        mixer="simple",
        initializer_range=0.5,
        alphabet=None if vocab_size == 256 else list(range(97, 97 + vocab_size)),
    )
    return AFTForCausalLM(config).eval()


class Uniform(nn.Module):
    """A model that finds every byte equally likely."""

    def __init__(self, vocab_size: int, context: int) -> None:
        super().__init__()
        self.config = AFTConfig(vocab_size=vocab_size, max_position_embeddings=context)
        self.device = torch.device("cpu")

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        logits = torch.full((*input_ids.shape, self.config.vocab_size), 3.0)
        return type("Output", (), {"logits": logits})


# Recipes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": -1}, "steps is -1; expected at least 1"),
        ({"steps": 0}, "steps is 0"),
        ({"dropout": 1.5}, "dropout is 1.5; expected 0 <= dropout < 1"),
        ({"dropout": math.nan}, "dropout is nan"),
        ({"lr": math.nan}, "lr is nan; expected a finite number above 0"),
        ({"lr": math.inf}, "lr is inf"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": 1e-3, "min_lr": 1e-2}, r"min_lr is 0.01; expected 0 to lr \(0.001\)"),
        (
            {"mixer": "performer"},
            "mixer is 'performer'; expected one of full, simple, local, conv, attention",
        ),
        ({"schedule": "linear"}, "schedule is 'linear'; expected one of cosine, constant"),
        (
            {"mixer": "attention", "num_heads": 3},
            r"num_heads is 3; expected a divisor of hidden_size \(256\)",
        ),
        ({"bias_rank": 0}, "bias_rank is 0"),
        ({"beta2": 1.0}, "beta2 is 1.0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"grad_clip": math.inf}, "grad_clip is inf"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"split": (0.5, 0.6)}, "split: fractions must add up to 1"),
        ({"context": 0}, "context is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_impossible_recipes_name_field_value_and_expectation(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        ByteRecipe(**fields)


def test_registry_holds_the_papers_enwik8_rows() -> None:
    for window in (1, 2, 4, 8, 32, 64, 128, 256, 512, 1024):
        recipe = RECIPES[f"enwik8-local-{window}"].recipe
        assert (recipe.mixer, recipe.window_size, recipe.num_layers, recipe.hidden_size) == (
            "local",
            window,
            24,
            256,
        )
        assert (recipe.lr, recipe.weight_decay, recipe.dropout, recipe.bias_rank) == (3e-3, 0.5, 0.1, 256)
        assert recipe.split == (90_000_000, 5_000_000, 5_000_000)
        assert recipe.batch_size == 128
    for context in (1024, 2048, 4096):
        recipe = RECIPES["enwik8-local-32" + (f"-{context}" if context > 1024 else "")].recipe
        assert recipe.context == context
        epochs = recipe.steps * recipe.batch_size * recipe.context / 90e6
        assert epochs == pytest.approx(100, abs=0.1)
    assert RECIPES["enwik8-simple"].recipe.mixer == "simple"
    assert RECIPES["enwik8-transformer"].recipe.num_heads == 4
    wide = RECIPES["enwik8-transformer-12x512"].recipe
    assert (wide.num_layers, wide.hidden_size, wide.num_heads, wide.mixer) == (12, 512, 8, "attention")


def test_registry_holds_nanogpts_cpu_setting() -> None:
    recipe = RECIPES["shakespeare-char"].recipe
    assert (recipe.num_layers, recipe.hidden_size, recipe.context) == (4, 128, 64)
    assert (recipe.batch_size, recipe.steps, recipe.dropout, recipe.alphabet) == (12, 2000, 0.0, "distinct")
    assert (recipe.beta2, recipe.weight_decay, recipe.grad_clip, recipe.warmup_steps) == (0.99, 0.1, 1.0, 100)


def test_every_recipe_has_a_name_and_one_line() -> None:
    for name, entry in RECIPES.items():
        assert entry.name == name
        assert entry.summary
        assert "\n" not in entry.summary


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match="no recipe is called 'shakespear'; did you mean shakespeare-char"):
        find_recipe("shakespear")
    with pytest.raises(RecipeError, match="`aft recipes` lists them"):
        find_recipe("zzz")


# Optimiser and schedule


@pytest.mark.parametrize("mixer", ["full", "simple", "local", "conv", "attention"])
def test_only_weights_of_linear_layers_decay(mixer: str) -> None:
    config = AFTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        max_position_embeddings=8,
        mixer=mixer,
        num_attention_heads=2,
        bias_rank=2,
    )
    model = AFTForCausalLM(config)
    decayed, kept = parameter_groups(model, 0.5)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.5, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert linear
    assert {names[id(p)] for p in decayed["params"]} == linear & set(names.values())
    assert {names[id(p)] for p in kept["params"]} == set(names.values()) - linear
    tied = AFTForCausalLM(AFTConfig(hidden_size=16, num_hidden_layers=1, tie_word_embeddings=True))
    embedding = tied.get_input_embeddings().weight
    assert not any(p is embedding for p in parameter_groups(tied, 0.5)[0]["params"])


def test_learning_rate_rises_linearly_then_falls_to_its_minimum(finished: Path) -> None:
    rates = [row["lr"] for row in rundir.read_rows(finished) if row["split"] == "train"]
    # Rows 2, 4, 6 and 8 of 8 steps, the first two of which warm up.
    cosine = [0.5 * (1 + math.cos(math.pi * (step - 2) / 6)) for step in (2, 4, 6, 8)]
    assert rates == pytest.approx([TINY.lr * (0.1 + 0.9 * share) for share in cosine])


def test_batch_that_devices_cannot_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import TrainingArguments

    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: 3))
    with pytest.raises(RunError, match="batch_size is 4; expected a multiple of the 3 devices"):
        training_arguments(TINY, TINY.pace(1), 0, tmp_path)


# Bits per byte


def plain_bits(model: AFTForCausalLM, text: np.ndarray, context: int, stride: int) -> float:
    """Bits of all but the first byte, one forward pass a byte: the definition, slowly."""
    bits = 0.0
    for position in range(1, len(text)):
        # The first window that reaches this byte, `stride` apart and `context` long.
        first = max(0, math.ceil((position - context) / stride)) * stride
        inputs = torch.tensor(text[first:position].astype(np.int64))[None]
        with torch.no_grad():
            logits = model(input_ids=inputs).logits[0, -1].double()
        bits -= float(F.log_softmax(logits, dim=0)[int(text[position])]) / math.log(2)
    return bits


@pytest.mark.parametrize(
    ("length", "stride"), [(1, 8), (7, 8), (8, 8), (9, 8), (50, 8), (50, 3), (50, 1), (17, 8)]
)
def test_score_is_that_of_a_plain_loop(length: int, stride: int) -> None:
    model = small_model()
    text = np.random.default_rng(length).integers(0, 256, length + 1, dtype=np.uint8)
    found = score(model, text[1:], before=int(text[0]), stride=stride)
    assert found.count == length
    assert found.bits == pytest.approx(plain_bits(model, text, 8, stride), rel=1e-6)


def test_first_byte_without_a_byte_before_it_costs_the_vocabulary() -> None:
    model = small_model(vocab_size=20)
    text = np.random.default_rng(0).integers(0, 20, 30, dtype=np.uint8)
    found = score(model, text)
    assert found.count == 30
    assert found.bits == pytest.approx(math.log2(20) + plain_bits(model, text, 8, 8), rel=1e-6)
    assert score(model, text[:1]) == ByteScore(bits=math.log2(20), count=1)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 1000])
def test_uniform_model_scores_eight_bits(length: int) -> None:
    text = np.random.default_rng(0).integers(0, 256, length, dtype=np.uint8)
    for before in (None, 7):
        for stride in (None, 5):
            found = score(Uniform(256, 64), text, before=before, stride=stride)
            assert found.count == length
            assert found.bpc == pytest.approx(8.0, abs=1e-12)


def test_shares_of_ranks_add_up() -> None:
    model = small_model(context=1)
    text = np.random.default_rng(0).integers(0, 256, 40_000, dtype=np.uint8)
    whole = score(model, text)
    shares = [score(model, text, rank=rank, world_size=3) for rank in range(3)]
    assert sum(share.count for share in shares) == whole.count == 40_000
    assert sum(share.bits for share in shares) == pytest.approx(whole.bits, rel=1e-12)


@pytest.mark.parametrize(
    ("length", "context", "stride"), [(1, 4, 4), (10, 4, 4), (10, 4, 1), (11, 4, 3), (3, 4, 2)]
)
def test_windows_count_each_byte_once_with_its_history(length: int, context: int, stride: int) -> None:
    counted: list[int] = []
    for i, window in enumerate(windows(length, context, stride)):
        assert window.end - window.start <= context
        assert i == 0 or window.counted_from - window.start >= context - stride
        counted += range(window.counted_from, window.end)
    assert counted == list(range(length))


def test_scoring_keeps_the_mode_and_refuses_nonsense() -> None:
    model = small_model().train()
    score(model, np.zeros(20, dtype=np.uint8))
    assert model.training
    with pytest.raises(ValueError, match="stride is 9; expected 1 to the model's context, 8"):
        score(model, np.zeros(20, dtype=np.uint8), stride=9)
    with pytest.raises(ValueError, match="no tokens"):
        score(model, np.zeros(0, dtype=np.uint8))


# A run, and what it leaves


def test_run_directory_holds_everything(finished: Path, text: str) -> None:
    names = {path.name for path in finished.iterdir()}
    weights = {"model.safetensors", "config.json", "generation_config.json", "tokenizer_config.json"}
    assert names == weights | {"recipe.json", "metrics.jsonl", "curve.png", "checkpoints"}
    assert [path.name for path in (finished / "checkpoints").iterdir()] == ["checkpoint-8"]
    assert not list(finished.rglob("*training_args*"))
    record = json.loads((finished / "recipe.json").read_text())
    assert record["name"] == "tiny"
    assert ByteRecipe(**record["recipe"] | {"split": tuple(record["recipe"]["split"])}) == TINY
    size = len(Path(text).read_bytes())
    assert record["data"]["path"] == text
    assert record["data"]["bytes"] == size == record["data"]["train"] + record["data"]["validation"]
    assert {"torch", "transformers", "python"} <= set(record["versions"])
    mode = stat.S_IMODE((finished / "model.safetensors").stat().st_mode)
    assert mode == stat.S_IMODE((finished / "recipe.json").stat().st_mode)


def test_metrics_have_a_row_each_and_a_last_one_over_all_held_out_bytes(finished: Path, text: str) -> None:
    rows = rundir.read_rows(finished)
    training = [row for row in rows if row["split"] == "train"]
    assert [row["step"] for row in training] == [2, 4, 6, 8]
    for row in training:
        assert row["bpc"] == pytest.approx(row["loss"] / math.log(2))
        assert row["bytes_per_second"] > 0
        assert row["grad_norm"] > 0
    (middle, last) = [row for row in rows if row["split"] == "validation"]
    assert (middle["step"], middle["bytes"], last["step"], last["final"]) == (4, 64, 8, True)
    content = np.frombuffer(Path(text).read_bytes(), dtype=np.uint8)
    cut = int(0.8 * len(content))
    assert last["bytes"] == len(content) - cut
    whole = score(load_model(finished), content[cut:], before=int(content[cut - 1]))
    assert last["bpc"] == pytest.approx(whole.bpc, rel=1e-9)
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)


def test_curve_is_a_picture(finished: Path) -> None:
    assert (finished / "curve.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_weights_load_with_from_pretrained(finished: Path) -> None:
    model = AFTForCausalLM.from_pretrained(finished)
    assert model.config.max_position_embeddings == TINY.context
    assert model.config.alphabet is None


def test_training_learns(text: str, tmp_path: Path) -> None:
    recipe = tiny(steps=60, alphabet="distinct", eval_every=0, save_every=0, log_every=20)
    outcome = start(recipe, text, tmp_path / "run", overwrite=False)
    assert outcome.result is not None
    rows = rundir.read_rows(outcome.run)
    assert rows[0]["bpc"] > rows[-1]["bpc"] == outcome.result.bpc
    assert outcome.result.bpc < math.log2(len(load_model(outcome.run).config.alphabet)) - 0.5


@pytest.mark.parametrize("mixer", ["full", "simple", "local", "conv", "attention"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_mixer_trains(text: str, tmp_path: Path, mixer: str, precision: str) -> None:
    recipe = tiny(mixer=mixer, precision=precision, steps=2, eval_every=1, window_size=4, kernel_size=4)
    outcome = start(recipe, text, tmp_path / "run", overwrite=False)
    assert outcome.result is not None
    assert 4 < outcome.result.bpc < 9


def test_run_without_a_checkpoint_begins_again(copied: Path, finished: Path) -> None:
    shutil.rmtree(copied / "checkpoints")
    outcome = resume(copied, None)
    assert outcome.step == 8
    before, after = rundir.read_rows(finished), rundir.read_rows(copied)
    assert [(row["step"], row["bpc"]) for row in before] == [(row["step"], row["bpc"]) for row in after]


@pytest.mark.parametrize("stop_at", [3, 4])
def test_resumed_run_equals_one_that_never_stopped(
    finished: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        _signal_after(patched, stop_at)
        outcome = start(tiny(), text, run, overwrite=False)
    assert (outcome.step, outcome.interrupted, outcome.result) == (stop_at, True, None)
    assert (run / "model.safetensors").exists()
    assert (run / "curve.png").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    outcome = resume(run, None)
    assert (outcome.step, outcome.interrupted) == (8, False)
    expected, found = load_file(finished / "model.safetensors"), load_file(run / "model.safetensors")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    rows, uninterrupted = rundir.read_rows(run), rundir.read_rows(finished)
    assert rows[-1]["bpc"] == uninterrupted[-1]["bpc"]
    losses = {row["step"]: row["loss"] for row in rows if row["split"] == "train"}
    for row in uninterrupted:
        if row["split"] == "train" and row["step"] not in (
            3,
            4,
        ):  # means over other steps where a stop came between
            assert losses[row["step"]] == row["loss"]


def test_a_run_of_when_there_was_one_kind_of_recipe_goes_on(copied: Path, finished: Path) -> None:
    record = rundir.read_record(copied)
    rundir.write_record(copied, {k: v for k, v in record.items() if k not in ("kind", "init_from")})
    shutil.rmtree(copied / "checkpoints")
    resume(copied, None)
    for name, tensor in load_file(finished / "model.safetensors").items():
        assert torch.equal(tensor, load_file(copied / "model.safetensors")[name])


def test_training_starts_from_given_weights(finished: Path, text: str, tmp_path: Path) -> None:
    frozen = tiny(steps=1, lr=1e-30, min_lr=0.0, eval_every=0)
    start(frozen, text, tmp_path / "run", overwrite=False, init_from=finished)
    found = load_file(tmp_path / "run" / "model.safetensors")
    for name, tensor in load_file(finished / "model.safetensors").items():
        assert torch.equal(tensor, found[name]), name
    with pytest.raises(RunError, match="finished holds a model of another alphabet than that of the data"):
        start(tiny(alphabet="distinct"), text, tmp_path / "b", overwrite=False, init_from=finished)


def test_finished_run_has_nothing_to_go_on_with(copied: Path) -> None:
    before = (copied / "metrics.jsonl").read_bytes()
    outcome = resume(copied, None)
    assert (outcome.step, outcome.interrupted) == (8, False)
    assert outcome.result is not None
    assert outcome.result.bpc == rundir.read_rows(copied)[-1]["bpc"]
    assert (copied / "metrics.jsonl").read_bytes() == before


def test_rows_after_the_checkpoint_are_written_again(copied: Path) -> None:
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "split": "train", "seconds": 1}\n{"step": 12, "spl')
    rundir.rewind_rows(copied, 8)
    assert [row["step"] for row in rundir.read_rows(copied)] == [2, 4, 4, 6, 8, 8]


def test_resuming_needs_the_same_bytes(copied: Path, tmp_path: Path) -> None:
    other = write_text(tmp_path / "other.txt", lines=61)
    with pytest.raises(RunError, match=r"other.txt is not the data of .*run: 1,\d+ bytes, sha256"):
        resume(copied, other)
    with pytest.raises(DataError, match=r"gone.txt: no such file"):
        resume(copied, str(tmp_path / "gone.txt"))


def _signal_after(patched: pytest.MonkeyPatch, step: int) -> None:
    """Have the process receive SIGINT while it takes that step."""
    original = training_run.TaskTrainer.training_step

    def training_step(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step == step - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *args, **kwargs)

    patched.setattr(training_run.TaskTrainer, "training_step", training_step)


def test_second_signal_is_not_held_back() -> None:
    with stop_on_signals() as request:
        os.kill(os.getpid(), signal.SIGINT)
        assert request.made
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


# Directories that stand in the way


def test_existing_run_is_not_overwritten_unasked(copied: Path, text: str) -> None:
    with pytest.raises(
        RunError, match=r"exists and is not empty; --overwrite replaces it, `aft train --resume"
    ):
        start(tiny(), text, copied, overwrite=False)


def test_overwrite_clears_a_run_and_nothing_else(copied: Path, tmp_path: Path) -> None:
    (copied / "notes.txt").write_text("mine")
    rundir.prepare(copied, overwrite=True)
    assert [path.name for path in copied.iterdir()] == ["notes.txt"]
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "config.json").write_text("{}")
    with pytest.raises(RunError, match="thesis is not a run directory"):
        rundir.prepare(other, overwrite=True)
    (other / "recipe.json").write_text('{"flour": 500}')
    with pytest.raises(RunError, match="thesis is not a run directory"):
        rundir.prepare(other, overwrite=True)
    assert (other / "config.json").exists()
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="file is a file; a directory"):
        rundir.prepare(tmp_path / "file", overwrite=True)


def test_bad_data_leave_an_older_run_alone(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 16)
    with pytest.raises(DataError, match="short holds 16 bytes; a context of 16 needs at least 17"):
        start(tiny(), str(tmp_path / "short"), copied, overwrite=True)
    assert (copied / "model.safetensors").exists()


# A full disk and a killed process


@pytest.fixture
def before_second_save(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run whose second checkpoint finds the disk full once its weights are written."""
    original, calls = torch.save, []

    def save(content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(path)
        if str(path).endswith("optimizer.pt") and sum(str(c).endswith("optimizer.pt") for c in calls) == 2:
            Path(path).write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        original(content, path, *args, **kwargs)

    monkeypatch.setattr(torch, "save", save)
    yield tmp_path / "run"
    monkeypatch.undo()


def test_full_disk_leaves_older_files_whole(before_second_save: Path, text: str, finished: Path) -> None:
    run = before_second_save
    with pytest.raises(RunError, match=r"checkpoint-8 cannot be saved: No space left on device; .* is whole"):
        start(tiny(), text, run, overwrite=False)
    assert rundir.last_checkpoint(run) == run / "checkpoints" / "checkpoint-4"
    load_model(run)
    assert load_file(run / "model.safetensors").keys() == load_file(finished / "model.safetensors").keys()
    outcome = resume(run, None)
    assert outcome.step == 8
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["checkpoint-8"]
    for name, tensor in load_file(finished / "model.safetensors").items():
        assert torch.equal(tensor, load_file(run / "model.safetensors")[name])


def test_write_that_fails_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    rundir.write_whole(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(
            RunError, match=r"recipe.json cannot be saved: File too large; what was saved before"
        ):
            rundir.write_whole(path, b"new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


_KILLED_WHILE_SAVING = """
import os, signal, sys, torch
from pathlib import Path
from small_runs import tiny
from aft.training.run import start

original, saved = torch.save, []

def save(content, path, *args, **kwargs):
    saved.append(str(path))
    if sum(p.endswith("scheduler.pt") for p in saved) == 2:
        Path(path).write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    original(content, path, *args, **kwargs)

torch.save = save
start(tiny(), sys.argv[1], Path(sys.argv[2]), overwrite=False)
"""


def test_kill_while_saving_leaves_older_files_whole(text: str, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = child(text, str(run), code=_KILLED_WHILE_SAVING, cwd=Path(__file__).parent)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, errors.decode()
    assert (run / "checkpoints" / ".staging" / "checkpoint-8").exists()
    assert rundir.last_checkpoint(run) == run / "checkpoints" / "checkpoint-4"
    load_model(run)
    resume(run, None)
    for name, tensor in load_file(finished / "model.safetensors").items():
        assert torch.equal(tensor, load_file(run / "model.safetensors")[name])


# Models that cannot be loaded


def test_what_is_not_a_trained_run_is_named(finished: Path, copied: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nowhere: no such run directory"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"config.json is a file; a run directory was expected"):
        load_model(finished / "config.json")
    with pytest.raises(RunError, match=r"is not a run directory with a trained model: it has no config.json"):
        load_model(tmp_path)
    (copied / "model.safetensors").unlink()
    with pytest.raises(RunError, match=r"holds no trained model: it has no model.safetensors"):
        load_model(copied)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_weights_are_named(copied: Path, kept: int) -> None:
    content = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").unlink()  # a hard link: the checkpoint's file is not to be cut
    (copied / "model.safetensors").write_bytes(content[:kept])
    with pytest.raises(RunError, match=r"model.safetensors is not a whole safetensors file \([\d,]+ bytes\)"):
        load_model(copied)


def test_weights_of_another_vocabulary_are_named(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    rundir.write_whole(
        copied / "config.json", json.dumps(config | {"vocab_size": 300, "alphabet": None}).encode()
    )
    with pytest.raises(
        RunError, match=r"model.safetensors: \S+ is \[256, 16\]; \S+config.json expects \[300, 16\]"
    ):
        load_model(copied)


def test_missing_and_unknown_weights_are_named(copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    name, tensor = weights.popitem()
    (copied / "model.safetensors").unlink()
    save_file(weights, copied / "model.safetensors")
    with pytest.raises(RunError, match=rf"model.safetensors lacks {re.escape(name)}, which"):
        load_model(copied)
    save_file(weights | {name: tensor, "extra": tensor.clone()}, copied / "model.safetensors")
    with pytest.raises(RunError, match=r"model.safetensors holds extra, which"):
        load_model(copied)


def test_damaged_json_is_named(copied: Path) -> None:
    rundir.write_whole(copied / "config.json", b'{"model_type": ')
    with pytest.raises(RunError, match=r"config.json is not JSON"):
        load_model(copied)
    rundir.write_whole(copied / "config.json", b'{"model_type": "gpt2"}')
    with pytest.raises(RunError, match=r"config.json is of model_type 'gpt2'"):
        load_model(copied)
    rundir.write_whole(copied / "recipe.json", b"[]")
    with pytest.raises(RunError, match=r"recipe.json holds a JSON list; an object was expected"):
        rundir.read_record(copied)
    rundir.write_whole(copied / "recipe.json", b"\xff\xfe")
    with pytest.raises(RunError, match=r"recipe.json is not JSON"):
        rundir.read_record(copied)


def test_recipe_of_another_version_is_named(copied: Path) -> None:
    record = rundir.read_record(copied)
    record["recipe"]["momentum"] = 0.9
    with pytest.raises(RunError, match=r"unknown recipe fields \['momentum'\]"):
        rundir.recipe_of(record, copied)
    record["recipe"] = dataclasses.asdict(TINY) | {"steps": -1}
    with pytest.raises(RunError, match=r"recipe.json: steps is -1"):
        rundir.recipe_of(record, copied)


# Sampling


def sampled(model: AFTForCausalLM, prompt: bytes, new: int = 12, seed: int = 0, **options: Any) -> str:
    pieces: list[str] = []
    fields = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | options
    choice = generation_config(vocab_size=model.config.vocab_size, **fields)
    generate_text(model, prompt, new, choice, seed, pieces.append)
    return "".join(pieces)


def test_greedy_takes_the_likeliest_byte() -> None:
    model = small_model(vocab_size=20)
    tokens = [0, 1]
    for _ in range(12):
        context = tokens[window_start(len(tokens), 8) :]
        with torch.no_grad():
            tokens.append(int(model(input_ids=torch.tensor([context])).logits[0, -1].argmax()))
    expected = bytes(97 + token for token in tokens).decode()
    assert sampled(model, b"ab", temperature=0.0) == expected
    assert sampled(model, b"ab", top_k=1, seed=3) == expected


def test_sampling_follows_its_seed() -> None:
    model = small_model(vocab_size=20)
    assert sampled(model, b"ab", seed=1) == sampled(model, b"ab", seed=1) != sampled(model, b"ab", seed=2)
    assert (
        sampled(model, b"ab", top_k=0)
        == sampled(model, b"ab", top_k=20)
        == sampled(model, b"ab", top_k=10**6)
    )


def test_prompts_at_the_edges() -> None:
    model = small_model(vocab_size=20)
    assert sampled(model, b"abc", new=0) == "abc"
    assert sampled(model, b"a" * 100, new=1).startswith("a" * 100)  # longer than the context
    with pytest.raises(DataError, match="newline that stands in for an empty --prompt: byte 0x0a"):
        sampled(model, b"")
    with pytest.raises(DataError, match="--prompt: byte 0x5a at offset 1 is not one of the 20 bytes"):
        sampled(model, b"aZ")
    everything = small_model()
    assert sampled(everything, b"", new=0) == ""
    assert sampled(everything, b"") == sampled(everything, b"\n").removeprefix("\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1; expected a finite number, at least 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": math.nan}, "top_p is nan"),
    ],
)
def test_impossible_sampling_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingError, match=message):
        sampled(small_model(), b"a", **options)


def test_unfinished_characters_are_held_back() -> None:
    pieces: list[str] = []
    writer = Utf8Writer(pieces.append)
    for value in "aé€😀".encode():
        writer.put(bytes([value]))
    assert pieces == ["a", "é", "€", "😀"]
    writer.put(b"\xff")
    writer.put("€".encode()[:2])
    assert pieces[4:] == ["\ufffd"]
    writer.put(b"", last=True)
    assert pieces[5:] == ["\ufffd"]


# Time


def test_stopwatch_leaves_pauses_out_of_laps() -> None:
    now = 100.0
    watch = Stopwatch(earlier=5.0, clock=lambda: now)
    now = 103.0
    with watch.pause():
        now = 110.0
    now = 111.0
    assert watch.lap() == 4.0
    assert watch.seconds() == 16.0
    now = 112.0
    assert watch.lap() == 1.0
