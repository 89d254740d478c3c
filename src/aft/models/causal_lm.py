"""A causal model over bytes or sub-pixels, native to Transformers: the paper's block around any mixer."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg

from aft.layers import AFTConv1d, AFTFull, AFTLocal, AFTSimple
from aft.models.blocks import AFTBlock, SelfAttention
from aft.models.cache import AFTCache, window_start
from aft.models.configuration import AFTConfig


def make_mixer(config: AFTConfig) -> nn.Module:
    """The causal layer that ``config.mixer`` names."""
    d, T = config.hidden_size, config.max_position_embeddings
    match config.mixer:
        case "full":
            return AFTFull(d, T, bias_rank=config.bias_rank, causal=True)
        case "simple":
            return AFTSimple(d, causal=True)
        case "local":
            return AFTLocal(d, T, config.window_size, bias_rank=config.bias_rank, causal=True)
        case "conv":
            return AFTConv1d(d, config.num_attention_heads, config.kernel_size, causal=True)
        case "attention":
            return SelfAttention(d, config.num_attention_heads, causal=True)
    raise ValueError(f"mixer must be one of full, simple, local, conv, attention; got {config.mixer!r}")


class AFTPreTrainedModel(PreTrainedModel):
    """Initial values, and what Transformers needs to know of the family."""

    config: AFTConfig  # pyrefly: ignore[bad-override-mutable-attribute] (as Transformers' own models do)
    config_class = AFTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True  # a state cannot be put back: assisted generation is refused by name
    _no_split_modules = ["AFTBlock"]  # noqa: RUF012 (Transformers reads a list)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Normal weights, zero biases; what feeds the residual stream starts smaller, as in GPT-2."""
        super()._init_weights(module)
        if isinstance(module, nn.Linear) and getattr(module, "feeds_residual", False):
            std = self.config.initializer_range / (2 * self.config.num_hidden_layers) ** 0.5
            init.normal_(module.weight, std=std)
        match module:
            case AFTFull():
                module.reset_position_bias()
            case AFTConv1d():
                module.reset_kernel()


class AFTModel(AFTPreTrainedModel):
    """Embeddings and blocks: tokens [B, T] to hidden states [B, T, D]."""

    def __init__(self, config: AFTConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            AFTBlock(config, make_mixer(config)) for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        assert isinstance(value, nn.Embedding)
        self.embed_tokens = value

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "6.0.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: AFTCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool = False,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states [B, n, D] of tokens [B, n] or of their embeddings [B, n, D].

        Args:
            attention_mask: [B, n], or [B, columns of the cache + n] as `generate` has it; 0 at padding, which
                is taken out before the layers run, so that padding on any side changes neither positions nor
                results. The hidden state at padding is that of the token before it.
            cache: what was read before, brought up to date in place; the new tokens continue it.
            use_cache: whether to return a cache; as the configuration says where left out, except in
                training. A cache that was given is returned in any case.

        Raises:
            ValueError: a sequence is longer than the model has positions, or a cache came with gradient
                checkpointing.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids [B, T] or inputs_embeds [B, T, D]")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if cache is None and use_cache and not (self.gradient_checkpointing and self.training):
            cache = AFTCache(self.config)
        if cache is not None and not isinstance(cache, AFTCache):
            raise TypeError(f"cache must be an aft.models.AFTCache, got {type(cache).__name__}")
        if cache is not None and len(cache.layers) != len(self.layers):
            raise ValueError(f"cache must be of {len(self.layers)} layers, got {len(cache.layers)}")
        if cache is not None and self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            raise ValueError("cache must be None under gradient checkpointing, which runs each block twice")
        columns = x.shape[1]
        compact, lengths = None, None
        if attention_mask is not None:
            compact = _Compact(attention_mask, x.shape[0], columns, 0 if cache is None else cache.columns)
            x, lengths = compact.pack(x), compact.lengths
            if columns > self.config.max_position_embeddings:  # but fewer, perhaps, without padding
                x = x[:, : int(lengths.max())]
        x = self.dropout(x + self._positions(x, lengths, cache))
        states = [x]
        memories = [None] * len(self.layers) if cache is None else cache.layers
        for layer, memory in zip(self.layers, memories, strict=True):
            x = layer(x, memory, lengths)
            states.append(x)
        if cache is not None:
            cache.columns += columns
        states[-1] = self.norm(x)
        if compact is not None:
            states = [compact.unpack(x) for x in states]
        return BaseModelOutputWithPast(
            last_hidden_state=states[-1],
            cache=cache,
            hidden_states=tuple(states) if output_hidden_states else None,
        )

    def _positions(self, x: Tensor, lengths: Tensor | None, cache: AFTCache | None) -> Tensor:
        """Position embeddings of new tokens [B, n, D], ``lengths`` of them not padding; counts them."""
        n, longest = x.shape[1], self.config.max_position_embeddings
        place = None if cache is None or cache.states[0] is None else cache.states[0].length
        before = 0 if cache is None else cache.longest
        end = before + n
        if lengths is not None:
            end = int((lengths if place is None else place + lengths).max()) if len(x) else 0
        elif end > longest and place is not None and len(x):  # unless the longest has left the batch
            end = int(place.max()) + n
        if end > longest:
            raise ValueError(f"the model's positions end at {longest}, got a sequence of {end}")
        if cache is not None:
            cache.longest = end
        if place is None and n <= longest:
            return self.embed_positions(torch.arange(n, device=x.device))
        place = x.new_zeros(1, dtype=torch.int64) if place is None else place
        # What lies beyond the last position is padding.
        place = (place[:, None] + torch.arange(n, device=x.device)).clamp(max=longest - 1)
        return self.embed_positions(place)


class _Compact:
    """Rows of tokens with padding anywhere, and the same with all padding at their end.

    Causal layers do not see what comes later: with padding there no mask is needed.
    """

    def __init__(self, attention_mask: Tensor, B: int, n: int, columns: int):
        if attention_mask.shape not in ((B, n), (B, columns + n)):
            all_columns = f" or ({B}, {columns + n})" if columns else ""
            raise ValueError(
                f"attention_mask must be [B, T] = ({B}, {n}){all_columns}, got {tuple(attention_mask.shape)}"
            )
        padding = attention_mask[:, attention_mask.shape[1] - n :].eq(0)
        self.order = torch.sort(padding.byte(), dim=1, stable=True).indices[..., None]
        self.place = ((~padding).cumsum(1) - 1).clamp(min=0)[..., None]
        self.lengths = (~padding).sum(1)

    def pack(self, x: Tensor) -> Tensor:
        """x [B, n, C], its padding moved to the end."""
        return x.gather(1, self.order.expand_as(x))

    def unpack(self, x: Tensor) -> Tensor:
        """Packed x [B, n, C] where its tokens were; padding repeats the token before it."""
        return x.gather(1, self.place.expand(-1, -1, x.shape[2]))


class AFTForCausalLM(AFTPreTrainedModel, GenerationMixin):
    """`AFTModel` with a linear head that predicts the next token.

    `generate` reads each token once and keeps an `AFTCache`. Where a text outgrows
    ``max_position_embeddings`` it is read again from a later start, see `aft.models.cache.window_start`:
    with a cache or without, the context is the same.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: AFTConfig):
        super().__init__(config)
        self.model = AFTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "6.0.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        cache: AFTCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool = False,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, vocab_size], and the mean loss in nats a token where labels are given.

        ``labels`` [B, T] are shifted here (position t predicts label t + 1), ``shift_labels`` [B, T] are not
        (position t predicts label t); -100 is not counted. ``logits_to_keep``: the last n > 0
        positions only, or those that a tensor names. The others as `AFTModel`.
        """
        more = (attention_mask, inputs_embeds, labels, shift_labels)
        if cache is not None and not output_hidden_states and all(x is None for x in more):
            logits = _next_logits(self, cache, input_ids)
            if logits is not None:
                return CausalLMOutputWithPast(logits=logits, cache=cache)
        outputs = self.model(
            input_ids,
            attention_mask,
            inputs_embeds,
            cache=cache,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None or shift_labels is not None:
            loss = self.loss_function(
                logits, labels, vocab_size=self.config.vocab_size, shift_labels=shift_labels, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, cache=outputs.cache, hidden_states=outputs.hidden_states
        )

    def stream(
        self, prompt: Tensor | Sequence[int], max_new_tokens: int | None = None, **options: Any
    ) -> Iterator[int]:
        """The tokens that follow a prompt, one by one, without `generate`'s overhead around each.

        Args:
            prompt: ids [T] or [1, T], at least one.
            max_new_tokens: how many; without a limit, here or in a configuration, there is no end.
            options: ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``eos_token_id``, ``seed``,
                ``generation_config`` and ``cache``, see `aft.models.streaming.stream`.

        Raises:
            ValueError, TypeError: at the call, where an argument is out of range or not supported.
        """
        # A stream runs on a model, so that its module imports this one.
        from aft.models.streaming import stream

        return stream(self, prompt, max_new_tokens, **options)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache: AFTCache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool = False,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What `generate` runs next: the tokens that the cache has not read, or a new window of them."""
        inputs = kwargs | {"cache": cache, "use_cache": use_cache, "logits_to_keep": 1}
        if input_ids.shape[1] == 0 and inputs_embeds is None:
            raise ValueError("generate: a prompt must hold at least one token, got none")
        if next_sequence_length is not None and next_sequence_length < 1:
            raise ValueError(
                "generate: the prompt must go on where the cache ends, "
                f"got {0 if cache is None else cache.columns} tokens in the cache and none after them"
            )
        new = slice(None if next_sequence_length is None else -next_sequence_length, None)
        if inputs_embeds is not None and is_first_iteration:
            return inputs | {"inputs_embeds": inputs_embeds[:, new], "attention_mask": attention_mask}
        longest = self.config.max_position_embeddings
        tokens = input_ids[:, new]
        columns = 0 if cache is None else cache.columns
        if _end(tokens, cache, attention_mask, longest) > longest:
            total = columns + tokens.shape[1]
            if input_ids.shape[1] != total:
                raise ValueError(
                    f"generate: the model's positions end at {longest}; to go past them it takes all tokens "
                    f"from the start as one prompt (no prefill_chunk_size, no inputs_embeds), "
                    f"got {input_ids.shape[1]} of {total}"
                )
            first, attention_mask = _window(input_ids, attention_mask, longest)
            tokens = input_ids[:, first:]
            if cache is not None:
                cache.reset()
                cache.columns = first
        if attention_mask is not None and attention_mask[:, -tokens.shape[1] :].all():
            attention_mask = None
        return inputs | {"input_ids": tokens, "attention_mask": attention_mask}

    def _prepare_cache_for_generation(  # pyrefly: ignore[bad-override] (nobody reads what it returns)
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        if generation_config.is_assistant:
            raise ValueError(
                f"{type(self).__name__} cannot assist another model: its state cannot forget rejected tokens"
            )
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation must be left out, {type(self).__name__} keeps an AFTCache; "
                f"got {generation_config.cache_implementation!r}"
            )
        given = model_kwargs.get("cache")
        if given is not None and not isinstance(given, AFTCache):
            raise TypeError(f"cache must be an aft.models.AFTCache, got {type(given).__name__}")
        if given is not None:
            if generation_config.use_cache is False:
                raise ValueError(
                    "use_cache must not be False where a cache is given, which is read and filled"
                )
            given._is_user_defined = True  # what Transformers marks its own caches with
        elif generation_config.use_cache is not False:
            model_kwargs["cache"] = AFTCache(self.config)


def _next_logits(model: AFTForCausalLM, cache: AFTCache, token: Tensor | None) -> Tensor | None:
    """Logits of a single token [1, 1] of inference by `aft.models.shortcut`, None where it does not apply."""
    if token is None or token.shape != (1, 1) or not isinstance(cache, AFTCache):
        return None
    if len(cache.layers) != len(model.model.layers):
        return None  # and the modules say what is wrong
    if (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled(token.device.type)
    ):
        return None
    # It runs on a model, so that its module imports this one.
    from aft.models.shortcut import next_logits

    return next_logits(model, cache, token)


def _end(tokens: Tensor, cache: AFTCache | None, attention_mask: Tensor | None, longest: int) -> int:
    """Positions of the longest sequence once ``tokens`` [B, n] are read, padding not counted."""
    n = tokens.shape[1]
    at_most = n if cache is None else cache.longest + n
    if at_most <= longest or attention_mask is None:
        return at_most
    new = attention_mask[:, -n:].sum(1)
    state = None if cache is None else cache.states[0]
    return int((new if state is None else new + state.length).max())


def _window(input_ids: Tensor, attention_mask: Tensor | None, longest: int) -> tuple[int, Tensor | None]:
    """The context of tokens [B, L] that do not fit: its first column, and the mask [B, L - first] of what is
    in it. Each sequence begins where it would alone."""
    if attention_mask is None:
        return window_start(input_ids.shape[1], longest), None
    place = attention_mask.cumsum(1)
    begins = [window_start(length, longest) for length in place[:, -1].tolist()]
    inside = attention_mask.bool() & (place > torch.tensor(begins, device=place.device)[:, None])
    first = int(inside.any(0).int().argmax())
    return first, inside[:, first:].to(attention_mask.dtype)


AutoConfig.register("aft", AFTConfig, exist_ok=True)
AutoModel.register(AFTConfig, AFTModel, exist_ok=True)
AutoModelForCausalLM.register(AFTConfig, AFTForCausalLM, exist_ok=True)
