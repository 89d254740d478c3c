"""The short way to a token: what `AFTForCausalLM.forward` does for one new token of one sequence.

Where nobody asks for more than the next logits, a token through `aft.models.lean` takes less than half the
time of one through the modules. The cache then remembers in that form, and returns to states whenever
something else reads it.
"""

from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from aft.models.cache import AFTCache
from aft.models.causal_lm import AFTForCausalLM
from aft.models.decoder import is_plain, is_watched, quiet
from aft.models.lean import LeanModel, Past
from aft.models.terms import TooWideError


def next_logits(model: AFTForCausalLM, cache: AFTCache, token: Tensor) -> Tensor | None:
    """Logits [1, 1, V] after one more token [1, 1], which the cache then remembers.

    None where the modules must run; then nothing has happened.
    """
    if cache.longest >= model.config.max_position_embeddings or not cache.longest:
        return None
    value = int(token)
    if token.is_floating_point() or not 0 <= value < model.config.vocab_size:
        return None  # and the modules say what is wrong
    shortcut = cache.shortcut
    if shortcut is None or (shortcut and not shortcut.leads_through(model)):
        shortcut = cache.shortcut = Shortcut(model) if _is_short(model) else False
    if shortcut is False:
        return None
    try:
        logits = shortcut.next(cache, value)
    except TooWideError:
        cache.shortcut = False
        return None
    cache.longest += 1
    cache.columns += 1
    return logits.clone()[None, None]


class Shortcut:
    """The short way of one cache, for as long as the model stays as it is."""

    def __init__(self, model: AFTForCausalLM):
        self._weights = _weights_of(model)
        self._past: Past = []

    def leads_through(self, model: AFTForCausalLM) -> bool:
        """Whether it is this model, made of what it was made of, with the weights that it had."""
        return self._weights.are_of(model)

    def next(self, cache: AFTCache, token: int) -> Tensor:
        """Logits [V] after one more token.

        Raises:
            TooWideError: position biases spread too far; the cache is as it was.
        """
        lean = self._weights.lean
        if [layer.mixing for layer in cache.layers] != self._past:
            with torch.inference_mode():
                self._past = lean.past(cache.states, keep=True)
            for layer, mixing in zip(cache.layers, self._past, strict=True):
                layer.mixing = mixing
        with quiet(lean.device):
            return lean(self._past, token, cache.longest)


class _Weights:
    """A `LeanModel`, and how to tell that it is still one of its model."""

    def __init__(self, model: AFTForCausalLM):
        with torch.inference_mode():
            self.lean = LeanModel(model)
        self._model = ref(model)
        modules = list(model.modules())
        self._children = [
            (module._modules, name, child, child._forward_hooks, child._forward_pre_hooks)
            for module in modules
            for name, child in module._modules.items()
            if child is not None
        ]
        self._dropouts = [module for module in modules if isinstance(module, nn.Dropout)]
        self._parameters = [
            (module._parameters, name, parameter, parameter._version, parameter.data_ptr())
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._values = _totals(model)

    def are_of(self, model: AFTForCausalLM) -> bool:
        """Whether the model is the same, with the weights that it had, and computes nothing else by now."""
        random = model.training or any(x.training and x.p for x in self._dropouts)
        if model is not self._model() or is_watched(model) or random:
            return False
        for owner, name, child, hooks, hooks_before in self._children:
            if owner.get(name) is not child or hooks or hooks_before or "forward" in child.__dict__:
                return False
        return all(
            owner.get(name) is parameter and parameter._version == version and parameter.data_ptr() == pointer
            for owner, name, parameter, version, pointer in self._parameters
        )

    def have_values_of(self, model: AFTForCausalLM) -> bool:
        """Whether what was copied has the same sums: what is written through ``.data`` has no version."""
        return self._values == _totals(model)


def _totals(model: nn.Module) -> list[float]:
    """Sums over the weights that a `LeanModel` holds as copies; position biases are the model's own."""
    linear = (module for module in model.modules() if isinstance(module, nn.Linear))
    with torch.inference_mode():
        return [weight.sum().item() for layer in linear for weight in layer.parameters()]


# Caches of one model share its weights, which are gone with the last of them.
_WEIGHTS: WeakKeyDictionary[nn.Module, ref[_Weights]] = WeakKeyDictionary()


def _weights_of(model: AFTForCausalLM) -> _Weights:
    known = _WEIGHTS.get(model)
    weights = None if known is None else known()
    if weights is None or not weights.are_of(model) or not weights.have_values_of(model):
        weights = _Weights(model)
        _WEIGHTS[model] = ref(weights)
    return weights


def _is_short(model: nn.Module) -> bool:
    """Whether a lean model computes what this one does, in its dtype, and can tell when that changes."""
    parameters = list(model.parameters())
    wide = all(x.dtype in (torch.float32, torch.float64) for x in parameters)
    tracked = not any(x.is_inference() for x in parameters)
    return wide and tracked and not model.training and is_plain(model)
