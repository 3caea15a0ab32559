"""Lookup of token embeddings, whose gradient has the same bits in every run."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _Lookup(torch.autograd.Function):
    """`weight_VE[ids_BT]`. On CUDA PyTorch adds the gradients of frequent words in no fixed order unless told to."""

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


class Embedding(nn.Embedding):
    """`nn.Embedding` whose gradient has the same bits in every run, also where few words fill many positions."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not self.weight.is_cuda:
            return super().forward(input)
        return lookup(self.weight, input, -1 if self.padding_idx is None else self.padding_idx)
