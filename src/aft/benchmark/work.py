"""What is measured: a computation from tensors to outputs, as a forward pass or with its gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aft.ops import aft_conv, aft_full, aft_local, aft_simple, native
from aft.ops.functional import conv_problem, full_problem, implementation, local_problem, simple_problem
from aft.ops.spec import Problem

FORWARD, BOTH = "forward", "forward and backward"
PASSES = (FORWARD, BOTH)
Leaves = dict[str, Tensor]


@dataclass(frozen=True)
class Work:
    """A computation.

    Attributes:
        leaves: the tensors that it starts from, by name, and is differentiated by.
        call: computes the outputs from ``leaves``.
        variant: the same computation by another implementation (``impl``) in another dtype. None where
            nothing says what is right.
        pairs: (query, key, channel) triples, the size of a reference that writes out all weights.
        solver: the implementation that ``impl="auto"`` chooses, and why not the kernels. Empty if not AFT.
    """

    name: str
    leaves: Leaves
    call: Callable[[], Tensor | Sequence[Tensor]]
    variant: "Callable[[str, torch.dtype], Work] | None" = None
    pairs: int = 0
    solver: str = ""

    def outputs(self) -> tuple[Tensor, ...]:
        found = self.call()
        return (found,) if isinstance(found, Tensor) else tuple(found)

    def upstream(self) -> list[Tensor]:
        """Gradients of the outputs, standard normal, the same for outputs of the same shapes."""
        with torch.no_grad():
            outputs = self.outputs()
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]

    def runner(self, which: str) -> Callable[[], object]:
        """One pass as a function: FORWARD without a graph, or BOTH with the gradients of all leaves."""
        if which == FORWARD:
            return torch.no_grad()(self.outputs)
        upstream = self.upstream()
        return lambda: self.results(upstream)

    def results(self, upstream: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """The outputs, and the gradients of the leaves; None where a leaf has no part in the outputs."""
        outputs = self.outputs()
        grads = torch.autograd.grad(outputs, list(self.leaves.values()), upstream, allow_unused=True)
        return tuple(y.detach() for y in outputs), grads


def normal_inputs(
    batch: int, length: int, width: int, heads: int = 8, rank: int = 16, seed: int = 0
) -> Leaves:
    """Standard normal q, k, v [B, T, D]; keys of ``heads`` channels; the two factors [T, rank] of a bias."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = (normal(batch, length, width) for _ in range(3))
    # Products of rank terms, of about unit size.
    left, right = (normal(length, rank) * rank**-0.25 for _ in range(2))
    return {
        "q": q,
        "k": k,
        "v": v,
        "keys_of_heads": normal(batch, length, heads),
        "left": left,
        "right": right,
    }


def one_pass(inputs: Leaves) -> Work:
    """`torch.addcmul(q, k, v)`: three tensors read, one written, next to nothing computed."""
    q, k, v = leaves = _leaves(inputs, "q", "k", "v")
    return Work("addcmul", dict(zip("qkv", leaves, strict=True)), lambda: torch.addcmul(q, k, v))


def simple(inputs: Leaves, causal: bool = True) -> Work:
    return _operation("AFT-simple", aft_simple, simple_problem, _named(inputs, "q", "k", "v"), causal)


def full(inputs: Leaves, causal: bool = True, low_rank: bool = False) -> Work:
    name = "AFT-full, low rank" if low_rank else "AFT-full"
    leaves = _named(inputs, "q", "k", "v") | _bias(inputs, low_rank)

    def call(q: Tensor, k: Tensor, v: Tensor, *bias: Tensor, **options: Any) -> Tensor:
        return aft_full(q, k, v, _of_rank(bias), **options)

    def problem(q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> Problem:
        return full_problem(q, k, v, _of_rank(bias[:-3]), *bias[-3:])  # type: ignore[arg-type]

    return _operation(name, call, problem, leaves, causal)


def local(inputs: Leaves, window: int = 32, causal: bool = True, low_rank: bool = False) -> Work:
    name = f"AFT-local, window {window}" + ", low rank" * low_rank
    leaves = _named(inputs, "q", "k", "v") | _bias(inputs, low_rank)

    def call(q: Tensor, k: Tensor, v: Tensor, *bias: Tensor, **options: Any) -> Tensor:
        return aft_local(q, k, v, _of_rank(bias), window, **options)

    def problem(q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> Problem:
        return local_problem(q, k, v, _of_rank(bias[:-3]), window, *bias[-3:])  # type: ignore[arg-type]

    return _operation(name, call, problem, leaves, causal)


def conv(inputs: Leaves, kernel: int = 32, causal: bool = True) -> Work:
    """AFT-conv with a head for each of ``inputs["keys_of_heads"]``'s channels."""
    heads = inputs["keys_of_heads"].shape[2]
    weights = torch.randn(heads, kernel, generator=torch.Generator().manual_seed(2))
    named = {"q": inputs["q"], "k": inputs["keys_of_heads"], "v": inputs["v"], "kernel": weights}
    name = f"AFT-conv, kernel {kernel}, {heads} heads"
    return _operation(name, aft_conv, conv_problem, named, causal)


def dot_product(inputs: Leaves, causal: bool = True) -> Work:
    """PyTorch's fused attention, with as many heads as AFT-conv has."""
    q, k, v = leaves = _leaves(inputs, "q", "k", "v")
    heads = inputs["keys_of_heads"].shape[2]
    return Work(
        f"dot product, {heads} heads",
        dict(zip("qkv", leaves, strict=True)),
        lambda: attend(q, k, v, heads, causal),
    )


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool) -> Tensor:
    """`scaled_dot_product_attention` of [B, T, D] in heads, [B, T, D]."""
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def solver_of(problem: Problem) -> str:
    """The implementation that ``impl="auto"`` chooses, with the reason where that is not the kernels."""
    with torch.no_grad():
        forward = _chosen(problem)
    with torch.enable_grad():
        both = _chosen(problem)
    return both if both == forward else f"{forward} forward, with gradients {both}"


def _chosen(problem: Problem) -> str:
    chosen = implementation("auto", problem)
    if chosen is native:
        return "native"
    return f"{chosen.__name__.rpartition('.')[2]}: {native.why_not(problem) or native.why_slow(problem)}"


def _operation(
    name: str,
    operation: Callable[..., Tensor],
    problem: Callable[..., Problem],
    tensors: Leaves,
    causal: bool,
) -> Work:
    def variant(impl: str, dtype: torch.dtype) -> Work:
        leaves = {label: x.detach().to(dtype).requires_grad_() for label, x in tensors.items()}
        return Work(
            name,
            leaves,
            lambda: operation(*leaves.values(), causal=causal, impl=impl),
            variant,
            pairs,
            solver,
        )

    B, S, H = tensors["k"].shape
    pairs = B * S * S * H
    solver = solver_of(problem(*tensors.values(), causal, None, None))
    return variant("auto", torch.float32)


def _bias(inputs: Leaves, low_rank: bool) -> Leaves:
    if low_rank:
        return _named(inputs, "left", "right")
    return {"position_bias": inputs["left"] @ inputs["right"].T}


def _of_rank(bias: Sequence[Tensor]) -> Any:
    """A table alone, or a pair of factors."""
    return bias[0] if len(bias) == 1 else tuple(bias)


def _named(inputs: Leaves, *names: str) -> Leaves:
    return {name: inputs[name] for name in names}


def _leaves(inputs: Leaves, *names: str) -> tuple[Tensor, ...]:
    return tuple(inputs[name].detach().requires_grad_() for name in names)
