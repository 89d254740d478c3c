"""What the AFT layers share: projections, masks, and the manners of ``nn.MultiheadAttention``."""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from aft.ops import reference
from aft.ops.functional import QueryGate, check_impl, gated_mean
from aft.ops.spec import Problem
from aft.ops.state import AFTState

Activation = Callable[[Tensor], Tensor]


class Memory(Protocol):
    """What keeps a layer's state between calls."""

    state: AFTState | None


class AFTLayer(nn.Module):
    """Base of the layers: projects, normalises masks, calls one operation, projects again.

    A subclass implements `_problem` and `_stream`. The attributes that ``nn.TransformerEncoderLayer`` and
    ``nn.TransformerEncoder`` read off an attention module are there, with the values that keep them off the
    fused path, which knows nothing but dot-product attention.
    """

    in_proj_weight = None
    in_proj_bias = None
    bias_k = None
    bias_v = None
    add_zero_attn = False
    _qkv_same_embed_dim = False
    _space = 1  # dimensions of position: 1 for a sequence, 2 for a grid

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        key_channels: int,
        *,
        causal: bool = False,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        query_gate: QueryGate | None = torch.sigmoid,
        key_activation: Activation | None = None,
        impl: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        name = type(self).__name__
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "kdim": kdim, "vdim": vdim}
        for label, size in sizes.items():
            if size is not None:
                check_positive(name, label, size)
        if embed_dim % num_heads:
            raise ValueError(
                f"{name}: embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}"
            )
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        check_impl(impl)
        self.causal, self.batch_first, self.impl = causal, batch_first, impl
        self.query_gate, self.key_activation = query_gate, key_activation
        self.dropout = 0.0

        factory = {"device": device, "dtype": dtype}
        gated = query_gate is not None
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory) if gated else None
        self.k_proj = nn.Linear(self.kdim, key_channels, bias=bias, **factory)
        self.v_proj = nn.Linear(self.vdim, embed_dim, bias=bias, **factory)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)

    def reset_parameters(self) -> None:
        """Projections as ``nn.MultiheadAttention`` starts them: Xavier uniform weights, zero biases."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if projection is not None:
                nn.init.xavier_uniform_(projection.weight)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        memory: Memory | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The call of ``nn.MultiheadAttention``.

        Args:
            query: [B, T, embed_dim] ([T, B, embed_dim] if not batch_first, [T, embed_dim] unbatched); on a
                grid [B, Y, X, embed_dim].
            key, value: [B, S, kdim] and [B, S, vdim]; the query where left out.
            key_padding_mask: [B, S], True (or -inf) where a key is to be ignored.
            need_weights: also return the implicit attention (equation 3 without its gate), which takes
                O(T S embed_dim) memory. Off by default: AFT never forms it.
            attn_mask: [T, S] or [B, T, S], True where the query must not see the key. A float mask is taken
                where it holds nothing but 0 and -inf, the form ``nn.TransformerEncoderLayer`` gives boolean
                masks.
            average_attn_weights: weights [B, T, S], the mean over channels, or [B, channels, T, S].
            is_causal: as for ``nn.MultiheadAttention``, says that ``attn_mask`` is the causal mask, which is
                then not read; unlike there the mask may be left out.
            memory: an object whose ``state`` is that of `step`, which is then what happens, and which gets
                the state after it; with ``lengths`` and ``key_padding_mask`` as there.

        Returns:
            The output, of the query's shape, and the weights or None.
        """
        key = query if key is None else key
        value = key if value is None else value
        if memory is not None:
            if key is not query or value is not query or attn_mask is not None or need_weights:
                raise ValueError(
                    f"{type(self).__name__}: with a memory the query is its own key and value, "
                    "without attn_mask and weights"
                )
            output, memory.state = self.step(query, memory.state, key_padding_mask, lengths)
            return output, None
        if query.is_nested:
            plain = key is query and value is query and key_padding_mask is None and attn_mask is None
            if not plain or need_weights or not self.batch_first:
                raise ValueError(
                    f"{type(self).__name__}: a nested query is taken batch first, as its own key and value, "
                    "without masks and without weights; pad it to a tensor for anything else"
                )
            return self._forward_nested(query, is_causal), None
        batched = query.ndim == self._space + 2
        self._check_inputs(query, key, value)
        if not batched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))

        B, T, S = query.shape[0], math.prod(query.shape[1:-1]), math.prod(key.shape[1:-1])
        causal = self.causal or is_causal
        name = type(self).__name__
        hidden_keys = as_bool_mask(name, "key_padding_mask", key_padding_mask, [(B, *key.shape[1:-1])])
        hidden_pairs = as_bool_mask(name, "attn_mask", attn_mask, [(T, S), (B, T, S)])
        if is_causal:
            hidden_pairs = None  # the mask is said to be the causal one, which costs nothing

        q, k, v = self._project(query, key, value)
        problem = self._problem(q, k, v, causal, hidden_keys, hidden_pairs)
        output = gated_mean(problem, q.flatten(1, -2), self.query_gate, self.impl).view_as(q)
        output = self.out_proj(output)
        weights = None
        if need_weights:
            weights = reference.weights(problem).to(output.dtype)
            weights = weights.mean(-1) if average_attn_weights else weights.movedim(-1, 1)
        if not batched:
            return output[0], None if weights is None else weights[0]
        return output if self.batch_first else output.transpose(0, 1), weights

    def step(
        self,
        query: Tensor,
        state: AFTState | None = None,
        key_padding_mask: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, AFTState]:
        """The layer over n more positions of its sequences, as `aft.ops.aft_simple_step` and its likes.

        Args:
            query: [B, n, embed_dim] ([n, B, embed_dim] if not batch_first); also its own key and value.
            state: what the call before returned, None at the start of a sequence. Nothing is kept in the
                layer.
            key_padding_mask: bool [B, n], True where a key is to be ignored, though it takes a position.
            lengths: int64 [B], how many of the n positions each sequence has; those after are padding.

        Returns:
            The output, of the query's shape, and the state after it.

        Raises:
            ValueError: the layer is not causal, or its keys and values have other channels than its queries.
        """
        return self._step(query, state, key_padding_mask, lengths)

    def _step(
        self,
        query: Tensor,
        state: AFTState | None,
        key_padding_mask: Tensor | None,
        lengths: Tensor | None,
        **place: int,
    ) -> tuple[Tensor, AFTState]:
        name = type(self).__name__
        if not self.causal or self.kdim != self.embed_dim or self.vdim != self.embed_dim:
            raise ValueError(
                f"{name}: step needs a causal layer whose keys and values come from its query, "
                f"got causal={self.causal}, kdim={self.kdim}, vdim={self.vdim}, embed_dim={self.embed_dim}"
            )
        if query.ndim != 3 or query.shape[2] != self.embed_dim:
            layout = "[B, n" if self.batch_first else "[n, B"
            raise ValueError(
                f"{name}: query must be {layout}, {self.embed_dim}] for a step, got {tuple(query.shape)}"
            )
        if not self.batch_first:
            query = query.transpose(0, 1)
        q, k, v = self._project(query, query, query)
        masks = {"key_padding_mask": key_padding_mask, "lengths": lengths}
        output, state = self._stream(q, k, v, state, **masks, **place)
        output = self.out_proj(output)
        return output if self.batch_first else output.transpose(0, 1), state

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Without a gate there is nothing to ask of the query but its shape.
        q = query if self.q_proj is None else self.q_proj(query)
        k, v = self.k_proj(key), self.v_proj(value)
        return q, k if self.key_activation is None else self.key_activation(k), v

    def _forward_nested(self, query: Tensor, is_causal: bool) -> Tensor:
        """Sequences of different lengths, as ``nn.TransformerEncoder`` packs padded ones to evaluate."""
        lengths = [len(sequence) for sequence in query.unbind()]
        padded = torch.nested.to_padded_tensor(query, 0.0)
        length = torch.tensor(lengths, device=padded.device)[:, None]
        padding = torch.arange(padded.shape[1], device=padded.device) >= length
        output = self(padded, padded, padded, padding, is_causal=is_causal)[0]
        return torch.nested.as_nested_tensor([row[:n] for row, n in zip(output, lengths, strict=True)])

    def _problem(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
    ) -> Problem:
        """What the operation is to compute from projected inputs."""
        raise NotImplementedError

    def _stream(
        self, q: Tensor, k: Tensor, v: Tensor, state: AFTState | None, **options: Any
    ) -> tuple[Tensor, AFTState]:
        """The operation's step over projected inputs, its gate and implementation the layer's."""
        raise NotImplementedError

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        name = type(self).__name__
        grid = "T" if self._space == 1 else "Y, X"
        wanted = {"query": (query, self.embed_dim), "key": (key, self.kdim), "value": (value, self.vdim)}
        for label, (x, channels) in wanted.items():
            if x.ndim in (self._space + 1, self._space + 2) and x.shape[-1] == channels:
                if x.ndim == query.ndim:
                    continue
                raise ValueError(
                    f"{name}: {label} must be batched like the query or not at all, "
                    f"got {label} {tuple(x.shape)} and query {tuple(query.shape)}"
                )
            raise ValueError(
                f"{name}: {label} must be [B, {grid}, {channels}] or [{grid}, {channels}], "
                f"got {tuple(x.shape)}"
            )

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, causal={self.causal}"


def as_bool_mask(name: str, label: str, mask: Tensor | None, shapes: list[tuple[int, ...]]) -> Tensor | None:
    """A boolean mask, True = hidden, from one or from its 0 / -inf form; anything else is refused."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name}: {label} must be a bool tensor, got {type(mask).__name__}")
    if tuple(mask.shape) not in shapes:
        raise ValueError(
            f"{name}: {label} must be {_either(shapes)} (one for all channels: AFT has no mask a head), "
            f"got {tuple(mask.shape)}"
        )
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise TypeError(f"{name}: {label} must be a bool tensor, True = hidden; got {mask.dtype}")
    hidden = torch.isneginf(mask)
    only_hides = (hidden | (mask == 0)).all()
    if torch.compiler.is_compiling():
        torch._assert_async(only_hides, "a float mask holds other values than 0 and -inf")
    elif not only_hides:
        raise TypeError(
            f"{name}: {label} must be a bool tensor, True = hidden; got a {mask.dtype} one that holds other "
            "values than 0 and -inf (a bias to be learnt or added belongs into position_bias)"
        )
    return hidden


def _either(shapes: list[tuple[int, ...]]) -> str:
    return " or ".join(str(tuple(map(int, shape))) for shape in shapes)


def check_positive(name: str, label: str, value: object) -> None:
    """Raises unless ``value`` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {label} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name}: {label} must be at least 1, got {value}")
