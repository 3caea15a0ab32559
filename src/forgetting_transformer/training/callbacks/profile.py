"""A trace of a few steps on host and GPU, for `train.profile_steps`."""

import logging
from typing import Any

from forgetting_transformer.training.callbacks.base import Callback, Step
from forgetting_transformer.training.interface import TrainerInterface

log = logging.getLogger(__name__)


class Profile(Callback):
    """`traces/start-<tokens>-rank-<k>.….json.gz`: a trace of the steps `first` to `last` of this start.

    The first step of a start, which compiles, is step 1. What lies between two steps (an evaluation, a checkpoint) is
    in the trace too. A start that ends earlier writes what it has.
    """

    name = "profile"
    all_ranks = True

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._profiler: Any = None

    def on_start(self, trainer: TrainerInterface) -> None:
        from torch import profiler

        name = f"start-{trainer.counters.token_count:015d}-rank-{trainer.fabric.global_rank}"
        handler = profiler.tensorboard_trace_handler(str(trainer.directory.traces), name, use_gzip=True)

        def write(profile: Any) -> None:
            try:
                handler(profile)
            except (OSError, RuntimeError) as error:  # a full disk must not cost the run; PyTorch makes the folder
                log.warning("train.profile_steps: no trace (%s)", error)

        # The tracer itself starts one step earlier, so that its own start is not in the trace.
        wait, warmup = max(0, self._first - 2), min(1, self._first - 1)
        steps = profiler.schedule(wait=wait, warmup=warmup, active=self._last - self._first + 1, repeat=1)
        self._profiler = profiler.profile(schedule=steps, on_trace_ready=write)
        self._profiler.start()

    def on_step(self, trainer: TrainerInterface, step: Step) -> None:
        self._profiler.step()

    def on_end(self, trainer: TrainerInterface) -> None:
        self._profiler.stop()
        if (steps := self._profiler.step_num) < self._first:
            log.warning("train.profile_steps: no trace, because this start took %d steps only", steps)
