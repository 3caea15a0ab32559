"""A thread that hears signals and notices when training stands still.

Signals (SIGTERM, SIGUSR1, SIGINT) ask the run to stop: the loop finishes its step, all ranks agree where to stop
(stop.py), save and leave. They are read from Python's wake-up descriptor, so that they are heard at once although the
main thread may be inside a CUDA call, where its own handlers cannot run.

It watches from its start to its end. In between `beat` is called by every stage of the start, every batch that is read,
every step, every batch of an evaluation, and the end of it all. What waits for longer than `timeout`, or a wait for a
checkpoint that lasts half an hour longer, ends the process.

Before the first step a signal ends the process at once: there is nothing to save. Later it ends within 30 s of the
signal, because containers are killed then, if a step, a wait for data or its own end hangs. Only a checkpoint that is
being written may take longer.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch.distributed as dist

from forgetting_transformer import console
from forgetting_transformer.training.faults.peers import MAY_WAIT, STOPPED, WAITS

log = logging.getLogger(__name__)

#: A launcher forwards what a scheduler or a terminal has already sent to its processes: within so many seconds it is
#: the same request.
SAME_REQUEST_SECONDS = 1.0
#: Seconds after a signal for a wait for data, the end of the process, or a step, which may also take several times the
#: slowest one: containers are killed 30 s after a signal.
PATIENCE_SECONDS = 20.0
#: Seconds after a signal for a checkpoint: a flush of gigabytes to a slow disk is one long silence.
WRITER_PATIENCE_SECONDS = 300.0
#: Until the first step has ended every stage of the start may take so much longer than `timeout`: kernels are compiled
#: and tuned, weights are read. So may the writing of a checkpoint.
START_SECONDS = 1800.0
#: Seconds for the last log lines of a process that ends itself: the disk of its log may be what hangs.
LAST_WORDS_SECONDS = 8.0


class Watchdog:
    """A context manager around training, on the main thread of a rank.

    Args:
        timeout: seconds without a `beat` after which the process ends itself, with the stacks
            of its threads in the log.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        #: Called before the process ends itself, with the outcome ("failed" or "preempted") and the reason; returns
        #: the outcome that was noted.
        self.on_end: Callable[[str, str], str] = lambda outcome, reason: outcome
        #: Name of the callback that is running; None if there is none.
        self.callback: Callable[[], str | None] = lambda: None
        #: Name of the signal to stop, None without one.
        self.request: str | None = None
        self._heard_at = 0.0
        self._answer: threading.Thread | None = None
        self._longest = 0.0
        self._last_beat = 0.0
        #: Stage of the start; None once the first step has ended.
        self._stage: str | None = "imports"
        #: A wait for something other than a step: beginning of a message that continues with "for 5 s", and seconds
        #: that it may last beyond `timeout`, and after a signal.
        self._wait: tuple[str, float, float] | None = None
        self._previous: dict[int, Any] = {}
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._closing = False

    def __enter__(self) -> "Watchdog":
        if threading.current_thread() is threading.main_thread():
            # The handlers do nothing: having them is what makes Python write to the descriptor.
            self._previous = {number: signal.signal(number, lambda *_: None) for number in console.SIGNALS}
            signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            # A forked data worker must not act for its parent.
            os.register_at_fork(after_in_child=_forget_descriptor)
        self._last_beat = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        if self._previous:
            signal.set_wakeup_fd(-1)
            for number, handler in self._previous.items():
                signal.signal(number, handler)
        self._writer.send(b"\0")
        self._thread.join()
        if self._answer is not None:
            self._answer.join(LAST_WORDS_SECONDS)
        self._reader.close()
        self._writer.close()

    def enter_stage(self, stage: str | None) -> None:
        """Notes a stage before the first step; None: that step has ended, and from here on `timeout` is the limit."""
        self._last_beat, self._stage = time.monotonic(), stage

    def beat(self) -> None:
        """Notes progress: called after every step and every batch of an evaluation."""
        now = time.monotonic()
        if self._stage is None:
            self._longest = max(self._longest, now - self._last_beat)
        self._last_beat = now

    def closing(self) -> None:
        """Notes the end of training, which is written; the rest, such as sending rows to wandb, may take `timeout`."""
        self.enter_stage(None)
        self._wait = "training was over and the process did not end", 0.0, PATIENCE_SECONDS

    def reading(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Context of a wait for a batch of `what`."""
        return self._waiting(f"no batch of {what} came", 0.0, PATIENCE_SECONDS)

    def waiting_for(self, checkpoint: str) -> contextlib.AbstractContextManager[None]:
        """Context of a wait for the writer of `checkpoint`."""
        return self._waiting(f"{checkpoint} was not written", START_SECONDS, WRITER_PATIENCE_SECONDS)

    @contextlib.contextmanager
    def _waiting(self, *wait: Any) -> Iterator[None]:
        before, self._wait, self._last_beat = self._wait, wait, time.monotonic()
        try:
            yield
        finally:
            self._wait, self._last_beat = before, time.monotonic()

    def _watch(self) -> None:
        while not self._closing:
            readable, _, _ = select.select([self._reader], [], [], 0.5)
            now = time.monotonic()
            for number in self._reader.recv(4096) if readable else b"":
                if number in console.SIGNALS:
                    self._hear(signal.Signals(number), now)
            if self._closing:
                break
            silence = time.monotonic() - self._last_beat
            missing, limit, after_signal = self._patience()
            if self.request and min(silence, now - self._heard_at) > after_signal:
                self._leave(console.PREEMPTED_EXIT_CODE, f"{STOPPED}{self.request}; {missing} for {silence:.0f} s")
            elif silence > limit:
                self._leave(1, f"{missing} for {silence:.0f} s (strategy.timeout_seconds); {self._where()}")

    def _patience(self) -> tuple[str, float, float]:
        """Object of the process's wait, and its longest duration in seconds, without and after a signal."""
        if self._wait is not None:
            missing, extra, after_signal = self._wait
            return missing, self.timeout + extra, after_signal
        name = self.callback()
        callback = f" (callbacks.{name})" if name else ""
        if self._stage is not None:
            return f"the start stood still in {self._stage!r}{callback}", self.timeout + START_SECONDS, 0.0
        return f"no step ended{callback}", self.timeout, max(PATIENCE_SECONDS, 3 * self._longest)

    def _hear(self, number: signal.Signals, now: float) -> None:
        if self.request is None:
            self.request, self._heard_at = number.name, now
            if self._stage is not None:
                reason = f"{STOPPED}{number.name} in {self._stage!r}, before the first step"
                self._leave(console.PREEMPTED_EXIT_CODE, reason)
            said = "stopping after this step, with a checkpoint; a second signal leaves at once"
            self._answer = _aside(lambda: log.warning("%s: %s", number.name, said))
        elif now - self._heard_at > SAME_REQUEST_SECONDS:
            self._leave(128 + number, f"{number.name}, after {self.request}: left at once")

    def _where(self) -> str:
        """Whether this rank makes no progress or waits for another, as far as its stacks show."""
        threads = [frame for name, frame in self._stacks() if name in ("MainThread", "checkpoint")]
        files = {f.f_code.co_filename for frame in threads for f, _ in traceback.walk_stack(frame)}
        if any(file.endswith(("distributed_c10d.py", "faults/stop.py")) for file in files):
            return f"{WAITS}, whose log shows where it is"
        # In a backward pass, or when it asks the device, a rank that waits for another looks like one that hangs.
        return f"this rank makes no progress{f', {MAY_WAIT}' if dist.is_initialized() else ''}"

    @staticmethod
    def _stacks() -> list[tuple[str, FrameType]]:
        """Name and frame of every other thread."""
        frames, own = sys._current_frames(), threading.get_ident()
        return [(t.name, frames[t.ident]) for t in threading.enumerate() if t.ident in frames and t.ident != own]

    def _leave(self, code: int, reason: str) -> None:
        """Ends the process, even where log, status or terminal hang like the run."""
        outcome = "preempted" if code == console.PREEMPTED_EXIT_CODE else "failed"
        noted, stacks = [outcome], self._stacks()

        def note() -> None:
            noted[0] = self.on_end(outcome, reason)

        def say() -> None:
            # with lines of source code, from a disk that may be the one that hangs
            places = "".join(f"\nthread {name}:\n{''.join(traceback.format_stack(f))}" for name, f in stacks)
            log.log(logging.CRITICAL if code == 1 else logging.WARNING, "%s. Where its threads are:%s", reason, places)

        deadline = time.monotonic() + LAST_WORDS_SECONDS
        for thread in (_aside(say), _aside(note)):
            thread.join(max(0.0, deadline - time.monotonic()))
        if outcome == "preempted":
            code = {"preempted": code, "done": 0}.get(noted[0], 1)
            console.report_outcome(noted[0])
        os._exit(code)


def _aside(action: Callable[[], object]) -> threading.Thread:
    """Runs an action that may hang or fail in a thread, without waiting for it."""

    def act() -> None:
        with contextlib.suppress(OSError):
            action()

    thread = threading.Thread(target=act, name="last words", daemon=True)
    thread.start()
    return thread


def _forget_descriptor() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
