"""Where the time from the first line of the program to the end of the first step went."""

import os
import time
from pathlib import Path


class Startup:
    """Seconds of each stage, in the order in which they began. The first is "imports", which is over by then."""

    def __init__(self) -> None:
        self.seconds = {"imports": seconds_since_process_start()}
        self._stage: str | None = None
        self._since = time.perf_counter()

    def begin(self, stage: str | None) -> None:
        """Ends the stage before, and begins `stage`; None begins none."""
        now = time.perf_counter()
        if self._stage is not None:
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now

    def __str__(self) -> str:
        total = sum(self.seconds.values())
        parts = [f"{stage} {seconds:.1f}" for stage, seconds in self.seconds.items() if seconds >= 0.05]
        return f"{total:.1f} s after the start of the process: {', '.join(parts)}"


def seconds_since_process_start() -> float:
    """Imports and Hydra come before any clock of ours; Linux knows when the process began, elsewhere this is 0."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0
