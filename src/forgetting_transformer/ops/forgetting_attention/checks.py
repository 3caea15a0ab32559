"""Checks of arguments: errors name the argument, its value and the fix. Nothing here waits for a GPU."""

import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor

from forgetting_transformer.ops.eager import runs_eagerly


def check_tensors(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, head_first: bool, gates_name: str = "log_fgate"
) -> None:
    """Refuse tensors that do not fit together. `gates` is None for an op without gates, which has no `head_first`."""
    named = {"q": q, "k": k, "v": v} if gates is None else {"q": q, "k": k, "v": v, gates_name: gates}
    is_eager = runs_eagerly(*named.values())
    if not is_eager:
        for name, x in named.items():
            _check_is_tensor(name, x)
    check = _check_once if is_eager else _check_fit
    check(head_first, *[(name, x.shape, x.dtype, x.device) for name, x in named.items()])


def _check_fit(head_first: bool, *tensors: tuple[str, torch.Size, torch.dtype, torch.device]) -> None:
    """The same, from names, shapes, dtypes and devices."""
    (_, q, q_dtype, q_device), (_, k, _, _), (_, v, _, _), *others = tensors
    axes = "(B, H, length, D)" if head_first else "(B, length, H, D)"
    layout = f", head_first={head_first}" if others else ""
    for name, _, dtype, device in tensors:
        if not dtype.is_floating_point:
            raise TypeError(f"{name} has dtype {dtype}; it must be a floating dtype")
        if device != q_device:
            raise ValueError(f"{name} is on {device} and q on {q_device}; move them to one device")
    for name, shape, dtype, _ in tensors[:3]:
        if len(shape) != 4:
            raise ValueError(f"{name} has shape {tuple(shape)}; it must have 4 axes, {axes}{layout}")
        if dtype != q_dtype:
            raise ValueError(f"{name} is {dtype} and q {q_dtype}; cast q, k and v to one dtype")
    if k != v:
        raise ValueError(f"v has shape {tuple(v)} and k {tuple(k)}; they must agree")

    length_axis, head_axis = (2, 1) if head_first else (1, 2)
    for axis, what in ((0, "batch size"), (3, "head dimension")):
        if k[axis] != q[axis]:
            raise ValueError(f"k has {what} {k[axis]} and q {q[axis]}; they must agree")
    if k[head_axis] == 0 or q[head_axis] % k[head_axis]:
        raise ValueError(
            f"k has {k[head_axis]} heads and q {q[head_axis]}; q's must be a multiple of k's (axes {axes}{layout})"
        )
    if q[length_axis] > k[length_axis]:
        raise ValueError(
            f"q has {q[length_axis]} positions and k only {k[length_axis]}; the queries are the last positions of the "
            f"keys, so there cannot be more of them (axes {axes}{layout})"
        )
    if 0 in q:
        raise ValueError(f"q has shape {tuple(q)}; every axis must have at least one element")
    for name, shape, _, _ in others:
        gates_shape = (*k[:head_axis], q[head_axis], *k[head_axis + 1 : 3])
        if shape != gates_shape:
            axes = axes.replace(", D", "")
            raise ValueError(
                f"{name} has shape {tuple(shape)}; it must have one entry per key and query head, {gates_shape} (axes "
                f"{axes}{layout})"
            )


# Eager calls are mostly alike, and every microsecond of the host counts there.
_check_once = functools.lru_cache(maxsize=1024)(_check_fit)


def _check_is_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")


def _check_indices(name: str, x: Any, other_name: str, other: Tensor) -> None:
    _check_is_tensor(name, x)
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {x.dtype}; it must be int32 or int64")
    if x.device != other.device:
        raise ValueError(f"{name} is on {x.device} and {other_name} on {other.device}; move them to one device")


def _shows_values(x: Tensor) -> bool:
    """Whether looking at values neither stalls an accelerator nor breaks a compiled graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def check_gates(log_fgate: Tensor, seq_start: Tensor | None, head_first: bool) -> None:
    """Refuse gates above 1, where values can be looked at."""
    if not _shows_values(log_fgate) or not bool((log_fgate.detach() > 0).any()):
        return
    log_fgate_BHN = log_fgate.detach() if head_first else log_fgate.detach().transpose(1, 2)
    if seq_start is not None:  # whatever padding holds
        position_N = torch.arange(log_fgate_BHN.shape[2])
        log_fgate_BHN = log_fgate_BHN.masked_fill((position_N < seq_start[:, None])[:, None], 0)
    largest = log_fgate_BHN.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).max().item()
    if largest > 0:
        raise ValueError(
            f"log_fgate has entries up to {largest:.4g}; logarithms of gates between 0 and 1 are never positive: pass "
            "torch.nn.functional.logsigmoid of the logits"
        )


def check_seq_start(seq_start: Tensor | None, k: Tensor, head_first: bool) -> None:
    _check_positions("seq_start", seq_start, 0, k, head_first)


def check_seq_end(seq_end: Tensor | None, q: Tensor, k: Tensor, head_first: bool) -> None:
    _check_positions("seq_end", seq_end, q.shape[2 if head_first else 1], k, head_first)


def _check_positions(name: str, x: Tensor | None, lowest: int, k: Tensor, head_first: bool) -> None:
    """One position per sequence, from `lowest` to the number of keys."""
    if x is None:
        return
    batch, num_keys = k.shape[0], k.shape[2 if head_first else 1]
    _check_indices(name, x, "k", k)
    if x.shape != (batch,):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be ({batch},), one entry per sequence")
    if _shows_values(x) and not bool(((x >= lowest) & (x <= num_keys)).all()):
        raise ValueError(f"{name} is {x.tolist()}; its entries must lie in [{lowest}, {num_keys}]")


def check_window_size(window_size: int | None) -> None:
    if window_size is not None and (
        isinstance(window_size, bool) or not isinstance(window_size, int) or window_size < 1
    ):
        raise ValueError(f"window_size is {window_size!r}; it must be an integer of at least 1, or None for no window")


def check_cu_seqlens(cu_seqlens: Tensor | None, q: Tensor, k: Tensor, head_first: bool) -> None:
    if cu_seqlens is None:
        return
    length_axis = 2 if head_first else 1
    num_queries, num_keys = q.shape[length_axis], k.shape[length_axis]
    _check_indices("cu_seqlens", cu_seqlens, "q", q)
    if q.shape[0] != 1 or num_queries != num_keys:
        raise ValueError(
            f"cu_seqlens packs documents into one sequence: it needs batch size 1 (got {q.shape[0]}) and as many "
            f"queries as keys (got {num_queries} and {num_keys})"
        )
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be (documents + 1,)")
    if _shows_values(cu_seqlens):
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != num_keys or any(a > b for a, b in itertools.pairwise(bounds)):
            raise ValueError(f"cu_seqlens is {bounds}; it must rise from 0 to the {num_keys} keys")


def check_adaptive_threshold(threshold: str | float | Tensor | None, q: Tensor, head_first: bool) -> None:
    if threshold is None:
        return
    if isinstance(threshold, str):
        if threshold != "auto":
            raise ValueError(f"adaptive_threshold is {threshold!r}; the only word it accepts is 'auto'")
    elif isinstance(threshold, Tensor):
        if not threshold.is_floating_point():
            raise TypeError(f"adaptive_threshold has dtype {threshold.dtype}; it must be a floating dtype")
        if threshold.device != q.device:
            raise ValueError(
                f"adaptive_threshold is on {threshold.device} and q on {q.device}; move them to one device"
            )
        wanted = (q.shape[0], q.shape[1 if head_first else 2])
        try:
            fits = torch.broadcast_shapes(threshold.shape, wanted) == wanted
        except RuntimeError:
            fits = False
        if not fits:
            shape = tuple(threshold.shape)
            raise ValueError(f"adaptive_threshold has shape {shape}; it must broadcast to (B, H) = {wanted}")
        if _shows_values(threshold) and not bool((threshold <= 0).all()):
            raise ValueError("adaptive_threshold has entries that are positive or NaN; a decay bias is never positive")
    elif isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        kind = type(threshold).__name__
        raise TypeError(f"adaptive_threshold is a {kind}; it must be None, 'auto', a number or a tensor")
    elif not threshold <= 0:
        raise ValueError(f"adaptive_threshold is {threshold}; it must be ≤ 0, as a decay bias is never positive")


def checked_scale(sm_scale: float | None, head_dim: int) -> float:
    """The factor on q·k: sm_scale, or 1/√D for None."""
    if sm_scale is None:
        return 1 / math.sqrt(head_dim)
    if not (math.isfinite(sm_scale) and sm_scale > 0):
        raise ValueError(f"sm_scale is {sm_scale}; it must be a positive finite number, or None for 1/√D")
    return float(sm_scale)  # kernels would be compiled for the number 1
