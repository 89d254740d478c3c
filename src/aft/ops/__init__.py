"""Pure functions of tensors: the operations of the paper, exact for any finite input, linear in memory."""

from aft.ops.functional import aft_conv, aft_full, aft_local, aft_simple, available_impls
from aft.ops.state import AFTState, combine

__all__ = ["AFTState", "aft_conv", "aft_full", "aft_local", "aft_simple", "available_impls", "combine"]
