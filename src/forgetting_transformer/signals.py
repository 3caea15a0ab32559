"""Signals before training hears them itself: they end the process with the code of a preempted one.

Imports only what Python has loaded by itself, so that the first signal is heard a moment after the process starts.
"""

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
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


class StartEnds:
    """Context manager in which a signal ends the process. It may be entered for good, as train.py does.

    At its end a handler that somebody else has set meanwhile stays.
    """

    #: Process that started this one. It is read here since it may end during the imports that follow.
    parent = 0

    def __enter__(self) -> None:
        StartEnds.parent = StartEnds.parent or os.getppid()
        self._process = os.getpid()
        self._before = {number: signal.signal(number, self._leave) for number in NUMBERS}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._leave:
                signal.signal(number, handler)

    def _leave(self, number: int, _: "FrameType | None") -> None:
        if os.getpid() != self._process:  # a forked worker, which its parent ends
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if first_of_node():
            said = f"{signal.Signals(number).name} before training began; the same command starts it\n"
            os.write(2, said.encode())  # print() may be what the signal has interrupted
        # Not 0, although the launcher may take this for a failure: ranks that got no signal would wait for this one.
        report_outcome("preempted")
        os._exit(PREEMPTED_EXIT_CODE)


def ignore() -> None:
    """Hears no signal from now on, so that none changes the exit code of a process that is about to leave."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def first_of_node() -> bool:
    """Whether this process reports for all of its node: they fail alike when the configuration or the data is wrong."""
    return (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") == "0"


def has_launcher() -> bool:
    """Whether PyTorch's elastic launcher started this process: `fabric run`, torchrun or scripts/launch.py."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def report_outcome(outcome: str) -> None:
    """Reports the end of the run, "done", "preempted" or "failed", to scripts/launch.py. Rank 0 of a node does."""
    path = os.environ.get(OUTCOME_VARIABLE)
    if path and has_launcher() and os.environ.get("LOCAL_RANK") == "0":
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(outcome)
        except OSError:
            pass  # the launcher then takes the code alone
