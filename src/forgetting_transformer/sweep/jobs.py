"""A job of a sweep: one run of train.py, and the command that starts it in separate processes.

Jobs share no process. Hydra's own launcher would call the training function of every job in one process, where they
would share a process group, CUDA's context and the random state, and where a job on several devices starts its other
ranks with the whole sweep on their command line.
"""

import os
import re
import shlex
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from forgetting_transformer.sweep import SweepError
from forgetting_transformer.training import Config

#: Set by `fabric run`, torchrun or Fabric for their own processes; a job that inherited them would join another job.
#: The last two are of train.py for its own time.
_OF_ANOTHER_LAUNCH = re.compile(
    r"(LT_|TORCHELASTIC_|GROUP_|ROLE_).*|(LOCAL_)?(RANK|WORLD_SIZE)|NODE_RANK|MASTER_(ADDR|PORT)"
    r"|FORGETTING_TRANSFORMER_OUTCOME|HYDRA_FULL_ERROR"
)


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Attributes:
        name: what is its own in the sweep, such as "optimizer.lr=0.001,seed=0"; also names its log file.
        script: train.py.
        overrides: Hydra overrides of `script`, without `output_dir`.
        config: what they compose to, with the job's own `output_dir`.
        priority: of two jobs that wait, the one with the higher priority starts first.
    """

    name: str
    script: Path
    overrides: tuple[str, ...]
    config: Config
    priority: int = 0

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir).expanduser().absolute()

    @property
    def uses_cuda(self) -> bool:
        """Whether the job takes GPUs if there are any."""
        return self.config.fabric.accelerator != "cpu"

    def devices(self, all_devices: int) -> int:
        """Processes of the job on a node where it may have `all_devices` of them.

        Raises:
            SweepError: `fabric.devices` is neither a number nor "auto".
        """
        devices = self.config.fabric.devices
        if devices in ("auto", -1, "-1"):
            return all_devices
        try:
            count = int(devices)
        except (TypeError, ValueError):
            count = 0
        if count < 1:
            raise SweepError(
                f"fabric.devices={devices}: jobs of a sweep need a number of devices, or auto for all; which GPUs they "
                "get is the sweep's business (CUDA_VISIBLE_DEVICES limits it)"
            )
        return count


class State(StrEnum):
    """How a job ended."""

    FINISHED = "finished"
    #: Loss or gradients were not finite any more: a result, not an accident.
    DIVERGED = "diverged"
    #: The sweep ended it because its loss was hopeless.
    HOPELESS = "hopeless"
    #: Ended by itself without an error and before its budget, as preempted runs do.
    INCOMPLETE = "incomplete"
    #: The sweep was stopped while it ran, or before it began.
    INTERRUPTED = "interrupted"
    #: Waits in SLURM's queue or runs there; nobody looks at it any more.
    SUBMITTED = "submitted"
    FAILED = "failed"


def training_command(job: Job, devices: int, extra: Sequence[str] = (), alone: bool = False) -> list[str]:
    """`fabric run train.py …` for this job; `extra` are more options of `fabric run`.

    `alone`: one process, started without `fabric run`, which would import PyTorch once more
        before it starts that process.
    """
    config = job.config
    if alone:
        script = [sys.executable, str(job.script), *job.overrides, f"output_dir={quote(str(job.output_dir))}"]
        return [*script, f"fabric.devices={devices}"]
    return [
        # The `fabric run` of this very interpreter, whatever PATH says.
        *(sys.executable, "-m", "lightning.fabric.cli"),
        *("--devices", str(devices), "--accelerator", config.fabric.accelerator, *extra),
        *(str(job.script), *job.overrides),
        f"output_dir={quote(str(job.output_dir))}",
        # `fabric run` has them now, and refuses a config that says something else.
        *("fabric.devices=auto", "fabric.accelerator=auto"),
    ]


def quote(value: str) -> str:
    """A string as a Hydra override takes it literally, commas and equals signs included."""
    return "'" + value.replace("'", "\\'") + "'"


def shown_command(command: Sequence[str]) -> str:
    """A command to copy into a shell."""
    return shlex.join(command)


def job_environment() -> dict[str, str]:
    """The environment of a job: this process's, without the marks of a launch that this process may be part of."""
    environment = {name: value for name, value in os.environ.items() if not _OF_ANOTHER_LAUNCH.fullmatch(name)}
    defaults = {
        # The elastic agent of `fabric run` passes these signals on to the ranks and waits this long for them to end.
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
    }
    return defaults | environment


def file_name(name: str) -> str:
    """A job's name as part of a path: harmless characters, and not longer than file systems take."""
    plain = re.sub(r"[^\w.=,+-]", "-", name).strip("-") or "job"
    return plain if len(plain) <= 150 else f"{plain[:140]}-{zlib.crc32(name.encode()):08x}"
