"""Faults from below: builds faults.c and tells it, in the process that is to suffer, what to do.

The library has to be preloaded, so processes come from a fork server that was started with it (`server`).
"""

import ctypes
import multiprocessing
import os
import shutil
import subprocess
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

OPEN, WRITE, FSYNC, RENAME, MKDIR, UNLINK = (1 << bit for bit in range(6))
EVERYTHING = OPEN | WRITE | FSYNC | RENAME | MKDIR | UNLINK
_KINDS = {"none": 0, "fail": 1, "kill": 2}


@dataclass(frozen=True)
class Fault:
    """What happens to calls on files below a folder that write, of one process and what it forks.

    Attributes:
        kind: "fail" (with `error`, an errno), "kill" (the process, by SIGKILL) or "none".
        countdown: which of the calls among `operations` is hit, from 1; `lasting`: and all after it.
        delay_us: microseconds that every call takes longer, as on slow storage.
    """

    kind: str = "none"
    operations: int = EVERYTHING
    countdown: int = 1
    error: int = 0
    lasting: bool = False
    delay_us: int = 0

    def begin(self, root: Path) -> None:
        """From here on, in this process."""
        ctypes.CDLL(None).faults_set(
            os.fsencode(root), _KINDS[self.kind], self.operations, self.countdown, self.error, int(self.lasting),
            self.delay_us,
        )  # fmt: skip


def seen() -> int:
    """Calls on files below the folder so far, in this process."""
    return int(ctypes.CDLL(None).faults_seen())


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def server(folder: Path, preload: list[str]) -> multiprocessing.context.ForkServerContext:
    """A fork server whose processes can suffer faults and have imported `preload`.

    Args:
        folder: where the library is built.
    """
    library = folder / "faults.so"
    subprocess.run(
        [compiler(), "-shared", "-fPIC", "-O1", "-o", library, Path(__file__).with_name("faults.c"), "-ldl"], check=True
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    # Processes that are killed leave semaphores behind, which Python clears away and warns of.
    with mock.patch.dict(os.environ, LD_PRELOAD=str(library), PYTHONWARNINGS="ignore:resource_tracker:UserWarning"):
        forkserver.ensure_running()
    return context
