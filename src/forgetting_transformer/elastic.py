"""What passes between the ranks of train.py and the elastic launcher that started them: how the run ended, and why.

`fabric run`, torchrun and scripts/launch.py are all PyTorch's elastic launcher. By itself it answers a failed rank, or
a signal, with a traceback of some fifty lines below the error that the rank has already printed. Here the ranks tell
the launcher how the run ended, so that it prints no traceback.

Two ways lead into the launcher. scripts/launch.py is one, and calls `conclude`. Into `fabric run` and torchrun comes
`quieten`, through an entry point that PyTorch loads in every elastic launcher (pyproject.toml). It does nothing for any
script but this project's train.py and evaluations, and where it is not installed only the
launcher's traceback comes back.

Imports only the standard library at first: ranks load this before PyTorch.
"""

import atexit
import contextlib
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

#: EX_TEMPFAIL of sysexits.h, "try again": what train.py and scripts/launch.py exit with when the run was preempted.
PREEMPTED_EXIT_CODE = 75
#: An outcome besides those of status.json: a signal came before training began.
NOT_STARTED = "not started"
#: Names the file into which the first rank of a node writes how the run ended.
OUTCOME_VARIABLE = "FORGETTING_TRANSFORMER_OUTCOME"
#: Messages that PyTorch's launcher logs and that add nothing to what the ranks have printed.
_ROUTINE = (
    "Received %s death signal",
    "Sending process %s closing signal",
    "failed (exitcode",
    "no error file defined for parent",
)
#: After a signal, for which the ranks of other nodes may still need the first launcher.
_SECONDS_TO_LEAVE = 5.0
_CHATTY = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.multiprocessing.errors.error_handler",
)


# In a rank
# -------------------------------------------------------------------------------------------------------------


def started_this_process() -> bool:
    """Whether an elastic launcher started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def report_outcome(outcome: str) -> None:
    """Tells the launcher the outcome: "done", "preempted", "failed" or NOT_STARTED. One rank of each node writes it."""
    path = os.environ.get(OUTCOME_VARIABLE)
    if path and started_this_process() and os.environ.get("LOCAL_RANK") == "0":
        with contextlib.suppress(OSError):
            Path(path).write_text(outcome, encoding="utf-8")


def record_reason(reason: str) -> None:
    """Leaves why this rank fails where the launcher looks for it."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError):
            details = {"py_callstack": reason, "timestamp": str(int(time.time()))}
            content = {"message": {"message": reason, "extraInfo": details}}
            Path(path).write_text(json.dumps(content), encoding="utf-8")


def end_with(message: str) -> NoReturn:
    """Ends an evaluation that cannot go on. One rank of each node prints this line; the launcher prints nothing."""
    record_reason(message)
    if path := os.environ.get(OUTCOME_VARIABLE):
        said = Path(path).with_name(hashlib.sha256(message.encode("utf-8", "replace")).hexdigest())
        try:
            said.touch(exist_ok=False)
        except FileExistsError:
            sys.exit(1)
        except OSError:
            pass
    sys.exit(message)


# In the launcher
# -------------------------------------------------------------------------------------------------------


def listen() -> None:
    """Prepares for the outcome that ranks will report, and stops the launcher from logging its routine."""
    if OUTCOME_VARIABLE not in os.environ:
        folder = tempfile.mkdtemp(prefix="forgetting_transformer-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ[OUTCOME_VARIABLE] = str(Path(folder) / "outcome")
    for name in _CHATTY:
        logging.getLogger(name).addFilter(lambda record: not str(record.msg).startswith(_ROUTINE))
    _wait_for_no_launcher_that_a_signal_ended()


def _wait_for_no_launcher_that_a_signal_ended() -> None:
    """On several nodes launchers wait five minutes for each other at the end, and one that got a signal does not come.

    After a signal all ranks have stopped together, and only need a moment to leave: the first launcher has their store.
    """
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    wait: Any = SimpleElasticAgent._exit_barrier

    def wait_briefly(self: Any) -> None:
        if outcome() != "preempted":
            wait(self)
        elif self._worker_group.group_world_size > 1:
            time.sleep(_SECONDS_TO_LEAVE)

    if wait.__name__ != wait_briefly.__name__:
        SimpleElasticAgent._exit_barrier = wait_briefly  # type: ignore[method-assign]


def outcome() -> str | None:
    """The outcome that the ranks of this node have reported, None if none."""
    try:
        return Path(os.environ[OUTCOME_VARIABLE]).read_text(encoding="utf-8")
    except (OSError, KeyError):
        return None


def conclude(error: BaseException | None) -> tuple[int, list[str]] | None:
    """What the launcher exits with and what it prints, when it has ended with `error`.

    Args:
        error: what `torch.distributed.run` raised, None if it returned.

    Returns:
        the exit code and lines that the ranks have not said; None for an error that is not known here.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    reported = outcome()
    if error is None:
        return (PREEMPTED_EXIT_CODE if reported == "preempted" else 0), []
    if isinstance(error, SignalException):
        if reported is None:
            return 128 + error.sigval, [f"{error.sigval.name}: the ranks have ended without saying how"]
        return {"done": 0, "preempted": PREEMPTED_EXIT_CODE, NOT_STARTED: PREEMPTED_EXIT_CODE}.get(reported, 1), []
    if isinstance(error, ChildFailedError):
        only_stopped = all(_was_stopped(failure) for failure in error.failures.values())
        if reported == NOT_STARTED and only_stopped:
            return PREEMPTED_EXIT_CODE, []
        return 1, _unexplained(error.failures)
    if port_is_taken(error):
        return 1, [
            "error: the port of this job is taken by another job on this machine: give this one another, as in "
            "--main-port 29401"
        ]
    if type(error).__name__ == "MisconfigurationException":
        from forgetting_transformer.gpus import missing

        return 1, [f"error: {' '.join(str(error).split())}. {missing() or ''}".rstrip()]
    return None


def port_is_taken(error: BaseException) -> bool:
    """Whether processes cannot find each other because another program has the port."""
    from torch.distributed import DistNetworkError

    return isinstance(error, DistNetworkError) and "EADDRINUSE" in str(error)


def _was_stopped(failure: Any) -> bool:
    """Whether a rank ended because it was asked to, by the launcher for another's sake or by somebody else."""
    return failure.exitcode == PREEMPTED_EXIT_CODE or failure.signal_name() == "SIGTERM"


def _unexplained(failures: dict[int, Any]) -> list[str]:
    """A line for every rank that ended without leaving a reason, unless it was ended because of another."""
    silent = {rank: f for rank, f in failures.items() if f.error_file == "<N/A>"}
    if len(silent) < len(failures) or not all(_was_stopped(f) for f in silent.values()):
        silent = {rank: f for rank, f in silent.items() if not _was_stopped(f)}
    return [
        f"rank {rank} (process {f.pid}) "
        + (f"was killed by {f.signal_name()}" if f.exitcode < 0 else f"ended with code {f.exitcode}")
        for rank, f in sorted(silent.items())
    ]


def quieten() -> Callable[..., Any]:
    """The entry point: prepares the launcher of a run of train.py to end as `conclude` says.

    PyTorch asks for a rendezvous backend at this point. There is none: what it gets raises an error that says so.
    """

    def no_backend(parameters: Any) -> None:
        raise ValueError("forgetting_transformer is not a rendezvous backend; use c10d or static")

    if _runs_training(sys.argv[1:]) or _runs_evaluation(sys.argv[1:]):
        listen()
        sys.excepthook = _report_and_exit
    return no_backend


def _runs_training(arguments: list[str]) -> bool:
    """Whether arguments name this repository's train.py, the module forgetting_transformer.train or its file."""
    package = Path(__file__).resolve().parent
    for argument in arguments:
        path = Path(argument)
        if path.name == "train.py" and (path.parent / "src" / package.name).is_dir():
            return True
        if argument == f"{package.name}.train" or (
            path.name == "__main__.py" and path.resolve().parent == package / "train"
        ):
            return True
    return False


def _report_and_exit(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    end = conclude(error)
    if end is None:
        sys.__excepthook__(kind, error, trace)
        return
    code, lines = end
    for line in lines:
        print(line, file=sys.stderr)
    sys.exit(code)  # from here Python takes it as the code of the process


def _runs_evaluation(arguments: list[str]) -> bool:
    scripts = (Path(argument).absolute() for argument in arguments if argument.endswith(".py"))
    return any(
        path.parents[1].name == "eval" and (path.parents[2] / "src" / "forgetting_transformer").is_dir()
        for path in scripts
        if len(path.parents) > 2
    )
