"""Which rank a failure began on, for the ranks that only see that another one is gone.

What a rank sees then is a connection that was closed, or a collective operation that did not end. Each rank leaves who
it is, and why it fails, in the store over which the processes found each other. A rank that was killed left no reason,
and one that was stopped (SIGSTOP, a debugger) cannot: on the same machine their processes are looked at.
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
#: A rank that a signal has stopped, and not an error, says so.
STOPPED = "stopped by "
#: What a rank says that was not the first to fail.
_ANOTHER = "another rank is gone, and its log says why"
#: What the sentinel of such a rank says, if it knows, and if it cannot know.
WAITS = "this rank waits for another"
PERHAPS_WAITS = "or waits for another"
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
                if place == _place() and not is_gone(int(process)):
                    self._visible[rank] = int(process)

    def gone(self) -> int | None:
        """A rank on this machine whose process has ended; None if there is none. Asks nobody, so it cannot hang."""
        return next((rank for rank, process in self._visible.items() if is_gone(process)), None)

    def failed(self, reason: str) -> None:
        """This rank ends, and why. Never raises."""
        self._publish(f"{self.rank} failed", " ".join(reason.split()))

    def ended(self, outcome: str, reason: str) -> tuple[str, str]:
        """Notes that this rank ends itself. Returns the outcome ("failed" or "preempted") and the reason of the job.

        A launcher stops the other ranks with a signal when one has failed: then the job has failed.
        """
        blame = self.blame()
        self.failed(reason)
        if blame is None or (outcome == "preempted" and STOPPED in blame):
            return outcome, reason
        return "failed", f"{blame}; {reason}"

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
            reasons = {rank: self._published(f"{rank} failed") or "" for rank in others}
            told = {rank: text for rank, text in reasons.items() if text and not _for_another(text)}
            sure = [rank for rank, text in told.items() if PERHAPS_WAITS not in text]
            if not sure and (seen := self._seen([rank for rank in others if not reasons[rank]])):
                return seen
            if first := (sure or list(told))[:1]:
                said = told[first[0]]
                return f"rank {first[0]} {'was' if said.startswith(STOPPED) else 'has failed:'} {said}"
            if time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        return None

    def _seen(self, silent: list[int]) -> str | None:
        """Of ranks that did not say why they fail, one whose process on this machine has ended or is stopped."""
        for states, what in (("ZX", "was killed or has crashed"), ("Tt", "is stopped, as by SIGSTOP or a debugger")):
            for rank in silent:
                process, _, place = (self._published(f"{rank}") or "").partition(" ")
                if process and place == _place() and _state(int(process)) in states:
                    return f"rank {rank} (process {process} on {socket.gethostname()}) {what}"
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


def _for_another(reason: str) -> bool:
    """Whether a rank that ends so was not the first to fail."""
    return _ANOTHER in reason or WAITS in reason


def is_gone(process: int) -> bool:
    """Whether a process of this machine has ended, noticed by its parent or not. Elsewhere than on Linux: False."""
    return _state(process) in "ZX"


def _state(process: int) -> str:
    """The letter that Linux has for it: "T" or "t" if it is stopped, "Z" or "X" if it has ended. Elsewhere "?"."""
    if not Path("/proc/self/stat").exists():
        return "?"
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
