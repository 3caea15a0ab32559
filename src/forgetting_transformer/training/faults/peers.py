"""Finds the rank of a job that failed first: the others only see that it is gone, and report that.

Ranks write why they end into the store over which PyTorch connected them. Rank 0, which writes status.json, has the
store in its own process and reads it when it ends itself.
"""

import contextlib
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

#: Words of PyTorch on a rank whose peer is gone.
_CLOSED = re.compile(
    r"(connection|socket) (was )?(closed|reset)|(closed|reset) by peer|remote process exited", re.IGNORECASE
)
#: Words that it uses there or for another reason.
_PERHAPS = re.compile(r"connection|timed? ?out|socket|broken pipe|NCCL|gloo", re.IGNORECASE)
#: Reason of a rank that a signal has stopped.
STOPPED = "stopped by "
#: Reasons of a rank that failed because another did; the last, of a rank that cannot tell.
_ANOTHER = "another rank is gone, and its log says why"
WAITS = "this rank waits for another"
MAY_WAIT = "or waits for another"
#: Seconds that a rank which fails at the same moment may need to report it.
_SECONDS_TO_SPEAK = 3.0


class Peers:
    """The ranks of a job. On one process, and before `join`, there are none, and nothing is done."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self._store: Any = None

    def join(self, rank: int, world_size: int) -> None:
        """Called once by every rank when they are connected."""
        self.rank, self.world_size = rank, world_size
        if world_size > 1:
            self._store = dist.PrefixStore("peers", dist.distributed_c10d._get_default_store())
            self._publish(f"{rank}", f"{os.getpid()} {_machine()}")

    def failed(self, reason: str) -> None:
        """Records that this rank ends, and why. Never raises."""
        self._publish(f"{self.rank} failed", " ".join(reason.split()))

    def ended(self, outcome: str, reason: str) -> tuple[str, str]:
        """Notes that this rank ends itself. Returns the outcome ("failed" or "preempted") and the reason of the job.

        A launcher stops the other ranks with a signal when one has failed: then the job has failed.
        """
        self.failed(reason)
        blame = self.blame(silent=outcome == "failed")
        if blame is None or (outcome == "preempted" and STOPPED in blame):
            return outcome, reason
        return "failed", f"{blame}; {reason}"

    def blame(self, silent: bool = True) -> str | None:
        """The rank that failed first as far as is known, and why; None where all others seem to be there.

        On rank 0 only. With the others the store may be gone, and asking it prints pages.

        Args:
            silent: whether a rank without a recorded reason may be to blame. If not, only one whose process has ended.
        """
        if self.rank != 0 or self._store is None:
            return None
        others = range(1, self.world_size)
        deadline = time.monotonic() + _SECONDS_TO_SPEAK
        while True:
            said = {rank: text for rank in others if (text := self._published(f"{rank} failed"))}
            quiet = [rank for rank in others if rank not in said]
            sure = [rank for rank, text in said.items() if not any(w in text for w in (_ANOTHER, WAITS, MAY_WAIT))]
            if sure:
                return f"rank {sure[0]} {'was' if said[sure[0]].startswith(STOPPED) else 'has failed:'} {said[sure[0]]}"
            if gone := [rank for rank in quiet if is_gone(self._process(rank))]:
                return f"rank {gone[0]} was killed or has crashed"
            if not quiet or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if quiet and silent:
            return f"rank {quiet[0]} hangs, or was killed: it gave no reason"
        perhaps = [rank for rank, text in said.items() if MAY_WAIT in text]
        return f"rank {perhaps[0]} has failed: {said[perhaps[0]]}" if perhaps else None

    def explain(self, error: BaseException) -> str | None:
        """Reason of another rank that is behind `error`; None if the error is this rank's own."""
        if self._store is None or not isinstance(error, RuntimeError):
            return None
        text, ours = str(error), type(error).__module__.partition(".")[0] == __name__.partition(".")[0]
        closed = _CLOSED.search(text) is not None
        if ours or not (closed or _PERHAPS.search(text)):
            return None
        blame = self.blame(silent=closed)
        if blame is None and not closed:
            return None
        return f"{blame or _ANOTHER} (seen here as: {text.strip().splitlines()[0][:300]})"

    def _process(self, rank: int) -> int:
        """Number of its process if that is on this machine, and in this container; 0 elsewhere."""
        process, _, machine = (self._published(f"{rank}") or "").partition(" ")
        return int(process) if machine == _machine() else 0

    def _publish(self, key: str, value: str) -> None:
        with contextlib.suppress(Exception):  # the store may be what is gone
            if self._store is not None:
                self._store.set(key, value)

    def _published(self, key: str) -> str | None:
        with contextlib.suppress(Exception):
            if self._store.check([key]):
                return self._store.get(key).decode(errors="replace")
        return None


def _machine() -> str:
    """Name of the machine, and on it the container, in which a process number means the same."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def is_gone(process: int) -> bool:
    """Whether a process of this machine has ended, reaped by its parent or not; False where Linux does not tell."""
    if not process or not Path("/proc/self/stat").exists():
        return False
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
