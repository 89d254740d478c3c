"""Layers to time: this library's, the projections alone, and attention in the same four projections."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aft.benchmark.work import Work, attend, solver_of
from aft.layers.base import AFTLayer


class DotProduct(nn.Module):
    """The AFT layers' four projections around `scaled_dot_product_attention`."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.out_proj(attend(q, k, v, self.heads, self.causal))


def layer(name: str, module: AFTLayer, x: Tensor) -> Work:
    """An AFT layer on its own input; biases and kernels, which start at zero, are drawn at random."""
    with torch.no_grad():
        for label, parameter in module.named_parameters():
            if "position_bias" in label:
                rank = 1 if module.bias_rank is None else module.bias_rank
                parameter.normal_(std=rank**-0.25)
            elif "kernel" in label:
                parameter.normal_()

    def variant(impl: str, dtype: torch.dtype) -> Work:
        other = copy.deepcopy(module).to(dtype)
        other.impl = impl
        return of_module(name, other, x.to(dtype), lambda given: given[0], variant, pairs, solver)

    with torch.no_grad():
        q, k, v = module._project(x, x, x)
        problem = module._problem(q, k, v, module.causal, None, None)
    pairs = problem.keys.shape[0] * problem.target_length * problem.keys.shape[1] * problem.keys.shape[2]
    solver = solver_of(problem)
    return of_module(name, module, x, lambda given: given[0], variant, pairs, solver)


def projections(name: str, module: AFTLayer, x: Tensor) -> Work:
    """A layer's four projections alone, each of its input."""
    linear = nn.ModuleDict(
        {label: copy.deepcopy(getattr(module, label)) for label in ("q_proj", "k_proj", "v_proj", "out_proj")}
    )
    linear.forward = lambda x: [each(x) for each in linear.values()]
    return of_module(name, linear, x)


def of_module(
    name: str,
    module: nn.Module,
    x: Tensor,
    taken: Callable[[Any], Tensor | Sequence[Tensor]] = lambda given: given,
    variant: Callable[[str, torch.dtype], Work] | None = None,
    pairs: int = 0,
    solver: str = "",
) -> Work:
    """Any module on one input; ``taken`` picks the output from what it returns."""
    x = x.detach().requires_grad_()
    leaves = {"x": x} | dict(module.named_parameters())
    return Work(name, leaves, lambda: taken(module(x)), variant, pairs, solver)
