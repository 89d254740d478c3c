"""Whether what is timed is right: outputs and gradients against the same computation in float64."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aft.benchmark.work import Work

LIMIT = 1e-5
WEIGHTS = 2**22  # that the reference may write out by default, at 8 bytes and several times over


@dataclass(frozen=True)
class Verdict:
    """The relative error, and the largest that is let through."""

    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # NaN does not pass


def judge(work: Work, weights: int = WEIGHTS) -> Verdict:
    """The largest relative error of output and gradients; at most 1e-5, or twice that of ``impl="eager"``.

    What is right is the reference in float64; where it would write out more ``weights`` than that, the eager
    implementation in float64.
    """
    if work.variant is None:
        raise ValueError(f"{work.name} has no exact counterpart to be judged by")
    exact = work.variant("reference" if work.pairs <= weights else "eager", torch.float64)
    wanted = _results(exact)
    error = relative_error(_results(work), wanted)
    if error <= LIMIT:
        return Verdict(error, LIMIT)
    eager = relative_error(_results(work.variant("eager", torch.float32)), wanted)
    return Verdict(error, max(LIMIT, 2 * eager) if math.isfinite(eager) else LIMIT)


def relative_error(found: dict[str, list[Tensor]], wanted: dict[str, list[Tensor]]) -> float:
    r"""The largest \|found - wanted\| / \|wanted\| (2-norm) of any of the named lists of tensors, or NaN."""
    errors = []
    for name, tensors in wanted.items():
        size = _norm(tensors)
        difference = _norm([a.double() - b.double() for a, b in zip(found[name], tensors, strict=True)])
        errors.append(difference / size if size else difference)
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.hypot(*(x.double().norm().item() for x in tensors))


def _results(work: Work) -> dict[str, list[Tensor]]:
    """Output and gradients by name; the tensors of one projection under one name.

    The gradient of a key's bias is often exactly zero, as a shift of all keys changes nothing: on its own it
    has no size that an error could be relative to.
    """
    outputs, grads = work.results(work.upstream())
    found = {"outputs": list(outputs)}
    for (name, leaf), grad in zip(work.leaves.items(), grads, strict=True):
        module = name.rpartition(".")[0] or name
        found.setdefault(module, []).append(torch.zeros_like(leaf) if grad is None else grad)
    return found
