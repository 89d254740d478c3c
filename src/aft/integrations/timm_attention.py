"""An AFT layer in the place of the attention of a timm ViT."""

from typing import Any

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from aft.integrations.mixers import check_mixer
from aft.layers import AFTConv2d, AFTFull, AFTLocal, AFTSimple
from aft.layers.resampling import resample_position_bias


class _Full(AFTFull):
    """timm sets `nn.Linear` layers in its own way, then asks ``init_weights`` for what else a module owns."""

    def init_weights(self) -> None:
        self.reset_position_bias()


class _Local(AFTLocal):
    def init_weights(self) -> None:
        self.reset_position_bias()


class _Simple(AFTSimple):
    def init_weights(self) -> None:
        pass


class _Conv2d(AFTConv2d):
    def init_weights(self) -> None:
        self.reset_kernel()
        nn.init.normal_(self.kernel, std=0.02)  # as `AFTForImageClassification`, which says why


@register_notrace_module  # a leaf of torch.fx graphs
class AFTAttention(nn.Module):
    """One of the four layers, called as timm's `Attention`: [B, N, D], or [B, Y, X, D] with "conv".

    A ViT does not tell its attention where its tokens lie, so that this module is told when it is built:
    N = num_prefix_tokens + Y X tokens, those of the grid row by row. [B, Y, X, D] may have any Y and X.

    Args:
        dim: D.
        num_heads: heads of "conv"; the other mixers have one, whatever this says.
        qkv_bias, proj_bias: whether the projections of query, key and value, and of the output, add biases.
        proj_drop: dropout probability on the output.
        mixer: "full", "simple", "local" or "conv".
        grid_size: (Y, X), patches; "simple" needs none, and "conv" none for inputs [B, Y, X, D].
        num_prefix_tokens: class, distillation and register tokens; "conv" takes none.
        kernel_size: of "conv".
        window_size: of "local".
        bias_rank: of "full" and "local"; 0 or None for a dense table (`timm.create_model` drops a None).
        reparameterize: whether "conv" learns equation 8, else the kernel itself.
        impl: implementation of the operation.

    Raises:
        ValueError: for what only dot-product attention has: ``qk_norm``, ``scale_norm``, ``attn_drop``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        mixer: str = "conv",
        grid_size: tuple[int, int] | None = None,
        num_prefix_tokens: int = 0,
        kernel_size: int | tuple[int, int] = 11,
        window_size: int = 32,
        bias_rank: int | None = 128,
        reparameterize: bool = True,
        impl: str = "auto",
    ):
        super().__init__()
        check_mixer("AFTAttention", mixer)
        for name, value in {"qk_norm": qk_norm, "scale_norm": scale_norm, "attn_drop": attn_drop}.items():
            if value:
                raise ValueError(f"AFTAttention: {name} belongs to dot-product attention, got {value}")
        if mixer == "conv" and num_prefix_tokens:
            raise ValueError(
                "AFTAttention: mixer 'conv' takes no class, distillation or register tokens, which have no "
                f"place in the grid; got {num_prefix_tokens} (build the ViT with class_token=False, "
                "global_pool='avg')"
            )
        if mixer in ("full", "local") and grid_size is None:
            raise ValueError(f"AFTAttention: mixer {mixer!r} needs grid_size = (Y, X), its number of patches")
        bias_rank = bias_rank or None
        self.mixer_name, self.num_prefix_tokens = mixer, num_prefix_tokens
        self.grid_size = grid_size

        options = {"bias": qkv_bias or proj_bias, "impl": impl, "device": device, "dtype": dtype}
        match mixer:
            case "full":
                self.mixer = _Full(dim, self._num_tokens(), bias_rank=bias_rank, **options)
            case "local":
                self.mixer = _Local(dim, self._num_tokens(), window_size, bias_rank=bias_rank, **options)
            case "simple":
                self.mixer = _Simple(dim, **options)
            case _:
                self.mixer = _Conv2d(dim, num_heads, kernel_size, reparameterize=reparameterize, **options)
        if not qkv_bias:
            for projection in (self.mixer.q_proj, self.mixer.k_proj, self.mixer.v_proj):
                if projection is not None:
                    projection.register_parameter("bias", None)
        if not proj_bias:
            self.mixer.out_proj.register_parameter("bias", None)
        self.proj_drop = nn.Dropout(proj_drop)

    @property
    def proj(self) -> nn.Linear:
        """The output projection, where timm looks for it."""
        return self.mixer.out_proj

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Args:
        x: [B, N, D] or, with "conv", [B, Y, X, D].
        attn_mask: [N, N], [B, N, N] or [B, 1, N, N], True where a query may see the key, as timm has it
            (the opposite of `aft.layers`), or its 0 / -inf form.
        is_causal: whether a token sees no later one.
        """
        hidden = None
        if attn_mask is not None:
            hidden = attn_mask.squeeze(1) if attn_mask.ndim == 4 else attn_mask
            hidden = ~hidden if hidden.dtype == torch.bool else hidden
        tokens = x
        if x.ndim == 3:
            self._check_tokens(x.shape[1])
            if self.mixer_name == "conv":
                tokens = x.unflatten(1, self.grid_size)
        elif self.mixer_name != "conv":
            raise ValueError(f"AFTAttention: x must be [B, N, {self.mixer.embed_dim}], got {tuple(x.shape)}")
        mixed, _ = self.mixer(tokens, attn_mask=hidden, is_causal=is_causal)
        return self.proj_drop(mixed.view_as(x))

    def set_grid_size(self, grid_size: tuple[int, int]) -> None:
        """Another grid: the position bias of "full" is resampled, see `aft.layers.resampling`."""
        if self.grid_size is not None and isinstance(self.mixer, AFTFull) and grid_size != self.grid_size:
            bias = resample_position_bias(self.mixer, self.grid_size, grid_size, self.num_prefix_tokens)
            for name, resampled in bias.items():
                trained = getattr(self.mixer, name).requires_grad
                setattr(self.mixer, name, nn.Parameter(resampled.detach(), requires_grad=trained))
            tokens = self.num_prefix_tokens + grid_size[0] * grid_size[1]
            self.mixer.max_seq_len = self.mixer.max_source_len = tokens
        self.grid_size = grid_size

    def _num_tokens(self) -> int:
        assert self.grid_size is not None
        return self.num_prefix_tokens + self.grid_size[0] * self.grid_size[1]

    def _check_tokens(self, N: int) -> None:
        if self.mixer_name == "simple":
            return
        if self.grid_size is None:
            raise ValueError(
                f"AFTAttention: x has {N} tokens in no known grid; build with grid_size = (Y, X), or give "
                "[B, Y, X, D]"
            )
        if self._num_tokens() != N:
            Y, X = self.grid_size
            raise ValueError(
                f"AFTAttention: x must have {self.num_prefix_tokens} + {Y} x {X} = {self._num_tokens()} "
                f"tokens (num_prefix_tokens + grid_size), got {N}"
            )


def aft_attention(mixer: str = "conv", **options: Any) -> type:
    """`AFTAttention` with options of one's own, in the form that timm's ``attn_layer`` takes: a class.

    Args:
        mixer: "full", "simple", "local" or "conv".
        **options: keyword arguments of `AFTAttention` (timm refuses ``functools.partial``).
    """
    check_mixer("aft_attention", mixer)

    class ConfiguredAFTAttention:
        def __new__(cls, dim: int, **from_timm: Any) -> AFTAttention:
            return AFTAttention(dim, **from_timm, mixer=mixer, **options)

    return ConfiguredAFTAttention
