"""How an implementation's passes become torch operators, under every transform."""

from collections.abc import Callable

import torch

# Not `torch.library.custom_op`, whose wrapper imports torch._dynamo at the first call: seconds for a command.
_LIBRARY = torch.library.Library("aft", "FRAGMENT")


def register(function: Callable, fake: Callable, schema: str) -> Callable:
    """Makes ``torch.ops.aft.<name>`` of a function of tensors, without autograd of its own."""
    name = function.__name__
    _LIBRARY.define(name + schema)
    # An exported program calls it on parameters, with nothing in between that would stop autograd.
    _LIBRARY.impl(name, torch.no_grad()(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"aft::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.aft, name).default


def without_derivative(operator: Callable, impl: str) -> type[torch.autograd.Function]:
    """An operator that computes gradients, as a Function: it has none of its own, and says so."""

    class Gradients(torch.autograd.Function):
        @staticmethod
        def forward(*args):
            return operator(*args)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, *grads):
            raise NotImplementedError(
                f"impl={impl!r} has no second derivative of an AFT operation; impl='reference' "
                "differentiates twice"
            )

        @staticmethod
        def vmap(info, in_dims, *args):
            return map_over(Gradients.apply, info.batch_size, in_dims, args)

    return Gradients


def map_over(function: Callable, count: int, in_dims: tuple, args: tuple):
    """vmap by a loop: a call for each entry of the mapped axis."""
    calls = [
        function(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True)))
        for i in range(count)
    ]
    outputs = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
    return outputs, (0,) * len(outputs)
