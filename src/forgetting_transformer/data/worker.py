"""What a worker process does first."""

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait

import torch

#: Seconds that a reader goes on after SIGTERM.
GRACE = 5


def start_worker(_worker: int) -> None:
    """Gives a worker one thread, and makes it slow to obey the signals that ask a run to stop.

    Readers copy and decompress; more threads would only take cores from the ranks. Launchers send signals to every
    process of a group or a job, and the run still needs batches for the steps until its ranks have agreed where to
    stop. (If that takes longer, it starts new readers.)
    """
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # A process that ends sends its readers SIGTERM too, once, and waits for them. The alarm ends one that is blocked.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE))
    leave_with_parent()


def leave_with_parent() -> None:
    """From here on this process ends when the one that started it is gone: killed, it could not stop its workers.

    PyTorch's readers look for their parent too, but take for it the one they have when they first wait for work. A
    reader whose rank was killed before that would wait for ever.
    """
    threading.Thread(target=_wait_and_leave, daemon=True).start()


def _wait_and_leave() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
