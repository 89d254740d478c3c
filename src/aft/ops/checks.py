"""What the operations ask of their arguments. An error names the operation, the argument, and both sides."""

import torch
from torch import Tensor

from aft.ops.spec import DenseBias, LowRankBias


def check_sequence(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises unless queries [B, T, D], keys and values [B, S, D] fit each other."""
    check_floating(name, q=q, k=k, v=v)
    for label, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3:
            raise ValueError(
                f"{name}: {label} must be [B, {'T' if label == 'q' else 'S'}, D], got {shape(x)}"
            )
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{name}: q must be [B, T, D] and k, v [B, S, D] with the same B and D, "
            f"got q {shape(q)}, k {shape(k)}, v {shape(v)}"
        )


def check_conv(name: str, q: Tensor, k: Tensor, v: Tensor, kernel: Tensor) -> None:
    """Raises unless queries, keys and values fit each other and the kernel [H, K] or [H, Ky, Kx]."""
    check_floating(name, q=q, k=k, v=v, kernel=kernel)
    if kernel.ndim not in (2, 3):
        raise ValueError(f"{name}: kernel must be [H, K] or [H, Ky, Kx], got {shape(kernel)}")
    space = kernel.ndim - 1
    layout = "[B, T, D]" if space == 1 else "[B, Y, X, D]"
    for label, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != space + 2:
            raise ValueError(f"{name}: {label} must be {layout} for a kernel {shape(kernel)}, got {shape(x)}")
    heads = kernel.shape[0]
    if k.shape[-1] != heads:
        raise ValueError(
            f"{name}: k must have one channel a head, {heads} for kernel {shape(kernel)}; got k {shape(k)}"
        )
    if 0 in kernel.shape or v.shape[-1] % heads:
        raise ValueError(
            f"{name}: the channels of v must be a multiple of the kernel's heads and no kernel may be empty, "
            f"got v {shape(v)} and kernel {shape(kernel)}"
        )
    if k.shape[:-1] != v.shape[:-1] or q.shape[0] != v.shape[0] or q.shape[-1] != v.shape[-1]:
        raise ValueError(
            f"{name}: q {layout}, k and v must agree in batch, k and v in positions, q and v in channels; "
            f"got q {shape(q)}, k {shape(k)}, v {shape(v)}"
        )


def check_window(name: str, window_size: object) -> None:
    """Raises unless ``window_size`` is an int of at least 1."""
    if isinstance(window_size, bool) or not isinstance(window_size, int):
        raise TypeError(f"{name}: window_size must be an int, got {type(window_size).__name__}")
    if window_size < 1:
        raise ValueError(f"{name}: window_size must be at least 1, got {window_size}")


def check_position_bias(
    name: str, position_bias: object, B: int, T: int | None = None, S: int | None = None
) -> DenseBias | LowRankBias:
    """A table [T, S], one for each of B sequences or a low-rank pair, as an implementation reads it.

    Lengths left out may be any.
    """
    if isinstance(position_bias, Tensor):
        check_floating(name, position_bias=position_bias)
        if position_bias.ndim not in (2, 3) or not all(
            wanted in (None, size)
            for wanted, size in zip((S, T, B), reversed(position_bias.shape), strict=False)
        ):
            raise ValueError(
                f"{name}: position_bias must be [T, S]{_equal(T, S)} or [B, T, S]{_equal(B, T, S)}, "
                f"got {shape(position_bias)}"
            )
        return DenseBias(position_bias)
    if not isinstance(position_bias, tuple | list) or len(position_bias) != 2:
        raise TypeError(
            f"{name}: position_bias must be a tensor or a pair (u [T, R], v [S, R]), "
            f"got {type(position_bias).__name__}"
        )
    left, right = position_bias
    check_floating(name, **{"position_bias[0]": left, "position_bias[1]": right})
    if (
        left.ndim != 2
        or right.ndim != 2
        or T not in (None, left.shape[0])
        or S not in (None, right.shape[0])
        or left.shape[1] != right.shape[1]
    ):
        raise ValueError(
            f"{name}: a low-rank position_bias must be (u [T, R], v [S, R]) with one R"
            + ("" if T is None else f" and T = {T}, S = {S}")
            + f", got {shape(left)} and {shape(right)}"
        )
    return LowRankBias(left, right)


def check_floating(name: str, **tensors: Tensor) -> None:
    for label, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: {label} must be a tensor, got {type(x).__name__}")
        if not x.is_floating_point():
            raise TypeError(f"{name}: {label} must be of a floating-point dtype, got {x.dtype}")


def check_devices(name: str, *tensors: object) -> None:
    """Raises unless all of these that are tensors are on one device."""
    devices = {x.device for x in tensors if isinstance(x, Tensor)}
    if len(devices) > 1:
        raise ValueError(f"{name}: all tensors must be on one device, got {sorted(map(str, devices))}")


def check_mask(name: str, label: str, mask: Tensor | None, shapes: dict[str, tuple[int, ...]]) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name}: {label} must be a bool tensor {_either(shapes)}, True = hidden; got {got}")
    if tuple(mask.shape) not in shapes.values():
        raise ValueError(f"{name}: {label} must be {_either(shapes)}, got {shape(mask)}")


def shape(x: Tensor) -> str:
    return str(tuple(x.shape))


def _either(shapes: dict[str, tuple[int, ...]]) -> str:
    return " or ".join(f"{letters} = {tuple(map(int, shape))}" for letters, shape in shapes.items())


def _equal(*sizes: int | None) -> str:
    return "" if None in sizes else f" = {sizes}"
