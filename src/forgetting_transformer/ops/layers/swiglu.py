"""The activation of gated MLPs, `silu(gate) · up` (Shazeer 2020).

On a GPU a Triton kernel does it for many tokens (`swiglu_triton.py`), elsewhere PyTorch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.ops import backends


def swiglu(h: Tensor) -> Tensor:
    """Return `silu(gate) · up`, `(…, F)`, in h's dtype.

    Args:
        h: `(…, 2F)`, gate and up side by side, in this order.
    """
    if h.shape[-1] % 2:
        raise ValueError(f"h has shape {tuple(h.shape)}; its last axis holds gate and up, so it must be even")
    if _takes_kernel(h):
        out = backends.attempt("swiglu", torch.ops.forgetting_transformer.swiglu, h)
        if out is not None:
            return out
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def _takes_kernel(h: Tensor) -> bool:
    return h.is_cuda and kernel_serves(h.dtype, h.shape[:-1].numel(), h.device.index)


def kernel_serves(dtype: torch.dtype, tokens: int, device_index: int) -> bool:
    """Whether the Triton kernels can serve such inputs on this GPU, and pay."""
    fits = dtype.itemsize <= 4 and tokens >= backends.MIN_KERNEL_TOKENS
    return fits and backends.has_triton("swiglu", "forgetting_transformer.ops.layers.swiglu_triton", device_index)
