"""Which rank a failure began on, for the ranks that only see that another one is gone.

What a rank sees then is a connection that was closed, or a collective operation that did not end. Each rank leaves who
it is, and why it fails, in the store over which the processes found each other. A rank that was killed left no reason:
on the same machine its process is looked for.
"""

import contextlib
import os
import re
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

#: What PyTorch says on a rank whose peer is gone, and what it may say then.
_CLOSED = re.compile(
    r"(connection|socket) (was )?(closed|reset)|(closed|reset) by peer|remote process exited", re.IGNORECASE
)
_PERHAPS = re.compile(r"connection|timed? ?out|socket|broken pipe|NCCL|gloo", re.IGNORECASE)
#: What a rank says that was not the first to fail.
_ANOTHER = "another rank is gone, and its log says why"
#: A connection ends a moment before the process behind it is seen to have ended.
_SECONDS_TO_DIE = 3.0
#: All ranks have just found each other when they say who they are. One that takes longer is not looked after.
_SECONDS_TO_JOIN = 60.0


class Peers:
    """The ranks of a job. On one process, and before `join`, there are none, and nothing is done."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self._store: Any = None
        #: Processes of the other ranks that this one can see: rank -> pid.
        self._visible: dict[int, int] = {}

    def join(self, rank: int, world_size: int) -> None:
        """Called once by every rank when they are connected."""
        self.rank, self.world_size = rank, world_size
        if world_size > 1:
            self._store = dist.PrefixStore("peers", dist.distributed_c10d._get_default_store())
            self._publish(f"{rank}", f"{os.getpid()} {_place()}")
            self._look_around()

    def _look_around(self) -> None:
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        with contextlib.suppress(Exception):  # a rank that is gone already: the next collective operation tells
            self._store.wait([f"{rank}" for rank in others], timedelta(seconds=_SECONDS_TO_JOIN))
            for rank in others:
                process, _, place = (self._published(f"{rank}") or "").partition(" ")
                if place == _place() and not _is_gone(int(process)):
                    self._visible[rank] = int(process)

    def gone(self) -> int | None:
        """A rank on this machine whose process has ended; None if there is none. Asks nobody, so it cannot hang."""
        return next((rank for rank, process in self._visible.items() if _is_gone(process)), None)

    def failed(self, reason: str) -> None:
        """This rank ends, and why. Never raises."""
        self._publish(f"{self.rank} failed", " ".join(reason.split()))

    def blame(self, wait: bool = False) -> str | None:
        """The rank that failed first as far as can be told, and why; None where all others seem to be there.

        On rank 0 only, which writes the status. With the others the store may be gone, and asking it prints pages.

        Args:
            wait: for a moment, because one of them is known to be gone.
        """
        if self.rank != 0:
            return None
        deadline = time.monotonic() + (_SECONDS_TO_DIE if wait else 0.0)
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        while self._store is not None:
            for rank in others:
                reason = self._published(f"{rank} failed")
                if reason and _ANOTHER not in reason:
                    return f"rank {rank} has failed: {reason}"
            for rank in others:
                process, _, place = (self._published(f"{rank}") or "").partition(" ")
                if process and place == _place() and _is_gone(int(process)):
                    return f"rank {rank} (process {process} on {socket.gethostname()}) was killed or has crashed"
            if time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        return None

    def explain(self, error: BaseException) -> str | None:
        """What is behind `error` if another rank is; None if it is this rank's own."""
        if self._store is None or not isinstance(error, RuntimeError):
            return None
        text, ours = str(error), type(error).__module__.partition(".")[0] == __name__.partition(".")[0]
        if ours or not (_CLOSED.search(text) or _PERHAPS.search(text)):
            return None
        blame = self.blame(wait=True)
        if blame is None and not _CLOSED.search(text):
            return None
        first = text.strip().splitlines()[0][:300]
        return f"{blame or _ANOTHER} (seen here as: {first})"

    def _publish(self, key: str, value: str) -> None:
        with contextlib.suppress(Exception):  # the store may be what is gone
            if self._store is not None:
                self._store.set(key, value)

    def _published(self, key: str) -> str | None:
        with contextlib.suppress(Exception):
            if self._store.check([key]):
                return self._store.get(key).decode(errors="replace")
        return None


def _place() -> str:
    """Where a process number means the same: this machine, and on it this container."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _is_gone(process: int) -> bool:
    """Whether a process of this machine has ended, noticed by its parent or not. Elsewhere than on Linux: False."""
    if not Path("/proc/self/stat").exists():
        return False
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"
