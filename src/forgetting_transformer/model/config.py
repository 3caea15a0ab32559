"""Configuration that every architecture has: sizes, names of submodules, how mixers and MLPs are built, and FLOPs.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from forgetting_transformer.model.arguments import check_silu
from forgetting_transformer.model.generation.cache import CACHE_NAME
from forgetting_transformer.model.layers import SwiGLU, swiglu_width

Layer = TypeVar("Layer", bound=nn.Module)

#: Conventions for labels: that of the FoX paper's code, and that of Hugging Face's models and Trainer.
LOSSES = ("per_token", "causal_lm")


class DecoderConfig(PreTrainedConfig):
    """Configuration that every architecture has. Subclasses also provide `norm_eps`.

    Fields:
        vocab_size: rows of the embedding and of the output layer.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of blocks.
        initializer_range: standard deviation of linear and embedding weights at the start.
        use_cache: whether `forward` without labels returns a cache outside training.
        tie_word_embeddings: the output layer uses the embedding's weights.
        loss: meaning of labels in `forward`. "per_token": `labels[t]` is the token after `input_ids[t]`, the loss is
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
        # `from_pretrained` sets its keyword arguments after the configuration was made.
        if key == "loss" and value not in LOSSES:
            raise ValueError(f"loss is {value!r}; it must be one of {', '.join(LOSSES)}")
        super().__setattr__(key, value)

    @classmethod
    def fields_in_use(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Fields that define the model; a run that continues must have the same."""
        return fields

    def mixer_config(self, layer_idx: int) -> "DecoderConfig":
        """The configuration that builds the mixer of block `layer_idx`: this one, or that of another architecture."""
        return self

    @property
    def mixer_architectures(self) -> list[str]:
        """Other registered architectures whose mixers the blocks have."""
        return []

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
