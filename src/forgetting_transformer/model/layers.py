"""Layers that several architectures share.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from forgetting_transformer.ops import context
from forgetting_transformer.ops.backends import OpUse
from forgetting_transformer.ops.columns import split_columns
from forgetting_transformer.ops.embedding import lookup
from forgetting_transformer.ops.layers.norm import gated_rms_norm, rms_norm
from forgetting_transformer.ops.layers.residual_norm import add_rms_norm, wide_rms_norm
from forgetting_transformer.ops.layers.shift_norm import shift_norm
from forgetting_transformer.ops.layers.swiglu import swiglu


class Embedding(nn.Embedding):
    """`nn.Embedding` whose gradient has the same bits in every run, also where few words fill many positions."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not self.weight.is_cuda:
            return super().forward(input)
        return lookup(self.weight, input, -1 if self.padding_idx is None else self.padding_idx)


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x²) + eps) · weight` over the last axis, statistics in float32."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}"


class ResidualRMSNorm(RMSNorm):
    """RMSNorm of the residual stream, to which a branch is added first."""

    def forward(  # type: ignore[override]  # the stream goes in and out too
        self, residual: Tensor, branch: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of `residual + branch`, and this sum; without a branch, of the residual."""
        return add_rms_norm(residual, branch, self.weight, self.eps)

    def op_use(self) -> OpUse:
        return OpUse("residual_norm", 1, self.width, self.width)


class FinalRMSNorm(RMSNorm):
    """RMSNorm behind the last block, where no compiled graph joins it to its neighbours."""

    def forward(self, x: Tensor) -> Tensor:
        return wide_rms_norm(x, self.weight, self.eps)


class GroupRMSNorm(nn.Module):
    """RMSNorm within each of `num_groups` equal slices of the last axis, the heads of an attention layer.

    Args:
        num_groups: H.
        width: E, of the last axis.
        eps: of the norm.
        shared: one weight `(E / H,)` for all groups instead of `(E,)`, slice after slice.
    """

    def __init__(self, num_groups: int, width: int, eps: float = 1e-6, *, shared: bool = False) -> None:
        super().__init__()
        if width % num_groups:
            raise ValueError(f"width is {width}; it must be a multiple of num_groups = {num_groups}")
        self.num_groups, self.width, self.eps = num_groups, width, eps
        self.weight = nn.Parameter(torch.ones(width // num_groups if shared else width))

    def forward(
        self,
        x_BTE: Tensor,
        shift_BTH: Tensor | None = None,
        previous_BE: Tensor | None = None,
        begins_BT: Tensor | None = None,
    ) -> Tensor:
        """Return `(B, T, E)`. With `shift_BTH`, x is first mixed with its previous token, as in `ShiftLinear`."""
        return shift_norm(
            x_BTE,
            self.num_groups,
            shift_BTH=shift_BTH,
            previous_BE=previous_BE,
            begins_BT=begins_BT,
            weight=self.weight,
            eps=self.eps,
        )

    def op_use(self) -> OpUse:
        return OpUse("shift_norm", self.num_groups, len(self.weight), self.width)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.width}, eps={self.eps}"


class GatedRMSNorm(GroupRMSNorm):
    """`RMSNorm(x) · silu(gate)` within each group or, with `gate_first`, `RMSNorm(x · silu(gate))`.

    Args:
        num_groups: equal slices of the last axis.
        width: of the last axis.
        eps: of the norm.
        gate_first: where the gate is.
        has_gate: False for calls without a gate, which are plain norms.
        activation: of the gate, "silu" or "sigmoid".
    """

    def __init__(
        self,
        num_groups: int,
        width: int,
        eps: float = 1e-6,
        *,
        gate_first: bool = False,
        has_gate: bool = True,
        activation: str = "silu",
    ) -> None:
        super().__init__(num_groups, width, eps)
        self.gate_first, self.has_gate, self.activation = gate_first, has_gate, activation

    def op_use(self) -> OpUse:
        return OpUse(
            "gated_norm",
            self.num_groups,
            int(self.gate_first),
            self.width,
            is_gated=self.has_gate,
            activation=self.activation,
        )

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:  # type: ignore[override]  # gates, not shifts
        return gated_rms_norm(
            x,
            gate,
            self.weight,
            self.eps,
            self.num_groups,
            gate_first=self.gate_first,
            activation=self.activation,
        )


#: Tokens from which a compiled model computes projections of one input together. Below, copying the weights costs more.
MIN_TOKENS_TOGETHER = 1024


#: Computes the output of a linear layer for a fixed input.
Project = Callable[[nn.Linear], Tensor]


def project_together(x_BTE: Tensor, linears: Sequence[nn.Linear]) -> Project:
    """Project one input by several linear layers: the result gives each layer's output.

    Compiled, with many tokens, the weights are stacked into one matrix product: large products are faster, and the
    gradients of x need no sum over the layers in memory. Biases are then added in float32 or wider. A layer that is
    more than an `nn.Linear` (hooks, LoRA, 8-bit weights) leaves all of them separate.
    """
    tokens = x_BTE.shape[:-1].numel()
    if not (torch.compiler.is_compiling() and tokens >= MIN_TOKENS_TOGETHER and all(map(is_plain, linears))):
        return lambda layer: layer(x_BTE)
    weight = torch.cat([linear.weight for linear in linears])
    columns = split_columns(F.linear(x_BTE, weight), [linear.out_features for linear in linears])
    wide = torch.promote_types(columns[0].dtype, torch.float32)
    outputs = {
        linear: y if linear.bias is None else (y.to(wide) + linear.bias).to(y.dtype)
        for y, linear in zip(columns, linears, strict=True)
    }
    return lambda layer: outputs[layer]


def is_plain(layer: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Whether a layer is a plain one of this kind: no adapter, no hooks."""
    return type(layer) is kind and not (layer._forward_hooks or layer._forward_pre_hooks)


class ShiftLinear(nn.Module):
    """A linear layer whose output is mixed with its output at the previous token.

        y = W x,   alpha_t = sigmoid(A x_t) per head,   out_t = alpha_t · y_{t-1} + (1 - alpha_t) · y_t

    No biases. `alpha` is computed in float32.
    """

    def __init__(self, in_features: int, out_features: int, num_heads: int) -> None:
        super().__init__()
        if out_features % num_heads:
            raise ValueError(f"out_features is {out_features}; it must be a multiple of num_heads = {num_heads}")
        self.num_heads = num_heads
        self.linear = nn.Linear(in_features, out_features, bias=False)
        self.shift_proj = nn.Linear(in_features, num_heads, bias=False)

    def forward(
        self,
        x_BTE: Tensor,
        previous_BE: Tensor | None = None,
        padding_BT: Tensor | None = None,
        begins_BT: Tensor | None = None,
        project: Project | None = None,
        norm: GroupRMSNorm | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the mixed sequence `(B, T, out_features)` and y, the same before mixing.

        Args:
            x_BTE: `(B, T, in_features)`.
            previous_BE: y of the token before x, `(B, out_features)`. Default 0, or what another process has of the
                sequence.
            padding_BT: True where y is to be taken as 0.
            begins_BT: True for the first token of each packed document, which mixes with 0.
            project: gives the outputs of the two linear layers (`project_together`). Default: they are called.
            norm: normalises the heads of the mixed sequence.
        """
        if project is None:  # a function's truth is a branch that torch.compile before 2.12 cannot follow
            project = project_together(x_BTE, (self.linear, self.shift_proj))
        y_BTE = project(self.linear)
        if padding_BT is not None:
            y_BTE = y_BTE.masked_fill(padding_BT[..., None], 0)
        if previous_BE is None and (before_B1E := context.before(y_BTE, 1)) is not None:
            previous_BE = before_B1E[:, 0]
        shift_BTH = project(self.shift_proj)
        if norm is not None:
            return norm(y_BTE, shift_BTH, previous_BE, begins_BT), y_BTE
        mixed_BTE = shift_norm(y_BTE, self.num_heads, shift_BTH=shift_BTH, previous_BE=previous_BE, begins_BT=begins_BT)
        return mixed_BTE, y_BTE

    def op_use(self) -> OpUse:
        return OpUse("shift_norm", self.num_heads, 0, self.linear.out_features)

    def __repr__(self) -> str:
        return f"ShiftLinear({self.linear.in_features}, {self.linear.out_features})"


def exempt_from_decay(*parameters: nn.Parameter) -> None:
    """Mark parameters that weight decay must leave alone (`training/optimization/building.py`)."""
    for parameter in parameters:
        parameter._no_weight_decay = True  # type: ignore[attr-defined]


def swiglu_width(hidden_size: int, hidden_ratio: float) -> int:
    """MLP width with about the weights of a plain MLP of width `hidden_ratio · hidden_size`, a multiple of 256.

    A gated MLP has three matrices instead of two, hence the factor 2/3. The result is rounded up.
    """
    return 256 * -(-int(hidden_size * hidden_ratio * 2 / 3) // 256)


class SwiGLU(nn.Module):
    """`down(silu(gate) · up)` (Shazeer 2020), no biases. `gate_proj` holds gate and up, stacked in this order.

    Args:
        hidden_size: E.
        intermediate_size: F.
        down_proj_std: standard deviation of `down_proj` at the start. Default: the architecture's initializer_range.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, down_proj_std: float | None = None) -> None:
        super().__init__()
        self.down_proj_std = down_proj_std
        self.gate_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def init_own_weights(self) -> None:
        if self.down_proj_std is not None:
            init.normal_(self.down_proj.weight, std=self.down_proj_std)

    def forward(self, x_BTE: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x_BTE)))

    def op_use(self) -> OpUse:
        return OpUse("swiglu", 1, self.down_proj.in_features, self.down_proj.in_features)

    @staticmethod
    def flops_per_token(hidden_size: int, intermediate_size: int) -> int:
        """Forward FLOPs: two per weight."""
        return 2 * 3 * hidden_size * intermediate_size
