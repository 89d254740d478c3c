"""What an AFT language model is made of, as a Transformers configuration."""

import math

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from aft.models.blocks import check_block


@strict
class AFTConfig(PreTrainedConfig):
    r"""Configuration of `AFTForCausalLM`.

    Args:
        vocab_size: symbols; 256 for bytes.
        hidden_size: d, channels.
        num_hidden_layers: L, blocks.
        intermediate_size: channels inside the MLP; 4 d where left out, as in the paper.
        max_position_embeddings: T, the longest context in positions.
        mixer: what mixes positions: "full", "simple", "local" or "conv" (the paper's four), or "attention"
            (scaled dot product), the baseline.
        num_attention_heads: heads of "conv" and "attention"; the other mixers have one.
        window_size: s of "local": the bias counts where \|t - s\| < window_size.
        kernel_size: s of "conv".
        bias_rank: d', rank of the position bias of "full" and "local"; None for a dense table.
        dropout: probability, on embeddings and on what each mixer and MLP adds.
        initializer_range: standard deviation of linear and embedding weights.
        hidden_act: activation of the MLP, by Transformers' name for it.
        layer_norm_eps: what LayerNorm adds to the variance.
        tie_word_embeddings: whether the head shares the token embedding's weights.
        alphabet: where the vocabulary is not all bytes: token i is byte alphabet[i].
        image_shape: of a pixel model, [height, width, channels]: position i is sub-pixel i of an image, rows
            first and channels last.
    """

    model_type = "aft"
    keys_to_ignore_at_inference = ("cache",)

    vocab_size: int = 256
    hidden_size: int = 256
    num_hidden_layers: int = 6
    intermediate_size: int | None = None
    max_position_embeddings: int = 1024
    mixer: str = "local"
    num_attention_heads: int = 8
    window_size: int = 32
    kernel_size: int = 32
    bias_rank: int | None = None
    dropout: float | int = 0.0
    initializer_range: float = 0.02
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    alphabet: list[int] | None = None
    image_shape: list[int] | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Called by ``strict``: raises ValueError that names the field, what came and what was expected."""
        check_block(self, "vocab_size", "max_position_embeddings")
        if self.alphabet is not None:
            known = len(set(self.alphabet) & set(range(256)))
            if not known == len(self.alphabet) == self.vocab_size:
                raise ValueError(
                    f"alphabet must hold vocab_size = {self.vocab_size} different bytes, "
                    f"got {len(self.alphabet)} numbers, {known} different bytes among them"
                )
        if self.image_shape is not None:
            if len(self.image_shape) != 3 or min(self.image_shape) < 1 or self.image_shape[2] not in (1, 3):
                raise ValueError(
                    f"image_shape must be [height, width, 1 or 3 channels], got {self.image_shape}"
                )
            pixels = math.prod(self.image_shape)
            if pixels != self.max_position_embeddings:
                raise ValueError(
                    f"max_position_embeddings must be {pixels}, the sub-pixels of image_shape "
                    f"{self.image_shape}; got {self.max_position_embeddings}"
                )
