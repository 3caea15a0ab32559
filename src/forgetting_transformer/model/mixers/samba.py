"""Samba: Mamba and sliding-window attention in turns, an MLP after each.

Sources: Ren et al., "Samba: Simple Hybrid State Space Models for Efficient Unlimited Context Language Modeling", ICLR
2025; Mamba: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023. Parameter names,
config keys and `model_type` are those of the FoX paper's code.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from forgetting_transformer.model.arguments import check_attention_options, check_field
from forgetting_transformer.model.decoder import model_classes
from forgetting_transformer.model.layers import SwiGLU, exempt_from_decay, swiglu_width
from forgetting_transformer.model.mixers.forgetting_attention import ForgettingAttentionLayer
from forgetting_transformer.model.mixers.recurrent import ShortConvolution, init_uniform, initial_dt_bias
from forgetting_transformer.model.mixers.state_space import (
    StateSpaceConfig,
    StateSpaceForCausalLM,
    StateSpaceMixer,
    StateSpaceModel,
    of_first_document,
)
from forgetting_transformer.model.mixers.transformer import attention_flops_per_token
from forgetting_transformer.model.padding import own_documents
from forgetting_transformer.model.span import Span
from forgetting_transformer.ops import context
from forgetting_transformer.ops.backends import OpUse
from forgetting_transformer.ops.recurrence import selective_scan
from forgetting_transformer.ops.recurrence.grouped import LOG_ZERO

ATTN_KEYS = ("num_heads", "num_kv_heads", "window_size", "layers")


class StepProjection(nn.Linear):
    """A linear layer whose bias the scan adds, in float32: it holds step sizes as small as 1e-3."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class MambaMixer(StateSpaceMixer):
    """The selective state space layer of Mamba.

        x, z    = W_in hidden
        x       = silu(conv(x))                       causal, every channel by itself
        dt,B,C  = W_x x                               dt of rank R
        dt      = softplus(W_dt dt + b_dt)            step size, one per channel and token
        s_t     = exp(-exp(A_log) dt_t) ⊙ s_{t-1} + (dt_t x_t) B_tᵀ       K states per channel
        y_t     = s_t C_t + D x_t
        out     = W_out (y · silu(z))

    Args:
        hidden_size: E.
        inner_size: I.
        state_size: K.
        time_step_rank: R.
        conv_kernel: W.
        use_bias: biases of `in_proj` and `out_proj`.
        use_conv_bias: bias of the convolution.
        time_step_min, time_step_max, time_step_floor: step sizes at the start (`initial_dt_bias`).
        out_proj_scale: factor on the initial weights of `out_proj`.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        state_size: int,
        time_step_rank: int,
        *,
        conv_kernel: int = 4,
        use_bias: bool = False,
        use_conv_bias: bool = True,
        time_step_min: float = 1e-3,
        time_step_max: float = 0.1,
        time_step_floor: float = 1e-4,
        out_proj_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.inner_size, self.state_size, self.time_step_rank = inner_size, state_size, time_step_rank
        self.initial_time_steps = (time_step_min, time_step_max, time_step_floor)
        self.out_proj_scale = out_proj_scale

        self.in_proj = nn.Linear(hidden_size, 2 * inner_size, bias=use_bias)
        self.conv1d = ShortConvolution(inner_size, conv_kernel, bias=use_conv_bias)
        self.x_proj = nn.Linear(inner_size, time_step_rank + 2 * state_size, bias=False)
        self.dt_proj = StepProjection(time_step_rank, inner_size)
        self.A_log = nn.Parameter(self._initial_A_log())
        self.D = nn.Parameter(torch.ones(inner_size))
        exempt_from_decay(self.A_log, self.D)
        self.out_proj = nn.Linear(inner_size, hidden_size, bias=use_bias)

    def init_own_weights(self) -> None:
        """PyTorch's uniform law for the projections, decay rates 1, 2, …, K in every channel, D = 1."""
        init_uniform(self.in_proj)
        init_uniform(self.x_proj)
        init_uniform(self.out_proj, self.out_proj_scale)
        init_uniform(self.dt_proj)
        init.copy_(self.dt_proj.bias, initial_dt_bias(self.inner_size, *self.initial_time_steps))
        init.copy_(self.A_log, self._initial_A_log())
        init.ones_(self.D)

    def _initial_A_log(self) -> Tensor:
        return torch.arange(1, self.state_size + 1, dtype=torch.float32).log().repeat(self.inner_size, 1)

    context_heads = 0  # processes pass states on

    def op_use(self) -> OpUse:
        return OpUse("selective_scan", 1, self.state_size, self.inner_size)

    def mix(
        self,
        hidden_BTE: Tensor,
        padding_BT: Tensor | None,
        states: dict[str, Tensor],
        span: Span | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        position_BT = None if span is None else span.position_BT
        x_BTI, z_BTI = self.in_proj(hidden_BTE).chunk(2, dim=-1)
        x_BTI, conv_BIW = self.convolve(x_BTI, padding_BT, states.get("conv"), position_BT)
        dt_BTR, B_BTK, C_BTK = self.x_proj(x_BTI).split([self.time_step_rank, self.state_size, self.state_size], dim=-1)
        dt_BTI = self.dt_proj(dt_BTR)

        A_IK, before_BIK = -self.A_log.float().exp(), states.get("ssm")
        inputs = (x_BTI, dt_BTI, A_IK, B_BTK, C_BTK)
        own = own_documents(None if span is None else span.cu_seqlens, hidden_BTE)
        options: dict[str, Any] = {"dt_bias_I": self.dt_proj.bias, "cu_seqlens": own}
        if before_BIK is None and context.active() is not None:
            step_BTI = F.softplus(dt_BTI.float() + self.dt_proj.bias.float())
            log_decay_BIK = step_BTI.sum(1)[..., None] * A_IK
            if position_BT is not None:  # of a state before these tokens nothing is left behind a new document
                log_decay_BIK = log_decay_BIK.masked_fill((position_BT == 0).any(1)[:, None, None], LOG_ZERO)
            # The state that these tokens alone make: they are walked once more than the output needs.
            _, own_BIK = selective_scan(*inputs, **options)
            before_BIK = of_first_document(context.state_before(own_BIK, log_decay_BIK), position_BT)
        y_BTI, state_BIK = selective_scan(*inputs, D_I=self.D, initial_state_BIK=before_BIK, **options)
        return self.out_proj(y_BTI * F.silu(z_BTI)), {"conv": conv_BIW, "ssm": state_BIK}


class SambaAttention(ForgettingAttentionLayer):
    """Sliding-window attention that starts from PyTorch's uniform law, `o_proj` scaled by `o_proj_scale`."""

    def __init__(self, *args: Any, o_proj_scale: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, use_rope=True, fgate_type="none", initializer_range=None)
        self.o_proj_scale = o_proj_scale

    def init_own_weights(self) -> None:
        for projection in self._projections():
            init_uniform(projection)
        init_uniform(self.o_proj, self.o_proj_scale)


class SambaMLP(SwiGLU):
    """A SwiGLU that starts from PyTorch's uniform law, `down_proj` scaled by `down_proj_scale`."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, down_proj_scale: float) -> None:
        super().__init__(hidden_size, intermediate_size)
        self.down_proj_scale = down_proj_scale

    def init_own_weights(self) -> None:
        init_uniform(self.gate_proj)
        init_uniform(self.down_proj, self.down_proj_scale)


class SambaConfig(StateSpaceConfig):
    """Configuration of Samba. Further fields: see `MambaMixer`.

    Fields:
        expand: inner width of Mamba relative to hidden_size.
        time_step_rank: rank of the step sizes, "auto" for hidden_size / 16, rounded up.
        attn: attention blocks, None for none (all blocks Mamba). A dictionary with
            num_heads: heads of queries;
            num_kv_heads: heads of keys and values, a divisor of num_heads. Default num_heads;
            window_size: number of keys a query sees, itself included. Default None, all;
            layers: indices of the attention blocks. Default None, every second block (1, 3, 5, …).
        attn_hidden_ratio, mamba_hidden_ratio: MLP width in attention blocks and Mamba blocks relative to hidden_size,
            as if the MLP had two matrices (`swiglu_width`).
        rope_base: base of attention's rotary position embedding.
        rescale_prenorm_residual: start the layers that write to the residual stream (`out_proj`, `o_proj`, `down_proj`)
            smaller by sqrt(2 · num_hidden_layers), as the paper's runs do.
        max_position_embeddings: no effect on the model; other tools read it as the training context length.

    Accepted so that published config.json files load, without effect: residual_in_fp32 (the residual stream has the
    dtype of the embedding's weights, float32 in training, as in the authors' code, which reads neither value);
    time_step_scale and time_step_init_scheme (`dt_proj` starts from PyTorch's uniform law), for training with their
    defaults only; fuse_norm and fuse_cross_entropy, which choose among the authors' kernels.
    """

    model_type = "samba-project_fox"
    mixer_norm_name: ClassVar[str] = "mixer_norm"
    neutral_values: ClassVar[Mapping[str, Sequence[Any]]] = {
        "time_step_scale": (1.0,),
        "time_step_init_scheme": ("random",),
    }

    hidden_size: int = 2304
    state_size: int = 16
    num_hidden_layers: int = 18
    norm_eps: float = 1e-5
    residual_in_fp32: bool = False
    time_step_scale: float = 1.0
    time_step_init_scheme: str = "random"
    max_position_embeddings: int | None = 2048
    attn: dict | None = None
    attn_hidden_ratio: float = 4
    mamba_hidden_ratio: float = 3
    rescale_prenorm_residual: bool = False
    fuse_norm: bool = True
    rope_base: float = 500_000.0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.time_step_rank == "auto":
            self.time_step_rank = math.ceil(self.hidden_size / 16)
        if not isinstance(self.time_step_rank, int) or self.time_step_rank < 1:
            raise ValueError(f"time_step_rank is {self.time_step_rank!r}; it must be a positive integer or 'auto'")
        if self.attn is not None:
            if not isinstance(self.attn, dict):
                raise ValueError(f"attn is {self.attn!r}; it must have the keys {', '.join(ATTN_KEYS)}, or be null")
            self._check_attn(self.attn)
        super().__post_init__(**kwargs)

    def _check_attn(self, attn: dict) -> None:
        for key in attn:
            if key not in ATTN_KEYS:
                raise ValueError(f"attn has the key {key!r}; it may have {', '.join(ATTN_KEYS)}")
        if attn.get("num_heads") is None:
            raise ValueError("attn has no num_heads; set it, or attn: null for Mamba blocks only")
        for key in ("num_heads", "num_kv_heads", "window_size"):
            check_field(f"attn.{key}", attn.get(key), int | None)
        check_attention_options(*self._attention_sizes(), use_rope=True)
        blocks, layers = range(self.num_hidden_layers), attn.get("layers")
        if layers is not None and not (isinstance(layers, list | tuple) and all(layer in blocks for layer in layers)):
            raise ValueError(
                f"attn.layers is {layers!r}; it must list blocks from 0 to {self.num_hidden_layers - 1}, or be null "
                "for every other block"
            )

    def _attention_sizes(self) -> tuple[int, int, int | None, int | None]:
        """hidden_size, num_heads, num_kv_heads and window_size of the attention blocks."""
        assert self.attn is not None  # for blocks with attention
        return self.hidden_size, self.attn["num_heads"], self.attn.get("num_kv_heads"), self.attn.get("window_size")

    @property
    def inner_size(self) -> int:
        return int(self.expand * self.hidden_size)

    @property
    def residual_scale(self) -> float:
        """Factor on the initial weights of layers that write to the residual stream, two per block."""
        return 1 / math.sqrt(2 * self.num_hidden_layers) if self.rescale_prenorm_residual else 1.0

    def has_attention(self, layer_idx: int) -> bool:
        """Whether block `layer_idx` has attention; otherwise it has Mamba."""
        if self.attn is None:
            return False
        layers = self.attn.get("layers")
        return layer_idx % 2 == 1 if layers is None else layer_idx in layers

    def mlp_width(self, layer_idx: int) -> int:
        ratio = self.attn_hidden_ratio if self.has_attention(layer_idx) else self.mamba_hidden_ratio
        return swiglu_width(self.hidden_size, ratio)

    def build_mixer(self, layer_idx: int) -> SambaAttention | MambaMixer:
        if self.has_attention(layer_idx):
            _, num_heads, num_kv_heads, window_size = self._attention_sizes()
            return SambaAttention(
                self.hidden_size,
                num_heads,
                num_kv_heads=num_kv_heads,
                window_size=window_size,
                rope_base=self.rope_base,
                o_proj_scale=self.residual_scale,
            )
        return self.build_from_fields(MambaMixer, out_proj_scale=self.residual_scale)

    def build_mlp(self, layer_idx: int) -> SambaMLP:
        return SambaMLP(self.hidden_size, self.mlp_width(layer_idx), down_proj_scale=self.residual_scale)

    def mixer_flops_per_token(self, layer_idx: int, seq_len: int) -> float:
        """Mamba: two per weight and tap, six per state: dt·A, (dt x)·B, decay and sum, a multiply-add with C."""
        if self.has_attention(layer_idx):
            return attention_flops_per_token(*self._attention_sizes(), seq_len)
        weights = 3 * self.hidden_size  # in_proj, out_proj
        weights += 2 * int(self.time_step_rank) + 2 * self.state_size + self.conv_kernel  # x_proj, dt_proj, conv1d
        return self.inner_size * (2 * weights + 6 * self.state_size)

    def mlp_flops_per_token(self, layer_idx: int) -> float:
        return SwiGLU.flops_per_token(self.hidden_size, self.mlp_width(layer_idx))


SambaModel, SambaForCausalLM = model_classes(SambaConfig, StateSpaceModel, StateSpaceForCausalLM)
