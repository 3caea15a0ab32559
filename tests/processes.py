"""Processes for tests: forked from a server that has imported everything, so that a start takes a tenth of a second and
not the ten of importing.

`Command` is a command line such as `python train.py …`. What the start of an interpreter decides (imports, options of
Python) is not the same as in a new process: every entry point has a test that starts it as a user does, too.
"""

import importlib.util
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from tests.waiting import HANG

ROOT = Path(__file__).parents[1]


def load_script(name: str, folder: str = "scripts") -> ModuleType:
    """FOLDER/NAME.py of the repository, loaded afresh, so that a test may change it."""
    spec = importlib.util.spec_from_file_location(f"{folder}_{name}", ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_here(script: str, *arguments: str) -> int | str | None:
    """Runs a script of the repository in this process; returns its exit code, or the message that it ends with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(ROOT / script), *arguments])
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as end:
            return end.code
    return None


server = multiprocessing.get_context("forkserver")
# What a run imports late, too: every process forked would do it again.
server.set_forkserver_preload(
    ["hydra", "forgetting_transformer.training.trainer", "tests.training.conftest", "tests.frozen"]
)


#: Below those that Linux gives to outgoing connections and to sockets that ask for any port (32768 on): one of those
#: may be given away between the moment it is chosen and the moment rank 0 listens on it. Above those that Lightning
#: derives from the number of a Slurm job (15000 to 24999).
PORTS = range(25000, 32768)


def _is_free(port: int) -> bool:
    """Whether a server could listen on `port` of this machine now."""
    for family in (socket.AF_INET, *([socket.AF_INET6] if socket.has_dualstack_ipv6() else [])):
        with socket.socket(family) as probe:
            # As PyTorch's server does: connections that were closed a moment ago do not keep the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
                probe.listen()
            except OSError:
                return False
    return True


def _shuffled_ports() -> list[int]:
    """Of this worker only: two workers that look for a free one at the same time would find the same."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = PORTS[worker :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]
    return random.SystemRandom().sample(own, len(own))


_ports = iter(_shuffled_ports())


def free_port() -> int:
    """No test of this session is given it again."""
    return next(port for port in _ports if _is_free(port))


def shell_environment() -> dict[str, str]:
    """This process's environment, without what a launcher of several processes would have set."""
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}


def start_as_by_default() -> None:
    """From here on a process of the server starts others, such as readers, as a user's process does.

    It would start them with a fork server of its own, which imports everything again.
    """
    multiprocessing.set_start_method(None, force=True)


class Command:
    """`python` with SCRIPT, `-m MODULE` or `-c PROGRAM`, started; as much of subprocess.Popen as tests need.

    Args:
        words: the script, relative to the repository, and its arguments; "-m", the module and its arguments; or "-c"
            and the program.
        output, errors: files (or terminals) for what it prints.
    """

    def __init__(
        self,
        *words: str,
        output: str | Path = os.devnull,
        errors: str | Path = os.devnull,
        folder: Path = ROOT,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        environment = dict(shell_environment() if environment is None else environment)
        arguments = (list(words), str(folder), environment, str(output), str(errors))
        self._process = server.Process(target=_run, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join(HANG)
        assert self._process.exitcode is not None, f"it hangs: not ended within {HANG} s"
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def run_command(
    *words: str, folder: Path = ROOT, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess:
    """`python SCRIPT ARGUMENTS`, `python -m MODULE ARGUMENTS` or `python -c PROGRAM` to its end."""
    with tempfile.TemporaryDirectory() as printed:
        output, errors = Path(printed) / "output", Path(printed) / "errors"
        code = Command(*words, output=output, errors=errors, folder=folder, environment=environment).wait()
        return subprocess.CompletedProcess(words, code, output.read_text(), errors.read_text())


def _run(words: list[str], folder: str, environment: dict[str, str], output: str, errors: str) -> None:
    import torch

    start_as_by_default()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for path, number in ((output, 1), (errors, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    # The streams of the server remember whether its own output could be sought.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    torch.set_num_threads(1)
    if words[0] == "-c":
        exec(words[1], {"__name__": "__main__"})
        return
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, folder)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    script = ROOT / words[0]
    sys.argv = [str(script), *words[1:]]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
