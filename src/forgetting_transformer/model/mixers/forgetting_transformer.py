"""FoX, the Forgetting Transformer, in its LLaMA and Pro variants.

Source: Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate", ICLR 2025. Config keys and
`model_type` are those of the released checkpoints. The Transformer (Pro) baseline is this architecture with
`fgate_type="none"` and `use_rope=True`. Its layer: `forgetting_attention.py`.
"""

from typing import Any

from forgetting_transformer.model.arguments import check_forgetting_options
from forgetting_transformer.model.decoder import model_classes
from forgetting_transformer.model.mixers.forgetting_attention import ForgettingAttentionLayer
from forgetting_transformer.model.mixers.transformer import AttentionConfig, attention_flops_per_token


class ForgettingTransformerConfig(AttentionConfig):
    """Configuration of FoX. Fields of attention: see `ForgettingAttentionLayer`.

    FoX (Pro) sets hidden_ratio to 3.5, to pay for its output gates.

    Accepted so that published config.json files load, without effect: what `AttentionConfig` accepts.
    """

    model_type = "forgetting_transformer-project_fox"

    head_dim: int | None = None
    use_rope: bool = False
    rope_factor: float = 1.0
    rope_llama3: list[float] | None = None
    use_output_gate: bool = False
    ogate_act: str = "sigmoid"
    fgate_type: str = "full"
    fgate_bias_init: bool = False
    decay_time_min: float | None = None
    decay_time_max: float | None = None
    use_output_norm: bool = False
    qk_norm: bool = False
    qk_norm_eps: float = 1e-5
    qk_norm_share_param_across_head: bool = False
    use_k_shift: bool = False
    use_v_shift: bool = False
    log_pruning_tolerance: float | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        check_forgetting_options(self, self.head_dim)
        super().__post_init__(**kwargs)

    def build_mixer(self, layer_idx: int) -> ForgettingAttentionLayer:
        return self.build_from_fields(ForgettingAttentionLayer, initializer_range=None, layer_idx=layer_idx)

    def mixer_flops_per_token(self, layer_idx: int, seq_len: int) -> float:
        """FLOPs of the Transformer's layer, and two per weight of gates and token shift."""
        hidden, key_heads = self.hidden_size, self.num_kv_heads or self.num_heads
        width = hidden if self.head_dim is None else self.num_heads * self.head_dim
        weights = hidden * width * self.use_output_gate
        weights += hidden * self.num_heads * (self.fgate_type == "full")
        weights += hidden * key_heads * (self.use_k_shift + self.use_v_shift)
        return 2 * weights + attention_flops_per_token(
            hidden, self.num_heads, self.num_kv_heads, self.window_size, seq_len, width
        )


ForgettingTransformerModel, ForgettingTransformerForCausalLM = model_classes(ForgettingTransformerConfig)
