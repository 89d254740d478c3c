"""timm's ViT and DeiT with AFT as their attention."""

import copy
from typing import Any

from timm.layers import Attention, Format, PatchDropout, PatchEmbed, to_2tuple, trunc_normal_
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, ResPostBlock, VisionTransformer
from torch import nn

from aft.integrations.conversion_report import ConversionReport, Part, Transfer
from aft.integrations.timm_attention import AFTAttention
from aft.integrations.timm_models import AFTVisionTransformer

QUERY_AND_KEY = "query and key projections"
TOKENS = ("cls_token", "reg_token", "pos_embed")


def convert_vit(
    model: VisionTransformer,
    mixer: str,
    *,
    num_heads: int | None = None,
    kernel_size: int | tuple[int, int] = 11,
    window_size: int = 32,
    bias_rank: int | None = 128,
    reparameterize: bool = True,
    image_size: int | tuple[int, int] | None = None,
) -> tuple[VisionTransformer, ConversionReport]:
    """See `aft.integrations.convert.convert`.

    The final LayerNorm stays where it is: with "conv" and class token pooling it comes before the mean that
    takes the token's place. Query and key projections start as timm's ViT starts its linear layers.
    """
    _check(model, mixer)
    converted: Any = copy.deepcopy(model)
    if image_size is not None:
        converted.set_input_size(to_2tuple(image_size))
    notes = _drop_tokens(converted) if mixer == "conv" else []
    notes += _drop_patch_dropout(converted, mixer)
    for block in converted.blocks:
        attention = block.attn
        weight = attention.proj.weight
        if attention.attn_drop.p and block is converted.blocks[0]:
            notes.append(f"dropped: dropout {attention.attn_drop.p} of attention weights")
        block.attn = AFTAttention(
            weight.shape[0],
            attention.num_heads if num_heads is None else num_heads,
            qkv_bias=attention.qkv.bias is not None,
            proj_bias=attention.proj.bias is not None,
            proj_drop=attention.proj_drop.p,
            mixer=mixer,
            grid_size=converted.patch_embed.grid_size,
            num_prefix_tokens=converted.num_prefix_tokens,
            kernel_size=kernel_size,
            window_size=window_size,
            bias_rank=bias_rank,
            reparameterize=reparameterize,
            device=weight.device,
            dtype=weight.dtype,
        )
        for name in ("q_proj", "k_proj"):
            trunc_normal_(block.attn.mixer.get_submodule(name).weight, std=0.02)
    if type(model) is VisionTransformer:
        # The same module, which now also knows how AFT goes from one image size to another.
        converted.mixer_name = mixer
        converted.__class__ = AFTVisionTransformer
    return converted, _transfer(model, converted, mixer, notes)


def _transfer(model: VisionTransformer, converted: Any, mixer: str, notes: list[str]) -> ConversionReport:
    transfer = Transfer(model, converted)
    D = model.embed_dim
    for i in range(len(model.blocks)):
        source, target = f"blocks.{i}.attn", f"blocks.{i}.attn.mixer"
        for tensor in ("weight", "bias"):
            if transfer.has(f"{source}.qkv.{tensor}"):
                transfer.drop(f"{source}.qkv.{tensor}", part=Part(0, 2 * D), why=QUERY_AND_KEY)
                part = Part(2 * D, 3 * D)
                transfer.copy(f"{source}.qkv.{tensor}", f"{target}.v_proj.{tensor}", part=part)
            if transfer.has(f"{source}.proj.{tensor}"):
                transfer.copy(f"{source}.proj.{tensor}", f"{target}.out_proj.{tensor}")
            for norm in ("q_norm", "k_norm"):
                if transfer.has(f"{source}.{norm}.{tensor}"):
                    transfer.drop(f"{source}.{norm}.{tensor}", why="normalises queries and keys")
    if mixer == "conv":
        for token in TOKENS:
            if transfer.has(token):
                transfer.drop(token, why="mixer 'conv' has none")
    elif model.pos_embed is not None and converted.patch_embed.grid_size != model.patch_embed.grid_size:
        resampled = converted.pos_embed.detach().clone()
        old, new = model.patch_embed.grid_size, converted.patch_embed.grid_size
        why = f"{old[0]} x {old[1]} patches to {new[0]} x {new[1]}"
        transfer.resample("pos_embed", "pos_embed", lambda _: resampled, why)
    transfer.same_names()
    return transfer.report(notes)


def _check(model: VisionTransformer, mixer: str) -> None:
    """Raises, by name, where the model is not what can be converted."""
    if isinstance(model, AFTVisionTransformer):
        raise ValueError("convert: AFTVisionTransformer has AFT in it already")
    if type(model) not in (VisionTransformer, VisionTransformerDistilled):
        raise TypeError(
            "convert: of timm's models VisionTransformer and VisionTransformerDistilled are converted; "
            f"got {type(model).__name__}"
        )
    if mixer == "conv" and isinstance(model, VisionTransformerDistilled):
        raise ValueError(
            "convert: VisionTransformerDistilled classifies two tokens, which mixer 'conv' has not; choose "
            "mixer 'full', 'simple' or 'local', or convert the model without distillation"
        )
    if mixer in ("full", "local") and model.dynamic_img_size:
        raise ValueError(
            f"convert: dynamic_img_size must be False, mixer {mixer!r} has position biases for one grid"
        )
    if mixer == "conv" and model.global_pool == "prr" and model.has_class_token:
        raise ValueError("convert: global_pool 'prr' pools with the class token, which mixer 'conv' has not")
    blocks: Any = model.blocks
    for block in blocks:
        if type(block) not in (Block, ResPostBlock):
            raise ValueError(
                f"convert: blocks must be timm's Block or ResPostBlock, got {type(block).__name__}"
            )
        attention = block.attn
        if type(attention) is not Attention:
            raise ValueError(f"convert: attn must be timm's Attention, got {type(attention).__name__}")
        if attention.gate is not None:
            raise ValueError("convert: attn is gated, which AFT's own gate does not stand for")
        if not isinstance(attention.norm, nn.Identity):
            raise ValueError(
                "convert: attn has scale_norm, a norm before its output projection; AFT has none"
            )
        if attention.proj.weight.shape != (model.embed_dim, attention.attn_dim) or (
            attention.attn_dim != model.embed_dim
        ):
            raise ValueError(
                f"convert: attn must have embed_dim = {model.embed_dim} channels, got {attention.attn_dim}"
            )


def _drop_tokens(model: Any) -> list[str]:
    """Leaves a ViT without class token, registers and position embedding, and open to any image size."""
    notes = []
    if model.global_pool == "token":
        model.global_pool = "avg"
        notes.append("pooling: the mean over patches, after the final LayerNorm, instead of the class token")
    model.cls_token = model.reg_token = model.pos_embed = None
    model.has_class_token = False
    model.num_prefix_tokens = model.num_reg_tokens = 0
    if type(model.patch_embed) is PatchEmbed:
        model.dynamic_img_size = True
        model.patch_embed.strict_img_size = model.patch_embed.flatten = False
        model.patch_embed.output_fmt = Format.NHWC
    return notes


def _drop_patch_dropout(model: Any, mixer: str) -> list[str]:
    if mixer == "simple" or not isinstance(model.patch_drop, PatchDropout):
        return []
    notes = [f"dropped: patch dropout {model.patch_drop.prob}, every patch is needed in its place"]
    model.patch_drop = nn.Identity()
    return notes
