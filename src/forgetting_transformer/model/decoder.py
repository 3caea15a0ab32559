"""The decoder that all architectures share: embedding → L × (norm → mixer → norm → MLP) → norm → head → loss per token.

An architecture is a mixer and a configuration. The configuration builds the mixers (`build_mixer`) and the MLPs
(`build_mlp`), names the submodules as its published checkpoints do, and counts FLOPs. A mixer is an `nn.Module` with

    forward(hidden_BTE, seq_start_B=None, cache=None, *mixer_inputs) -> (out_BTE, …)
        The block reads the first result. `mixer_inputs` are what the model's method of this name returns for the block,
        by default nothing.
    new_cache() -> CacheLayerMixin
        An empty layer cache.
    init_own_weights()
        Optional. Called after the default initialisation of its submodules, to change it. It must write through
        `transformers.initialization`, whose functions leave weights from a checkpoint as they are.
    op_use() -> OpUse
        Optional. How it calls its op, so that the op's kernels are tested before the first step on a GPU. Layers in it
        may have one too.
    use_rope
        Optional. True if it has rotary positions; its forward then takes the keyword `position_BT`.
    gives_attentions
        Optional. True if its forward takes the keyword `output_attentions` and returns (out_BTE, AttentionMaps, …).
    packs_documents
        Optional. True if its forward takes the keyword `cu_seqlens` and keeps packed documents apart.
    static_cache
        Optional. True if its forward can write a single token in place, where `cache.place` says: nothing in it may
        depend on how many tokens came before but through tensors. Then `generate` runs it as a CUDA graph. A recurrent
        mixer may say so whose states keep their names and shapes.
    context_heads
        Optional. A mixer that has it works where processes share a sequence (`ops/context.py`). They must divide this
        number, of heads that it splits among them; 0 if it splits none. A module in it that reads tokens of the part
        before has their number as `tokens_before`.

and registers itself with `model.registry`.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import contextlib
import functools
import inspect
import math
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from forgetting_transformer.model.cache import DecoderCache, one_cache
from forgetting_transformer.model.decoding_graph import DecodingGraph
from forgetting_transformer.model.layers import AttentionMaps, FinalRMSNorm, ResidualRMSNorm, SwiGLU, swiglu_width
from forgetting_transformer.model.padding import find_seq_start, positions_in_documents
from forgetting_transformer.ops import compiling, context
from forgetting_transformer.ops.backends import OpUse
from forgetting_transformer.ops.cross_entropy import linear_cross_entropy
from forgetting_transformer.ops.finite import check_finite

Layer = TypeVar("Layer", bound=nn.Module)

#: How transformers names the cache in outputs and in the arguments of `generate`: "cache" since version 5.24.
CACHE_NAME = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"

#: Conventions for labels: that of the FoX paper's code, and that of Hugging Face's models and Trainer.
LOSSES = ("per_token", "causal_lm")


@dataclass
class DecoderOutput(BaseModelOutputWithPast):
    """What a decoder returns.

    Attributes (beside transformers' own; one entry per block, None for a block that was not asked for):
        attentions: attention weights `(B, H, T, N)`, float32.
        decays: `Σ log f` between key and query, which the weights are computed with, `(B, H, T, N)`, nats, float32.
    """

    decays: tuple[Tensor | None, ...] | None = None


@dataclass
class CausalDecoderOutput(CausalLMOutputWithPast):
    """What a language model returns: `DecoderOutput`, with the loss and the logits."""

    decays: tuple[Tensor | None, ...] | None = None


class DecoderConfig(PreTrainedConfig):
    """What every architecture's configuration has. Subclasses also provide `norm_eps`.

    Fields:
        vocab_size: rows of the embedding and of the output layer.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of blocks.
        initializer_range: standard deviation of linear and embedding weights at the start.
        use_cache: whether `forward` without labels returns a cache outside training.
        tie_word_embeddings: the output layer uses the embedding's weights.
        loss: what `forward` makes of labels. "per_token": `labels[t]` is the token after `input_ids[t]`, the loss is
            `(B, T)`, as in the FoX paper's code. "causal_lm": labels are the input ids, shifted inside, and the loss is
            a mean, as in Hugging Face's models.
    """

    keys_to_ignore_at_inference: ClassVar[list[str]] = [CACHE_NAME]
    # Names of a block's submodules and of the last norm, as in the architecture's checkpoints. The second norm and the
    # MLP of a block are always `mlp_norm` and `mlp`.
    mixer_norm_name: ClassVar[str] = "attn_norm"
    mixer_name: ClassVar[str] = "attn"
    final_norm_name: ClassVar[str] = "norm"
    # Fields of published configurations that change nothing here, with the values for which that is right.
    # `registry.build_config` refuses other values. Published files may hold them: the authors' code ignores them too.
    neutral_values: ClassVar[Mapping[str, Sequence[Any]]] = {}
    # Whether the embedding of the padding token is zero, and stays so.
    zero_padding_embedding: ClassVar[bool] = True

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    loss: str = "per_token"

    def __setattr__(self, key: str, value: Any) -> None:
        # `from_pretrained` sets what it is given after the configuration was made.
        if key == "loss" and value not in LOSSES:
            raise ValueError(f"loss is {value!r}; it must be one of {', '.join(LOSSES)}")
        super().__setattr__(key, value)

    @classmethod
    def fields_in_use(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Those of given fields that decide what the model is; a run that continues must have the same."""
        return fields

    def mixer_config(self, layer_idx: int) -> "DecoderConfig":
        """The configuration that builds the mixer of block `layer_idx`: this one, or that of another architecture."""
        return self

    @property
    def mixer_architectures(self) -> list[str]:
        """Other registered architectures whose mixers the blocks have."""
        return []

    @property
    def shared_parameters_key(self) -> str | None:
        """The field by which mixers of several blocks share parameters (`mixer_inputs`); None if they share none."""
        return None

    def build_from_fields(self, layer_class: type[Layer], **others: Any) -> Layer:
        """Make a layer from `others` and, for its other arguments, the fields and properties of the same names."""
        names = inspect.signature(layer_class).parameters.keys() - others.keys()
        return layer_class(**{name: getattr(self, name) for name in names}, **others)

    def build_mixer(self, layer_idx: int) -> nn.Module:
        """Make the sequence mixer of block `layer_idx`."""
        raise NotImplementedError(f"{type(self).__name__} must define build_mixer")

    def build_mlp(self, layer_idx: int) -> nn.Module | None:
        """Make the MLP of block `layer_idx`, or None for a block without one."""
        raise NotImplementedError(f"{type(self).__name__} must define build_mlp")

    def mixer_flops_per_token(self, layer_idx: int, seq_len: int) -> float:
        """Forward FLOPs of the mixer of block `layer_idx`, averaged over the tokens of a sequence."""
        raise NotImplementedError(f"{type(self).__name__} must define mixer_flops_per_token")

    def mlp_flops_per_token(self, layer_idx: int) -> float:
        """Forward FLOPs of the MLP of block `layer_idx`, 0 without one."""
        raise NotImplementedError(f"{type(self).__name__} must define mlp_flops_per_token")

    def flops_per_token(self, seq_len: int, training: bool = True) -> float:
        """Model FLOPs per token, averaged over a sequence of `seq_len` tokens.

        Convention: a multiply-add is two FLOPs. Matrix products only (linear layers, attention scores and weighted
        sums, recurrences); the embedding is a lookup and free, the output layer counts. Causal attention counts the
        pairs it needs, T(T+1)/2. Backward costs twice the forward pass; work done again to save memory
        (checkpointing, FlashAttention's backward) is not counted, nor is work saved by pruning subtracted.
        """
        forward = 2 * self.hidden_size * self.vocab_size + sum(
            self.mixer_flops_per_token(layer_idx, seq_len) + self.mlp_flops_per_token(layer_idx)
            for layer_idx in range(self.num_hidden_layers)
        )
        return 3 * forward if training else forward


class SwiGLUDecoderConfig(DecoderConfig):
    """A configuration whose blocks all have the same SwiGLU MLP.

    Fields:
        hidden_ratio: MLP width relative to hidden_size, as if the MLP had two matrices (`swiglu_width`).
        intermediate_size: MLP width itself; overrides hidden_ratio.
        hidden_act: "swish" (SiLU) is the one choice.
        norm_eps: epsilon of the RMSNorms.
        max_position_embeddings: no effect on the model; other tools read it as the training context length.
    """

    # Start down_proj at initializer_range / sqrt(2 · layers), so that the residual stream does not grow with depth.
    rescale_down_proj: ClassVar[bool] = False

    hidden_ratio: float | None = 4
    intermediate_size: int | None = None
    hidden_act: str = "swish"
    norm_eps: float = 1e-6
    max_position_embeddings: int | None = 2048

    def __post_init__(self, **kwargs: Any) -> None:
        check_silu(self.hidden_act)
        if self.hidden_ratio is None and self.intermediate_size is None:
            raise ValueError("hidden_ratio and intermediate_size are both None; set one of them")
        super().__post_init__(**kwargs)

    @property
    def mlp_width(self) -> int:
        if self.intermediate_size:
            return self.intermediate_size
        assert self.hidden_ratio is not None  # checked at the start
        return swiglu_width(self.hidden_size, self.hidden_ratio)

    def build_mlp(self, layer_idx: int) -> SwiGLU:
        std = self.initializer_range / math.sqrt(2 * self.num_hidden_layers) if self.rescale_down_proj else None
        return SwiGLU(self.hidden_size, self.mlp_width, std)

    def mlp_flops_per_token(self, layer_idx: int) -> float:
        return SwiGLU.flops_per_token(self.hidden_size, self.mlp_width)


def check_silu(hidden_act: str) -> None:
    """Refuse other activations than SiLU."""
    if hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act is {hidden_act!r}; it must be 'silu' or 'swish', which is the same")


class DecoderBlock(GradientCheckpointingLayer):
    """`x + mixer(norm(x))`, then `x + mlp(norm(x))` if there is an MLP."""

    # transformers' class would checkpoint around __call__, hooks included. FSDP2 gathers weights in those hooks, so
    # the hooks stay outside and `forward` checkpoints the rest.
    __call__ = nn.Module.__call__

    # Under activation checkpointing: whether what a block starts from waits for the backward pass in the host's memory.
    inputs_on_host = False
    # `gradient_checkpointing_enable` replaces this by one with the user's arguments.
    _gradient_checkpointing_func = staticmethod(functools.partial(checkpoint, use_reentrant=False))

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__()
        self.mixer_norm_name, self.mixer_name = config.mixer_norm_name, config.mixer_name
        self.add_module(self.mixer_norm_name, ResidualRMSNorm(config.hidden_size, config.norm_eps))
        mixer = config.build_mixer(layer_idx)
        if not isinstance(mixer, nn.Module):
            raise TypeError(f"{type(config).__name__}.build_mixer returned {mixer!r}; it must return an nn.Module")
        self.add_module(self.mixer_name, mixer)
        mlp = config.build_mlp(layer_idx)
        self.has_mlp = mlp is not None
        if mlp is not None:
            self.mlp_norm = ResidualRMSNorm(config.hidden_size, config.norm_eps)
            self.mlp = mlp

    @property
    def sequence_mixer(self) -> Any:
        return getattr(self, self.mixer_name)

    def forward(
        self,
        hidden_BTE: Tensor,
        seq_start_B: Tensor | None = None,
        cache: CacheLayerMixin | None = None,
        *mixer_inputs: Tensor,
        **mixer_options: Any,
    ) -> Tensor | tuple[Tensor, AttentionMaps]:
        """Return the new residual stream `(B, T, E)`, and with `output_attentions` the mixer's maps."""
        if self.gradient_checkpointing and self.training:
            if cache is not None:
                raise ValueError(
                    "gradient checkpointing runs the block twice, so it cannot fill a cache: use_cache=False"
                )
            # Keywords are bound first: PyTorch's older kind of checkpointing takes none.
            transform = functools.partial(self._transform, **mixer_options) if mixer_options else self._transform
            # What is saved inside is not kept; the hooks get what the block starts from.
            on_host = save_on_cpu(pin_memory=hidden_BTE.is_cuda) if self.inputs_on_host else contextlib.nullcontext()
            with on_host:
                return self._gradient_checkpointing_func(transform, hidden_BTE, seq_start_B, None, *mixer_inputs)
        return self._transform(hidden_BTE, seq_start_B, cache, *mixer_inputs, **mixer_options)

    def _transform(
        self,
        hidden_BTE: Tensor,
        seq_start_B: Tensor | None,
        cache: CacheLayerMixin | None,
        *mixer_inputs: Tensor,
        **mixer_options: Any,
    ) -> Tensor | tuple[Tensor, AttentionMaps]:
        normed_BTE, hidden_BTE = getattr(self, self.mixer_norm_name)(hidden_BTE)
        mixed = self.sequence_mixer(normed_BTE, seq_start_B, cache, *mixer_inputs, **mixer_options)
        # A tensor alone would be unpacked into the sequences of the batch, and one of a smaller shape broadcast.
        if not isinstance(mixed, tuple | list) or not mixed or not _is_branch(mixed[0], normed_BTE):
            raise TypeError(
                f"{type(self.sequence_mixer).__name__}.forward returned {_described(mixed)}. It must return a tuple: "
                f"the output, a floating-point tensor of its input's shape {tuple(normed_BTE.shape)}, and the cache"
            )
        branch_BTE, *others = mixed
        if self.has_mlp:
            normed_BTE, hidden_BTE = self.mlp_norm(hidden_BTE, branch_BTE)
            branch_BTE = self.mlp(normed_BTE)
        hidden_BTE = hidden_BTE + branch_BTE
        return (hidden_BTE, others[0]) if mixer_options.get("output_attentions") else hidden_BTE


def _is_branch(out: Any, hidden_BTE: Tensor) -> bool:
    return isinstance(out, Tensor) and out.shape == hidden_BTE.shape and out.is_floating_point()


def _described(mixed: Any) -> str:
    """What a mixer returned, for people: "a tuple with a float32 tensor (4, 64, 1) first"."""
    in_tuple = isinstance(mixed, tuple | list)
    if in_tuple and not mixed:
        return "an empty tuple"
    first = mixed[0] if in_tuple else mixed
    tensor = isinstance(first, Tensor) and f"{str(first.dtype).removeprefix('torch.')} tensor {tuple(first.shape)}"
    what = f"a {tensor or type(first).__name__}"
    return f"a tuple with {what} first" if in_tuple else f"{what} and no tuple"


class OutputLayer(nn.Linear):
    """Hidden states to logits, or with labels to the loss of every token. The loss is computed in `forward`, because
    FSDP2 gathers the weight when a module is called.
    """

    def forward(self, hidden_BTE: Tensor, labels_BT: Tensor | None = None, compiled: bool = False) -> Tensor:
        """Return logits `(B, T, V)`, or the loss `(B, T)` as `linear_cross_entropy` does."""
        if labels_BT is None:
            return super().forward(hidden_BTE)
        return linear_cross_entropy(hidden_BTE, self.weight, labels_BT, compiled=compiled)


class DecoderPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation."""

    config_class = DecoderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderBlock"]  # noqa: RUF012 (as in the base class)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does, and refuse weights that are not finite."""
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        check_finite(model.named_parameters(), pretrained_model_name_or_path)
        return loaded

    def _init_weights(self, module: Any) -> None:
        """Linear and embedding weights from N(0, initializer_range²), biases 0, norm weights 1; then mixers' own."""
        super()._init_weights(module)
        if hasattr(module, "init_own_weights"):
            module.init_own_weights()

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # For classes from outside its package transformers skips modules that hold no parameters directly, as a guard
        # against initialisers that overwrite loaded weights. Ours do not, and a mixer's own initialisation must run.
        super()._initialize_weights(module, is_custom_code=False)


class DecoderModel(DecoderPreTrainedModel):
    """Token ids to hidden states."""

    # A language model's checkpoint may be loaded without its output layer.
    _keys_to_ignore_on_load_unexpected = [r"lm_head\.weight"]  # noqa: RUF012 (as in the base class)

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        padding_idx = config.pad_token_id if config.zero_padding_embedding else None
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=padding_idx)
        self.layers: Any = nn.ModuleList(DecoderBlock(config, i) for i in range(config.num_hidden_layers))
        self.add_module(config.final_norm_name, FinalRMSNorm(config.hidden_size, config.norm_eps))
        self.add_shared_parameters()
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def set_input_embeddings(self, value: Any) -> None:
        self.embeddings = value

    def new_cache(self) -> DecoderCache:
        """Make an empty cache for this model."""
        mixers = [block.sequence_mixer for block in self.layers]
        for name in sorted({type(mixer).__name__ for mixer in mixers if not hasattr(mixer, "new_cache")}):
            raise TypeError(
                f"{name} has no new_cache(), so nothing can be generated with a cache: give it one "
                "(docs/add_an_architecture.md), or generate with use_cache=False"
            )
        return DecoderCache([mixer.new_cache() for mixer in mixers])

    def op_uses(self) -> list[OpUse]:
        """How mixers, and layers in them, call ops whose kernels can be tested before use; see `ops/selftest.py`."""
        modules: Iterator[Any] = self.modules()
        return [module.op_use() for module in modules if hasattr(module, "op_use")]

    def add_shared_parameters(self) -> None:
        """Make the parameters that mixers of several blocks share. Called once; by default there are none."""

    def mixer_inputs(self) -> Sequence[tuple[Tensor, ...]]:
        """Further arguments of every block's mixer: what is computed from the shared parameters."""
        return [()] * len(self.layers)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: DecoderCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        position_ids: Tensor | None = None,
        output_attentions: bool | Sequence[int] | None = None,
        cu_seqlens: Tensor | None = None,
        cache: DecoderCache | None = None,
    ) -> DecoderOutput | tuple:
        """Run the blocks on T new tokens.

        Args:
            input_ids: `(B, T)`, or
            inputs_embeds: `(B, T, E)` in its place.
            attention_mask: `(B, N)`, 1 for tokens and 0 for left padding; N counts cached tokens too. Not needed
                without padding, nor after the first call with a cache. Without a cache, as in training, it may also
                have zeros on the right; what the model computes there means nothing.
            past_key_values: cache of the tokens before these. Any number of new tokens may follow it.
            use_cache: return a cache. Default: `config.use_cache` outside training.
            output_hidden_states: also return the input of every block and the normalised output of the last.
            return_dict: False gives a tuple.
            position_ids: rotary positions of the new tokens `(B, T)` or `(1, T)`, rising along a sequence, for models
                that have rotary positions. Default: the number of tokens before each. Only differences matter, so
                padding needs none.
            output_attentions: also return attention weights and decays, of all layers that have attention (True) or of
                those with these numbers. `H·T·N` numbers each; for long texts see eval/forget_gates.
            cu_seqlens: packed documents: where each begins among the B·T tokens of all rows, one row after another, and
                B·T, `(documents + 1,)`, int32 or int64, rising; ends may be repeated. A row begins a document. No
                attention, state, shift or rotary position crosses from one document into another. Without a cache,
                padding, maps and position_ids; not for mixers that carry states across (`packs_documents`).
            cache: `past_key_values`, as transformers calls it since version 5.24.

        Raises:
            ValueError, TypeError: arguments that do not fit together, or that this model has no use for. The message
                names the argument.
        """
        self.check_shape(input_ids, inputs_embeds)
        past_key_values = one_cache(past_key_values, cache)
        if past_key_values is not None and not isinstance(past_key_values, DecoderCache):
            raise TypeError(
                f"past_key_values is a {type(past_key_values).__name__}; pass the one a former call returned, "
                "model.new_cache(), or None"
            )
        if use_cache is None:
            keeps_none = self.training or cu_seqlens is not None or context.active() is not None
            use_cache = self.config.use_cache and not keeps_none
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache()

        place = None
        if past_key_values is not None and past_key_values.place is not None:
            if past_key_values.is_writing:
                place = past_key_values.place
            else:
                past_key_values.make_dynamic()
        hidden_BTE = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        num_past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if past_key_values is None:
            seq_start_B = find_seq_start(attention_mask, hidden_BTE, allow_right=True)
        else:
            seq_start_B = find_seq_start(attention_mask, hidden_BTE, num_past, past_key_values.seq_start_B)
            past_key_values.seq_start_B = seq_start_B
            if num_past and past_key_values.has_position_ids and position_ids is None:
                raise ValueError("the cached tokens were given position_ids; give them for the new tokens too")
            past_key_values.has_position_ids = position_ids is not None
        if position_ids is not None:
            self._check_position_ids(position_ids, hidden_BTE, seq_start_B, num_past)
        chosen_layers = self._layers_to_show(output_attentions)
        shape, shared = hidden_BTE.shape, context.active()
        others = (attention_mask, past_key_values, position_ids, chosen_layers or None)
        if shared is not None:
            self._check_sharing(shared.size, others)
            first = shared.rank * shape[1]
            position_ids = torch.arange(first, first + shape[1], device=hidden_BTE.device)[None]
        if place is not None:
            position_ids = place.new[None]
        if cu_seqlens is not None:
            self._check_packing(cu_seqlens, (shape[0], shape[1] * (1 if shared is None else shared.size)), others)
            if shared is None:
                # All rows as one, which is how packed documents are kept apart.
                hidden_BTE = hidden_BTE.flatten(0, 1)[None]
            position_ids = positions_in_documents(cu_seqlens, hidden_BTE)

        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        # Nothing else holds the inputs of blocks that are done, unless the backward pass needs them.
        all_hidden: list[Tensor] = []
        maps: dict[int, AttentionMaps] = {}
        for i, (block, mixer_inputs) in enumerate(zip(self.layers, self.mixer_inputs(), strict=True)):
            if output_hidden_states:
                all_hidden.append(hidden_BTE)
            layer_cache = None if past_key_values is None else past_key_values.layers[i]
            options: dict[str, Any] = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
            if position_ids is not None and _has_rope(block):
                options["position_BT"] = position_ids
            if i in chosen_layers:
                options["output_attentions"] = True
                hidden_BTE, maps[i] = block(hidden_BTE, seq_start_B, layer_cache, *mixer_inputs, **options)
            else:
                hidden_BTE = block(hidden_BTE, seq_start_B, layer_cache, *mixer_inputs, **options)
        hidden_BTE = getattr(self, self.config.final_norm_name)(hidden_BTE)
        hidden_BTE = hidden_BTE.view(shape)
        shown: list[Any] = [maps.get(i, AttentionMaps(None, None)) for i in range(len(self.layers))] if maps else []
        kept: dict[str, Any] = {CACHE_NAME: past_key_values if use_cache else None}
        output = DecoderOutput(
            last_hidden_state=hidden_BTE,
            **kept,
            hidden_states=(*(x.view(shape) for x in all_hidden), hidden_BTE) if output_hidden_states else None,
            attentions=tuple(weights for weights, _ in shown) or None,
            decays=tuple(decay for _, decay in shown) or None,
        )
        return output if self._wants_dict(return_dict) else output.to_tuple()

    def check_shape(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> None:
        """Refuse what is no batch of sequences; each mixer would fail in another place.

        Raises:
            ValueError, TypeError: naming the argument, its shape and the right one.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        name, given = "input_ids", input_ids
        last: tuple[int, ...] = ()
        if inputs_embeds is not None:
            name, given, last = "inputs_embeds", inputs_embeds, (self.config.hidden_size,)
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} is a {type(given).__name__}; it must be a tensor")
        shape = tuple(given.shape)
        if len(shape) != 2 + len(last) or 0 in shape or shape[2:] != last:
            axes = ", ".join(("B", "T", *map(str, last)))
            cure = f"; one sequence is a batch too: {name}[None]" if len(shape) == 1 + len(last) else ""
            raise ValueError(f"{name} has shape {shape}; it must be ({axes}), at least one token in each row{cure}")

    def stateful_mixers(self) -> list[str]:
        """Classes of mixers that cannot keep packed documents apart."""
        mixers = [block.sequence_mixer for block in self.layers]
        return sorted({type(mixer).__name__ for mixer in mixers if not getattr(mixer, "packs_documents", False)})

    def whole_sequence_mixers(self, size: int, length: int | None = None) -> list[str]:
        """Mixers for which `size` processes cannot share sequences (`ops/context.py`), with the reason.

        Args:
            length: of the shortest sequences; None: any.
        """
        found = set()
        for mixer in (block.sequence_mixer for block in self.layers):
            heads, name = getattr(mixer, "context_heads", None), type(mixer).__name__
            before = max(getattr(module, "tokens_before", 0) for module in mixer.modules())
            if heads is None:
                found.add(f"{name} takes whole sequences only")
            elif heads % size:
                found.add(f"{name} has {heads} heads")
            elif size > 1 and length is not None and length // size < before:
                found.add(f"{name} needs {before} tokens of the part before, and parts have {length // size}")
        return sorted(found)

    def _check_sharing(self, size: int, others: tuple[Any, ...]) -> None:
        if reasons := self.whole_sequence_mixers(size):
            raise ValueError(f"{size} processes cannot share sequences: {', '.join(reasons)}")
        if any(x is not None for x in others):
            raise ValueError(
                "attention_mask, past_key_values, position_ids or output_attentions is given, which a model does not "
                "take where processes share sequences; leave them out, or give it whole sequences"
            )

    def _check_packing(self, cu_seqlens: Tensor, shape: tuple[int, ...], others: tuple[Any, ...]) -> None:
        if stateful := self.stateful_mixers():
            raise ValueError(
                f"cu_seqlens: {self.config.model_type.partition('-')[0]} carries a state from one document into the "
                f"next ({', '.join(stateful)}); give every document its own row, or use FoX, a Transformer, Mamba-2 "
                "or Samba"
            )
        if any(x is not None for x in others):
            raise ValueError(
                "cu_seqlens is given with attention_mask, past_key_values, position_ids or output_attentions, which "
                "packed documents do not take; leave them out"
            )
        if cu_seqlens.ndim != 1:
            raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be (documents + 1,)")
        if cu_seqlens.device.type == "cpu":  # looking at values would make a GPU wait
            batch, length = shape
            starts = {*cu_seqlens.tolist()}
            if not starts.issuperset(range(0, batch * length + 1, length)):
                raise ValueError(
                    f"cu_seqlens must name the beginning of each of the {batch} rows of {length} tokens, and the end, "
                    f"{batch * length}; it has {sorted(starts)[:8]}, …"
                )

    def _check_position_ids(
        self, position_ids: Tensor, hidden_BTE: Tensor, seq_start_B: Tensor | None, num_past: int
    ) -> None:
        batch, length = hidden_BTE.shape[:2]
        if not any(_has_rope(block) for block in self.layers):
            raise ValueError(
                f"position_ids: this {type(self).__name__} has no rotary positions, so they would change nothing; "
                "leave them out (packed documents are kept apart by cu_seqlens)"
            )
        if position_ids.is_floating_point() or position_ids.shape not in ((batch, length), (1, length)):
            raise ValueError(
                f"position_ids has shape {tuple(position_ids.shape)} and dtype {position_ids.dtype}; it must be "
                f"integers of shape {(batch, length)} or {(1, length)}"
            )
        # Reading values breaks a compiled graph and makes the host wait for a GPU, so this is not done while decoding.
        if length == 1 or torch.compiler.is_compiling():
            return
        falls_BT = position_ids.diff(dim=1) <= 0
        if seq_start_B is not None:
            index_T = torch.arange(num_past, num_past + length - 1, device=falls_BT.device)
            falls_BT = falls_BT & (index_T >= seq_start_B[:, None])
        if bool(falls_BT.any()):
            raise ValueError(
                "position_ids must rise along a sequence; where they start again, packed documents would see each "
                "other. Give cu_seqlens in their place"
            )

    def _layers_to_show(self, output_attentions: bool | Sequence[int] | None) -> Sequence[int]:
        """The numbers of the blocks whose attention is asked for."""
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_attentions is False:
            return ()
        able = [i for i, block in enumerate(self.layers) if getattr(block.sequence_mixer, "gives_attentions", False)]
        if not able:
            raise ValueError(f"output_attentions: {type(self).__name__} has no attention layers; leave it out")
        if output_attentions is True:
            return able
        if isinstance(output_attentions, int | str):
            raise TypeError(
                f"output_attentions is {output_attentions!r}; give True, or a list of layers such as [{able[0]}]"
            )
        for layer in output_attentions:
            if layer not in able:
                raise ValueError(
                    f"output_attentions has {layer!r}; layers with attention are {', '.join(map(str, able))}"
                )
        return output_attentions

    def _wants_dict(self, return_dict: bool | None) -> bool:
        return bool(self.config.return_dict if return_dict is None else return_dict)


class DecoderForCausalLM(DecoderPreTrainedModel, GenerationMixin):
    """A decoder with an output layer, which gives logits or, with labels, the loss of every token.

    Subclasses set `model_class`, which gives them its `config_class` and `base_model_prefix` too.
    """

    model_class: ClassVar[type[DecoderModel]] = DecoderModel
    # transformers' Trainer then passes num_items_in_batch, and counts the labels that are left after the shift.
    accepts_loss_kwargs = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "model_class" in vars(cls):
            for name in {"config_class", "base_model_prefix"} - vars(cls).keys():
                setattr(cls, name, getattr(cls.model_class, name))
        super().__init_subclass__(**kwargs)

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self._tied_weights_keys = {"lm_head.weight": f"{self.base_model_prefix}.embeddings.weight"}
        self.add_module(self.base_model_prefix, self.model_class(config))
        self.lm_head: Any = OutputLayer(config.hidden_size, config.vocab_size, bias=False)
        self._is_compiled = False
        self._has_looked_at_labels = False
        self.loss_type = "ForCausalLM"
        self.post_init()

    def compile_parts(self) -> None:
        """Run blocks and loss through torch.compile from now on.

        Block by block: one compilation serves all blocks, and FSDP2 can gather each block's weights separately.
        Activation checkpointing stays outside the compiled part: inside, a mixer that breaks the graph (FLA's kernels
        do) would make PyTorch give up on the whole block without a warning. Each new length or
        batch size compiles again. Blocks may be recorded as CUDA graphs (`ops/compiling.recording`); the loss is not,
        because each of its slices would get the weight as a copy.
        """
        for module in self.modules():
            if isinstance(module, DecoderBlock):
                module._transform = compiling.compiled(module._transform, recordable=True)  # type: ignore[method-assign]
        self._is_compiled = True

    def keep_block_inputs_on_host(self) -> None:
        """With activation checkpointing, keep what blocks start from in the host's memory until the backward pass.

        Saves the GPU 4·E bytes per token and block (2·E where the residual stream has 16 bits). They go to pinned
        memory and back, through PyTorch's `save_on_cpu`. Nothing changes on a CPU.
        """
        for module in self.modules():
            if isinstance(module, DecoderBlock):
                module.inputs_on_host = True

    @property
    def _is_stateful(self) -> bool:  # type: ignore[override]  # an attribute of the base class
        """Whether caches cannot take tokens back, so that transformers refuses assisted decoding."""
        return not self.new_cache().is_croppable

    @property
    def decoder(self) -> DecoderModel:
        """The model without the output layer, whatever its name is."""
        return getattr(self, self.base_model_prefix)

    def op_uses(self) -> list[OpUse]:
        """How the model calls ops: `DecoderModel.op_uses`."""
        return self.decoder.op_uses()

    def stateful_mixers(self) -> list[str]:
        """Classes of mixers that cannot keep packed documents apart; none where the model takes `cu_seqlens`."""
        return self.decoder.stateful_mixers()

    def whole_sequence_mixers(self, size: int, length: int | None = None) -> list[str]:
        """Mixers for which `size` processes cannot share sequences: `DecoderModel.whole_sequence_mixers`."""
        return self.decoder.whole_sequence_mixers(size, length)

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embeddings

    def set_input_embeddings(self, value: Any) -> None:
        self.decoder.embeddings = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    def new_cache(self, cuda_graph: bool | str = False) -> DecoderCache:
        """Make an empty cache for this model.

        Args:
            cuda_graph: run single tokens on a GPU as a CUDA graph (`decoding_graph.py`), under `torch.no_grad()`, for
                the same numbers but for the last bits. Models that have hooks, are compiled or lie on several devices
                go without. Do not change the model's modules or adapters while the cache is in use. "auto": where all
                mixers allow it, the model is on a GPU, and this is the main thread, because random numbers that another
                thread draws during a recording are an error. `generate` without a cache does so.

        Raises:
            ValueError: cuda_graph is True, and the caches do not allow it.
        """
        if not isinstance(cuda_graph, bool) and cuda_graph != "auto":
            raise ValueError(f"cuda_graph is {cuda_graph!r}; it must be True, False or 'auto'")
        cache = self.decoder.new_cache()
        if cuda_graph:
            mixers = (block.sequence_mixer for block in self.decoder.layers)
            moving = sorted({type(mixer).__name__ for mixer in mixers if not getattr(mixer, "static_cache", False)})
            if cuda_graph is True and moving:
                raise ValueError(
                    f"cuda_graph=True: caches of {', '.join(moving)} do not hold still (sliding windows, PaTH-FoX, "
                    "mixers without `static_cache`); leave it out"
                )
            on_gpu = self.device.type in DecodingGraph.DEVICE_TYPES
            is_safe = on_gpu and threading.current_thread() is threading.main_thread()
            if not moving and (cuda_graph is True or is_safe):
                cache.graph = DecodingGraph(is_asked_for=cuda_graph is True)
        return cache

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
        return_dict: bool | None = None,
        position_ids: Tensor | None = None,
        output_attentions: bool | Sequence[int] | None = None,
        num_items_in_batch: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: DecoderCache | None = None,
    ) -> CausalDecoderOutput | tuple:
        """Compute logits `(B, T, V)`, or with labels the loss. Further arguments: `DecoderModel.forward`.

        Args:
            labels: what is to be predicted `(B, T)`; -100 is ignored. `config.loss` says how they are meant.
                "per_token": `labels[t]` is the token after `input_ids[t]`; labels are not shifted here. `loss` has the
                shape `(B, T)`, float32, in nats. `logits` is None, because they are never all held at once.
                "causal_lm": `labels[t]` is the token `input_ids[t]`; labels are shifted here. `loss` is the mean over
                the labels that count, and `logits` are returned too. Padding predicts nothing: after a 0 of
                `attention_mask` a label does not count.
            logits_to_keep: without labels: compute logits of this many last positions only, 0 for all; or positions.
            use_cache: default False with labels.
            num_items_in_batch: divide the summed loss by this instead of taking the mean, for "causal_lm": the labels
                that count in all micro-batches of a step, as transformers' Trainer passes them. Trainer counts from the
                labels alone, so with left padding the first token of a row too, unless its label is -100: the loss is
                then too small by this factor, 1 in the length of a row, and its gradient's direction is right.
        """
        self.decoder.check_shape(input_ids, inputs_embeds)
        past_key_values = one_cache(past_key_values, cache)
        kept: dict[str, Any]
        if labels is None and isinstance(past_key_values, DecoderCache) and past_key_values.graph is not None:
            others = (inputs_embeds, position_ids, cu_seqlens, output_attentions, output_hidden_states)
            is_plain = all(x is None or x is False for x in others) and isinstance(logits_to_keep, int)
            takes_graph = is_plain and (self.config.use_cache if use_cache is None else use_cache)
            token_logits: Any = None
            if takes_graph:
                token_logits = past_key_values.graph.step(self, past_key_values, input_ids, attention_mask)
            if token_logits is not None:
                kept = {CACHE_NAME: past_key_values}
                result = CausalDecoderOutput(logits=token_logits, **kept)
                return result if self.decoder._wants_dict(return_dict) else result.to_tuple()
        if use_cache is None and labels is not None:
            use_cache = False
        if labels is not None:
            self._check_loss_arguments(input_ids, labels, logits_to_keep, num_items_in_batch)
            if cu_seqlens is not None and self.config.loss != "per_token":
                raise ValueError("cu_seqlens is given and config.loss is 'causal_lm', whose shift crosses documents")
        output = self.decoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            position_ids=position_ids,
            output_attentions=output_attentions,
            cu_seqlens=cu_seqlens,
        )
        logits: Any = None
        loss = None
        if labels is not None and self.config.loss == "per_token":
            loss = self._loss_per_token(output.last_hidden_state, labels)
        else:
            positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(output.last_hidden_state[:, positions])
        if labels is not None and self.config.loss == "causal_lm":
            if labels.shape != logits.shape[:2]:
                raise ValueError(
                    f"labels have shape {tuple(labels.shape)}; they must be {tuple(logits.shape[:2])}, one per token"
                )
            if attention_mask is not None:
                labels = _ignore_after_padding(labels, attention_mask)
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=logits.shape[-1], num_items_in_batch=num_items_in_batch
            )
        kept = {CACHE_NAME: getattr(output, CACHE_NAME)}
        result = CausalDecoderOutput(
            loss=loss,
            logits=logits,
            **kept,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
            decays=output.decays,
        )
        return result if self.decoder._wants_dict(return_dict) else result.to_tuple()

    def _loss_per_token(self, hidden_BTE: Tensor, labels_BT: Tensor) -> Tensor:
        if isinstance(self.lm_head, OutputLayer):
            return self.lm_head(hidden_BTE, labels_BT, compiled=self._is_compiled)
        if isinstance(self.lm_head, nn.Linear):  # transformers puts one there when the vocabulary is resized
            return linear_cross_entropy(hidden_BTE, self.lm_head.weight, labels_BT, compiled=self._is_compiled)
        # An adapter stands in its place, whose weight is not all that it computes with.
        logits_BTV = self.lm_head(hidden_BTE).float()
        return F.cross_entropy(logits_BTV.transpose(1, 2), labels_BT, reduction="none")

    def _check_loss_arguments(
        self,
        input_ids: Tensor | None,
        labels: Tensor,
        logits_to_keep: int | Tensor,
        num_items_in_batch: int | Tensor | None,
    ) -> None:
        """Refuse what the convention for labels has no use for, and warn once of labels that look like the other's."""
        if self.config.loss == "causal_lm":
            if context.active() is not None:
                raise ValueError(
                    "config.loss is 'causal_lm', whose shift loses the first label of each process's part where "
                    "processes share sequences; set it to 'per_token'"
                )
            if not isinstance(logits_to_keep, int) or logits_to_keep:
                raise ValueError("logits_to_keep is given with labels; the loss needs all logits, leave it out")
            return
        if num_items_in_batch is not None:
            raise ValueError(
                "num_items_in_batch is given, as transformers' Trainer does, but config.loss is 'per_token': a loss "
                "(B, T) of labels that are not shifted. Set model.config.loss = 'causal_lm'"
            )
        if self._has_looked_at_labels or not self.training or input_ids is None or torch.compiler.is_compiling():
            return
        self._has_looked_at_labels = True
        if labels.device.type != "meta" and _are_inputs(labels, input_ids):
            warnings.warn(
                "labels are input_ids, and are not shifted (config.loss is 'per_token', where labels[t] is the token "
                "after input_ids[t]): the model learns to copy. For Hugging Face's convention set "
                "model.config.loss = 'causal_lm'",
                stacklevel=2,
            )

    def _prepare_generation_config(self, generation_config: GenerationConfig | None, *args: Any, **kwargs: Any) -> Any:
        """Refuse other caches. Here, as transformers takes the word "hybrid" back before it makes a cache."""
        asked_for = [config.cache_implementation for config in (self.generation_config, generation_config) if config]
        for implementation in (*asked_for, kwargs.get("cache_implementation")):
            if implementation not in (None, "dynamic"):
                raise ValueError(f"cache_implementation is {implementation!r}; this model has one cache, leave it out")
        return super()._prepare_generation_config(generation_config, *args, **kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(  # type: ignore[override]  # whatever else there is has no use
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Give `generate` this model's cache, not transformers' DynamicCache, which holds keys and values only."""
        if generation_config.is_assistant:
            if self._is_stateful:
                raise ValueError(
                    f"assistant_model is a {type(self).__name__}, whose recurrent state cannot take rejected tokens "
                    "back; draft with FoX or a Transformer, or leave it out"
                )
            # The target's, whose draft may have no rotary positions; the cache counts for those that have.
            model_kwargs.pop("position_ids", None)
        # Under both names, as `forward` takes it, whatever transformers calls it.
        given = one_cache(model_kwargs.pop("past_key_values", None), model_kwargs.pop("cache", None))
        if generation_mode == GenerationMode.ASSISTED_GENERATION and not getattr(given, "is_croppable", True):
            raise ValueError(
                "assisted generation takes rejected tokens back, and this cache cannot; leave out the cache or the "
                "assistant"
            )
        if given is None and generation_config.use_cache:
            # Assisted generation takes tokens back all the time.
            is_assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
            given = self.new_cache(cuda_graph=False if is_assisted else "auto")
        if given is not None:
            model_kwargs[CACHE_NAME] = given

    def _prepare_model_inputs(self, *args: Any, **kwargs: Any) -> tuple[Tensor, str | None, dict[str, Any]]:
        """Refuse a prompt that is no batch of sequences before `generate` looks at its last token."""
        inputs, name, model_kwargs = super()._prepare_model_inputs(*args, **kwargs)  # type: ignore[misc]  # self of a mixin
        embeds = name == "inputs_embeds"
        self.decoder.check_shape(None if embeds else inputs, inputs if embeds else None)
        return inputs, name, model_kwargs

    def _prepare_attention_mask_for_generation(
        self, inputs_tensor: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> Any:
        """Make the mask of a prompt without one, as transformers does, except for the draft of assisted generation.

        A draft gets the target's mask if there is padding. transformers would look for padding in its ids again after
        every round, and a target may write the padding token.
        """
        if generation_config.is_assistant:
            return torch.ones(inputs_tensor.shape[:2], dtype=torch.long, device=inputs_tensor.device)
        return super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)

    # `generate` reads the signature to find out whether a model takes inputs_embeds.
    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        # generate(stop_strings=…, tokenizer=…) hands the tokenizer on, which other models swallow.
        return {key: value for key, value in inputs.items() if not key.endswith("tokenizer")}

    def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the cache knows how many tokens came before, and padding needs no correction (`ops/rotary.py`)."""


def _has_rope(block: DecoderBlock) -> bool:
    return getattr(block.sequence_mixer, "use_rope", False)


def _ignore_after_padding(labels_BT: Tensor, attention_mask_BN: Tensor) -> Tensor:
    """Labels without those that a position of padding would have to predict: in left padding a row's first token."""
    follows_padding_BT = F.pad(attention_mask_BN[:, -labels_BT.shape[1] :][:, :-1] == 0, (1, 0))
    return labels_BT.masked_fill(follows_padding_BT, -100)


def _are_inputs(labels_BT: Tensor, input_ids_BT: Tensor) -> bool:
    """Whether the labels that count are the tokens at the same positions, and not the next ones."""
    if labels_BT.shape != input_ids_BT.shape:
        return False
    counts_BT = labels_BT != -100
    differs_BT = (labels_BT != input_ids_BT) & counts_BT
    differs_from_next_BT = (labels_BT[:, :-1] != input_ids_BT[:, 1:]) & counts_BT[:, :-1]
    return not bool(differs_BT.any()) and bool(differs_from_next_BT.any())
