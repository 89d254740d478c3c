"""AFT-full, AFT-local and AFT-simple as layers: a table of position biases, a window of it, none."""

from typing import Any

import torch
from torch import Tensor, nn

from aft.layers.base import AFTLayer, check_positive
from aft.ops.functional import PositionBias, full_problem, local_problem, simple_problem
from aft.ops.spec import Problem
from aft.ops.streaming import aft_full_step, aft_local_step, aft_simple_step


class AFTFull(AFTLayer):
    r"""AFT-full (equation 2): y_t = sigmoid(q_t) * sum_s exp(k_s + w_ts) v_s / sum_s exp(k_s + w_ts).

    Symbol          attribute                           shape
    W^Q, W^K, W^V   q_proj, k_proj, v_proj              [embed_dim, embed_dim]
    w               position_bias                       [max_seq_len, max_source_len]
    u, v (eq. 7)    position_bias_u, position_bias_v    [max_seq_len, bias_rank], [max_source_len, bias_rank]

    A sequence shorter than the table uses its first rows and columns; a longer one is an error. The bias is
    shared by all channels, so that one head is all there is.

    Initial values: u, v ~ N(0, 0.01^2) as in the paper. It leaves open the dense table (zeros here: the layer
    starts as AFT-simple, as it nearly does with u and v) and the projections (see `reset_parameters`). An
    output projection follows the gate, as in the Transformer that the layer plugs into.

    Args:
        embed_dim: D, channels of queries, values and output.
        max_seq_len: the longest target (and source, unless ``max_source_len``) length T, in positions.
        bias_rank: d', rank of the factorised bias; None for the dense table.
        max_source_len: the longest source length S, for cross-attention.
        causal: query t sees the keys s <= t only.
        bias: whether the projections add biases.
        kdim, vdim: channels of keys and values that come in, embed_dim where left out.
        batch_first: inputs are [B, T, D] (the default here), else [T, B, D].
        query_gate: any elementwise function, or None: no gate and no ``q_proj``.
        key_activation: an elementwise function applied to the projected keys, e.g. ``torch.tanh``.
        impl: implementation of the operation, see `aft.ops.aft_full`.

    Time O(T S D) a call, memory O((T + S) D).
    """

    position_bias: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        max_seq_len: int,
        *,
        bias_rank: int | None = None,
        max_source_len: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__(embed_dim, 1, embed_dim, device=device, dtype=dtype, **options)
        name = type(self).__name__
        max_source_len = max_seq_len if max_source_len is None else max_source_len
        check_positive(name, "max_seq_len", max_seq_len)
        check_positive(name, "max_source_len", max_source_len)
        self.max_seq_len, self.max_source_len, self.bias_rank = max_seq_len, max_source_len, bias_rank

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        if bias_rank is None:
            self.position_bias = parameter(max_seq_len, max_source_len)
        else:
            check_positive(name, "bias_rank", bias_rank)
            self.register_parameter("position_bias", None)
            self.position_bias_u = parameter(max_seq_len, bias_rank)
            self.position_bias_v = parameter(max_source_len, bias_rank)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.reset_position_bias()

    def reset_position_bias(self) -> None:
        """The position bias alone at its initial values."""
        if self.position_bias is not None:
            nn.init.zeros_(self.position_bias)
        else:
            nn.init.normal_(self.position_bias_u, std=0.01)
            nn.init.normal_(self.position_bias_v, std=0.01)

    def _bias(self, T: int, S: int) -> PositionBias:
        # Lengths of the tensors, not of the constructor: `torch.func.functional_call` may put others here.
        table = self.position_bias
        reach = (len(self.position_bias_u), len(self.position_bias_v)) if table is None else table.shape
        if reach[0] < T or reach[1] < S:
            raise ValueError(
                f"{type(self).__name__}: the position bias reaches {reach[0]} target and "
                f"{reach[1]} source positions, got a target of {T} and a source of {S}"
            )
        if table is not None:
            return table[:T, :S]
        return self.position_bias_u[:T], self.position_bias_v[:S]

    def _whole_bias(self) -> PositionBias:
        table = self.position_bias
        return (self.position_bias_u, self.position_bias_v) if table is None else table

    def _problem(self, q, k, v, causal, key_padding_mask, attn_mask) -> Problem:
        return full_problem(q, k, v, self._bias(q.shape[1], k.shape[1]), causal, key_padding_mask, attn_mask)

    def _stream(self, q, k, v, state, **options):
        bias = self._whole_bias()
        return aft_full_step(q, k, v, bias, state, query_gate=self.query_gate, impl=self.impl, **options)

    def extra_repr(self) -> str:
        rank = "" if self.bias_rank is None else f", bias_rank={self.bias_rank}"
        return f"{super().extra_repr()}, max_seq_len={self.max_seq_len}{rank}"


class AFTLocal(AFTFull):
    r"""AFT-local (equation 4): AFT-full whose bias is 0, not -inf, where \|t - s\| >= window_size.

    Every position is still seen. Parameters, arguments and initial values are those of `AFTFull`; entries of
    a dense table outside the window are never read and get no gradient.

    Time O(T window_size D) a call, memory O((T + S) D).
    """

    def __init__(self, embed_dim: int, max_seq_len: int, window_size: int, **options: Any):
        check_positive(type(self).__name__, "window_size", window_size)
        super().__init__(embed_dim, max_seq_len, **options)
        self.window_size = window_size

    def _problem(self, q, k, v, causal, key_padding_mask, attn_mask) -> Problem:
        bias = self._bias(q.shape[1], k.shape[1])
        return local_problem(q, k, v, bias, self.window_size, causal, key_padding_mask, attn_mask)

    def _stream(self, q, k, v, state, **options):
        options |= {"query_gate": self.query_gate, "impl": self.impl}
        return aft_local_step(q, k, v, self._whole_bias(), self.window_size, state, **options)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, window_size={self.window_size}"


class AFTSimple(AFTLayer):
    r"""AFT-simple (equation 5): y_t = sigmoid(q_t) * sum_s exp(k_s) v_s / sum_s exp(k_s), no position bias.

    Any length. Arguments, projections and their initial values as `AFTFull`. Time and memory O((T + S) D).
    """

    def __init__(self, embed_dim: int, **options: Any):
        super().__init__(embed_dim, 1, embed_dim, **options)
        self.reset_parameters()

    def _problem(self, q, k, v, causal, key_padding_mask, attn_mask) -> Problem:
        return simple_problem(q, k, v, causal, key_padding_mask, attn_mask)

    def _stream(self, q, k, v, state, **options):
        return aft_simple_step(q, k, v, state, query_gate=self.query_gate, impl=self.impl, **options)
