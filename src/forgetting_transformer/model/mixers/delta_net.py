"""DeltaNet: linear attention that corrects what its state returns for a key instead of adding to it.

Source: Schlag et al., "Linear Transformers Are Secretly Fast Weight Programmers", ICML 2021, as parametrised by Yang
et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", NeurIPS 2024. Parameter names,
config keys and `model_type` are those of the released checkpoints. Gated DeltaNet and Kimi Delta Attention add forget
gates to the same mixer.

Axes: `forgetting_transformer/ops/__init__.py`. C is H·K or H·V.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from forgetting_transformer.model.config import SwiGLUDecoderConfig
from forgetting_transformer.model.decoder import model_classes
from forgetting_transformer.model.layers import GatedRMSNorm, exempt_from_decay
from forgetting_transformer.model.mixers.recurrent import (
    KERNEL_MODES,
    RecurrentMixer,
    ShortConvolution,
    init_xavier,
    initial_dt_bias,
    zero_padding,
)
from forgetting_transformer.ops import context
from forgetting_transformer.ops.backends import OpUse
from forgetting_transformer.ops.recurrence import delta_rule_flops_per_token, recurrence


class DeltaRuleMixer(RecurrentMixer):
    """The delta rule between projections, with or without forget gates.

        q, k, v = silu(conv(W x))                causal convolution of every channel by itself
        q, k    = q / |q|, k / |k|               per head
        β       = sigmoid(W_b x)                 per head and token: how much of the old value is replaced
        S_t     = (I - β_t k_t k_tᵀ) diag(a_t) S_{t-1} + β_t k_t v_tᵀ      K × V per head
        out     = W_o norm(S_tᵀ q_t / √K)        RMSNorm per head with one weight vector for all, and a gate

    A subclass defines the forget gates a in `log_decay`, the norm's gate in `output_gate`, and the projections of both
    in `gate_sizes`.

    Args:
        hidden_size: E.
        num_heads: H.
        key_size: H·K.
        value_size: H·V.
        conv_size: taps of the convolutions.
        norm_eps: epsilon of the RMSNorm.
        use_gate: whether there is an output gate.
    """

    static_cache = True
    op: ClassVar[str]
    activation: ClassVar[str] = "silu"  # of the output gate, or "sigmoid"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        key_size: int,
        value_size: int,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
        use_gate: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads, self.key_dim, self.value_dim = num_heads, key_size // num_heads, value_size // num_heads
        self.use_gate = use_gate
        self.q_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, value_size, bias=False)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        for name, (inputs, outputs) in self.gate_sizes(hidden_size, key_size, value_size).items():
            self.add_module(name, nn.Linear(inputs, outputs, bias=False))
        self.q_conv1d = ShortConvolution(key_size, conv_size, bias=False, unit_heads=num_heads)
        self.k_conv1d = ShortConvolution(key_size, conv_size, bias=False, unit_heads=num_heads)
        self.v_conv1d = ShortConvolution(value_size, conv_size, bias=False)
        self.step_sizes = self.num_step_sizes(key_size)
        if self.step_sizes:
            self.A_log = nn.Parameter(self._initial_A_log())
            self.dt_bias = nn.Parameter(self._initial_dt_bias())
            exempt_from_decay(self.A_log, self.dt_bias)
        self.o_norm = GatedRMSNorm(1, self.value_dim, norm_eps, has_gate=use_gate, activation=self.activation)
        self.o_proj = nn.Linear(value_size, hidden_size, bias=False)

    def init_own_weights(self) -> None:
        if self.step_sizes:
            init.copy_(self.A_log, self._initial_A_log())
            init.copy_(self.dt_bias, self._initial_dt_bias())

    def _initial_A_log(self) -> Tensor:
        return torch.empty(self.num_heads).uniform_(1, 16).log()

    def _initial_dt_bias(self) -> Tensor:
        return initial_dt_bias(self.step_sizes, dt_min=1e-3, dt_max=0.1, dt_floor=1e-4)

    @property
    def context_heads(self) -> int:
        return self.num_heads

    def op_use(self) -> OpUse:
        return OpUse(self.op, self.num_heads, self.key_dim, self.value_dim)

    def gate_sizes(self, hidden_size: int, key_size: int, value_size: int) -> dict[str, tuple[int, int]]:
        """Name -> inputs and outputs of the projections of gates."""
        raise NotImplementedError

    def num_step_sizes(self, key_size: int) -> int:
        """Number of `dt_bias`, the step sizes of forget gates by Mamba-2's law; 0 without forget gates."""
        return 0

    def log_decay(self, hidden_BTE: Tensor) -> Tensor | None:
        """Logarithms of the forget gates, `(B, T, H)` or `(B, T, H, K)`, float32; None without forget gates."""
        raise NotImplementedError

    def output_gate(self, hidden_BTE: Tensor) -> Tensor | None:
        """`(B, T, H·V)` before its activation; None without one."""
        raise NotImplementedError

    def mix(
        self, hidden_BTE: Tensor, padding_BT: Tensor | None, states: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Any]]:
        hidden_BTE = zero_padding(hidden_BTE, padding_BT)
        q_BTC, q_conv_BCW = self.q_conv1d(self.q_proj(hidden_BTE), states.get("q_conv"))
        k_BTC, k_conv_BCW = self.k_conv1d(self.k_proj(hidden_BTE), states.get("k_conv"))
        v_BTC, v_conv_BCW = self.v_conv1d(self.v_proj(hidden_BTE), states.get("v_conv"))
        q_BTHK, k_BTHK, v_BTHV = map(self.split_heads, (q_BTC, k_BTC, v_BTC))
        log_decay = self.log_decay(hidden_BTE)
        out_BTHV, state_BHKV = recurrence(
            *map(context.to_heads, (q_BTHK, k_BTHK, v_BTHV)),
            beta=context.to_heads(self.b_proj(hidden_BTE).float().sigmoid()),
            log_decay=None if log_decay is None else context.to_heads(log_decay),
            state=states.get("recurrent"),
        )
        out_BTHV = context.to_sequence(out_BTHV, len(hidden_BTE))
        gate_BTC = self.output_gate(hidden_BTE)
        out_BTHV = self.o_norm(out_BTHV, None if gate_BTC is None else self.split_heads(gate_BTC))
        new_states = {"recurrent": state_BHKV, "q_conv": q_conv_BCW, "k_conv": k_conv_BCW, "v_conv": v_conv_BCW}
        return self.o_proj(out_BTHV.flatten(-2)), new_states


class DeltaNetAttention(DeltaRuleMixer):
    """`DeltaRuleMixer` without forget gates; with `use_gate`, its norm is multiplied by `silu(W_g x)`."""

    op = "delta_rule"
    g_proj: nn.Linear

    def gate_sizes(self, hidden_size: int, key_size: int, value_size: int) -> dict[str, tuple[int, int]]:
        return {"g_proj": (hidden_size, value_size)} if self.use_gate else {}

    def init_own_weights(self) -> None:
        init_xavier(self.q_proj, self.k_proj, self.v_proj, self.b_proj)
        if self.use_gate:
            init_xavier(self.g_proj)
        init_xavier(self.o_proj)

    def log_decay(self, hidden_BTE: Tensor) -> None:
        return None

    def output_gate(self, hidden_BTE: Tensor) -> Tensor | None:
        return self.g_proj(hidden_BTE) if self.use_gate else None


class DeltaRuleConfig(SwiGLUDecoderConfig):
    """Fields of DeltaNet, Gated DeltaNet and Kimi Delta Attention. Fields of the MLP: see `SwiGLUDecoderConfig`.

    Fields:
        num_heads: heads of the mixer.
        expand_k, expand_v: width of all keys and of all values, relative to hidden_size.
        conv_size: taps of the short convolutions.
    """

    num_heads: int = 16
    expand_k: float = 1
    expand_v: float = 1
    conv_size: int = 4

    def __post_init__(self, **kwargs: Any) -> None:
        for key, size in (("expand_k", self.key_size), ("expand_v", self.value_size)):
            if size % self.num_heads:
                raise ValueError(
                    f"{key} · hidden_size is {getattr(self, key)} · {self.hidden_size} = {size}; it must be a "
                    f"multiple of num_heads = {self.num_heads}"
                )
        super().__post_init__(**kwargs)

    @property
    def key_size(self) -> int:
        return int(self.hidden_size * self.expand_k)

    @property
    def value_size(self) -> int:
        return int(self.hidden_size * self.expand_v)

    def delta_rule_flops(self, gate_weights: int, recurrence_flops: float) -> float:
        """Linear layers: 2 · weights. Convolutions: 2 · taps of all channels. The recurrence in chunks."""
        weights = self.hidden_size * (2 * self.key_size + 2 * self.value_size + self.num_heads)  # q, k; v, o; β
        weights += (2 * self.key_size + self.value_size) * self.conv_size
        return 2 * (weights + gate_weights) + recurrence_flops

    @property
    def head_sizes(self) -> tuple[int, int, int]:
        """H, K and V."""
        return self.num_heads, self.key_size // self.num_heads, self.value_size // self.num_heads


class DeltaNetConfig(DeltaRuleConfig):
    """Configuration of DeltaNet. Further fields: see `DeltaNetAttention`.

    Accepted so that published config.json files load: use_short_conv, use_beta, qk_norm, qk_activation and norm_first,
    whose defaults are the one choice; and without effect use_output_norm (the output is always normalised), for
    training with its default only, and attn_mode, fuse_cross_entropy, which choose among the authors' kernels.
    """

    model_type = "delta_net-project_fox"
    neutral_values: ClassVar[Mapping[str, Sequence[Any]]] = {"use_output_norm": (True,), "attn_mode": KERNEL_MODES}
    rescale_down_proj: ClassVar[bool] = True

    attn_mode: str = "chunk"
    use_gate: bool = False
    use_short_conv: bool = True
    use_beta: bool = True
    use_output_norm: bool = True
    qk_norm: str = "l2"
    qk_activation: str = "silu"
    norm_first: bool = False
    fuse_cross_entropy: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        for key in ("use_short_conv", "use_beta", "qk_norm", "qk_activation", "norm_first"):
            if getattr(self, key) != getattr(DeltaNetConfig, key):
                raise ValueError(f"{key} is {getattr(self, key)!r}; {getattr(DeltaNetConfig, key)!r} is the one choice")
        super().__post_init__(**kwargs)

    def build_mixer(self, layer_idx: int) -> DeltaNetAttention:
        return self.build_from_fields(DeltaNetAttention)

    def mixer_flops_per_token(self, layer_idx: int, seq_len: int) -> float:
        gate_weights = self.hidden_size * self.value_size * self.use_gate
        return self.delta_rule_flops(gate_weights, delta_rule_flops_per_token(*self.head_sizes))


DeltaNetModel, DeltaNetForCausalLM = model_classes(DeltaNetConfig)
