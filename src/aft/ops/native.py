"""The C++ kernels for CPUs, from the sources in ``native/``: AFT-simple at about the speed of memory.

They are compiled for several levels of vector instructions, of which the best that the processor has is in
use; the environment variable AFT_NATIVE_LEVEL (portable, avx2, avx512) asks for another. As many threads work
as ``torch.get_num_threads()`` says.

The passes are torch operators without autograd of their own (``torch.ops.aft.native_simple`` and
``native_simple_backward``), and an autograd Function joins them. The forward pass saves the running sums of
every 32nd position, and the backward pass begins from these.
"""

import importlib
import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aft.ops.operators import map_over, register
from aft.ops.spec import Problem, without_autocast
from aft.ops.state import AFTState

LEVEL_VARIABLE = "AFT_NATIVE_LEVEL"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _load() -> tuple[Any, str | None]:
    """The compiled module, or None and why it is not there."""
    try:
        return importlib.import_module("aft.ops._native"), None
    except ModuleNotFoundError:
        return None, (
            "the C++ kernels were not built, for want of a C++17 compiler when the package was installed: "
            "install it again where g++ or clang++ is"
        )
    except ImportError as error:
        return None, f"the C++ kernels cannot be loaded: {error}"


_native, _REASON = _load()


def unavailable() -> str | None:
    """Why no kernel can run here, None where they can."""
    if _native is None:
        return _REASON
    level = os.environ.get(LEVEL_VARIABLE)
    if not _native.use_level(level or ""):
        return f"{LEVEL_VARIABLE} must be one of {', '.join(_native.levels())} on this machine, got {level!r}"
    return None


def why_not(problem: Problem) -> str | None:
    """Why the kernels cannot solve this problem, None where they can."""
    # The environment cannot be asked while a graph is traced.
    reason = _REASON if torch.compiler.is_compiling() else unavailable()
    if reason is not None:
        return reason
    keys, values = problem.keys, problem.values
    if keys.device.type != "cpu":
        return f"its kernels are for the CPU, and the keys are on {keys.device}"
    if problem.bias is not None:
        return "it has kernels for AFT-simple only"
    if problem.attn_mask is not None:
        return "it has no kernel for an attn_mask"
    if keys.dtype not in DTYPES or values.dtype != keys.dtype:
        return f"k and v must both be float32, bfloat16 or float16, got {keys.dtype} and {values.dtype}"
    return None


def mean(problem: Problem) -> Tensor:
    """The weighted mean of the values, [B, T, D] in float32, without a gate. Time and memory O(T D)."""
    return _solve(problem, None)


def sigmoid_gated_mean(problem: Problem, q: Tensor) -> Tensor:
    """sigmoid(q) times the mean of the values, [B, T, D] in the dtype of the values, in one pass."""
    if q.dtype != problem.values.dtype:
        with without_autocast(q):
            return (torch.sigmoid(q.to(torch.promote_types(q.dtype, torch.float32))) * mean(problem)).to(
                problem.values.dtype
            )
    return _solve(problem, q)


def simple_step(problem: Problem, q: Tensor | None, past: AFTState) -> tuple[Tensor, AFTState]:
    """Causal AFT-simple over n more positions, and the state after them: O(n D), one pass in float64.

    The result [B, n, D] is gated by sigmoid(q), which has the dtype of the values, or without q the mean in
    float32. Gradients flow through both states; the maximum of the later one is a constant to them.
    """
    k, v = problem.keys, problem.values
    if k.dtype == torch.float16:
        y, state = simple_step(_widened(problem), None if q is None else q.float(), past)
        return y if q is None else y.half(), state
    state = (past.num[..., 0], past.den, past.max)
    tracked = _is_tracked(q, k, v, *state)
    call = _NativeStep.apply if tracked or _is_transformed() else _STEP
    y, num, den, top, _ = call(q, k, v, problem.key_padding_mask, *state, tracked)
    return y, past._replace(num=num[..., None], den=den, max=top, length=past.length + k.shape[1])


def _widened(problem: Problem) -> Problem:
    """The same in float32: the kernels do not read float16."""
    return replace(problem, keys=problem.keys.float(), values=problem.values.float())


def _is_tracked(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _is_transformed() -> bool:
    """Whether torch.func's transforms, as vmap, are to see the autograd Functions.

    Dynamo, which transforms for itself, cannot trace one of which no input wants a gradient, nor one inside
    another's backward. Elsewhere a Function without gradients is time lost: as much as a short call takes.
    """
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _solve(problem: Problem, q: Tensor | None) -> Tensor:
    k, v = problem.keys, problem.values
    if k.dtype == torch.float16:
        y = _solve(_widened(problem), None if q is None else q.float())
        return y if q is None else y.half()
    tracked = _is_tracked(q, k, v)
    call = _NativeSimple.apply if tracked or _is_transformed() else _SIMPLE
    return call(q, k, v, problem.key_padding_mask, problem.target_length, problem.causal, tracked)[0]


def native_simple(
    q: Tensor | None, k: Tensor, v: Tensor, hidden: Tensor | None, T: int, causal: bool, save: bool
) -> tuple[Tensor, Tensor]:
    """AFT-simple: y [B, T, D], gated by sigmoid(q) in the dtype of v, or without q the mean in float32.

    Also, with ``save``, the running sums before each block of 32 queries and after the last, else an empty
    tensor: (num, den, origin of the exponents, whether gradients take float64), float64
    [B, blocks + 1, 4, D]; of a bidirectional mean those over no key and over all.
    """
    q, k, v = None if q is None else _readable(q), _readable(k), _readable(v)
    y, saved = _fake_simple(q, k, v, hidden, T, causal, save)
    problem = _problem(q, k, v, hidden, T, causal, saved)
    problem.y = _rows(y)
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
    grad, k, v = _readable(grad), _readable(k), _readable(v)
    q = None if q is None else _readable(q)
    grads = _fake_simple_backward(grad, saved, q, k, v, hidden, T, causal)
    problem = _problem(q, k, v, hidden, T, causal, saved)
    problem.grad = _rows(grad)
    problem.grad_q, problem.grad_k, problem.grad_v = (_rows(x) for x in grads)
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
    q, k, v = None if q is None else _readable(q), _readable(k), _readable(v)
    num, den, top = (x.contiguous() for x in (num, den, top))
    outputs = _fake_simple_step(q, k, v, hidden, num, den, top, save)
    y, *after, saved = outputs
    problem = _problem(q, k, v, hidden, k.shape[1], True, saved)
    problem.before, problem.after = _state(num, den, top), _state(*after)
    problem.y = _rows(y)
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
    grad, k, v = _readable(grad), _readable(k), _readable(v)
    q = None if q is None else _readable(q)
    grad_num, grad_den = grad_num.contiguous(), grad_den.contiguous()
    grads = _fake_simple_step_backward(grad, grad_num, grad_den, saved, q, k, v, hidden)
    problem = _problem(q, k, v, hidden, k.shape[1], True, saved)
    problem.grad_after, problem.grad_before = _state(grad_num, grad_den), _state(*grads[3:])
    problem.grad = _rows(grad)
    problem.grad_q, problem.grad_k, problem.grad_v = (_rows(x) for x in grads[:3])
    problem.backward(torch.get_num_threads())
    return grads


def _state(num: Tensor, den: Tensor, top: Tensor | None = None):
    """Of contiguous tensors that the caller keeps alive."""
    return _native.State(num.data_ptr(), den.data_ptr(), 0 if top is None else top.data_ptr())


def _problem(q, k, v, hidden, T, causal, saved):
    problem = _native.Simple()
    problem.batches, problem.keys, problem.channels = k.shape
    problem.queries, problem.causal, problem.gated = T, causal, q is not None
    problem.bfloat16 = k.dtype == torch.bfloat16
    problem.k, problem.v = _rows(k), _rows(v)
    if q is not None:
        problem.q = _rows(q)
    if hidden is not None:
        problem.hidden = _rows(hidden)
    if saved.numel():
        problem.save_to(saved.data_ptr())
    return problem


def _readable(x: Tensor) -> Tensor:
    """The tensor, copied only if its channels do not lie side by side."""
    return x if x.stride(2) == 1 or x.shape[2] <= 1 else x.contiguous()


def _rows(x: Tensor):
    return _native.Rows(x.data_ptr(), x.stride(0), x.stride(1)) if x.ndim > 1 else _native.Rows(0, 0, 0)


def _fake_simple(q, k, v, hidden, T, causal, save):
    B, _, D = k.shape
    y = v.new_empty(B, T, D, dtype=torch.float32 if q is None else v.dtype)
    blocks = (T + _native.BLOCK - 1) // _native.BLOCK if causal else 1
    size = (B, blocks + 1, _native.SAVED_FIELDS, D) if save else (0,)
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
        differentiate = _NativeSimpleBackward.apply if _may_differentiate_again() else _SIMPLE_BACKWARD
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
        differentiate = _NativeStepBackward.apply if _may_differentiate_again() else _STEP_BACKWARD
        grads = differentiate(grad, grad_num, grad_den, saved, *inputs[:4])
        of_q = None if inputs[0] is None else grads[0]
        # A larger maximum is larger sums.
        of_top = inputs[4] * grads[3] + inputs[5] * grads[4]
        return of_q, grads[1], grads[2], None, grads[3], grads[4], of_top, None

    @staticmethod
    def vmap(info, in_dims, *args):
        return map_over(_NativeStep.apply, info.batch_size, in_dims, args)


def _may_differentiate_again() -> bool:
    """Whether a backward pass is itself recorded. Compiled graphs have no second derivatives."""
    recorded = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return recorded or _is_transformed()


class _FirstDerivative(torch.autograd.Function):
    """Operators that compute gradients: they have none of their own."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            "impl='native' has no second derivative of an AFT operation; impl='reference' differentiates "
            "twice"
        )


class _NativeSimpleBackward(_FirstDerivative):
    @staticmethod
    def forward(*args):
        return _SIMPLE_BACKWARD(*args)

    @staticmethod
    def vmap(info, in_dims, *args):
        return map_over(_NativeSimpleBackward.apply, info.batch_size, in_dims, args)


class _NativeStepBackward(_FirstDerivative):
    @staticmethod
    def forward(*args):
        return _STEP_BACKWARD(*args)

    @staticmethod
    def vmap(info, in_dims, *args):
        return map_over(_NativeStepBackward.apply, info.batch_size, in_dims, args)
