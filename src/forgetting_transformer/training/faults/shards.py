"""Part of a sharded tensor that a rank holds."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
