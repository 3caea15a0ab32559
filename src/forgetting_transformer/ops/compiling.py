"""Compilation of a model's parts, all with the same settings, and to the same arithmetic at every start.

TorchInductor times some of its choices on the GPU: how a reduction is tiled, whether a matrix product is padded. Both
change the order in which numbers are added, so that two starts of one run, with nothing in the disk caches, could
differ in the last bits. Its `deterministic` option takes those choices by rule; elementwise kernels, whose results do
not depend on their tiles, are still timed.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

OPTIONS: dict[str, Any] = {"deterministic": True}
#: True while the running code is recorded as CUDA graphs, or replayed.
_is_recording = False


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Registers a function that launches kernels as `torch.ops.forgetting_transformer.<name>`; it changes no input.

    The function takes any strides: what a kernel reads as one piece it makes contiguous itself, since callers cannot.
    The layout of its outputs depends on shapes only. So compiled code may pass inputs on in their memory layout.
    Without this it would keep to the layout of the eager model, and since TorchInductor pads the rows of its matrix
    products, that would cost a copy of each slice of them.
    """
    tags = (torch.Tag.flexible_layout,)
    return torch.library.custom_op(f"forgetting_transformer::{name}", mutates_args=(), tags=tags)


def compiled(function: Callable[..., Any], recordable: bool = False) -> Callable[..., Any]:
    """`function` under torch.compile. Each new shape compiles again at its first call, which takes seconds.

    Args:
        recordable: `recording` has an effect on it.
    """
    plain = torch.compile(function, dynamic=False, options=dict(OPTIONS))
    if not recordable:
        return plain
    recorded = torch.compile(function, dynamic=False, options=OPTIONS | {"triton.cudagraphs": True})

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (recorded if _is_recording else plain)(*args, **kwargs)

    return run


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Run recordable functions as CUDA graphs: warmed up when first called, recorded at the second time and
    replayed from then on. The kernels are the same, and so is every bit.

    One forward and backward pass. The graphs write their outputs and gradients into the same memory again: copy those
    that are still needed first. Outside of it nothing is recorded or overwritten.
    """
    global _is_recording
    torch.compiler.cudagraph_mark_step_begin()
    _is_recording = True
    try:
        yield
    finally:
        _is_recording = False
