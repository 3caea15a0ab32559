"""Mamba-2: a selective state space model whose state is a matrix per head, decayed by one number per head and token.

Source: Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
Duality", ICML 2024. Parameter names, config keys and `model_type` are those of the released checkpoints.

Axes: `forgetting_transformer/ops/__init__.py`. I is H·V; C is I + 2·G·K, of which B and C have G·K each.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init

from forgetting_transformer.model.decoder import model_classes
from forgetting_transformer.model.layers import GatedRMSNorm, exempt_from_decay, is_plain
from forgetting_transformer.model.mixers.recurrent import ShortConvolution, init_uniform, initial_dt_bias
from forgetting_transformer.model.mixers.state_space import (
    StateSpaceConfig,
    StateSpaceForCausalLM,
    StateSpaceMixer,
    StateSpaceModel,
    of_first_document,
)
from forgetting_transformer.model.padding import own_documents
from forgetting_transformer.model.span import Span
from forgetting_transformer.ops import context
from forgetting_transformer.ops.backends import OpUse
from forgetting_transformer.ops.columns import split_columns
from forgetting_transformer.ops.recurrence import last_state, recurrence, simple_gla_flops_per_token
from forgetting_transformer.ops.recurrence.grouped import LOG_ZERO, run_convolved


class Mamba2Mixer(StateSpaceMixer):
    """The state space duality layer.

        z, (x, B, C), dt = W_in hidden
        x, B, C = silu(conv(x, B, C))                 causal, every channel by itself
        dt      = softplus(dt + dt_bias)              step size, one per head and token
        S_t     = exp(-exp(A_log) dt_t) S_{t-1} + B_t (dt_t x_t)ᵀ         K × V per head
        y_t     = S_tᵀ C_t + D x_t
        out     = W_out RMSNorm(y · silu(z))          normalised per group, after the gate

    Args:
        hidden_size: E.
        num_heads: H.
        head_dim: V.
        state_size: K.
        n_groups: G, a divisor of num_heads. Heads g·H/G … (g+1)·H/G - 1 read B and C of group g.
        conv_kernel: taps of the convolution.
        norm_eps: epsilon of the RMSNorm.
        use_bias: biases of the two projections.
        use_conv_bias: bias of the convolution.
        time_step_min, time_step_max, time_step_floor: step sizes at the start (`initial_dt_bias`).
        time_step_limit: bounds that step sizes are clamped to.
        out_proj_scale: factor of `out_proj`'s initial weights.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        state_size: int,
        *,
        n_groups: int = 1,
        conv_kernel: int = 4,
        norm_eps: float = 1e-5,
        use_bias: bool = False,
        use_conv_bias: bool = True,
        time_step_min: float = 1e-3,
        time_step_max: float = 0.1,
        time_step_floor: float = 1e-4,
        time_step_limit: tuple[float, float] = (0.0, math.inf),
        out_proj_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.state_size, self.n_groups = num_heads, head_dim, state_size, n_groups
        self.initial_time_steps = (time_step_min, time_step_max, time_step_floor)
        self.time_step_limit = tuple(time_step_limit)
        self.out_proj_scale = out_proj_scale
        self.inner_size = num_heads * head_dim
        conv_channels = self.inner_size + 2 * n_groups * state_size
        self.projected_sizes = [self.inner_size, conv_channels, num_heads]
        self.conv_sizes = [self.inner_size, n_groups * state_size, n_groups * state_size]

        self.in_proj = nn.Linear(hidden_size, sum(self.projected_sizes), bias=use_bias)
        self.conv1d = ShortConvolution(conv_channels, conv_kernel, bias=use_conv_bias)
        self.dt_bias = nn.Parameter(self._initial_dt_bias())
        self.A_log = nn.Parameter(self._initial_A_log())
        self.D = nn.Parameter(torch.ones(num_heads))
        exempt_from_decay(self.dt_bias, self.A_log, self.D)
        self.norm = GatedRMSNorm(n_groups, self.inner_size, norm_eps, gate_first=True)
        self.out_proj = nn.Linear(self.inner_size, hidden_size, bias=use_bias)

    def init_own_weights(self) -> None:
        """PyTorch's uniform law for the projections, as in the paper's runs; decay rates 1, 2, …, H; D = 1."""
        init_uniform(self.in_proj)
        init_uniform(self.out_proj, self.out_proj_scale)
        init.copy_(self.dt_bias, self._initial_dt_bias())
        init.copy_(self.A_log, self._initial_A_log())
        init.ones_(self.D)

    def _initial_dt_bias(self) -> Tensor:
        return initial_dt_bias(self.num_heads, *self.initial_time_steps)

    def _initial_A_log(self) -> Tensor:
        return torch.arange(1, self.num_heads + 1, dtype=torch.float32).log()

    context_heads = 0  # processes pass states on

    def op_use(self) -> OpUse:
        return OpUse("simple_gla", self.num_heads, self.state_size, self.head_dim, key_heads=self.n_groups)

    def mix(
        self,
        hidden_BTE: Tensor,
        padding_BT: Tensor | None,
        states: dict[str, Tensor],
        span: Span | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        position_BT = None if span is None else span.position_BT
        z_BTI, xBC_BTC, dt_BTH = split_columns(self.in_proj(hidden_BTE), self.projected_sizes)
        dtype = torch.promote_types(dt_BTH.dtype, torch.float32)
        dt_BTH = F.softplus(dt_BTH.to(dtype) + self.dt_bias.to(dtype)).clamp(*self.time_step_limit)
        log_decay_BTH = -self.A_log.to(dtype).exp() * dt_BTH
        convolved = None
        if padding_BT is None and context.active() is None and is_plain(self.conv1d, ShortConvolution):
            convolved = run_convolved(
                xBC_BTC,
                self.conv1d.weight,
                self.conv1d.bias,
                states.get("conv"),
                log_decay_BTH,
                dt_BTH,
                self.D,
                states.get("ssm"),
                position_BT=position_BT,
                groups=self.n_groups,
                key_dim=self.state_size,
                scale=1.0,
            )
        if convolved is None:
            xBC_BTC, conv_BCW = self.convolve(xBC_BTC, padding_BT, states.get("conv"), position_BT)
            own = own_documents(None if span is None else span.cu_seqlens, hidden_BTE)
            y_BTHV, state_BHKV = self._read_states(xBC_BTC, dt_BTH, log_decay_BTH, states.get("ssm"), position_BT, own)
        else:
            y_BTHV, state_BHKV, conv_BCW = convolved
        out_BTE = self._project(y_BTHV.flatten(-2), z_BTI)
        return out_BTE, {"conv": conv_BCW, "ssm": state_BHKV}

    def _project(self, y_BTI: Tensor, z_BTI: Tensor) -> Tensor:
        """Norm and output projection; the norm is computed again in the backward pass, which needs its output."""
        if not torch.is_grad_enabled():
            return self._norm_and_project(y_BTI, z_BTI)
        return checkpoint(self._norm_and_project, y_BTI, z_BTI, use_reentrant=False, preserve_rng_state=False)

    def _norm_and_project(self, y_BTI: Tensor, z_BTI: Tensor) -> Tensor:
        return self.out_proj(self.norm(y_BTI, z_BTI))

    def _read_states(
        self,
        xBC_BTC: Tensor,
        dt_BTH: Tensor,
        log_decay_BTH: Tensor,
        before_BHKV: Tensor | None,
        position_BT: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """y `(B, T, H, V)` of convolved inputs, and the state after the last token."""
        x_BTI, B_BTC, C_BTC = xBC_BTC.split(self.conv_sizes, dim=-1)
        x_BTHV = x_BTI.unflatten(-1, (self.num_heads, self.head_dim))
        C_BTGK, B_BTGK = (x.unflatten(-1, (self.n_groups, self.state_size)) for x in (C_BTC, B_BTC))
        if before_BHKV is None and context.active() is not None:
            ended_BTH = log_decay_BTH
            if position_BT is not None:  # each document begins with an empty state
                ended_BTH = log_decay_BTH.masked_fill((position_BT == 0)[..., None], LOG_ZERO)
            before_BHKV = context.state_before(*last_state(B_BTGK, x_BTHV, ended_BTH, dt_BTH))
            before_BHKV = of_first_document(before_BHKV, position_BT)
        gates = {"log_decay": log_decay_BTH, "step": dt_BTH, "skip": self.D, "cu_seqlens": cu_seqlens}
        return recurrence(C_BTGK, B_BTGK, x_BTHV, **gates, state=before_BHKV, scale=1.0)


class Mamba2Config(StateSpaceConfig):
    """Configuration of Mamba-2. Further fields: see `Mamba2Mixer`.

    Fields:
        expand: inner width relative to hidden_size; num_heads · head_dim must equal expand · hidden_size.
        layer_norm_epsilon: epsilon of all RMSNorms.
        rescale_prenorm_residual: start `out_proj` smaller by sqrt(num_hidden_layers).

    Accepted so that published config.json files load, without effect: time_step_rank, residual_in_fp32 (the residual
    stream has the dtype of the embedding's weights, float32 in training), both for training with their defaults only;
    and chunk_size, fuse_cross_entropy, which choose among the authors' kernels.
    """

    model_type = "mamba2-project_fox"
    neutral_values: ClassVar[Mapping[str, Sequence[Any]]] = {"time_step_rank": ("auto",), "residual_in_fp32": (True,)}
    mixer_norm_name: ClassVar[str] = "norm"

    num_heads: int = 64
    head_dim: int = 64
    state_size: int = 64
    num_hidden_layers: int = 48
    layer_norm_epsilon: float = 1e-5
    n_groups: int = 1
    initializer_range: float = 0.1
    residual_in_fp32: bool = True
    time_step_limit: list[float] | tuple[float, ...] = (0.0, math.inf)
    rescale_prenorm_residual: bool = True
    rms_norm: bool = True
    chunk_size: int = 256

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_heads * self.head_dim != self.expand * self.hidden_size:
            raise ValueError(
                f"num_heads · head_dim is {self.num_heads} · {self.head_dim} = {self.num_heads * self.head_dim}; it "
                f"must equal expand · hidden_size = {self.expand} · {self.hidden_size} = "
                f"{self.expand * self.hidden_size}"
            )
        if self.num_heads % self.n_groups:
            raise ValueError(f"num_heads is {self.num_heads}; it must be a multiple of n_groups = {self.n_groups}")
        if not self.rms_norm:
            raise ValueError("rms_norm is False; Mamba-2 always normalises before out_proj, leave it True")
        limit = self.time_step_limit
        numbers = isinstance(limit, list | tuple) and all(isinstance(bound, int | float) for bound in limit)
        if not numbers or len(limit) != 2 or not 0 <= limit[0] <= limit[1]:
            raise ValueError(f"time_step_limit is {limit}; it must be two bounds, 0 <= lower <= upper")
        super().__post_init__(**kwargs)

    @property
    def norm_eps(self) -> float:
        return self.layer_norm_epsilon

    def build_mixer(self, layer_idx: int) -> Mamba2Mixer:
        scale = 1 / math.sqrt(self.num_hidden_layers) if self.rescale_prenorm_residual else 1.0
        return self.build_from_fields(Mamba2Mixer, out_proj_scale=scale)

    def mixer_flops_per_token(self, layer_idx: int, seq_len: int) -> float:
        """Linear layers: 2 · weights. Convolution: 2 · taps of all channels. The recurrence in chunks."""
        inner_size = self.num_heads * self.head_dim
        conv_channels = inner_size + 2 * self.n_groups * self.state_size
        weights = (
            self.hidden_size * (2 * inner_size + conv_channels + self.num_heads) + conv_channels * self.conv_kernel
        )
        return 2 * weights + simple_gla_flops_per_token(self.num_heads, self.state_size, self.head_dim)

    def build_mlp(self, layer_idx: int) -> None:
        return None

    def mlp_flops_per_token(self, layer_idx: int) -> float:
        return 0


Mamba2Model, Mamba2ForCausalLM = model_classes(Mamba2Config, StateSpaceModel, StateSpaceForCausalLM)
