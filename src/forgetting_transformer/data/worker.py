"""What a process that reads data does first."""

import os
import signal
import time

import torch


def start_worker(_worker: int) -> None:
    """One thread, because readers copy and decompress, and more would only take cores from the ranks. And deaf to the
    signals that ask a run to stop: launchers send them to every process of a group or a job, and the run still needs
    batches for the steps until its ranks have agreed where to stop."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    started = time.monotonic()
    heard: list[float] = []

    def terminate(*_: object) -> None:
        # A loader that wants its reader gone tells it so through a queue; it sends SIGTERM when that did not help, and
        # again when its process ends.
        heard.append(time.monotonic() - started)
        if heard[-1] - heard[0] > 3:
            os._exit(0)

    signal.signal(signal.SIGTERM, terminate)
