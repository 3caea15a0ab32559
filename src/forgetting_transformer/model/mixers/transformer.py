"""The Transformer baseline in its LLaMA form: softmax attention, rotary positions, RMSNorm, SwiGLU.

Sources: Vaswani et al., "Attention is all you need", NeurIPS 2017; Touvron et al., "LLaMA", 2023; grouped key and value
heads: Ainslie et al., "GQA", EMNLP 2023; sliding window: Beltagy et al., "Longformer", 2020. Parameter names, config
keys and `model_type` are those of the released checkpoints. The sliding-window Transformer is this
class with `window_size`.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from forgetting_transformer.model.attention import AttentionMaps, attend
from forgetting_transformer.model.config import SwiGLUDecoderConfig
from forgetting_transformer.model.decoder import model_classes
from forgetting_transformer.model.generation.cache import AttentionCache
from forgetting_transformer.model.layers import apply_linear, linear_together
from forgetting_transformer.model.span import Span
from forgetting_transformer.ops.backends import OpUse
from forgetting_transformer.ops.layers.rotary import rotate


class AttentionLayer(nn.Module):
    """Multi-head causal attention with rotary position embedding.

        q, k, v = W x             H heads of queries, G of keys and values
        q, k    = RoPE(q), RoPE(k)
        out     = W_o causal_attention(q, k, v)

    Args:
        hidden_size: E, a multiple of num_heads.
        num_heads: H.
        num_kv_heads: G, a divisor of H: grouped-query attention. Default H.
        window_size: number of keys a query sees, itself included. None is all of them.
        use_rope: rotary position embedding.
        rope_base: its base.
    """

    takes_span = True
    gives_attentions = True
    packs_documents = True
    static_cache = True

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 32,
        *,
        num_kv_heads: int | None = None,
        window_size: int | None = None,
        use_rope: bool = True,
        rope_base: float = 500_000.0,
    ) -> None:
        super().__init__()
        check_attention_options(hidden_size, num_heads, num_kv_heads, window_size, use_rope)
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.window_size, self.use_rope, self.rope_base = window_size, use_rope, rope_base
        kv_width = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    @property
    def context_heads(self) -> int:
        return self.num_heads

    def op_use(self) -> OpUse:
        return OpUse(
            "attention",
            self.num_heads,
            self.head_dim,
            self.head_dim,
            key_heads=self.num_kv_heads,
            window=self.window_size,
        )

    def new_cache(self) -> AttentionCache:
        return AttentionCache(self.window_size)

    def forward(
        self, hidden_BTE: Tensor, span: Span | None = None
    ) -> tuple[Tensor, AttentionMaps | None, CacheLayerMixin | None]:
        """Return the output `(B, T, E)`, the maps if they are asked for, and the cache.

        Args:
            hidden_BTE: T new tokens.
            span: what is known of them. Default: whole sequences, without a cache.
        """
        span = span or Span()
        projections = (self.q_proj, self.k_proj, self.v_proj)
        together = linear_together(hidden_BTE, projections)
        q_BTHD, k_BTGD, v_BTGD = (
            apply_linear(layer, hidden_BTE, together).unflatten(-1, (-1, self.head_dim)) for layer in projections
        )
        if self.use_rope:
            q_BTHD, k_BTGD = (rotate(x, span.position, self.rope_base) for x in (q_BTHD, k_BTGD))
        out_BTHD, maps = attend(q_BTHD, k_BTGD, v_BTGD, None, span, window=self.window_size)
        return self.o_proj(out_BTHD.flatten(-2)), maps, span.cache

    @staticmethod
    def flops_per_token(
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


def check_attention_options(
    hidden_size: int, num_heads: int, num_kv_heads: int | None, window_size: int | None, use_rope: bool
) -> None:
    """Refuse options that do not fit together, naming the key and what to do."""
    if hidden_size % num_heads:
        raise ValueError(f"hidden_size is {hidden_size}; it must be a multiple of num_heads = {num_heads}")
    if num_kv_heads is not None and (num_kv_heads < 1 or num_heads % num_kv_heads):
        raise ValueError(
            f"num_kv_heads is {num_kv_heads}; it must divide num_heads = {num_heads}, or be None for num_heads of them"
        )
    if window_size is not None and window_size < 1:
        raise ValueError(f"window_size is {window_size}; a token sees itself, so at least 1, or None for no window")
    if use_rope and (hidden_size // num_heads) % 2:
        raise ValueError(
            f"use_rope needs an even head dimension; hidden_size / num_heads is {hidden_size // num_heads}"
        )


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
    """Configuration of the Transformer. Fields of attention: see `AttentionLayer`."""

    model_type = "transformer-project_fox"

    use_rope: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        check_attention_options(self.hidden_size, self.num_heads, self.num_kv_heads, self.window_size, self.use_rope)
        super().__post_init__(**kwargs)

    def build_mixer(self, layer_idx: int) -> AttentionLayer:
        return self.build_from_fields(AttentionLayer)

    def mixer_flops_per_token(self, layer_idx: int, seq_len: int) -> float:
        return AttentionLayer.flops_per_token(
            self.hidden_size, self.num_heads, self.num_kv_heads, self.window_size, seq_len
        )


TransformerModel, TransformerForCausalLM = model_classes(TransformerConfig)
