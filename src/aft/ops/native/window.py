"""AFT-local and AFT-conv, and AFT-full as a window that holds all, as operators over the C++ kernels.

The operators (``torch.ops.aft.native_window`` and ``native_window_backward``) have no autograd of their own,
and an autograd Function joins them. Nothing but the inputs is saved: the backward pass sums again.

The kernels read a bias for each pair inside the window: from a table, from the band of a low-rank bias,
which is laid out as [T, cells of the window], or from a kernel [cells, D]. Keys that channels of AFT-conv
share are laid out for each of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from aft.ops.bias_blocks import LowRankBlocks
from aft.ops.native.library import (
    is_tracked,
    is_transformed,
    kernels,
    may_differentiate_again,
    readable,
    rows,
    state,
)
from aft.ops.operators import map_over, register, without_derivative
from aft.ops.spec import DenseBias, KernelBias, LowRankBias, Problem
from aft.ops.state import AFTState, by_key, head_channels


def solve(problem: Problem, q: Tensor | None, past: AFTState | None = None) -> Tensor:
    """The mean [B, T, D] in float32, or gated by sigmoid(q) in the dtype of the values.

    The queries are those of the last T of the S keys, which is all of them unless a causal stream goes on:
    then the sums of ``past`` are those of all keys before these.
    """
    k, v, T = problem.keys, problem.values, problem.target_length
    table = left = right = kernel = None
    width = anchor_row = anchor_column = 0
    match problem.bias:
        case DenseBias():
            table = problem.bias.table
        case LowRankBias():
            left, right = problem.bias.left, problem.bias.right
        case KernelBias():
            kernel = problem.bias.kernel
            anchor_row, anchor_column = problem.bias.anchor
            if problem.bias.query_grid[0] > 1 or kernel.shape[1] > 1:
                width = problem.bias.key_grid[1]
    num = den = top = None
    offset = 0
    if past is not None:
        num, den, top = past.num.flatten(1), past.den, past.max
        offset = k.shape[1] - T
    tensors = (q, k, v, table, left, right, kernel, problem.key_padding_mask, num, den, top)
    settings = (T, problem.causal, offset, problem.window_size, width, anchor_row, anchor_column)
    call = _NativeWindow.apply if is_tracked(*tensors) or is_transformed() else _WINDOW
    return call(*tensors, *settings)


def reach(problem: Problem) -> int:
    """How many keys the window of AFT-local has at most."""
    place = _place(
        problem.keys.shape[1], None, problem.target_length, problem.causal, 0, problem.window_size, 0, 0, 0
    )
    return place.cells


@dataclass(frozen=True)
class _Place:
    """The window's reach around a query, in positions, and how the grid lies, as the kernels take it."""

    T: int
    causal: bool
    offset: int
    behind: int
    ahead: int
    width: int
    anchor: tuple[int, int]

    @property
    def cells(self) -> int:
        return self.behind + 1 + self.ahead


def _place(S, kernel, T, causal, offset, window_size, width, anchor_row, anchor_column) -> _Place:
    if width:
        height, across = kernel.shape[1:]
        behind = anchor_row * width + anchor_column
        ahead = (height - 1 - anchor_row) * width + across - 1 - anchor_column
    elif kernel is not None:
        behind, ahead = anchor_column, kernel.shape[2] - 1 - anchor_column
    else:
        most = T + offset + S if window_size is None else window_size
        behind, ahead = min(most, T + offset) - 1, min(most, S) - 1
    if causal and not width:
        ahead = 0
    return _Place(T, causal, offset, max(behind, 0), max(ahead, 0), width, (anchor_row, anchor_column))


def native_window(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    left: Tensor | None,
    right: Tensor | None,
    kernel: Tensor | None,
    hidden: Tensor | None,
    num: Tensor | None,
    den: Tensor | None,
    top: Tensor | None,
    *settings,
) -> Tensor:
    """y [B, T, D], gated by sigmoid(q) in the dtype of v, or without q the mean in float32."""
    y = _fake_window(q, k, v, table, left, right, kernel, hidden, num, den, top, *settings)
    place = _place(k.shape[1], kernel, *settings)
    problem, _kept = _problem(q, k, v, table, left, right, kernel, hidden, num, den, top, place)
    problem.y = rows(y)
    problem.forward(torch.get_num_threads())
    return y


def native_window_backward(
    grad: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    left: Tensor | None,
    right: Tensor | None,
    kernel: Tensor | None,
    hidden: Tensor | None,
    num: Tensor | None,
    den: Tensor | None,
    top: Tensor | None,
    *settings,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, table, left, right, kernel, num and den; empty where there is none of them."""
    place = _place(k.shape[1], kernel, *settings)
    problem, _kept = _problem(q, k, v, table, left, right, kernel, hidden, num, den, top, place)
    B, S, D = v.shape
    H = k.shape[2]
    grad, grad_v = readable(grad), v.new_empty(v.shape)
    grad_k = v.new_empty(v.shape, dtype=torch.float32 if H == D else torch.float64)
    problem.grad, problem.grad_k, problem.grad_v = rows(grad), rows(grad_k), rows(grad_v)
    problem.has_wide_grad_k = H != D
    grad_q = grad_num = grad_den = None
    if q is not None:
        grad_q = q.new_empty(q.shape)
        problem.grad_q = rows(grad_q)
    if num is not None:
        grad_num, grad_den = num.new_empty(B, D), num.new_empty(B, D)
        problem.grad_before = state(grad_num, grad_den)
    problem.slots = _slots(problem, table)
    of_cells = _room_for_bias(problem, kernel, place)
    problem.backward(torch.get_num_threads())

    if H != D:
        grad_k = by_key(grad_k, H).sum(3)
        grad_den = None if grad_den is None else by_key(grad_den, H).sum(2)
    of_bias = _gradient_of_bias(of_cells, table, left, right, kernel, place, S)
    grads = (grad_q, grad_k.to(k.dtype), grad_v, *of_bias, grad_num, grad_den)
    return tuple(k.new_empty(0) if x is None else x for x in grads)


def _problem(q, k, v, table, left, right, kernel, hidden, num, den, top, place: _Place):
    """The problem as the kernels take it, and tensors that have to live as long."""
    P = head_channels(k.shape[2], v.shape[2])
    q, v = None if q is None else readable(q), readable(v)
    k = readable(k) if P == 1 else _for_each_channel(k, P)
    problem = kernels.Window()
    problem.batches, problem.keys, problem.channels = v.shape
    problem.queries, problem.causal, problem.gated = place.T, place.causal, q is not None
    problem.bfloat16 = v.dtype == torch.bfloat16
    problem.offset, problem.behind, problem.ahead = place.offset, place.behind, place.ahead
    problem.k, problem.v = rows(k), rows(v)
    if q is not None:
        problem.q = rows(q)
    if hidden is not None:
        problem.hidden = rows(hidden)
    before = ()
    if num is not None:
        before = (num.contiguous(), *(_for_each_channel(x, P) for x in (den, top)))
        problem.before = state(*before)
    kept = (q, k, v, hidden, *before)
    if kernel is not None:
        cells = kernel.flatten(1).float()
        if not place.width:
            cells = cells[:, : place.cells]
        cells = _for_each_channel(cells.T, P)
        problem.kernel_at(cells.data_ptr())
        problem.width, (problem.anchor_row, problem.anchor_column) = place.width, place.anchor
        problem.kernel_height, problem.kernel_width = kernel.shape[1:]
        return problem, (*kept, cells)
    bias = table
    if table is None:
        bias = _low_rank_band(left, right, place)
    elif table.dtype != torch.float32:
        bias = _band(table, place)
    if table is not None and table.dtype == torch.float32:
        first, strides = 0, (bias.stride(0) if bias.ndim == 3 else 0, *bias.stride()[-2:])
    else:
        first, per_row = place.behind - place.offset, bias.shape[-1]
        strides = (bias.stride(0) if bias.ndim == 3 else 0, per_row - 1, 1)
    problem.has_bias_by_batch = bias.ndim == 3
    problem.bias_batch_stride, problem.bias_query_stride, problem.bias_key_stride = strides
    problem.bias_at(bias.data_ptr() + first * bias.element_size(), bias.dtype == torch.float64)
    return problem, (*kept, bias)


def _for_each_channel(x: Tensor, P: int) -> Tensor:
    """[..., H] as [..., H * P], contiguous."""
    return x[..., None].expand(*x.shape, P).contiguous().flatten(-2)


def _columns(place: _Place, S: int, device: torch.device) -> Tensor:
    """The keys of each query's window, [T, cells]; those beyond the ends are the first and the last."""
    first = torch.arange(place.T, device=device)[:, None] + (place.offset - place.behind)
    return (first + torch.arange(place.cells, device=device)).clamp(0, max(S - 1, 0))


def _band(table: Tensor, place: _Place) -> Tensor:
    """The cells of a table [T, S] or [B, T, S]: [T, cells] or [B, T, cells], float32."""
    columns = _columns(place, table.shape[-1], table.device)
    return table.gather(-1, columns.expand(*table.shape[:-1], -1)).float().contiguous()


def _shifted(right: Tensor, place: _Place) -> Tensor:
    """Row t + j: the key of cell j of query t, zeros beyond the ends."""
    start = place.offset - place.behind
    return pad(right, (0, 0, max(-start, 0), place.ahead + place.T))[max(start, 0) :]


def _low_rank_band(left: Tensor, right: Tensor, place: _Place) -> Tensor:
    """left . right of each cell, [T, cells]; float64 unless small: 1e4 has few digits in float32."""
    dtype = LowRankBlocks(left, right, None).dtype
    left, right = left.to(dtype), _shifted(right, place).to(dtype)
    band = left.new_empty(place.T, place.cells)
    for j in range(place.cells):
        torch.sum(left * right[j : j + place.T], 1, out=band[:, j])
    return band


def _slots(problem, table: Tensor | None) -> int:
    """Shares of the gradient of the bias: one for each sequence that has a bias of its own."""
    return problem.batches if table is not None and table.ndim == 3 else problem.most_slots()


def _room_for_bias(problem, kernel: Tensor | None, place: _Place) -> Tensor:
    """Zeros for the shares of the gradient: [slots, T, cells], or [slots, cells, D] of a kernel."""
    if kernel is None:
        room = torch.zeros(problem.slots, place.T, place.cells)
        problem.grad_bias_at(room.data_ptr())
    else:
        cells = kernel[0].numel() if place.width else place.cells
        room = torch.zeros(problem.slots, cells, problem.channels, dtype=torch.float64)
        problem.grad_kernel_at(room.data_ptr())
    return room


def _gradient_of_bias(of_cells: Tensor, table, left, right, kernel, place: _Place, S: int):
    """Gradients of table, left, right and kernel, None where there is none, from the shares."""
    if kernel is not None:
        H = kernel.shape[0]
        cells = by_key(of_cells.sum(0), H).sum(2).T
        grad = kernel.new_zeros(H, kernel[0].numel(), dtype=torch.float64)
        grad[:, : cells.shape[1]] = cells
        return None, None, None, grad.to(kernel.dtype).view(kernel.shape)
    if table is not None:
        band = of_cells if table.ndim == 3 else of_cells.sum(0)
        grad = torch.empty(table.shape)
        kernels.expect_writes(grad.data_ptr(), grad.nbytes)
        grad.zero_()
        if S:
            columns = _columns(place, S, table.device)
            # What lies beyond the ends is 0, and is added to them.
            grad.scatter_add_(-1, columns.expand(band.shape), band)
        return grad.to(table.dtype), None, None, None
    band, shifted = of_cells.sum(0), _shifted(right, place).float()
    grad_left, grad_shifted = torch.zeros(left.shape), torch.zeros(shifted.shape)
    wide = left.float()
    for j in range(place.cells):
        grad_left.addcmul_(band[:, j : j + 1], shifted[j : j + place.T])
        grad_shifted[j : j + place.T].addcmul_(band[:, j : j + 1], wide)
    start = place.offset - place.behind
    grad_right = torch.zeros(right.shape)
    inside = grad_shifted[max(-start, 0) :][: S - max(start, 0)]
    grad_right[max(start, 0) :][: len(inside)] = inside
    return None, grad_left.to(left.dtype), grad_right.to(right.dtype), None


def _fake_window(q, k, v, table, left, right, kernel, hidden, num, den, top, T, *_):
    return v.new_empty(v.shape[0], T, v.shape[2], dtype=torch.float32 if q is None else v.dtype)


def _fake_window_backward(grad, q, k, v, table, left, right, kernel, hidden, num, den, top, *_):
    tensors = (q, k, v, table, left, right, kernel, num, den)
    return tuple(k.new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)


_CALL = (
    "Tensor? q, Tensor k, Tensor v, Tensor? table, Tensor? left, Tensor? right, Tensor? kernel, "
    "Tensor? hidden, Tensor? num, Tensor? den, Tensor? top, SymInt T, bool causal, SymInt offset, "
    "SymInt? window_size, SymInt width, SymInt anchor_row, SymInt anchor_column"
)
_WINDOW = register(native_window, _fake_window, f"({_CALL}) -> Tensor")
_WINDOW_BACKWARD = register(
    native_window_backward,
    _fake_window_backward,
    f"(Tensor grad, {_CALL}) -> ({', '.join(['Tensor'] * 9)})",
)
_GRADIENTS = without_derivative(_WINDOW_BACKWARD, "native")
_TENSORS = 11


class _NativeWindow(torch.autograd.Function):
    @staticmethod
    def forward(*args):
        return _WINDOW(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:_TENSORS])
        ctx.settings = inputs[_TENSORS:]

    @staticmethod
    def backward(ctx, *grads_of_outputs):
        inputs = ctx.saved_tensors  # read once: under activation checkpointing there is no second time
        differentiate = _GRADIENTS.apply if may_differentiate_again() else _WINDOW_BACKWARD
        of_rest = differentiate(*grads_of_outputs, *inputs, *ctx.settings)
        of_rest, (of_num, of_den) = of_rest[:7], of_rest[7:]
        grads = [None if x is None else g for x, g in zip(inputs[:7], of_rest, strict=True)]
        num, den = inputs[8:10]
        of_state = [None, None, None]
        if num is not None:  # a larger maximum is larger sums
            of_top = by_key(num * of_num, den.shape[1]).sum(2) + den * of_den
            of_state = [of_num, of_den, of_top]
        return *grads, None, *of_state, *(None,) * len(ctx.settings)

    @staticmethod
    def vmap(info, in_dims, *args):
        (y,), (dim,) = map_over(_as_tuple, info.batch_size, in_dims, args)
        return y, dim


def _as_tuple(*args) -> tuple[Tensor]:
    return (_NativeWindow.apply(*args),)
