"""Gated DeltaNet: the delta rule with a forget gate. docs/extend.md shows parts of it.

Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", ICLR 2025.

Axes: `forgetting_transformer/ops/__init__.py`. C is H·K or H·V.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from forgetting_transformer.model.decoder import DecoderForCausalLM, DecoderModel
from forgetting_transformer.model.layers import GatedRMSNorm, ShortConvolution, exempt_from_decay, initial_dt_bias
from forgetting_transformer.model.mixers.delta_net import DeltaRuleConfig
from forgetting_transformer.model.mixers.recurrent import RecurrentMixer, zero_padding
from forgetting_transformer.ops import context
from forgetting_transformer.ops.backends import OpUse
from forgetting_transformer.ops.recurrence import delta_rule_flops_per_token, recurrence


class GatedDeltaNetAttention(RecurrentMixer):
    """The gated delta rule between projections.

        q, k, v = silu(conv(W x))                causal convolution of every channel by itself
        q, k    = q / |q|, k / |k|               per head
        β       = sigmoid(W_b x)                 per head and token: how much of the old value is replaced
        log a   = -exp(A_log) · softplus(W_a x + dt_bias)        per head and token: the forget gate, as in Mamba-2
        S_t     = a_t S_{t-1} + β_t k_t (v_t - a_t S_{t-1}ᵀ k_t)ᵀ        K × V per head
        out     = W_o (RMSNorm(S_tᵀ q_t / √K) · silu(W_g x))     norm per head, one weight vector for all

    Args:
        hidden_size: E.
        num_heads: H.
        key_size: H·K.
        value_size: H·V.
        conv_size: taps of the convolutions.
        norm_eps: epsilon of the RMSNorm.
    """

    static_cache = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        key_size: int,
        value_size: int,
        *,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.num_heads, self.key_dim = num_heads, key_size // num_heads
        self.q_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, value_size, bias=False)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.a_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.g_proj = nn.Linear(hidden_size, value_size, bias=False)
        self.q_conv1d = ShortConvolution(key_size, conv_size, bias=False, silu=True, unit_heads=num_heads)
        self.k_conv1d = ShortConvolution(key_size, conv_size, bias=False, silu=True, unit_heads=num_heads)
        self.v_conv1d = ShortConvolution(value_size, conv_size, bias=False, silu=True)
        self.A_log = nn.Parameter(self._initial_A_log())
        self.dt_bias = nn.Parameter(self._initial_dt_bias())
        exempt_from_decay(self.A_log, self.dt_bias)
        self.o_norm = GatedRMSNorm(1, value_size // num_heads, norm_eps)
        self.o_proj = nn.Linear(value_size, hidden_size, bias=False)

    def init_own_weights(self) -> None:
        init.copy_(self.A_log, self._initial_A_log())
        init.copy_(self.dt_bias, self._initial_dt_bias())

    def _initial_A_log(self) -> Tensor:
        return torch.empty(self.num_heads).uniform_(1, 16).log()

    def _initial_dt_bias(self) -> Tensor:
        return initial_dt_bias(self.num_heads, dt_min=1e-3, dt_max=0.1, dt_floor=1e-4)

    @property
    def context_heads(self) -> int:
        return self.num_heads

    def op_use(self) -> OpUse:
        return OpUse("gated_delta_rule", self.num_heads, self.key_dim, self.v_proj.out_features // self.num_heads)

    def mix(
        self, hidden_BTE: Tensor, padding_BT: Tensor | None, states: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Any]]:
        hidden_BTE = zero_padding(hidden_BTE, padding_BT)
        q_BTC, q_conv_BCW = self.q_conv1d(self.q_proj(hidden_BTE), states.get("q_conv"))
        k_BTC, k_conv_BCW = self.k_conv1d(self.k_proj(hidden_BTE), states.get("k_conv"))
        v_BTC, v_conv_BCW = self.v_conv1d(self.v_proj(hidden_BTE), states.get("v_conv"))
        step_BTH = F.softplus(self.a_proj(hidden_BTE).float() + self.dt_bias.float())

        q_BTHK, k_BTHK, v_BTHV = map(self.split_heads, (q_BTC, k_BTC, v_BTC))
        out_BTHV, state_BHKV = recurrence(
            *map(context.to_heads, (q_BTHK, k_BTHK, v_BTHV)),
            beta=context.to_heads(self.b_proj(hidden_BTE).float().sigmoid()),
            log_decay=context.to_heads(-self.A_log.float().exp() * step_BTH),
            state=states.get("recurrent"),
        )
        out_BTHV = context.to_sequence(out_BTHV, len(hidden_BTE))
        gate_BTHV = self.split_heads(self.g_proj(hidden_BTE))
        new_states = {"recurrent": state_BHKV, "q_conv": q_conv_BCW, "k_conv": k_conv_BCW, "v_conv": v_conv_BCW}
        return self.o_proj(self.o_norm(out_BTHV, gate_BTHV).flatten(-2)), new_states


class GatedDeltaNetConfig(DeltaRuleConfig):
    """Configuration of Gated DeltaNet. Fields: see `DeltaRuleConfig`."""

    model_type = "gated_delta_net-project_fox"

    num_heads: int = 6
    expand_k: float = 0.75
    expand_v: float = 1.5

    def build_mixer(self, layer_idx: int) -> GatedDeltaNetAttention:
        return self.build_from_fields(GatedDeltaNetAttention)

    def mixer_flops_per_token(self, layer_idx: int, seq_len: int) -> float:
        """Linear layers: 2 · weights. Convolutions: 2 · taps of all channels. The recurrence in chunks."""
        weights = self.hidden_size * (2 * self.key_size + 3 * self.value_size)  # q and k; v, gate and o
        weights += self.hidden_size * 2 * self.num_heads
        weights += (2 * self.key_size + self.value_size) * self.conv_size
        key_dim, value_dim = self.key_size // self.num_heads, self.value_size // self.num_heads
        return 2 * weights + delta_rule_flops_per_token(self.num_heads, key_dim, value_dim)


class GatedDeltaNetModel(DecoderModel):
    """Gated DeltaNet without its output layer."""

    config_class = GatedDeltaNetConfig


class GatedDeltaNetForCausalLM(DecoderForCausalLM):
    """Gated DeltaNet as a language model."""

    model_class: ClassVar = GatedDeltaNetModel
