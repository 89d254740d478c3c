"""What an AFT operation is asked to compute, in one form for all four of them.

AFT-full, -simple, -local and -conv (equations 2, 5, 4 and 6 of the paper) differ in one thing only: the
position bias w[t, s]. Here it is a value of its own, so that every implementation computes a single mean,

    mean[b, t, h, p] = sum_s exp(k[b, s, h] + w[t, s]) v[b, s, h, p] / sum_s exp(k[b, s, h] + w[t, s]),

with P channels of values for each of H channels of keys: P = 1 but for AFT-conv, whose head has one key.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DenseBias:
    """A table w [T, S], or one for each sequence [B, T, S]; -inf hides the key from the query."""

    table: Tensor


@dataclass(frozen=True)
class LowRankBias:
    """w[t, s] = left[t] . right[s] (equation 7): left [T, R], right [S, R]; the table is never built."""

    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class KernelBias:
    """w[h, t, s] = kernel[h, position of s in the window around t], 0 outside it (equation 6).

    ``kernel`` is [H, Kh, Kw] over grids of (rows, columns); a sequence is a grid of one row. ``anchor`` is
    the kernel's cell that lies on the query.
    """

    kernel: Tensor
    query_grid: tuple[int, int]
    key_grid: tuple[int, int]
    anchor: tuple[int, int]


Bias = DenseBias | LowRankBias | KernelBias | None


def tensors_of(bias: Bias) -> list[Tensor]:
    """What a position bias is made of."""
    match bias:
        case DenseBias(table):
            return [table]
        case LowRankBias(left, right):
            return [left, right]
        case KernelBias():
            return [bias.kernel]
        case None:
            return []


@dataclass(frozen=True)
class Problem:
    """A validated call: keys [B, S, H], values [B, S, H * P], T queries.

    ``window_size`` keeps the bias where \\|t - s\\| < window_size and makes it 0 elsewhere (None: nowhere).
    ``key_padding_mask`` [B, S] and ``attn_mask`` [T, S] or [B, T, S] are True where a key is hidden.
    """

    keys: Tensor
    values: Tensor
    target_length: int
    bias: Bias
    window_size: int | None
    causal: bool
    key_padding_mask: Tensor | None
    attn_mask: Tensor | None

    @property
    def head_channels(self) -> int:
        """P: channels of values for each channel of keys."""
        heads = self.keys.shape[2]
        return self.values.shape[2] // heads if heads else 1


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context in which ``x``'s device computes in the dtypes it is given."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
