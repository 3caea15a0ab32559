"""Progress of a run, and the origin of a start."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from torch import Tensor

from forgetting_transformer.training.checkpoint.folder import Checkpoint
from forgetting_transformer.training.execution.choice import Execution


@dataclass
class Counters:
    """Progress of a run over all ranks and restarts.

    Attributes:
        total_time: seconds of the loop, with evaluations and checkpoints. update_time: of its steps alone.
    """

    token_count: int = 0
    batch_count: int = 0
    flop_count: int = 0
    total_time: float = 0.0
    update_time: float = 0.0

    def __post_init__(self) -> None:
        self._counted: float | None = None  # the moment up to which time is counted

    def count_time(self) -> float:
        """Counts the time since the last call, if there was one, in `total_time`; returns these seconds."""
        now = time.perf_counter()
        seconds, self._counted = now - (self._counted or now), now
        self.total_time += seconds
        return seconds

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Counts the time inside in `update_time`, and in `total_time` with what passed since the last time."""
        self.count_time()
        yield
        self.update_time += self.count_time()

    def add_step(self, tokens: int, flops_per_token: float) -> None:
        """Counts a step of so many tokens."""
        self.token_count += tokens
        self.batch_count += 1
        self.flop_count += round(tokens * flops_per_token)

    def as_floats(self) -> dict[str, float]:
        return {name: float(value) for name, value in asdict(self).items()}


@dataclass
class Origin:
    """Checkpoint or weights from which a start continues; by default none.

    Attributes:
        text: for people.
        checkpoint: of this run or, `forked`, of another.
        counters: as they stand now.
        execution: compilation and backends of the run so far; None where they need not be kept.
        data_checksums: hash of the list of checksums that the corpus must match from here on.
        callback_state: of callbacks and of the guard.
    """

    text: str = "a new run"
    checkpoint: Checkpoint | None = None
    forked: bool = False
    counters: Counters = field(default_factory=Counters)
    execution: Execution | None = None
    data_checksums: str | None = None
    callback_state: dict[str, Tensor] = field(default_factory=dict)

    @property
    def saved_step(self) -> int | None:
        """Training tokens of the checkpoint, if it is this run's."""
        return None if self.checkpoint is None or self.forked else self.checkpoint.step
