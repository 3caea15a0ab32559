"""A thread that hears signals and notices when training stands still.

Signals (SIGTERM, SIGUSR1, SIGINT) ask the run to stop: the loop finishes its step, all ranks agree where to stop
(stop.py), save and leave. They are read from Python's wake-up descriptor, so that they are heard at once although the
main thread may be inside a CUDA call, where its own handlers cannot run.
"""

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
#: A launcher forwards what a scheduler or a terminal has already sent to its processes: within so many seconds it is the
#: same request.
SAME_REQUEST_SECONDS = 1.0
#: A rank that was asked to stop, and whose step does not end, waits for a rank that is gone. It leaves after this or
#: after several times its slowest step.
LEAST_PATIENCE_SECONDS = 60.0


class Sentinel:
    """A context manager around training, on the main thread of a rank.

    Args:
        timeout: seconds without a `beat` after which the process ends itself, with the stacks of its threads in the log.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        #: Called before the process ends itself, with the reason.
        self.on_end: Callable[[str], None] = lambda reason: None
        #: Name of the signal that asked to stop, None if none did.
        self.request: str | None = None
        self._heard_at = 0.0
        self._longest = 0.0
        self._last_beat: float | None = None
        self._previous: dict[int, Any] = {}
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="sentinel", daemon=True)
        self._main = threading.main_thread().ident
        self._closing = False

    def __enter__(self) -> "Sentinel":
        if threading.current_thread() is threading.main_thread():
            # The handlers do nothing: having them is what makes Python write to the descriptor.
            self._previous = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
            signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            # A forked data worker must not speak for its parent.
            os.register_at_fork(after_in_child=_forget_descriptor)
        self._thread.start()
        return self

    def beat(self) -> None:
        """Training moves: called after every step and every batch of an evaluation."""
        now = time.monotonic()
        if self._last_beat is not None:
            self._longest = max(self._longest, now - self._last_beat)
        self._last_beat = now

    def rest(self) -> None:
        """Nothing is expected to move until the next `beat`."""
        self._last_beat = None

    def __exit__(self, *_: object) -> None:
        self._closing = True
        if self._previous:
            signal.set_wakeup_fd(-1)
            for number, handler in self._previous.items():
                signal.signal(number, handler)
        self._writer.send(b"\0")
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def _watch(self) -> None:
        while not self._closing:
            readable, _, _ = select.select([self._reader], [], [], 0.5)
            for number in self._reader.recv(4096) if readable else b"":
                if number in SIGNALS:
                    self._hear(signal.Signals(number))
            last = self._last_beat
            if last is not None and time.monotonic() - last > self._patience() and not self._closing:
                self._end(time.monotonic() - last)

    def _hear(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self.request is None:
            self.request, self._heard_at = number.name, now
            log.warning("%s: stopping after this step, with a checkpoint; a second signal leaves at once", number.name)
        elif now - self._heard_at > SAME_REQUEST_SECONDS:
            log.warning("%s: leaving at once, without a checkpoint", number.name)
            os._exit(128 + number)

    def _patience(self) -> float:
        if self.request is None:
            return self.timeout
        return min(self.timeout, max(LEAST_PATIENCE_SECONDS, 5 * self._longest))

    def _end(self, seconds: float) -> None:
        stacks = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        text = "".join(
            f"\nthread {stacks[identity]}:\n{''.join(traceback.format_stack(frames[identity]))}"
            for identity in sorted(stacks, key=lambda identity: identity != self._main)
            if identity in frames and identity != threading.get_ident()
        )
        waits = any("/torch/distributed/" in f.filename for f in traceback.extract_stack(frames[self._main]))
        reason = (
            f"no step ended for {seconds:.0f} s"
            + (f" after {self.request}" if self.request else " (strategy.timeout_seconds)")
            + ("; this rank waits for another, whose log says where it stands" if waits else "; this rank stands still")
        )
        log.critical("%s. Where its threads are:%s", reason, text)
        self.on_end(reason)
        os._exit(1)


def _forget_descriptor() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
