"""What an AFT image classifier is made of, as a Transformers configuration."""

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from aft.models.blocks import check_block


@strict
class AFTImageConfig(PreTrainedConfig):
    r"""Configuration of `AFTForImageClassification`; the number of classes is ``num_labels`` or ``id2label``.

    The defaults are the paper's AFT-conv tiny (32 heads, kernel 11).

    Args:
        image_size: height and width of the training images in pixels, one number where they are equal.
        patch_size: side of a patch in pixels.
        num_channels: colours of a pixel.
        hidden_size: d, channels.
        num_hidden_layers: L, blocks.
        intermediate_size: channels inside the MLP; 4 d where left out, as in DeiT.
        mixer: "conv" or "full", the paper's two, "simple", "local", or "attention": then this is DeiT.
        num_attention_heads: heads of "conv" and "attention"; the other mixers have one.
        kernel_size: side of the kernel of "conv", in patches.
        window_size: s of "local", in positions of the flattened sequence.
        bias_rank: d', rank of the position bias of "full" and "local"; None for a dense table.
        class_token: whether the classifier reads a class token (else the mean over patches). Left out: as in
            the paper, where "conv" has none and the others one.
        position_embedding: whether positions are learnt; left out, as ``class_token``.
        dropout: probability, on embeddings and on what each mixer and MLP adds.
        drop_path_rate: probability that a sample skips the branches of the last block while training; it
            grows linearly from 0 at the first block.
        hidden_act: activation of the MLP, by Transformers' name for it.
        layer_norm_eps: what LayerNorm adds to the variance.
        initializer_range: standard deviation of linear weights and kernels.
    """

    model_type = "aft_image"

    image_size: int | list[int] = 224
    patch_size: int = 16
    num_channels: int = 3
    hidden_size: int = 192
    num_hidden_layers: int = 12
    intermediate_size: int | None = None
    mixer: str = "conv"
    num_attention_heads: int = 32
    kernel_size: int = 11
    window_size: int = 32
    bias_rank: int | None = 128
    class_token: bool | None = None
    position_embedding: bool | None = None
    dropout: float | int = 0.0
    drop_path_rate: float | int = 0.0
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs):
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.class_token is None:
            self.class_token = self.mixer != "conv"
        if self.position_embedding is None:
            self.position_embedding = self.mixer != "conv"
        super().__post_init__(**kwargs)

    @property
    def grid(self) -> tuple[int, int]:
        """Patches of a training image: rows and columns."""
        height, width = [self.image_size] * 2 if isinstance(self.image_size, int) else self.image_size
        return height // self.patch_size, width // self.patch_size

    def validate_architecture(self):
        """Called by ``strict``: raises ValueError that names the field, what came and what was expected."""
        check_block(self, "patch_size", "num_channels")
        if isinstance(self.image_size, list) and len(self.image_size) != 2:
            raise ValueError(f"image_size must be a number or [height, width], got {self.image_size}")
        if min(self.grid) < 1:
            raise ValueError(
                f"image_size must be at least patch_size = {self.patch_size} on both sides, "
                f"got {self.image_size}"
            )
        if self.mixer == "conv" and self.class_token:
            raise ValueError('class_token must be False for mixer "conv": the token has no place in the grid')
        if not 0.0 <= self.drop_path_rate < 1.0:
            raise ValueError(f"drop_path_rate must be a probability in [0, 1), got {self.drop_path_rate}")
