"""Runs the jobs of a sweep on this machine: shares its GPUs, reports each job, survives the failure of any, and ends
cleanly on Ctrl-C.
"""

import difflib
import functools
import inspect
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgetting_transformer import console
from forgetting_transformer.analysis.runs import Run, read_run
from forgetting_transformer.analysis.tables import markdown_table
from forgetting_transformer.sweep import SweepError
from forgetting_transformer.sweep.jobs import Command, Job, State, file_name, job_environment
from forgetting_transformer.training.records.metrics import duration

POLL_SECONDS = 1.0
#: Reasons for states that do not name one.
_NOTES = {
    State.INCOMPLETE: "ended before its budget; the same command continues it",
    State.DIVERGED: "loss or gradients were not finite",
}


class Machine:
    """Places for jobs on this machine. A job gets `fabric.devices` GPUs ("auto": all) by CUDA_VISIBLE_DEVICES.

    Args:
        gpus: the GPUs to share, as CUDA_VISIBLE_DEVICES names them; None: those this process sees.
        jobs_at_once: most jobs that run at a time; None: on GPUs as many as fit, on a CPU one.
        jobs_per_gpu: jobs that share a GPU. More than one where a job leaves its GPU idle, as small models and starts
            do.
    """

    def __init__(
        self, gpus: Sequence[int | str] | None = None, jobs_at_once: int | None = None, jobs_per_gpu: int = 1
    ) -> None:
        if jobs_at_once is not None and jobs_at_once < 1:
            raise SweepError(f"jobs_at_once={jobs_at_once} must be 1 or more, or null for as many as the GPUs allow")
        if jobs_per_gpu < 1:
            raise SweepError(f"jobs_per_gpu={jobs_per_gpu} must be 1 or more")
        self.gpus = [str(gpu) for gpu in gpus] if gpus is not None else visible_gpus()
        self.jobs_at_once, self.jobs_per_gpu = jobs_at_once, jobs_per_gpu

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Machine":
        """
        Args:
            settings: keys of `hydra.launcher`.

        Raises:
            SweepError: a key is unknown or has a wrong value.
        """
        known = list(inspect.signature(cls).parameters)
        for key in settings:
            if key not in known:
                close = difflib.get_close_matches(key, known, 1)
                hint = f"did you mean hydra.launcher.{close[0]}?" if close else f"use {', '.join(known)}"
                raise SweepError(f"unknown key hydra.launcher.{key}; {hint}")
        return cls(**settings)

    def check(self, jobs: Sequence[Job | Command]) -> None:
        """
        Raises:
            SweepError: a job needs more than there is.
        """
        for job in jobs:
            if job.accelerator in ("cuda", "gpu") and not self.gpus:
                raise SweepError(f"{job.name}: fabric.accelerator={job.accelerator}, but no GPU is visible")
            if (devices := self.devices(job)) > len(self.gpus) and self._takes_gpus(job):
                raise SweepError(
                    f"{job.name}: fabric.devices={devices}, but the sweep has {len(self.gpus)} GPUs "
                    f"({', '.join(self.gpus)})"
                )

    def devices(self, job: Job | Command) -> int:
        return job.devices(len(self.gpus) if self._takes_gpus(job) else 1)

    def room(self, job: Job | Command) -> int:
        """Number of jobs like this one that run at a time, at least 1."""
        if not self._takes_gpus(job):
            return self.jobs_at_once or 1
        fit = self.jobs_per_gpu * len(self.gpus) // self.devices(job)
        return max(1, min(self.jobs_at_once or fit, fit))

    def take(self, job: Job | Command, busy: Sequence[Sequence[str]]) -> list[str] | None:
        """The GPUs for a job, those with the fewest jobs; None if it must wait. `busy`: those of each running job."""
        needed = self.devices(job) if self._takes_gpus(job) else 0
        jobs_on = Counter(itertools.chain.from_iterable(busy))
        free = sorted((gpu for gpu in self.gpus if jobs_on[gpu] < self.jobs_per_gpu), key=jobs_on.__getitem__)
        if needed > len(free) or len(busy) >= (self.jobs_at_once or (math.inf if needed else 1)):
            return None
        return free[:needed]

    def _takes_gpus(self, job: Job | Command) -> bool:
        return bool(self.gpus) and job.accelerator != "cpu"


@dataclass(frozen=True)
class JobResult:
    """End of a job. `seconds` is wall time here, `note` the reason where the state does not name it."""

    job: Job | Command
    state: State
    run: Run
    seconds: float = 0.0
    note: str = ""


@dataclass
class _Running:
    job: Job | Command
    gpus: Sequence[str]
    process: subprocess.Popen
    log: Path
    #: Size of the log before this start.
    log_start: int
    started: float
    #: The run's status.json before this start, which may end before it writes one.
    status_before: dict[str, Any]


def run_jobs(jobs: Sequence[Job | Command], machine: Machine, log_dir: Path) -> list[JobResult]:
    """Runs every job, the first ones first, and returns their results in the order of `jobs`.

    A job that is finished already, by its own files, is not started. Ctrl-C or SIGTERM asks the running ones to end,
    waits for them and returns; jobs that it stopped or that had not begun are `State.INTERRUPTED`. A second Ctrl-C
    kills them.

    Args:
        log_dir: gets the output of each job, `<name>.log`.

    Raises:
        SweepError: two jobs share a folder, or the machine cannot run one of them; nothing was started.
    """
    check_folders(jobs)
    machine.check(jobs)
    results = {
        job.name: JobResult(job, State.FINISHED, read_run(job.output_dir), note="finished before")
        for job in jobs
        if job.is_finished()
    }
    waiting = [job for job in jobs if job.name not in results]
    running: list[_Running] = []
    _print_line(f"{len(jobs)} job{'s' * (len(jobs) != 1)}, {len(results)} finished before; logs in {log_dir}")
    with _Interrupts() as interrupts:
        try:
            while (waiting or running) and not interrupts.count:
                while waiting and (gpus := machine.take(waiting[0], [one.gpus for one in running])) is not None:
                    running.append(_start(waiting.pop(0), machine, gpus, log_dir))
                    _print_line(f"started   {running[-1].job.name} -> {running[-1].job.output_dir}")
                time.sleep(POLL_SECONDS)
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    result = _result(one)
                    _print_line(f"{result.state:<9} {_describe(result)} ({len(results) + 1} of {len(jobs)} jobs)")
                    results[one.job.name] = result
        finally:
            _end(running, interrupts)
    for one in running:
        result = _result(one)
        interrupted = JobResult(one.job, State.INTERRUPTED, result.run, result.seconds)
        results[one.job.name] = result if result.state == State.FINISHED else interrupted
    for job in waiting:
        results[job.name] = JobResult(job, State.INTERRUPTED, read_run(job.output_dir), note="not started")
    return [results[job.name] for job in jobs]


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


def check_folders(jobs: Sequence[Job | Command]) -> None:
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


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; [] without any."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip() not in ("", "-1")]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def _start(job: Job | Command, machine: Machine, gpus: Sequence[str], log_dir: Path) -> _Running:
    environment, devices = job_environment(), machine.devices(job)
    if machine.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    # Every rank of every job would otherwise take all cores, and torch.compile start a process for each.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = str(max(1, cores // (machine.room(job) * devices)))
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        environment.setdefault(name, threads)
    log_dir.mkdir(parents=True, exist_ok=True)
    log = log_dir / f"{file_name(job.name)}.log"
    status = read_run(job.output_dir).status
    with log.open("ab") as output:
        process = subprocess.Popen(
            job.command(devices),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C must reach a job once, through the sweep, and not a second time from the terminal. In exchange the
            # kernel is asked to end the job if the sweep is killed.
            start_new_session=True,
            preexec_fn=functools.partial(console.die_with_parent, os.getpid()),
        )
        return _Running(job, gpus, process, log, output.tell(), time.monotonic(), status)


def _result(one: _Running) -> JobResult:
    code, run = one.process.poll(), read_run(one.job.output_dir)
    status = run.status if run.status != one.status_before else {}
    state = one.job.state(code, run, status)
    note = _NOTES.get(state, "")
    if state == State.FAILED:
        note = f"exit code {code}: {status.get('reason') or _last_words(one)} ({one.log})"
    return JobResult(one.job, state, run, time.monotonic() - one.started, note)


def _last_words(one: _Running) -> str:
    """The last line of the job's output about an error, else its last line."""
    lines = [line for line in one.log.read_bytes()[one.log_start :].decode(errors="replace").splitlines() if line]
    errors = [line for line in lines if re.search(r"CRITICAL|^\w*(Error|Exception)\b", line)]
    return (errors or lines or ["it printed nothing"])[-1][:200]


def _end(running: Sequence[_Running], interrupts: "_Interrupts") -> None:
    """Waits until all jobs have ended; one more interrupt kills them."""
    if running:
        _print_line(f"stopping {len(running)} job{'s' * (len(running) != 1)} (Ctrl-C kills them)")
    led_here = min(interrupts.count, 1)  # 0 where an error did
    for one in running:
        one.process.terminate()
    while alive := [one for one in running if one.process.poll() is None]:
        if interrupts.count > led_here:
            for one in alive:
                os.killpg(one.process.pid, signal.SIGKILL)
        time.sleep(0.1)


def _describe(result: JobResult) -> str:
    loss = _loss(result.run.final_loss(heldout=bool(result.run.heldout.values.size)))
    tokens = f"{result.run.tokens:,} tokens" if result.run.tokens else ""
    parts = [tokens, loss and f"loss {loss}", result.note]
    return f"{result.job.name}: {', '.join(part for part in parts if part) or 'done'}"


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if loss == loss else ""


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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
