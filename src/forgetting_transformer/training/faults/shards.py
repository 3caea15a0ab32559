"""Part of a sharded tensor that a rank holds: under fsdp one shard of the only copy, under hsdp one shard of a copy."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def local(tensor: Tensor) -> Tensor:
    """This rank's part of the tensor; of one that is not sharded all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_counted(tensor: Tensor) -> bool:
    """Whether this rank's part belongs to a sum over all ranks in which every element counts once: that of the first
    copy does."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    return all(
        tensor.device_mesh.get_local_rank(k) == 0 for k, p in enumerate(tensor.placements) if isinstance(p, Replicate)
    )
