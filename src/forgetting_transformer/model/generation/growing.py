"""A tensor with room at its end, so that a new token is written after the old ones without copying them.

Axes: `forgetting_transformer/ops/__init__.py`. A buffer has room for more positions than N.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class GrowingTensor:
    """A tensor that grows at the end of its third axis and may shrink at both, in a buffer `(B, G, room, …)`.

    A full buffer is replaced by one with room for half as many positions again. So however many tokens come one by
    one, each is copied three times or less on average. The first positions stay in the tensor that was passed, which is
    never written to: a cache without additions costs nothing.

    Args:
        x: the first positions `(B, G, T, …)`.
    """

    GROWTH = 1.5
    MIN_ROOM = 64  # positions
    # Capacities are multiples of this, so that kernels are compiled for one kind of length.
    STEP = 16
    _buffer: Tensor

    def __init__(self, x: Tensor) -> None:
        self._replace(x, is_own=False)

    @property
    def contents(self) -> Tensor:
        """Positions that are held `(B, G, N, …)`, a view. New ones overwrite in it those that were taken back."""
        return self._buffer[:, :, self._start : self._stop]

    @property
    def length(self) -> int:
        """N, positions that are held."""
        return self._stop - self._start

    @property
    def capacity(self) -> int:
        """Positions that `whole` has room for, those that are held included."""
        return self._buffer.shape[2] - self._start

    @property
    def whole(self) -> Tensor:
        """`contents` and the room behind them, a view."""
        return self._buffer[:, :, self._start :]

    def reserve(self) -> int:
        """Make room for a few dozen more positions, in a buffer that may be written; returns for how many."""
        if self.capacity - self.length < self.MIN_ROOM // 2 or self._must_copy():
            self._grow(self.length)
        return self.capacity - self.length

    def write(self, at: Tensor, x: Tensor) -> None:
        """Write a position `(B, G, 1, …)` at `at` `(1,)` in `whole`; `advance` then counts it."""
        self.whole.index_copy_(2, at, x.to(self._buffer.dtype))

    def advance(self) -> None:
        self._stop += 1

    def append(self, x: Tensor) -> None:
        """Add positions `(B, G, T, …)` at the end."""
        if torch.is_grad_enabled():
            # Earlier calls saved views of the buffer for their backward pass; writing into it would destroy them.
            self._replace(torch.cat((self.contents, x), dim=2), is_own=False)
            return
        if self._stop + x.shape[2] > self._buffer.shape[2] or self._must_copy():
            self._grow(self.length + x.shape[2])
        self._buffer[:, :, self._stop : self._stop + x.shape[2]] = x
        self._stop += x.shape[2]

    def drop_first(self, count: int) -> None:
        """Forget the first positions. Their memory is given back when the buffer is full."""
        self._start += count
        if count and self._stop == self._buffer.shape[2]:
            self._replace(self.contents.clone(), is_own=True)

    def drop_last(self, count: int) -> None:
        self._stop -= count

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a function of the batch axis, which returns a new tensor."""
        self._buffer, self._is_own = fn(self._buffer), True

    def _must_copy(self) -> bool:
        # Buffers made in inference mode can be written in inference mode only.
        return not self._is_own or (self._buffer.is_inference() and not torch.is_inference_mode_enabled())

    def _grow(self, needed: int) -> None:
        held = self.contents
        capacity = max(int(needed * self.GROWTH), needed + self.MIN_ROOM) // self.STEP * self.STEP
        buffer = held.new_empty((*held.shape[:2], capacity, *held.shape[3:]))
        buffer[:, :, : held.shape[2]] = held
        self._replace(buffer, is_own=True)
        self._stop = held.shape[2]

    def _replace(self, buffer: Tensor, *, is_own: bool) -> None:
        self._buffer, self._is_own = buffer, is_own
        self._start, self._stop = 0, buffer.shape[2]
