"""Seconds of wall time of a start by activity, from the first line of the program on.

A run has two clocks. One is of the whole start, whose categories goodput.json adds up:

    steps        waiting for and taking training steps
    first step   the first step of every start: compiling, tuning kernels, first allocations
    data         waiting for the next batch
    evaluation, checkpoint (waiting for the copy, or for the last save to end), log
    start        from the first line of the program to the first step: imports, building, loading

The other divides the time to the end of the first step into the stages of `Trainer.begin`. All times are of this rank's
host, which waits for the device where it logs.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CATEGORIES = ("steps", "first step", "data", "evaluation", "checkpoint", "log", "start")


class Clock:
    """Wall time, counted in one category at a time.

    Args:
        first: has the time from the start of the process too.
    """

    def __init__(self, first: str) -> None:
        self._seconds = {first: _seconds_since_process_start()}
        #: Current category; None while the clock stands.
        self.category: str | None = first
        self._since = time.perf_counter()

    def switch(self, category: str | None) -> str | None:
        """Counts time in `category` from now on, or stops for None; returns the one before."""
        now, before = time.perf_counter(), self.category
        if before is not None:
            self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self.category, self._since = category, now
        return before

    @contextmanager
    def during(self, category: str) -> Iterator[None]:
        """After an error time still runs in `category`, so that a message can name it."""
        before = self.switch(category)
        yield
        self.switch(before)

    def seconds(self) -> dict[str, float]:
        """Seconds by category up to now, in the order in which they began."""
        self.switch(self.category)
        return dict(self._seconds)

    def __str__(self) -> str:
        seconds = self.seconds()
        parts = [f"{category} {value:.1f}" for category, value in seconds.items() if value >= 0.05]
        return f"{sum(seconds.values()):.1f} s after the start of the process: {', '.join(parts)}"


def _seconds_since_process_start() -> float:
    """Imports and Hydra come before any clock of ours; Linux knows when the process began, elsewhere this is 0."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0
