"""The Transformer baseline in its LLaMA form: softmax attention, rotary positions, RMSNorm, SwiGLU.

Sources: Vaswani et al., "Attention is all you need", NeurIPS 2017; Touvron et al., "LLaMA", 2023; grouped key and value
heads: Ainslie et al., "GQA", EMNLP 2023; sliding window: Beltagy et al., "Longformer", 2020. Config keys and
`model_type` are those of the released checkpoints. Its layer is FoX's without forget gates; the sliding-window
Transformer is this class with `window_size`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from forgetting_transformer.model.arguments import check_attention_options
from forgetting_transformer.model.config import SwiGLUDecoderConfig
from forgetting_transformer.model.decoder import model_classes
from forgetting_transformer.model.mixers.forgetting_attention import ForgettingAttentionLayer


def attention_flops_per_token(
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int | None,
    window_size: int | None,
    seq_len: int,
    width: int | None = None,
) -> float:
    """Forward FLOPs: two per weight; for every key that a query sees 2·W for q·k and 2·W for the weighted sum.

    Args:
        width: W, of all heads together. Default hidden_size.
    """
    width = width or hidden_size
    kv_width = width // num_heads * (num_kv_heads or num_heads)
    weights = 2 * hidden_size * (width + kv_width)  # q and o, k and v
    return 2 * weights + 4 * width * mean_visible_keys(seq_len, window_size)


def mean_visible_keys(seq_len: int, window_size: int | None) -> float:
    """Keys that a query sees on average: `Σ_{t=1..T} min(t, window) / T`."""
    window = min(window_size or seq_len, seq_len)
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


class AttentionConfig(SwiGLUDecoderConfig):
    """Fields of models with attention in every block. Fields of the MLP: see `SwiGLUDecoderConfig`.

    Accepted so that published config.json files load, without effect: elementwise_affine (norms always have weights),
    attention_bias (projections never have one), both for training with their defaults only; and fuse_norm,
    fuse_cross_entropy, which choose among the authors' kernels.
    """

    neutral_values: ClassVar[Mapping[str, Sequence[Any]]] = {"elementwise_affine": (True,), "attention_bias": (False,)}

    num_heads: int = 32
    num_kv_heads: int | None = None
    window_size: int | None = None
    elementwise_affine: bool | None = True
    attention_bias: bool = False
    fuse_norm: bool = True
    fuse_cross_entropy: bool = True
    rope_base: float = 500_000.0


class TransformerConfig(AttentionConfig):
    """Configuration of the Transformer. Fields of attention: see `ForgettingAttentionLayer`."""

    model_type = "transformer-project_fox"

    use_rope: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        check_attention_options(self.hidden_size, self.num_heads, self.num_kv_heads, self.window_size, self.use_rope)
        super().__post_init__(**kwargs)

    def build_mixer(self, layer_idx: int) -> ForgettingAttentionLayer:
        return ForgettingAttentionLayer(
            self.hidden_size,
            self.num_heads,
            self.num_kv_heads,
            self.window_size,
            use_rope=self.use_rope,
            rope_base=self.rope_base,
            fgate_type="none",
            initializer_range=None,
        )

    def mixer_flops_per_token(self, layer_idx: int, seq_len: int) -> float:
        sizes = (self.hidden_size, self.num_heads, self.num_kv_heads, self.window_size)
        return attention_flops_per_token(*sizes, seq_len)


TransformerModel, TransformerForCausalLM = model_classes(TransformerConfig)
