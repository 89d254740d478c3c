"""Models native to Transformers; importing this registers them with its Auto classes."""

from aft.models.blocks import MIXERS
from aft.models.cache import AFTCache
from aft.models.causal_lm import AFTForCausalLM, AFTModel
from aft.models.configuration import AFTConfig
from aft.models.image_classifier import AFTForImageClassification, AFTImageModel
from aft.models.image_configuration import AFTImageConfig
from aft.models.tokenizer import AFTTokenizer

__all__ = [
    "MIXERS",
    "AFTCache",
    "AFTConfig",
    "AFTForCausalLM",
    "AFTForImageClassification",
    "AFTImageConfig",
    "AFTImageModel",
    "AFTModel",
    "AFTTokenizer",
]
