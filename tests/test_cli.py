import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from aft.__main__ import share_cores
from aft.cli import main
from aft.training.recipes import RECIPES
from small_runs import TINY_OPTIONS, child, write_text  # pyrefly: ignore[missing-import]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text: str) -> str:
    run = str(tmp_path_factory.mktemp("a folder with spaces") / "run")
    with pytest.raises(SystemExit) as exit_request:
        main(
            ["train", "shakespeare-char", "--data", text, "--out", run, *TINY_OPTIONS, "--alphabet=distinct"]
        )
    assert exit_request.value.code == 0
    return run


class Command:
    """Runs `aft` within the test's process."""

    def __init__(self, capture: pytest.CaptureFixture[bytes]) -> None:
        self._capture = capture

    def __call__(self, *args: str) -> tuple[int, str, str]:
        """Exit status, stdout and stderr."""
        self._capture.readouterr()
        with pytest.raises(SystemExit) as exit_request:
            main(args)
        out, err = self._capture.readouterr()
        return int(str(exit_request.value.code or 0)), out.decode(), err.decode()

    def line(self, *args: str) -> str:
        """The one line that a mistake is answered with."""
        status, out, err = self(*args)
        assert (status, out) == (2, ""), err
        assert re.fullmatch(r"aft: [^\n]+\n", err), err
        return err[len("aft: ") : -1]


@pytest.fixture
def aft(capsysbinary: pytest.CaptureFixture[bytes]) -> Command:
    return Command(capsysbinary)


# Help, lists


@pytest.mark.parametrize(
    ("package", "command"), [("tyro", "recipes"), ("transformers", "info"), ("matplotlib", "train")]
)
def test_a_missing_extra_is_named(package: str, command: str, text: str, tmp_path: Path) -> None:
    code = (
        "import runpy, sys\n"
        "sys.modules[sys.argv[1]] = None\n"
        "sys.argv = ['aft', *sys.argv[2:]]\n"
        "runpy.run_module('aft', run_name='__main__')\n"
    )
    options = ["shakespeare-char", "--data", text, "--out", str(tmp_path / "run"), *TINY_OPTIONS]
    process = child(package, command, *(options if command == "train" else []), code=code)
    out, err = process.communicate()
    wanted = f"aft: the package {package} is missing; pip install 'attention-free[train]' brings it\n"
    assert (process.returncode, out.splitlines()[1:], err.decode()[-len(wanted) :]) == (2, [], wanted)


def test_threads_wait_asleep_unless_the_user_has_a_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    share_cores()
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    share_cores()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"


def test_help_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import runpy, sys\nfrom aft.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as e: assert not e.code, e.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    for args in (
        ["--help"],
        ["train", "--help"],
        ["train", "bytes-tiny", "--help"],
        ["generate", "--help"],
        ["recipes"],
    ):
        done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout


def test_module_and_command_are_the_same(aft: Command) -> None:
    done = subprocess.run([sys.executable, "-m", "aft", "--help"], capture_output=True, check=True)
    assert done.stdout.decode() == aft("--help")[1]


def test_recipes_have_a_line_each(aft: Command) -> None:
    status, out, _ = aft("recipes")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == list(RECIPES)


def test_help_of_a_recipe_shows_its_values(aft: Command) -> None:
    status, out, _ = aft("train", "enwik8-local-64", "--help")
    assert status == 0
    assert re.search(r"--window-size INT[^-]*\(default: 64\)", out)


def test_info_names_versions_and_implementations(aft: Command) -> None:
    status, out, _ = aft("info")
    assert status == 0
    assert re.search(r"torch \d", out)
    assert "eager: available" in out
    assert "cpu" in out


# Mistakes in the command line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian"], "no command is called 'trian'; did you mean train?"),
        (["train"], "train needs a recipe"),
        (["train", "byte-tiny"], "no recipe is called 'byte-tiny'; did you mean bytes-tiny"),
        (["train", "--lr", "1e-3", "bytes-tiny"], "the recipe comes before --lr"),
        (["train", "bytes-tiny", "--stepps", "5"], "has no option --stepps; did you mean --steps"),
        (["train", "bytes-tiny", "--windowsize=5"], "has no option --windowsize; did you mean --window-size"),
        (["train", "bytes-tiny", "--lr", "1e-3x"], "--lr: could not convert string to float: '1e-3x'"),
        (["train", "bytes-tiny", "--lr"], "Missing value for argument '--lr'"),
        (["train", "bytes-tiny", "--lr", "nan"], "lr is nan; expected a finite number above 0"),
        (["train", "bytes-tiny", "--steps", "-5"], "steps is -5; expected at least 1"),
        (["train", "bytes-tiny", "--steps", "2.5"], "--steps: invalid literal for int() with base 10: '2.5'"),
        (["train", "bytes-tiny", "--dropout", "1.5"], "dropout is 1.5; expected 0 <= dropout < 1"),
        (["train", "bytes-tiny", "--mixer", "fill"], "invalid choice 'fill' for argument '--mixer'"),
        (["train", "bytes-tiny", "--bias-rank", "x"], "--bias-rank: no type matching"),
        (["train", "bytes-tiny", "--split", "0.5"], "split: two or three parts"),
        (["train", "bytes-tiny", "more"], "does not take a further argument, 'more'"),
        (
            ["train", "shakespeare-char"],
            "recipe shakespeare-char has no default data; give it some with --data",
        ),
        (["evaluate"], "Missing from aft evaluate: RUN"),
        (["generate"], "Missing from aft generate: RUN"),
        (["evaluate", "nowhere"], "nowhere: no such run directory"),
        (
            ["generate", "nowhere", "--temprature", "1"],
            "has no option --temprature; did you mean --temperature",
        ),
        (["generate", "nowhere", "--top-k", "many"], "--top-k: invalid literal for int()"),
        (["train", "--resume", "nowhere"], "nowhere: no such run directory"),
        (["train", "--resume"], "Missing value for argument '--resume'"),
        (["info", "--all"], "has no option --all; it takes none"),
        (["train", "--resume", "run", "--lr", "1"], "a run goes on by its own recipe"),
    ],
)
def test_mistakes_are_one_line(aft: Command, args: list[str], message: str) -> None:
    assert message in aft.line(*args)


def test_no_arguments_show_the_usage(aft: Command) -> None:
    status, out, _ = aft()
    assert status == 2
    assert out.startswith("usage: aft COMMAND")


def test_mistakes_in_the_data_are_one_line(aft: Command, tmp_path: Path) -> None:
    def answer(data: Path) -> str:
        return aft.line("train", "shakespeare-char", "--data", str(data), "--out", str(tmp_path / "run"))

    assert answer(tmp_path / "gone") == f"{tmp_path}/gone: no such file"
    assert "is a directory; a file was expected" in answer(tmp_path)
    (tmp_path / "empty").touch()
    assert "empty is empty" in answer(tmp_path / "empty")
    (tmp_path / "short").write_bytes(b"x" * 64)
    assert "short holds 64 bytes; a context of 64 needs at least 65" in answer(tmp_path / "short")
    (tmp_path / "held-out").write_bytes(b"x" * 200)
    assert "the validation part of" in answer(tmp_path / "held-out")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("text8", b"words")
    assert "is a zip that holds 'text8'; a member 'enwik8' was expected" in answer(tmp_path / "other.zip")
    (tmp_path / "half.zip").write_bytes((tmp_path / "other.zip").read_bytes()[:60])
    assert "begins as a zip does, but its 60 bytes are not a whole one" in answer(tmp_path / "half.zip")
    assert not (tmp_path / "run").exists()


# Commands


def test_training_prints_its_result_and_a_bar(aft: Command, text: str, tmp_path: Path) -> None:
    status, out, err = aft(
        "train", "shakespeare-char", "--data", text, "--out", str(tmp_path / "run"), *TINY_OPTIONS
    )
    assert status == 0
    first, last = out.splitlines()
    assert first.startswith("shakespeare-char: simple, ")
    assert re.match(r"\d\.\d{4} bits per byte over all \d+ validation bytes; saved in ", last)
    assert "8/8" in err
    assert "bpc=" in err
    assert "kB/s" in err
    assert "Writing model shards" not in err


@pytest.mark.parametrize(
    "content",
    [bytes(range(256)) * 2, ("\ufeffwörd\n" * 40).encode("utf-16"), b"one\rtwo\r" * 80],
    ids=["all", "16", "CR"],
)
def test_any_bytes_train_and_count(aft: Command, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data").write_bytes(content)
    run = str(tmp_path / "run")
    options = [*TINY_OPTIONS, "--steps=1", "--eval-every=0", "--split", "0.8", "0.2"]
    assert aft("train", "bytes-tiny", "--data", str(tmp_path / "data"), "--out", run, *options)[0] == 0
    status, out, _ = aft("evaluate", run, "--data", str(tmp_path / "data"))
    assert status == 0
    assert f"over {len(content)} bytes" in out


def test_existing_directories_are_kept(aft: Command, trained: str, text: str, tmp_path: Path) -> None:
    train = ["train", "shakespeare-char", "--data", text]
    assert "exists and is not empty; --overwrite" in aft.line(*train, "--out", trained)
    (tmp_path / "thesis.txt").touch()
    assert "exists and is not empty; choose another" in aft.line(*train, "--out", str(tmp_path))
    assert "is not a run directory" in aft.line(*train, "--out", str(tmp_path), "--overwrite")
    assert (tmp_path / "thesis.txt").exists()


def test_overwrite_replaces_a_run(aft: Command, trained: str, text: str, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    options = [*TINY_OPTIONS, "--steps=4", "--overwrite"]
    assert aft("train", "shakespeare-char", "--data", text, "--out", str(run), *options)[0] == 0
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["checkpoint-4"]


def test_finished_run_resumes_to_its_result(aft: Command, trained: str) -> None:
    status, out, _ = aft("train", "--resume", trained)
    assert status == 0
    assert "bits per byte over all" in out


def test_evaluate_repeats_the_last_row_of_training(aft: Command, trained: str, text: str) -> None:
    last = Path(trained, "metrics.jsonl").read_text().splitlines()[-1]
    bpc = float(re.findall(r'"bpc": ([\d.]+)', last)[0])
    status, out, _ = aft("evaluate", trained)
    assert status == 0
    assert out == f"{bpc:.4f} bits per byte over {_count(out)} bytes (the validation part of {text})\n"
    assert aft("evaluate", trained, "--split", "validation", "--data", text)[1].split()[0] == f"{bpc:.4f}"
    size = Path(text).stat().st_size
    assert _count(aft("evaluate", trained, "--data", text)[1]) == f"{size:,}"
    with_history = aft("evaluate", trained, "--stride", "4")[1]
    assert _count(with_history) == _count(out)
    assert with_history != out


def _count(out: str) -> str:
    return re.findall(r"over ([\d,]+) bytes", out)[0]


def test_evaluate_names_what_it_cannot_do(aft: Command, trained: str, tmp_path: Path) -> None:
    assert "there is no test part" in aft.line("evaluate", trained, "--split", "test")
    assert "stride is 17; expected 1 to the model's context, 16" in aft.line(
        "evaluate", trained, "--stride", "17"
    )
    (tmp_path / "other").write_bytes(b"line 1 \xff")
    assert "other: byte 0xff at offset 7 is not one of" in aft.line(
        "evaluate", trained, "--data", str(tmp_path / "other")
    )


def test_data_that_changed_are_named(aft: Command, trained: str, text: str) -> None:
    content = Path(text).read_bytes()
    try:
        Path(text).write_bytes(content + b"x")
        assert "is not the data of" in aft.line("evaluate", trained)
    finally:
        Path(text).write_bytes(content)


def test_generate_writes_prompt_and_continuation(aft: Command, trained: str) -> None:
    options = ["--prompt", "line 1", "--max-new-tokens", "20"]
    status, out, err = aft("generate", trained, *options)
    assert (status, err) == (0, "")
    assert out.startswith("line 1")
    assert len(out) == 26
    assert aft("generate", trained, *options)[1] == out
    assert aft("generate", trained, *options, "--seed", "5")[1] != out
    assert aft("generate", trained, "--prompt", "line", "--max-new-tokens", "0")[1] == "line"
    greedy = aft("generate", trained, *options, "--temperature", "0")[1]
    assert aft("generate", trained, *options, "--temperature", "0", "--seed", "5")[1] == greedy
    assert aft("generate", trained, *options, "--top-k", "1")[1] == greedy
    assert aft("generate", trained, *options, "--temperature", "1e-40")[1] == greedy
    assert aft("generate", trained, *options, "--top-k", "100000")[1] == out
    assert len(aft("generate", trained, "--max-new-tokens", "5")[1]) == 5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--temperature", "-1"], "temperature is -1"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-k", "-1"], "top_k is -1"),
        (["--top-p", "0"], "top_p is 0"),
        (["--max-new-tokens", "-1"], "max_new_tokens is -1"),
        (["--seed", "-1"], "seed is -1"),
        (["--seed", "99999999999999999999"], "expected at least 0 and below 2**32"),
        (["--prompt", "Zürich"], "--prompt: byte 0x5a at offset 0 is not one of the"),
    ],
)
def test_impossible_sampling_is_one_line(aft: Command, trained: str, args: list[str], message: str) -> None:
    assert message in aft.line("generate", trained, *args)


def test_damaged_weights_are_one_line(aft: Command, trained: str, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    content = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").unlink()
    (run / "model.safetensors").write_bytes(content[: len(content) // 2])
    assert "is not a whole safetensors file" in aft.line("generate", str(run))
    assert "is not a whole safetensors file" in aft.line("evaluate", str(run))


# Ends that are not the usual one


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "model.safetensors"]
)
@pytest.mark.parametrize("damage", ["missing", "cut short"])
def test_a_damaged_checkpoint_is_one_line(
    aft: Command, trained: str, tmp_path: Path, name: str, damage: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (checkpoint,) = (run / "checkpoints").iterdir()
    if damage == "missing":
        (checkpoint / name).unlink()
    else:
        content = (checkpoint / name).read_bytes()
        (checkpoint / name).unlink()
        (checkpoint / name).write_bytes(content[: len(content) // 2])
    message = aft.line("train", "--resume", str(run))
    assert name in message
    assert f"remove {checkpoint}" in message


def test_a_finished_run_without_weights_is_not_called_saved(
    aft: Command, trained: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "model.safetensors").unlink()
    assert "no model.safetensors" in aft.line("train", "--resume", str(run))


def test_weights_that_are_not_finite_are_one_line(aft: Command, trained: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    weights = load_file(run / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, run / "model.safetensors", metadata={"format": "pt"})
    for command in ("evaluate", "generate"):
        assert "model.norm.weight hold numbers that are not finite" in aft.line(command, str(run))


def test_divergence_that_only_the_last_validation_shows_is_one_line(
    aft: Command, text: str, tmp_path: Path
) -> None:
    options = ["--data", text, "--out", str(tmp_path / "run"), *TINY_OPTIONS]
    changed = ["--lr=1e30", "--log-every=100", "--eval-every=0"]
    status, _, err = aft("train", "shakespeare-char", *options, *changed)
    assert status == 2
    assert "training diverged" in err.splitlines()[-1]


def test_a_closed_output_is_not_a_mistake(trained: str) -> None:
    for args in (["recipes"], ["generate", trained, "--prompt", "x", "--max-new-tokens", "2"]):
        command = [sys.executable, "-m", "aft", *args]
        done = subprocess.run(
            ["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, check=False
        )
        assert (done.returncode, done.stderr) == (0, b"")


def test_reader_that_goes_away_ends_generation_quietly(trained: str) -> None:
    with child("generate", trained, "--max-new-tokens", "5000") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_output_is_utf8_whatever_the_locale() -> None:
    environment = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    code = "from aft.cli.commands import write_stdout\nwrite_stdout('€')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment)
    assert done.stdout == "€".encode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_training_is_saved_and_goes_on(aft: Command, text: str, tmp_path: Path, number: int) -> None:
    run = tmp_path / "run"
    options = [*TINY_OPTIONS, "--steps=1000000", "--eval-every=0", "--save-every=0", "--log-every=1"]
    process = child("train", "shakespeare-char", "--data", text, "--out", str(run), *options)
    assert process.stdout is not None
    process.stdout.readline()
    _wait_for(run / "metrics.jsonl", process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    last = err.decode().splitlines()[-1]
    step = re.fullmatch(
        rf"aft: stopped after step ([\d,]+), saved; `aft train --resume {re.escape(str(run))}` goes on", last
    )
    assert step, err.decode()
    assert (run / "checkpoints" / f"checkpoint-{step[1].replace(',', '')}").is_dir()
    assert load_file(run / "model.safetensors")
    assert (run / "curve.png").exists()
    assert aft("generate", str(run), "--max-new-tokens", "3")[0] == 0


def test_training_that_diverges_is_one_line(aft: Command, text: str, tmp_path: Path) -> None:
    options = [*TINY_OPTIONS, "--lr=1e30", "--warmup-steps=0"]
    status, _, err = aft(
        "train", "shakespeare-char", "--data", text, "--out", str(tmp_path / "run"), *options
    )
    assert status == 2
    last = err.splitlines()[-1]
    assert re.fullmatch(
        r"aft: the loss is nan at step \d: training diverged; a lower learning rate may help", last
    )


@pytest.mark.slow
def test_two_processes_train_one_model(aft: Command, trained: str, text: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        "-m",
        "aft",
    ]
    train = ["train", "shakespeare-char", "--data", text, "--out", str(run), *TINY_OPTIONS]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *train], capture_output=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().count("validation bytes; saved in") == 1
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert {"rng_state_0.pth", "rng_state_1.pth", "model.safetensors"} <= {
        path.name for path in checkpoint.iterdir()
    }
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 4, 6, 8, 8]
    # The processes share each step's batch and the held-out bytes, so the text is scored as by one alone.
    status, out, _ = aft("evaluate", str(run))
    assert status == 0
    assert float(out.split()[0]) == pytest.approx(rows[-1]["bpc"], abs=1e-4)


def _wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    import time

    for _ in range(1200):
        if path.exists() and path.stat().st_size:
            return
        assert process.poll() is None
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")
