"""Checks of the arguments of ops: errors name the argument, its value and the fix. Nothing here waits for a GPU."""

import functools
import itertools
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
