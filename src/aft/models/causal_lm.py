"""A causal model over bytes or sub-pixels, native to Transformers: the paper's block around any mixer."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.utils import can_return_tuple

from aft.layers import AFTConv1d, AFTFull, AFTLocal, AFTSimple
from aft.models.blocks import AFTBlock, SelfAttention
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
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool = False,
        **_: Any,
    ) -> BaseModelOutput:
        """Hidden states [B, T, D] of tokens [B, T] or of their embeddings [B, T, D].

        ``attention_mask`` [B, T] is 0 at padding, which is taken out before the layers run, so that padding
        on any side changes neither positions nor results; hidden states at padding have no meaning.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids [B, T] or inputs_embeds [B, T, D]")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        B, T = x.shape[:2]
        longest = self.config.max_position_embeddings
        if longest < T:
            raise ValueError(f"the model's positions end at {longest}, got a sequence of {T}")
        order = None
        if attention_mask is not None:
            if attention_mask.shape != (B, T):
                raise ValueError(
                    f"attention_mask must be [B, T] = ({B}, {T}), got {tuple(attention_mask.shape)}"
                )
            # Causal layers do not see what comes later: with padding moved to the end no mask is needed.
            order = torch.sort(attention_mask.eq(0).byte(), dim=1, stable=True).indices[..., None]
            x = x.gather(1, order.expand_as(x))
        x = self.dropout(x + self.embed_positions.weight[:T])
        states = [x]
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        states[-1] = self.norm(x)
        if order is not None:
            states = [torch.empty_like(x).scatter(1, order.expand_as(x), x) for x in states]
        return BaseModelOutput(
            last_hidden_state=states[-1], hidden_states=tuple(states) if output_hidden_states else None
        )


class AFTForCausalLM(AFTPreTrainedModel, GenerationMixin):
    """`AFTModel` with a linear head that predicts the next token.

    ``generate`` runs the whole context again for each token, and past ``max_position_embeddings`` slides over
    the last that many tokens.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: AFTConfig):
        super().__init__(config)
        self.model = AFTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        output_hidden_states: bool = False,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Logits [B, T, vocab_size], and the mean loss in nats a token where labels are given.

        ``labels`` [B, T] are shifted here (position t predicts label t + 1), ``shift_labels`` [B, T] are not
        (position t predicts label t); -100 is not counted. ``logits_to_keep``: the last n > 0
        positions only, or those that a tensor names.
        """
        outputs = self.model(
            input_ids, attention_mask, inputs_embeds, output_hidden_states=output_hidden_states
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None or shift_labels is not None:
            loss = self.loss_function(
                logits, labels, vocab_size=self.config.vocab_size, shift_labels=shift_labels, **kwargs
            )
        return CausalLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> dict[str, Any]:
        longest = self.config.max_position_embeddings
        mask = None if attention_mask is None else attention_mask[:, -longest:]
        return {"input_ids": input_ids[:, -longest:], "attention_mask": mask, "logits_to_keep": 1}


AutoConfig.register("aft", AFTConfig, exist_ok=True)
AutoModel.register(AFTConfig, AFTModel, exist_ok=True)
AutoModelForCausalLM.register(AFTConfig, AFTForCausalLM, exist_ok=True)
