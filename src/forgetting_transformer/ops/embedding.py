"""Embedding whose gradient has the same bits in every run.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Lookup(torch.autograd.Function):
    """`weight_VE[ids_BT]`. On CUDA, PyTorch by default adds the gradients of frequent words in no fixed order."""

    @staticmethod
    def forward(ctx: Any, weight_VE: Tensor, ids_BT: Tensor, padding_idx: int) -> Tensor:
        ctx.save_for_backward(ids_BT)
        ctx.words, ctx.padding_idx = len(weight_VE), padding_idx
        return torch.embedding(weight_VE, ids_BT, padding_idx)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_BTE: Tensor) -> tuple[Tensor, None, None]:
        (ids_BT,) = ctx.saved_tensors
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            d_VE = torch.ops.aten.embedding_dense_backward(d_BTE, ids_BT, ctx.words, ctx.padding_idx, False)
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        return d_VE, None, None


lookup = _Lookup.apply
