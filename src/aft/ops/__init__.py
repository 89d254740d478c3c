"""Pure functions of tensors: the operations of the paper, exact for any finite input, linear in memory."""

from aft.ops.functional import aft_conv, aft_full, aft_local, aft_simple, available_impls
from aft.ops.state import AFTState, combine
from aft.ops.streaming import aft_conv_step, aft_full_step, aft_local_step, aft_simple_step

__all__ = [
    "AFTState",
    "aft_conv",
    "aft_conv_step",
    "aft_full",
    "aft_full_step",
    "aft_local",
    "aft_local_step",
    "aft_simple",
    "aft_simple_step",
    "available_impls",
    "combine",
]
