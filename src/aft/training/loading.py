"""A model read back from a run directory, checked before it is built: errors name what does not fit."""

import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from aft.models import AFTConfig, AFTForCausalLM
from aft.training.errors import RunError
from aft.training.rundir import CONFIG, WEIGHTS, read_json


def load_model(run: Path) -> AFTForCausalLM:
    """The trained model in a folder of `save_pretrained`, in evaluation mode, on the CPU.

    Raises:
        RunError: not such a folder, a file cut short, or weights of another shape than the configuration's.
    """
    if not run.is_dir():
        raise RunError(
            f"{run} is a file; a run directory was expected"
            if run.exists()
            else f"{run}: no such run directory"
        )
    config = _read_config(run)
    _check_weights(run / WEIGHTS, config)
    model = AFTForCausalLM.from_pretrained(run, config=config, dtype=torch.float32)
    broken = [name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()]
    if broken:
        raise RunError(f"{run / WEIGHTS}: {_few(broken)} hold numbers that are not finite: training diverged")
    return model.eval()


def check_checkpoint(checkpoint: Path) -> None:
    """Raise RunError unless all that resuming reads is there and whole."""
    hint = f"remove {checkpoint} to go on from an older one or to start again"
    states = sorted(checkpoint.glob("rng_state*.pth")) or [checkpoint / "rng_state.pth"]
    for path in (checkpoint / "optimizer.pt", checkpoint / "scheduler.pt", *states):
        # What torch saves is a zip archive, whose directory comes last: one cut short has none.
        if not zipfile.is_zipfile(path):
            raise RunError(f"{path} is {'damaged' if path.exists() else 'missing'}; {hint}")
    try:
        _shapes(checkpoint / WEIGHTS)
        read_json(checkpoint / "trainer_state.json", f"{checkpoint} has no trainer_state.json")
    except RunError as error:
        raise RunError(f"{error}; {hint}") from error


def _read_config(run: Path) -> AFTConfig:
    path = run / CONFIG
    fields = read_json(path, f"{run} is not a run directory with a trained model: it has no {CONFIG}")
    if fields.get("model_type") != AFTConfig.model_type:
        raise RunError(
            f"{path} is of model_type {fields.get('model_type')!r}; {AFTConfig.model_type!r} was expected"
        )
    try:
        return AFTConfig.from_dict(fields)
    except Exception as error:  # whatever a check of the configuration raises, the file is what is wrong
        raise RunError(f"{path} is not a valid configuration: {error}") from error


def _check_weights(path: Path, config: AFTConfig) -> None:
    """Compare the header of the weights file with the shapes that the configuration asks for."""
    with torch.device("meta"):
        model = AFTForCausalLM(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = _shapes(path)
    by_storage = {id(parameter): name for name, parameter in model.named_parameters()}
    aliases = {n for n, p in model.named_parameters(remove_duplicate=False) if by_storage[id(p)] != n}
    missing = sorted(set(expected) - set(found) - aliases)
    if missing:
        raise RunError(f"{path} lacks {_few(missing)}, which {path.parent / CONFIG} asks for")
    unknown = sorted(set(found) - set(expected))
    if unknown:
        raise RunError(f"{path} holds {_few(unknown)}, which {path.parent / CONFIG} does not know")
    for name, shape in found.items():
        if shape != expected[name]:
            raise RunError(
                f"{path}: {name} is {list(shape)}; {path.parent / CONFIG} expects {list(expected[name])}"
            )


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    if not path.is_file():
        raise RunError(f"{path.parent} holds no trained model: it has no {path.name}")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise RunError(
            f"{path} is not a whole safetensors file ({path.stat().st_size:,} bytes): {error}"
        ) from error


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
