"""The paper's image models in timm's registry, built on timm's own VisionTransformer."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._input import get_pretrained_grid_size
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn as vit_checkpoint_filter_fn
from torch import Tensor

from aft.integrations.mixers import check_mixer
from aft.integrations.timm_attention import AFTAttention, aft_attention
from aft.layers.resampling import resample_positions

if TYPE_CHECKING:
    from aft.models import AFTForImageClassification


class AFTVisionTransformer(VisionTransformer):
    """timm's VisionTransformer around an AFT mixer; with "conv" its blocks work on grids [B, Y, X, D].

    The defaults are the paper's for the mixer. "conv": no class token, no position embedding, average pooling
    after the final LayerNorm (as `aft.models.AFTForImageClassification`), and images of any size whose sides
    are multiples of the patch (``dynamic_img_pad=True`` pads others). The other mixers: class token and
    position embedding; another image size through ``img_size`` or ``set_input_size``, which resample position
    embedding and position bias ("local" refuses, see `aft.layers.resampling`).

    Args:
        img_size, patch_size: in pixels.
        mixer, kernel_size, window_size, bias_rank, reparameterize, impl: see `AFTAttention`.
        **options: keyword arguments of timm's VisionTransformer.

    Raises:
        ValueError: class or register tokens with "conv"; ``patch_drop_rate`` and ``dynamic_img_size`` with
            a mixer that has learnt positions.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        *,
        mixer: str = "conv",
        kernel_size: int | tuple[int, int] = 11,
        window_size: int = 32,
        bias_rank: int | None = 128,
        reparameterize: bool = True,
        impl: str = "auto",
        **options: Any,
    ):
        check_mixer("AFTVisionTransformer", mixer)
        conv = mixer == "conv"
        paper = {
            "class_token": not conv,
            "pos_embed": "none" if conv else "learn",
            "global_pool": "avg" if conv else "token",
            "dynamic_img_size": conv,
        }
        options = {**paper, **options}
        options.setdefault("fc_norm", False if conv else None)
        prefix = int(options["class_token"]) + options.get("reg_tokens", 0)
        _check_options(mixer, prefix, options)
        height, width = to_2tuple(img_size)
        rows, columns = to_2tuple(patch_size)
        options["attn_layer"] = aft_attention(
            mixer,
            grid_size=(height // rows, width // columns),
            num_prefix_tokens=prefix,
            kernel_size=kernel_size,
            window_size=window_size,
            bias_rank=bias_rank,
            reparameterize=reparameterize,
            impl=impl,
        )
        self.mixer_name = mixer
        super().__init__(img_size, patch_size, **options)

    def set_input_size(
        self, img_size: tuple[int, int] | None = None, patch_size: tuple[int, int] | None = None
    ) -> None:
        """Another image or patch size: position embedding and position bias are resampled."""
        if self.mixer_name == "local":  # before anything has changed
            rows, columns = to_2tuple(patch_size or self.patch_embed.patch_size)
            height, width = to_2tuple(img_size or self.patch_embed.img_size)
            next(self._attentions()).set_grid_size((height // rows, width // columns))
        super().set_input_size(None if img_size is None else to_2tuple(img_size), patch_size)
        for attention in self._attentions():
            attention.set_grid_size(self.patch_embed.grid_size)

    def to_transformers(self, **config: Any) -> "AFTForImageClassification":
        """The same model as one of `aft.models`, with ``save_pretrained``; ``config``: id2label, say.

        Raises:
            ValueError: what that has not, by name: layer scale, register tokens, another pooling, …
        """
        from aft.integrations.timm_native import to_transformers

        return to_transformers(self, **config)

    def _attentions(self) -> Iterator[AFTAttention]:
        return (module for module in self.modules() if isinstance(module, AFTAttention))

    def no_weight_decay(self) -> set[str]:
        """As the paper, which decays linear weights alone: no position bias, no kernel."""
        learnt_positions = ("position_bias", "position_bias_u", "position_bias_v", "kernel")
        biases = {name for name, _ in self.named_parameters() if name.endswith(learnt_positions)}
        return super().no_weight_decay() | biases

    def _pos_embed(self, x: Tensor) -> Tensor:
        if self.mixer_name != "conv":
            return super()._pos_embed(x)
        rows, columns = x.shape[1:3] if self.dynamic_img_size else self.patch_embed.grid_size
        return super()._pos_embed(x).unflatten(1, (rows, columns))

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Images [B, C, H, W] to normalised tokens [B, N, D]."""
        x = super().forward_features(x, attn_mask, is_causal)
        return x.flatten(1, 2) if self.mixer_name == "conv" else x

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        """timm's, with the same arguments and results."""
        result: Any = super().forward_intermediates(
            x,
            indices,
            return_prefix_tokens=return_prefix_tokens,
            norm=norm,
            stop_early=stop_early,
            output_fmt=output_fmt,
            intermediates_only=intermediates_only,
            output_dict=output_dict,
            attn_mask=attn_mask,
            is_causal=is_causal,
        )
        if self.mixer_name != "conv":
            return result

        def formatted(intermediates: list[Tensor]) -> list[Tensor]:
            return intermediates if output_fmt == "NCHW" else [y.flatten(1, 2) for y in intermediates]

        if output_dict:
            result["image_intermediates"] = formatted(result["image_intermediates"])
            if not intermediates_only:
                result["image_features"] = result["image_features"].flatten(1, 2)
            return result
        if intermediates_only:
            return formatted(result)
        return result[0].flatten(1, 2), formatted(result[1])


def _check_options(mixer: str, prefix: int, options: dict[str, Any]) -> None:
    if mixer == "conv" and prefix:
        raise ValueError(
            "AFTVisionTransformer: mixer 'conv' takes neither class_token nor reg_tokens, which have no "
            f"place in the grid; got class_token={options['class_token']}, "
            f"reg_tokens={options.get('reg_tokens', 0)}"
        )
    if mixer != "simple" and options.get("patch_drop_rate"):
        raise ValueError(
            f"AFTVisionTransformer: mixer {mixer!r} needs every patch in its place, got "
            f"patch_drop_rate={options['patch_drop_rate']}"
        )
    if mixer in ("full", "local") and options["dynamic_img_size"]:
        raise ValueError(
            f"AFTVisionTransformer: mixer {mixer!r} has position biases for one grid, got "
            "dynamic_img_size=True; img_size and set_input_size take it to another"
        )


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: AFTVisionTransformer) -> dict[str, Tensor]:
    """timm's filter for ViT checkpoints, and position biases resampled to the model's grid."""
    state_dict = vit_checkpoint_filter_fn(state_dict, model)
    new, prefix = model.patch_embed.grid_size, model.num_prefix_tokens
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    patches = state_dict.get("patch_embed.proj.weight")
    for name, bias in state_dict.items():
        if ".position_bias" not in name or name not in shapes:
            continue
        cells = len(bias) - prefix
        old = get_pretrained_grid_size(model, patches, cells)
        old = old or (new if bias.shape == shapes[name] else _square(name, cells))
        if old == new:
            continue
        if model.mixer_name == "local":
            raise ValueError(
                f"{name} is over {old[0]} x {old[1]} patches: AFT-local's bias is for one grid only"
            )
        resampled = resample_positions(bias, old, new, prefix)
        if name.endswith(".position_bias"):  # a table, both of whose sides are positions
            resampled = resample_positions(resampled.T, old, new, prefix).T.contiguous()
        state_dict[name] = resampled
    return state_dict


def _square(name: str, cells: int) -> tuple[int, int]:
    side = round(cells**0.5)
    if side * side != cells:
        raise ValueError(
            f"{name} is of {cells} patches, which are no square, and the checkpoint names no size"
        )
    return side, side


def _cfg(**fields: Any) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
        "paper_ids": "arXiv:2105.14103",
        "paper_name": "An Attention Free Transformer",
        **fields,
    }


_ANY_SIZE = {"fixed_input_size": False}

default_cfgs = generate_default_cfgs(
    {
        "aft_full_tiny_patch16_224": _cfg(),
        "aft_full_small_patch16_224": _cfg(),
        "aft_conv_tiny_k11_h32_patch16_224": _cfg(**_ANY_SIZE),
        "aft_conv_tiny_k11_h192_patch16_224": _cfg(**_ANY_SIZE),
        "aft_conv_small_k11_h16_patch16_224": _cfg(**_ANY_SIZE),
        "aft_conv_small_k11_h384_patch16_224": _cfg(**_ANY_SIZE),
        "aft_conv_small_k15_h384_patch16_224": _cfg(**_ANY_SIZE),
        "aft_conv_base_k25_h32_patch16_384": _cfg(input_size=(3, 384, 384), crop_pct=1.0, **_ANY_SIZE),
    }
)

_TINY = {"embed_dim": 192, "depth": 12}
_SMALL = {"embed_dim": 384, "depth": 12}
_BASE = {"embed_dim": 768, "depth": 12}


def _create(
    variant: str, pretrained: bool, options: dict[str, Any], **architecture: Any
) -> AFTVisionTransformer:
    """The model of a registered name; ``options``, what the caller of timm asked for, win."""
    options = {**architecture, **options}
    return build_model_with_cfg(
        AFTVisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": options.pop("out_indices", 3), "feature_cls": "getter"},
        **options,
    )


@register_model
def aft_full_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-full tiny, 6.3M parameters."""
    return _create("aft_full_tiny_patch16_224", pretrained, kwargs, mixer="full", **_TINY)


@register_model
def aft_full_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-full small, 22.7M parameters."""
    return _create("aft_full_small_patch16_224", pretrained, kwargs, mixer="full", **_SMALL)


@register_model
def aft_conv_tiny_k11_h32_patch16_224(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-conv tiny with 32 heads and kernels of 11, 5.4M parameters."""
    return _create("aft_conv_tiny_k11_h32_patch16_224", pretrained, kwargs, num_heads=32, **_TINY)


@register_model
def aft_conv_tiny_k11_h192_patch16_224(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-conv tiny with 192 heads and kernels of 11, 6.0M parameters."""
    return _create("aft_conv_tiny_k11_h192_patch16_224", pretrained, kwargs, num_heads=192, **_TINY)


@register_model
def aft_conv_small_k11_h16_patch16_224(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-conv small with 16 heads and kernels of 11, 20.3M parameters."""
    return _create("aft_conv_small_k11_h16_patch16_224", pretrained, kwargs, num_heads=16, **_SMALL)


@register_model
def aft_conv_small_k11_h384_patch16_224(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-conv small with 384 heads and kernels of 11, 22.5M parameters."""
    return _create("aft_conv_small_k11_h384_patch16_224", pretrained, kwargs, num_heads=384, **_SMALL)


@register_model
def aft_conv_small_k15_h384_patch16_224(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-conv small with 384 heads and kernels of 15, 23.0M parameters: the paper's best."""
    sizes = {"num_heads": 384, "kernel_size": 15, **_SMALL}
    return _create("aft_conv_small_k15_h384_patch16_224", pretrained, kwargs, **sizes)


@register_model
def aft_conv_base_k25_h32_patch16_384(pretrained: bool = False, **kwargs: Any) -> AFTVisionTransformer:
    """AFT-conv base of the paper's Table 8 (79.7M there, 79.9M here), to which DeiT-base converts."""
    sizes = {"num_heads": 32, "kernel_size": 25, "img_size": 384, **_BASE}
    return _create("aft_conv_base_k25_h32_patch16_384", pretrained, kwargs, **sizes)
