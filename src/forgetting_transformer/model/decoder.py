"""The decoder that all architectures share: embedding → L × (norm → mixer → norm → MLP) → norm → head → loss per token.

An architecture is a mixer and a configuration. The configuration builds the mixers (`build_mixer`) and the MLPs
(`build_mlp`), names the submodules as its published checkpoints do, and counts FLOPs. It registers itself with
`model.registry`. `block.py` defines a mixer.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from forgetting_transformer.model.arguments import check_loss_arguments, check_no_maps, check_shape
from forgetting_transformer.model.block import DecoderBlock
from forgetting_transformer.model.config import DecoderConfig
from forgetting_transformer.model.generation.cache import CACHE_NAME, DecoderCache, cache_of_call
from forgetting_transformer.model.generation.hooks import DecoderGenerationMixin, through_graph
from forgetting_transformer.model.layers import Embedding, FinalRMSNorm
from forgetting_transformer.model.pretrained import DecoderPreTrainedModel
from forgetting_transformer.model.span import span_of_call
from forgetting_transformer.ops.layers.cross_entropy import linear_cross_entropy


class OutputLayer(nn.Linear):
    """Hidden states to logits, or with labels to the loss of every token. The loss is computed in `forward`, because
    FSDP2 gathers the weight when a module is called.
    """

    def forward(self, hidden_BTE: Tensor, labels_BT: Tensor | None = None, compiled: bool = False) -> Tensor:
        """Return logits `(B, T, V)`, or the loss `(B, T)` as `linear_cross_entropy` does."""
        if labels_BT is None:
            return super().forward(hidden_BTE)
        return linear_cross_entropy(hidden_BTE, self.weight, labels_BT, compiled=compiled)


class DecoderModel(DecoderPreTrainedModel):
    """Token ids to hidden states."""

    # A language model's checkpoint may be loaded without its output layer.
    _keys_to_ignore_on_load_unexpected = [r"lm_head\.weight"]  # noqa: RUF012 (as in the base class)

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        padding_idx = config.pad_token_id if config.zero_padding_embedding else None
        self.embeddings = Embedding(config.vocab_size, config.hidden_size, padding_idx=padding_idx)
        self.layers: Any = nn.ModuleList(DecoderBlock(config, i) for i in range(config.num_hidden_layers))
        self.add_module(config.final_norm_name, FinalRMSNorm(config.hidden_size, config.norm_eps))
        self.post_init()

    def new_cache(self) -> DecoderCache:
        """Make an empty cache for this model."""
        return DecoderCache.of_mixers(self._mixers())

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: DecoderCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cu_seqlens: Tensor | None = None,
        cache: DecoderCache | None = None,
    ) -> BaseModelOutputWithPast:
        """Run the blocks on T new tokens.

        Args:
            input_ids: `(B, T)`, or
            inputs_embeds: `(B, T, E)` in its place.
            attention_mask: `(B, N)`, 1 for tokens and 0 for left padding; N counts cached tokens too. Not needed
                without padding, nor after the first call with a cache. Without a cache, as in training, it may also
                have zeros on the right; outputs there are meaningless.
            past_key_values: cache of the tokens before these. Any number of new tokens may follow it.
            use_cache: return a cache. Default: `config.use_cache` outside training.
            output_hidden_states: also return the input of every block and the normalised output of the last.
            output_attentions: None or False; eval/forget_gates draws attention.
            cu_seqlens: packed documents: where each begins among the B·T tokens of all rows, one row after another, and
                B·T, `(documents + 1,)`, int32 or int64, rising; ends may be repeated. A row begins a document. No
                attention, state, shift or rotary position crosses from one document into another. Without a cache and
                padding; not for mixers that carry states across (`packs_documents`).
            cache: `past_key_values`, as transformers calls it since version 5.24.

        Raises:
            ValueError, TypeError: arguments that do not fit together, or that this model does not use. The message
                names the argument.
        """
        check_shape(self, input_ids, inputs_embeds)
        check_no_maps(output_attentions)
        past, use_cache = cache_of_call(self, past_key_values, cache, use_cache, is_packed=cu_seqlens is not None)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden_BTE = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        shape = hidden_BTE.shape  # where documents are packed, the blocks see all rows as one
        hidden_BTE, span = span_of_call(self, hidden_BTE, attention_mask, past, cu_seqlens)

        # Nothing else holds the inputs of blocks that are done, unless the backward pass needs them.
        all_hidden: list[Tensor] = []
        for i, block in enumerate(self.layers):
            if output_hidden_states:
                all_hidden.append(hidden_BTE)
            hidden_BTE = block(hidden_BTE, span if past is None else replace(span, cache=past.layers[i]))
        hidden_BTE = getattr(self, self.config.final_norm_name)(hidden_BTE).view(shape)
        # transformers calls the cache "past_key_values" or, since version 5.24, "cache".
        kept: dict[str, Any] = {CACHE_NAME: past if use_cache else None}
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_BTE,
            **kept,
            hidden_states=(*(x.view(shape) for x in all_hidden), hidden_BTE) if output_hidden_states else None,
        )


class DecoderForCausalLM(DecoderPreTrainedModel, DecoderGenerationMixin):
    """A decoder with an output layer, which gives logits or, with labels, the loss of every token.

    `model_classes` makes a subclass for each configuration.
    """

    model_class: ClassVar[type[DecoderModel]] = DecoderModel
    # transformers' Trainer then passes num_items_in_batch, and counts the labels that are left after the shift.
    accepts_loss_kwargs = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self._tied_weights_keys = {"lm_head.weight": f"{self.base_model_prefix}.embeddings.weight"}
        self.add_module(self.base_model_prefix, self.model_class(config))
        self.lm_head: Any = OutputLayer(config.hidden_size, config.vocab_size, bias=False)
        self.loss_type = "ForCausalLM"
        self.post_init()

    @property
    def _is_stateful(self) -> bool:  # type: ignore[override]  # an attribute of the base class
        """Whether caches cannot take tokens back, so that transformers refuses assisted decoding."""
        return not self.new_cache().is_croppable

    @property
    def decoder(self) -> DecoderModel:
        """The model without the output layer, whatever its name is."""
        return getattr(self, self.base_model_prefix)

    @can_return_tuple
    @through_graph
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: DecoderCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_attentions: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: DecoderCache | None = None,
    ) -> CausalLMOutputWithPast:
        """Compute logits `(B, T, V)`, or with labels the loss. Further arguments: `DecoderModel.forward`.

        Args:
            labels: tokens to predict `(B, T)`; -100 is ignored. `config.loss` decides their meaning.
                "per_token": `labels[t]` is the token after `input_ids[t]`; labels are not shifted here. `loss` has the
                shape `(B, T)`, float32, in nats. `logits` is None, because they are never all held in float32.
                "causal_lm": `labels[t]` is the token `input_ids[t]`; labels are shifted here, and `loss` is the mean
                over those that count (`mean_loss`).
            logits_to_keep: without labels: compute logits of this many last positions only, 0 for all; or positions.
            use_cache: default False with labels.
            num_items_in_batch: for "causal_lm", see `mean_loss`.
        """
        if labels is not None:
            check_loss_arguments(self, cu_seqlens, logits_to_keep, num_items_in_batch)
            use_cache = bool(use_cache)
        output = self.decoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            output_attentions=output_attentions,
            cu_seqlens=cu_seqlens,
            cache=cache,
        )
        hidden_BTE, loss, logits = output.last_hidden_state, None, None
        if labels is not None and self.config.loss == "per_token":
            is_own = isinstance(self.lm_head, OutputLayer)
            head = self.lm_head if is_own else self.loss_of_other_head
            loss = head(hidden_BTE, labels, compiled=self._is_compiled)
        else:
            positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden_BTE[:, positions])
            if labels is not None:
                loss = self.mean_loss(logits, labels, attention_mask, num_items_in_batch)
        kept = {name: getattr(output, name) for name in (CACHE_NAME, "hidden_states")}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **kept)


def model_classes(
    config_class: type[DecoderConfig],
    model_base: type[DecoderModel] = DecoderModel,
    lm_base: type[DecoderForCausalLM] = DecoderForCausalLM,
) -> tuple[type[DecoderModel], type[DecoderForCausalLM]]:
    """Model and language model of a configuration, named and pickled as if they were written beside it.

    `model_classes(MyConfig)` are `MyModel`, which is `model_base`, and `MyForCausalLM`, which is `lm_base`.
    """
    name = config_class.__name__.removesuffix("Config")
    shared = {"__module__": config_class.__module__, "config_class": config_class}
    shared["base_model_prefix"] = model_base.base_model_prefix
    model_class = type(f"{name}Model", (model_base,), shared)
    return model_class, type(f"{name}ForCausalLM", (lm_base,), {**shared, "model_class": model_class})
