"""The specification itself, against a loop over the paper's sums."""

import pytest
import torch

from aft.ops import aft_full
from operations import GRID_OPERATIONS, SEQUENCE_OPERATIONS, by_the_sums, gradients, relative_error


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("operation", SEQUENCE_OPERATIONS, ids=str)
@pytest.mark.parametrize(("T", "S"), [(1, 1), (9, 9), (9, 4), (4, 9)])
def test_reference_is_the_papers_sum(operation, T, S, causal):
    inputs = operation.inputs(T=T, S=S, dtype=torch.float64)
    wanted = by_the_sums(operation, *inputs, causal=causal)
    got = operation(*inputs, causal=causal, impl="reference")
    assert relative_error(got, wanted) < 1e-13


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("operation", GRID_OPERATIONS, ids=str)
def test_reference_on_a_grid_is_the_papers_sum(operation, causal):
    inputs = operation.inputs(T=operation.settings["T"], dtype=torch.float64)
    wanted = by_the_sums(operation, *inputs, causal=causal)
    assert relative_error(operation(*inputs, causal=causal, impl="reference"), wanted) < 1e-13


@pytest.mark.parametrize("operation", SEQUENCE_OPERATIONS[:4], ids=str)
def test_reference_gradient_is_that_of_the_papers_sum(operation):
    inputs = operation.inputs(T=7, dtype=torch.float64)
    upstream = torch.randn(2, 7, 4, dtype=torch.float64)
    _, got = gradients(operation, inputs, upstream, causal=True, impl="reference")
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    wanted = torch.autograd.grad((by_the_sums(operation, *leaves, causal=True) * upstream).sum(), leaves)
    for a, b in zip(got, wanted, strict=True):
        assert relative_error(a, b) < 1e-12


def test_reference_is_equation_6_as_written():
    """conv(exp(k) v, exp(w) - 1) + sum exp(k) v, over the same without v."""
    from aft.ops import aft_conv

    B, T, D, H, K = 2, 11, 6, 3, 4
    q, v = torch.randn(B, T, D, dtype=torch.float64), torch.randn(B, T, D, dtype=torch.float64)
    k, w = torch.randn(B, T, H, dtype=torch.float64), torch.randn(H, K, dtype=torch.float64)
    e = torch.exp(k).repeat_interleave(D // H, 2)
    kernel = (torch.exp(w) - 1).repeat_interleave(D // H, 0)[:, None]

    def summed(x):
        padded = torch.nn.functional.pad(x.mT, ((K - 1) // 2, K - 1 - (K - 1) // 2))
        return torch.nn.functional.conv1d(padded, kernel, groups=D).mT + x.sum(1, keepdim=True)

    wanted = torch.sigmoid(q) * summed(e * v) / summed(e)
    assert relative_error(aft_conv(q, k, v, w, impl="reference"), wanted) < 1e-13


def test_reference_differentiates_twice():
    inputs = tuple(
        x.requires_grad_() for x in SEQUENCE_OPERATIONS[0].inputs(B=1, T=3, D=2, dtype=torch.float64)
    )
    assert torch.autograd.gradgradcheck(lambda *x: aft_full(*x, causal=True, impl="reference"), inputs)
