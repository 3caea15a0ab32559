"""The trainer as callbacks see it, and as the modules do that save and describe a run.

It is a protocol: they need not import the trainer, which imports them. `Trainer` and `Parts` have the comments.
Importing this loads no PyTorch.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from torch import Tensor

    from forgetting_transformer.data.corpus import Corpus, DataInfo
    from forgetting_transformer.training.checkpoint import Checkpointer
    from forgetting_transformer.training.checkpoint.folder import Checkpoint
    from forgetting_transformer.training.clock import Clock
    from forgetting_transformer.training.config import Config
    from forgetting_transformer.training.counters import Counters
    from forgetting_transformer.training.execution.choice import Execution
    from forgetting_transformer.training.execution.graphs import Graphs
    from forgetting_transformer.training.faults.corruption import Comparison
    from forgetting_transformer.training.faults.sentinel import Sentinel
    from forgetting_transformer.training.faults.step_guard import StepGuard
    from forgetting_transformer.training.faults.stop import Stop
    from forgetting_transformer.training.parallel.ranks import Ranks
    from forgetting_transformer.training.records.metrics import MetricsLog
    from forgetting_transformer.training.records.run_directory import RunDirectory


class PartsInterface(Protocol):
    """Parts of a run on one rank.

    Attributes:
        config, resolved: the configuration, typed, and as it is written to files.
        fabric: rank, world size and device.
        ranks: which rows and positions of a batch are this rank's.
        model, optimizer: with Fabric's wrappers; `model.module` is the model itself.
        data, data_info: the corpus.
        eval_sets: what else is evaluated, by name.
        counters: tokens, batches, FLOPs and seconds so far.
    """

    config: Config
    resolved: dict[str, Any]
    fabric: Fabric
    ranks: Ranks
    directory: RunDirectory
    model: Any
    optimizer: Any
    data: Corpus
    data_info: DataInfo
    eval_sets: dict[str, Corpus]
    data_checksums: str | None
    counters: Counters
    flops_per_token: float
    callback_state: dict[str, Tensor]
    kinds: set[str]
    clock: Clock
    sentinel: Sentinel
    startup: Clock
    guard: StepGuard
    checkpointer: Checkpointer
    checkpoint: Checkpoint | None
    before: Execution | None
    comparison: Comparison | None
    execution: Execution
    graphs: Graphs
    backends: dict[str, Any]
    undecayed: set[str]
    environment: dict[str, Any]
    origin: str
    weights_from: dict[str, Any] | None

    @property
    def last_good_checkpoint(self) -> str:
        """Sentence on the checkpoint that a later start can go on from."""

    @property
    def compiled(self) -> bool:
        """Whether blocks and loss are compiled."""

    def uncompiled(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which nothing compiled runs: for forward passes of many lengths, or with hooks on submodules."""


class TrainerInterface(PartsInterface, Protocol):
    """A run in training, on one rank.

    Attributes:
        tokens_per_step: of a global batch.
        latest: what the last step gave (`callbacks.Step`); None before the first one of this start.
        metrics: where reports go, on rank 0; None on others and once training is over.
    """

    tokens_per_step: int
    latest: Any
    metrics: MetricsLog | None
    callbacks: Any

    @property
    def finished(self) -> bool:
        """Whether all tokens are done."""

    def crossed(self, interval: int) -> bool:
        """Whether the last step crossed a multiple of `interval` training tokens."""

    def beat(self) -> Stop:
        """Long work calls it for every batch, on all ranks: training moves, and may have to stop."""

    def report(
        self, kind: str, values: dict[str, Any], arrays: dict[str, Any] | None = None, step: int | None = None
    ) -> None:
        """Writes a line of `kind` on rank 0; on others nothing."""

    def sum_over_ranks(self, tensor: Tensor) -> None:
        """Adds up a tensor in place."""

    def compare_ranks(self) -> None:
        """Begins to compare what all ranks hold alike."""
