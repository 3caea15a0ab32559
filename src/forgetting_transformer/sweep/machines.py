"""Where the jobs of a sweep run: on this machine, sharing its GPUs, or as SLURM jobs.

Both offer the same three things to runner.py: `check` before anything starts, `start` when there is room, and a
`Process` that can be asked whether it has ended and told to stop.
"""

import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from forgetting_transformer.redaction import redact
from forgetting_transformer.sweep import SweepError
from forgetting_transformer.sweep.jobs import Job, file_name, job_environment, shown_command, training_command


class Process:
    """A started job.

    Attributes:
        log: file with what it printed.
        waits: whether its end is the end of the job.

    Args:
        command, environment: what to start.
        log: file that takes all it prints.
        at_end: called once when it has ended.
    """

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], log: Path, at_end: Callable[[], None]
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self.waits = log, True
        self._at_end: Callable[[], None] | None = at_end
        with log.open("ab") as output:
            self._process = self._open(command, environment, output)

    @property
    def description(self) -> str:
        """What others know the job by, "" if it lives and dies with the sweep."""
        return ""

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        code = self._process.poll()
        if code is not None and self._at_end is not None:
            self._at_end()
            self._at_end = None
        return code

    def stop(self) -> None:
        """Asks it to end; `fabric run` passes that on to its ranks."""
        self._process.terminate()

    def leave(self) -> None:
        """The sweep is being stopped: ends what belongs to it."""
        self.stop()

    def kill(self) -> None:
        """Ends it at once, with all its children."""
        os.killpg(self._process.pid, signal.SIGKILL)

    @staticmethod
    def _open(command: Sequence[str], environment: dict[str, str], output: IO[bytes]) -> subprocess.Popen:
        # In a new session: Ctrl-C must reach a job once, through the sweep, and not a second time from the
        # terminal. In exchange the kernel is asked to end the job if the sweep is killed.
        libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None

        def die_with_sweep() -> None:
            PR_SET_PDEATHSIG = 1
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_sweep if libc is not None else None,
        )


class LocalMachine:
    """This machine: jobs one after another on a CPU, as many at once as its GPUs have room for.

    A job takes `fabric.devices` GPUs ("auto": all of them), by CUDA_VISIBLE_DEVICES.

    Args:
        gpus: the GPUs to share, as CUDA_VISIBLE_DEVICES names them; None: those this process sees.
        jobs_at_once: most jobs that run at a time; None: on GPUs as many as fit, on a CPU one.
        jobs_per_gpu: jobs that share a GPU. More than one where a job leaves its GPU idle, as
            small models and starts do.
    """

    def __init__(
        self, gpus: Sequence[int | str] | None = None, jobs_at_once: int | None = None, jobs_per_gpu: int = 1
    ) -> None:
        if jobs_at_once is not None and jobs_at_once < 1:
            raise SweepError(f"jobs_at_once={jobs_at_once} must be 1 or more, or null for as many as the GPUs allow")
        if jobs_per_gpu < 1:
            raise SweepError(f"jobs_per_gpu={jobs_per_gpu} must be 1 or more")
        self.gpus = [str(gpu) for gpu in gpus] if gpus is not None else visible_gpus()
        self._jobs_on = dict.fromkeys(self.gpus, 0)
        self._running = 0
        self.jobs_at_once, self.jobs_per_gpu = jobs_at_once, jobs_per_gpu

    def check(self, jobs: Sequence[Job]) -> None:
        """
        Raises:
            SweepError: a job asks for more than there is.
        """
        for job in jobs:
            if job.config.fabric.accelerator in ("cuda", "gpu") and not self.gpus:
                raise SweepError(
                    f"{job.name}: fabric.accelerator={job.config.fabric.accelerator}, but no GPU is visible"
                )
            if self.gpus and job.uses_cuda and self._devices(job) > len(self.gpus):
                raise SweepError(
                    f"{job.name}: fabric.devices={job.config.fabric.devices}, but the sweep has {len(self.gpus)} GPUs "
                    f"({', '.join(self.gpus)})"
                )

    def start(self, job: Job, log: Path) -> Process | None:
        """Starts the job, or returns None if it must wait for others to end."""
        devices, needed, limit = self._devices(job), self._gpus_of(job), self._limit(job)
        free = [gpu for gpu in self.gpus if self._jobs_on[gpu] < self.jobs_per_gpu]
        if self._running >= limit or needed > len(free):
            return None
        mine = sorted(free, key=self._jobs_on.__getitem__)[:needed]
        environment = job_environment()
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        # `fabric run` would otherwise give every rank of every job all cores.
        threads = max(1, _cores() // (limit * devices))
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        # torch.compile would start a process per core in every job.
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
        # A free port for every job instead of one port for all.
        environment.setdefault("PET_STANDALONE", "1")

        def at_end() -> None:
            self._running -= 1
            for gpu in mine:
                self._jobs_on[gpu] -= 1

        self._running += 1
        for gpu in mine:
            self._jobs_on[gpu] += 1
        # Within SLURM a process that nothing launched takes itself for one of SLURM's tasks.
        alone = devices == 1 and "SLURM_NTASKS" not in environment
        return Process(training_command(job, devices, alone=alone), environment, log, at_end)

    def room(self, job: Job) -> int:
        """How many jobs like this one run at a time."""
        needed = self._gpus_of(job)
        return min(self._limit(job), self.jobs_per_gpu * len(self.gpus) // needed) if needed else self._limit(job)

    def _devices(self, job: Job) -> int:
        return job.devices(len(self.gpus) if self.gpus and job.uses_cuda else 1)

    def _gpus_of(self, job: Job) -> int:
        return self._devices(job) if self.gpus and job.uses_cuda else 0

    def _limit(self, job: Job) -> int:
        return self.jobs_at_once or (self.jobs_per_gpu * len(self.gpus) if self._gpus_of(job) else 1)


class Slurm:
    """SLURM: a batch script per job, written beside its log and submitted with `sbatch`.

    A preempted job is put back into the queue by SLURM (--requeue), and continues from its checkpoint. submitit is not
    used: it pickles what a job runs, and requeues jobs itself, so that there would be two who do.

    Args:
        nodes: nodes of a job. Each runs `fabric run` with `fabric.devices` processes.
        partition, account, time, mem, cpus_per_task: the options of `sbatch` of these names; None leaves them out.
        sbatch: more options, such as "--constraint=h100".
        setup: lines of shell that run before training, such as "module load cuda".
        wait: whether the sweep stays until its jobs have ended. Otherwise it ends when all are submitted.
        jobs_at_once: most jobs in SLURM's queue at a time; None: all.
    """

    def __init__(
        self,
        nodes: int = 1,
        partition: str | None = None,
        account: str | None = None,
        time: str | None = None,
        mem: str | None = None,
        cpus_per_task: int | None = None,
        sbatch: Sequence[str] = (),
        setup: Sequence[str] = (),
        wait: bool = True,
        jobs_at_once: int | None = None,
    ) -> None:
        if not wait and jobs_at_once is not None:
            raise SweepError(f"jobs_at_once={jobs_at_once} needs wait=true: nobody is there to submit the others later")
        wrong = [option for option in sbatch if not option.startswith("-")]
        if wrong:
            raise SweepError(f"sbatch={wrong}: these are options of sbatch and begin with --, as in --constraint=h100")
        self.nodes, self.wait, self.jobs_at_once, self.setup = nodes, wait, jobs_at_once, list(setup)
        named = {
            "partition": partition,
            "account": account,
            "time": time,
            "mem": mem,
            "cpus-per-task": cpus_per_task,
        }
        self._options = [f"--{name}={value}" for name, value in named.items() if value is not None] + list(sbatch)
        self._running = 0

    def check(self, jobs: Sequence[Job]) -> None:
        """
        Raises:
            SweepError: there is no SLURM here, or a job does not say how many devices it needs.
        """
        if shutil.which("sbatch") is None:
            raise SweepError(
                "hydra/launcher=slurm: there is no sbatch on PATH; run this on a login node of the cluster"
            )
        for job in jobs:
            for override in job.overrides:
                if redact(override) != override:
                    raise SweepError(
                        f"{redact(override)} holds a password, which a batch script would keep. Put the URL into an "
                        f"environment variable and write {override.partition('=')[0]}='${{oc.env:VARIABLE}}'"
                    )
            if job.devices(0) == 0:
                raise SweepError(
                    f"{job.name}: fabric.devices=auto; say how many devices a job has on a node, as in fabric.devices=4"
                )

    def start(self, job: Job, log: Path) -> Process | None:
        """Submits the job, or returns None if enough are in the queue."""
        if self.jobs_at_once is not None and self._running >= self.jobs_at_once:
            return None
        log.parent.mkdir(parents=True, exist_ok=True)
        script = log.with_suffix(".sbatch")
        script.write_text(self.batch_script(job, log), encoding="utf-8")
        # With --wait sbatch ends when the job ends, with its exit code.
        command = ["sbatch", *(["--wait"] if self.wait else []), str(script)]

        def at_end() -> None:
            self._running -= 1

        self._running += 1
        submission = log.with_suffix(".submit")
        submission.unlink(missing_ok=True)
        return _SlurmProcess(command, job_environment(), submission, at_end, waits=self.wait)

    def room(self, job: Job) -> int:
        """How many jobs to have in the queue at a time."""
        return self.jobs_at_once or 1

    def batch_script(self, job: Job, log: Path) -> str:
        """What is submitted for this job."""
        devices = job.devices(0)
        options = [
            # One name per output_dir, for `singleton` below.
            f"--job-name={file_name(job.name)}-{zlib.crc32(str(job.output_dir).encode()):08x}",
            f"--output={log.absolute()}",
            "--open-mode=append",
            f"--chdir={Path.cwd()}",
            f"--nodes={self.nodes}",
            "--ntasks-per-node=1",
            *([f"--gpus-per-node={devices}"] if job.uses_cuda else []),
            "--requeue",
            # A sweep that is started again while this job still runs waits for it instead of fighting over its folder.
            "--dependency=singleton",
            *self._options,
        ]
        lines = ["#!/usr/bin/env bash", *(f"#SBATCH {option}" for option in options), "set -euo pipefail", *self.setup]
        if self.nodes == 1:
            lines += ["export PET_STANDALONE=1", f"exec {shown_command(training_command(job, devices))}"]
        else:
            # Every node starts its own `fabric run`; they meet at the first one.
            command = training_command(job, devices, ("--num-nodes", str(self.nodes)))
            script = command.index(str(job.script))
            options_of_node = '--node-rank "$SLURM_NODEID" --main-address "$MAIN_ADDRESS" --main-port "$MAIN_PORT"'
            on_node = f"{shown_command(command[:script])} {options_of_node} {shown_command(command[script:])}"
            lines += [
                'export MAIN_ADDRESS="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
                "export MAIN_PORT=$((20000 + SLURM_JOB_ID % 20000))",
                f"exec srun --kill-on-bad-exit=1 bash -c {shlex.quote(on_node)}",
            ]
        return "\n".join(lines) + "\n"


class _SlurmProcess(Process):
    """`sbatch`, which prints the number of the job at once and, with --wait, stays until the job has ended."""

    def __init__(self, *arguments: Any, waits: bool) -> None:
        super().__init__(*arguments)
        self.waits = waits

    @property
    def description(self) -> str:
        return f"SLURM job {self._number}" if self._number else ""

    def stop(self) -> None:
        if self._number is not None:
            subprocess.run(["scancel", self._number], check=False)
        else:
            super().stop()

    def leave(self) -> None:
        """The job stays in the queue: it is the cluster's, and only `sbatch` is the sweep's."""
        super().stop()

    @property
    def _number(self) -> str | None:
        found = re.search(r"Submitted batch job (\d+)", self.log.read_text(encoding="utf-8", errors="replace"))
        return found[1] if found else None


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; [] without any."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip() not in ("", "-1")]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
