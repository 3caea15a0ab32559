"""How long the watchdog waits for what, whom rank 0 blames, and that nothing keeps a process which ends itself."""

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch

from forgetting_transformer.training.faults import peers, watchdog
from tests.waiting import HANG, wait_until


def test_a_signal_within_a_second_is_the_same_request_however_slow_the_log(monkeypatch):
    """A scheduler and a launcher both send it."""
    watch, left, said = watchdog.Watchdog(36000), [], threading.Event()
    watch.enter_stage(None)
    monkeypatch.setattr(watch, "_leave", lambda code, reason: left.append(code))
    monkeypatch.setattr(watchdog.log, "warning", lambda *_: said.wait(HANG))
    watch._hear(signal.SIGTERM, 5.0)
    watch._hear(signal.SIGTERM, 5.9)
    assert not left and watch.request == "SIGTERM"
    watch._hear(signal.SIGTERM, 6.1)
    assert left == [128 + signal.SIGTERM]
    said.set()


@pytest.fixture
def ranks(monkeypatch) -> list[peers.Peers]:
    """Rank 0 of three, which sees the process of the last alone, and the others."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(peers, "_SECONDS_TO_SPEAK", 0.1)
    found = [peers.Peers() for _ in range(3)]
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(peers.socket, "gethostname", lambda: "another machine")
        found[1].join(1, 3)
    for rank in (0, 2):
        found[rank].join(rank, 3)
    return found


def test_of_ranks_that_end_the_first_to_fail_is_blamed(ranks, monkeypatch):
    here, one, two = ranks
    assert here.blame() == "rank 1 hangs, or was killed: it gave no reason"
    assert here.blame(silent=False) is None
    with monkeypatch.context() as patched:  # elsewhere a process number is another process's or nobody's
        patched.setattr(peers, "is_gone", lambda process: process != 0)
        assert here.blame(silent=False) == "rank 2 was killed or has crashed"
    one.failed("no step ended for 9 s; this rank waits for another, whose log shows where it is")
    two.failed("no step ended for 9 s; this rank makes no progress, or waits for another")
    assert here.blame() == "rank 2 has failed: no step ended for 9 s; this rank makes no progress, or waits for another"
    two.failed("ValueError: no such thing")
    assert here.blame() == "rank 2 has failed: ValueError: no such thing"
    # A launcher sends a signal to the ranks that are left.
    stopped = "stopped by SIGTERM in 'model', before the first step"
    assert here.ended("preempted", stopped) == ("failed", f"rank 2 has failed: ValueError: no such thing; {stopped}")
    two.failed(stopped)
    assert here.ended("preempted", stopped) == ("preempted", stopped)
    assert here.explain(RuntimeError("Connection closed by peer")).startswith("rank 2 was stopped by SIGTERM")
    assert here.explain(ValueError("Connection closed by peer")) is None


def _never(*_: object) -> None:
    time.sleep(36000)


def _hang_with(what: str) -> None:
    watchdog.START_SECONDS, watchdog.LAST_WORDS_SECONDS = 0.0, 0.1
    watch = watchdog.Watchdog(0.1 if "signal" not in what else 36000)
    if "log" in what:
        handler = logging.Handler()
        handler.emit = _never
        logging.getLogger().addHandler(handler)
    if "terminal" in what:
        _, writing = os.pipe()
        os.dup2(writing, 2)
        os.set_blocking(2, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(2, b"x" * 65536)
        os.set_blocking(2, True)
    if "status" in what:
        watch.on_end = _never
    with watch:
        if "signal" in what:
            watch.enter_stage(None)
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: watch.request)
            watchdog.SAME_REQUEST_SECONDS = 0.0
            os.kill(os.getpid(), signal.SIGTERM)
        _never()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("what", "code"), [("log and terminal", 1), ("status", 1), ("log, at a signal", 128 + signal.SIGTERM)]
)
def test_what_else_hangs_does_not_keep_the_process(what, code):
    """The disk that the run waits for may be that of its log and of its folder, too."""
    process = multiprocessing.get_context("fork").Process(target=_hang_with, args=(what,))
    process.start()
    process.join(HANG)
    assert process.exitcode == code
