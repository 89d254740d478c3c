"""Partial sums of an AFT mean, and how two of them become one."""

from typing import NamedTuple

import torch
from torch import Tensor


class Sums(NamedTuple):
    """The sums over a set of keys, each scaled by exp(-(max + bias_max)) so that none overflows.

    ``num`` [..., N, P] is sum_s exp(x_s - max - bias_max) v_s and ``den`` [..., N] is
    sum_s exp(x_s - max - bias_max), for x = k + w; both float32 or wider. ``max`` [..., N] is the key and
    ``bias_max`` [..., N], float64, the bias of an exponent close to the largest, or to the logarithm of their
    sum. They stay apart because in their sum the larger swallows the smaller: in float32 already at 1e4. An
    empty set is (0, 0, -inf, 0).
    """

    num: Tensor
    den: Tensor
    max: Tensor
    bias_max: Tensor


def join(first: Sums, second: Sums) -> Sums:
    """The sums over the union of two disjoint sets of keys; associative, commutative, exact at any scale."""
    ahead = (first.bias_max - second.bias_max) + (first.max - second.max)
    # Two empty sets are neither ahead nor behind.
    ahead = ahead.masked_fill(ahead.isnan(), 0.0)
    is_first = ahead >= 0
    a = torch.exp(ahead.clamp(max=0.0).to(first.den.dtype))
    b = torch.exp((-ahead).clamp(max=0.0).to(second.den.dtype))
    return Sums(
        num=first.num * a[..., None] + second.num * b[..., None],
        den=first.den * a + second.den * b,
        max=torch.where(is_first, first.max, second.max),
        bias_max=torch.where(is_first, first.bias_max, second.bias_max),
    )


def no_sums(like: Tensor, *shape: int, values: int) -> Sums:
    """Sums [shape] over no keys, with ``values`` channels of values; device and dtype of ``like``."""
    return Sums(
        like.new_zeros(*shape, values),
        like.new_zeros(shape),
        like.new_full(shape, -torch.inf),
        torch.zeros(shape, dtype=torch.float64, device=like.device),
    )


def scan(sums: Sums, dim: int) -> Sums:
    """Running union along ``dim``: entry i of the result holds entries 0 to i. log2(length) passes."""
    length = sums.max.shape[dim]
    step = 1
    while step < length:
        later = Sums(*(x.narrow(dim, step, length - step) for x in sums))
        earlier = Sums(*(x.narrow(dim, 0, length - step) for x in sums))
        joined = join(earlier, later)
        sums = Sums(*(torch.cat([x.narrow(dim, 0, step), y], dim) for x, y in zip(sums, joined, strict=True)))
        step *= 2
    return sums


def largest(bias: Tensor, keys: Tensor, dim: int) -> Tensor:
    """Where bias + keys is largest along ``dim`` (kept), whatever their scales; -inf is passed over."""
    bias, keys = torch.broadcast_tensors(bias, keys)
    index = (bias + keys).argmax(dim, keepdim=True)
    # Where one part is huge the sum has lost the other: look again, relative to what was found.
    relative = (bias - bias.gather(dim, index)) + (keys - keys.gather(dim, index))
    return relative.masked_fill(relative.isnan(), -torch.inf).argmax(dim, keepdim=True)
