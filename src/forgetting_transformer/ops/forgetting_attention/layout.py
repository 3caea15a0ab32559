"""What launches share: sizes, what is known of the gates, and where heads `(B, H, T, D)` lie in memory.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from forgetting_transformer.ops.forgetting_attention.constants import STRETCH

#: Launch option of every kernel: multiplications and additions are fused, as the kernels were measured. Said here
#: because Triton's own default is to change with version 3.10.
FUSED = {"enable_fp_fusion": True}


def on_device_of_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run with its first tensor's GPU as the current one, where Triton launches kernels.

    Models spread over GPUs, and callers that pass `cuda:1`, do not switch. CPU tensors are for Triton's interpreter.
    """

    @functools.wraps(function)
    def on_device(x: Tensor, *args: Any, **options: Any) -> Any:
        if not x.is_cuda:
            return function(x, *args, **options)
        with torch.cuda.device(x.device):
            return function(x, *args, **options)

    return on_device


class Sizes(NamedTuple):
    batch: int
    heads: int
    group: int  # query heads per key head
    queries: int
    keys: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> "Sizes":
        return cls(q.shape[0], q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2])

    @classmethod
    def of_gates(cls, log_fgate: Tensor, num_queries: int) -> "Sizes":
        """Of gates `(B, H, N)`, of which each query head has its own."""
        batch, heads, num_keys = log_fgate.shape
        return cls(batch, heads, 1, num_queries, num_keys)

    @property
    def rows(self) -> int:
        return self.batch * self.heads

    @property
    def stretches(self) -> int:
        return triton.cdiv(self.keys, STRETCH)

    @property
    def blocks(self) -> int:
        return triton.cdiv(self.queries, STRETCH)

    @property
    def lengths(self) -> tuple[int, int, int, int]:
        return self.queries, self.keys, self.stretches, self.blocks


class Decay(NamedTuple):
    """What `stretch_kernel` and `running_kernel` compute; they say what each is."""

    suffix: Tensor  # (Z, S·128) float32
    running: Tensor  # (Z, S + 1) float64
    reference: Tensor  # (Z, Q) float64
    first_stretch: Tensor  # (Z, Q) int32
    end_block: Tensor  # (Z, S) int32


def with_whole_channels(x: Tensor) -> Tensor:
    """Kernels want the channels of a head side by side; any other strides will do."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_heads_like(x: Tensor) -> Tensor:
    """A tensor of x's shape `(B, H, T, D)`, in memory `(B, T, H, D)`, as projections before and after want it."""
    batch, heads, length, head_dim = x.shape
    return torch.empty(batch, length, heads, head_dim, dtype=x.dtype, device=x.device).transpose(1, 2)


def locate(x: Tensor, block: int = 0, tma: bool = False) -> tuple[Any, int, int, int]:
    """A tensor `(B, H, T, D)` and the three numbers that locate a head in it: see `kernels.py`."""
    if not tma:
        return x, x.stride(0), x.stride(1), x.stride(2)
    shape, numbers = flattened(x.shape, x.stride())
    return TensorDescriptor(x, [*shape], [x.stride(2), 1], [block, x.shape[3]]), *numbers


# Launching takes the host as long as short sequences take the GPU, so what depends on shapes alone is kept.
@functools.lru_cache(maxsize=256)
def flattened(
    size: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[tuple[int, int], tuple[int, int, int]]:  # fmt: skip
    """The two dimensions of a descriptor of a tensor of this size and stride, and the numbers that locate a head."""
    batch, heads, length, head_dim = size
    if _heads_within_rows(size, stride):
        return (batch * length, heads * stride[1]), (length, 0, stride[1])
    return (batch * heads * length, head_dim), (heads * length, length, 0)


def _heads_within_rows(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a row of memory holds all heads of a position: `(B, T, H, D)`, or a slice of several such tensors."""
    batch, heads, length, head_dim = size
    fits = head_dim <= stride[1] and heads * stride[1] <= stride[2]
    return fits and (batch == 1 or stride[0] == length * stride[2])


def fits_descriptor(x: Tensor) -> bool:
    """Whether one two-dimensional descriptor reaches all heads, whole tiles at a time."""
    return x.data_ptr() % 16 == 0 and _fits(x.shape, x.stride(), x.element_size())


@functools.lru_cache(maxsize=256)
def _fits(size: tuple[int, ...], stride: tuple[int, ...], element_size: int) -> bool:
    if size[2] % STRETCH or any(s * element_size % 16 for s in stride[:3]):
        return False
    _, heads, length, head_dim = size
    contiguous = (heads * length * head_dim, length * head_dim, head_dim, 1)
    strides_agree = (n == 1 or a == b for n, a, b in zip(size, stride, contiguous, strict=True))
    return _heads_within_rows(size, stride) or all(strides_agree)
