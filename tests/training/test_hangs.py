"""What stands still is noticed wherever the run waits for it, named, and ended; what is only slow is left alone."""

import contextlib
import json
import linecache
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from forgetting_transformer import signals
from forgetting_transformer.data import worker
from forgetting_transformer.training import checkpoint
from forgetting_transformer.training.checkpoint import Checkpointer
from forgetting_transformer.training.faults import peers, sentinel
from forgetting_transformer.training.logs import TerminalHandler
from tests.training.conftest import STEP, Job, changed, train
from tests.training.test_checkpoint import trained
from tests.training.test_resume import assert_same_run
from tests.training.test_stopping import rank_log, status
from tests.waiting import HANG, wait_until

pytestmark = pytest.mark.slow

#: The writer of the checkpoint after step 8 never comes back. Once it hangs and somebody waits for it, the limit is
#: short.
HUNG_WRITER = """
import os, signal, threading, time
import torch.distributed.checkpoint.filesystem as filesystem
from forgetting_transformer.training import checkpoint, trainer
from forgetting_transformer.training.faults import sentinel
save, write_item, wait = writing.Writer.write, filesystem._write_item, checkpoint.Checkpointer._wait
step, hangs = None, threading.Event()
def write(self, step_, *arguments):
    global step
    step = step_
    return save(self, step_, *arguments)
def lost_in_thought():
    hangs.set()
    time.sleep(36000)
def hang(*arguments, **options):
    if step == {step}:
        lost_in_thought()
    return write_item(*arguments, **options)
def waiting(self):
    if step == {step}:
        hangs.wait()
        {limit}
    return wait(self)
writing.Writer.write, filesystem._write_item, checkpoint.Checkpointer._wait = write, hang, waiting
"""
SHORT = "self.watch.__self__.timeout = 1"
SIGTERM = "sentinel.LEAST_WRITER_PATIENCE_SECONDS = 1; os.kill(os.getpid(), signal.SIGTERM)"
#: In step 10, while the writer of step 8 hangs, the disk of the metrics is full as well.
AND_AN_ERROR = """
from forgetting_transformer.training import metrics
report = metrics.MetricsLog.report
def full(self, kind, step, values):
    if step == 1280:
        raise OSError(28, "No space left on device")
    return report(self, kind, step, values)
metrics.MetricsLog.report = full
"""


WAITED = pytest.mark.rare(
    "tests/training/test_hangs.py::test_a_writer_that_hangs_ends_the_run_wherever_it_is_waited_for"
)


@pytest.mark.parametrize(
    ("step", "limit", "cause", "background", "patch"),
    [
        (8, SHORT, "(strategy.timeout_seconds)", True, ""),  # noticed before the save after it
        (20, SHORT, "(strategy.timeout_seconds)", True, ""),  # the last one, for which the run waits at its end
        pytest.param(8, SHORT, "(strategy.timeout_seconds)", False, "", marks=WAITED),
        pytest.param(8, SHORT, "(strategy.timeout_seconds)", True, AND_AN_ERROR, marks=WAITED),
        (8, SIGTERM, "after SIGTERM", True, ""),
    ],
    ids=["before the next", "at the end", "in the foreground", "after an error", "after a signal"],
)
def test_a_writer_that_hangs_ends_the_run_wherever_it_is_waited_for(tiny, step, limit, cause, background, patch):
    job = Job(
        changed(tiny, checkpoint_background=background),
        patch=HUNG_WRITER.format(step=step * STEP, limit=limit) + patch,
    )
    assert job.wait() == [1]
    log, found = rank_log(tiny, 0), status(tiny)
    assert "in lost_in_thought" in log
    assert f"nothing was written of the checkpoint at {step * STEP:,} tokens for" in found["reason"]
    assert cause in found["reason"] and "its writer on this rank stands still" in found["reason"]
    assert (
        found["status"] == "failed"
        and f"the last good checkpoint is at {(step - 4) * STEP:,} tokens" in found["reason"]
    )


def test_a_writer_on_another_rank_that_hangs_is_named_by_all(tiny):
    patch = HUNG_WRITER.format(step=8 * STEP, limit=SHORT).replace(
        "== 1024:\n        lost", "== 1024 and os.environ['RANK'] == '1':\n        lost"
    )
    patch = patch.replace(
        "        hangs.wait()\n", "        in_collective() if os.environ['RANK'] == '0' else hangs.wait()\n"
    )
    # The limit of a rank that waits begins when it does, however long its own share of the checkpoint takes.
    patch += """
def in_collective():
    import sys
    found = lambda: [sys._current_frames().get(t.ident) for t in threading.enumerate() if t.name == "checkpoint"]
    # A writer that is gone has learned of the other rank's end.
    while (frames := found()) and not any(frame and sentinel._in_collective(frame) for frame in frames):
        time.sleep(0.01)
"""
    job = Job(tiny, 2, patch=patch)
    assert job.wait() == [1, 1]
    assert "its writer on this rank stands still" in rank_log(tiny, 1) and "in lost_in_thought" in rank_log(tiny, 1)
    reason = status(tiny)["reason"]
    assert (
        "its writer on this rank waits for another rank's" in reason
        or "rank 1 has failed: nothing was written" in reason
    )


@pytest.mark.quick
def test_a_slow_writer_is_not_a_hung_one(tmp_path, monkeypatch):
    """Every byte it writes is a sign of life to who waits for it, and its silence is none."""
    monkeypatch.setattr(checkpoint, "_LOOK_SECONDS", 0.001)
    checkpointer = Checkpointer(tmp_path, 1, 0, 1, background=True)
    turns = [threading.Event() for _ in range(4)]
    signs, looks = [], []

    def write(step, *_):
        folder = tmp_path / f".tmp-step-{step:015d}"
        folder.mkdir()
        for turn in turns:
            turn.wait()
            with (folder / "state").open("a") as file:
                file.write("a byte or two")

    class Watch:
        def __enter__(self):
            return lambda: signs.append(len(looks))

        def __exit__(self, *_):
            signs.append("over")

    progress = checkpointer._progress
    monkeypatch.setattr(checkpointer, "_progress", lambda: (looks.append(0), progress())[1])
    monkeypatch.setattr(checkpointer, "_write", write)
    checkpointer.watch = lambda name, seconds: Watch()
    model, optimizer = trained(1)
    checkpointer.save(1, model, optimizer, {}, {}, permanent=False)
    waiter = threading.Thread(target=lambda: checkpointer.finished(wait=True), daemon=True)
    waiter.start()
    for turn in turns[:-1]:
        seen = len(signs)
        turn.set()
        wait_until(lambda seen=seen: len(signs) > seen, waiter.is_alive)
    # It may look in the middle of a write, and see the rest of it the next time.
    written = len("a byte or two") * len(turns[:-1])
    wait_until(lambda: (tmp_path / f".tmp-step-{1:015d}/state").stat().st_size == written, waiter.is_alive)
    looked = len(looks)
    wait_until(lambda: len(looks) > looked + 2, waiter.is_alive)
    before, looked = len(signs), len(looks)
    wait_until(lambda: len(looks) > looked + 20, waiter.is_alive)
    assert len(signs) == before, "silence"
    turns[-1].set()
    waiter.join(HANG)
    assert signs[-1] == "over"


def test_a_rank_that_hangs_before_the_end_of_its_first_step_is_named(tiny):
    patch = """
import time
from forgetting_transformer.training import trainer
from forgetting_transformer.training.faults import sentinel
original = trainer.Trainer.step
def lost_in_thought():
    time.sleep(36000)
def step(self, batch):
    if self.counters.batch_count == 0 and self.fabric.global_rank == 1:
        sentinel.START_SECONDS, self.sentinel.timeout = 1, 1
        lost_in_thought()
    return original(self, batch)
trainer.Trainer.step = step
"""
    job = Job(changed(tiny, strategy__timeout_seconds=3600), 2, patch=patch)
    assert job.wait() == [1, 1]
    assert "the start stood still in 'first step' for" in rank_log(tiny, 1)
    assert "in lost_in_thought" in rank_log(tiny, 1)
    found = status(tiny)
    assert found["status"] == "failed"
    assert "rank 1 has failed: the start stood still in 'first step' for" in found["reason"]


def test_a_rank_that_is_stopped_is_named_though_it_can_say_nothing(tiny):
    """By SIGSTOP or a debugger: its sentinel stands still with it."""
    patch = """
import os, signal, time
from forgetting_transformer.training import trainer
from forgetting_transformer.training.faults import peers
original = trainer.Trainer.step
def step(self, batch):
    if self.counters.batch_count == 5:
        if self.fabric.global_rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        while peers._state(self.peers._visible[1]) not in "Tt":
            time.sleep(0.01)
        self.sentinel.timeout = 2
    return original(self, batch)
trainer.Trainer.step = step
"""
    job = Job(changed(tiny, strategy__timeout_seconds=3600), 2, patch=patch)
    job.processes[0].join(HANG)
    job.kill()
    found = status(tiny)
    assert job.processes[0].exitcode == 1 and found["status"] == "failed"
    assert f"rank 1 (process {job.processes[1].pid} on " in found["reason"], found
    assert "is stopped, as by SIGSTOP or a debugger; no step ended for " in found["reason"]


@pytest.mark.quick
def test_of_ranks_that_end_only_those_are_blamed_that_do_not_wait_for_another(monkeypatch):
    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    process, ended = (
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(seconds,), daemon=True)
        for seconds in (HANG, 0)
    )
    process.start()
    ended.start()
    ended.join()
    others = [peers.Peers() for _ in range(3)]
    for rank, other in enumerate(others, 1):
        other.rank, other.world_size, other._store = rank, 4, torch.distributed.PrefixStore("peers", store)
        other._publish(f"{rank}", f"{(process if rank == 3 else ended).pid} {peers._place()}")
    here = peers.Peers()
    here.join(0, 4)
    assert here.blame() == f"rank 1 (process {ended.pid} on {socket.gethostname()}) was killed or has crashed"
    others[1].failed(f"TrainingError: {peers._ANOTHER}")
    others[0].failed("no step ended for 9 s; this rank waits for another, whose log says where it stands")
    assert here.blame() is None
    others[1].failed("no step ended for 9 s; this rank stands still, or waits for another, whose log then says so")
    assert here.blame().startswith("rank 2 has failed: no step ended for 9 s; this rank stands still, or")
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: here.blame().startswith(f"rank 3 (process {process.pid} on "), process.is_alive)
    assert here.blame().endswith("is stopped, as by SIGSTOP or a debugger")
    process.kill()
    process.join()
    assert here.blame().endswith("was killed or has crashed")
    others[1].failed("ValueError: no such thing")
    assert here.blame() == "rank 2 has failed: ValueError: no such thing"


def test_a_start_that_hangs_ends_with_its_stage_in_the_status(tiny):
    patch = """
import time
from forgetting_transformer.training import setup
from forgetting_transformer.training.faults import sentinel
def build_model(config, data, **options):
    sentinel.START_SECONDS = 1
    time.sleep(36000)
setup.build_model = build_model
"""
    assert Job(changed(tiny, strategy__timeout_seconds=1), patch=patch).wait() == [1]
    found = json.loads((Path(tiny["output_dir"]) / "status.json").read_text())
    assert found["status"] == "failed"
    assert "the start stood still in 'model' for" in found["reason"]
    assert "(strategy.timeout_seconds and 1 s for compiling)" in found["reason"]


def test_a_callback_that_hangs_in_the_start_is_named(tiny):
    patch = """
import time
from forgetting_transformer.training.faults import sentinel
from forgetting_transformer.training.callbacks import goodput
def on_start(self, trainer):
    sentinel.START_SECONDS = 1
    time.sleep(36000)
goodput.Goodput.on_start = on_start
"""
    assert Job(changed(tiny, strategy__timeout_seconds=1), patch=patch).wait() == [1]
    assert "the start stood still in 'logs' (callbacks.goodput) for" in status(tiny)["reason"]


#: A reader that lives and gives nothing, in the test's own process: none of PyTorch's checks notices it.
SILENT_READER = """
import os, signal, time
from forgetting_transformer.data import longcrawl64
from forgetting_transformer.training.faults import sentinel
original = longcrawl64.TrainBatches.__getitem__
def read(self, batch):
    if batch == {batch}:
        {then}
        time.sleep(36000)
    return original(self, batch)
longcrawl64.TrainBatches.__getitem__ = read
"""


@pytest.mark.parametrize("batch", [0, 5])
def test_a_reader_that_gives_nothing_is_named_and_does_not_keep_a_run_that_is_to_stop(tiny, finished, batch):
    patch = SILENT_READER.format(batch=batch, then="os.kill(os.getpid(), signal.SIGTERM)")
    patch += "sentinel.READER_PATIENCE_SECONDS = 0.5"
    assert Job(tiny, patch=patch).wait() == [75]
    found = status(tiny)
    assert found["status"] == "preempted" and found["reason"].startswith("stopped by SIGTERM")
    if batch:
        assert "no batch of datamodule.name='longcrawl64' came for" in found["reason"]
    train(tiny)
    assert_same_run(finished(tiny), tiny["output_dir"])


def test_a_reader_that_gives_nothing_ends_the_run_in_the_end(tiny):
    tiny = changed(tiny, strategy__timeout_seconds=1)
    assert Job(tiny, patch=SILENT_READER.format(batch=0, then="pass")).wait() == [1]
    found = status(tiny)
    assert found["status"] == "failed", found
    assert "no batch of datamodule.name='longcrawl64' came for" in found["reason"]
    assert "(strategy.timeout_seconds); this rank stands still; nothing was saved" in found["reason"]


@pytest.mark.quick
def test_a_long_wait_for_data_is_one_line_that_names_little_shared_memory(monkeypatch, caplog):
    monkeypatch.setattr(sentinel, "LONG_READ_SECONDS", 0)
    little = shutil._ntuple_diskusage(64 * 2**20, 2**26 - 4096, 4096)
    monkeypatch.setattr(worker.shutil, "disk_usage", lambda path: little)
    with sentinel.Sentinel(36000) as watch, watch.reading("datamodule.name='mine'"):
        wait_until(lambda: caplog.records)
    (line,) = caplog.messages
    assert line.startswith("no batch of datamodule.name='mine' came for ")
    assert "/dev/shm (67.11 MB, 4.10 kB free) may be too small: start the container with a larger `--shm-size`" in line


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_signal_ends_a_start_at_once_whatever_it_waits_for(tiny, world_size):
    patch = """
import os, signal, time
from forgetting_transformer.training import setup
def build_optimizer(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(36000)
setup.build_optimizer = build_optimizer
"""
    assert Job(tiny, world_size, patch=patch).wait() == [75] * world_size
    found = status(tiny)
    assert (found["status"], found["step"]) == ("preempted", 0)
    assert found["reason"] == "stopped by SIGTERM in 'strategy', before the first step"


def test_a_rank_whose_reader_gives_nothing_stops_the_others_as_preempted(tiny):
    """They wait for it in the step, in which they cannot save."""
    hangs = "os.kill(os.getpid(), signal.SIGTERM)\n        if os.environ['RANK'] == '0': return original(self, batch)"
    patch = SILENT_READER.format(batch=5, then=hangs) + "sentinel.READER_PATIENCE_SECONDS = 0.5"
    assert Job(tiny, 2, patch=patch).wait() == [0, 75]
    found = status(tiny)
    assert found["status"] == "preempted"
    assert "rank 1 was stopped by SIGTERM; no batch of" in found["reason"]


@pytest.mark.quick
def test_a_signal_that_follows_the_failure_of_another_rank_is_no_preemption(monkeypatch):
    """A launcher sends it to the ranks that are left."""
    ranks = peers.Peers()
    monkeypatch.setattr(ranks, "blame", lambda: "rank 1 has failed: ValueError: no such thing")
    outcome, reason = ranks.ended("preempted", "stopped by SIGTERM in 'model', before the first step")
    assert outcome == "failed" and reason.startswith("rank 1 has failed: ValueError: no such thing; stopped by")
    monkeypatch.setattr(ranks, "blame", lambda: "rank 1 was stopped by SIGTERM in 'data'")
    assert ranks.ended("preempted", "stopped by SIGTERM")[0] == "preempted"


@pytest.mark.parametrize(
    ("fails", "named"),
    [
        ("raise ValueError('no such thing')", "rank 1 has failed: ValueError: no such thing"),
        ("os.kill(os.getpid(), 9)", "was killed or has crashed"),
    ],
)
def test_a_rank_that_goes_while_the_others_start_is_named(tiny, fails, named):
    patch = f"""
import os
from forgetting_transformer.training import setup
original = setup.build_model
def build_model(config, data, **options):
    if os.environ["RANK"] == "1":
        {fails}
    return original(config, data, **options)
setup.build_model = build_model
"""
    job = Job(tiny, 2, patch=patch)
    assert job.wait()[0] == 1
    found = status(tiny)
    assert found["status"] == "failed" and "TrainingError: cannot start: rank 1 " in found["reason"]
    assert named in found["reason"] and "\n" not in found["reason"], found


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ("self.sentinel.timeout = 1", 1),
        ("sentinel.READER_PATIENCE_SECONDS = 1; os.kill(os.getpid(), signal.SIGTERM)", 0),
    ],
    ids=["time-out", "signal"],
)
def test_what_hangs_after_the_end_of_a_run_does_not_keep_its_process_and_changes_nothing(tiny, limit, code):
    """wandb, say, that waits for a server."""
    patch = f"""
import os, signal, time
from forgetting_transformer.training import metrics, trainer
from forgetting_transformer.training.faults import sentinel
def never(self):
    time.sleep(36000)
metrics.MetricsLog.close = never
close = trainer.Trainer.close
def closing(self):
    {limit}
    close(self)
trainer.Trainer.close = closing
"""
    assert Job(changed(tiny, train__max_tokens=4 * STEP), patch=patch).wait() == [code]
    assert "training was over and the process did not end for" in rank_log(tiny, 0)
    assert (status(tiny)["status"], status(tiny)["step"]) == ("done", 4 * STEP)


def test_a_step_that_hangs_after_a_signal_ends_as_preempted(tiny):
    patch = """
import os, signal, time
from forgetting_transformer.training import trainer
from forgetting_transformer.training.faults import sentinel
sentinel.STEP_PATIENCE_SECONDS = 0.5
original = trainer.Trainer.step
def lost_in_thought():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(36000)
def step(self, batch):
    if self.counters.batch_count == 5:
        lost_in_thought()
    return original(self, batch)
trainer.Trainer.step = step
"""
    assert Job(tiny, patch=patch).wait() == [signals.PREEMPTED_EXIT_CODE]
    found = status(tiny)
    assert found["status"] == "preempted" and "stopped by SIGTERM; no step ended for" in found["reason"]
    assert "in lost_in_thought" in rank_log(tiny, 0)


@pytest.mark.quick
def test_a_first_step_may_take_longer_than_the_limit_of_later_ones():
    watch = sentinel.Sentinel(60)
    watch.starting("first step")
    assert watch._patience() == 60 + sentinel.START_SECONDS
    with watch.reading("the corpus"):
        assert watch._patience() == 60, "nothing is compiled while it waits for data"
    watch.started()
    watch.request, watch.timeout = "SIGTERM", 3600
    assert watch._patience_after_a_signal() < 30, "containers are killed 30 s after a signal"
    watch._longest = 20.0
    assert watch._patience_after_a_signal() == 60, "a slow step is given time to end"
    with watch.waiting_for("the checkpoint at 5 tokens", 1000.0):
        assert watch._patience() == 2000, "a flush may take as long as the whole save before it"


@pytest.mark.quick
@pytest.mark.parametrize("place", [None, "another-machine pid:[1]"])
def test_only_a_process_that_can_be_seen_is_missed(monkeypatch, place):
    """Elsewhere, and in another container, its number is another process's or nobody's."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(HANG,))
    process.start()
    torch.distributed.PrefixStore("peers", store).set("1", f"{process.pid} {place or peers._place()}")
    here = peers.Peers()
    here.join(0, 2)
    assert here.gone() is None
    process.kill()
    process.join()
    assert here.gone() == (None if place else 1)


def _never(*_: object) -> None:
    time.sleep(36000)


def _hang_with(what: str, pipe: int) -> None:
    os.dup2(pipe, 2)
    sentinel.START_SECONDS, sentinel.LAST_WORDS_SECONDS, sentinel.AT_ONCE_SECONDS = 0.0, 0.1, 0.1
    watch = sentinel.Sentinel(0.1 if "signal" not in what else 36000)
    if "source code" in what:
        linecache.checkcache = linecache.lazycache = _never
    if "log" in what:
        handler = logging.Handler()
        handler.emit = _never
        logging.getLogger().addHandler(handler)
    if "terminal" in what:
        os.set_blocking(2, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(2, b"x" * 65536)
        os.set_blocking(2, True)
    if "status" in what:
        watch.on_end = _never
    with watch:
        if "signal" in what:
            watch.started()
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: watch.request)
            sentinel.SAME_REQUEST_SECONDS = 0.0
            os.kill(os.getpid(), signal.SIGTERM)
        _never()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("log", 1),
        ("source code", 1),
        ("status", 1),
        ("log and terminal", 1),
        ("log, at a signal", 128 + signal.SIGTERM),
    ],
)
def test_what_else_hangs_does_not_keep_the_process(what, code):
    """The disk that the run waits for may be that of its log, of its folder and of Python's packages, too."""
    reading, writing = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=_hang_with, args=(what, writing))
    process.start()
    os.close(writing)
    process.join(HANG)
    assert process.exitcode == code
    with open(reading, errors="replace") as said:
        text = said.read()
    if what in ("log", "source code"):
        assert "this rank stands still. The log cannot be written." in text and "in _never" in text


def _end_with_a_log_that_fails(folder: str) -> None:
    sentinel.START_SECONDS = 0.0
    sys.stderr.close()
    logging.basicConfig(handlers=[TerminalHandler()])
    watch = sentinel.Sentinel(0.1)
    watch.on_end = lambda outcome, reason: (Path(folder) / "status").write_text(reason)
    with watch:
        _never()


@pytest.mark.quick
def test_a_terminal_that_is_gone_does_not_cost_the_status(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_end_with_a_log_that_fails, args=(str(tmp_path),))
    process.start()
    process.join(HANG)
    assert process.exitcode == 1 and "this rank stands still" in (tmp_path / "status").read_text()


@pytest.mark.quick
def test_the_same_request_is_the_same_however_slow_the_log(monkeypatch):
    """A scheduler and a launcher both send it."""
    watch, left, said = sentinel.Sentinel(36000), [], threading.Event()
    watch.started()
    monkeypatch.setattr(watch, "_leave", lambda *_: left.append(1))
    monkeypatch.setattr(sentinel.log, "warning", lambda *_: said.wait(HANG))
    watch._hear(signal.SIGTERM, 5.0)
    watch._hear(signal.SIGTERM, 5.9)
    assert not left and watch.request == "SIGTERM"
    watch._hear(signal.SIGTERM, 6.1)
    assert left
    said.set()


def test_all_that_can_be_waited_for_works_without_a_hang(tiny):
    """The watch over writers changes nothing where nothing hangs."""
    train(changed(tiny, checkpoint_background=False, train__max_tokens=STEP))
    assert status(tiny)["status"] == "done"
