"""Kimi Delta Attention (KDA): the delta rule with a forget gate for every channel of the keys.

Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025 (arXiv 2510.26692), whose hybrid
has three blocks with this mixer to one with attention (`model=hybrid`). The low-rank projections are called as in the
released checkpoints.

Axes: `forgetting_transformer/ops/__init__.py`. C is H·K.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from forgetting_transformer.model.decoder import model_classes
from forgetting_transformer.model.mixers.delta_net import DeltaRuleConfig, DeltaRuleMixer
from forgetting_transformer.ops.recurrence import kda_flops_per_token


class KimiDeltaAttention(DeltaRuleMixer):
    """`DeltaRuleMixer` with a forget gate per key channel and token, and the output gate `sigmoid(W_gb W_ga x)`.

        log a = -exp(A_log) · softplus(W_fb W_fa x + dt_bias)

    A_log is one number per head, dt_bias one per key channel. The gates' projections have rank V.
    """

    op = "kda"
    activation = "sigmoid"
    f_a_proj: nn.Linear
    f_b_proj: nn.Linear
    g_a_proj: nn.Linear
    g_b_proj: nn.Linear

    def gate_sizes(self, hidden_size: int, key_size: int, value_size: int) -> dict[str, tuple[int, int]]:
        rank = self.value_dim
        forget = {"f_a_proj": (hidden_size, rank), "f_b_proj": (rank, key_size)}
        return forget | {"g_a_proj": (hidden_size, rank), "g_b_proj": (rank, value_size)}

    def num_step_sizes(self, key_size: int) -> int:
        return key_size

    def log_decay(self, hidden_BTE: Tensor) -> Tensor:
        step_BTC = F.softplus(self.f_b_proj(self.f_a_proj(hidden_BTE)).float() + self.dt_bias.float())
        return -self.A_log.float().exp()[:, None] * self.split_heads(step_BTC)

    def output_gate(self, hidden_BTE: Tensor) -> Tensor:
        return self.g_b_proj(self.g_a_proj(hidden_BTE))


class KDAConfig(DeltaRuleConfig):
    """Configuration of Kimi Delta Attention. Fields: see `DeltaRuleConfig`."""

    model_type = "kda-project_fox"

    def build_mixer(self, layer_idx: int) -> KimiDeltaAttention:
        return self.build_from_fields(KimiDeltaAttention, use_gate=True)

    def mixer_flops_per_token(self, layer_idx: int, seq_len: int) -> float:
        _, _, rank = self.head_sizes
        gate_weights = rank * (2 * self.hidden_size + self.key_size + self.value_size)
        return self.delta_rule_flops(gate_weights, kda_flops_per_token(*self.head_sizes))


KDAModel, KDAForCausalLM = model_classes(KDAConfig)
