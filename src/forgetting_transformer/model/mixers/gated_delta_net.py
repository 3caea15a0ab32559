"""Gated DeltaNet: the delta rule with a forget gate. docs/extend.md shows parts of it.

Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", ICLR 2025.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from forgetting_transformer.model.decoder import model_classes
from forgetting_transformer.model.mixers.delta_net import DeltaRuleConfig, DeltaRuleMixer
from forgetting_transformer.ops.recurrence import delta_rule_flops_per_token


class GatedDeltaNetAttention(DeltaRuleMixer):
    """`DeltaRuleMixer` with a forget gate per head and token, as in Mamba-2, and the output gate `silu(W_g x)`.

    log a = -exp(A_log) · softplus(W_a x + dt_bias)
    """

    op = "gated_delta_rule"
    a_proj: nn.Linear
    g_proj: nn.Linear

    def gate_sizes(self, hidden_size: int, key_size: int, value_size: int) -> dict[str, tuple[int, int]]:
        return {"a_proj": (hidden_size, self.num_heads), "g_proj": (hidden_size, value_size)}

    def num_step_sizes(self, key_size: int) -> int:
        return self.num_heads

    def log_decay(self, hidden_BTE: Tensor) -> Tensor:
        step_BTH = F.softplus(self.a_proj(hidden_BTE).float() + self.dt_bias.float())
        return -self.A_log.float().exp() * step_BTH

    def output_gate(self, hidden_BTE: Tensor) -> Tensor:
        return self.g_proj(hidden_BTE)


class GatedDeltaNetConfig(DeltaRuleConfig):
    """Configuration of Gated DeltaNet. Fields: see `DeltaRuleConfig`."""

    model_type = "gated_delta_net-project_fox"

    num_heads: int = 6
    expand_k: float = 0.75
    expand_v: float = 1.5

    def build_mixer(self, layer_idx: int) -> GatedDeltaNetAttention:
        return self.build_from_fields(GatedDeltaNetAttention, use_gate=True)

    def mixer_flops_per_token(self, layer_idx: int, seq_len: int) -> float:
        gate_weights = self.hidden_size * (self.num_heads + self.value_size)
        return self.delta_rule_flops(gate_weights, delta_rule_flops_per_token(*self.head_sizes))


GatedDeltaNetModel, GatedDeltaNetForCausalLM = model_classes(GatedDeltaNetConfig)
