import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import GPT2Config

from aft.cli import main
from aft.training.loading import load_model
from small_runs import (  # pyrefly: ignore[missing-import]
    CLASSES_OPTIONS,
    PIXELS_OPTIONS,
    TINY_OPTIONS,
    child,
    picture,
    write_images,
    write_text,
)
from test_cli import Command  # pyrefly: ignore[missing-import]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_images(tmp_path_factory.mktemp("images"), {"train": 18, "val": 7})


def run_of(folder: Path, *args: str) -> str:
    run = str(folder / "run")
    with pytest.raises(SystemExit) as exit_request:
        main(["train", *args, "--out", run])
    assert exit_request.value.code == 0
    return run


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, images: str) -> str:
    folder = tmp_path_factory.mktemp("classes")
    return run_of(folder, "classify-digits", "--data", images, *CLASSES_OPTIONS)


@pytest.fixture(scope="module")
def pixel_model(tmp_path_factory: pytest.TempPathFactory, images: str) -> str:
    folder = tmp_path_factory.mktemp("pixels")
    return run_of(folder, "pixels-digits", "--data", images, *PIXELS_OPTIONS)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bytes")
    text = write_text(folder / "text.txt")
    return run_of(folder, "shakespeare-char", "--data", text, *TINY_OPTIONS, "--steps=2")


@pytest.fixture
def aft(capsysbinary: pytest.CaptureFixture[bytes]) -> Command:
    return Command(capsysbinary)


# Help, lists


def test_help_of_the_new_commands_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom aft.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as e: assert not e.code, e.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'PIL', 'torchvision'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    for args in (["sample", "--help"], ["train", "classify-digits", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()


def test_help_of_a_recipe_shows_the_fields_of_its_kind(aft: Command) -> None:
    classes, pixels, text = (
        aft("train", name, "--help")[1] for name in ("classify-digits", "pixels-digits", "bytes-tiny")
    )
    assert re.search(r"--patch-size INT[^-]*\(default: 2\)", classes)
    assert "--eval-images" in pixels
    assert "A file, read as bytes" in text
    assert "A file, read as bytes" not in classes + pixels
    assert "train/CLASS/..." in classes
    for help_text in (classes, pixels):
        assert "which has both parts" in re.sub(r"[\s│]+", " ", help_text)
    assert "--context" in text
    assert "--context" not in classes + pixels
    assert "--patch-size" not in text + pixels


def test_recipes_are_grouped_by_kind(aft: Command) -> None:
    out = aft("recipes")[1]
    titles = [line for line in out.splitlines() if line and not line.startswith(" ")]
    assert len(titles) == 3
    assert out.index("image classifiers:") < out.index("imagenet-aft-conv-tiny-h32")


def test_info_names_what_images_need(aft: Command) -> None:
    out = aft("info")[1]
    for package in ("torchvision", "timm", "pillow", "scikit-learn"):
        assert re.search(rf"{package} (\d|is not installed)", out)


@pytest.mark.parametrize(
    ("package", "needed"), [("torchvision", "classify-digits"), ("PIL", "pixels-digits")]
)
def test_a_missing_extra_is_named(package: str, needed: str, tmp_path: Path) -> None:
    code = (
        "import runpy, sys\nsys.modules[sys.argv[1]] = None\nsys.argv = ['aft', *sys.argv[2:]]\n"
        "runpy.run_module('aft', run_name='__main__')\n"
    )
    process = child(package, "train", needed, "--out", str(tmp_path / "run"), code=code)
    _, err = process.communicate()
    wanted = f"aft: the package {package} is missing; pip install 'attention-free[images]' brings it\n"
    assert (process.returncode, err.decode().splitlines()[-1] + "\n") == (2, wanted)


# Mistakes


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "classify-digit"], "no recipe is called 'classify-digit'; did you mean classify-digits"),
        (["train", "classify-digits", "--context", "5"], "has no option --context"),
        (
            ["train", "classify-digits", "--patchsize=5"],
            "no option --patchsize; did you mean --patch-size",
        ),
        (
            ["train", "classify-digits", "--image-size", "9"],
            "image_size is 9; expected a multiple of",
        ),
        (["train", "classify-digits", "--crop", "big"], "invalid choice 'big' for argument '--crop'"),
        (["train", "classify-cifar10-small"], "has no default data; give it some with --data"),
        (["train", "pixels-digits", "--data", "nowhere"], "nowhere: no such file or folder"),
        (["train", "classify-digits", "--init-from", "nowhere"], "nowhere: no such run directory"),
        (["classify", "nowhere", "a.png"], "nowhere: no such run directory"),
        (["classify"], "Missing from aft classify: RUN"),
        (["sample", "nowhere", "--count", "0"], "count is 0; expected at least 1"),
        (["sample", "nowhere", "--columns", "0"], "columns is 0; expected at least 1"),
        (["sample", "nowhere", "--seed", "-1"], "seed is -1"),
        (["sample", "nowhere", "--prompt", "x"], "aft sample has no option --prompt"),
        (["complete", "nowhere", "a.png", "--kep", "1"], "has no option --kep; did you mean --keep"),
    ],
)
def test_mistakes_are_one_line(aft: Command, args: list[str], message: str) -> None:
    assert message in aft.line(*args)


def test_a_model_of_another_kind_is_named(
    aft: Command, classifier: str, pixel_model: str, text_model: str, images: str
) -> None:
    image = str(next(Path(images).rglob("*.png")))
    models = {
        classifier: "an image classifier",
        pixel_model: "a model of pixels",
        text_model: "a language model over bytes",
    }
    commands = {
        "an image classifier": [["classify", image]],
        "a model of pixels": [["sample"], ["complete", image]],
        "a language model over bytes": [["generate"]],
    }
    for run, held in models.items():
        for expected, variants in commands.items():
            for command, *rest in variants:
                if held != expected:
                    assert aft.line(command, run, *rest) == f"{run} holds {held}; {expected} was expected"
    assert aft.line("evaluate", classifier, "--stride", "2").endswith("it holds an image classifier")
    assert aft.line("evaluate", pixel_model, "--stride", "2").endswith("it holds a model of pixels")
    assert aft.line("evaluate", text_model, "--image-size", "8").endswith(
        "it holds a language model over bytes"
    )


def test_a_model_of_another_library_is_named(aft: Command, tmp_path: Path) -> None:
    GPT2Config(n_layer=1).save_pretrained(tmp_path)
    assert "config.json is of model_type 'gpt2'; 'aft' or 'aft_image' was expected" in aft.line(
        "classify", str(tmp_path), "a.png"
    )


def test_unknown_classes_are_named(aft: Command, classifier: str, tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", {"": 4}, classes=("red", "violet"))
    message = aft.line("evaluate", classifier, "--data", data)
    assert "violet" in message
    assert "blue, green, red" in message


def test_a_configuration_of_other_classes_is_named(aft: Command, classifier: str, tmp_path: Path) -> None:
    run = shutil.copytree(classifier, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["id2label"] = config["id2label"] | {"3": "violet"}
    config["label2id"] = config["label2id"] | {"violet": 3}
    (run / "config.json").unlink()
    (run / "config.json").write_text(json.dumps(config))
    message = aft.line("classify", str(run), "a.png")
    assert re.search(r"classifier\.(weight|bias) is \[3.*expects \[4", message)


def test_images_that_are_none_are_named(
    aft: Command, classifier: str, pixel_model: str, tmp_path: Path
) -> None:
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty.png").touch()
    Image.fromarray(picture(0, (6, 8))).save(tmp_path / "small.png")
    for name in ("text.jpg", "empty.png", "gone.png"):
        file = str(tmp_path / name)
        assert file in aft.line("classify", classifier, file)
        assert file in aft.line("complete", pixel_model, file)
    assert "small.png is 6 x 8" in aft.line("complete", pixel_model, str(tmp_path / "small.png"))
    assert "at least one IMAGE" in aft.line("classify", classifier)


def test_a_picture_needs_a_place(aft: Command, pixel_model: str, images: str, tmp_path: Path) -> None:
    image = str(next(Path(images).rglob("*.png")))
    assert "is a directory; a file to write" in aft.line("sample", pixel_model, "--out", str(tmp_path))
    for name in ("a.jpg", "a"):
        message = f"{name}: pictures are written as PNG; a name that ends in .png was expected"
        assert message in aft.line("sample", pixel_model, "--out", str(tmp_path / name))
        assert message in aft.line("complete", pixel_model, image, "--out", str(tmp_path / name))
    gone = str(tmp_path / "gone" / "a.png")
    assert "gone: no such directory to write a.png in" in aft.line("sample", pixel_model, "--out", gone)


def test_a_place_that_may_not_be_written_is_named(
    aft: Command, pixel_model: str, images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "access", lambda path, mode: False)
    closed = str(tmp_path / "a.png")
    assert "may not be written; give another with --out" in aft.line("sample", pixel_model, "--out", closed)
    monkeypatch.setattr(Path, "mkdir", refuse)
    train = ["train", "classify-digits", "--data", images, *CLASSES_OPTIONS]
    assert "cannot be saved: Permission denied" in aft.line(*train, "--out", str(tmp_path / "run"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_named(aft: Command, pixel_model: str, images: str, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(stat.S_IRUSR | stat.S_IXUSR)
    train = ["train", "classify-digits", "--data", images, *CLASSES_OPTIONS, "--out", str(closed / "run")]
    assert "cannot be saved: Permission denied" in aft.line(*train)
    assert "may not be written; give another with --out" in aft.line(
        "sample", pixel_model, "--out", str(closed / "a.png")
    )


# Commands


def test_training_says_what_it_trains_and_how_well(aft: Command, images: str, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    status, out, err = aft("train", "classify-digits", "--data", images, "--out", run, *CLASSES_OPTIONS)
    assert status == 0, err
    first, last = out.splitlines()
    assert first.startswith("classify-digits: conv, ")
    assert f"images of {images}: 18 train, 7 validation, of 3 classes, at 8 x 8; " in first
    assert re.fullmatch(
        r"top-1 [\d.]+ %, top-5 100.00 %, loss [\d.]+ over all 7 validation images; saved in .*", last
    )
    assert "img/s" in err
    status, out, _ = aft("train", "--resume", run)
    assert (status, out) == (0, f"{run} is finished at step 8: {last}\n")


def test_a_rate_that_is_never_reached_is_told(aft: Command, images: str, tmp_path: Path) -> None:
    train = ["train", "pixels-digits", "--data", images, *PIXELS_OPTIONS, "--steps=2"]
    for warmup, told in ((1, False), (2, True)):
        status, _, err = aft(*train, f"--warmup-steps={warmup}", "--out", str(tmp_path / str(warmup)))
        assert status == 0
        line = "aft: the learning rate never reaches lr, 0.01: it rises for 2 warmup_steps, and steps is 2\n"
        assert (line in err) == told


def test_classifiers_are_evaluated(aft: Command, classifier: str, images: str, tmp_path: Path) -> None:
    last = json.loads(Path(classifier, "metrics.jsonl").read_text().splitlines()[-1])
    expected = f"top-1 {100 * last['top1']:.2f} %, top-5 100.00 %, loss {last['loss']:.4f}"
    assert aft("evaluate", classifier)[1] == f"{expected} over 7 images (the validation part of {images})\n"
    assert aft("evaluate", classifier, "--data", images)[1].startswith(expected)
    assert "over 18 images (the train part" in aft("evaluate", classifier, "--split", "train")[1]
    assert "there is no test part" in aft.line("evaluate", classifier, "--split", "test")
    larger = aft("evaluate", classifier, "--image-size", "12")[1]
    assert "over 7 images" in larger
    assert not larger.startswith(expected)
    some = write_images(tmp_path / "some", {"": 5}, classes=("red",))
    assert "over 5 images" in aft("evaluate", classifier, "--data", some)[1]
    for size in ("3", "10"):
        assert f"image_size is {size}; expected a multiple of the model's patch size, 4" in aft.line(
            "evaluate", classifier, "--image-size", size
        )


@pytest.mark.parametrize("mixer", ["full", "attention"])
def test_learnt_positions_are_resampled_to_another_size(
    aft: Command, images: str, tmp_path: Path, mixer: str
) -> None:
    options = [*CLASSES_OPTIONS, "--mixer", mixer, "--epochs=1", "--bias-rank=2"]
    run = run_of(tmp_path, "classify-digits", "--data", images, *options)
    assert "over 7 images" in aft("evaluate", run, "--image-size", "16")[1]


def test_pixel_models_are_evaluated(aft: Command, pixel_model: str, images: str, tmp_path: Path) -> None:
    last = json.loads(Path(pixel_model, "metrics.jsonl").read_text().splitlines()[-1])
    out = aft("evaluate", pixel_model)[1]
    assert out == f"{last['bpd']:.4f} bits per dim over 1,344 sub-pixels (the validation part of {images})\n"
    loose = tmp_path / "loose"
    loose.mkdir()
    for number in range(3):
        Image.fromarray(picture(number)).save(loose / f"{number}.png")
    assert f"over {3 * 192} sub-pixels ({loose})" in aft("evaluate", pixel_model, "--data", str(loose))[1]
    Image.fromarray(picture(0, (8, 9))).save(loose / "wide.png")
    assert "wide.png is 8 x 9" in aft.line("evaluate", pixel_model, "--data", str(loose))


def test_images_are_classified(aft: Command, classifier: str, images: str) -> None:
    files = [str(path) for path in sorted(Path(images, "val").rglob("*.png"))[:2]]
    status, out, err = aft("classify", classifier, *files, "--top", "2")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0::3] == files
    for line in lines[1:3] + lines[4:6]:
        assert re.fullmatch(r" +[\d.]+ %  (red|green|blue)", line)
    everything = aft("classify", classifier, files[0])[1].splitlines()[1:]
    shares = [float(line.split()[0]) for line in everything]
    assert len(shares) == 3
    assert sum(shares) == pytest.approx(100, abs=0.02)
    assert shares == sorted(shares, reverse=True)
    other = aft("classify", classifier, files[0], "--image-size", "16")[1]
    assert other != aft("classify", classifier, files[0])[1]


def test_images_are_drawn(aft: Command, pixel_model: str, tmp_path: Path) -> None:
    small = ["--count", "3", "--top-k", "5"]
    status, out, err = aft("sample", pixel_model, *small)
    assert status == 0, err
    assert out == f"3 images of 8 x 8 x 3 in {pixel_model}/samples.png\n"
    assert "576/576" in err  # 3 images of 192 sub-pixels
    first = Path(pixel_model, "samples.png").read_bytes()
    a, b = str(tmp_path / "a.png"), str(tmp_path / "b.png")
    aft("sample", pixel_model, *small, "--out", a)
    aft("sample", pixel_model, *small, "--out", b, "--seed", "1")
    assert Path(a).read_bytes() == first != Path(b).read_bytes()
    aft("sample", pixel_model, *small, "--out", b, "--columns", "3")
    with Image.open(a) as two_wide, Image.open(b) as three_wide:
        assert three_wide.size[0] > two_wide.size[0]


def test_images_are_completed(aft: Command, pixel_model: str, images: str, tmp_path: Path) -> None:
    files = [str(path) for path in sorted(Path(images, "val").rglob("*.png"))[:2]]
    out = tmp_path / "completions.png"
    status, said, err = aft("complete", pixel_model, *files, "--keep", "0.75", "--out", str(out))
    assert status == 0, err
    assert said == f"original, masked and completed, a row for each of 2 images, in {out}\n"
    assert "96/96" in err  # 2 images of 2 rows of 24 sub-pixels
    with Image.open(out) as shown, Image.open(files[0]) as original:
        corner = np.array(shown)[2 : 2 + 64, 2 : 2 + 64]
        assert np.array_equal(corner[::8, ::8], np.array(original))
    for keep in ("1", "-0.5", "nan"):
        assert "keep" in aft.line("complete", pixel_model, *files, "--keep", keep)


def test_a_classifier_starts_from_another(aft: Command, classifier: str, images: str, tmp_path: Path) -> None:
    train = ["train", "classify-digits", "--data", images, "--out", str(tmp_path / "run"), *CLASSES_OPTIONS]
    assert "has mixer conv; the recipe has attention: add --mixer conv" in aft.line(
        *train, "--mixer", "attention", "--init-from", classifier
    )
    status, out, _ = aft(*train, "--init-from", classifier, "--lr=1e-30", "--min-lr=0", "--epochs=1")
    assert status == 0
    assert f"from {classifier}" in out
    one, two = (load_model(Path(run)).state_dict() for run in (classifier, str(tmp_path / "run")))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
