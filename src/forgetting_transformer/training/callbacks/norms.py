"""Norms of every parameter and its gradient, for the logs."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from forgetting_transformer import metric_names as names
from forgetting_transformer.training.callbacks.base import Callback, Interval
from forgetting_transformer.training.faults.shards import is_counted, local

if TYPE_CHECKING:
    from forgetting_transformer.training.interface import TrainerInterface


class Norms(Callback):
    """Writes them to norm.jsonl with every line of the log."""

    name = "norms"
    all_ranks = True

    def on_interval(self, trainer: "TrainerInterface", kind: Interval) -> None:
        if kind == "log":
            trainer.report(names.NORM, parameter_norms(trainer.model.module))


@torch.no_grad()
def parameter_norms(model: nn.Module) -> dict[str, float]:
    """{"pnorm/<name>": L2 norm of the parameter, "gnorm/<name>": of its gradient after clipping}.

    Sharded parameters are never gathered: every rank squares its own shard, and one reduction of two numbers a
    parameter adds them up. Called by all ranks; waits for the device once.
    """
    named = list(model.named_parameters())
    sharded = any(isinstance(p, DTensor) for _, p in named)
    tensors: dict[str, torch.Tensor] = {names.name_of(names.PARAMETER_NORM, name): p for name, p in named}
    tensors |= {
        names.name_of(names.GRADIENT_NORM_OF_PARAMETER, name): p.grad for name, p in named if p.grad is not None
    }
    squares = torch.stack([torch.linalg.vector_norm(local(t)) for t in tensors.values()]).double() ** 2
    if sharded:
        squares *= torch.tensor([is_counted(t) for t in tensors.values()], device=squares.device)
        dist.all_reduce(squares)
    return dict(zip(tensors, squares.sqrt().tolist(), strict=True))
