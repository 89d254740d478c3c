"""The C++ kernels for CPUs, from the sources in ``native/``: AFT-simple, -local, -conv, and short AFT-full.

They are compiled for several levels of vector instructions, of which the best that the processor has is in
use; the environment variable AFT_NATIVE_LEVEL (portable, avx2, avx512) asks for another. As many threads work
as ``torch.get_num_threads()`` says.
"""

from dataclasses import replace

import torch
from torch import Tensor

from aft.ops.native import library, simple, window
from aft.ops.native.library import unavailable
from aft.ops.spec import DenseBias, KernelBias, LowRankBias, Problem, tensors_of, without_autocast
from aft.ops.state import AFTState

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Pairs of a query and a key in AFT-full, and keys of AFT-local's windows: of more, the matrix products of
# impl="eager" are faster; and so they are with a backward pass to come of more than FEW_PAIRS.
MOST_PAIRS, FEW_PAIRS = 1 << 20, 1 << 15
MOST_CELLS, FEW_CELLS = 512, 128


def why_not(problem: Problem) -> str | None:
    """Why the kernels cannot solve this problem, None where they can."""
    # The environment cannot be asked while a graph is traced.
    reason = library.reason if torch.compiler.is_compiling() else unavailable()
    if reason is not None:
        return reason
    keys, values = problem.keys, problem.values
    if keys.device.type != "cpu":
        return f"its kernels are for the CPU, and the keys are on {keys.device}"
    if problem.attn_mask is not None:
        return "it has no kernel for an attn_mask"
    if keys.dtype not in DTYPES or values.dtype != keys.dtype:
        return f"k and v must both be float32, bfloat16 or float16, got {keys.dtype} and {values.dtype}"
    return _why_not_bias(problem)


def _why_not_bias(problem: Problem) -> str | None:
    match problem.bias:
        case KernelBias(kernel, query_grid, key_grid):
            if query_grid != key_grid and not (query_grid[0] == key_grid[0] == kernel.shape[1] == 1):
                return f"queries and keys must share one grid, got {query_grid} and {key_grid}"
        case None:
            return None
    pairs = _pairs(problem)
    if pairs > MOST_PAIRS:
        return f"its kernels are for AFT-full of up to {MOST_PAIRS} pairs, this one has {pairs}"
    if problem.window_size is not None:
        reach = window.reach(problem)
        # The bands of biases and of their gradients are to be small beside the values.
        most = min(MOST_CELLS, max(FEW_CELLS, 2 * problem.values.shape[0] * problem.values.shape[2]))
        if reach > most:
            return f"its kernels are for windows of up to {most} keys here, this one reaches {reach}"
    for tensor in tensors_of(problem.bias):
        if tensor.dtype not in DTYPES:
            return f"position biases must be float32, bfloat16 or float16, got {tensor.dtype}"
    return None


def why_slow(problem: Problem) -> str | None:
    """Why impl="eager" is faster at a problem that the kernels can solve, None where they are."""
    tracked = library.is_tracked(problem.keys, problem.values, *tensors_of(problem.bias))
    if tracked and _pairs(problem) > FEW_PAIRS:
        return f"with gradients its kernels are slower at AFT-full of more than {FEW_PAIRS} pairs"
    return None


def _pairs(problem: Problem) -> int:
    """Of a query and a key that it sees in AFT-full; 0 of other operations."""
    if problem.window_size is not None or not isinstance(problem.bias, (DenseBias, LowRankBias)):
        return 0
    return problem.target_length * problem.keys.shape[1] // (2 if problem.causal else 1)


def mean(problem: Problem) -> Tensor:
    """The weighted mean of the values, [B, T, D] in float32, without a gate.

    Time O(T D) without a bias, O(T s D) for a window or a kernel of s; memory O(T D).
    """
    return _solve(problem, None)


def sigmoid_gated_mean(problem: Problem, q: Tensor) -> Tensor:
    """sigmoid(q) times the mean of the values, [B, T, D] in the dtype of the values, in one pass."""
    if q.dtype != problem.values.dtype:
        with without_autocast(q):
            return (torch.sigmoid(q.to(torch.promote_types(q.dtype, torch.float32))) * mean(problem)).to(
                problem.values.dtype
            )
    return _solve(problem, q)


def _solve(problem: Problem, q: Tensor | None) -> Tensor:
    if problem.keys.dtype == torch.float16:
        y = _solve(_widened(problem), None if q is None else q.float())
        return y if q is None else y.half()
    return (simple if problem.bias is None else window).solve(problem, q)


def simple_step(problem: Problem, q: Tensor | None, past: AFTState) -> tuple[Tensor, AFTState]:
    """Causal AFT-simple over n more positions, and the state after them: see `aft.ops.native.simple.step`."""
    if problem.keys.dtype == torch.float16:
        y, state = simple.step(_widened(problem), None if q is None else q.float(), past)
        return y if q is None else y.half(), state
    return simple.step(problem, q, past)


def continued_mean(problem: Problem, past: AFTState) -> Tensor:
    """The mean at the last T of S keys in a causal stream of AFT-local or AFT-conv, [B, T, D] in float32.

    The sums of ``past`` hold the keys before these, its recent ones come first among them. Gradients flow to
    the sums.
    """
    if problem.keys.dtype == torch.float16:
        problem = _widened(problem)
    return window.solve(problem, None, past)


def _widened(problem: Problem) -> Problem:
    """The same in float32: the kernels do not read float16."""
    return replace(problem, keys=problem.keys.float(), values=problem.values.float())
