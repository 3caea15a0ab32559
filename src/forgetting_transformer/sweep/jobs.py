"""A job of a sweep: one run of train.py, and the command that starts it in separate processes.

Jobs share no process. Hydra's own launcher would call the training function of every job in one process, where they
would share a process group, CUDA's context and the random state. A job on several devices would start its other ranks
with the command line of the whole sweep.
"""

import dataclasses
import os
import re
import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from forgetting_transformer import console
from forgetting_transformer.analysis.runs import Run, read_run
from forgetting_transformer.training import Config
from forgetting_transformer.training.config.continuing import changes_that_alter_the_run

#: Set by `fabric run`, torchrun, Fabric or SLURM for their own processes; a job that inherited them would join another
#: job. The last is of scripts/launch.py.
_OF_ANOTHER_LAUNCH = re.compile(
    r"(LT_|TORCHELASTIC_|GROUP_|ROLE_).*|(LOCAL_)?(RANK|WORLD_SIZE)|NODE_RANK|MASTER_(ADDR|PORT)"
    r"|SLURM_(NTASKS|PROCID|LOCALID)|FORGETTING_TRANSFORMER_OUTCOME"
)


class State(StrEnum):
    """End of a job."""

    FINISHED = "finished"
    #: Loss or gradients were not finite any more: a result, not an accident.
    DIVERGED = "diverged"
    #: Ended by itself without an error and before its budget, as preempted runs do.
    INCOMPLETE = "incomplete"
    #: The sweep was stopped while it ran, or before it began.
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Attributes:
        name: its values in the sweep, such as "optimizer.lr=0.001,seed=0"; also names its log file.
        overrides: of train.py, as of `of_each_job`.
        config: composed from them, with the job's own `output_dir`.
    """

    name: str
    overrides: tuple[str, ...]
    config: Config

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir).expanduser().absolute()

    @property
    def accelerator(self) -> str:
        return self.config.fabric.accelerator

    def devices(self, all_devices: int) -> int:
        """Number of processes, where the job may have `all_devices` of them."""
        devices = self.config.fabric.devices
        return all_devices if devices == "auto" else devices

    def command(self, devices: int) -> list[str]:
        """Command that trains on so many devices."""
        own = [*self.overrides, f"output_dir={quote(str(self.output_dir))}", f"fabric.devices={devices}"]
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={devices}"] if devices > 1 else []
        return [sys.executable, *torchrun, "-m", "forgetting_transformer.train", *own]

    def is_finished(self) -> bool:
        """Whether its folder has this run, finished, with these settings."""
        run = read_run(self.output_dir)
        if not self.config.resume or not run.config or not run.finished(self.config.train.max_tokens):
            return False
        # With other settings the job starts, and train.py refuses it and names them.
        return not changes_that_alter_the_run(run.config, dataclasses.asdict(self.config))

    def state(self, code: int | None, run: Run, status: Mapping[str, Any]) -> State:
        """The state in which it ended.

        Args:
            code: exit code.
            status: contents of status.json from this start; {} if it ended before writing it.
        """
        if code == 0 and run.finished(self.config.train.max_tokens):
            return State.FINISHED
        if code == 0 or status.get("status") == "preempted":
            return State.INCOMPLETE
        return State.DIVERGED if status and run.diverged else State.FAILED


@dataclass(frozen=True)
class Command:
    """Another command of this Python that is scheduled among runs, such as the evaluation of one.

    Attributes:
        name: as of `Job`.
        arguments: a script, or -m and a module, and its arguments.
        output_dir: of its results; no two jobs have the same.
        accelerator: "cpu" for one that needs no GPU; others get one, where there is one.
    """

    name: str
    arguments: tuple[str, ...]
    output_dir: Path
    accelerator: str = "auto"

    def devices(self, _all_devices: int) -> int:
        return 1

    def command(self, _devices: int) -> list[str]:
        return [sys.executable, *self.arguments]

    def is_finished(self) -> bool:
        """False: the caller knows whether its results are there."""
        return False

    def state(self, code: int | None, _run: Run, _status: Mapping[str, Any]) -> State:
        return State.FINISHED if code == 0 else State.FAILED


def of_each_job(overrides: Iterable[str]) -> tuple[str, ...]:
    """Overrides of a sweep without those of its output folder and of how jobs share the machine."""
    plain = (override.removeprefix("++") for override in overrides)
    searched = "hydra.searchpath="
    return tuple(o for o in plain if o.startswith(searched) or not o.startswith(("output_dir=", "hydra.", "hydra/")))


def quote(value: str) -> str:
    """A string as a Hydra override takes it literally, commas and equals signs included."""
    return "'" + value.replace("'", "\\'") + "'"


def job_environment() -> dict[str, str]:
    """The environment of a job: this process's, without the marks of a launch that this process may be part of."""
    environment = {name: value for name, value in os.environ.items() if not _OF_ANOTHER_LAUNCH.fullmatch(name)}
    # Lets jobs import plug-ins beside train.py too.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (sys.path[0], os.environ.get("PYTHONPATH"))))
    # A free port for every job instead of one port for all.
    return {**console.ELASTIC_LAUNCHER, "PET_STANDALONE": "1"} | environment


def file_name(name: str) -> str:
    """A job's name as part of a path: harmless characters, and not longer than file systems take."""
    plain = re.sub(r"[^\w.=,+-]", "-", name).strip("-") or "job"
    return plain if len(plain) <= 150 else f"{plain[:140]}-{zlib.crc32(name.encode()):08x}"
