"""Models of other people, and our own attention baselines, with their attention replaced by AFT."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from aft.integrations.conversion_report import ConversionReport
from aft.integrations.mixers import check_mixer

CONVERTIBLE = (
    "a timm VisionTransformer (ViT, DeiT)",
    "a Transformers ViTForImageClassification or GPT2LMHeadModel",
    "AFTForImageClassification or AFTForCausalLM with mixer 'attention'",
    "nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer, or one of their layers",
)

Converter = Callable[..., tuple[nn.Module, ConversionReport]]


def convert(model: nn.Module, mixer: str = "conv", *, verbose: bool = False, **options: Any) -> nn.Module:
    """A copy of ``model`` with AFT in the place of its self-attention; the model itself is left as it is.

    All weights are copied but query and key projections, which start anew as the model's family starts them
    (the paper's Table 8), and for images with "conv" class token and position embedding, which are dropped:
    the mean over patches is classified. What became of every tensor says ``conversion_report`` on the result.

    Args:
        model: a timm VisionTransformer, which becomes one with AFT inside; a Transformers
            ViTForImageClassification or GPT2LMHeadModel, or AFTForImageClassification or AFTForCausalLM with
            mixer "attention", which become models of `aft.models`; an nn.TransformerEncoder,
            nn.TransformerDecoder or nn.Transformer, or one of their layers, which stay what they are. In a
            decoder the attention to the encoder becomes AFT-full (mixer "full") or AFT-simple (any other).
        mixer: "full", "simple", "local" or "conv".
        verbose: whether to print the report.
        **options: of "conv" num_heads (the model's where left out) and kernel_size (11 where left out for
            images and torch, 32 for language models), of "local" window_size (32), of "full" and "local"
            bias_rank (128 for images, None, a dense table, for the others); where left out for our own
            models, what their configuration says. Those of another mixer are not read, so that one set of
            options goes with every mixer;
            for images image_size, in pixels, to which a position embedding that is kept is resampled; for
            timm and torch reparameterize; for torch max_seq_len (which "full" and "local" need), causal (of
            nn.Transformer the decoder alone), and max_source_len of the encoder's output (max_seq_len where
            left out).

    Returns:
        The converted model, in the dtype, on the device and in the mode (training or not) of the original,
        with the same parameters frozen. Those of `aft.models` know ``save_pretrained``, and so does what a
        timm one becomes by its ``to_transformers()``; else a timm or torch one is loaded by converting the
        same kind of model again, with the same options, and ``load_state_dict``.

    Raises:
        TypeError: a model of another kind, or an option that its kind does not have.
        ValueError: a mixer that is none, or what AFT cannot stand for, by name.
    """
    check_mixer("convert", mixer)
    converter = _converter(model)
    known = [
        name
        for name, parameter in inspect.signature(converter).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    for name in options:
        if name not in known:
            raise TypeError(
                f"convert: {name} is no option for {type(model).__name__}, which has {', '.join(known)}"
            )
    converted, report = converter(model, mixer, **options)
    converted.train(model.training)
    _freeze(model, converted, report)
    # A plain attribute: it neither moves with the model nor is saved with it.
    object.__setattr__(converted, "conversion_report", report)
    if verbose:
        print(report)
    return converted


def _freeze(model: nn.Module, converted: nn.Module, report: ConversionReport) -> None:
    """What was frozen in the model is frozen in its copy; new parameters are to be trained."""
    before, after = dict(model.named_parameters()), dict(converted.named_parameters())
    for row in report.rows:
        if row.source in before and row.target in after:
            after[row.target].requires_grad_(before[row.source].requires_grad)


def _converter(model: object) -> Converter:
    """The function for this kind of model. What was never imported cannot be the model's library."""
    if isinstance(model, nn.Module):
        if "timm" in sys.modules:
            from aft.integrations import convert_timm

            if isinstance(model, convert_timm.VisionTransformer):
                return convert_timm.convert_vit
        if "transformers" in sys.modules:
            from aft.integrations import convert_transformers

            for kind, converter in convert_transformers.CONVERTERS.items():
                if type(model) is kind:
                    return converter
        from aft.integrations import convert_torch

        if isinstance(model, convert_torch.CONVERTIBLE):
            return convert_torch.convert_transformer
    raise TypeError(f"convert: model must be {'; '.join(CONVERTIBLE)}; got {type(model).__name__}")
