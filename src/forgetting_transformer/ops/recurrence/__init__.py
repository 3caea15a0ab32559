"""Linear recurrences: the sequence mixing of Mamba-2, HGRN2, DeltaNet, Gated DeltaNet, Kimi Delta Attention and Mamba.

Each head keeps a K×V matrix S that maps keys to values. Every token decays it, adds to it, and reads it with its query:

    op                  S_t =                                                        out_t =
    simple_gla          a_t S_{t-1} + k_t v_tᵀ                  a_t: scalar          scale · S_tᵀ q_t
    gla                 diag(a_t) S_{t-1} + k_t v_tᵀ            a_t: (K,)            scale · S_tᵀ q_t
    delta_rule          S_{t-1} + β_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ                      scale · S_tᵀ q_t
    gated_delta_rule    a_t S_{t-1} + β_t k_t (v_t - a_t S_{t-1}ᵀ k_t)ᵀ              scale · S_tᵀ q_t
    kda                 the same with diag(a_t) for a_t             a_t: (K,)            scale · S_tᵀ q_t
    selective_scan      exp(dt_t A) ⊙ S_{t-1} + (dt_t x_t) B_tᵀ                      S_t C_t

Decays are passed as natural logarithms, finite and ≤ 0, however strong. A token with k = 0 (or β = 0, or dt = 0) and
log decay 0 leaves the state as it was. All ops are differentiable once in every tensor argument, the initial state
included, and need O(T) memory.

Axes: `forgetting_transformer/ops/__init__.py`.

Files: `reference.py` is the definition; `chunked.py` and, for selective_scan, `scan.py` run on any device; `fla.py`
calls the Triton kernels of flash-linear-attention; `ssd.py` has Triton kernels for simple_gla where heads share queries
and keys, `grouped.py` says which calls they serve; `scan_triton.py` launches those of selective_scan. FLOPs of each op
stand beside its chunked form.
"""

import itertools
import math
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.ops import backends
from forgetting_transformer.ops.arguments import check_documents, check_tensors
from forgetting_transformer.ops.compiling import operator
from forgetting_transformer.ops.recurrence import chunked, fla, grouped, reference, scan
from forgetting_transformer.ops.recurrence.chunked import (
    delta_rule_flops_per_token,
    gla_flops_per_token,
    kda_flops_per_token,
    simple_gla_flops_per_token,
)
from forgetting_transformer.ops.recurrence.reference import Gates
from forgetting_transformer.ops.recurrence.scan import selective_scan_flops_per_token

__all__ = [
    "delta_rule_flops_per_token",
    "gla_flops_per_token",
    "kda_flops_per_token",
    "last_state",
    "recurrence",
    "scan_takes_kernel",
    "selective_scan",
    "selective_scan_flops_per_token",
    "simple_gla_flops_per_token",
]


#: The most states per channel that the Triton kernels of selective_scan hold in registers.
MAX_SCAN_STATES = 16
_SCAN_KERNELS = "forgetting_transformer.ops.recurrence.scan_triton"

# op: the gates that it takes, and their axes.
_GATE_AXES = {
    "simple_gla": {"log_decay": "BTH"},
    "gla": {"log_decay": "BTHK"},
    "delta_rule": {"beta": "BTH"},
    "gated_delta_rule": {"beta": "BTH", "log_decay": "BTH"},
    "kda": {"beta": "BTH", "log_decay": "BTHK"},
}


def recurrence(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    state: Tensor | None = None,
    scale: float | None = None,
    step: Tensor | None = None,
    skip: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Walk a sequence with the op that these gates make, of the module's table, on the fastest backend.

    The delta rules replace, by a fraction β, what the state holds for k_t by v_t. Their state stays bounded for
    `β |k|² ≤ 2`: pass keys of length 1 and β in [0, 2]. Mamba-2's state space is simple_gla with q = C, k = B, v = x,
    log_decay = A·dt, step = dt, skip = D, scale = 1.

    Args:
        q_BTGK: queries; float16, bfloat16, float32 or float64. As many heads as values or, for simple_gla, a divisor:
            heads g·H/G … (g + 1)·H/G - 1 share those of group g.
        k_BTGK: keys, in q's dtype.
        v_BTHV: values, in q's dtype.
        log_decay: natural logarithms of the decays, finite, ≤ 0: `(B, T, H)`, or `(B, T, H, K)` for gla and kda. Any
            floating dtype; float32 is recommended. None for no decay.
        beta: strength of the delta rules `(B, T, H)`, any floating dtype. None for linear attention, which only adds.
        state: the state before the first token `(B, H, K, V)`. Default 0.
        scale: factor on the output. Default 1/√K.
        step: simple_gla: factors `(B, T, H)` of the values on their way into the state. Default 1.
        skip: simple_gla: what is added to the output of a head is this `(H,)` times its values. Default 0.
        cu_seqlens: simple_gla: packed documents, int32 or int64: where each begins among the B·T tokens of all rows,
            one row after another, and B·T. It may not fall, and runs from 0 to B·T, which is checked for tensors on the
            CPU. No state passes from one document into the next; `state` belongs to the first of each row.

    Returns:
        Outputs `(B, T, H, V)` in v's dtype, and the state after the last token `(B, H, K, V)`. States and sums are
        float32 (float64 for float64 inputs), under autocast too.

    Raises:
        TypeError: an argument is not a tensor, or of an unsupported dtype.
        ValueError: shapes, dtypes or devices do not fit together, arguments are not of this op, or scale is not
            positive. The message names the argument.
    """
    if log_decay is None and beta is None:
        raise ValueError("log_decay and beta are both None; give one of them, zeros for log_decay if nothing decays")
    gates = Gates(beta, log_decay)
    # Other arguments, and tensors with other axes, are refused below, by name.
    if log_decay is None or isinstance(log_decay, Tensor):
        op = gates.op
    else:
        op = "simple_gla" if beta is None else "gated_delta_rule"
    if scale is None:
        channels = q_BTGK.shape[-1] if isinstance(q_BTGK, Tensor) and q_BTGK.ndim else 1
        scale = max(1, channels) ** -0.5
    if op == "simple_gla":
        return _simple_gla(q_BTGK, k_BTGK, v_BTHV, gates, step, skip, cu_seqlens, float(scale), state)
    for name, x in (("step", step), ("skip", skip), ("cu_seqlens", cu_seqlens)):
        if x is not None:
            raise ValueError(f"{name} is given; only linear attention with one decay per head takes it, not {op}")
    return _linear_recurrence(op, q_BTGK, k_BTGK, v_BTHV, gates, float(scale), state)


def _simple_gla(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    gates: Gates,
    step_BTH: Tensor | None,
    skip_H: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    state_BHKV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Linear attention with one decay per head and token, `S_t = a_t S_{t-1} + step_t k_t v_tᵀ`."""
    log_decay_BTH = gates.filled_log_decay()
    gated = {"log_decay": (log_decay_BTH, "BTH"), "step": (step_BTH, "BTH"), "skip": (skip_H, "H")}
    sequences = {"q": (q_BTGK, "BTGK"), "k": (k_BTGK, "BTGK"), "v": (v_BTHV, "BTHV")}
    _check_recurrence(sequences, gated | {"cu_seqlens": (cu_seqlens, "P")}, state_BHKV, scale)
    (groups, key_dim), (heads, value_dim) = q_BTGK.shape[2:], v_BTHV.shape[2:]
    if heads % groups:
        raise ValueError(f"q has {groups} heads and v {heads}; the heads of v must be a multiple of those of q")
    check_documents(cu_seqlens, q_BTGK.shape[0] * q_BTGK.shape[1])
    document_BT = None if cu_seqlens is None else grouped.documents(cu_seqlens, q_BTGK)
    if (
        q_BTGK.is_cuda
        and q_BTGK.shape[1] > 1
        and grouped.serves(heads, groups, key_dim, value_dim, q_BTGK.dtype, q_BTGK.device.index)
    ):
        with torch.autocast(q_BTGK.device.type, enabled=False):
            pair = grouped.run(q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, step_BTH, skip_H, state_BHKV, document_BT, scale)
        if pair is not None:
            return pair
    if document_BT is not None:
        log_decay_BTH = grouped.end_with_documents(log_decay_BTH, document_BT)
    added_BTHV = v_BTHV if step_BTH is None else (v_BTHV * step_BTH[..., None]).to(v_BTHV.dtype)
    if groups < heads:
        q_BTGK, k_BTGK = (grouped.for_every_head(x, heads) for x in (q_BTGK, k_BTGK))
    gates = Gates(log_decay=log_decay_BTH)
    out_BTHV, state_BHKV = _linear_recurrence("simple_gla", q_BTGK, k_BTGK, added_BTHV, gates, scale, state_BHKV)
    if skip_H is not None:
        out_BTHV = (out_BTHV + skip_H[:, None] * v_BTHV).to(v_BTHV.dtype)
    return out_BTHV, state_BHKV


def _linear_recurrence(
    op: str,
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    gates: Gates,
    scale: float,
    state_BHKV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Check the arguments of an op with queries, keys and values, and run it on the fastest backend."""
    wanted = {name: (getattr(gates, name), axes) for name, axes in _GATE_AXES[op].items()}
    sequences = {"q": (q_BTHK, "BTHK"), "k": (k_BTHK, "BTHK"), "v": (v_BTHV, "BTHV")}
    _check_recurrence(sequences, wanted, state_BHKV, scale)
    backend = _select_backend(op, q_BTHK, v_BTHV)
    with torch.autocast(q_BTHK.device.type, enabled=False):
        return backend.linear_recurrence(q_BTHK, k_BTHK, v_BTHV, gates, scale, state_BHKV)


def last_state(
    k_BTGK: Tensor, v_BTHV: Tensor, log_decay: Tensor, step_BTH: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return what tokens add to the state of simple_gla or gla, and what they leave of the state before them.

    One matrix product, with no walk: the state after the last token is a sum over tokens, each decayed by those after.

    Args:
        k_BTGK, v_BTHV, log_decay, step_BTH: as those of `recurrence`.

    Returns:
        The state after the last token, had the one before the first been 0, `(B, H, K, V)`, and the logarithm of what
        is left of an earlier one, `(B, H, 1 or K, 1)`; both in log_decay's dtype.
    """
    groups = k_BTGK.shape[2]
    from_here = _sum_from_here(log_decay)
    weight = _without_first(from_here).exp()
    if log_decay.ndim == 4:
        k_BTGK = (k_BTGK * weight).to(v_BTHV.dtype)
    else:
        weight = weight if step_BTH is None else weight * step_BTH
        v_BTHV = (v_BTHV * weight[..., None]).to(v_BTHV.dtype)
    v_BTGX = v_BTHV.unflatten(2, (groups, -1)).flatten(3)
    state_BGKX = _sum_of_products(k_BTGK, v_BTGX)
    state_BHKV = state_BGKX.unflatten(3, (-1, v_BTHV.shape[3])).movedim(3, 2).flatten(1, 2)
    left = from_here[:, 0, :, :, None] if log_decay.ndim == 4 else from_here[:, 0, :, None, None]
    return state_BHKV.to(log_decay.dtype), left


@operator("sum_of_products")
def _sum_of_products(k_BTGK: Tensor, v_BTGX: Tensor) -> Tensor:
    """Σ_t k_t v_tᵀ, `(B, G, K, X)`, in float32 also where k and v have half of it, as states are."""
    k_ZKT, v_ZTX = k_BTGK.permute(0, 2, 3, 1).flatten(0, 1), v_BTGX.transpose(1, 2).flatten(0, 1)
    with torch.autocast(k_BTGK.device.type, enabled=False):
        if k_BTGK.element_size() > 2:
            sum_ZKX = k_ZKT @ v_ZTX
        elif k_BTGK.is_cuda:
            sum_ZKX = torch.bmm(k_ZKT, v_ZTX, out_dtype=torch.float32)
        else:
            sum_ZKX = k_ZKT.float() @ v_ZTX.float()
    return sum_ZKX.unflatten(0, (len(k_BTGK), k_BTGK.shape[2])).contiguous()


@_sum_of_products.register_fake
def _(k_BTGK, v_BTGX):
    (batch, _, groups, keys), dtype = k_BTGK.shape, torch.promote_types(k_BTGK.dtype, torch.float32)
    return torch.empty(batch, groups, keys, v_BTGX.shape[3], dtype=dtype, device=k_BTGK.device)


def _save_products(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _products_back(ctx: Any, gradient_BGKX: Tensor) -> tuple[Tensor, Tensor]:
    k_BTGK, v_BTGX = ctx.saved_tensors
    gradient_BGKX = gradient_BGKX.to(k_BTGK.dtype)
    with torch.autocast(k_BTGK.device.type, enabled=False):
        dk_BGTK = v_BTGX.transpose(1, 2) @ gradient_BGKX.transpose(2, 3)
        dv_BGTX = k_BTGK.transpose(1, 2) @ gradient_BGKX
    return dk_BGTK.transpose(1, 2), dv_BGTX.transpose(1, 2)


_sum_of_products.register_autograd(_products_back, setup_context=_save_products)


@operator("sum_from_here")
def _sum_from_here(x_BT: Tensor) -> Tensor:
    """Σ of x from each position to the last, `(B, T, …)`.

    Opaque to torch.compile: TorchInductor fails on some shapes of sums along a middle axis.
    """
    return _running_sums(x_BT.flip(1)).flip(1)


@_sum_from_here.register_fake
def _(x_BT):
    return torch.empty_like(x_BT, memory_format=torch.contiguous_format)


@operator("sum_to_here")
def _sum_to_here(x_BT: Tensor) -> Tensor:
    """Σ of x from the first position to each, `(B, T, …)`: the gradient of `_sum_from_here`."""
    return _running_sums(x_BT)


@_sum_to_here.register_fake
def _(x_BT):
    return torch.empty_like(x_BT, memory_format=torch.contiguous_format)


_sum_from_here.register_autograd(lambda _, gradient_BT: _sum_to_here(gradient_BT))
_sum_to_here.register_autograd(lambda _, gradient_BT: _sum_from_here(gradient_BT))


def _running_sums(x_BT: Tensor, chunk: int = 256) -> Tensor:
    """Chunk by chunk: on a GPU a thread walks the whole of a row."""
    length = x_BT.shape[1]
    x_BNC = F.pad(x_BT, (0, 0) * (x_BT.ndim - 2) + (0, -length % chunk)).unflatten(1, (-1, chunk))
    in_chunk_BNC = x_BNC.cumsum(2)
    sums_BN = in_chunk_BNC[:, :, -1].cumsum(1)
    before_BN = torch.cat((torch.zeros_like(sums_BN[:, :1]), sums_BN[:, :-1]), dim=1)
    return (in_chunk_BNC + before_BN[:, :, None]).flatten(1, 2)[:, :length].contiguous()


def _without_first(x_BT: Tensor) -> Tensor:
    """Shift one position to the left, with 0 at the last."""
    return torch.cat((x_BT[:, 1:], torch.zeros_like(x_BT[:, :1])), dim=1)


def selective_scan(
    x_BTI: Tensor,
    dt_BTI: Tensor,
    A_IK: Tensor,
    B_BTK: Tensor,
    C_BTK: Tensor,
    *,
    D_I: Tensor | None = None,
    dt_bias_I: Tensor | None = None,
    initial_state_BIK: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mamba's state space: K numbers per channel, each with its own decay.

    Args:
        x_BTI: inputs; float16, bfloat16, float32 or float64. The other arguments may be of any floating dtype.
        dt_BTI: step sizes, ≥ 0, float32 is recommended; with dt_bias any numbers.
        A_IK: decay rates, ≤ 0.
        B_BTK: how the input enters the states of a channel.
        C_BTK: how the states of a channel make its output.
        D_I: adds `D·x` to the output. Default nothing.
        dt_bias_I: step sizes are `softplus(dt + dt_bias)`. Default: they are dt.
        initial_state_BIK: the state before the first token. Default 0.
        cu_seqlens: packed documents, as of `recurrence`. Every row begins a document, also where it is not named.

    Returns:
        Outputs `(B, T, I)` in x's dtype, and the state after the last token `(B, I, K)`, float32 (float64 for float64
        inputs).

    Raises:
        TypeError, ValueError: as `recurrence`.
    """
    inputs = {"x": (x_BTI, "BTI"), "dt": (dt_BTI, "BTI"), "A": (A_IK, "IK"), "B": (B_BTK, "BTK"), "C": (C_BTK, "BTK")}
    optional = {"D": (D_I, "I"), "dt_bias": (dt_bias_I, "I"), "initial_state": (initial_state_BIK, "BIK")}
    check_tensors(inputs, optional | {"cu_seqlens": (cu_seqlens, "P")})
    check_documents(cu_seqlens, x_BTI.shape[0] * x_BTI.shape[1])
    with torch.autocast(x_BTI.device.type, enabled=False):
        if x_BTI.shape[1] > 1 and scan_takes_kernel(A_IK.shape[1], x_BTI.dtype, x_BTI.device):
            result = _scan_with_kernel(x_BTI, dt_BTI, A_IK, B_BTK, C_BTK, initial_state_BIK, D_I, dt_bias_I, cu_seqlens)
            if result is not None:
                return result
        if dt_bias_I is not None:
            dtype = torch.promote_types(dt_BTI.dtype, torch.float32)
            dt_BTI = F.softplus(dt_BTI.to(dtype) + dt_bias_I.to(dtype))
        inputs_BT = (x_BTI, dt_BTI, B_BTK, C_BTK)
        if cu_seqlens is not None:
            out, state = _scan_of_documents(inputs_BT, A_IK, cu_seqlens, initial_state_BIK)
        else:
            backend = reference if x_BTI.shape[1] == 1 else scan
            out, state = backend.selective_scan(x_BTI, dt_BTI, A_IK, B_BTK, C_BTK, initial_state_BIK)
        if D_I is not None:
            out = (out + D_I * x_BTI).to(x_BTI.dtype)
    return out, state


def scan_takes_kernel(states: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the Triton kernels serve selective scans of so many states per channel, with inputs of this dtype."""
    if device.type != "cuda" or dtype == torch.float64 or states > MAX_SCAN_STATES:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return backends.has_triton("selective_scan", _SCAN_KERNELS, index)


def _scan_with_kernel(
    x_BTI: Tensor,
    dt_BTI: Tensor,
    A_IK: Tensor,
    B_BTK: Tensor,
    C_BTK: Tensor,
    initial_state_BIK: Tensor | None,
    D_I: Tensor | None,
    dt_bias_I: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """The output and the final state; None, after a warning, where Triton cannot compile the kernels."""
    starts_BT = None
    if cu_seqlens is not None:
        # One more than there are tokens, for the end; ends may be repeated.
        starts = torch.zeros(x_BTI.shape[0] * x_BTI.shape[1] + 1, dtype=torch.int8, device=x_BTI.device)
        starts_BT = starts.index_fill(0, cu_seqlens.long(), 1)[:-1].view(x_BTI.shape[:2])
        # The first document of a row continues from the initial state.
        starts_BT = torch.cat((torch.zeros_like(starts_BT[:, :1]), starts_BT[:, 1:]), dim=1)
    state_BIK = None if initial_state_BIK is None else initial_state_BIK.float()
    arguments = (x_BTI, dt_BTI, A_IK.float(), B_BTK, C_BTK, D_I, dt_bias_I, starts_BT, state_BIK)
    result = backends.attempt("selective_scan", torch.ops.forgetting_transformer.scan_forward, *arguments)
    return None if result is None else result[:2]


def _scan_of_documents(
    inputs_BT: tuple[Tensor, ...], A_IK: Tensor, cu_seqlens: Tensor, initial_state_BIK: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The scan of packed documents, one after another, and the final state of each row; inputs x, dt, B and C."""
    x_BTI, *_ = inputs_BT
    batch, length, _ = x_BTI.shape
    flat = [x.flatten(0, 1)[None] for x in inputs_BT]
    outs, states = [], []
    bounds = sorted({*cu_seqlens.tolist(), *range(0, batch * length + 1, length)})
    for start, stop in itertools.pairwise(bounds):
        x, dt, B, C = (tensor[:, start:stop] for tensor in flat)
        row, before = start // length, None
        if initial_state_BIK is not None and start % length == 0:
            before = initial_state_BIK[row : row + 1]
        out, state = scan.selective_scan(x, dt, A_IK, B, C, before)
        outs.append(out)
        if stop % length == 0:
            states.append(state)
    return torch.cat(outs, dim=1).view(x_BTI.shape), torch.cat(states)


def _select_backend(op: str, q_BTHK: Tensor, v_BTHV: Tensor) -> ModuleType:
    """The fastest backend for these inputs. A single token (decoding) is one step of the definition on any device."""
    if q_BTHK.shape[1] == 1:
        return reference
    key_dim, value_dim, device = q_BTHK.shape[-1], v_BTHV.shape[-1], q_BTHK.device
    if q_BTHK.is_cuda and fla.serves(op, key_dim, value_dim, q_BTHK.dtype, device.index):
        return fla
    return chunked


def _check_recurrence(
    sequences: dict[str, tuple[Any, str]], others: dict[str, tuple[Any, str]], state_BHKV: Tensor | None, scale: float
) -> None:
    """Refuse queries, keys and values, and what goes with them, that do not fit together."""
    check_tensors(sequences, others | {"state": (state_BHKV, "BHKV")})
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}; it must be a positive finite number, such as 1/√K")
