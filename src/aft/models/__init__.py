"""Models native to Transformers; importing this registers them with its Auto classes."""

from aft.models.causal_lm import AFTForCausalLM, AFTModel
from aft.models.configuration import MIXERS, AFTConfig

__all__ = ["MIXERS", "AFTConfig", "AFTForCausalLM", "AFTModel"]
