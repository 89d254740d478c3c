"""An AFT model of timm's as one of Transformers': the same parameters under other names."""

import re
from typing import Any

from torch import nn

from aft.integrations.timm_models import AFTVisionTransformer
from aft.layers import AFTConv2d, AFTFull, AFTLocal
from aft.models import AFTForImageClassification, AFTImageConfig

_NAMES = (
    (r"^cls_token$", "model.class_token"),
    (r"^pos_embed$", "model.position_embedding"),
    (r"^patch_embed\.proj\.", "model.patch_embed."),
    (r"^blocks\.(\d+)\.norm1\.", r"model.layers.\1.mixer_norm."),
    (r"^blocks\.(\d+)\.attn\.mixer\.", r"model.layers.\1.mixer."),
    (r"^blocks\.(\d+)\.norm2\.", r"model.layers.\1.mlp_norm."),
    (r"^blocks\.(\d+)\.mlp\.fc1\.", r"model.layers.\1.mlp_in."),
    (r"^blocks\.(\d+)\.mlp\.fc2\.", r"model.layers.\1.mlp_out."),
    (r"^norm\.", "model.norm."),
    (r"^head\.", "classifier."),
)


def to_transformers(model: AFTVisionTransformer, **config: Any) -> AFTForImageClassification:
    """See `AFTVisionTransformer.to_transformers`."""
    pooling = "token" if model.has_class_token else "avg"
    if model.global_pool != pooling:
        raise ValueError(f"to_transformers: global_pool must be {pooling!r}, got {model.global_pool!r}")
    if not isinstance(model.head, nn.Linear):
        raise ValueError("to_transformers: the model has no classifier (num_classes is 0)")
    first: Any = model.blocks[0]
    layer: Any = first.attn.mixer
    if not isinstance(first.mlp.act, nn.GELU):
        raise ValueError(f"to_transformers: the MLP must be GELU's, got {type(first.mlp.act).__name__}")
    rows, columns = model.patch_embed.patch_size
    if rows != columns:
        raise ValueError(f"to_transformers: patches must be square, got {rows} x {columns}")
    fields: dict[str, Any] = {
        "image_size": list(model.patch_embed.img_size),
        "patch_size": rows,
        "num_channels": model.patch_embed.proj.in_channels,
        "hidden_size": model.embed_dim,
        "num_hidden_layers": len(model.blocks),
        "intermediate_size": first.mlp.fc1.out_features,
        "mixer": model.mixer_name,
        "class_token": model.has_class_token,
        "position_embedding": model.pos_embed is not None,
        "layer_norm_eps": first.norm1.eps,
        "num_labels": model.head.out_features,
    }
    if isinstance(layer, AFTConv2d):
        if layer.kernel_size[0] != layer.kernel_size[1] or not layer.reparameterize:
            raise ValueError("to_transformers: kernels must be square and re-parameterised (equation 8)")
        fields |= {"num_attention_heads": layer.num_heads, "kernel_size": layer.kernel_size[0]}
    if isinstance(layer, AFTFull):
        fields |= {"bias_rank": layer.bias_rank}
    if isinstance(layer, AFTLocal):
        fields |= {"window_size": layer.window_size}
    if "id2label" in config:
        del fields["num_labels"]
    converted = AFTForImageClassification(AFTImageConfig(**fields | config))
    found = {_renamed(name): tensor for name, tensor in model.state_dict().items()}
    expected = converted.state_dict()
    for name in found.keys() ^ expected.keys():
        side = "has" if name in found else "lacks"
        raise ValueError(f"to_transformers: the model {side} {name}, unlike AFTForImageClassification")
    converted.load_state_dict({name: found[name].view_as(expected[name]) for name in expected})
    first_weight = model.patch_embed.proj.weight
    moved: Any = converted
    moved.to(device=first_weight.device, dtype=first_weight.dtype).train(model.training)
    return converted


def _renamed(name: str) -> str:
    for pattern, replacement in _NAMES:
        new = re.sub(pattern, replacement, name)
        if new != name:
            return new
    return name
