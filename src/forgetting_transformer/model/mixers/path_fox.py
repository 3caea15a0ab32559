"""PaTH-FoX: attention whose positions are products of Householder-like matrices, with FoX's forget gates.

Source: Yang et al., "PaTH Attention: Position Encoding via Accumulating Householder Transformations", 2025 (arXiv
2505.16381), which combines it with the forget gates of Lin et al. 2025.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgetting_transformer.model.config import SwiGLUDecoderConfig
from forgetting_transformer.model.decoder import model_classes
from forgetting_transformer.model.mixers.recurrent import RecurrentCache, RecurrentMixer, ShortConvolution, zero_padding
from forgetting_transformer.model.span import Span
from forgetting_transformer.ops import context
from forgetting_transformer.ops.backends import OpUse
from forgetting_transformer.ops.path_attention import Past, path_attention, path_attention_flops_per_token


class PathForgettingAttention(RecurrentMixer):
    """Attention between projections.

        w        = u / |u| per head, u = silu(conv(W_b W_a x))       low rank; convolution of every channel by itself
        β        = 2 sigmoid(W_β x + b)                              per head and token
        f        = sigmoid(W_f x + b)                                per head and token: the forget gate
        score_ij = q_iᵀ H_i … H_{j+1} k_j / √D + Σ_{s=j+1..i} log f_s,    H_t = I - β_t w_t w_tᵀ
        out      = W_o softmax(score) v

    Keys in the cache are carried past H at every new token, so they are kept as a recurrent state, which grows.

    Args:
        hidden_size: E.
        num_heads: H.
        w_rank: rank of the projection of w.
        conv_size: taps of the convolution.
    """

    def __init__(self, hidden_size: int, num_heads: int, *, w_rank: int = 32, conv_size: int = 3) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.w_a_proj = nn.Linear(hidden_size, w_rank, bias=False)
        self.w_b_proj = nn.Linear(w_rank, hidden_size, bias=False)
        self.w_conv1d = ShortConvolution(hidden_size, conv_size, bias=False, unit_heads=num_heads)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=True)
        self.fgate_proj = nn.Linear(hidden_size, num_heads, bias=True)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    @property
    def context_heads(self) -> int:
        return self.num_heads

    def op_use(self) -> OpUse:
        return OpUse("path_attention", self.num_heads, self.head_dim, self.head_dim)

    def forward(
        self, hidden_BTE: Tensor, span: Span | None = None, **options: Any
    ) -> tuple[Tensor, RecurrentCache | None]:
        # States are made only where a cache keeps them.
        returns_states = span is not None and span.cache is not None
        return super().forward(hidden_BTE, span, returns_states=returns_states)

    def mix(
        self, hidden_BTE: Tensor, padding_BT: Tensor | None, states: dict[str, Tensor], returns_states: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        hidden_BTE = zero_padding(hidden_BTE, padding_BT)
        q_BTHD, k_BTHD, v_BTHD = (self.split_heads(f(hidden_BTE)) for f in (self.q_proj, self.k_proj, self.v_proj))
        w_BTE, w_conv_BCW = self.w_conv1d(self.w_b_proj(self.w_a_proj(hidden_BTE)), states.get("w_conv"))
        beta_BTH = 2 * self.b_proj(hidden_BTE).float().sigmoid()
        log_fgate_BTH = F.logsigmoid(self.fgate_proj(hidden_BTE).float())
        was_padding_B1 = states.get("was_padding")
        if was_padding_B1 is None:
            was_padding_B1 = torch.zeros(len(hidden_BTE), 1, dtype=torch.bool, device=hidden_BTE.device)
        if padding_BT is not None:
            # The first real token sees nothing before itself, and neither does padding.
            begins_BT = padding_BT | torch.cat((was_padding_B1, padding_BT[:, :-1]), dim=1)
            was_padding_B1 = padding_BT[:, -1:]
            log_fgate_BTH = log_fgate_BTH.masked_fill(begins_BT[..., None], -torch.inf)

        heads = (q_BTHD, k_BTHD, v_BTHD, self.split_heads(w_BTE), beta_BTH, log_fgate_BTH)
        past = Past(*(states[name] for name in Past._fields)) if "keys" in states else None
        options: dict[str, Any] = {"returns_past": returns_states, "has_resets": padding_BT is not None}
        out_BTHD, past = path_attention(*map(context.to_heads, heads), past=past, **options)
        new_states = {} if past is None else {**past._asdict(), "w_conv": w_conv_BCW, "was_padding": was_padding_B1}
        return self.o_proj(context.to_sequence(out_BTHD, len(hidden_BTE)).flatten(-2)), new_states


class PathFoxConfig(SwiGLUDecoderConfig):
    """Configuration of PaTH-FoX. Fields: see `PathForgettingAttention` and, of the MLP, `SwiGLUDecoderConfig`."""

    model_type = "path_fox-project_fox"

    num_heads: int = 32
    w_rank: int = 32
    conv_size: int = 3

    def __post_init__(self, **kwargs: Any) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size}; it must be a multiple of num_heads = {self.num_heads}"
            )
        super().__post_init__(**kwargs)

    def build_mixer(self, layer_idx: int) -> PathForgettingAttention:
        return self.build_from_fields(PathForgettingAttention)

    def mixer_flops_per_token(self, layer_idx: int, seq_len: int) -> float:
        """Linear layers: 2 · weights. Convolution: 2 · taps of all channels. Attention in chunks."""
        weights = self.hidden_size * (4 * self.hidden_size + 2 * self.w_rank + 2 * self.num_heads + self.conv_size)
        head_dim = self.hidden_size // self.num_heads
        return 2 * weights + path_attention_flops_per_token(self.num_heads, head_dim, seq_len)


PathFoxModel, PathFoxForCausalLM = model_classes(PathFoxConfig)
