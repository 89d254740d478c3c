"""A causal model on one token: matrices times vectors, and a past for each mixer in a form made for that."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import GELUActivation

from aft.layers import AFTConv1d, AFTFull, AFTLocal, AFTSimple
from aft.layers.base import AFTLayer
from aft.models.blocks import AFTBlock, SelfAttention
from aft.models.causal_lm import AFTForCausalLM
from aft.models.terms import SLACK, SPREAD, GrowingTerms, RecentRows, TooWideError, WindowTerms
from aft.ops.state import AFTState, check_state

ACTIVATIONS: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {GELUActivation: F.gelu}
BLOCK = 64  # queries whose position biases are computed at once


class Mixing(ABC):
    """A mixer on one position after another, which remembers them.

    ``projected`` is where a block puts queries, keys and values, end to end, before each call.
    """

    projected: Tensor

    def prepare(self) -> None:  # noqa: B027 (most have nothing to prepare)
        """What the next position needs that may fail: with `TooWideError`, and nothing has changed."""

    @abstractmethod
    def __call__(self) -> Tensor:
        """[D], for the position whose projections are there."""

    @abstractmethod
    def state(self) -> AFTState:
        """What is remembered, in tensors of its own."""


Past = list[Mixing]  # one for each block


class LeanModel:
    """`AFTForCausalLM` for products with one vector, in float32 or wider.

    It is made of layers of the known kinds, and holds most weights as copies, laid out as they are read
    fastest. What a sequence needs is in its past: several may go through at once.
    """

    def __init__(self, model: AFTForCausalLM):
        dtype = torch.promote_types(model.dtype, torch.float32)
        self.device = model.device
        inner = model.model
        self._tokens = inner.embed_tokens.weight.to(dtype)
        self._positions = inner.embed_positions.weight.to(dtype)
        self._blocks = [_Block(cast(AFTBlock, block), dtype) for block in inner.layers]
        self._norm = _Norm(inner.norm, dtype)
        self._head = _Affine([model.lm_head], dtype)

    def past(self, states: Sequence[AFTState | None], *, keep: bool = False) -> Past:
        """The past of one sequence, from the state of each of the model's mixers (at least one token).

        Args:
            keep: be able to say the state again.

        Raises:
            TooWideError: position biases spread too far.
        """
        return [
            block.mixing(cast(AFTState, state), keep)
            for block, state in zip(self._blocks, states, strict=True)
        ]

    def __call__(self, past: Past, token: int, position: int) -> Tensor:
        """Logits [V] after one more token, which becomes a part of the past.

        Raises:
            TooWideError: position biases spread too far; the past is as it was.
        """
        for mixing in past:
            mixing.prepare()
        x = self._tokens[token] + self._positions[position]
        for block, mixing in zip(self._blocks, past, strict=True):
            x = block(x, mixing)
        return self._head(self._norm(x))


class _Affine:
    """x [in] to W x + b [out], for one or several layers, whose outputs are laid end to end."""

    def __init__(self, layers: Sequence[nn.Linear], dtype: torch.dtype):
        weight = _laid([layer.weight for layer in layers]).to(dtype)
        # A tall matrix is read faster by columns, a wide one by rows.
        tall = weight.shape[0] >= weight.shape[1]
        self._weight = weight.t().contiguous().t() if tall else weight
        self._bias = None
        if any(layer.bias is not None for layer in layers):
            biases = [x.weight.new_zeros(len(x.weight)) if x.bias is None else x.bias for x in layers]
            self._bias = _laid(biases).to(dtype)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self._bias is None:
            return torch.mv(self._weight, x, out=out)
        return torch.addmv(self._bias, self._weight, x, out=out)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        y = torch.addmv(residual, self._weight, x)
        return y if self._bias is None else y.add_(self._bias)


def _laid(parts: Sequence[Tensor]) -> Tensor:
    """The parts laid end to end; no copy of a single one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class _Norm:
    def __init__(self, norm: nn.LayerNorm, dtype: torch.dtype):
        self._shape, self._eps = norm.normalized_shape, norm.eps
        self._weight = None if norm.weight is None else norm.weight.to(dtype)
        self._bias = None if norm.bias is None else norm.bias.to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


class _Block:
    """`AFTBlock` on one vector [D]; what its mixer remembers comes as the second argument."""

    def __init__(self, block: AFTBlock, dtype: torch.dtype):
        self._mixer = mixer = cast(AFTLayer | SelfAttention, block.mixer)
        self._mixer_norm, self._mlp_norm = _Norm(block.mixer_norm, dtype), _Norm(block.mlp_norm, dtype)
        inputs = [layer for layer in (mixer.q_proj, mixer.k_proj, mixer.v_proj) if layer is not None]
        self._sizes = [len(layer.weight) for layer in inputs]
        self._inputs = _Affine(inputs, dtype)
        self._out = _Affine([mixer.out_proj], dtype)
        self._mlp_in, self._mlp_out = _Affine([block.mlp_in], dtype), _Affine([block.mlp_out], dtype)
        self._like = mixer.k_proj.weight.new_empty(0, dtype=dtype)
        # A module without hooks is its function.
        self._activation = ACTIVATIONS.get(type(block.activation), block.activation)

    def mixing(self, state: AFTState, keep: bool) -> Mixing:
        """What mixes positions, going on from a state of one sequence."""
        mixer = self._mixer
        name, keys, values = type(mixer).__name__, len(mixer.k_proj.weight), len(mixer.v_proj.weight)
        check_state(name, state, 1, keys, values, recent_keys(mixer), self._like.device)
        projected = self._like.new_empty(sum(self._sizes))
        mixing = MIXINGS[type(self._mixer)](self._mixer, state, projected.split(self._sizes), keep)
        mixing.projected = projected
        return mixing

    def __call__(self, x: Tensor, mixing: Mixing) -> Tensor:
        self._inputs(self._mixer_norm(x), out=mixing.projected)
        x = self._out.add_to(x, mixing())
        return self._mlp_out.add_to(x, self._activation(self._mlp_in(self._mlp_norm(x))))


class _AFTMixing(Mixing):
    """The gated mean of an AFT layer for one query [D] after another, each with its own key and value.

    ``projected`` are the places of these, one for each projection. With ``keep`` the keys and values
    of a state are kept beside their terms.
    """

    def __init__(
        self, layer: AFTLayer, groups: int, state: AFTState, projected: Sequence[Tensor], keep: bool
    ):
        self._gate, self._key_activation = layer.query_gate, layer.key_activation
        keys = layer.k_proj.out_features
        self._shape = groups, keys // groups, layer.embed_dim // keys
        self._query = projected[0]
        self._key, self._value = projected[-2].view(self._shape[:2]), projected[-1].view(self._shape)
        self._dtype = self._query.dtype
        self._begin, self._made, self._keep = state, 0, keep
        self._recent = None
        if keep and state.keys.shape[1] and not state.grows:
            rows = torch.cat([state.keys[0], state.values[0]], 1)
            self._recent = RecentRows(rows.to(self._dtype))

    def __call__(self) -> Tensor:
        key = self._key if self._key_activation is None else self._key_activation(self._key)
        self._made += 1
        if self._recent is not None:
            self._recent.append(key.view(-1), self._value.view(-1))
        mean = self._mean(key, self._value).view(-1)
        return mean if self._gate is None else self._gate(self._query) * mean

    def _mean(self, key: Tensor, value: Tensor) -> Tensor:
        """The mean [G, n, P] over all keys and one more, the query's own [G, n] with its value [G, n, P]."""
        raise NotImplementedError

    def state(self) -> AFTState:
        begin = self._begin
        num, den, top = (
            new.reshape(old.shape).clone()
            for new, old in zip(self._terms.old(), (begin.num, begin.den, begin.max), strict=True)
        )
        keys, values = begin.keys, begin.values
        if self._recent is not None:
            rows = self._recent.last()[None].to(keys.dtype)
            keys, values = rows.split([keys.shape[2], values.shape[2]], 2)
        return AFTState(num, den, top, keys, values, begin.length + self._made)

    _terms: WindowTerms

    def _window_terms(self, state: AFTState) -> WindowTerms:
        G, n, P = self._shape
        recent = state.keys.shape[1]
        return WindowTerms(
            state.keys.to(self._dtype).reshape(recent, G, n).transpose(0, 1),
            state.values.to(self._dtype).reshape(recent, G, n * P).transpose(0, 1),
            state.num.reshape(G, n, P),
            state.den.reshape(G, n),
            state.max.reshape(G, n),
        )


class _Simple(_AFTMixing):
    def __init__(self, layer: AFTSimple, state: AFTState, projected: Sequence[Tensor], keep: bool):
        super().__init__(layer, 1, state, projected, keep)
        self._terms = self._window_terms(state)
        self._weights = torch.ones(SLACK, dtype=self._dtype, device=self._query.device)

    def _mean(self, key: Tensor, value: Tensor) -> Tensor:
        self._terms.append(key, value)
        return self._terms.mean(self._weights)


class _Conv(_AFTMixing):
    """Weights of a kernel stay: exp(w - top), and exp(-top) for what is outside it."""

    def __init__(self, layer: AFTConv1d, state: AFTState, projected: Sequence[Tensor], keep: bool):
        super().__init__(layer, layer.num_heads, state, projected, keep)
        kernel = layer.position_kernel().double()
        (top,) = checked_top(kernel.flatten()[None]).tolist()
        self._old_weight = math.exp(-top)
        weights = with_old(torch.exp(kernel - top), self._old_weight).to(self._dtype)
        self._weights = weights[0] if len(weights) == 1 else weights[:, None]
        self._terms = self._window_terms(state)

    def _mean(self, key: Tensor, value: Tensor) -> Tensor:
        self._terms.append(key, value)
        return self._terms.mean(self._weights, self._old_weight)


class _Local(_AFTMixing):
    """Weights of a window are made for `BLOCK` queries at a time."""

    def __init__(self, layer: AFTLocal, state: AFTState, projected: Sequence[Tensor], keep: bool):
        super().__init__(layer, 1, state, projected, keep)
        self._layer = layer
        self._position = int(state.length)
        self._at = 0
        self._weights, self._old_weights = self._block()
        self._terms = self._window_terms(state)

    def prepare(self) -> None:
        if self._at == len(self._old_weights):
            self._weights, self._old_weights = self._block()
            self._at = 0

    def _mean(self, key: Tensor, value: Tensor) -> Tensor:
        self._terms.append(key, value)
        at, self._at = self._at, self._at + 1
        self._position += 1
        return self._terms.mean(self._weights[at], self._old_weights[at])

    def _block(self) -> tuple[Tensor, list[float]]:
        """Weights [BLOCK, SLACK - 1 + window], and old ones, for the queries from ``_position`` on."""
        bias = window_bias(self._layer, self._position, BLOCK)
        top = checked_top(bias)
        old = torch.exp(-top)
        weights = with_old(torch.exp(bias - top[:, None]), old[:, None]).to(self._dtype)
        return weights, old.tolist()


class _Full(_AFTMixing):
    def __init__(self, layer: AFTFull, state: AFTState, projected: Sequence[Tensor], keep: bool):
        super().__init__(layer, 1, state, projected, keep)
        self._all = GrowingTerms(state.keys.to(self._dtype), state.values.to(self._dtype))
        self._new: list[Tensor] = []
        self._table = layer.position_bias
        if self._table is None:
            self._left = layer.position_bias_u.to(self._dtype)
            self._right = layer.position_bias_v.to(self._dtype)

    def prepare(self) -> None:
        S = len(self._all) + 1
        if self._table is not None:
            bias = self._table[S - 1, :S].to(self._dtype)
        else:
            bias = torch.mv(self._right[:S], self._left[S - 1])
        low, top = bias.aminmax()
        if not (top - low).item() <= SPREAD:
            raise TooWideError
        self._weights = torch.exp(bias - top).view(1, 1, S)

    def _mean(self, key: Tensor, value: Tensor) -> Tensor:
        if self._keep:
            self._new.append(torch.cat([key, value.view(1, -1)], 1))
        self._all.append(key, value)
        return self._all.mean(self._weights)

    def state(self) -> AFTState:
        begin = self._begin
        D = begin.keys.shape[2]
        rows = torch.cat([torch.cat([begin.keys[0], begin.values[0]], 1), *self._new]).to(begin.keys.dtype)
        keys, values = rows[None].split([D, D], 2)
        return begin._replace(keys=keys, values=values, length=begin.length + self._made)


class _Attention(Mixing):
    """Keys and values of all positions, in buffers [1, H, capacity, P] that double when they are full."""

    def __init__(self, layer: SelfAttention, state: AFTState, projected: Sequence[Tensor], keep: bool):
        self._query, self._key, self._value = (x.view(1, layer.num_heads, 1, -1) for x in projected)
        self._begin, self._length = state, state.keys.shape[1]
        self._keys, self._values = (
            x.to(self._query.dtype).unflatten(2, (layer.num_heads, -1)).transpose(1, 2).contiguous()
            for x in (state.keys, state.values)
        )

    def __call__(self) -> Tensor:
        at = self._length
        if at == self._keys.shape[2]:
            self._keys, self._values = (
                torch.cat([x, torch.empty_like(x)], 2) for x in (self._keys, self._values)
            )
        self._keys.narrow(2, at, 1).copy_(self._key)
        self._values.narrow(2, at, 1).copy_(self._value)
        self._length = at + 1
        keys, values = self._keys.narrow(2, 0, at + 1), self._values.narrow(2, 0, at + 1)
        return F.scaled_dot_product_attention(self._query, keys, values).view(-1)

    def state(self) -> AFTState:
        begin, length = self._begin, self._length
        keys, values = (
            x[:, :, :length].transpose(1, 2).flatten(2).to(begin.keys.dtype, copy=True)
            for x in (self._keys, self._values)
        )
        made = length - begin.keys.shape[1]
        return begin._replace(keys=keys, values=values, length=begin.length + made)


MIXINGS: dict[type[nn.Module], Callable[[Any, AFTState, Sequence[Tensor], bool], Mixing]] = {
    AFTSimple: _Simple,
    AFTLocal: _Local,
    AFTConv1d: _Conv,
    AFTFull: _Full,
    SelfAttention: _Attention,
}


def recent_keys(mixer: nn.Module) -> int | None:
    """How many keys a state of this mixer keeps beside its sums; None: all."""
    match mixer:
        case AFTSimple():
            return 0
        case AFTLocal():
            return mixer.window_size - 1
        case AFTConv1d():
            return mixer.kernel_size[0] - 1
    return None


def with_old(weights: Tensor, old: Tensor | float) -> Tensor:
    """Weights [G, W] of a window, and before them ``old`` for keys that left it: [G, SLACK - 1 + W]."""
    before = weights.new_ones(len(weights), SLACK - 1) * old
    return torch.cat([before, weights], 1)


def checked_top(bias: Tensor) -> Tensor:
    """The largest of each row of biases [T, W] and 0, which is what keys outside the window have: [T].

    Raises:
        TooWideError: see there.
    """
    top, low = bias.amax(1).clamp(min=0.0), bias.amin(1).clamp(max=0.0)
    if not (top - low <= SPREAD).all():
        raise TooWideError
    return top


def window_bias(layer: AFTLocal, first: int, count: int) -> Tensor:
    """w[t, s] for queries t = first, first + 1, ... and the keys of their windows, oldest first: float64.

    [T, window_size], where T is ``count`` or as many queries as are left. Where a window begins before the
    sequence, no key is there to be weighed, and w[t, 0] stands for it.
    """
    table, window = layer.position_bias, layer.window_size
    reach = len(layer.position_bias_u if table is None else table)
    t = torch.arange(first, min(first + count, reach), device=layer.k_proj.weight.device)[:, None]
    s = (t + torch.arange(1 - window, 1, device=t.device)).clamp(min=0)
    if table is not None:
        return table[t, s].double()
    start, stop = max(0, first - window + 1), first + len(t)
    u, v = layer.position_bias_u[first:stop].double(), layer.position_bias_v[start:stop].double()
    return (u @ v.T).gather(1, s - start)
