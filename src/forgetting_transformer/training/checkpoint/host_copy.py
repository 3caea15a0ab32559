"""A copy of a run's tensors in the host's memory, so that they can be written while training changes them.

The copy is made once and filled again at every save: it costs the bytes of what this rank writes, for AdamW in fp32 12
bytes per parameter divided by the number of ranks. On a GPU its pages are locked, so that the copy engine fills them at
the speed of the link, in the order of the stream: kernels launched later cannot change what is being copied, and the
host need not wait.
"""

import contextlib
import logging
import mmap
import threading

import torch
from torch import Tensor

from forgetting_transformer.training.faults.shards import local

log = logging.getLogger(__name__)


class HostCopy:
    """Not for several threads at once, except that `reserve` works beside the training loop."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._copies: dict[str, Tensor] = {}
        self._locked: list[Tensor] = []
        self._reserving: threading.Thread | None = None

    def reserve(self, tensors: dict[str, Tensor]) -> None:
        """Makes room in a thread, because locking ten gigabytes of pages takes seconds; `take` waits for it."""

        def reserve() -> None:
            if self._device is not None:
                torch.cuda.set_device(self._device)  # a thread begins on GPU 0
            self._reserve(tensors)

        self._reserving = threading.Thread(target=reserve, name="reserve", daemon=True)
        self._reserving.start()

    @torch.no_grad()
    def take(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
        """Copies `tensors`, plain or sharded; returns the copies, and the event after which they are whole (on a CPU
        they are at once). They hold until the next call."""
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        self._reserve(tensors)
        on_gpu = False
        for name, tensor in tensors.items():
            source = local(tensor)
            on_gpu |= source.is_cuda
            local(self._copies[name]).copy_(source, non_blocking=True)
        event = None
        if on_gpu:
            event = torch.cuda.Event()
            event.record()
        return {name: self._copies[name] for name in tensors}, event

    @property
    def reserving(self) -> bool:
        return self._reserving is not None and self._reserving.is_alive()

    @torch.no_grad()
    def _reserve(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name not in self._copies or self._copies[name].shape != tensor.shape:
                # Of a sharded tensor: this rank's shard, still marked as a shard of the whole.
                copy = torch.empty_like(tensor, device="cpu")
                if local(tensor).is_cuda and local(copy).nbytes:
                    local(copy).data = self._locked_like(local(copy))
                self._copies[name] = copy

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
            torch.zeros(1, device=self._device)  # takes the error away, which the next kernel would report
        return pages

    def close(self) -> None:
        if self._reserving is not None:
            self._reserving.join()
        for copy in self._locked:
            torch.cuda.cudart().cudaHostUnregister(copy.data_ptr())
        self._locked, self._copies = [], {}


def own_pages(like: Tensor) -> Tensor:
    """An empty tensor of the same shape and type, in memory pages that it shares with no other."""
    memory = mmap.mmap(-1, like.nbytes)
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel()).view(like.shape)
