"""Training that begins with the weights of another model: whether they fit, and what comes with them."""

import copy
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import load_file
from transformers import PreTrainedModel

from aft.models import AFTConfig, AFTImageConfig
from aft.training.errors import RunError
from aft.training.loading import (
    NAMES,
    Config,
    check_finite,
    check_tensors,
    kind_of,
    other_names,
    read_config,
    tensor_shapes,
)
from aft.training.rundir import WEIGHTS

AnyConfig = TypeVar("AnyConfig", AFTConfig, AFTImageConfig)

_SYMBOLS = 256
_COLOURS = 3


def with_inherited(config: AnyConfig, source: Config) -> AnyConfig:
    """A recipe's configuration with what no recipe sets, but another configuration of its kind has."""
    inherited = copy.deepcopy(config)
    for name in _inherited(config):
        setattr(inherited, name, getattr(source, name))
    return inherited


def config_from(config: AnyConfig, folder: Path) -> tuple[AnyConfig, list[str]]:
    """A recipe's configuration for the weights in `folder`; what it takes over from there, a line.

    Raises:
        RunError: a model of another kind, or one that some field of the recipe would have to change for.
    """
    source = read_config(folder)
    _check_symbols(source, folder)
    if kind_of(source) != kind_of(config):
        raise RunError(f"{folder} holds {NAMES[kind_of(source)]}; {NAMES[kind_of(config)]} was expected")
    _check_fields(source, config, folder)
    if isinstance(source, AFTConfig) and source.alphabet != config.alphabet:
        hint = ": add --alphabet bytes" if source.alphabet is None else ""
        raise RunError(f"{folder} holds a model of another alphabet than that of the data{hint}")
    changed = with_inherited(config, source)
    taken = [
        f"{name} {getattr(changed, name)}"
        for name in _inherited(config)
        if getattr(changed, name) != getattr(config, name)
    ]
    return changed, [f"{folder}: taken over, since no recipe sets it: {', '.join(taken)}"] if taken else []


def initialise_from(model: PreTrainedModel, folder: Path) -> list[str]:
    """Give `model` the weights in a folder of `save_pretrained`; what was not taken, a line each.

    Every tensor has to fit, but for the head of a classifier of other classes (by number, name or order),
    which keeps its initial values.

    Raises:
        RunError: a tensor that is missing, unknown, of another shape, or with numbers that are not finite.
    """
    source, target = read_config(folder), model.config
    path, notes = folder / WEIGHTS, []
    found, expected = tensor_shapes(path), dict(model.state_dict())
    if isinstance(source, AFTImageConfig) and not _same_classes(source, target):
        for name in ("classifier.weight", "classifier.bias"):
            found.pop(name, None)
            expected.pop(name)
        others = "other" if source.num_labels == target.num_labels else source.num_labels
        notes.append(
            f"{folder}: its classifier of {others} classes is left out; "
            f"that of {target.num_labels} starts anew"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    check_tensors(path, found, shapes, other_names(model), f"the recipe's model ({target.mixer})")
    weights = load_file(path)
    check_finite(path, weights)
    model.load_state_dict({name: weights[name] for name in found}, strict=False)
    return notes


def _same_classes(source: AFTImageConfig, target: Any) -> bool:
    """Whether classes are the same in number, name and order; names that were never given are any."""
    unnamed = {i: f"LABEL_{i}" for i in range(target.num_labels)}
    return source.id2label in (target.id2label, unnamed)


def _inherited(config: Config) -> tuple[str, ...]:
    """Fields that make a difference to the weights or what is computed with them, and that no recipe sets."""
    common = ("intermediate_size", "hidden_act", "layer_norm_eps")
    return (*common, "class_token", "position_embedding") if isinstance(config, AFTImageConfig) else common


def _check_symbols(source: Config, folder: Path) -> None:
    """Refuse models of symbols that no data of ours have."""
    if isinstance(source, AFTImageConfig):
        if source.num_channels != _COLOURS:
            raise RunError(
                f"{folder} has num_channels {source.num_channels}; {_COLOURS} was expected: "
                f"classifiers are trained on RGB"
            )
    elif source.alphabet is None and source.vocab_size != _SYMBOLS:
        raise RunError(
            f"{folder} has vocab_size {source.vocab_size}; {_SYMBOLS} was expected: "
            f"models are trained on bytes or sub-pixels"
        )


def _check_fields(source: Config, config: Config, folder: Path) -> None:
    """Name the recipe's fields that differ, and the options that would change them."""
    theirs, ours = _recipe_fields(source, source), _recipe_fields(config, source)
    differing = [name for name, value in theirs.items() if value != ours[name]]
    if not differing:
        return
    options = {name: _options(name, theirs[name], ours[name]) for name in differing}
    fixed = [name for name, option in options.items() if option is None]
    way_out = (
        f"no option of a recipe sets that {fixed[0]}"
        if fixed
        else f"add {' '.join(option for option in options.values() if option)}"
    )
    if source.mixer == "attention" and config.mixer != "attention":
        way_out += ", or convert it first (aft.convert)"
    raise RunError(
        f"{folder} has {', '.join(f'{name} {_shown(theirs[name])}' for name in differing)}; "
        f"the recipe has {', '.join(_shown(ours[name]) for name in differing)}: {way_out}"
    )


def _recipe_fields(config: Config, source: Config) -> dict[str, Any]:
    """What a recipe says of a configuration, as far as it matters to a model like `source`."""
    fields: dict[str, Any] = {
        "mixer": config.mixer,
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
    }
    if source.mixer in ("conv", "attention"):
        fields["num_heads"] = config.num_attention_heads
    if source.mixer == "conv":
        fields["kernel_size"] = config.kernel_size
    if source.mixer == "local":
        fields["window_size"] = config.window_size
    if source.mixer in ("full", "local"):
        fields["bias_rank"] = config.bias_rank
    if isinstance(config, AFTImageConfig):
        assert isinstance(source, AFTImageConfig)
        fields["patch_size"] = config.patch_size
        if source.position_embedding or source.mixer in ("full", "local"):
            size = [config.image_size] * 2 if isinstance(config.image_size, int) else config.image_size
            fields["image_size"] = tuple(size)
    else:
        fields["tie_embeddings"] = config.tie_word_embeddings
        if config.image_shape is None:
            fields["context"] = config.max_position_embeddings
        else:
            fields["image_shape"] = tuple(config.image_shape)
    return fields


def _options(name: str, wanted: Any, present: Any) -> str | None:
    """The options that give a recipe's field another value; None where there are none."""
    if name == "image_size":
        return f"--image-size {wanted[0]}" if wanted[0] == wanted[1] else None
    if name == "image_shape":
        size = "" if wanted[:2] == present[:2] else f"--image-size {wanted[0]}"
        channels = "" if wanted[2] == present[2] else f"--channels {wanted[2]}"
        return " ".join(filter(None, (size, channels))) if not size or wanted[0] == wanted[1] else None
    option = name.replace("_", "-")
    if isinstance(wanted, bool):
        return f"--{option}" if wanted else f"--no-{option}"
    return f"--{option} {wanted}"


def _shown(value: Any) -> str:
    return " x ".join(map(str, value)) if isinstance(value, tuple) else str(value)
