"""nn.TransformerEncoder and nn.TransformerDecoder with AFT as their attention."""

import copy
from typing import Any

from torch import nn

from aft.integrations.conversion_report import ConversionReport, Part, Transfer
from aft.layers import AFTConv1d, AFTFull, AFTLocal, AFTSimple
from aft.layers.base import AFTLayer

LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
CONVERTIBLE = (nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer, *LAYERS)


def convert_transformer(
    model: nn.Module,
    mixer: str,
    *,
    num_heads: int | None = None,
    kernel_size: int = 11,
    window_size: int = 32,
    bias_rank: int | None = None,
    reparameterize: bool = True,
    max_seq_len: int | None = None,
    max_source_len: int | None = None,
    causal: bool = False,
) -> tuple[nn.Module, ConversionReport]:
    """See `aft.integrations.convert.convert`; projections start as those of ``nn.MultiheadAttention``."""
    if mixer in ("full", "local") and max_seq_len is None:
        raise ValueError(f"convert: mixer {mixer!r} needs max_seq_len, the longest sequence in positions")
    attentions = _attentions(model)
    converted = copy.deepcopy(model)
    for name, attention in attentions.items():
        common: dict[str, Any] = {
            "bias": attention.in_proj_bias is not None,
            "kdim": attention.kdim,
            "vdim": attention.vdim,
            "batch_first": attention.batch_first,
            "device": attention.out_proj.weight.device,
            "dtype": attention.out_proj.weight.dtype,
        }
        D, heads = attention.embed_dim, attention.num_heads if num_heads is None else num_heads
        length = 1 if max_seq_len is None else max_seq_len
        layer: AFTLayer
        if name.split(".")[-1] == "multihead_attn":  # to another sequence, where distances mean nothing
            source = length if max_source_len is None else max_source_len
            layer = (
                AFTFull(D, length, bias_rank=bias_rank, max_source_len=source, **common)
                if mixer == "full"
                else AFTSimple(D, **common)
            )
        else:
            of_encoder = isinstance(model, nn.Transformer) and name.startswith("encoder.")
            common["causal"] = causal and not of_encoder
            match mixer:
                case "full":
                    layer = AFTFull(D, length, bias_rank=bias_rank, **common)
                case "local":
                    layer = AFTLocal(D, length, window_size, bias_rank=bias_rank, **common)
                case "simple":
                    layer = AFTSimple(D, **common)
                case _:
                    layer = AFTConv1d(D, heads, kernel_size, reparameterize=reparameterize, **common)
        converted.set_submodule(name, layer)
    for module in converted.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # a preparation for the fused path, which knows no AFT

    transfer = Transfer(model, converted)
    for name, attention in attentions.items():
        _transfer_attention(transfer, name, attention)
    transfer.same_names()
    dropouts = sorted({attention.dropout for attention in attentions.values()} - {0.0})
    return converted, transfer.report([f"dropped: dropout {p} of attention weights" for p in dropouts])


def _attentions(model: nn.Module) -> dict[str, nn.MultiheadAttention]:
    """The attentions by name; raises where one is not where PyTorch's layers have it, or does more."""
    found: dict[str, nn.MultiheadAttention] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder):
            for layer in module.layers:
                if not isinstance(layer, LAYERS):
                    raise TypeError(
                        f"convert: the layers of {type(module).__name__} must be PyTorch's own, "
                        f"got {type(layer).__name__}"
                    )
        if isinstance(module, AFTLayer):
            raise ValueError(f"convert: {name} is {type(module).__name__} already")
        if isinstance(module, nn.MultiheadAttention):
            if module.bias_k is not None or module.add_zero_attn:
                option = "add_bias_kv" if module.bias_k is not None else "add_zero_attn"
                raise ValueError(f"convert: {name} has {option}, which AFT has not")
            if any(module is other for other in found.values()):
                raise ValueError(f"convert: {name} is shared with another layer; give each its own")
            found[name] = module
    return found


def _transfer_attention(transfer: Transfer, name: str, attention: nn.MultiheadAttention) -> None:
    D = attention.embed_dim
    query_and_key = "query and key projections"
    if transfer.has(f"{name}.in_proj_weight"):
        transfer.drop(f"{name}.in_proj_weight", part=Part(0, 2 * D), why=query_and_key)
        transfer.copy(f"{name}.in_proj_weight", f"{name}.v_proj.weight", part=Part(2 * D, 3 * D))
    else:
        transfer.drop(f"{name}.q_proj_weight", why=query_and_key)
        transfer.drop(f"{name}.k_proj_weight", why=query_and_key)
        transfer.copy(f"{name}.v_proj_weight", f"{name}.v_proj.weight")
    if transfer.has(f"{name}.in_proj_bias"):
        transfer.drop(f"{name}.in_proj_bias", part=Part(0, 2 * D), why=query_and_key)
        transfer.copy(f"{name}.in_proj_bias", f"{name}.v_proj.bias", part=Part(2 * D, 3 * D))
