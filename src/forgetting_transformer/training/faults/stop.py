"""Lets all ranks stop after the same step, although each hears a signal, or sees a bad step, at its own time."""

from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist


class Stop(IntEnum):
    """Reason to stop; where ranks differ, the greatest counts."""

    NO = 0
    PREEMPTED = 1
    BAD_STEPS = 2


class Vote:
    """A vote of all ranks at every step, which neither device nor host waits for.

    The ranks' wishes are combined over a gloo group while the next step is under way, so a wish takes effect one step
    later; with one process, at once. Every rank must call `cast` equally often.
    """

    def __init__(self, world_size: int, timeout: timedelta | None = None) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timeout) if world_size > 1 else None
        self._work: dist.Work | None = None
        self._wish = torch.zeros((), dtype=torch.int32)

    def cast(self, wish: Stop) -> Stop:
        """Casts this rank's wish; returns the combined wish of all ranks at the call before."""
        if self._group is None:
            return wish
        agreed = Stop.NO
        if self._work is not None:
            self._work.wait()
            agreed = Stop(int(self._wish))
        self._wish = torch.tensor(wish, dtype=torch.int32)
        self._work = dist.all_reduce(self._wish, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return agreed

    def wait_for_all(self) -> None:
        """Returns on every rank once all have come here."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._group is not None:
            dist.barrier(group=self._group)
