"""Where the wall time of a run went, over all its starts.

    steps        waiting for and taking training steps
    first step   the first step of every start: compiling, tuning kernels, first allocations
    data         waiting for the next batch
    evaluation, checkpoint (waiting for the copy, or for the last save to end), log
    start        from the first line of the program to the first step: imports, building, loading
    lost         all of the above, after the checkpoint that the next start went on from

`output_dir/goodput.json` has an entry for every start: seconds by category, and the same as they stood at its
checkpoints ("marks"). "stages" divides "start" and "first step" further (startup.py). What came after the mark that a
later start began from was lost. Time between starts, in a queue, is not counted. All times are of rank 0's host, which
waits for the device where it logs.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forgetting_transformer.files import write_json
from forgetting_transformer.training.metrics import duration
from forgetting_transformer.training.startup import seconds_since_process_start

CATEGORIES = ("steps", "first step", "data", "evaluation", "checkpoint", "log", "start")
#: Marks kept of every start; older checkpoints than that are gone or permanent, and few go back to those.
_MARKS = 64


class Goodput:
    """The clock of one start. Time runs in one category at a time; `during` switches for a while.

    Args:
        file: goodput.json; None measures without writing, as on ranks other than 0.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._seconds = dict.fromkeys(CATEGORIES, 0.0)
        self._category = "start"
        self._since = time.perf_counter()
        self._seconds["start"] = seconds_since_process_start()
        self._start: dict[str, Any] = {}
        self._earlier: list[dict[str, Any]] = []

    def begin(self, step: int) -> None:
        """Training is about to go on from `step` tokens."""
        self._start = {"from_step": step, "step": step, "marks": []}
        if self._file is not None and self._file.is_file():
            try:
                earlier = json.loads(self._file.read_text(encoding="utf-8"))["starts"]
                shares([*earlier, self._start])
                self._earlier = earlier
            except (OSError, ValueError, LookupError, TypeError, AttributeError):
                self._earlier = []  # bookkeeping that was damaged must not stop a run

    def started(self, stages: dict[str, float]) -> None:
        """The first step is done; `stages` are seconds by what was done before it and in it."""
        self._start["stages"] = {stage: round(seconds, 3) for stage, seconds in stages.items()}

    def switch(self, category: str) -> str:
        """Time runs in `category` from now on; returns the one before."""
        now = time.perf_counter()
        self._seconds[self._category] += now - self._since
        before, self._category, self._since = self._category, category, now
        return before

    @contextmanager
    def during(self, category: str) -> Iterator[None]:
        before = self.switch(category)
        try:
            yield
        finally:
            self.switch(before)

    def mark(self, step: int) -> None:
        """A checkpoint of `step` tokens exists, or will: time up to now is not lost if a run goes on from it."""
        self.switch(self._category)
        self._start["marks"] = [*self._start["marks"], [step, dict(self._seconds)]][-_MARKS:]

    def write(self, step: int) -> dict[str, float]:
        """Replaces goodput.json; returns `shares` of all starts."""
        self.switch(self._category)
        self._start |= {"step": step, "seconds": dict(self._seconds)}
        starts = [*self._earlier, self._start]
        if self._file is not None:
            write_json(self._file, {"starts": starts}, durable=False)  # at every log interval
        return shares(starts)


def shares(starts: list[dict[str, Any]]) -> dict[str, float]:
    """Shares of all wall time by category and "lost", which add up to 1; and "hours", the whole."""
    useful, lost = dict.fromkeys(CATEGORIES, 0.0), 0.0
    for i, start in enumerate(starts):
        seconds = start.get("seconds", {})
        kept = seconds
        later = [other["from_step"] for other in starts[i + 1 :]]
        if later and min(later) < start["step"]:
            marks = [at for step, at in start["marks"] if step <= min(later)]
            # Without one: the later start went on from before this one began, or from where it began.
            kept = marks[-1] if marks else {}
        for category, value in seconds.items():
            useful[category] = useful.get(category, 0.0) + kept.get(category, 0.0)
            lost += value - kept.get(category, 0.0)
    total = sum(useful.values()) + lost
    result = {category: value / max(total, 1e-9) for category, value in (useful | {"lost": lost}).items()}
    return result | {"hours": total / 3600}


def describe(shares_: dict[str, float]) -> str:
    """One line for the log."""
    parts = [f"{name} {value:.1%}" for name, value in shares_.items() if name != "hours" and value >= 0.0005]
    return f"{duration(shares_['hours'] * 3600)} of wall time: {', '.join(parts)}"
