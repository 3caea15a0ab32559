"""Interface of the trainer for callbacks, and for the modules that save and describe a run.

It is a protocol, so that these need not import the trainer, which imports them. Importing this loads no PyTorch.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from torch import Tensor

    from forgetting_transformer.data.corpus import Corpus, DataInfo
    from forgetting_transformer.training.checkpoint import Checkpointer
    from forgetting_transformer.training.clock import Clock
    from forgetting_transformer.training.config import Config
    from forgetting_transformer.training.counters import Counters, Origin
    from forgetting_transformer.training.execution.choice import Execution
    from forgetting_transformer.training.execution.graphs import Graphs
    from forgetting_transformer.training.faults.step_guard import StepGuard
    from forgetting_transformer.training.faults.stop import Stop
    from forgetting_transformer.training.faults.watchdog import Watchdog
    from forgetting_transformer.training.parallel.ranks import Ranks
    from forgetting_transformer.training.records.metrics import MetricsLog
    from forgetting_transformer.training.records.run_directory import RunDirectory


class TrainerInterface(Protocol):
    """A run in training, on one rank. A callback may use all of it and change none of it."""

    # The run
    config: Config
    resolved: dict[str, Any]  #: the configuration as it is written to files
    directory: RunDirectory  #: files of the run
    environment: dict[str, Any]  #: versions, git state and machine of this process
    origin: Origin  #: what this start continues from
    counters: Counters  #: tokens, batches, FLOPs and seconds so far

    # Processes
    fabric: Fabric  #: rank, world size and device
    ranks: Ranks  #: which rows and positions of a batch are this rank's

    # Training
    model: Any  #: with Fabric's wrappers; `model.module` is the model itself
    optimizer: Any  #: with Fabric's wrapper; `optimizer.optimizer` is the optimizer itself
    data: Corpus
    data_info: DataInfo
    tokens_per_step: int  #: of a global batch
    flops_per_token: float  #: of the model at the corpus's lengths
    undecayed: set[str]  #: parameters without weight decay
    latest: Any  #: what the last step gave (`callbacks.Step`); None before the first one of this start

    # Reports
    callbacks: Any
    metrics: MetricsLog | None  #: where reports go, on rank 0; None on others and once training is over
    stages: Clock  #: seconds by stage of the start
    clock: Clock  #: seconds by activity of the run

    # How the run computes
    backends: dict[str, Any]  #: what runs each op
    execution: Execution  #: the same, and whether blocks are compiled, for checkpoints
    graphs: Graphs  #: CUDA graphs

    # Faults
    checkpointer: Checkpointer  #: writes and reads checkpoints
    watchdog: Watchdog  #: hears signals, and notices what hangs
    guard: StepGuard  #: leaves out bad steps

    @property
    def compiled(self) -> bool:
        """Whether blocks and loss are compiled: the outcome of `train.compile`."""

    @property
    def finished(self) -> bool:
        """Whether all tokens are done."""

    @property
    def last_good_checkpoint(self) -> str:
        """Sentence on the checkpoint that a later start can go on from."""

    def crossed(self, interval: int) -> bool:
        """Whether the last step crossed a multiple of `interval` training tokens."""

    def uncompiled(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which compiled code is off: for forward passes of many lengths, or with hooks on submodules."""

    def should_stop(self) -> Stop:
        """Long work calls it for every batch, on all ranks. Where it is true, the work leaves without a report."""

    def report(
        self, kind: str, values: dict[str, Any], arrays: dict[str, Any] | None = None, step: int | None = None
    ) -> None:
        """Writes a line of `kind` on rank 0; on others nothing."""

    def sum_over_ranks(self, tensor: Tensor) -> None:
        """Adds up a tensor in place."""

    def close(self) -> None:
        """Waits for the last checkpoint and closes files."""
