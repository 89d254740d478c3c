"""Image classifiers native to Transformers: DeiT's body around any mixer, and the paper's AFT-conv."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput, ImageClassifierOutput
from transformers.utils import can_return_tuple

from aft.layers import AFTConv2d, AFTFull, AFTLocal, AFTSimple
from aft.layers.resampling import resample_position_bias, resample_positions
from aft.models.blocks import AFTBlock, SelfAttention
from aft.models.image_configuration import AFTImageConfig


def make_mixer(config: AFTImageConfig) -> nn.Module:
    """The layer that ``config.mixer`` names: "conv" takes grids [B, Y, X, D], the others [B, T, D]."""
    d, T = config.hidden_size, config.grid[0] * config.grid[1] + int(bool(config.class_token))
    match config.mixer:
        case "full":
            return AFTFull(d, T, bias_rank=config.bias_rank)
        case "simple":
            return AFTSimple(d)
        case "local":
            return AFTLocal(d, T, config.window_size, bias_rank=config.bias_rank)
        case "conv":
            return AFTConv2d(d, config.num_attention_heads, config.kernel_size)
        case "attention":
            return SelfAttention(d, config.num_attention_heads, causal=False)
    raise ValueError(f"mixer must be one of full, simple, local, conv, attention; got {config.mixer!r}")


class AFTImagePreTrainedModel(PreTrainedModel):
    """Initial values, and what Transformers needs to know of the family."""

    config: AFTImageConfig  # pyrefly: ignore[bad-override-mutable-attribute] (as Transformers' own models do)
    config_class = AFTImageConfig
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    input_modalities = ["image"]  # noqa: RUF012
    supports_gradient_checkpointing = True
    _no_split_modules = ["AFTBlock"]  # noqa: RUF012 (Transformers reads a list)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As timm's DeiT: truncated normal weights, zero biases, the patches as `nn.Conv2d` starts them."""
        match module:
            case nn.Linear():
                init.trunc_normal_(module.weight, std=self.config.initializer_range)
                if module.bias is not None:
                    init.zeros_(module.bias)
            case nn.Conv2d():
                init.kaiming_uniform_(module.weight, a=5**0.5)
                bound = module.weight[0].numel() ** -0.5
                assert module.bias is not None
                init.uniform_(module.bias, -bound, bound)
            case nn.LayerNorm():
                init.ones_(module.weight)
                init.zeros_(module.bias)
            case AFTFull():
                module.reset_position_bias()
            case AFTConv2d():
                module.reset_kernel()
                # Equation 8 takes any scale out of a kernel again: how small it starts is how fast its shape
                # is learnt. The paper does not say; from 1, as in the layer, it took epochs longer.
                init.normal_(module.kernel, std=self.config.initializer_range)
            case AFTImageModel():
                if module.class_token is not None:
                    init.normal_(module.class_token, std=1e-6)
                if module.position_embedding is not None:
                    init.trunc_normal_(module.position_embedding, std=0.02)


class AFTImageModel(AFTImagePreTrainedModel):
    """Patches and blocks: images [B, C, H, W] to hidden states [B, T, D], the class token's, if any, first.

    Pixels beyond the last whole patch, to the right and below, are not seen.
    """

    def __init__(self, config: AFTImageConfig):
        super().__init__(config)
        d, patch = config.hidden_size, config.patch_size
        cells = config.grid[0] * config.grid[1]
        self.patch_embed = nn.Conv2d(config.num_channels, d, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, d)) if config.class_token else None
        positions = cells + int(bool(config.class_token))
        self.position_embedding = (
            nn.Parameter(torch.zeros(positions, d)) if config.position_embedding else None
        )
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            AFTBlock(config, make_mixer(config), drop_path) for drop_path in _drop_path_rates(config)
        )
        self.norm = nn.LayerNorm(d, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.patch_embed

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        output_hidden_states: bool = False,
        **_: Any,
    ) -> BaseModelOutput:
        """Hidden states [B, T, D] of images [B, C, H, W], normalised as in training.

        Any image size goes into mixers "conv" and "simple" without position embedding. For the others another
        size than ``config.image_size`` is an error, unless ``interpolate_pos_encoding``: then position
        embedding and position bias are resampled over the patches by `aft.layers.resampling`.

        O(T) in the number of patches for "conv" (times the kernel's cells) and "simple", O(T^2) for "full".
        """
        grid = self._grid(pixel_values)
        x = self.patch_embed(pixel_values).permute(0, 2, 3, 1)  # [B, Y, X, D]
        prefix = 0
        if self.config.mixer != "conv":
            x = x.flatten(1, 2)
            if self.class_token is not None:
                x, prefix = torch.cat([self.class_token.expand(len(x), 1, -1), x], dim=1), 1
        changed = grid != self.config.grid and self._positions_are_learnt
        if changed and not interpolate_pos_encoding:
            raise ValueError(
                f"pixel_values make {grid[0]} x {grid[1]} patches and the model's positions are those of "
                f"{self.config.grid[0]} x {self.config.grid[1]}; interpolate_pos_encoding=True resamples them"
            )
        if self.position_embedding is not None:
            positions = resample_positions(self.position_embedding, self.config.grid, grid, prefix)
            x = x + (positions.view(*grid, -1) if self.config.mixer == "conv" else positions)
        x = self.dropout(x)
        states = [x]
        for layer in self.layers:
            x = self._with_bias_over(layer, grid, prefix, x) if changed else layer(x)
            states.append(x)
        states[-1] = self.norm(x)
        if self.config.mixer == "conv":
            states = [x.flatten(1, 2) for x in states]
        return BaseModelOutput(
            last_hidden_state=states[-1], hidden_states=tuple(states) if output_hidden_states else None
        )

    @property
    def _positions_are_learnt(self) -> bool:
        return self.position_embedding is not None or self.config.mixer in ("full", "local")

    def _grid(self, pixel_values: Tensor | None) -> tuple[int, int]:
        channels, patch = self.config.num_channels, self.config.patch_size
        if pixel_values is None or pixel_values.ndim != 4 or pixel_values.shape[1] != channels:
            shape = None if pixel_values is None else tuple(pixel_values.shape)
            raise ValueError(f"pixel_values must be [B, {channels}, H, W], got {shape}")
        height, width = pixel_values.shape[2:]
        if min(height, width) < patch:
            raise ValueError(f"pixel_values of {height} x {width} are less than a patch, {patch} x {patch}")
        return height // patch, width // patch

    def _with_bias_over(self, layer: nn.Module, grid: tuple[int, int], prefix: int, x: Tensor) -> Tensor:
        """The block with the position bias of its mixer, if it has one, resampled to another grid."""
        if not isinstance(layer.mixer, AFTFull):
            return layer(x)
        bias = resample_position_bias(layer.mixer, self.config.grid, grid, prefix)
        return torch.func.functional_call(layer, {f"mixer.{name}": b for name, b in bias.items()}, (x,))


class AFTForImageClassification(AFTImagePreTrainedModel):
    """`AFTImageModel` with a linear classifier on the class token or, without, the mean over patches."""

    def __init__(self, config: AFTImageConfig):
        super().__init__(config)
        self.num_labels: int = len(config.id2label or {})
        self.model = AFTImageModel(config)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        output_hidden_states: bool = False,
        **_: Any,
    ) -> ImageClassifierOutput:
        """Logits [B, num_labels], and the mean cross-entropy in nats an image where labels are given.

        Args:
            pixel_values: [B, num_channels, H, W], normalised as in training.
            labels: classes [B], int64, or probabilities [B, num_labels] (of mixed images, say).
            interpolate_pos_encoding: see `AFTImageModel.forward`.
        """
        outputs = self.model(
            pixel_values,
            interpolate_pos_encoding=interpolate_pos_encoding,
            output_hidden_states=output_hidden_states,
        )
        states = outputs.last_hidden_state
        logits = self.classifier(states[:, 0] if self.config.class_token else states.mean(1))
        loss = None if labels is None else F.cross_entropy(logits.float(), labels)
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


def _drop_path_rates(config: AFTImageConfig) -> Iterator[float]:
    last = config.num_hidden_layers - 1
    return (config.drop_path_rate * layer / max(1, last) for layer in range(last + 1))


AutoConfig.register("aft_image", AFTImageConfig, exist_ok=True)
AutoModel.register(AFTImageConfig, AFTImageModel, exist_ok=True)
AutoModelForImageClassification.register(AFTImageConfig, AFTForImageClassification, exist_ok=True)
