"""A copy of a run's tensors in the host's memory, so that they can be written while training changes them.

The copy is made once and filled again at every save: it costs the bytes of what this rank writes, for AdamW in fp32 12
bytes per parameter divided by the number of ranks. On a GPU its pages are locked, so that the copy engine fills them at
the speed of the link, in the order of the stream: kernels launched later cannot change what is being copied, and the
host need not wait.
"""

import contextlib
import logging
import mmap

import torch
from torch import Tensor

from forgetting_transformer.training.faults.shards import local

log = logging.getLogger(__name__)


class HostCopy:
    """Room for tensors by name, made when they come for the first time."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._locked: list[Tensor] = []

    @torch.no_grad()
    def take(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
        """Copies `tensors`, plain or sharded; returns the copies, and the event after which they are whole (on a CPU
        they are at once). They hold until the next call."""
        event = None
        for name, tensor in tensors.items():
            copy = self._copies.get(name)
            if copy is None or copy.shape != tensor.shape:
                copy = self._copies[name] = self._room_for(tensor)
            local(copy).copy_(local(tensor), non_blocking=True)
        if any(local(tensor).is_cuda for tensor in tensors.values()):
            event = torch.cuda.Event()
            event.record()
        return {name: self._copies[name] for name in tensors}, event

    def _room_for(self, tensor: Tensor) -> Tensor:
        # A sharded tensor: this rank's shard, still marked as a shard of the whole.
        copy = torch.empty_like(tensor, device="cpu")
        if local(tensor).is_cuda and local(copy).nbytes:
            local(copy).data = self._locked_like(local(copy))
        return copy

    def _locked_like(self, like: Tensor) -> Tensor:
        # Not `pin_memory=True`, whose allocator rounds every tensor up to a power of two. Separate pages, because a
        # page can be locked once; and shared with forked data workers, because locked pages must not move when one
        # of them writes.
        pages = own_pages(like)
        if int(torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), pages.nbytes, 0)) == 0:
            self._locked.append(pages)
            return pages
        if not self._locked:
            log.warning("the system does not lock memory for checkpoints: copying to it will be slower")
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # takes the error away, which the next kernel would report
        return pages

    def close(self) -> None:
        for copy in self._locked:
            torch.cuda.cudart().cudaHostUnregister(copy.data_ptr())
        self._locked, self._copies = [], {}


def own_pages(like: Tensor) -> Tensor:
    """An empty tensor of the same shape and type, in memory pages that it shares with no other."""
    memory = mmap.mmap(-1, like.nbytes)
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel()).view(like.shape)
