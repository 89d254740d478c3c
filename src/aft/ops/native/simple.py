"""AFT-simple, and its step, as operators over the C++ kernels.

The passes are torch operators without autograd of their own (``torch.ops.aft.native_simple`` and
``native_simple_backward``), and an autograd Function joins them. The forward pass saves the running sums of
every 32nd position, and the backward pass begins from these.
"""

import torch
from torch import Tensor

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
from aft.ops.spec import Problem
from aft.ops.state import AFTState


def step(problem: Problem, q: Tensor | None, past: AFTState) -> tuple[Tensor, AFTState]:
    """Causal AFT-simple over n more positions, and the state after them: O(n D), one pass in float64.

    The result [B, n, D] is gated by sigmoid(q), which has the dtype of the values, or without q the mean in
    float32. Gradients flow through both states; the maximum of the later one is a constant to them.
    """
    k, v = problem.keys, problem.values
    before = (past.num[..., 0], past.den, past.max)
    tracked = is_tracked(q, k, v, *before)
    call = _NativeStep.apply if tracked or is_transformed() else _STEP
    y, num, den, top, _ = call(q, k, v, problem.key_padding_mask, *before, tracked)
    return y, past._replace(num=num[..., None], den=den, max=top, length=past.length + k.shape[1])


def solve(problem: Problem, q: Tensor | None) -> Tensor:
    """The mean [B, T, D] in float32, or gated by sigmoid(q) in the dtype of the values."""
    k, v = problem.keys, problem.values
    tracked = is_tracked(q, k, v)
    call = _NativeSimple.apply if tracked or is_transformed() else _SIMPLE
    return call(q, k, v, problem.key_padding_mask, problem.target_length, problem.causal, tracked)[0]


def native_simple(
    q: Tensor | None, k: Tensor, v: Tensor, hidden: Tensor | None, T: int, causal: bool, save: bool
) -> tuple[Tensor, Tensor]:
    """AFT-simple: y [B, T, D], gated by sigmoid(q) in the dtype of v, or without q the mean in float32.

    Also, with ``save``, the running sums before each block of 32 queries and after the last, else an empty
    tensor: (num, den, origin of the exponents, whether gradients take float64), float64
    [B, blocks + 1, 4, D]; of a bidirectional mean those over no key and over all.
    """
    q, k, v = None if q is None else readable(q), readable(k), readable(v)
    y, saved = _fake_simple(q, k, v, hidden, T, causal, save)
    problem = _problem(q, k, v, hidden, T, causal, saved)
    problem.y = rows(y)
    problem.forward(torch.get_num_threads())
    return y, saved


def native_simple_backward(
    grad: Tensor,
    saved: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    hidden: Tensor | None,
    T: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q (empty where there is none), k and v from that of y."""
    if saved.numel() == 0:  # under vmap a tensor does not say that it wants a gradient
        saved = native_simple(q, k, v, hidden, T, causal, True)[1]
    grad, k, v = readable(grad), readable(k), readable(v)
    q = None if q is None else readable(q)
    grads = _fake_simple_backward(grad, saved, q, k, v, hidden, T, causal)
    problem = _problem(q, k, v, hidden, T, causal, saved)
    problem.grad = rows(grad)
    problem.grad_q, problem.grad_k, problem.grad_v = (rows(x) for x in grads)
    problem.backward(torch.get_num_threads())
    return grads


def native_simple_step(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    hidden: Tensor | None,
    num: Tensor,
    den: Tensor,
    top: Tensor,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y and saved as `native_simple`, and between them the state after: num, den and max, float64 [B, D]."""
    q, k, v = None if q is None else readable(q), readable(k), readable(v)
    num, den, top = (x.contiguous() for x in (num, den, top))
    outputs = _fake_simple_step(q, k, v, hidden, num, den, top, save)
    y, *after, saved = outputs
    problem = _problem(q, k, v, hidden, k.shape[1], True, saved)
    problem.before, problem.after = state(num, den, top), state(*after)
    problem.y = rows(y)
    problem.forward(torch.get_num_threads())
    return outputs


def native_simple_step_backward(
    grad: Tensor,
    grad_num: Tensor,
    grad_den: Tensor,
    saved: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    hidden: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q (empty where there is none), k, v, and num and den of the state before."""
    grad, k, v = readable(grad), readable(k), readable(v)
    q = None if q is None else readable(q)
    grad_num, grad_den = grad_num.contiguous(), grad_den.contiguous()
    grads = _fake_simple_step_backward(grad, grad_num, grad_den, saved, q, k, v, hidden)
    problem = _problem(q, k, v, hidden, k.shape[1], True, saved)
    problem.grad_after, problem.grad_before = state(grad_num, grad_den), state(*grads[3:])
    problem.grad = rows(grad)
    problem.grad_q, problem.grad_k, problem.grad_v = (rows(x) for x in grads[:3])
    problem.backward(torch.get_num_threads())
    return grads


def _problem(q, k, v, hidden, T, causal, saved):
    problem = kernels.Simple()
    problem.batches, problem.keys, problem.channels = k.shape
    problem.queries, problem.causal, problem.gated = T, causal, q is not None
    problem.bfloat16 = k.dtype == torch.bfloat16
    problem.k, problem.v = rows(k), rows(v)
    if q is not None:
        problem.q = rows(q)
    if hidden is not None:
        problem.hidden = rows(hidden)
    if saved.numel():
        problem.save_to(saved.data_ptr())
    return problem


def _fake_simple(q, k, v, hidden, T, causal, save):
    B, _, D = k.shape
    y = v.new_empty(B, T, D, dtype=torch.float32 if q is None else v.dtype)
    blocks = (T + kernels.BLOCK - 1) // kernels.BLOCK if causal else 1
    size = (B, blocks + 1, kernels.SAVED_FIELDS, D) if save else (0,)
    return y, k.new_empty(size, dtype=torch.float64)


def _fake_simple_step(q, k, v, hidden, num, den, top, save):
    y, saved = _fake_simple(q, k, v, hidden, k.shape[1], True, save)
    return y, *(x.new_empty(x.shape) for x in (num, den, top)), saved


def _fake_simple_step_backward(grad, grad_num, grad_den, saved, *inputs):
    return *_fake_simple_backward(grad, saved, *inputs), *(x.new_empty(x.shape) for x in (grad_num, grad_den))


def _fake_simple_backward(grad, saved, q, k, v, *_):
    return tuple(k.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v))


_CALL = "Tensor? q, Tensor k, Tensor v, Tensor? hidden, SymInt T, bool causal"
_SIMPLE = register(native_simple, _fake_simple, f"({_CALL}, bool save) -> (Tensor, Tensor)")
_SIMPLE_BACKWARD = register(
    native_simple_backward,
    _fake_simple_backward,
    f"(Tensor grad, Tensor saved, {_CALL}) -> (Tensor, Tensor, Tensor)",
)

_STEP = register(
    native_simple_step,
    _fake_simple_step,
    "(Tensor? q, Tensor k, Tensor v, Tensor? hidden, Tensor num, Tensor den, Tensor top, bool save) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_STEP_BACKWARD = register(
    native_simple_step_backward,
    _fake_simple_step_backward,
    "(Tensor grad, Tensor grad_num, Tensor grad_den, Tensor saved, Tensor? q, Tensor k, Tensor v, "
    "Tensor? hidden) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_SIMPLE_GRADIENTS = without_derivative(_SIMPLE_BACKWARD, "native")
_STEP_GRADIENTS = without_derivative(_STEP_BACKWARD, "native")


class _NativeSimple(torch.autograd.Function):
    """The result; the running sums that come with it are constants."""

    @staticmethod
    def forward(*args):
        return _SIMPLE(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1], *inputs[:4])
        ctx.settings = inputs[4:6]

    @staticmethod
    def backward(ctx, *grads_of_outputs):
        grad = grads_of_outputs[0]
        saved = ctx.saved_tensors  # read once: under activation checkpointing there is no second time
        differentiate = _SIMPLE_GRADIENTS.apply if may_differentiate_again() else _SIMPLE_BACKWARD
        grad_q, grad_k, grad_v = differentiate(grad, *saved, *ctx.settings)
        return None if saved[1] is None else grad_q, grad_k, grad_v, None, None, None, None

    @staticmethod
    def vmap(info, in_dims, *args):
        return map_over(_NativeSimple.apply, info.batch_size, in_dims, args)


class _NativeStep(torch.autograd.Function):
    """The result, num and den; the maximum that the latter are relative to is a constant."""

    @staticmethod
    def forward(*args):
        return _STEP(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(*output[3:])
        ctx.save_for_backward(*inputs[:7], output[4])

    @staticmethod
    def backward(ctx, *grads_of_outputs):
        grad, grad_num, grad_den = grads_of_outputs[:3]
        *inputs, saved = ctx.saved_tensors
        if saved.numel() == 0:  # under vmap a tensor does not say that it wants a gradient
            saved = _STEP(*inputs, True)[4]
        differentiate = _STEP_GRADIENTS.apply if may_differentiate_again() else _STEP_BACKWARD
        grads = differentiate(grad, grad_num, grad_den, saved, *inputs[:4])
        of_q = None if inputs[0] is None else grads[0]
        # A larger maximum is larger sums.
        of_top = inputs[4] * grads[3] + inputs[5] * grads[4]
        return of_q, grads[1], grads[2], None, grads[3], grads[4], of_top, None

    @staticmethod
    def vmap(info, in_dims, *args):
        return map_over(_NativeStep.apply, info.batch_size, in_dims, args)
