"""Norms of every parameter and its gradient, for the logs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def parameter_norms(model: nn.Module) -> dict[str, float]:
    """{"pnorm/<name>": L2 norm of the parameter, "gnorm/<name>": of its gradient after clipping}.

    Sharded parameters are never gathered: every rank squares its own shard, and one reduction of two numbers a
    parameter adds them up. Called by all ranks; waits for the device once.
    """
    named = list(model.named_parameters())
    sharded = any(isinstance(p, DTensor) for _, p in named)
    tensors = {f"pnorm/{name}": p for name, p in named}
    tensors |= {f"gnorm/{name}": p.grad for name, p in named if p.grad is not None}
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors.values()]
    squares = torch.stack([torch.linalg.vector_norm(t) for t in local]).double() ** 2
    if sharded:
        dist.all_reduce(squares)
    return dict(zip(tensors, squares.sqrt().tolist(), strict=True))


@torch.no_grad()
def all_finite(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether every weight and every moment is finite, on all ranks. Called by all ranks; waits for the device once."""
    tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if torch.is_tensor(t)]
    finite = torch.isfinite(torch.stack(torch._foreach_norm([t for t in local if t.numel()]))).all().float()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(finite, dist.ReduceOp.MIN)
    return bool(finite.item())
