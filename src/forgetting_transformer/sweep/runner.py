"""Runs the jobs of a sweep on a machine: reports each, survives the failure of any, ends cleanly on Ctrl-C."""

import dataclasses
import math
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from forgetting_transformer import progress
from forgetting_transformer.analysis.runs import Run, read_run
from forgetting_transformer.analysis.tables import markdown_table
from forgetting_transformer.sweep import SweepError
from forgetting_transformer.sweep.jobs import Job, State, file_name
from forgetting_transformer.sweep.machines import Process
from forgetting_transformer.training.continuing import changes_that_alter_the_run
from forgetting_transformer.training.metrics import duration

POLL_SECONDS = 1.0

#: Says why a running job is hopeless, None while it is not.
Hopeless = Callable[[Job, Run], str | None]


class Machine(Protocol):
    """What `run_jobs` needs of a place where jobs run."""

    def check(self, jobs: Sequence[Job]) -> None: ...

    def room(self, job: Job) -> int: ...

    def start(self, job: Job, log: Path) -> Process | None: ...


@dataclass(frozen=True)
class JobResult:
    """How a job ended. `seconds` is wall time here, `note` says why where the state does not."""

    job: Job
    state: State
    run: Run
    seconds: float = 0.0
    note: str = ""


@dataclass
class _Running:
    job: Job
    process: Process
    log: Path
    #: Size of the log before this start.
    log_start: int
    started: float
    #: The run's status.json before this start, which may end before it writes one.
    status_before: dict[str, Any]
    hopeless: str | None = None


#: Takes the result of a job and returns the jobs to run because of it.
OnResult = Callable[[JobResult], Sequence[Job]]


def run_jobs(
    jobs: Sequence[Job],
    machine: Machine,
    log_dir: Path,
    hopeless: Hopeless | None = None,
    on_result: OnResult | None = None,
) -> list[JobResult]:
    """Runs every job and returns their results in the order of `jobs`, and of those that came of them.

    A job that is finished already, by its own files, is not started. One whose GPU failed is started once more, and
    goes on from its last checkpoint if it has one. Ctrl-C or SIGTERM asks the running ones to end, waits for them and
    returns; the jobs it met or that had not begun are `State.INTERRUPTED`. A second Ctrl-C kills them.

    Args:
        log_dir: gets what each job prints, `<name>.log`.
        hopeless: asked now and then about each running job; a reason ends the job.
        on_result: called with every result that is no interruption; the jobs it returns are added to the queue.

    Raises:
        SweepError: two jobs share a folder, or the machine cannot run one of them. If they are among `jobs`, nothing
            was started; if `on_result` returned them, what was running has saved and ended, as after Ctrl-C.
    """
    known: list[Job] = []
    results: dict[str, JobResult] = {}
    waiting: list[Job] = []
    running: list[_Running] = []
    again: set[str] = set()

    def add(jobs: Sequence[Job]) -> None:
        check_folders([*known, *jobs])
        machine.check(jobs)
        known.extend(jobs)
        done = [result for job in jobs if (result := finished_already(job)) is not None]
        finished = {result.job.name for result in done}
        waiting.extend(job for job in jobs if job.name not in finished)
        waiting.sort(key=lambda job: -job.priority)
        for result in done:
            record(result)

    def record(result: JobResult) -> None:
        results[result.job.name] = result
        if on_result is not None and (more := on_result(result)):
            add(more)

    add(jobs)
    _print_line(f"{len(known)} job{'s' * (len(known) != 1)}, {len(results)} finished before; logs in {log_dir}")
    with _Bar(known) as bar, _Interrupts() as interrupts:
        try:
            while (waiting or running) and not interrupts.count:
                while waiting and (one := _start(waiting[0], machine, log_dir)) is not None:
                    running.append(one)
                    waiting.pop(0)
                    _print_line(f"started   {one.job.name} -> {one.job.output_dir}")
                time.sleep(POLL_SECONDS)
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    result = _result(one)
                    if result.state == State.FAILED and _device_failed(one, result) and one.job.name not in again:
                        again.add(one.job.name)
                        waiting.append(one.job)
                        _print_line(f"again     {describe(result)}")
                        continue
                    _print_line(f"{result.state:<9} {describe(result)}")
                    record(result)
                records = {one.job.name: read_run(one.job.output_dir) for one in running}
                for one in running:
                    if hopeless is not None and one.hopeless is None:
                        one.hopeless = hopeless(one.job, records[one.job.name])
                        if one.hopeless is not None:
                            one.process.stop()
                bar.show(results, records)
        finally:
            _end(running, interrupts)
    for one in running:
        result = _result(one)
        if result.state != State.FINISHED:
            left = f"{one.process.description} goes on" if one.process.description else ""
            result = dataclasses.replace(result, state=State.INTERRUPTED, note=left)
        results[one.job.name] = result
    for job in waiting:
        results[job.name] = JobResult(job, State.INTERRUPTED, read_run(job.output_dir), note="not started")
    return [results[job.name] for job in known]


def finished_already(job: Job) -> JobResult | None:
    """The result of a job whose folder holds the finished run it describes, with these very settings."""
    run = read_run(job.output_dir)
    if not job.config.resume or not run.config or not run.finished(job.config.train.max_tokens):
        return None
    if changes_that_alter_the_run(run.config, dataclasses.asdict(job.config)):
        return None  # train.py refuses it and says what differs
    return JobResult(job, State.FINISHED, run, note="finished before")


def summary(results: Sequence[JobResult]) -> str:
    """A Markdown table of all jobs."""
    rows = [
        [
            result.job.name,
            str(result.state),
            f"{result.run.tokens:,}",
            _loss(result.run.final_loss(heldout=False)),
            _loss(result.run.final_loss(heldout=True)),
            duration(result.seconds) if result.seconds else "",
            result.note,
        ]
        for result in results
    ]
    header = ["job", "state", "tokens", "training loss", "held-out loss", "time", ""]
    return markdown_table(header, rows, "llrrrrl")


def describe(result: JobResult) -> str:
    """One line about a job that has ended."""
    loss = result.run.final_loss(heldout=bool(result.run.heldout_loss.size))
    parts = [f"{result.run.tokens:,} tokens", f"loss {_loss(loss)}" if loss == loss else "", result.note]
    return f"{result.job.name}: " + ", ".join(part for part in parts if part)


def _result(one: _Running) -> JobResult:
    code = one.process.poll()
    run = read_run(one.job.output_dir)
    seconds = time.monotonic() - one.started
    note = ""
    if one.hopeless is not None:
        state, note = State.HOPELESS, one.hopeless
    elif code == 0 and run.finished(one.job.config.train.max_tokens):
        state = State.FINISHED
    elif code == 0 and not one.process.waits:
        state, note = State.SUBMITTED, one.process.description
    elif code == 0 or (run.status != one.status_before and run.status.get("status") == "preempted"):
        state, note = State.INCOMPLETE, "ended before its budget; the same command continues it"
    elif run.diverged and run.status != one.status_before:
        state, note = State.DIVERGED, "loss or gradients were not finite"
    else:
        state, note = State.FAILED, f"exit code {code}: {_reason(one)}"
    return JobResult(one.job, state, run, seconds, note)


def _device_failed(one: _Running, result: JobResult) -> bool:
    """Whether its GPU did, so that it may end well if it goes on from its last checkpoint (training/errors.py)."""
    status = result.run.status
    # On rank 0, or on another one, of which rank 0 has heard.
    said = re.search(r"(^|has failed: )DeviceError: ", str(status.get("reason", "")))
    return one.job.config.resume and status != one.status_before and said is not None


def _reason(one: _Running) -> str:
    """What the job said about its end: its own last error, else the last line that looks like one."""
    printed = one.log.read_bytes()[one.log_start :] if one.log.is_file() else b""
    if one.process.log != one.log:
        printed = one.process.log.read_bytes() + printed
    lines = printed.decode(errors="replace").splitlines()
    for pattern in (
        r" CRITICAL (.*)",
        r"^(?!.*(?:ChildFailedError|SignalException))(\w*(?:Error|Exception)\b.*)",
        r"(\S.*)",
    ):
        for line in reversed(lines):
            if found := re.search(pattern, line):
                return f"{found[1][:200]} ({one.log})"
    return f"it printed nothing ({one.log})"


def _start(job: Job, machine: Machine, log_dir: Path) -> _Running | None:
    log = log_dir / f"{file_name(job.name)}.log"
    before = log.stat().st_size if log.is_file() else 0
    status = read_run(job.output_dir).status
    process = machine.start(job, log)
    return None if process is None else _Running(job, process, log, before, time.monotonic(), status)


def _end(running: Sequence[_Running], interrupts: "_Interrupts") -> None:
    """Waits until all have ended after being asked to; an interrupt beyond the one that led here kills them."""
    if not running:
        return
    _print_line(f"stopping {len(running)} jobs (Ctrl-C kills them)")
    # None if it was no interrupt but an error that led here.
    led_here = min(interrupts.count, 1)
    for one in running:
        one.process.leave()
    killed = False
    while any([one.process.poll() is None for one in running]):
        if interrupts.count > led_here and not killed:
            killed = True
            for one in running:
                if one.process.poll() is None:
                    one.process.kill()
        time.sleep(0.1)


def check_folders(jobs: Sequence[Job]) -> None:
    """
    Raises:
        SweepError: two jobs share a folder.
    """
    seen: dict[Path, str] = {}
    for job in jobs:
        if job.output_dir in seen:
            raise SweepError(
                f"jobs {seen[job.output_dir]!r} and {job.name!r} would both write to output_dir={job.output_dir}; let "
                "output_dir contain what differs, or give a plain output_dir and every job gets a folder in it"
            )
        seen[job.output_dir] = job.name


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if loss == loss else ""


def _print_line(line: str) -> None:
    tqdm.write(line, file=sys.stderr)


class _Bar:
    """Tokens of all jobs on a terminal; nothing elsewhere, where the lines of starts and ends suffice."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs  # becomes longer while they run

    def __enter__(self) -> "_Bar":
        self._bar = progress.bar(desc="sweep", unit="tok")
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.close()

    def show(self, results: dict[str, JobResult], running: dict[str, Run]) -> None:
        if self._bar is None:
            return
        # A job that has ended is done, however it ended: nothing of its budget is still to come.
        budgets = {job.name: job.config.train.max_tokens for job in self._jobs}
        done = sum(budgets[name] for name in results) + sum(run.tokens for run in running.values())
        self._bar.total = sum(budgets.values())
        losses = [f"{run.train_loss[-1]:.3f}" for run in running.values() if run.train_loss.size]
        if self._bar.n == 0:
            self._bar.initial = done  # what earlier starts have done says nothing about the speed of this one
        self._bar.n = done
        self._bar.set_postfix_str(f"{len(results)}/{len(budgets)} jobs, running at loss {' '.join(losses) or '-'}")


class _Interrupts:
    """Counts SIGINT and SIGTERM instead of raising somewhere: a batch system ends a sweep as Ctrl-C does.

    Signals within half a second count once: `timeout` signals its child and then its process group, child included.
    """

    def __enter__(self) -> "_Interrupts":
        self.count = 0
        self._last = -math.inf
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, *_: Any) -> None:
        now = time.monotonic()
        self.count += now - self._last > 0.5
        self._last = now
