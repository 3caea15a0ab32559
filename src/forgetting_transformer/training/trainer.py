"""The training loop: `Trainer(config).fit()`.

Everything that decides what the weights become is a function of the config and the step: the tokens (data/order.py),
the learning rate (optimization/schedule.py), the random numbers (setup.seed_step). A checkpoint therefore carries
weights, moments, counters and the state of callbacks, and a run that was killed continues as if it had not been.

Words: a *global batch* is the sequences of one update, over all ranks. A rank has a share of it, its *local batch*, and
puts that through the model in *micro-batches*. How far a run is, is counted in training tokens: a checkpoint's or a
report's `step` is their number, as in the authors' code. A *start* is one launch of a run, which the same command
continues with another; its *stages* are what it does before its first step has ended.

setup.py builds what the trainer works with, interface.py says what each attribute is. What is measured or done besides
training is a callback (callbacks/). What can go wrong has a folder, faults/.
"""

import contextlib
import logging
import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from forgetting_transformer import console
from forgetting_transformer.data.corpus import model_inputs
from forgetting_transformer.model.padding import packed_positions
from forgetting_transformer.training import saving, setup
from forgetting_transformer.training.callbacks import Callback, Callbacks, Step
from forgetting_transformer.training.callbacks.built_in import built_in, chosen
from forgetting_transformer.training.checkpoint import Checkpointer, resume
from forgetting_transformer.training.clock import Clock
from forgetting_transformer.training.config import Config
from forgetting_transformer.training.config.continuing import as_recorded
from forgetting_transformer.training.execution.choice import choose as choose_execution
from forgetting_transformer.training.execution.compilation import Compilation
from forgetting_transformer.training.execution.hardware import expected_device
from forgetting_transformer.training.faults.failures import Supervisor
from forgetting_transformer.training.faults.step_guard import StepGuard
from forgetting_transformer.training.faults.stop import Stop, Vote
from forgetting_transformer.training.feed import batches
from forgetting_transformer.training.optimization.building import build_optimizer, undecayed_parameters
from forgetting_transformer.training.optimization.schedule import build_schedule
from forgetting_transformer.training.parallel.launch import expected_world_size
from forgetting_transformer.training.parallel.ranks import Ranks
from forgetting_transformer.training.records.descriptions import describe, open_metrics, start_block
from forgetting_transformer.training.records.loss_by_position import StepLosses

log = logging.getLogger(__name__)


class Trainer:
    """One start of a run on one rank. Errors that can be found before the first step are raised here.

    Attributes: `TrainerInterface` explains those that callbacks may use.

    Args:
        supervisor: hears signals and notes how the run ends; by default nothing is watched.
    """

    def __init__(self, config: Config, supervisor: Supervisor | None = None) -> None:
        self.config, self.supervisor = config, supervisor or Supervisor(config)
        self.directory, self.watchdog = self.supervisor.directory, self.supervisor.watchdog
        self.stages, self.clock = Clock("imports"), Clock("start")

        self.begin("processes")
        self.compilation = Compilation(config, expected_device(config), console.rank(), expected_world_size(config))
        fabric = self.fabric = setup.connect(config, self.supervisor)
        timeout = timedelta(seconds=config.strategy.timeout_seconds)
        self.ranks = Ranks(fabric.global_rank, fabric.world_size, config.strategy.context, timeout)
        self.vote = Vote(fabric.world_size, timeout)

        self.begin("data")
        self.schedule = build_schedule(config.schedule, config.optimizer.lr)
        self.data = setup.open_data(config, self.directory, fabric)
        self.data_info = self.data.train_info()
        self.tokens_per_step = config.datamodule.train_batch_size * config.datamodule.train_batch_len

        self.begin("checkpoint")
        folder, watch = self.directory.checkpoints, self.watchdog.waiting_for
        self.checkpointer = Checkpointer(folder, config.checkpoint_keep_last, config.checkpoint_background, watch)
        # The checkpoint, of this run or another, that this start continues from; or none.
        self.origin = resume.find_checkpoint(config, self.directory, fabric)

        self.begin("self-test")
        model, self.backends = setup.model_and_kernels(config, fabric, self.data, self.origin, self.begin)
        lengths = self.data.train_lengths().items()
        self.flops_per_token = sum(share * model.config.flops_per_token(length) for length, share in lengths)

        self.begin("strategy")
        # By name, because the strategy may replace the parameters.
        self.undecayed = undecayed_parameters(model, config.train)
        self.model: Any = fabric.setup_module(model)
        optimizer = build_optimizer(self.model.module, self.undecayed, config.optimizer)
        self.optimizer: Any = fabric.setup_optimizers(optimizer)

        self.begin("loading")
        # Not earlier, so that a command that was refused has left the run in the folder alone.
        resume.prepare_directory(self.directory, config.resume, fabric)
        self.guard = StepGuard(fabric.device)  # leaves out steps whose loss or gradient is not finite
        model = self.model.module  # without Fabric's wrapper, as `optimizer` is
        resume.load(self.origin, config, self.data_info, self.checkpointer, model, optimizer, self.guard)
        self.counters = self.origin.counters
        self.checkpointer.last_good = self.origin.saved_step

        self.execution = choose_execution(
            config.train.compile, fabric.device, self.origin.execution, self.backends, fabric.global_rank
        )
        self.graphs = setup.graphs_of(config, fabric, model, self.compiled, self.flops_per_token)
        self.compilation.compile(model if self.compiled else None)

        self.begin("logs")
        # Code and machine of this process, read once: the code on disk may change while it runs.
        self.environment = describe(fabric.device)
        self.resolved: dict[str, Any] = as_recorded(config)
        self.latest: Step | None = None
        self.stop = Stop.NO
        self.callbacks = Callbacks(self, built_in(self), chosen(config))
        self.callbacks.load(self.origin.callback_state)
        self.metrics = open_metrics(self) if fabric.is_global_zero else None
        self.watchdog.callback = lambda: self.callbacks.running.name if self.callbacks.running else None
        self.supervisor.trainer = self

    def fit(self) -> None:
        """Trains to `train.max_tokens`, or until all ranks agree to stop; `supervisor.outcome` has the result."""
        config, counters = self.config, self.counters
        self.callbacks.on_start()
        self.supervisor.running()
        if self.metrics is not None:
            log.info("about to train %s:\n%s", config.tag, start_block(self))
        if missing := resume.unreported(self.callbacks.evaluations_due(), self.origin, self.metrics, self.fabric):
            self.begin("evaluation")
            self.evaluate(missing)
        self.begin("first batch")
        remaining = max(0, math.ceil((config.train.max_tokens - counters.token_count) / self.tokens_per_step))
        if not remaining:
            log.info("nothing left to train: %s tokens are done", f"{counters.token_count:,}")
        elif self.compiled:
            self.compilation.announce()
        counters.count_time()
        for batch in batches(self, remaining) if remaining and not self.stop else ():
            first = self.latest is None
            self.clock.switch("first step" if first else "steps")
            if first:
                self.begin("first step")
            with counters.updating():
                self.latest = self.step(self.fabric.to_device(batch))
            counters.add_step(self.tokens_per_step, self.flops_per_token)
            self.callbacks.on_step(self.latest)
            if first:
                self._first_step_is_done(self.latest)

            if self.finished or self.crossed(config.log_interval):
                self.wait_for_device()
                self.callbacks.call_all("on_interval", "log")
            if self.finished or self.crossed(config.train_eval_interval):
                self.callbacks.call_all("on_interval", "train_eval")
            saving.compare_if_due(self)
            self.check_in()
            if not self.stop and (due := self.callbacks.evaluations_due()):
                self.evaluate(due)
            keep = self.crossed(config.checkpoint_keep_interval)
            if self.finished or self.stop or keep or self.crossed(config.checkpoint_interval):
                self.save(permanent=keep, must_succeed=self.finished or bool(self.stop))
            if self.stop:
                break
            self.clock.switch("data")
        self._finish()

    def step(self, batch: dict[str, Tensor]) -> Step:
        """One update from one global batch.

        Gradients are those of the mean loss per token of the global batch: each micro-batch has the same number of
        tokens, and the strategy averages over all ranks.

        Args:
            batch: this rank's rows of the global batch, (B, T) (data/corpus.py). With `strategy.context` the rank takes
                a part of each row (parallel/ranks.py).
        """
        config, batch_count = self.config, self.counters.batch_count
        lr = self.schedule(self.counters.token_count)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        setup.seed_step(config.seed, batch_count, self.ranks.data_rank)
        self.optimizer.zero_grad()

        sequences = config.sequences_at_once(self.ranks.data_size)
        first_rows = range(0, len(batch["input_ids"]), sequences)
        losses = StepLosses(config.datamodule, self.ranks, self.fabric.device)
        for row in first_rows:
            # FSDP2 needs *every* backward pass inside this context, the synchronised last one too.
            last = row == first_rows[-1]
            with (
                self.fabric.no_backward_sync(self.model, enabled=not last),
                self.ranks.in_context(),
                self.graphs.micro_batch(last),  # CUDA graphs, if the run uses them
            ):
                inputs = model_inputs(batch, slice(row, row + sequences))
                loss_bT = self.model(**self.ranks.part_of(inputs)).loss
                self.fabric.backward(loss_bT.mean() / len(first_rows))
            losses.add_micro_batch(loss_bT.detach(), row, packed_positions(inputs))

        # A norm that is not finite must not raise here, on one rank alone: below, all ranks judge it alike.
        grad_norm: Any = self.fabric.clip_gradients(
            self.model, self.optimizer, max_norm=config.train.max_grad_norm, error_if_nonfinite=False
        )
        grad_norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
        self.sum_over_ranks(losses.flat)  # of which loss_B, loss_T and sequences_T are views
        bad = self.guard.judge(batch_count, losses.loss_B, grad_norm)
        self.guard.update(self.optimizer.optimizer, self.optimizer.step, bad)
        return Step(losses.loss_T.sum() / self.tokens_per_step, grad_norm, lr, losses.loss_T, losses.sequences_T, bad)

    def evaluate(self, due: Sequence[Callback]) -> None:
        """Evaluates with the current weights. An interrupted evaluation has no line, and the next start repeats it."""
        with self.clock.during("evaluation"):
            for callback in due:
                if not self.stop:  # set by `should_stop` in the evaluation before
                    self.callbacks.call(callback, "on_interval", "eval")
        if self.compiled:
            self.compilation.warn_of_uncompiled()

    def save(self, permanent: bool, must_succeed: bool) -> None:
        """Saves a checkpoint, in the background unless it must succeed. A permanent one is never deleted."""
        self.wait_for_device()
        with self.clock.during("checkpoint"):
            saving.save(self, permanent, must_succeed)

    def check_in(self) -> None:
        """Notes progress of this rank, collects the last save and bad steps, and sets `stop` by the vote of all ranks.

        All ranks call it once a step and once a batch of an evaluation.
        """
        self.watchdog.beat()
        saving.collect(self)
        self.guard.poll()
        wish = Stop.PREEMPTED if self.watchdog.request else Stop.NO
        if self.guard.most_in_a_row >= self.config.train.max_bad_steps:
            wish = Stop.BAD_STEPS
        self.stop = self.vote.cast(wish)

    def should_stop(self) -> Stop:
        """Checks in, for callbacks; returns the reason if all ranks stop here.

        Raises:
            RuntimeError: a callback of rank 0 alone calls it, and no other rank would answer.
        """
        running = self.callbacks.running
        if running is not None and not running.all_ranks and self.fabric.world_size > 1:
            raise RuntimeError(f"the callback {running.name!r} calls trainer.should_stop: it needs all_ranks = True")
        self.check_in()
        return self.stop

    @property
    def finished(self) -> bool:
        return self.counters.token_count >= self.config.train.max_tokens

    @property
    def compiled(self) -> bool:
        return self.execution.compile

    @property
    def last_good_checkpoint(self) -> str:
        step = self.checkpointer.last_good
        return f"the last good checkpoint is at {step:,} tokens" if step else "nothing was saved"

    def crossed(self, interval: int) -> bool:
        """Whether the last step crossed a multiple of `interval` training tokens."""
        after = self.counters.token_count
        return (after - self.tokens_per_step) // interval != after // interval

    def uncompiled(self) -> contextlib.AbstractContextManager[Any]:
        return torch.compiler.set_stance("force_eager") if self.compiled else contextlib.nullcontext()

    def report(
        self, kind: str, values: dict[str, Any], arrays: dict[str, Any] | None = None, step: int | None = None
    ) -> None:
        """Writes a line of `kind` on rank 0; on others nothing.

        Args:
            arrays: for an npz file that holds `values` too.
            step: training tokens that it belongs to; default those done.
        """
        self.callbacks.check_kind(kind)
        if self.metrics is not None:
            step = self.counters.token_count if step is None else step
            self.metrics.report(kind, step, values)
            if arrays is not None:
                self.metrics.report_arrays(kind, step, values | arrays)

    def sum_over_ranks(self, tensor: Tensor) -> None:
        """Sums in place. Fabric's own all_reduce would put a barrier before it, for which the host waits."""
        if self.fabric.world_size > 1:
            dist.all_reduce(tensor)

    def wait_for_device(self) -> None:
        """Waits until the device has finished its steps; that time counts as theirs."""
        with self.counters.updating():
            setup.synchronize(self.fabric.device)

    def begin(self, stage: str) -> None:
        """Begins a stage of the start. The log's times and the watchdog's messages use its name."""
        self.stages.switch(stage)
        self.watchdog.enter_stage(stage)

    def close(self) -> None:
        self.checkpointer.take_result(wait=True)
        self.watchdog.closing()
        if self.metrics is not None:
            self.metrics.close()
            self.metrics = None
        self.directory.release()

    def _first_step_is_done(self, step: Step) -> None:
        self.wait_for_device()
        # Until here a signal ends a rank at once. So no rank begins a second step, in which it would wait for one that
        # has ended, before all have finished the first.
        self.vote.wait_for_all()
        self.stages.switch(None)
        self.watchdog.enter_stage(None)
        log.info("the first step is done, loss %.4f, %s", step.loss.item(), self.stages)
        if self.compiled:
            self.compilation.warn_of_uncompiled()

    def _finish(self) -> None:
        """Ends the run after the last step, on every rank alike. A stop for a fault raises its error."""
        saving.collect(self, wait=True, must_succeed=True)
        self.callbacks.call_all("on_end")
        if self.stop == Stop.BAD_STEPS:
            self.guard.refuse(self.last_good_checkpoint, self.directory.root)
        self.guard.sum_up(self.counters.batch_count, self.directory.root)
        self.supervisor.end("preempted" if self.stop else "done", self.watchdog.request or "")
        done = f"{self.counters.token_count:,} tokens in {self.directory.root}"
        how = "stopped and saved; the same command continues" if self.stop else "training finished"
        log.info("%s: %s", how, done)
        self.close()
        self.vote.wait_for_all()  # else a launcher may end the others when an early rank ends
