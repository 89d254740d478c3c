"""The four operations as test subjects: random inputs, the call, and a loop over the paper's sums."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from aft.ops import (
    AFTState,
    aft_conv,
    aft_conv_step,
    aft_full,
    aft_full_step,
    aft_local,
    aft_local_step,
    aft_simple,
    aft_simple_step,
)


@dataclass(frozen=True)
class Operation:
    """One operation with settings; ``inputs`` are (q, k, v, bias tensors ...), all of them differentiable.

    ``step`` is its streaming form: the same tensors and ``state=``.
    """

    name: str
    call: Callable[..., Tensor]
    bias: Callable[..., tuple[Tensor, ...]]
    table: Callable[..., Tensor | None]
    step: Callable[..., tuple[Tensor, AFTState]]
    heads: int | None = None
    settings: dict = field(default_factory=dict)
    impl: str | None = None  # where the call names none; a problem that it is not for skips the test

    def __str__(self) -> str:
        return self.name if self.impl is None else f"{self.name}, {self.impl}"

    def __call__(self, *inputs: Tensor, **options) -> Tensor:
        if self.impl is None or "impl" in options:
            return self.call(*inputs, **options)
        if self.impl == "native" and not solves("native", self.call, inputs, **options):
            pytest.skip("the C++ kernels are not for it")
        return self.call(*inputs, impl=self.impl, **options)

    def length(self, T: int) -> int:
        """T, or on a grid how many cells it has."""
        return self.settings.get("T", T)

    def values_of_a_key(self, D: int) -> int:
        """How many of D channels share each channel of the keys."""
        return D // self.heads if self.heads else 1

    def inputs(
        self, B=2, T=8, S=None, D=4, key_scale=1.0, bias_scale=1.0, dtype=torch.float32, seed=0
    ) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        S = T if S is None else S
        q, k, v = normal(B, T, D), normal(B, S, self.heads or D) * key_scale, normal(B, S, D)
        bias = self.bias(normal, B, T, S, bias_scale)
        return tuple(x.to(dtype) for x in (q, k, v, *bias))


def by_the_sums(
    operation: Operation, *inputs: Tensor, causal=False, key_padding_mask=None, attn_mask=None
) -> Tensor:
    """Equations 2 and 4 to 6 by loops over sequences and queries, in float64.

    The only liberty: each sum's exponents are taken relative to their largest, keys and biases apart (a bias
    of 1e38 would swallow the keys), which changes no quotient.
    """
    q, k, v, *bias = (x.double() for x in inputs)
    B, T, D = q.shape
    S, H = k.shape[1:]
    w = operation.table(T, S, causal, *bias)  # [B or 1, T, S, H or 1]
    rows = []
    for b in range(B):
        for t in range(T):
            bias = w[b % w.shape[0], t] if w is not None else torch.zeros(1, 1, dtype=torch.float64)
            visible = torch.ones(S, dtype=torch.bool)
            if causal:
                visible &= torch.arange(S) <= t
            if key_padding_mask is not None:
                visible &= ~key_padding_mask[b]
            if attn_mask is not None:
                visible &= ~(attn_mask[t] if attn_mask.ndim == 2 else attn_mask[b, t])
            values = v[b][visible].unflatten(1, (H, D // H))
            if not len(values):
                rows.append(torch.zeros(D, dtype=torch.float64) * q[b, t])
                continue
            keys, bias = k[b][visible], bias.expand(S, H)[visible]
            exponent = torch.zeros_like(keys)
            for _ in range(2):
                top = (exponent if _ else keys + bias).detach().argmax(0, keepdim=True)
                origin = keys.detach().gather(0, top), bias.detach().gather(0, top)
                exponent = (keys - origin[0].nan_to_num(neginf=0)) + (bias - origin[1].nan_to_num(neginf=0))
            weight = torch.exp(exponent)
            denominator = weight.sum(0)
            ratio = (weight[..., None] * values).sum(0) / torch.where(denominator > 0, denominator, 1.0)[
                :, None
            ]
            rows.append(torch.sigmoid(q[b, t]) * ratio.flatten())
    return torch.stack(rows).view(B, T, D) if rows else q * 0.0


def _dense(normal, B, T, S, scale):
    return (normal(T, S) * scale,)


def _by_sequence(normal, B, T, S, scale):
    return (normal(B, T, S) * scale,)


def _low_rank(normal, B, T, S, scale):
    return normal(T, 3) * scale**0.5, normal(S, 3) * scale**0.5


def _distance(T, S):
    return torch.arange(S)[None, :] - torch.arange(T)[:, None]


def full(by_sequence=False) -> Operation:
    return Operation(
        "full, a table each" if by_sequence else "full",
        aft_full,
        _by_sequence if by_sequence else _dense,
        lambda T, S, causal, w: w.reshape(-1, T, S, 1),
        aft_full_step,
    )


def full_low_rank() -> Operation:
    return Operation(
        "full, low rank",
        lambda q, k, v, a, b, **options: aft_full(q, k, v, (a, b), **options),
        _low_rank,
        lambda T, S, causal, a, b: (a @ b.T)[None, ..., None],
        lambda q, k, v, a, b, **options: aft_full_step(q, k, v, (a, b), **options),
    )


def simple() -> Operation:
    return Operation("simple", aft_simple, lambda *_: (), lambda T, S, causal: None, aft_simple_step)


def local(window: int, by_sequence=False) -> Operation:
    def table(T, S, causal, w):
        return torch.where(_distance(T, S).abs() < window, w, 0.0).reshape(-1, T, S, 1)

    return Operation(
        f"local, a table each, window {window}" if by_sequence else f"local, window {window}",
        lambda q, k, v, w, **options: aft_local(q, k, v, w, window, **options),
        _by_sequence if by_sequence else _dense,
        table,
        lambda q, k, v, w, **options: aft_local_step(q, k, v, w, window, **options),
        settings={"window": window},
    )


def local_low_rank(window: int) -> Operation:
    def table(T, S, causal, a, b):
        return torch.where(_distance(T, S).abs() < window, a @ b.T, 0.0)[None, ..., None]

    return Operation(
        f"local, low rank, window {window}",
        lambda q, k, v, a, b, **options: aft_local(q, k, v, (a, b), window, **options),
        _low_rank,
        table,
        lambda q, k, v, a, b, **options: aft_local_step(q, k, v, (a, b), window, **options),
        settings={"window": window},
    )


def conv(size: int, heads: int = 2) -> Operation:
    def table(T, S, causal, kernel):
        cell = _distance(T, S) + (size - 1 if causal else (size - 1) // 2)
        inside = (cell >= 0) & (cell < size)
        return torch.where(inside, kernel[:, cell.clamp(0, size - 1)], 0.0).movedim(0, -1)[None]

    return Operation(
        f"conv, kernel {size}",
        aft_conv,
        lambda normal, B, T, S, scale: (normal(heads, size) * scale,),
        table,
        aft_conv_step,
        heads=heads,
        settings={"size": size},
    )


def conv_grid(shape: tuple[int, int], size: tuple[int, int], heads: int = 2) -> Operation:
    """AFT-conv over a grid, called on flattened positions so that it fits beside the others."""
    Y, X = shape

    def call(q, k, v, kernel, key_padding_mask=None, **options):
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unflatten(1, shape)
        q, k, v = (x.unflatten(1, shape) for x in (q, k, v))
        return aft_conv(q, k, v, kernel, key_padding_mask=key_padding_mask, **options).flatten(1, 2)

    def table(T, S, causal, kernel):
        w = torch.zeros(Y * X, Y * X, heads, dtype=kernel.dtype)
        for t in range(Y * X):
            for s in range(Y * X):
                row = s // X - t // X + (size[0] - 1) // 2
                column = s % X - t % X + (size[1] - 1) // 2
                if 0 <= row < size[0] and 0 <= column < size[1]:
                    w[t, s] = kernel[:, row, column]
        return w[None]

    return Operation(
        f"conv, grid {Y} x {X}, kernel {size[0]} x {size[1]}",
        call,
        lambda normal, B, T, S, scale: (normal(heads, *size) * scale,),
        table,
        lambda *inputs, **options: aft_conv_step(*inputs, width=X, **options),
        heads=heads,
        settings={"T": Y * X, "width": X},
    )


SEQUENCE_OPERATIONS = [
    full(),
    full(by_sequence=True),
    full_low_rank(),
    simple(),
    local(1),
    local(4),
    local(5),
    local(70),
    local(5000),
    local_low_rank(6),
    conv(1),
    conv(4),
    conv(7),
    conv(90),
]
GRID_OPERATIONS = [conv_grid((5, 7), (3, 3)), conv_grid((9, 8), (4, 5)), conv_grid((3, 2), (7, 7))]


def solves(impl: str, call: Callable[..., Tensor], inputs: tuple[Tensor, ...], **options) -> bool:
    """Whether ``impl`` takes it on: the C++ kernels may not be there, and are not for every problem."""
    try:
        call(*(x.detach() for x in inputs), impl=impl, **options)
    except ValueError as error:
        if str(error).startswith("impl='native' cannot run this"):
            return False
        raise
    return True


def by_each_impl(operations: list[Operation], impls=("eager", "native")) -> list[Operation]:
    """Each operation by each of some implementations."""
    return [replace(x, impl=impl) for x in operations for impl in impls]


def in_pieces(
    operation: Operation, inputs: tuple[Tensor, ...], sizes, state=None, key_padding_mask=None, **options
) -> tuple[Tensor, AFTState]:
    """The streaming operation over pieces of ``sizes`` positions: all outputs, and the last state."""
    q, k, v, *bias = inputs
    outputs, start = [], 0
    for size in sizes:
        here = slice(start, start + size)
        if key_padding_mask is not None:
            options["key_padding_mask"] = key_padding_mask[:, here]
        y, state = operation.step(q[:, here], k[:, here], v[:, here], *bias, state=state, **options)
        outputs.append(y)
        start += size
    assert start == q.shape[1]
    return torch.cat(outputs, 1), state


def relative_error(y: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    r"""\|y - reference\| / \|reference\| in the 2-norm, where ``floor`` is the least denominator."""
    difference = (y.double() - reference.double()).norm().item()
    size = max(reference.double().norm().item(), floor)
    return difference / size if size else difference


def gradients(operation: Operation, inputs: tuple[Tensor, ...], upstream: Tensor, **options):
    """The output and the gradients of all inputs, zeros for one that plays no part (a bias without keys)."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    y = operation(*inputs, **options)
    grads = torch.autograd.grad((y * upstream).sum(), inputs, allow_unused=True, materialize_grads=True)
    return y.detach(), grads


def check_native(operation: Operation, inputs: tuple[Tensor, ...], upstream: Tensor, **options) -> None:
    """Output and every gradient against the specification in float64, and no worse than twice eager's."""
    wide = tuple(x.double() for x in inputs)
    wanted, wanted_grads = gradients(operation, wide, upstream.double(), impl="reference", **options)
    eager, eager_grads = gradients(operation, inputs, upstream, impl="eager", **options)
    got, grads = gradients(operation, inputs, upstream, impl="native", **options)
    floor = 1e-3 * max(g.norm().item() for g in wanted_grads)
    # A mean that cancels is right to the size of its values.
    size = 0.3 * wide[2].abs().amax().item() * wanted.numel() ** 0.5 if wide[2].numel() else 0.0
    rounding = 8e-7 if got.dtype == torch.float32 else 0.0  # where eager takes float64
    everything = zip((got, *grads), (wanted, *wanted_grads), (eager, *eager_grads), strict=True)
    for i, (a, b, c) in enumerate(everything):
        assert a.isfinite().all()
        least = floor if i else size
        error = relative_error(a, b, least)
        assert error < 1e-5
        assert error <= 2 * relative_error(c, b, least) + rounding
