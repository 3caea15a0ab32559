"""The clock of one start: seconds of wall time by what the loop was doing.

    steps        waiting for and taking training steps
    first step   the first step of every start: compiling, tuning kernels, first allocations
    data         waiting for the next batch
    evaluation, checkpoint (waiting for the copy, or for the last save to end), log
    start        from the first line of the program to the first step: imports, building, loading

All times are of this rank's host, which waits for the device where it logs.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from forgetting_transformer.training.startup import seconds_since_process_start

CATEGORIES = ("steps", "first step", "data", "evaluation", "checkpoint", "log", "start")


class Clock:
    """Time runs in one category at a time, "start" at first; `during` switches for a while."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(CATEGORIES, 0.0)
        self._category = "start"
        self._since = time.perf_counter()
        self._seconds["start"] = seconds_since_process_start()

    @property
    def category(self) -> str:
        """What time runs in now."""
        return self._category

    def switch(self, category: str) -> str:
        """Time runs in `category` from now on; returns the one before."""
        now = time.perf_counter()
        self._seconds[self._category] += now - self._since
        before, self._category, self._since = self._category, category, now
        return before

    @contextmanager
    def during(self, category: str) -> Iterator[None]:
        """After an error time still runs in `category`, so that a message can say during what it came."""
        before = self.switch(category)
        yield
        self.switch(before)

    def seconds(self) -> dict[str, float]:
        """Seconds by category, up to now."""
        self.switch(self._category)
        return dict(self._seconds)
