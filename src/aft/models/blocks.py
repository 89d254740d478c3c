"""The block that all models here are stacks of, and the mixers that it can hold."""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from aft.models.cache import AFTCacheLayer
from aft.ops.state import AFTState, check_state, empty_state, extend

MIXERS = ("full", "simple", "local", "conv", "attention")


class BlockConfig(Protocol):
    """What blocks and their mixers read of a configuration."""

    mixer: str
    hidden_size: int
    num_attention_heads: int
    bias_rank: int | None
    intermediate_size: int | None
    hidden_act: str
    layer_norm_eps: float
    dropout: float | int
    initializer_range: float


class SelfAttention(nn.Module):
    """Scaled dot-product attention with ``num_heads`` heads, the baseline: [B, T, D], O(T^2 D)."""

    def __init__(self, embed_dim: int, num_heads: int, *, causal: bool):
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(
        self, x: Tensor, *, memory: AFTCacheLayer | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, None]:
        if memory is not None:
            output, memory.state = self.step(x, memory.state, lengths=lengths)
            return output, None
        return self._attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), is_causal=self.causal), None

    def step(
        self,
        x: Tensor,
        state: AFTState | None = None,
        key_padding_mask: None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, AFTState]:
        """n more positions [B, n, D], as the AFT layers' `step`; the state is every key and value."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        padding = None if lengths is None else x.shape[1] - lengths
        if state is None:
            # Padding comes last, where causal attention does not look.
            state = empty_state(k, v, None)
            return self._attend(q, k, v, is_causal=True), extend(state, k, v, padding)
        check_state("SelfAttention", state, x.shape[0], k.shape[2], v.shape[2], None, x.device)
        past = state.keys.shape[1]
        slot = torch.arange(past + x.shape[1], device=x.device)
        query = past + torch.arange(x.shape[1], device=x.device)
        seen = (slot >= past - state.length[:, None, None]) & (slot <= query[:, None])
        keys, values = torch.cat([state.keys, k], 1), torch.cat([state.values, v], 1)
        # Empty slots hold keys of -inf, whose scores would be NaN before they are hidden.
        keys = keys.masked_fill(torch.isneginf(keys), 0.0)
        return self._attend(q, keys, values, attn_mask=seen[:, None]), extend(state, k, v, padding)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        q, k, v = (x.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, **options)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class AFTBlock(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x)): the paper's block, as in ImageGPT and in ViT.

    Args:
        mixer: a layer called as `nn.MultiheadAttention` is, on whatever shape ``[B, ..., D]`` it takes.
        drop_path: probability that a sample skips a branch while training (stochastic depth).
    """

    def __init__(self, config: BlockConfig, mixer: nn.Module, drop_path: float = 0.0):
        super().__init__()
        d = config.hidden_size
        self.mixer_norm = nn.LayerNorm(d, eps=config.layer_norm_eps)
        self.mixer = mixer
        self.mlp_norm = nn.LayerNorm(d, eps=config.layer_norm_eps)
        width = config.intermediate_size or 4 * d
        self.mlp_in = nn.Linear(d, width)
        self.activation = ACT2FN[config.hidden_act]
        self.mlp_out = nn.Linear(width, d)
        # A mark on the layers themselves: Transformers shows `_init_weights` no module without parameters.
        for layer in (self.mixer.out_proj, self.mlp_out):
            object.__setattr__(layer, "feeds_residual", True)
        self.dropout = nn.Dropout(config.dropout)
        self.drop_path = drop_path

    def forward(
        self, x: Tensor, memory: AFTCacheLayer | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        """[B, n, ..., D] to the same; with a ``memory`` these are n more positions, ``lengths`` [B] of them
        not padding, and it is brought up to date."""
        stream = {} if memory is None else {"memory": memory, "lengths": lengths}
        mixed = self.mixer(self.mixer_norm(x), **stream)[0]
        x = x + self._kept(self.dropout(mixed))
        hidden = self.activation(self.mlp_in(self.mlp_norm(x)))
        return x + self._kept(self.dropout(self.mlp_out(hidden)))

    def _kept(self, branch: Tensor) -> Tensor:
        if not self.training or self.drop_path == 0:
            return branch
        # Dropout of one number a sample: it also scales what stays by 1 / (1 - p).
        return branch * F.dropout(branch.new_ones(len(branch), *[1] * (branch.ndim - 1)), self.drop_path)


def check_block(config: BlockConfig, *sizes: str) -> None:
    """Raises ValueError that names the field of a configuration, what came and what was expected.

    ``sizes`` are its fields beside those of every block that must be at least 1.
    """
    if config.mixer not in MIXERS:
        raise ValueError(f"mixer must be one of {', '.join(MIXERS)}; got {config.mixer!r}")
    common = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    for name in (*sizes, *common, "window_size", "kernel_size"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
    if config.bias_rank is not None and config.bias_rank < 1:
        raise ValueError(f"bias_rank must be at least 1, or None for a dense table; got {config.bias_rank}")
    if config.mixer in ("conv", "attention") and config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"hidden_size must be a multiple of num_attention_heads, "
            f"got {config.hidden_size} and {config.num_attention_heads}"
        )
    if config.hidden_act not in ACT2FN:
        raise ValueError(f"hidden_act must be one of {', '.join(ACT2FN)}; got {config.hidden_act!r}")
    if not config.layer_norm_eps > 0:
        raise ValueError(f"layer_norm_eps must be above 0, got {config.layer_norm_eps}")
    if not 0.0 <= config.dropout < 1.0:
        raise ValueError(f"dropout must be a probability in [0, 1), got {config.dropout}")
    if config.initializer_range < 0:
        raise ValueError(f"initializer_range must be at least 0, got {config.initializer_range}")
