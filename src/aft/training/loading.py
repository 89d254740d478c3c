"""A model read back from a run directory, checked before it is built: errors name what does not fit."""

import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel

from aft.models import AFTConfig, AFTForCausalLM, AFTForImageClassification, AFTImageConfig
from aft.training.errors import RunError
from aft.training.rundir import CONFIG, WEIGHTS, read_json

Config = AFTConfig | AFTImageConfig

_MODELS: dict[type[Config], type[PreTrainedModel]] = {
    AFTConfig: AFTForCausalLM,
    AFTImageConfig: AFTForImageClassification,
}
_CONFIGS = {config.model_type: config for config in _MODELS}
NAMES = {
    "bytes": "a language model over bytes",
    "pixels": "a model of pixels",
    "classes": "an image classifier",
}


def load_model(run: Path, kind: str | None = None) -> PreTrainedModel:
    """The trained model in a folder of `save_pretrained`, in evaluation mode, on the CPU.

    Args:
        kind: what it has to be, one of `NAMES`; None takes any.

    Raises:
        RunError: not such a folder, a model of another kind, a file cut short, or weights of another shape
            than the configuration's.
    """
    config = read_config(run)
    if kind not in (None, kind_of(config)):
        raise RunError(f"{run} holds {NAMES[kind_of(config)]}; {NAMES[str(kind)]} was expected")
    _check_weights(run / WEIGHTS, config)
    model = _MODELS[type(config)].from_pretrained(run, config=config, dtype=torch.float32)
    check_finite(run / WEIGHTS, model.state_dict())
    return model.eval()


def check_finite(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Raise RunError where numbers are not finite."""
    broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise RunError(f"{path}: {_few(broken)} hold numbers that are not finite: training diverged")


def kind_of(config: PreTrainedConfig) -> str:
    """Which kind of recipe and task a model of ours belongs to."""
    if isinstance(config, AFTImageConfig):
        return "classes"
    assert isinstance(config, AFTConfig)
    return "bytes" if config.image_shape is None else "pixels"


def read_config(run: Path) -> Config:
    """The configuration in a folder of `save_pretrained`, or a RunError."""
    path = _folder(run) / CONFIG
    fields = read_json(path, f"{run} is not a run directory with a trained model: it has no {CONFIG}")
    model_type = fields.get("model_type")
    if model_type not in _CONFIGS:
        raise RunError(
            f"{path} is of model_type {model_type!r}; {' or '.join(map(repr, _CONFIGS))} was expected"
        )
    try:
        return _CONFIGS[model_type].from_dict(fields)
    except Exception as error:  # whatever a check of the configuration raises, the file is what is wrong
        raise RunError(f"{path} is not a valid configuration: {error}") from error


def check_checkpoint(checkpoint: Path) -> None:
    """Raise RunError unless all that resuming reads is there and whole."""
    hint = f"remove {checkpoint} to go on from an older one or to start again"
    states = sorted(checkpoint.glob("rng_state*.pth")) or [checkpoint / "rng_state.pth"]
    for path in (checkpoint / "optimizer.pt", checkpoint / "scheduler.pt", *states):
        # What torch saves is a zip archive, whose directory comes last: one cut short has none.
        if not zipfile.is_zipfile(path):
            raise RunError(f"{path} is {'damaged' if path.exists() else 'missing'}; {hint}")
    try:
        read_config(checkpoint)
        tensor_shapes(checkpoint / WEIGHTS)
        read_json(checkpoint / "trainer_state.json", f"{checkpoint} has no trainer_state.json")
    except RunError as error:
        raise RunError(f"{error}; {hint}") from error


def other_names(model: PreTrainedModel) -> set[str]:
    """Second names of shared parameters, which the file has once."""
    by_storage = {id(parameter): name for name, parameter in model.named_parameters()}
    return {n for n, p in model.named_parameters(remove_duplicate=False) if by_storage[id(p)] != n}


def check_tensors(
    path: Path,
    found: dict[str, tuple[int, ...]],
    expected: dict[str, tuple[int, ...]],
    aliases: set[str],
    who: str,
) -> None:
    """Raise RunError unless the tensors found are those that `who` expects."""
    missing = sorted(set(expected) - set(found) - aliases)
    if missing:
        raise RunError(f"{path} lacks {_few(missing)}, which {who} asks for")
    unknown = sorted(set(found) - set(expected))
    if unknown:
        raise RunError(f"{path} holds {_few(unknown)}, which {who} does not know")
    for name, shape in found.items():
        if shape != expected[name]:
            raise RunError(f"{path}: {name} is {list(shape)}; {who} expects {list(expected[name])}")


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in a safetensors file, from its header, or a RunError."""
    if not path.is_file():
        raise RunError(f"{path.parent} holds no trained model: it has no {path.name}")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise RunError(
            f"{path} is not a whole safetensors file ({path.stat().st_size:,} bytes): {error}"
        ) from error


def _folder(run: Path) -> Path:
    if not run.is_dir():
        raise RunError(
            f"{run} is a file; a run directory was expected"
            if run.exists()
            else f"{run}: no such run directory"
        )
    return run


def _check_weights(path: Path, config: Config) -> None:
    """Compare the header of the weights file with the shapes that the configuration asks for."""
    with torch.device("meta"):
        model = _MODELS[type(config)](config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    check_tensors(path, tensor_shapes(path), expected, other_names(model), str(path.parent / CONFIG))


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
