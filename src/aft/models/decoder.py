"""One token after another through a causal model, with little work beside reading its weights."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from aft.layers import AFTConv1d, AFTFull, AFTLocal, AFTSimple
from aft.models.blocks import AFTBlock, SelfAttention
from aft.models.cache import AFTCache, window_start
from aft.models.causal_lm import AFTForCausalLM, AFTModel
from aft.models.lean import LeanModel
from aft.models.terms import TooWideError

# What `aft.models.lean` computes. For anything else (an adapter, a quantised layer) the model is called.
PLAIN = {
    *(AFTForCausalLM, AFTModel, AFTBlock, AFTFull, AFTSimple, AFTLocal, AFTConv1d, SelfAttention),
    *(nn.Linear, nn.LayerNorm, nn.Embedding, nn.Dropout, nn.ModuleList),
}


@contextmanager
def quiet(device: torch.device) -> Generator[None]:
    """Inference in the dtypes that are given, on one thread: a token is too little work to share.

    Threads that wait for one another at every small product are slower as soon as a core is busy elsewhere.
    The number of threads that was set is set again at the end.
    """
    with _ONE_THREAD, torch.inference_mode(), torch.autocast(device.type, enabled=False):
        yield


class _OneThread:
    """PyTorch on one thread; of several users at once only the first knows how many there were before.

    The setting is partly the process's and partly each thread's own, so that every user sets it again.
    """

    def __init__(self) -> None:
        self._lock, self._users, self._threads = Lock(), 0, 1

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._threads = torch.get_num_threads()
            self._users += 1
            torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            torch.set_num_threads(self._threads)


_ONE_THREAD = _OneThread()


class Decoder:
    """Logits of the next token, for a sequence that grows by one token at a time.

    It keeps what `AFTForCausalLM`'s cache keeps, in another form, the ids of the current window, and a copy
    of most weights, laid out for products with one vector: weights must not change while it is in use. Half
    precision is computed in float32.

    A model that is not made of this package's layers alone, or trains with dropout, or has position biases
    that spread too far (see `aft.models.terms`) is called as it is: the same logits, more slowly.

    Past ``max_position_embeddings`` T the model reads its most recent tokens again, from position 0:
    `aft.models.cache.window_start`. Not to be called from two threads at once.
    """

    def __init__(self, model: AFTForCausalLM):
        self._model = model
        with torch.inference_mode():
            self._lean = LeanModel(model) if is_plain(model) else None
        self._longest = model.config.max_position_embeddings
        self._ids: list[int] = []  # of the current window
        self._step: Callable[[int, int], Tensor]  # a token and its position, to logits

    def read(self, ids: Sequence[int], cache: AFTCache | None = None) -> Tensor:
        """Logits [V] after a sequence of at least one token: a new beginning, O(T) time.

        ``cache`` is what the model remembers of the first tokens, which are then not read again; it stays as
        it is.

        Raises:
            ValueError: the cache is not of one sequence, or of more tokens than all but the last, or the
                sequence is longer than ``max_position_embeddings``, so that it is read from elsewhere.
        """
        self._ids = list(ids[window_start(len(ids), self._longest) :])
        if cache is None:
            cache = AFTCache(self._model.config)
        else:
            check_cache(cache, len(ids), self._longest)
            # A state is never changed, so that another cache may begin with it.
            cache = AFTCache(states=cache.states)
        with torch.inference_mode():
            logits = _call(self._model, cache, self._ids[cache.columns :])
            self._step = partial(_call_next, self._model, cache)
            if self._lean is not None:
                with suppress(TooWideError):
                    self._step = partial(self._lean, self._lean.past(cache.states))
        return logits

    def next(self, token: int) -> Tensor:
        """Logits [V] after one more token, of a sequence that has been read."""
        self._ids.append(token)
        if len(self._ids) <= self._longest:
            with quiet(self._model.device):
                try:
                    return self._step(token, len(self._ids) - 1)
                except TooWideError:
                    self._lean = None
        # Starts of windows are multiples of one stride: counted from here the next is where it should be.
        return self.read(self._ids)


def _call(model: AFTForCausalLM, cache: AFTCache, ids: list[int]) -> Tensor:
    inputs = torch.tensor([ids], device=model.device)
    return model(inputs, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]


def _call_next(model: AFTForCausalLM, cache: AFTCache, token: int, _: int) -> Tensor:
    return _call(model, cache, [token])


def check_cache(cache: AFTCache, tokens: int, longest: int) -> None:
    """Raises ValueError unless a cache may be of the beginning of so many tokens, see `Decoder.read`."""
    sequences, read = cache.layers[0].batch_size, cache.longest
    if sequences != 1 or not 0 < read == cache.columns < tokens <= longest:
        raise ValueError(
            "cache must hold one sequence, without padding, of fewer tokens than the prompt, which must have "
            f"at most max_position_embeddings = {longest}; got {sequences} sequences of {read} positions in "
            f"{cache.columns} columns, and a prompt of {tokens}"
        )


def is_plain(model: nn.Module) -> bool:
    """Whether every part of a model is of a known kind and computes nothing but what its kind does."""
    if is_watched(model):
        return False
    activations = {id(block.activation) for block in model.modules() if isinstance(block, AFTBlock)}
    for module in model.modules():
        hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        random = isinstance(module, nn.Dropout) and module.training and module.p > 0
        known = type(module) in PLAIN or id(module) in activations
        weights = all(x is None or type(x) is nn.Parameter for x in module._parameters.values())
        if hooked or random or not known or not weights:
            return False
    return True


def is_watched(model: nn.Module) -> bool:
    """Whether somebody wants to know when a model is called: by hooks on it, or on every module."""
    return bool(
        model._forward_hooks
        or model._forward_pre_hooks
        or global_hooks._global_forward_hooks
        or global_hooks._global_forward_pre_hooks
    )
