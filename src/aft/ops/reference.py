"""The specification: the paper's sums, literally, in float64, by plain differentiable PyTorch.

O(B T S D) time and memory. Every other implementation is tested against this one, which itself is tested
against a loop over the equations. It differentiates twice and under every ``torch.func`` transform.
"""

import torch
from torch import Tensor

from aft.ops.spec import DenseBias, KernelBias, LowRankBias, Problem, without_autocast
from aft.ops.sums import Sums, largest


def mean(problem: Problem) -> Tensor:
    """The weighted mean of the values, [B, T, D] in float64: equations 2 and 4 to 6 before the query gate."""
    with without_autocast(problem.keys):
        return torch.einsum("btsh,bshp->bthp", weights(problem), _values(problem)).flatten(2)


def sums(problem: Problem) -> Sums:
    """The sums of each query, num [B, T, H, P], the others [B, T, H], float64."""
    with without_autocast(problem.keys):
        exponent, top_key, top_bias = _exponents(problem)
        terms = torch.exp(exponent)
        num = torch.einsum("btsh,bshp->bthp", terms, _values(problem))
        return Sums(num, terms.sum(2), top_key, top_bias)


def weights(problem: Problem) -> Tensor:
    """The implicit attention of equation 3 without its gate, [B, T, S, H] in float64.

    Row t of channel h sums to 1 over the keys, or to 0 where the query has nothing to see.
    """
    with without_autocast(problem.keys):
        exponent = _exponents(problem)[0]
        # softmax over an empty set is 0 / 0; its entries are replaced before and after.
        empty = torch.isneginf(exponent).all(2, keepdim=True)
        return torch.softmax(exponent.masked_fill(empty, 0.0), 2).masked_fill(empty, 0.0)


def _exponents(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """k + w of each pair relative to the row's largest, [B, T, S, H], and that one's key and bias [B, T, H].

    A hidden pair is -inf, and so is the largest key of a row with nothing to see. They stay apart because a
    bias of 1e38 would swallow the keys.
    """
    keys = problem.keys.double()
    hidden = _hidden(problem)
    keys, bias = torch.broadcast_tensors(keys[:, None].masked_fill(hidden, 0.0), _bias(problem))
    hidden = (hidden | torch.isneginf(bias)).expand(keys.shape)
    if hidden.shape[2] == 0:
        nothing = keys.new_zeros(*keys.shape[:2], keys.shape[3])
        return keys, nothing - torch.inf, nothing
    keys, bias = (x.masked_fill(hidden, 0.0) for x in (keys, bias))
    with torch.no_grad():
        peak = largest(bias.masked_fill(hidden, -torch.inf), keys, 2)
        top_key, top_bias = keys.gather(2, peak), bias.gather(2, peak)
    exponent = ((keys - top_key) + (bias - top_bias)).masked_fill(hidden, -torch.inf)
    top_key = top_key.masked_fill(hidden.all(2, keepdim=True), -torch.inf)
    return exponent, top_key[:, :, 0], top_bias[:, :, 0]


def _values(problem: Problem) -> Tensor:
    """[B, S, H, P] in float64, 0 where the key is absent: it may be NaN there."""
    values = problem.values.double().unflatten(2, (problem.keys.shape[2], problem.head_channels))
    absent = torch.isneginf(problem.keys)
    if problem.key_padding_mask is not None:
        absent = absent | problem.key_padding_mask[:, :, None]
    return values.masked_fill(absent[..., None], 0.0)


def _bias(problem: Problem) -> Tensor:
    """w as a table that broadcasts to [B, T, S, H], float64."""
    T, S = problem.target_length, problem.keys.shape[1]
    match problem.bias:
        case None:
            return problem.keys.new_zeros(1, T, S, 1, dtype=torch.float64)
        case DenseBias(table):
            table = (table if table.ndim == 3 else table[None]).double()[..., None]
        case LowRankBias(left, right):
            table = (left.double() @ right.double().T)[None, :, :, None]
        case KernelBias():
            return _kernel_table(problem.bias)[:, :T, :S]
    if problem.window_size is None:
        return table
    time = torch.arange(max(T, S), device=table.device)
    inside = (time[:T, None] - time[None, :S]).abs() < problem.window_size
    return torch.where(inside[None, :, :, None], table, 0.0)


def _kernel_table(bias: KernelBias) -> Tensor:
    """[1, T, S, H]: the kernel's entry for each pair of cells, 0 for pairs outside the window."""
    kernel = bias.kernel.double()
    height, width = kernel.shape[1:]
    row = _coordinates(bias, 0, kernel.device)
    column = _coordinates(bias, 1, kernel.device)
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    entry = kernel[:, row.clamp(0, height - 1), column.clamp(0, width - 1)]
    return torch.where(inside, entry, 0.0).movedim(0, 2)[None]


def _coordinates(bias: KernelBias, axis: int, device: torch.device) -> Tensor:
    """[T, S]: the row (axis 0) or column (axis 1) of the kernel that lies on key s as seen from query t."""

    def along(grid: tuple[int, int]) -> Tensor:
        cell = torch.arange(grid[0] * grid[1], device=device)
        return cell // grid[1] if axis == 0 else cell % grid[1]

    return along(bias.key_grid)[None, :] - along(bias.query_grid)[:, None] + bias.anchor[axis]


def _hidden(problem: Problem) -> Tensor:
    """Broadcasts to [B, T, S, H]: True where the query must not see the key, absent (-inf) keys included."""
    T, S = problem.target_length, problem.keys.shape[1]
    hidden = torch.isneginf(problem.keys)[:, None]
    if problem.causal:
        time = torch.arange(max(T, S), device=problem.keys.device)
        hidden = hidden | (time[None, :S] > time[:T, None])[None, :, :, None]
    if problem.key_padding_mask is not None:
        hidden = hidden | problem.key_padding_mask[:, None, :, None]
    if problem.attn_mask is not None:
        mask = problem.attn_mask
        hidden = hidden | (mask if mask.ndim == 3 else mask[None])[..., None]
    return hidden
