"""Checks of the arguments of ops: errors name the argument, its value and the fix. Nothing here waits for a GPU."""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forgetting_transformer.ops.eager import runs_eagerly

#: Arguments that must have one dtype, and those that are indices of tokens.
_OF_ONE_DTYPE, _INDICES = ("q", "k", "v"), ("seq_start", "seq_end", "cu_seqlens")


def check_tensors(tensors: Mapping[str, tuple[Any, str]], optional: Mapping[str, tuple[Any, str]]) -> None:
    """Refuse tensors that do not fit together.

    Args:
        tensors: name: a tensor, and a letter for each of its axes. The first tensor with a letter gives its size.
        optional: the same of arguments that may be None.

    Raises:
        TypeError: an argument is no tensor, or has no floating dtype; indices, no dtype of integers.
        ValueError: devices, dtypes or shapes differ.
    """
    given = {**tensors, **{name: pair for name, pair in optional.items() if pair[0] is not None}}
    for name, (x, _) in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
    is_eager = runs_eagerly(*[x for x, _ in given.values()])
    check = _check_once if is_eager else _check_fit
    check(*[(name, axes, x.shape, x.dtype, x.device) for name, (x, axes) in given.items()])


def _check_fit(*tensors: tuple[str, str, torch.Size, torch.dtype, torch.device]) -> None:
    """`check_tensors`, from names, axes, shapes, dtypes and devices."""
    first_name, _, _, first_dtype, first_device = tensors[0]
    sizes: dict[str, int] = {}
    for name, axes, shape, dtype, device in tensors:
        if not (dtype in (torch.int32, torch.int64) if name in _INDICES else dtype.is_floating_point):
            wanted = "int32 or int64" if name in _INDICES else "a floating dtype"
            raise TypeError(f"{name} has dtype {dtype}; it must be {wanted}")
        if device != first_device:
            raise ValueError(f"{name} is on {device} and {first_name} on {first_device}; move them to one device")
        if dtype != first_dtype and name in _OF_ONE_DTYPE:
            raise ValueError(f"{name} is {dtype} and q {first_dtype}; cast q, k and v to one dtype")
        if len(shape) != len(axes) or 0 in shape:
            raise ValueError(f"{name} has shape {tuple(shape)}; it must be ({', '.join(axes)}), each at least 1")
        expected = tuple([sizes.setdefault(axis, size) for axis, size in zip(axes, shape, strict=True)])
        if tuple(shape) != expected:
            raise ValueError(f"{name} has shape {tuple(shape)}; it must be ({', '.join(axes)}) = {expected}")


# Eager calls are mostly alike, and every microsecond of the host counts there.
_check_once = functools.lru_cache(maxsize=1024)(_check_fit)


def _shows_values(x: Tensor) -> bool:
    """Whether values may be read: this neither stalls an accelerator nor breaks a compiled graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def check_documents(cu_seqlens: Tensor | None, tokens: int) -> None:
    """Refuse beginnings of documents that do not rise from 0 to the number of tokens of all rows."""
    if cu_seqlens is None:
        return
    if len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be (documents + 1,)")
    if _shows_values(cu_seqlens):
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != tokens or any(a > b for a, b in itertools.pairwise(bounds)):
            raise ValueError(f"cu_seqlens is {bounds}; it must rise from 0 to the {tokens} tokens of all rows")


def check_attention(
    tensors: Mapping[str, Tensor],
    head_first: bool,
    *,
    seq_start: Tensor | None = None,
    seq_end: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    window_size: int | None = None,
) -> None:
    """Refuse arguments of attention that do not fit together. `tensors`: q, k, v and, with gates, these, by name."""
    of_q, of_k, of_gates = ("BHTD", "BGND", "BHN") if head_first else ("BTHD", "BNGD", "BNH")
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    gates = {name: (x, of_gates) for name, x in tensors.items() if name not in _OF_ONE_DTYPE}
    positions = {"seq_start": (seq_start, "B"), "seq_end": (seq_end, "B"), "cu_seqlens": (cu_seqlens, "P")}
    check_tensors({"q": (q, of_q), "k": (k, of_k), "v": (v, of_k)} | gates, positions)
    length, head = (2, 1) if head_first else (1, 2)
    num_queries, num_keys = q.shape[length], k.shape[length]
    layout = f"axes ({', '.join(of_q)}), head_first={head_first}"
    if q.shape[head] % k.shape[head]:
        raise ValueError(f"k has {k.shape[head]} heads and q {q.shape[head]}; q's must be a multiple of k's ({layout})")
    if num_queries > num_keys:
        raise ValueError(
            f"q has {num_queries} positions and k only {num_keys}; the queries are the last positions of the keys, so "
            f"there cannot be more of them ({layout})"
        )
    for name, x, lowest in (("seq_start", seq_start, 0), ("seq_end", seq_end, num_queries)):
        if x is not None and _shows_values(x) and not bool(((x >= lowest) & (x <= num_keys)).all()):
            raise ValueError(f"{name} is {x.tolist()}; its entries must lie in [{lowest}, {num_keys}]")
    check_documents(cu_seqlens, num_keys)
    if cu_seqlens is not None and (q.shape[0] != 1 or num_queries != num_keys):
        raise ValueError(
            f"cu_seqlens packs documents into one sequence: it needs batch size 1 (got {q.shape[0]}) and as many "
            f"queries as keys (got {num_queries} and {num_keys})"
        )
    if window_size is not None and window_size < 1:
        raise ValueError(f"window_size is {window_size}; it must be at least 1, or None for no window")


def check_gates(log_fgate: Tensor, seq_start: Tensor | None, head_first: bool) -> None:
    """Refuse gates above 1, whatever padding holds, where values can be looked at."""
    if not _shows_values(log_fgate):
        return
    log_fgate_BHN = log_fgate.detach() if head_first else log_fgate.detach().transpose(1, 2)
    is_wrong_BHN = log_fgate_BHN > 0
    if seq_start is not None:
        is_wrong_BHN &= (torch.arange(log_fgate_BHN.shape[2]) >= seq_start[:, None])[:, None]
    if bool(is_wrong_BHN.any()):
        raise ValueError(
            f"log_fgate has entries up to {log_fgate_BHN[is_wrong_BHN].max().item():.4g}; logarithms of gates between "
            "0 and 1 are never positive: pass torch.nn.functional.logsigmoid of the logits"
        )


def check_adaptive_threshold(threshold: Any, q: Tensor, head_first: bool) -> None:
    """Refuse anything but None, "auto", or a decay bias of all heads or each."""
    if threshold is None or (isinstance(threshold, str) and threshold == "auto"):
        return
    is_bias = isinstance(threshold, int | float) and not isinstance(threshold, bool) and threshold <= 0
    if isinstance(threshold, Tensor):
        shape, wanted = tuple(threshold.shape), (q.shape[0], q.shape[1 if head_first else 2])
        fits = all(size in (1, want) for size, want in zip(shape[::-1], wanted[::-1], strict=False))
        if not fits or len(shape) > 2 or not threshold.is_floating_point() or threshold.device != q.device:
            raise ValueError(
                f"adaptive_threshold is {threshold.dtype} {shape} on {threshold.device}; it must be a floating dtype, "
                f"broadcast to (B, H) = {wanted}, and be on {q.device}"
            )
        is_bias = not _shows_values(threshold) or bool((threshold <= 0).all())
    if not is_bias:
        raise ValueError(
            f"adaptive_threshold is {threshold!r}; it must be None, 'auto' or a decay bias, not positive or NaN"
        )


def checked_scale(sm_scale: float | None, head_dim: int) -> float:
    """The factor on q·k: sm_scale, or 1/√D for None."""
    if sm_scale is None:
        return 1 / math.sqrt(head_dim)
    if not (math.isfinite(sm_scale) and sm_scale > 0):
        raise ValueError(f"sm_scale is {sm_scale}; it must be a positive finite number, or None for 1/√D")
    return float(sm_scale)  # kernels would be compiled for the number 1
