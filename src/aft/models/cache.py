"""The cache that Transformers' generation hands from token to token: an `AFTState` a layer."""

import math
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from aft.ops.state import AFTState


def window_start(length: int, longest: int) -> int:
    """Where the context begins from which a token is predicted after ``length`` others.

    A model's positions end at ``longest``. A longer text is read from its start as long as it fits, and then
    from ever later starts, half of ``longest`` apart, each at position 0: the model sees the last
    ``longest - longest // 2 + 1`` to ``longest`` tokens, and reads as many anew once every ``longest // 2``.
    """
    if length <= longest:
        return 0
    stride = max(1, longest // 2)
    return stride * math.ceil((length - longest) / stride)


class Remembers(Protocol):
    """What keeps a layer's past in another form."""

    def state(self) -> AFTState:
        """The past as a state."""
        ...


class AFTCacheLayer(CacheLayerMixin):
    """What one layer remembers: ``state``, None before the first token.

    While tokens come one by one, ``mixing`` may remember instead; reading the state ends that.
    """

    supports_early_init = False

    def __init__(self, state: AFTState | None = None):
        super().__init__()
        self._state = state
        self.mixing: Remembers | None = None

    @property
    def state(self) -> AFTState | None:
        if self.mixing is not None:
            self.state = self.mixing.state()
        return self._state

    @state.setter
    def state(self, state: AFTState | None) -> None:
        self._state, self.mixing = state, None

    def __getstate__(self) -> dict[str, Any]:
        return {"state": self.state}

    def __setstate__(self, content: dict[str, Any]) -> None:
        self.__init__(content["state"])

    @property
    def batch_size(self) -> int:
        return -1 if self._state is None else len(self._state.length)

    def get_seq_length(self) -> int:
        """Positions of the longest sequence, padding not counted."""
        return 0 if self.state is None else int(self.state.length.max())

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def reset(self) -> None:
        self.state = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = AFTState(*(x.repeat_interleave(repeats, 0) for x in self.state))

    def offload(self) -> None:
        if self.state is not None:
            self.state = self.state.to("cpu", non_blocking=True)

    def prefetch(self) -> None:
        """Nothing: a layer takes its state to where its input is."""

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            _refuse("crop: an AFT state cannot forget tokens, its sums hold them for good")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> NoReturn:
        _refuse("lazy_initialization: an AFTCache is filled by the layers of an AFT model")

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> NoReturn:
        _refuse("update: an AFTCache holds states, not keys and values; the layers of an AFT model fill it")


class AFTCache(Cache):
    """The states of an AFT model's layers, and how many columns of a batch they have read.

    A model fills it in place. For AFT-simple, -local and -conv its size does not depend on the length.

    Attributes:
        columns: tokens read, padding included.
        longest: at least the positions of the longest sequence, padding not counted.

    Args:
        config: of the model; or give
        states: one `AFTState` a layer, as the attribute of that name returns them.
        columns: as many as positions where left out.
    """

    layers: list[AFTCacheLayer]  # pyrefly: ignore[bad-override] (Transformers' list is wider)

    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        states: Sequence[AFTState | None] | None = None,
        columns: int | None = None,
    ):
        if (config is None) == (states is None):
            raise ValueError("AFTCache: give either the model's config or the states of its layers")
        if states is None:
            assert config is not None
            states = [None] * config.num_hidden_layers
        super().__init__(layers=[AFTCacheLayer(state) for state in states])
        self.longest = self.layers[0].get_seq_length()
        self.shortcut: Any = None  # of `aft.models.shortcut`; False where there is none
        self.columns = self.longest if columns is None else columns

    @property
    def states(self) -> tuple[AFTState | None, ...]:
        """A state for each layer, None before the first token."""
        return tuple(layer.state for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Memory of all states, in bytes."""
        return sum(state.nbytes for state in self.states if state is not None)

    def __getstate__(self) -> dict[str, Any]:
        return {"states": self.states, "columns": self.columns}

    def __setstate__(self, content: dict[str, Any]) -> None:
        self.__init__(**content)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns read, padding included: what follows in a batch is new."""
        return self.columns

    def reset(self) -> None:
        super().reset()
        self.columns = self.longest = 0
        self.shortcut = self.shortcut or None  # one that the past ruled out may be tried again

    def crop(self, tokens_to_remove: int) -> None:
        """Raises NotImplementedError unless there is nothing to remove."""
        super().crop(tokens_to_remove)


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(what)
