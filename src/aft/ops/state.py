"""Partial sums of an AFT mean, and how two of them become one."""

from typing import NamedTuple

import torch
from torch import Tensor


class AFTState(NamedTuple):
    """The sums over a set of keys, each scaled by exp(-max) so that none overflows.

    ``num`` [..., N, P] is sum_s exp(x_s - max) v_s and ``den`` [..., N] is sum_s exp(x_s - max), for
    x = k + w; both float32 or wider. ``max`` [..., N] is float64: in float32 a key and a bias of 1e4 have no
    digits left for their sum. An empty set is (0, 0, -inf).
    """

    num: Tensor
    den: Tensor
    max: Tensor


def combine(first: AFTState, second: AFTState) -> AFTState:
    """The state of the union of two disjoint sets of keys; associative, commutative, exact at any scale."""
    peak = torch.maximum(first.max, second.max)
    # Two empty sets have no peak to subtract: exp(-inf - 0) is the 0 they need.
    origin = peak.masked_fill(torch.isneginf(peak), 0.0)
    a = torch.exp((first.max - origin).to(first.den.dtype))
    b = torch.exp((second.max - origin).to(second.den.dtype))
    return AFTState(
        num=first.num * a[..., None] + second.num * b[..., None],
        den=first.den * a + second.den * b,
        max=peak,
    )


def scan(state: AFTState, dim: int) -> AFTState:
    """Running union along ``dim``: entry i of the result holds entries 0 to i. log2(length) passes."""
    length = state.max.shape[dim]
    step = 1
    while step < length:
        later = AFTState(*(x.narrow(dim, step, length - step) for x in state))
        earlier = AFTState(*(x.narrow(dim, 0, length - step) for x in state))
        joined = combine(earlier, later)
        state = AFTState(
            *(torch.cat([x.narrow(dim, 0, step), y], dim) for x, y in zip(state, joined, strict=True))
        )
        step *= 2
    return state
