"""Numbers that the device computes at a step and the host reads a step or two later, without waiting for them."""

import collections
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Delayed(Generic[T]):
    """Tensors on their way to the host, in their order, each with a label."""

    def __init__(self) -> None:
        self._pending: collections.deque[tuple[T, Tensor, torch.cuda.Event | None]] = collections.deque()

    def send(self, label: T, tensor: Tensor) -> None:
        """Copies the tensor behind what the device was given so far."""
        event = None
        if tensor.is_cuda:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            tensor = host.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._pending.append((label, tensor, event))

    def arrived(self, wait: bool = False) -> Iterator[tuple[T, Tensor]]:
        """Values that have arrived since the last call; with `wait`, all of them, for which the host waits."""
        while self._pending:
            event = self._pending[0][2]
            if event is not None and not event.query():
                if not wait:
                    return
                event.synchronize()
            label, tensor, _ = self._pending.popleft()
            yield label, tensor
