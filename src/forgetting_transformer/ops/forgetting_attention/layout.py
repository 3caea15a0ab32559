"""Shared parts of launches: sizes, where heads `(B, H, T, D)` lie in memory, and launches that are prepared once.

Launching takes the host as long as short sequences take the GPU. What depends on shapes, strides, dtypes and alignments
alone is therefore computed at the first call with them and kept: sizes, grids, descriptors, and the compiled kernels.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from forgetting_transformer.ops.forgetting_attention.constants import STRETCH

#: Launch option of every kernel: multiplications and additions are fused, as the kernels were measured. Said here
#: because Triton's own default is to change with version 3.10.
FUSED = {"enable_fp_fusion": True}
#: Signatures of calls for which launches are kept, for each operator.
KEPT = 256

_Made = TypeVar("_Made")


def on_device_of_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run with its first tensor's GPU as the current one, where Triton launches kernels.

    Models spread over GPUs, and callers that pass `cuda:1`, do not switch. CPU tensors are for Triton's interpreter.
    """

    @functools.wraps(function)
    def on_device(x: Tensor, *args: Any, **options: Any) -> Any:
        if not x.is_cuda or x.device.index == torch.cuda.current_device():
            return function(x, *args, **options)
        with torch.cuda.device(x.device):
            return function(x, *args, **options)

    return on_device


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own takes the host as long as a launch should."""
    return (a + b - 1) // b


class Sizes(NamedTuple):
    batch: int
    heads: int
    group: int  # query heads per key head
    queries: int
    keys: int

    @classmethod
    def of(cls, q: torch.Size, k: torch.Size) -> "Sizes":
        """Sizes of queries and keys of these shapes."""
        return cls(q[0], q[1], q[1] // k[1], q[2], k[2])

    @classmethod
    def of_gates(cls, log_fgate: torch.Size, num_queries: int) -> "Sizes":
        """Sizes of gates of this shape `(B, H, N)`; each query head has its own."""
        batch, heads, num_keys = log_fgate
        return cls(batch, heads, 1, num_queries, num_keys)

    @property
    def rows(self) -> int:
        return self.batch * self.heads

    @property
    def stretches(self) -> int:
        return ceil_div(self.keys, STRETCH)

    @property
    def blocks(self) -> int:
        return ceil_div(self.queries, STRETCH)

    @property
    def lengths(self) -> tuple[int, int, int, int]:
        return self.queries, self.keys, self.stretches, self.blocks


class Decay(NamedTuple):
    """Results of `stretch_kernel` and `running_kernel`, which describe them."""

    suffix: Tensor  # (Z, S·128) float32
    running: Tensor  # (Z, S + 1) float64
    reference: Tensor  # (Z, Q) float64
    first_stretch: Tensor  # (Z, Q) int32
    end_block: Tensor  # (Z, S) int32


def with_whole_channels(x: Tensor) -> Tensor:
    """Kernels want the channels, the last axis, side by side; any other strides will do."""
    return x if x.stride(-1) == 1 else x.contiguous()


def side_by_side(x: Tensor | None) -> Tensor | None:
    """A tensor that kernels read as one piece of memory, such as a vector with one number per head. Operators call this
    themselves: `.contiguous()` before the call does not keep compiled code from padding rows.
    """
    return None if x is None else x.contiguous()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 1 under Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def empty_heads(size: torch.Size, x: Tensor) -> Tensor:
    """A tensor of this size `(B, H, T, D)`, in memory `(B, T, H, D)`, as projections before and after want it, with
    x's dtype and device."""
    # Not a view of another tensor, which autograd would follow.
    return torch.empty_strided(size, _heads_within_positions(size), dtype=x.dtype, device=x.device)


def empty_heads_like(x: Tensor) -> Tensor:
    return empty_heads(x.shape, x)


def empty_gates_like(x: Tensor) -> Tensor:
    """A tensor of x's shape `(B, H, T)`, in memory `(B, T, H)`."""
    _, heads, length = x.shape
    return torch.empty_strided(x.shape, (length * heads, 1, heads), dtype=x.dtype, device=x.device)


def _heads_within_positions(size: tuple[int, ...]) -> tuple[int, ...]:
    _, heads, length, head_dim = size
    return length * heads * head_dim, head_dim, heads * head_dim, 1


# A tensor as launches depend on it: shape, strides, dtype, and whether its address is a multiple of 16 bytes.
Signature = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]


def signature(x: Tensor) -> Signature:
    """Calls whose tensors have equal signatures take the same launches."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0


def alignments(*tensors: Tensor | None) -> tuple[bool | None, ...]:
    """Whether addresses are multiples of 16 bytes; None for None. Shapes and dtypes follow from other tensors."""
    return tuple([None if x is None else x.data_ptr() % 16 == 0 for x in tensors])


class Heads(NamedTuple):
    """The signature of a tensor `(B, H, T, D)`."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool

    @property
    def numbers(self) -> tuple[int, ...]:
        """The three numbers that locate a head in memory: see `kernels.py`."""
        return self.stride[:3]

    def like(self) -> "Heads":
        """Signature of the result of `empty_heads_like`."""
        return Heads(self.size, _heads_within_positions(self.size), self.dtype, True)


class Launch:
    """A kernel, its grid and its constants, for arguments of one signature.

    Triton looks at every argument of every launch to find the kernel that was compiled for it, which takes most of the
    time of a launch. Here the first launch finds it, and later ones go through the handle that it returned
    (`CompiledKernel.__getitem__`, as in Triton's tutorial on fused softmax). So a `Launch` must be for one device, and
    for arguments of which dtypes, integers, alignments to 16 bytes and what is None stay as they are.
    """

    def __init__(self, kernel: Any, programs: int, **options: Any) -> None:
        self._kernel, self._grid, self._options = kernel, (programs, 1, 1), options
        self._constants: tuple[Any, ...] = ()
        self._launch: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> None:
        if self._launch is not None:
            self._launch(*arguments, *self._constants)
            return
        compiled = self._kernel[self._grid](*arguments, **self._options)
        if isinstance(compiled, CompiledKernel):  # Triton's interpreter compiles nothing
            self._constants = tuple(self._options[name] for name in self._kernel.arg_names[len(arguments) :])
            self._launch = compiled[self._grid]


class Descriptors:
    """Descriptors of tensors of one shape and alignment: one is made with all of Triton's checks, others are copies."""

    def __init__(self, kind: Any, shape: list[int], strides: list[int], tile: list[int], *layout: Any) -> None:
        self._kind, self._arguments = kind, (shape, strides, tile, *layout)
        self._fields: dict[str, Any] | None = None

    def of(self, x: Tensor) -> Any:
        if self._fields is None:
            descriptor = self._kind(x, *self._arguments)
            self._fields = {**vars(descriptor), "base": None}
            return descriptor
        descriptor = object.__new__(self._kind)
        fields = vars(descriptor)
        fields.update(self._fields)
        fields["base"] = x
        return descriptor


class Located:
    """Tensors `(B, H, T, D)` of one signature as kernels take them: a pointer or a descriptor, and three numbers."""

    def __init__(self, heads: Heads, tile: int = 0, kind: Any = TensorDescriptor, *layout: Any) -> None:
        """tile: rows that a descriptor loads at a time; 0 is a pointer."""
        self.numbers, self._descriptors = heads.numbers, None
        if tile:
            shape, self.numbers = flattened(heads.size, heads.stride)
            strides, block = [heads.stride[2], 1], [tile, heads.size[3]]
            self._descriptors = Descriptors(kind, [*shape], strides, block, *layout)

    def of(self, x: Tensor) -> tuple[Any, ...]:
        return x if self._descriptors is None else self._descriptors.of(x), *self.numbers


class Inputs:
    """Facts that follow from the signatures of queries, keys and values, in the backward pass also of the gradient.

    Attributes:
        heads: these three or four.
        has_first: whether there are first visible keys.
    """

    def __init__(self, tensors: tuple[Signature, ...], has_first: bool, device: torch.device) -> None:
        self.heads = tuple(Heads(*x) for x in tensors)
        self.sizes = Sizes.of(self.heads[0].size, self.heads[1].size)
        self.has_first, self.device = has_first, device
        self._kept: dict[Any, Any] = {}

    def kept(self, make: "Callable[[Inputs], _Made]") -> _Made:
        """Result of the first `make(self)`."""
        made = self._kept.get(make)
        if made is None:
            made = self._kept[make] = make(self)
        return made


def flattened(size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int, int]]:
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


def fits_descriptor(heads: Heads) -> bool:
    """Whether one two-dimensional descriptor reaches all heads, whole tiles at a time."""
    size, stride, element_size = heads.size, heads.stride, heads.dtype.itemsize
    if not heads.aligned or size[2] % STRETCH or any(s * element_size % 16 for s in stride[:3]):
        return False
    _, num_heads, length, head_dim = size
    contiguous = (num_heads * length * head_dim, length * head_dim, head_dim, 1)
    strides_agree = (n == 1 or a == b for n, a, b in zip(size, stride, contiguous, strict=True))
    return _heads_within_rows(size, stride) or all(strides_agree)
