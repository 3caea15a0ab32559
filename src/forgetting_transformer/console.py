"""Messages and end of a process of train.py: one line where one is enough, once for all processes of a node, without
passwords.

Passwords stay out of what is written and printed: config.yaml, checkpoints, logs, error messages, wandb. A URL such as
https://reader:PASSWORD@host/data?token=TOKEN is used as it is given and shown as https://***@host/data?token=***.

Imports only the standard library, so that a typo is answered before PyTorch is loaded.
"""

import contextlib
import ctypes
import logging
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

DATE_FORMAT = "%m-%d %H:%M:%S"
#: Seconds that the other processes of a node wait for the launcher to end them, because the first one reports an error
#: that all share. After that the error is theirs alone, and they report it too.
_SECONDS_FOR_THE_FIRST = 20.0
#: Signals that end a run in order.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
#: EX_TEMPFAIL of sysexits.h, "try again": what train.py and scripts/launch.py exit with when the run was preempted.
PREEMPTED_EXIT_CODE = 75
#: Names the file into which the first rank of a node writes how the run ended; set by scripts/launch.py.
OUTCOME_VARIABLE = "FORGETTING_TRANSFORMER_OUTCOME"
#: Environment of PyTorch's elastic launcher: it passes these signals on to the ranks, and waits this long for them to
#: end. By itself SIGUSR1 only ends it.
ELASTIC_LAUNCHER = {
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
}

log = logging.getLogger(__name__)
_has_log = False
#: Parent of this process at the time of end_on_signals(); it may end during the imports that follow.
_parent: int | None = None


def end_on_signals() -> None:
    """Makes signals end this process with the exit code of a preempted run, until another handler is set."""
    global _parent
    process, _parent = os.getpid(), os.getppid()

    def leave(number: int, _: FrameType | None) -> None:
        if os.getpid() != process:  # a forked worker, which its parent ends
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if first_of_node():
            said = f"{signal.Signals(number).name} before training began; the same command starts it\n"
            os.write(2, said.encode())  # print() may be what the signal has interrupted
        # Not 0, although the launcher may take this for a failure: ranks that got no signal would wait for this one.
        report_outcome("preempted")
        os._exit(PREEMPTED_EXIT_CODE)

    for number in SIGNALS:
        signal.signal(number, leave)


def ignore_signals() -> None:
    """Ignores signals from now on, so that none changes the exit code of a process that is about to end."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def first_of_node() -> bool:
    """Whether this process reports for its node: all its processes fail alike when the config or the data is wrong."""
    return (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") == "0"


def has_launcher() -> bool:
    """Whether PyTorch's elastic launcher started this process: `fabric run`, torchrun or scripts/launch.py."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def report_outcome(outcome: str) -> None:
    """Tells scripts/launch.py how the run ended: "done", "preempted" or "failed". One rank of each node writes it."""
    path = os.environ.get(OUTCOME_VARIABLE)
    if path and has_launcher() and os.environ.get("LOCAL_RANK") == "0":
        with contextlib.suppress(OSError):  # the launcher then takes the code alone
            Path(path).write_text(outcome, encoding="utf-8")


def rank() -> int:
    """Rank of this process by its environment variables, before the processes are connected."""
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def log_format(number: int) -> logging.Formatter:
    return RedactingFormatter(f"%(asctime)s rank {number} %(levelname)s %(message)s", DATE_FORMAT)


def start_log() -> None:
    """Log lines on the terminal until the run's own log begins: all of them on rank 0, warnings on the others."""
    global _has_log
    _has_log = True
    handler = logging.StreamHandler()
    handler.setFormatter(log_format(rank()))
    handler.setLevel(logging.INFO if rank() == 0 else logging.WARNING)
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.handlers = [handler]


def die_with_launcher() -> None:
    """Asks Linux to end this rank when the process that started it ends, however that ends: a signal that a launcher
    does not handle, such as SIGUSR1, would otherwise leave ranks behind that hold the GPUs and the run's folder."""
    if has_launcher() or os.environ.get("LOCAL_RANK", "0") != "0":
        die_with_parent(_parent or os.getppid())


def die_with_parent(parent: int) -> None:
    """Asks Linux to end this process, with SIGTERM, when the one that started it ends.

    Args:
        parent: process that started this one. If it has ended already, this process ends at once.
    """
    if sys.platform != "linux":
        return
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def exit_code(outcome: str) -> int:
    """Reports the end of the run to the launcher, "done" or "preempted"; returns the code to exit with.

    An elastic launcher (`fabric run`, torchrun) takes every code but 0 for a failure; so do the launchers of Fabric and
    SLURM for ranks other than 0, and kill those that are not done yet.
    """
    report_outcome(outcome)
    if outcome == "preempted":
        # A scheduler and a launcher may both have sent the signal: the second must not interrupt an orderly end.
        ignore_signals()
    if outcome != "preempted" or has_launcher() or rank() > 0:
        return 0
    return PREEMPTED_EXIT_CODE


def fail(reason: str, trace: bool = False, once: bool = True, skip_cleanup: bool = False) -> NoReturn:
    """Logs why this process ends, and ends it with code 1.

    Args:
        reason: one line.
        trace: add the traceback of the exception being handled.
        once: the other processes of the node have probably failed for the same reason, so only the first logs it.
        skip_cleanup: leave out Python's clean-up, in which tensors on a failed GPU would abort the process.
    """
    report_outcome("failed")
    reason = redact(reason)
    text = f"{reason}\n{redact(traceback.format_exc())}" if trace else reason
    speaks = first_of_node() or not once
    if not speaks:
        _only_into_files()
    if _has_log:
        log.critical("%s", text)
    if not speaks:  # the launcher ends this process when the first one has reported the error and ended
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        time.sleep(_SECONDS_FOR_THE_FIRST)
    if not speaks or not _has_log:
        print(text, file=sys.stderr)
    if skip_cleanup:
        try:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(1)
    sys.exit(1)


def _only_into_files() -> None:
    root = logging.getLogger()
    root.handlers = [h for h in root.handlers if isinstance(h, logging.FileHandler)] or [logging.NullHandler()]


# Passwords
# -------------------------------------------------------------------------------------------------------------

REDACTED = "***"
# Up to the last @ before the path, since passwords may contain @.
_USER = re.compile(r"(?<=://)[^/?#\s]*@")
_QUERY = re.compile(r"([?&][\w.-]*(?:token|sig|secret|password|passwd|credential|key|auth)[\w.-]*=)[^&#\s'\"]+", re.I)


def redact(text: str) -> str:
    """`text` without secrets in URLs: users with their passwords, and keys in queries."""
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\g<1>{REDACTED}", _USER.sub(f"{REDACTED}@", text))


def redact_tree(value: Any) -> Any:
    """`redact` for every string in nested dictionaries and lists, such as a configuration."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redact_tree(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_tree(inner) for inner in value]
    return value


def is_redacted(url: str) -> bool:
    """Whether this is the record of a URL without its password."""
    return f"{REDACTED}@" in url or f"={REDACTED}" in url


def how_to_install(extra: str) -> str:
    """The command that installs an extra of this package, which is in no package index."""
    return f'pip install -e ".[{extra}]" in a clone of this repository'


class RedactingFormatter(logging.Formatter):
    """A formatter whose output, tracebacks included, has no passwords of URLs."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))
