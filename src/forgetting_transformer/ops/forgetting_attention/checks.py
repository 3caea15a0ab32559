"""Checks of arguments: errors name the argument, its value and the fix. Nothing here waits for a GPU."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from forgetting_transformer.ops.eager import runs_eagerly

# What tensors that passed `check_tensors` have in common with others that need not be checked again.
_passed: set[tuple[Any, ...]] = set()
_MAX_PASSED = 1024


def check_tensors(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, head_first: bool, gates_name: str = "log_fgate"
) -> None:
    """Refuse tensors that do not fit together. `gates` is None for an op without gates, which has no `head_first`."""
    tensors = (q, k, v) if gates is None else (q, k, v, gates)
    if not runs_eagerly(*tensors):
        _check_tensors(q, k, v, gates, head_first, gates_name)
        return
    call = head_first, gates_name, *[(x.shape, x.dtype, x.device) for x in tensors]
    if call in _passed:
        return
    _check_tensors(q, k, v, gates, head_first, gates_name)
    if len(_passed) >= _MAX_PASSED:
        _passed.clear()
    _passed.add(call)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, head_first: bool, gates_name: str) -> None:
    named = {"q": q, "k": k, "v": v} if gates is None else {"q": q, "k": k, "v": v, gates_name: gates}
    layout = "" if gates is None else f"head_first={head_first}"
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
        if not x.is_floating_point():
            raise TypeError(f"{name} has dtype {x.dtype}; it must be a floating dtype")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; move them to one device")

    axes = "(B, H, length, D)" if head_first else "(B, length, H, D)"
    for name in ("q", "k", "v"):
        if named[name].ndim != 4:
            raise ValueError(
                f"{name} has shape {tuple(named[name].shape)}; it must have 4 axes, {axes}{layout and f' ({layout})'}"
            )
        if named[name].dtype != q.dtype:
            raise ValueError(f"{name} is {named[name].dtype} and q {q.dtype}; cast q, k and v to one dtype")
    if k.shape != v.shape:
        raise ValueError(f"v has shape {tuple(v.shape)} and k {tuple(k.shape)}; they must agree")

    length_axis, head_axis = (2, 1) if head_first else (1, 2)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k has batch size {k.shape[0]} and q {q.shape[0]}; they must agree")
    if k.shape[head_axis] == 0 or q.shape[head_axis] % k.shape[head_axis]:
        raise ValueError(
            f"k has {k.shape[head_axis]} heads and q {q.shape[head_axis]}; q's must be a multiple of k's (axes {axes}"
            f"{layout and f', {layout}'})"
        )
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k has head dimension {k.shape[3]} and q {q.shape[3]}; they must agree")
    if q.shape[length_axis] > k.shape[length_axis]:
        raise ValueError(
            f"q has {q.shape[length_axis]} positions and k only {k.shape[length_axis]}; the queries are the last "
            f"positions of the keys, so there cannot be more of them (axes {axes}{layout and f', {layout}'})"
        )
    if 0 in q.shape:
        raise ValueError(f"q has shape {tuple(q.shape)}; every axis must have at least one element")
    if gates is None:
        return
    gates_shape = (*k.shape[:head_axis], q.shape[head_axis], *k.shape[head_axis + 1 : 3])
    if gates.shape != gates_shape:
        axes = "(B, H, length)" if head_first else "(B, length, H)"
        raise ValueError(
            f"{gates_name} has shape {tuple(gates.shape)}; it must have one entry per key and query head, "
            f"{gates_shape} (axes {axes}, head_first={head_first})"
        )


def check_gates(log_fgate: Tensor, seq_start: Tensor | None, head_first: bool) -> None:
    """Gates above 1 are refused. As with all values, this is looked at on the CPU only and not in a compiled graph."""
    if log_fgate.device.type != "cpu" or torch.compiler.is_compiling():
        return
    log_fgate_BHN = log_fgate.detach() if head_first else log_fgate.detach().transpose(1, 2)
    if not bool((log_fgate_BHN > 0).any()):
        return
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
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor of shape ({batch},)")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {x.dtype}; it must be int64")
    if x.shape != (batch,):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be ({batch},), one entry per sequence")
    if x.device != k.device:
        raise ValueError(f"{name} is on {x.device} and k on {k.device}; move them to one device")
    # Looking at values would stall an accelerator and break a compiled graph, so the range is checked on the CPU only.
    looks_at_values = x.device.type == "cpu" and not torch.compiler.is_compiling()
    if looks_at_values and not bool(((x >= lowest) & (x <= num_keys)).all()):
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
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        kind = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens is a {kind}; it must be an int32 or int64 tensor of shape (documents + 1,)")
    if q.shape[0] != 1 or num_queries != num_keys:
        raise ValueError(
            f"cu_seqlens packs documents into one sequence: it needs batch size 1 (got {q.shape[0]}) and as many "
            f"queries as keys (got {num_queries} and {num_keys})"
        )
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be (documents + 1,)")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device} and q on {q.device}; move them to one device")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != num_keys or any(a > b for a, b in itertools.pairwise(bounds)):
            raise ValueError(f"cu_seqlens is {bounds}; it must rise from 0 to the {num_keys} keys")


def check_adaptive_threshold(threshold: str | float | Tensor | None, q: Tensor, head_first: bool) -> None:
    if threshold is None:
        return
    if isinstance(threshold, str):
        if threshold != "auto":
            raise ValueError(f"adaptive_threshold is {threshold!r}; the only word it accepts is 'auto'")
        return
    if isinstance(threshold, Tensor):
        batch_and_heads = (q.shape[0], q.shape[1 if head_first else 2])
        if not threshold.is_floating_point():
            raise TypeError(f"adaptive_threshold has dtype {threshold.dtype}; it must be a floating dtype")
        if threshold.device != q.device:
            raise ValueError(
                f"adaptive_threshold is on {threshold.device} and q on {q.device}; move them to one device"
            )
        try:
            fits = torch.broadcast_shapes(threshold.shape, batch_and_heads) == batch_and_heads
        except RuntimeError:
            fits = False
        if not fits:
            raise ValueError(
                f"adaptive_threshold has shape {tuple(threshold.shape)}; it must broadcast to (B, H) = "
                f"{batch_and_heads}"
            )
        looks_at_values = threshold.device.type == "cpu" and not torch.compiler.is_compiling()
        if looks_at_values and not bool((threshold <= 0).all()):
            raise ValueError("adaptive_threshold has entries that are positive or NaN; a decay bias is never positive")
        return
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        raise TypeError(
            f"adaptive_threshold is a {type(threshold).__name__}; it must be None, 'auto', a number or a tensor"
        )
    if not threshold <= 0:
        raise ValueError(f"adaptive_threshold is {threshold}; it must be ≤ 0, as a decay bias is never positive")


def checked_scale(sm_scale: float | None, head_dim: int) -> float:
    """The factor on q·k: sm_scale, or 1/√D for None."""
    if sm_scale is None:
        return 1 / math.sqrt(head_dim)
    if not (math.isfinite(sm_scale) and sm_scale > 0):
        raise ValueError(f"sm_scale is {sm_scale}; it must be a positive finite number, or None for 1/√D")
    return float(sm_scale)  # kernels would be compiled for the number 1
