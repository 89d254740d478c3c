"""Models native to Transformers; importing this registers them with its Auto classes."""

from aft.models.blocks import MIXERS
from aft.models.causal_lm import AFTForCausalLM, AFTModel
from aft.models.configuration import AFTConfig
from aft.models.image_classifier import AFTForImageClassification, AFTImageModel
from aft.models.image_configuration import AFTImageConfig

__all__ = [
    "MIXERS",
    "AFTConfig",
    "AFTForCausalLM",
    "AFTForImageClassification",
    "AFTImageConfig",
    "AFTImageModel",
    "AFTModel",
]
