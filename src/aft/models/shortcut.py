"""The short way to a token: what `AFTForCausalLM.forward` does for one new token of one sequence.

Where nobody asks for more than the next logits, a token through `aft.models.lean` takes less than half the
time of one through the modules. The cache then remembers in that form, and returns to states whenever
something else reads it.
"""

import torch
from torch import Tensor, nn

from aft.models.cache import AFTCache
from aft.models.causal_lm import AFTForCausalLM
from aft.models.decoder import is_plain, quiet
from aft.models.lean import LeanModel, Past
from aft.models.terms import TooWideError


def next_logits(model: AFTForCausalLM, cache: AFTCache, token: Tensor) -> Tensor | None:
    """Logits [1, 1, V] after one more token [1, 1], which the cache then remembers.

    None where the modules must run; then nothing has happened.
    """
    if cache.longest >= model.config.max_position_embeddings or not cache.longest:
        return None
    if cache.shortcut is None or (cache.shortcut and not cache.shortcut.leads_through(model)):
        cache.shortcut = Shortcut(model) if _is_short(model) else False
    if cache.shortcut is False:
        return None
    try:
        logits = cache.shortcut.next(cache, int(token))
    except TooWideError:
        cache.shortcut = False
        return None
    cache.longest += 1
    cache.columns += 1
    return logits.clone()[None, None]


class Shortcut:
    """A `LeanModel` of a model, for as long as that stays as it is."""

    def __init__(self, model: AFTForCausalLM):
        with torch.inference_mode():
            self._lean = LeanModel(model, copy=True)
        self._model = model
        self._past: Past = []
        self._parameters = [
            (module._parameters, name, parameter, parameter._version, parameter.data_ptr())
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        modules = list(model.modules())
        self._hooks = [hooks for x in modules for hooks in (x._forward_hooks, x._forward_pre_hooks)]

    def leads_through(self, model: AFTForCausalLM) -> bool:
        """Whether it is this model, with the weights that it had, and without hooks."""
        if model is not self._model or model.training or any(self._hooks):
            return False
        return all(
            owner.get(name) is parameter and parameter._version == version and parameter.data_ptr() == pointer
            for owner, name, parameter, version, pointer in self._parameters
        )

    def next(self, cache: AFTCache, token: int) -> Tensor:
        """Logits [V] after one more token.

        Raises:
            TooWideError: position biases spread too far; the cache is as it was.
        """
        if [layer.mixing for layer in cache.layers] != self._past:
            with torch.inference_mode():
                self._past = self._lean.past(cache.states, keep=True)
            for layer, mixing in zip(cache.layers, self._past, strict=True):
                layer.mixing = mixing
        with quiet(self._model.device):
            return self._lean(self._past, token, cache.longest)


def _is_short(model: nn.Module) -> bool:
    """Whether a lean model computes what this one does, in its dtype, and can tell when that changes."""
    parameters = list(model.parameters())
    wide = all(x.dtype in (torch.float32, torch.float64) for x in parameters)
    tracked = not any(x.is_inference() for x in parameters)
    return wide and tracked and not model.training and is_plain(model)
