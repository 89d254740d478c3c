"""Layers that own parameters and take the place of ``nn.MultiheadAttention``."""

from aft.layers.biased import AFTFull, AFTLocal, AFTSimple
from aft.layers.conv import AFTConv1d, AFTConv2d

__all__ = ["AFTConv1d", "AFTConv2d", "AFTFull", "AFTLocal", "AFTSimple"]
