"""A thread that hears signals and notices when training stands still.

Signals (SIGTERM, SIGUSR1, SIGINT) ask the run to stop: the loop finishes its step, all ranks agree where to stop
(stop.py), save and leave. They are read from Python's wake-up descriptor, so that they are heard at once although the
main thread may be inside a CUDA call, where its own handlers cannot run.

It watches from its start to its end. Whatever waits in between says so by `beat`: every stage of the start, every
batch that is read, every step, every batch of an evaluation, while a checkpoint is waited for every time that bytes of
it were written, and the end of it all.

Before the first step a signal ends the process at once: there is nothing to save. Later it ends within 30 s of the
signal, because containers are killed then, if a step, a wait for data or its own end hangs. Only a checkpoint that is
being written may take longer.
"""

import contextlib
import logging
import math
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch.distributed as dist

from forgetting_transformer import signals
from forgetting_transformer.data.worker import shared_memory_hint
from forgetting_transformer.training.faults import peers

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
#: A launcher forwards what a scheduler or a terminal has already sent to its processes: within so many seconds it is
#: the same request.
SAME_REQUEST_SECONDS = 1.0
#: A process that was asked to stop, and whose step does not end, leaves after this or after several times its slowest
#: step: containers are killed 30 s after a signal.
STEP_PATIENCE_SECONDS = 25.0
#: The same for a wait for data, and for the end of the process.
READER_PATIENCE_SECONDS = 20.0
#: The same for a checkpoint of which no byte is written: a flush of many gigabytes to a slow disk is one long silence.
LEAST_WRITER_PATIENCE_SECONDS = 300.0
#: A longer wait for data is a line in the log, once.
LONG_READ_SECONDS = 60.0
#: A rank whose peer's process has ended notices that by itself: a connection was closed. Inside of a CUDA call, where
#: it waits for the peer's NCCL, it does not; then it is ended after so long, before a launcher that tidies up kills it.
PEER_PATIENCE_SECONDS = 10.0
#: Until the first step has ended every stage of the start may take so much longer than `timeout`: kernels are compiled
#: and tuned, weights are read.
START_SECONDS = 1800.0
#: A process that ends itself writes why. Where its log lies may be what hangs, so it waits no longer than this.
LAST_WORDS_SECONDS = 30.0
#: The same after a second signal, which asks it to leave at once.
AT_ONCE_SECONDS = 5.0


class Sentinel:
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
        #: A rank without which no step ends, because its process has; None if there is none.
        self.gone: Callable[[], int | None] = lambda: None
        self._gone_since: float | None = None
        #: Name of the signal that asked to stop, None if none did.
        self.request: str | None = None
        self._heard_at = 0.0
        self._answer: threading.Thread | None = None
        self._longest = 0.0
        self._last_beat = 0.0
        self._stage: str | None = "imports"
        #: What a batch is waited for from; None while none is.
        self._reads: str | None = None
        self._warned_of_read = False
        self._writer_of: str | None = None
        self._last_write = 0.0
        self._closing_down = False
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
        self._last_beat = time.monotonic()
        self._thread.start()
        return self

    def starting(self, stage: str) -> None:
        """The start of the run begins with `stage`."""
        self._last_beat, self._stage = time.monotonic(), stage

    def started(self) -> None:
        """The first step has ended: from here on `timeout` is the limit."""
        self._last_beat, self._stage = time.monotonic(), None

    def beat(self) -> None:
        """Training moves: called after every step and every batch of an evaluation."""
        now = time.monotonic()
        if self._stage is None:
            self._longest = max(self._longest, now - self._last_beat)
        self._last_beat = now

    @contextlib.contextmanager
    def waiting_for(self, checkpoint: str, last_write: float = 0.0) -> Iterator[Callable[[], None]]:
        """Around a wait for the writer of `checkpoint`; yields what to call whenever bytes of it were written.

        Args:
            last_write: seconds that the save before this one took, of which it may take twice as many to flush.
        """
        self._last_beat, self._writer_of, self._last_write = time.monotonic(), checkpoint, last_write

        def moves() -> None:
            self._last_beat = time.monotonic()

        try:
            yield moves
        finally:
            self._last_beat, self._writer_of = time.monotonic(), None

    @contextlib.contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Around a wait for a batch of `what`."""
        self._last_beat, self._reads = time.monotonic(), what
        try:
            yield
        finally:
            self._last_beat, self._reads = time.monotonic(), None

    def closing(self) -> None:
        """Training is over, and its end is written; what is left, such as handing rows to wandb, may take `timeout`."""
        self._last_beat, self._stage, self._closing_down = time.monotonic(), None, True

    def __exit__(self, *_: object) -> None:
        self._closing = True
        if self._previous:
            signal.set_wakeup_fd(-1)
            for number, handler in self._previous.items():
                signal.signal(number, handler)
        self._writer.send(b"\0")
        self._thread.join()
        if self._answer is not None:
            self._answer.join(AT_ONCE_SECONDS)
        self._reader.close()
        self._writer.close()

    def _watch(self) -> None:
        while not self._closing:
            readable, _, _ = select.select([self._reader], [], [], 0.5)
            now = time.monotonic()
            for number in self._reader.recv(4096) if readable else b"":
                if number in SIGNALS:
                    self._hear(signal.Signals(number), now)
            silence = time.monotonic() - self._last_beat
            if self._closing:
                break
            if self.request and min(silence, now - self._heard_at) > self._patience_after_a_signal():
                self._preempt(f"{peers.STOPPED}{self.request}; {self._missing()} for {silence:.0f} s")
            elif silence > self._patience() or self._waits_in_vain(silence):
                self._end(silence)
            elif self._reads is not None and silence > LONG_READ_SECONDS and not self._warned_of_read:
                self._warned_of_read = True
                self._answer = _aside_warning(f"{self._missing()} for {silence:.0f} s{shared_memory_hint()}")

    def _hear(self, number: signal.Signals, now: float) -> None:
        if self.request is None:
            self.request, self._heard_at = number.name, now
            if self._stage is not None:
                place = f"{self._stage!r}{self._in_callback()}"
                self._preempt(f"{peers.STOPPED}{number.name} in {place}, before the first step")
                return
            said = "stopping after this step, with a checkpoint; a second signal leaves at once"
            self._answer = _aside_warning(f"{number.name}: {said}")
        elif now - self._heard_at > SAME_REQUEST_SECONDS:
            what = "training was over" if self._closing_down else "without a checkpoint"
            reason = f"{number.name}, after {self.request}: left at once, {what}"
            self._leave(128 + number, reason, lambda: log.warning("%s", reason), AT_ONCE_SECONDS)

    def _preempt(self, reason: str) -> None:
        """Ends a process that was asked to stop and has nothing to save, or cannot."""
        stacks = [] if self._stage is not None else self._stacks()

        def say() -> None:
            text = _of_threads((name, traceback.format_stack(frame)) for name, frame in stacks)
            log.warning("%s%s", reason, f". Where its threads are:{text}" if text else "")

        self._leave(signals.PREEMPTED_EXIT_CODE, reason, say, AT_ONCE_SECONDS)

    def _waits_in_vain(self, silence: float) -> bool:
        if self._writer_of is not None or self._closing_down or silence < PEER_PATIENCE_SECONDS or self.gone() is None:
            return False
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        return now - self._gone_since > PEER_PATIENCE_SECONDS

    def _patience(self) -> float:
        if self._writer_of is not None and self.request is not None:
            return min(self.timeout, max(LEAST_WRITER_PATIENCE_SECONDS, 2 * self._last_write))
        if self._stage is not None and self._writer_of is None and self._reads is None and not self._closing_down:
            return self.timeout + START_SECONDS
        return self.timeout

    def _patience_after_a_signal(self) -> float:
        if self._writer_of is not None:
            return math.inf  # `_patience` has the limit
        if self._reads is not None or self._closing_down:
            return READER_PATIENCE_SECONDS
        return max(STEP_PATIENCE_SECONDS, 3 * self._longest)

    def _missing(self) -> str:
        """Thing that the process waits for, as the beginning of "… for 5 s"."""
        if self._writer_of is not None:
            return f"nothing was written of {self._writer_of}"
        if self._closing_down:
            return "training was over and the process did not end"
        if self._reads is not None:
            return f"no batch of {self._reads} came"
        if self._stage is not None:
            return f"the start stood still in {self._stage!r}{self._in_callback()}"
        return f"no step ended{self._in_callback()}"

    def _in_callback(self) -> str:
        name = self.callback()
        return f" (callbacks.{name})" if name else ""

    def _end(self, seconds: float) -> None:
        stacks = self._stacks()
        if self._writer_of is not None:
            writers = [frame for name, frame in stacks if name == "checkpoint"]
            where = "its writer on this rank stands still: look at the disk"
            if any(_in_collective(frame) for frame in writers):
                where = "its writer on this rank waits for another rank's, whose log says where that one stands"
        else:
            where = "this rank stands still"
            if any("/torch/distributed/" in f.f_code.co_filename for f, _ in traceback.walk_stack(stacks[0][1])):
                where = f"{peers.WAITS}, whose log says where it stands"
            elif dist.is_initialized():
                # In a backward pass, or when it asks the device, a rank that waits for another looks like one that
                # hangs.
                where += f", {peers.PERHAPS_WAITS}, whose log then says where it stands"
        starts = self._stage is not None and self._writer_of is None and self._reads is None
        room = f" and {START_SECONDS:.0f} s for compiling" if starts else ""
        # A launcher that sees another rank end may ask this one to stop when its time is over anyway.
        hurried = self.request is not None and seconds <= self.timeout and not room
        limit = f"after {self.request}" if hurried else f"(strategy.timeout_seconds{room})"
        what = f"{self._missing()} for {seconds:.0f} s"
        reason = f"{what} {limit}; {where}{shared_memory_hint() if self._reads is not None else ''}"
        if self._gone_since is not None:
            reason = f"{what}, and never will: the process of rank {self.gone()} is gone"

        def say() -> None:
            # With lines of source code, which are read from a disk that may be the one that hangs.
            text = _of_threads((name, traceback.format_stack(frame)) for name, frame in stacks)
            log.critical("%s. Where its threads are:%s", reason, text)

        places = _of_threads((name, _places(frame)) for name, frame in stacks)
        self._leave(1, reason, say, LAST_WORDS_SECONDS, places)

    def _stacks(self) -> list[tuple[str, FrameType]]:
        """Name and frame of every other thread, the main one first."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        return [
            (names[identity], frames[identity])
            for identity in sorted(names, key=lambda identity: identity != self._main)
            if identity in frames and identity != threading.get_ident()
        ]

    def _leave(self, code: int, reason: str, say: Callable[[], None], seconds: float, places: str = "") -> None:
        """Ends the process. Log, status and terminal may hang where the run hangs: none of them can keep it."""
        said = threading.Event()
        outcome = "preempted" if code == signals.PREEMPTED_EXIT_CODE else "failed"
        noted = [outcome]

        def last_words() -> None:
            say()
            said.set()

        def note() -> None:
            noted[0] = self.on_end(outcome, reason)

        deadline = time.monotonic() + seconds
        for thread in (_aside("last words", last_words), _aside("status", note)):
            thread.join(max(0.0, deadline - time.monotonic()))
        if outcome == "preempted":
            code = {"preempted": code, "done": 0}.get(noted[0], 1)
            signals.report_outcome(noted[0])
        if not said.is_set():
            text = f"{reason}. The log cannot be written.{places}\n".encode()
            _aside("terminal", lambda: os.write(2, text)).join(AT_ONCE_SECONDS)
        os._exit(code)


def _aside(name: str, action: Callable[[], object]) -> threading.Thread:
    """Does what may hang or fail in a thread that keeps nobody waiting."""

    def act() -> None:
        with contextlib.suppress(OSError):
            action()

    thread = threading.Thread(target=act, name=name, daemon=True)
    thread.start()
    return thread


def _aside_warning(text: str) -> threading.Thread:
    return _aside("warning", lambda: log.warning("%s", text))


def _of_threads(stacks: Iterable[tuple[str, list[str]]]) -> str:
    return "".join(f"\nthread {name}:\n{''.join(lines)}" for name, lines in stacks)


def _places(frame: FrameType) -> list[str]:
    """As `traceback.format_stack`, without the lines of source code: reads no file."""
    found = [*traceback.walk_stack(frame)][::-1]
    return [f'  File "{f.f_code.co_filename}", line {line}, in {f.f_code.co_name}\n' for f, line in found]


def _in_collective(frame: FrameType) -> bool:
    return any(f.f_code.co_filename.endswith("distributed_c10d.py") for f, _ in traceback.walk_stack(frame))


def _forget_descriptor() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
