"""Transformers' ViT and GPT-2, and our own attention baselines, as models of `aft.models`."""

from collections.abc import Callable
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, PreTrainedModel, ViTForImageClassification

from aft.integrations.conversion_report import ConversionReport, Part, Transfer
from aft.layers.resampling import resample_positions
from aft.models import AFTConfig, AFTForCausalLM, AFTForImageClassification, AFTImageConfig

AS_IN_THE_MODEL: Any = object()  # an option left out; None is a dense table
QUERY_AND_KEY = "query and key projections"


def convert_vit(
    model: ViTForImageClassification,
    mixer: str,
    *,
    num_heads: int | None = None,
    kernel_size: int = 11,
    window_size: int = 32,
    bias_rank: int | None = 128,
    image_size: int | tuple[int, int] | None = None,
) -> tuple[AFTForImageClassification, ConversionReport]:
    """See `aft.integrations.convert.convert`."""
    old = model.config
    if not isinstance(model.classifier, nn.Linear):
        raise ValueError("convert: ViTForImageClassification has no classifier (num_labels is 0)")
    patch_size, patch_width = _height_and_width(old.patch_size)
    if patch_size != patch_width:
        raise ValueError(f"convert: patches must be square, got patch_size={old.patch_size}")
    config = _config(
        AFTImageConfig,
        image_size=_pixels(old.image_size if image_size is None else image_size),
        patch_size=patch_size,
        num_channels=old.num_channels,
        hidden_size=old.hidden_size,
        num_hidden_layers=old.num_hidden_layers,
        intermediate_size=old.intermediate_size,
        mixer=mixer,
        num_attention_heads=old.num_attention_heads if num_heads is None else num_heads,
        kernel_size=kernel_size,
        window_size=window_size,
        bias_rank=bias_rank,
        dropout=old.hidden_dropout_prob,
        hidden_act=old.hidden_act,
        layer_norm_eps=old.layer_norm_eps,
        initializer_range=old.initializer_range,
        id2label=old.id2label,
        label2id=old.label2id,
    )
    converted = _like(model, AFTForImageClassification(config))
    transfer = Transfer(model, converted)
    embeddings = "vit.embeddings"
    for tensor in ("weight", "bias"):
        transfer.copy(f"{embeddings}.patch_embeddings.projection.{tensor}", f"model.patch_embed.{tensor}")
    height, width = _height_and_width(old.image_size)
    old_grid = (height // patch_size, width // patch_size)
    _transfer_tokens(
        transfer,
        config,
        f"{embeddings}.cls_token",
        f"{embeddings}.position_embeddings",
        old_grid,
    )
    norms = {"layernorm_before": "mixer_norm", "layernorm_after": "mlp_norm"}
    linear = {"mlp.fc1": "mlp_in", "mlp.fc2": "mlp_out", "attention.o_proj": "mixer.out_proj"}
    for layer in range(config.num_hidden_layers):
        source, target = f"vit.layers.{layer}", f"model.layers.{layer}"
        _transfer_modules(transfer, source, target, {**norms, **linear, "attention.v_proj": "mixer.v_proj"})
        for projection in ("q_proj", "k_proj"):
            _drop_module(transfer, f"{source}.attention.{projection}")
    _transfer_modules(transfer, "vit", "model", {"layernorm": "norm"})
    _transfer_modules(transfer, "", "", {"classifier": "classifier"})
    transfer.same_names()
    return converted, transfer.report(_attention_dropout(old.attention_probs_dropout_prob))


def convert_gpt2(
    model: GPT2LMHeadModel,
    mixer: str,
    *,
    num_heads: int | None = None,
    kernel_size: int = 32,
    window_size: int = 32,
    bias_rank: int | None = None,
) -> tuple[AFTForCausalLM, ConversionReport]:
    """See `aft.integrations.convert.convert`; GPT-2's linear layers are stored transposed."""
    old = model.config
    if old.add_cross_attention:
        raise ValueError("convert: add_cross_attention must be False, AFTForCausalLM attends to itself alone")
    config = _config(
        AFTConfig,
        vocab_size=old.vocab_size,
        hidden_size=old.n_embd,
        num_hidden_layers=old.n_layer,
        intermediate_size=old.n_inner,
        max_position_embeddings=old.n_positions,
        mixer=mixer,
        num_attention_heads=old.n_head if num_heads is None else num_heads,
        window_size=window_size,
        kernel_size=kernel_size,
        bias_rank=bias_rank,
        dropout=old.resid_pdrop,
        hidden_act=old.activation_function,
        layer_norm_eps=old.layer_norm_epsilon,
        initializer_range=old.initializer_range,
        tie_word_embeddings=old.tie_word_embeddings,
        bos_token_id=old.bos_token_id,
        eos_token_id=old.eos_token_id,
        pad_token_id=old.pad_token_id,
    )
    converted = _like(model, AFTForCausalLM(config))
    transfer = Transfer(model, converted)
    transfer.copy("transformer.wte.weight", "model.embed_tokens.weight")
    transfer.copy("transformer.wpe.weight", "model.embed_positions.weight")
    D = config.hidden_size
    for layer in range(config.num_hidden_layers):
        source, target = f"transformer.h.{layer}", f"model.layers.{layer}"
        _transfer_modules(transfer, source, target, {"ln_1": "mixer_norm", "ln_2": "mlp_norm"})
        linear = {"attn.c_proj": "mixer.out_proj", "mlp.c_fc": "mlp_in", "mlp.c_proj": "mlp_out"}
        _transfer_modules(transfer, source, target, linear, change=_transposed, why="transposed")
        fused, value = f"{source}.attn.c_attn", f"{target}.mixer.v_proj"
        transfer.drop(f"{fused}.weight", part=Part(0, 2 * D, dim=1), why=QUERY_AND_KEY)
        transfer.drop(f"{fused}.bias", part=Part(0, 2 * D), why=QUERY_AND_KEY)
        columns = Part(2 * D, 3 * D, dim=1)
        transfer.copy(
            f"{fused}.weight", f"{value}.weight", part=columns, change=_transposed, why="transposed"
        )
        transfer.copy(f"{fused}.bias", f"{value}.bias", part=Part(2 * D, 3 * D))
    _transfer_modules(transfer, "transformer", "model", {"ln_f": "norm"})
    if not config.tie_word_embeddings:
        transfer.copy("lm_head.weight", "lm_head.weight")
    transfer.same_names()
    notes = _attention_dropout(old.attn_pdrop)
    if old.embd_pdrop != old.resid_pdrop:
        notes.append(f"dropout of embeddings is {old.resid_pdrop} as elsewhere, it was {old.embd_pdrop}")
    return converted, transfer.report(notes)


def convert_image_baseline(
    model: AFTForImageClassification,
    mixer: str,
    *,
    num_heads: int = AS_IN_THE_MODEL,
    kernel_size: int = AS_IN_THE_MODEL,
    window_size: int = AS_IN_THE_MODEL,
    bias_rank: int | None = AS_IN_THE_MODEL,
    image_size: int | tuple[int, int] | None = None,
) -> tuple[AFTForImageClassification, ConversionReport]:
    """See `aft.integrations.convert.convert`; options that are left out are those of the model."""
    options: dict[str, Any] = {"kernel_size": kernel_size, "window_size": window_size, "bias_rank": bias_rank}
    options["image_size"] = AS_IN_THE_MODEL if image_size is None else _pixels(image_size)
    if mixer == "conv":
        options.update(class_token=False, position_embedding=False)
    config = _reconfigured(model, mixer, num_attention_heads=num_heads, **options)
    converted = _like(model, AFTForImageClassification(config))
    transfer = Transfer(model, converted)
    _transfer_tokens(transfer, config, "model.class_token", "model.position_embedding", model.config.grid)
    _drop_queries_and_keys(transfer, config.num_hidden_layers)
    return converted, transfer.report()


def convert_causal_baseline(
    model: AFTForCausalLM,
    mixer: str,
    *,
    num_heads: int = AS_IN_THE_MODEL,
    kernel_size: int = AS_IN_THE_MODEL,
    window_size: int = AS_IN_THE_MODEL,
    bias_rank: int | None = AS_IN_THE_MODEL,
) -> tuple[AFTForCausalLM, ConversionReport]:
    """See `aft.integrations.convert.convert`; options that are left out are those of the model."""
    options = {"kernel_size": kernel_size, "window_size": window_size, "bias_rank": bias_rank}
    config = _reconfigured(model, mixer, num_attention_heads=num_heads, **options)
    converted = _like(model, AFTForCausalLM(config))
    transfer = Transfer(model, converted)
    _drop_queries_and_keys(transfer, config.num_hidden_layers)
    return converted, transfer.report()


CONVERTERS: dict[type[PreTrainedModel], Callable[..., tuple[nn.Module, ConversionReport]]] = {
    ViTForImageClassification: convert_vit,
    GPT2LMHeadModel: convert_gpt2,
    AFTForImageClassification: convert_image_baseline,
    AFTForCausalLM: convert_causal_baseline,
}


def _reconfigured(model: Any, mixer: str, **changes: Any) -> Any:
    """The configuration of an attention baseline with another mixer, and with what was asked for."""
    if model.config.mixer != "attention":
        raise ValueError(
            f"convert: the mixer of {type(model).__name__} must be 'attention', got {model.config.mixer!r}"
        )
    fields = model.config.to_dict()
    asked_for = {name: value for name, value in changes.items() if value is not AS_IN_THE_MODEL}
    fields.update(asked_for, mixer=mixer)
    return _config(type(model.config), **fields)


def _config(kind: type, **fields: Any) -> Any:
    """The configuration; what it refuses in several lines is raised in one."""
    try:
        return kind(**fields)
    except StrictDataclassError as error:
        raise ValueError(f"convert: {error.__cause__ or error}") from error


def _like(model: PreTrainedModel, converted: Any) -> Any:
    """The converted model in the dtype and on the device of the original."""
    return converted.to(device=model.device, dtype=model.dtype)


def _drop_queries_and_keys(transfer: Transfer, layers: int) -> None:
    """Of an attention baseline, whose names are those of the result; all else is copied."""
    for layer in range(layers):
        for projection in ("q_proj", "k_proj"):
            for tensor in ("weight", "bias"):
                name = f"model.layers.{layer}.mixer.{projection}.{tensor}"
                transfer.drop(name, why=QUERY_AND_KEY)
                transfer.new(name, why=QUERY_AND_KEY)
    transfer.same_names()


def _transfer_tokens(
    transfer: Transfer, config: AFTImageConfig, class_token: str, positions: str, old_grid: tuple[int, int]
) -> None:
    """Class token and position embedding, [(1,) T, D], where the source has them."""
    for name, target, kept in (
        (class_token, "model.class_token", config.class_token),
        (positions, "model.position_embedding", config.position_embedding),
    ):
        if not transfer.has(name):
            continue
        if not kept:
            transfer.drop(name, why=f"mixer {config.mixer!r} has none")
        elif name == class_token or old_grid == config.grid:
            transfer.copy(name, target, change=_two_dimensional)
        else:
            prefix = int(bool(config.class_token))
            transfer.resample(
                name,
                target,
                lambda table, prefix=prefix: resample_positions(
                    _two_dimensional(table), old_grid, config.grid, prefix
                ),
                f"{old_grid[0]} x {old_grid[1]} patches to {config.grid[0]} x {config.grid[1]}",
            )


def _transfer_modules(
    transfer: Transfer,
    source: str,
    target: str,
    modules: dict[str, str],
    change: Callable[[Tensor], Tensor] | None = None,
    why: str = "",
) -> None:
    """Weights and biases of modules, by their names below the prefixes ``source`` and ``target``."""
    for old, new in modules.items():
        old, new = f"{source}.{old}".lstrip("."), f"{target}.{new}".lstrip(".")
        transfer.copy(f"{old}.weight", f"{new}.weight", change=change, why=why)
        if transfer.has(f"{old}.bias"):
            transfer.copy(f"{old}.bias", f"{new}.bias")
        else:
            transfer.new(f"{new}.bias", why="zero: there was none")


def _drop_module(transfer: Transfer, name: str) -> None:
    for tensor in ("weight", "bias"):
        if transfer.has(f"{name}.{tensor}"):
            transfer.drop(f"{name}.{tensor}", why=QUERY_AND_KEY)


def _transposed(x: Tensor) -> Tensor:
    return x.T if x.ndim == 2 else x


def _two_dimensional(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def _attention_dropout(p: float) -> list[str]:
    return [f"dropped: dropout {p} of attention weights"] if p else []


def _height_and_width(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _pixels(size: Any) -> int | list[int]:
    return size if isinstance(size, int) else list(size)
