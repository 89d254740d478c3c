"""The four operations of the Attention Free Transformer. Read this file first.

Each function validates its arguments, states the problem in the common form of `aft.ops.spec`, chooses an
implementation and applies the query gate. Layout: queries [B, T, D], keys and values [B, S, D], where T and
S are lengths of time, in positions. Results are exact for finite input: no epsilon, no overflow, a query
with nothing to see gives zeros (see the numerics contract in the README).
"""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from aft.ops import eager, native, reference
from aft.ops.checks import (
    check_conv,
    check_devices,
    check_mask,
    check_position_bias,
    check_sequence,
    check_window,
    shape,
)
from aft.ops.spec import Bias, KernelBias, Problem, tensors_of, without_autocast

PositionBias = Tensor | tuple[Tensor, Tensor]
QueryGate = Callable[[Tensor], Tensor]

IMPLEMENTATIONS = {"reference": reference, "eager": eager, "native": native}


def available_impls() -> dict[str, str | None]:
    """Each ``impl`` by name: None where it can run here, else the reason why not."""
    return dict.fromkeys(IMPLEMENTATIONS) | {"native": native.unavailable()}


def implementation(impl: str, problem: Problem | None = None) -> ModuleType:
    """The module that ``impl`` names: its `mean` solves the problem. "auto" is the kernels where they can.

    Without a problem, as for a step, it is one whose `sums` solves any.

    Raises:
        ValueError: there is no such implementation, or the kernels cannot solve the problem.
    """
    check_impl(impl)
    if impl in ("auto", "native"):
        reason = "it has no kernel for this step" if problem is None else native.why_not(problem)
        if reason is not None and impl == "native":
            raise ValueError(f"impl='native' cannot run this: {reason}")
        if reason is None and impl == "auto" and problem is not None:
            reason = native.why_slow(problem)
        return native if reason is None else eager
    return IMPLEMENTATIONS[impl]


def check_impl(impl: str) -> None:
    """Raises ValueError, naming the choices, unless ``impl`` is one."""
    if impl not in ("auto", *IMPLEMENTATIONS):
        known = ", ".join(repr(x) for x in ("auto", *IMPLEMENTATIONS))
        raise ValueError(f"impl must be one of {known}, got {impl!r}")


def aft_full(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_bias: PositionBias,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    query_gate: QueryGate | None = torch.sigmoid,
    impl: str = "auto",
) -> Tensor:
    r"""AFT-full, equation 2 of the paper:

    y_t = gate(q_t) * sum_s exp(k_s + w_ts) * v_s / sum_s exp(k_s + w_ts), elementwise over D.

    Args:
        q: queries [B, T, D]; only the gate reads them.
        k, v: keys and values [B, S, D].
        position_bias: w, a table [T, S], one for each sequence [B, T, S], or a low-rank pair
            (u [T, R], v [S, R]) with w = u v^T (equation 7), of which no table is ever built. -inf hides
            that key from that query.
        causal: query t sees the keys s <= t only.
        key_padding_mask: bool [B, S], True where a key is to be ignored.
        attn_mask: bool [T, S] or [B, T, S], True where the query must not see the key.
        query_gate: any elementwise function of q in float32 or wider, or None for no gate.
        impl: "eager", "reference", or "auto", which chooses.

    Returns:
        [B, T, D] in the dtype of ``v``.

    Raises:
        ValueError, TypeError: an argument has the wrong shape or dtype; the message names both sides.

    Time O(T S D), memory O((T + S) D) beyond inputs and outputs, forward and backward.
    """
    problem = full_problem(q, k, v, position_bias, causal, key_padding_mask, attn_mask)
    return gated_mean(problem, q, query_gate, impl)


def aft_simple(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    query_gate: QueryGate | None = torch.sigmoid,
    impl: str = "auto",
) -> Tensor:
    r"""AFT-simple, equation 5: no position bias, so each channel is a softmax over time.

    y_t = gate(q_t) * sum_s exp(k_s) * v_s / sum_s exp(k_s). Arguments, result and errors as `aft_full`.

    Time and memory O((T + S) D); with an ``attn_mask`` time is O(T S D).
    """
    problem = simple_problem(q, k, v, causal, key_padding_mask, attn_mask)
    return gated_mean(problem, q, query_gate, impl)


def aft_local(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_bias: PositionBias,
    window_size: int,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    query_gate: QueryGate | None = torch.sigmoid,
    impl: str = "auto",
) -> Tensor:
    r"""AFT-local, equation 4: the bias counts where \|t - s\| < window_size and is 0, not -inf, elsewhere.

    Every key is still seen. ``position_bias`` as in `aft_full`; what it holds outside the window is never
    read. ``window_size`` 1 keeps the diagonal; from max(T, S) on this is AFT-full.

    Time O(T window_size D), memory O((T + S) D); with an ``attn_mask`` time is O(T S D).
    """
    problem = local_problem(q, k, v, position_bias, window_size, causal, key_padding_mask, attn_mask)
    return gated_mean(problem, q, query_gate, impl)


def aft_conv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    query_gate: QueryGate | None = torch.sigmoid,
    impl: str = "auto",
) -> Tensor:
    r"""AFT-conv, equation 6, over a sequence or over a grid: a position bias for each distance and head.

    Head i of H has one channel of keys, D / H channels of values, and a kernel whose entry for the distance
    from query to key is the bias inside the window; outside it is 0, and every key is still seen. That is
    [conv(exp(k) v, exp(w) - 1) + sum exp(k) v] / [conv(exp(k), exp(w) - 1) + sum exp(k)] without the
    cancellation that this form suffers when w is very negative.

    Args:
        q, v: [B, T, D] and [B, S, D]; on a grid [B, Y, X, D], where keys and values may have a grid of
            their own.
        k: one channel of keys for each head: [B, S, H], on a grid [B, Y, X, H].
        kernel: w, [H, K], on a grid [H, Ky, Kx]. It is laid over the sequence as ``conv1d(padding="same")``
            and ``conv2d(padding="same")`` lay theirs, cell (K - 1) // 2 on the query; a causal kernel over a
            sequence has its last cell on the query. Over a grid, causal means raster order, the kernel stays
            centred, and what it holds for later cells is never read.
        key_padding_mask: bool [B, S], on a grid [B, Y, X].
        attn_mask: as `aft_full`, over flattened positions on a grid.

    Other arguments, result and errors as `aft_full`. Time O(T K D) (on a grid Y X Ky X D), memory
    O((T + S) D); with an ``attn_mask`` time is O(T S D).
    """
    problem = conv_problem(q, k, v, kernel, causal, key_padding_mask, attn_mask)
    return gated_mean(problem, q.flatten(1, -2), query_gate, impl).view_as(q)


def gated_mean(problem: Problem, q: Tensor, query_gate: QueryGate | None, impl: str) -> Tensor:
    """Solves the problem with the chosen implementation and gates it by q [B, T, D]: [B, T, D]."""
    solver = implementation(impl, problem)
    if solver is native and query_gate is torch.sigmoid:
        return native.sigmoid_gated_mean(problem, q)
    return gated(solver.mean(problem), q, query_gate, problem.values.dtype)


def gated(mean: Tensor, q: Tensor, query_gate: QueryGate | None, dtype: torch.dtype) -> Tensor:
    """query_gate(q) * mean, computed in float32 or wider and returned as ``dtype``."""
    if query_gate is None:
        return mean.to(dtype)
    with without_autocast(q):
        gate = query_gate(q.to(torch.promote_types(q.dtype, torch.float32)))
        return (gate * mean).to(dtype)


def full_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_bias: PositionBias,
    causal: bool,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> Problem:
    """The validated arguments of `aft_full`."""
    return _sequence_problem("aft_full", q, k, v, position_bias, None, causal, key_padding_mask, attn_mask)


def simple_problem(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, key_padding_mask: Tensor | None, attn_mask: Tensor | None
) -> Problem:
    """The validated arguments of `aft_simple`."""
    return _sequence_problem("aft_simple", q, k, v, None, None, causal, key_padding_mask, attn_mask)


def local_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_bias: PositionBias,
    window_size: int,
    causal: bool,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> Problem:
    """The validated arguments of `aft_local`."""
    name = "aft_local"
    check_window(name, window_size)
    return _sequence_problem(name, q, k, v, position_bias, window_size, causal, key_padding_mask, attn_mask)


def conv_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    causal: bool,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> Problem:
    """The validated arguments of `aft_conv`, positions flattened."""
    name = "aft_conv"
    check_conv(name, q, k, v, kernel)
    space = kernel.ndim - 1
    query_grid, key_grid = _grid(q), _grid(v)
    if space == 2 and causal and query_grid[1] != key_grid[1]:
        raise ValueError(
            f"{name}: causal over a grid needs rows of one width, got q {shape(q)} and v {shape(v)}"
        )
    if space == 2 and isinstance(key_padding_mask, Tensor):
        if key_padding_mask.shape != k.shape[:-1]:
            raise ValueError(
                f"{name}: key_padding_mask must be {tuple(k.shape[:-1])} as k {shape(k)}, "
                f"got {shape(key_padding_mask)}"
            )
        key_padding_mask = key_padding_mask.flatten(1)
    planar = kernel[:, None] if space == 1 else kernel
    height, width = planar.shape[1:]
    anchor = (0, width - 1) if space == 1 and causal else ((height - 1) // 2, (width - 1) // 2)
    bias = KernelBias(planar, query_grid, key_grid, anchor)
    q, k, v = (x.flatten(1, -2) for x in (q, k, v))
    return _problem(name, q, k, v, bias, None, causal, key_padding_mask, attn_mask)


def _sequence_problem(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_bias: PositionBias | None,
    window_size: int | None,
    causal: bool,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> Problem:
    check_sequence(name, q, k, v)
    bias: Bias = None
    if position_bias is not None or name != "aft_simple":
        bias = check_position_bias(name, position_bias, q.shape[0], q.shape[1], k.shape[1])
    return _problem(name, q, k, v, bias, window_size, causal, key_padding_mask, attn_mask)


def _problem(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias,
    window_size: int | None,
    causal: bool,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> Problem:
    B, T, S = q.shape[0], q.shape[1], k.shape[1]
    check_mask(name, "key_padding_mask", key_padding_mask, {"[B, S]": (B, S)})
    check_mask(name, "attn_mask", attn_mask, {"[T, S]": (T, S), "[B, T, S]": (B, T, S)})
    check_devices(name, q, k, v, *tensors_of(bias), key_padding_mask, attn_mask)
    return Problem(k, v, T, bias, window_size, causal, key_padding_mask, attn_mask)


def _grid(x: Tensor) -> tuple[int, int]:
    """(rows, columns) of [B, T, D] (one row) or [B, Y, X, D]."""
    return (1, x.shape[1]) if x.ndim == 3 else (x.shape[1], x.shape[2])
