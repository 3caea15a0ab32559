"""How parts of a model are compiled: every part alike, and to the same arithmetic at every start.

TorchInductor times some of its choices on the GPU: how a reduction is tiled, whether a matrix product is padded. Both
change the order in which numbers are added, so that two starts of one run, with nothing in the disk caches, could
differ in the last bits. Its `deterministic` option takes those choices by rule; elementwise kernels, whose results do
not depend on their tiles, are still timed.
"""

from collections.abc import Callable
from typing import Any

import torch

OPTIONS: dict[str, Any] = {"deterministic": True}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` under torch.compile. Each new shape compiles again at its first call, which takes seconds."""
    return torch.compile(function, dynamic=False, options=dict(OPTIONS))
