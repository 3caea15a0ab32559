"""DeltaNet: linear attention that corrects what its state returns for a key instead of adding to it.

Source: Schlag et al., "Linear Transformers Are Secretly Fast Weight Programmers", ICML 2021, as parametrised by Yang
et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", NeurIPS 2024. Parameter names,
config keys and `model_type` are those of the released checkpoints.

Axes: `forgetting_transformer/ops/__init__.py`. C is H·K or H·V.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgetting_transformer.model.config import KERNEL_MODES, SwiGLUDecoderConfig
from forgetting_transformer.model.decoder import DecoderForCausalLM, DecoderModel
from forgetting_transformer.model.layers import GatedRMSNorm, ShortConvolution, init_xavier
from forgetting_transformer.model.mixers.recurrent import RecurrentMixer, zero_padding
from forgetting_transformer.ops import context
from forgetting_transformer.ops.backends import OpUse
from forgetting_transformer.ops.layers.norm import l2_norm
from forgetting_transformer.ops.recurrence import delta_rule_flops_per_token, recurrence

QK_ACTIVATIONS = {
    "silu": F.silu,
    "relu": F.relu,
    "elu": lambda x: F.elu(x) + 1,
    "identity": lambda x: x,
}
QK_NORMS = {
    "l2": l2_norm,
    "sum": lambda x: x / x.sum(-1, keepdim=True),
}


class DeltaNetAttention(RecurrentMixer):
    """The delta rule between projections.

        q, k, v = act(conv(W x))                 causal convolution of every channel by itself; silu for v
        q, k    = q / |q|, k / |k|               per head
        β       = sigmoid(W_b x)                 per head and token: how much of the old value is replaced
        S_t     = S_{t-1} + β_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ                K × V per head
        out     = W_o RMSNorm(S_tᵀ q_t / √K)     per head, one weight vector for all; then · silu(W_g x), optional

    Args:
        hidden_size: E.
        num_heads: H.
        key_size: H·K.
        value_size: H·V.
        use_short_conv: the convolutions.
        conv_size: their taps.
        use_beta: False sets β = 1.
        use_gate: multiply the normalised output by `silu(W_g x)`.
        qk_activation: "silu", "relu", "elu" (elu(x) + 1), "identity".
        qk_norm: "l2"; "sum", divide by the sum of the channels.
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
        use_short_conv: bool = True,
        conv_size: int = 4,
        use_beta: bool = True,
        use_gate: bool = False,
        qk_activation: str = "silu",
        qk_norm: str = "l2",
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.num_heads, self.key_dim = num_heads, key_size // num_heads
        self.use_short_conv, self.qk_activation, self.qk_norm = use_short_conv, qk_activation, qk_norm
        self.q_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, value_size, bias=False)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False) if use_beta else None
        self.g_proj = nn.Linear(hidden_size, value_size, bias=False) if use_gate else None
        if use_short_conv:
            # The convolutions do what usually follows, at once.
            unit_heads = num_heads if (qk_activation, qk_norm) == ("silu", "l2") else 0
            options: dict[str, Any] = {"bias": False, "silu": unit_heads > 0, "unit_heads": unit_heads}
            self.q_conv1d = ShortConvolution(key_size, conv_size, **options)
            self.k_conv1d = ShortConvolution(key_size, conv_size, **options)
            self.v_conv1d = ShortConvolution(value_size, conv_size, bias=False, silu=True)
        self.o_norm = GatedRMSNorm(1, value_size // num_heads, norm_eps, has_gate=use_gate)
        self.o_proj = nn.Linear(value_size, hidden_size, bias=False)

    def init_own_weights(self) -> None:
        init_xavier(self.q_proj, self.k_proj, self.v_proj, self.b_proj, self.g_proj, self.o_proj)

    @property
    def context_heads(self) -> int:
        return self.num_heads

    def op_use(self) -> OpUse:
        return OpUse("delta_rule", self.num_heads, self.key_dim, self.v_proj.out_features // self.num_heads)

    def mix(
        self, hidden_BTE: Tensor, padding_BT: Tensor | None, states: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Any]]:
        hidden_BTE = zero_padding(hidden_BTE, padding_BT)
        new_states: dict[str, Any] = {}
        q_BTC, k_BTC, v_BTC = self.q_proj(hidden_BTE), self.k_proj(hidden_BTE), self.v_proj(hidden_BTE)
        if self.use_short_conv:
            q_BTC, new_states["q_conv"] = self.q_conv1d(q_BTC, states.get("q_conv"))
            k_BTC, new_states["k_conv"] = self.k_conv1d(k_BTC, states.get("k_conv"))
            v_BTC, new_states["v_conv"] = self.v_conv1d(v_BTC, states.get("v_conv"))
        else:
            v_BTC = F.silu(v_BTC)
        q_BTHK, k_BTHK, v_BTHV = map(self.split_heads, (q_BTC, k_BTC, v_BTC))
        if not (self.use_short_conv and self.q_conv1d.unit_heads):
            activation, norm = QK_ACTIVATIONS[self.qk_activation], QK_NORMS[self.qk_norm]
            q_BTHK, k_BTHK = norm(activation(q_BTHK)), norm(activation(k_BTHK))

        out_BTHV, new_states["recurrent"] = recurrence(
            *map(context.to_heads, (q_BTHK, k_BTHK, v_BTHV)),
            beta=context.to_heads(self._beta(hidden_BTE)),
            state=states.get("recurrent"),
        )
        gate_BTHV = None if self.g_proj is None else self.split_heads(self.g_proj(hidden_BTE))
        out_BTHV = self.o_norm(context.to_sequence(out_BTHV, len(hidden_BTE)), gate_BTHV)
        return self.o_proj(out_BTHV.flatten(-2)), new_states

    def _beta(self, hidden_BTE: Tensor) -> Tensor:
        """How much of the old value is replaced, `(B, T, H)`, float32."""
        if self.b_proj is None:
            return torch.ones(*hidden_BTE.shape[:2], self.num_heads, device=hidden_BTE.device)
        return self.b_proj(hidden_BTE).float().sigmoid()


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


class DeltaNetConfig(DeltaRuleConfig):
    """Configuration of DeltaNet. Further fields: see `DeltaNetAttention`.

    Accepted so that published config.json files load, without effect: use_output_norm (the output is always
    normalised), for training with its default only; and attn_mode, fuse_cross_entropy, which choose
    among the authors' kernels.
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
        if self.qk_activation not in QK_ACTIVATIONS:
            raise ValueError(f"qk_activation is {self.qk_activation!r}; it must be one of {', '.join(QK_ACTIVATIONS)}")
        if self.qk_norm not in QK_NORMS:
            raise ValueError(f"qk_norm is {self.qk_norm!r}; it must be one of {', '.join(QK_NORMS)}")
        if self.qk_norm == "sum" and self.qk_activation != "elu":
            raise ValueError(
                f"qk_norm 'sum' divides by a sum that can be 0 after qk_activation {self.qk_activation!r}; use 'elu'"
            )
        if self.norm_first:
            raise ValueError("norm_first is True; the block normalises its input, set it to False")
        super().__post_init__(**kwargs)

    def build_mixer(self, layer_idx: int) -> DeltaNetAttention:
        return self.build_from_fields(DeltaNetAttention)

    def mixer_flops_per_token(self, layer_idx: int, seq_len: int) -> float:
        """Linear layers: 2 · weights. Convolutions: 2 · taps of all channels. The recurrence in chunks."""
        weights = self.hidden_size * (2 * self.key_size + 2 * self.value_size)  # q, k, v, o
        weights += self.hidden_size * (self.num_heads * self.use_beta + self.value_size * self.use_gate)
        weights += (2 * self.key_size + self.value_size) * self.conv_size * self.use_short_conv
        key_dim, value_dim = self.key_size // self.num_heads, self.value_size // self.num_heads
        return 2 * weights + delta_rule_flops_per_token(self.num_heads, key_dim, value_dim)


class DeltaNetModel(DecoderModel):
    """DeltaNet without its output layer."""

    config_class = DeltaNetConfig


class DeltaNetForCausalLM(DecoderForCausalLM):
    """DeltaNet as a language model."""

    model_class: ClassVar = DeltaNetModel
