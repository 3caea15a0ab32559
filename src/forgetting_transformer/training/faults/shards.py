"""Part of a sharded tensor that a rank holds."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of the tensor; of one that is not sharded all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
