"""A copy of a run's tensors in the host's memory, so that they can be written while training changes them.

The copy is made once and filled again at every save: it costs the bytes of what this rank writes, for AdamW in fp32 12
bytes per parameter divided by the number of ranks. For a GPU it is in pinned memory, of which PyTorch gives each tensor
the next power of two. The copy engine fills it in the order of the stream: kernels launched later cannot change what is
being copied, and the host need not wait.
"""

import torch
from torch import Tensor

from forgetting_transformer.training.faults.shards import local


class HostCopy:
    """Memory for tensors by name, allocated when they first come."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
        """Copies `tensors`, plain or sharded; returns the copies, and the event after which they are whole (on a CPU
        they are at once). They are valid until the next call."""
        event = None
        for name, tensor in tensors.items():
            copy = self._copies.get(name)
            if copy is None or copy.shape != tensor.shape:
                copy = self._copies[name] = _room_for(tensor)
            local(copy).copy_(local(tensor), non_blocking=True)
        if any(local(tensor).is_cuda for tensor in tensors.values()):
            event = torch.cuda.Event()
            event.record()
        return {name: self._copies[name] for name in tensors}, event


def _room_for(tensor: Tensor) -> Tensor:
    # this rank's shard of a sharded tensor, still marked as a shard of the whole
    copy = torch.empty_like(tensor, device="cpu")
    if local(tensor).is_cuda and local(copy).nbytes:
        local(copy).data = torch.empty_like(local(copy), pin_memory=True)
    return copy
