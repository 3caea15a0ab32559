"""Finds ranks with wrong weights or moments, as failing memory or a failing GPU leaves them.

With data parallelism (ddp) all ranks hold the same. Every `strategy.compare_steps` steps, and before every checkpoint,
the digests of all ranks are gathered on all of them. Under fsdp and on one process nothing is held twice.

The digest of a tensor is the sum of the bits of its elements, taken as signed integers, modulo 2^64. A sum of integers
does not depend on the order of additions, so it is the same whatever device and kernel computes it, and an element that
changes alone changes it. Errors that all ranks share are not found: a wrong gradient of one rank, once averaged, is in
the weights of all.
"""

import collections
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def compare_ranks(batch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Difference of weights or moments between ranks, the same on all of them; None if there is none.

    Called by all ranks after the same step, `batch`; waits for the device.
    """
    tensors = weights_and_moments(model, optimizer)
    mine = digests(tensors.values())
    gathered = mine.new_empty(dist.get_world_size(), len(mine))
    dist.all_gather(list(gathered.unbind()), mine)
    return judge(batch, list(tensors), gathered)


def judge(batch: int, names: Sequence[str], table: Tensor) -> str | None:
    """The ranks that differ from the majority, or, without one, from the first rank, and where; None if none does.

    Args:
        batch: steps that had been made then.
        table: digests, (ranks, tensors), whose rows should be equal.
    """
    rows = [tuple(row) for row in table.tolist()]
    usual, count = collections.Counter(rows).most_common(1)[0]
    if count == len(rows):
        return None
    if majority := count > len(rows) / 2:
        ranks = [rank for rank, row in enumerate(rows) if row != usual]
    else:
        usual = rows[0]
        ranks = [0, *(rank for rank, row in enumerate(rows) if row != usual)]
    wrong = next(name for k, name in enumerate(names) if any(rows[rank][k] != usual[k] for rank in ranks))
    listed = ", ".join(map(str, ranks))
    who = f"rank(s) {listed} differ from the other ranks" if majority else f"ranks {listed} differ"
    return f"{who} in {wrong} after step {batch:,}"


def weights_and_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments by the names that a checkpoint gives them."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"model.{name}": parameter for parameter, name in names.items()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if torch.is_tensor(value):
                tensors[f"optimizer.state.{names[parameter]}.{key}"] = value
    return tensors


@torch.no_grad()
def digests(tensors: Iterable[Tensor]) -> Tensor:
    """Digests of the tensors: (K,) int64 on the device of the first."""
    held = [tensor.detach() for tensor in tensors]
    bits = (tensor.contiguous().view(-1).view(_BITS[tensor.element_size()]) for tensor in held)
    return torch.stack([one.sum(dtype=torch.int64).to(held[0].device) for one in bits])
