"""HGRN2: gated linear attention whose key is one minus its forget gate.

Source: Qin et al., "HGRN2: Gated Linear RNNs with State Expansion", COLM 2024. Parameter names, config keys and
`model_type` are those of the released checkpoints. These were trained without the lower bounds of forget gates that the
published architecture has: their code computes the bounds and does not use them, and so there are none here.

Axes: `forgetting_transformer/ops/__init__.py`. K is expand_ratio, and V as large.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from forgetting_transformer.model.config import SwiGLUDecoderConfig
from forgetting_transformer.model.decoder import DecoderModel, model_classes
from forgetting_transformer.model.layers import RMSNorm, exempt_from_decay
from forgetting_transformer.model.mixers.recurrent import KERNEL_MODES, RecurrentMixer, init_xavier, zero_padding
from forgetting_transformer.ops import context
from forgetting_transformer.ops.backends import OpUse
from forgetting_transformer.ops.recurrence import gla_flops_per_token, last_state, recurrence


class HGRN2Attention(RecurrentMixer):
    """The HGRN2 recurrence with an outer-product state.

        q = silu(W_q x),   v = W_i x,   f = sigmoid(W_f x)
        S_t = diag(f_t) S_{t-1} + (1 - f_t) v_tᵀ                              K × V per head
        out = W_o RMSNorm(S_tᵀ q_t / √K)                                     normalised over the whole width

    Args:
        hidden_size: E = H·K.
        num_heads: H.
        norm_eps: epsilon of the RMSNorm.
    """

    static_cache = True

    def __init__(self, hidden_size: int, num_heads: int, norm_eps: float = 1e-6) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.f_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.i_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.g_norm = RMSNorm(hidden_size, norm_eps)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def init_own_weights(self) -> None:
        init_xavier(self.q_proj, self.f_proj, self.i_proj, self.o_proj)

    context_heads = 0  # processes pass states on

    def op_use(self) -> OpUse:
        return OpUse("gla", self.num_heads, self.head_dim, self.head_dim)

    def mix(
        self, hidden_BTE: Tensor, padding_BT: Tensor | None, states: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Any]]:
        hidden_BTE = zero_padding(hidden_BTE, padding_BT)
        logit_BTE = self.f_proj(hidden_BTE).float()
        # 1 - f from the sigmoid of the negated logit, and log f from logsigmoid, keep their relative precision where
        # f approaches 1 and 0.
        k_BTE, log_fgate_BTE = torch.sigmoid(-logit_BTE), F.logsigmoid(logit_BTE)
        v_BTE = self.i_proj(hidden_BTE)
        q_BTE = F.silu(self.q_proj(hidden_BTE))
        q_BTHK, k_BTHK, v_BTHV = map(self.split_heads, (q_BTE, k_BTE.to(v_BTE.dtype), v_BTE))
        log_decay_BTHK, before_BHKV = self.split_heads(log_fgate_BTE), states.get("recurrent")
        if before_BHKV is None and context.active() is not None:
            before_BHKV = context.state_before(*last_state(k_BTHK, v_BTHV, log_decay_BTHK))
        out_BTHV, state_BHKV = recurrence(q_BTHK, k_BTHK, v_BTHV, log_decay=log_decay_BTHK, state=before_BHKV)
        return self.o_proj(self.g_norm(out_BTHV.flatten(-2))), {"recurrent": state_BHKV}


class HGRN2Config(SwiGLUDecoderConfig):
    """Configuration of HGRN2. Fields of the MLP: see `SwiGLUDecoderConfig`.

    Fields:
        expand_ratio: size of a head, from which the number of heads follows; or
        num_heads: the other way round, with expand_ratio None.
        use_lower_bound: the model has a parameter `lower_bounds`, as the released checkpoints do, without effect.

    Accepted so that published config.json files load, without effect: conv_size (there are no short convolutions),
    elementwise_affine (norms always have weights), both for training with their defaults only; and attn_mode,
    fuse_cross_entropy, which choose among the authors' kernels.
    """

    model_type = "hgrn2-project_fox"
    neutral_values: ClassVar[Mapping[str, Sequence[Any]]] = {
        "conv_size": (4,),
        "elementwise_affine": (True,),
        "attn_mode": KERNEL_MODES,
    }
    rescale_down_proj: ClassVar[bool] = True

    attn_mode: str = "chunk"
    num_heads: int | None = None
    expand_ratio: int | None = 128
    use_short_conv: bool = False
    conv_size: int = 4
    use_lower_bound: bool = True
    elementwise_affine: bool | None = True
    fuse_cross_entropy: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.expand_ratio is None and self.num_heads is None:
            raise ValueError("expand_ratio and num_heads are both None; set one of them")
        if self.hidden_size % self.heads or self.heads * self.head_dim != self.hidden_size:
            raise ValueError(
                f"hidden_size is {self.hidden_size}, expand_ratio {self.expand_ratio}, num_heads {self.num_heads}; "
                "hidden_size must be expand_ratio · num_heads: set one of the two to a divisor and the other to None"
            )
        if self.use_short_conv:
            raise ValueError(
                "use_short_conv is True; HGRN2 without short convolutions is the one choice, set it to False"
            )
        super().__post_init__(**kwargs)

    @property
    def heads(self) -> int:
        return self.num_heads or max(1, self.hidden_size // (self.expand_ratio or self.hidden_size))

    @property
    def head_dim(self) -> int:
        return self.expand_ratio or self.hidden_size // self.heads

    def build_mixer(self, layer_idx: int) -> HGRN2Attention:
        return HGRN2Attention(self.hidden_size, self.heads, self.norm_eps)

    def mixer_flops_per_token(self, layer_idx: int, seq_len: int) -> float:
        """Linear layers: 2 · weights. The recurrence in chunks."""
        return 2 * 4 * self.hidden_size**2 + gla_flops_per_token(self.heads, self.head_dim, self.head_dim)


class BoundedDecoder(DecoderModel):
    """A decoder with the parameter `lower_bounds` of the released checkpoints, which nothing reads."""

    def __init__(self, config: HGRN2Config) -> None:
        super().__init__(config)
        if config.use_lower_bound:
            # Frozen, so that no strategy or optimizer waits for a gradient that never comes.
            shape = (config.num_hidden_layers, config.hidden_size)
            self.lower_bounds = nn.Parameter(torch.zeros(shape), requires_grad=False)
            exempt_from_decay(self.lower_bounds)

    def init_own_weights(self) -> None:
        if hasattr(self, "lower_bounds"):
            init.zeros_(self.lower_bounds)


HGRN2Model, HGRN2ForCausalLM = model_classes(HGRN2Config, BoundedDecoder)
