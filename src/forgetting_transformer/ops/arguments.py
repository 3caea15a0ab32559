"""Checks of the arguments of ops: errors name the argument, its value and the fix. Nothing here waits for a GPU."""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forgetting_transformer.ops.eager import runs_eagerly

#: Arguments that must have one dtype.
_OF_ONE_DTYPE = ("q", "k", "v")


def check_tensors(tensors: Mapping[str, tuple[Any, str]]) -> None:
    """Refuse tensors that do not fit together.

    Args:
        tensors: name: a tensor, and a letter for each of its axes. The first tensor with a letter gives its size.

    Raises:
        TypeError: an argument is no tensor, or its dtype is not a floating one.
        ValueError: devices, dtypes or shapes differ.
    """
    for name, (x, _) in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
    is_eager = runs_eagerly(*[x for x, _ in tensors.values()])
    check = _check_once if is_eager else _check_fit
    check(*[(name, axes, x.shape, x.dtype, x.device) for name, (x, axes) in tensors.items()])


def _check_fit(*tensors: tuple[str, str, torch.Size, torch.dtype, torch.device]) -> None:
    """`check_tensors`, from names, axes, shapes, dtypes and devices."""
    first_name, _, _, first_dtype, first_device = tensors[0]
    sizes: dict[str, int] = {}
    for name, axes, shape, dtype, device in tensors:
        if not dtype.is_floating_point:
            raise TypeError(f"{name} has dtype {dtype}; it must be a floating dtype")
        if device != first_device:
            raise ValueError(f"{name} is on {device} and {first_name} on {first_device}; move them to one device")
        if dtype != first_dtype and name in _OF_ONE_DTYPE:
            raise ValueError(f"{name} is {dtype} and q {first_dtype}; cast q, k and v to one dtype")
        if len(shape) != len(axes):
            raise ValueError(f"{name} has shape {tuple(shape)}; it must have {len(axes)} axes, ({', '.join(axes)})")
        if 0 in shape:
            raise ValueError(f"{name} has shape {tuple(shape)}; every axis must have at least one element")
        for axis, size in zip(axes, shape, strict=True):
            sizes.setdefault(axis, size)
        expected = tuple(sizes[axis] for axis in axes)
        if tuple(shape) != expected:
            raise ValueError(f"{name} has shape {tuple(shape)}; it must be ({', '.join(axes)}) = {expected}")


# Eager calls are mostly alike, and every microsecond of the host counts there.
_check_once = functools.lru_cache(maxsize=1024)(_check_fit)


def shows_values(x: Tensor) -> bool:
    """Whether looking at values neither stalls an accelerator nor breaks a compiled graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def check_indices(name: str, x: Any, other_name: str, other: Tensor) -> None:
    """Refuse what is no tensor of indices beside another tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {x.dtype}; it must be int32 or int64")
    if x.device != other.device:
        raise ValueError(f"{name} is on {x.device} and {other_name} on {other.device}; move them to one device")


def check_documents(cu_seqlens: Any, name: str, x: Tensor, tokens: int) -> None:
    """Refuse what does not say where the documents among the tokens of x begin. None packs none."""
    if cu_seqlens is None:
        return
    check_indices("cu_seqlens", cu_seqlens, name, x)
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be (documents + 1,)")
    if shows_values(cu_seqlens):
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != tokens or any(a > b for a, b in itertools.pairwise(bounds)):
            raise ValueError(f"cu_seqlens is {bounds}; it must rise from 0 to the {tokens} tokens of all rows")


# What attention alone has.


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, head_first: bool, gates_name: str = "log_fgate"
) -> None:
    """Refuse tensors that do not fit together. `gates` is None for an op without gates."""
    of_q, of_k, of_gates = ("BHTD", "BGND", "BHN") if head_first else ("BTHD", "BNGD", "BNH")
    tensors = {"q": (q, of_q), "k": (k, of_k), "v": (v, of_k)}
    check_tensors(tensors if gates is None else tensors | {gates_name: (gates, of_gates)})
    length, head = (2, 1) if head_first else (1, 2)
    layout = f"axes ({', '.join(of_q)})" + ("" if gates is None else f", head_first={head_first}")
    if q.shape[head] % k.shape[head]:
        raise ValueError(f"k has {k.shape[head]} heads and q {q.shape[head]}; q's must be a multiple of k's ({layout})")
    if q.shape[length] > k.shape[length]:
        raise ValueError(
            f"q has {q.shape[length]} positions and k only {k.shape[length]}; the queries are the last positions of "
            f"the keys, so there cannot be more of them ({layout})"
        )


def check_gates(log_fgate: Tensor, seq_start: Tensor | None, head_first: bool) -> None:
    """Refuse gates above 1, where values can be looked at."""
    if not shows_values(log_fgate) or not bool((log_fgate.detach() > 0).any()):
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


def check_positions(name: str, x: Tensor | None, lowest: int, k: Tensor, head_first: bool) -> None:
    """Refuse what is not one position per sequence, from `lowest` to the number of keys."""
    if x is None:
        return
    batch, num_keys = k.shape[0], k.shape[2 if head_first else 1]
    check_indices(name, x, "k", k)
    if x.shape != (batch,):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be ({batch},), one entry per sequence")
    if shows_values(x) and not bool(((x >= lowest) & (x <= num_keys)).all()):
        raise ValueError(f"{name} is {x.tolist()}; its entries must lie in [{lowest}, {num_keys}]")


def check_window_size(window_size: int | None) -> None:
    if window_size is None:
        return
    if isinstance(window_size, bool) or not isinstance(window_size, int) or window_size < 1:
        raise ValueError(f"window_size is {window_size!r}; it must be an integer of at least 1, or None for no window")


def check_cu_seqlens(cu_seqlens: Tensor | None, q: Tensor, k: Tensor, head_first: bool) -> None:
    if cu_seqlens is None:
        return
    length = 2 if head_first else 1
    num_queries, num_keys = q.shape[length], k.shape[length]
    check_documents(cu_seqlens, "q", q, num_keys)
    if q.shape[0] != 1 or num_queries != num_keys:
        raise ValueError(
            f"cu_seqlens packs documents into one sequence: it needs batch size 1 (got {q.shape[0]}) and as many "
            f"queries as keys (got {num_queries} and {num_keys})"
        )


def check_adaptive_threshold(threshold: str | float | Tensor | None, q: Tensor, head_first: bool) -> None:
    if threshold is None:
        return
    if isinstance(threshold, Tensor):
        _check_thresholds(threshold, q, (q.shape[0], q.shape[1 if head_first else 2]))
    elif isinstance(threshold, str):
        if threshold != "auto":
            raise ValueError(f"adaptive_threshold is {threshold!r}; the only word it accepts is 'auto'")
    elif isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        kind = type(threshold).__name__
        raise TypeError(f"adaptive_threshold is a {kind}; it must be None, 'auto', a number or a tensor")
    elif not threshold <= 0:
        raise ValueError(f"adaptive_threshold is {threshold}; it must be ≤ 0, as a decay bias is never positive")


def _check_thresholds(threshold: Tensor, q: Tensor, wanted: tuple[int, int]) -> None:
    if not threshold.is_floating_point():
        raise TypeError(f"adaptive_threshold has dtype {threshold.dtype}; it must be a floating dtype")
    if threshold.device != q.device:
        raise ValueError(f"adaptive_threshold is on {threshold.device} and q on {q.device}; move them to one device")
    shape = tuple(threshold.shape)
    if len(shape) > 2 or any(size not in (1, want) for size, want in zip(shape[::-1], wanted[::-1], strict=False)):
        raise ValueError(f"adaptive_threshold has shape {shape}; it must broadcast to (B, H) = {wanted}")
    if shows_values(threshold) and not bool((threshold <= 0).all()):
        raise ValueError("adaptive_threshold has entries that are positive or NaN; a decay bias is never positive")


def checked_scale(sm_scale: float | None, head_dim: int) -> float:
    """The factor on q·k: sm_scale, or 1/√D for None."""
    if sm_scale is None:
        return 1 / math.sqrt(head_dim)
    if not (math.isfinite(sm_scale) and sm_scale > 0):
        raise ValueError(f"sm_scale is {sm_scale}; it must be a positive finite number, or None for 1/√D")
    return float(sm_scale)  # kernels would be compiled for the number 1
