"""Account of the wall time of a run, over all its starts, and of its checkpoints.

`output_dir/goodput.json` has an entry for every start: seconds by category (clock.py), the same as they stood at its
last checkpoint ("saved"), and "stages", which divide "start" and "first step" further. Time after that one was "lost"
if a later start went back to it; all of it was, if to one before. Time between starts, in a queue, is not counted. All
times are of rank 0's host.
"""

import contextlib
import json
import logging
from typing import TYPE_CHECKING, Any

from forgetting_transformer import metric_names as names
from forgetting_transformer.files import write_json
from forgetting_transformer.training.callbacks.base import Callback, Interval
from forgetting_transformer.training.clock import CATEGORIES
from forgetting_transformer.training.interface import TrainerInterface
from forgetting_transformer.training.records.metrics import duration

if TYPE_CHECKING:
    from forgetting_transformer.training.checkpoint import Saved

log = logging.getLogger(__name__)


class Goodput(Callback):
    """The account of one start, and checkpoint.jsonl: seconds that training waited for a copy, and of writing."""

    name = "goodput"

    def __init__(self) -> None:
        self._start: dict[str, Any] = {}
        self._saving: list[Any] = []
        self._earlier: list[dict[str, Any]] = []

    def on_start(self, trainer: TrainerInterface) -> None:
        step = trainer.counters.token_count
        self._start = {"from_step": step, "step": step, "saved": [step, {}]}
        # Bookkeeping that is not there, or was damaged, must not stop a run.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            earlier = json.loads(trainer.directory.goodput.read_text(encoding="utf-8"))["starts"]
            shares([*earlier, self._start])
            self._earlier = earlier

    def on_interval(self, trainer: TrainerInterface, kind: Interval) -> None:
        step = trainer.counters.token_count
        if kind == "save":
            self._saving = [step, trainer.clock.seconds()]
        elif kind == "log":
            self._start["stages"] = {stage: round(seconds, 3) for stage, seconds in trainer.stages.seconds().items()}
            trainer.report(names.GOODPUT, self._write(trainer))

    def on_save(self, trainer: TrainerInterface, saved: "Saved") -> None:
        # Time up to there is not lost if a run continues from this checkpoint, which is whole only now.
        self._start["saved"] = self._saving
        values = {"checkpoint_time": saved.copy_seconds, "write_time": saved.write_seconds}
        trainer.report(names.CHECKPOINT, values, step=saved.step)

    def on_end(self, trainer: TrainerInterface) -> None:
        log.info("%s", describe(self._write(trainer)))

    def _write(self, trainer: TrainerInterface) -> dict[str, float]:
        """Replaces goodput.json; returns `shares` of all starts."""
        self._start |= {"step": trainer.counters.token_count, "seconds": trainer.clock.seconds()}
        starts = [*self._earlier, self._start]
        write_json(trainer.directory.goodput, {"starts": starts}, durable=False)  # at every log interval
        return shares(starts)


def shares(starts: list[dict[str, Any]]) -> dict[str, float]:
    """Shares of all wall time by category and "lost", which add up to 1; and "hours", the whole."""
    useful, lost = dict.fromkeys(CATEGORIES, 0.0), 0.0
    for i, start in enumerate(starts):
        seconds = kept = start.get("seconds", {})
        back_to = min((later["from_step"] for later in starts[i + 1 :]), default=start["step"])
        if back_to < start["step"]:
            saved_at, saved = start["saved"]
            kept = saved if saved_at <= back_to else {}
        for category, value in seconds.items():
            useful[category] = useful.get(category, 0.0) + kept.get(category, 0.0)
            lost += value - kept.get(category, 0.0)
    total = sum(useful.values()) + lost
    result = {category: value / max(total, 1e-9) for category, value in (useful | {"lost": lost}).items()}
    return result | {names.HOURS: total / 3600}


def describe(shares_: dict[str, float]) -> str:
    """One line for the log."""
    parts = [f"{name} {value:.1%}" for name, value in shares_.items() if name != names.HOURS and value >= 0.0005]
    return f"{duration(shares_[names.HOURS] * 3600)} of wall time: {', '.join(parts)}"
