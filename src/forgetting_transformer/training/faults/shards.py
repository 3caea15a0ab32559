"""Part of a sharded tensor that a rank holds: under fsdp one shard of the only copy, under hsdp one shard of a copy."""

import math

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


def local(tensor: Tensor) -> Tensor:
    """This rank's part of the tensor; of one that is not sharded all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_element(tensor: Tensor) -> int:
    """Position in the whole tensor of the first element that this rank holds."""
    if not isinstance(tensor, DTensor):
        return 0
    dimension = tensor.placements.index(Shard(0)) if Shard(0) in tensor.placements else -1
    if any(not isinstance(p, Replicate) for k, p in enumerate(tensor.placements) if k != dimension):
        raise NotImplementedError(f"tensors that are sharded as {tensor.placements}")
    # FSDP2 gives every rank ceil(rows / ranks) rows, the last ones what is left.
    rows = math.ceil(tensor.shape[0] / tensor.device_mesh.size(dimension))
    position = tensor.device_mesh.get_local_rank(dimension)
    return min(rows * position, tensor.shape[0]) * math.prod(tensor.shape[1:])


def is_counted(tensor: Tensor) -> bool:
    """Whether this rank's part belongs to a sum over all ranks in which every element counts once: that of the first
    copy does."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    return all(
        tensor.device_mesh.get_local_rank(k) == 0 for k, p in enumerate(tensor.placements) if isinstance(p, Replicate)
    )
