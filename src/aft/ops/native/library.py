"""The compiled kernels as a Python module, and what every operator over them needs."""

import ctypes
import importlib
import os
import sys
from typing import Any

import torch
from torch import Tensor

LEVEL_VARIABLE = "AFT_NATIVE_LEVEL"


def _load() -> tuple[Any, str | None]:
    """The compiled module, or None and why it is not there."""
    try:
        kernels = importlib.import_module("aft.ops._native")
        kernels.use_team(_team())
        return kernels, None
    except ModuleNotFoundError:
        return None, (
            "the C++ kernels were not built, for want of a C++17 compiler when the package was installed: "
            "install it again where g++ or clang++ is"
        )
    except ImportError as error:
        return None, f"the C++ kernels cannot be loaded: {error}"


def _team() -> int:
    """The address of the function that starts torch's own threads, 0 where it has none of GNU's interface."""
    name = {"linux": "libtorch_cpu.so", "darwin": "libtorch_cpu.dylib"}.get(sys.platform, "")
    try:
        # Symbols of a library are looked up in what it depends on, too.
        library = ctypes.CDLL(os.path.join(torch.__path__[0], "lib", name))
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


kernels, reason = _load()


def unavailable() -> str | None:
    """Why no kernel can run here, None where they can."""
    if kernels is None:
        return reason
    level = os.environ.get(LEVEL_VARIABLE)
    if not kernels.use_level(level or ""):
        return f"{LEVEL_VARIABLE} must be one of {', '.join(kernels.levels())} on this machine, got {level!r}"
    return None


def is_tracked(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def is_transformed() -> bool:
    """Whether torch.func's transforms, as vmap, are to see the autograd Functions.

    Dynamo, which transforms for itself, cannot trace one of which no input wants a gradient, nor one inside
    another's backward. Elsewhere a Function without gradients is time lost: as much as a short call takes.
    """
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def readable(x: Tensor) -> Tensor:
    """The tensor, copied only if its channels do not lie side by side."""
    return x if x.stride(2) == 1 or x.shape[2] <= 1 else x.contiguous()


def rows(x: Tensor):
    """A tensor [B, T, channels] as the kernels take it; none of no elements."""
    return kernels.Rows(x.data_ptr(), x.stride(0), x.stride(1)) if x.ndim > 1 else kernels.Rows(0, 0, 0)


def state(num: Tensor, den: Tensor, top: Tensor | None = None):
    """Of contiguous tensors that the caller keeps alive."""
    return kernels.State(num.data_ptr(), den.data_ptr(), 0 if top is None else top.data_ptr())


def may_differentiate_again() -> bool:
    """Whether a backward pass is itself recorded. Compiled graphs have no second derivatives."""
    recorded = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return recorded or is_transformed()
