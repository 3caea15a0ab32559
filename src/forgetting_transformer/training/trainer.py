"""The training loop: `setup → run → step`.

Everything that decides what the weights become is a function of the config and the step: the tokens (data/order.py),
the learning rate (optimization/schedule.py), the random numbers (setup.seed_step). A checkpoint therefore carries only
weights, moments and counters, and a run that was killed continues as if it had not been.

parts.py makes what the loop works with. What is measured or done besides training is a callback (callbacks/). When and
how a run saves is in saving.py and checkpoint/. What can go wrong has a folder, faults/.
"""

import itertools
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from forgetting_transformer.data.corpus import check_batch, check_tokens, model_inputs
from forgetting_transformer.model.padding import packed_positions
from forgetting_transformer.training import setup
from forgetting_transformer.training.callbacks import Callback, Step
from forgetting_transformer.training.callbacks.built_in import callbacks_of
from forgetting_transformer.training.config import Config
from forgetting_transformer.training.errors import TrainingError
from forgetting_transformer.training.faults import status
from forgetting_transformer.training.faults.corruption import weights_and_moments
from forgetting_transformer.training.faults.feed import feed
from forgetting_transformer.training.faults.peers import Peers
from forgetting_transformer.training.faults.sentinel import Sentinel
from forgetting_transformer.training.faults.stop import Stop
from forgetting_transformer.training.parts import Parts
from forgetting_transformer.training.records.loss_by_position import PositionSums
from forgetting_transformer.training.records.run_directory import RunDirectory
from forgetting_transformer.training.start.descriptions import open_metrics
from forgetting_transformer.training.start.start_block import start_block

log = logging.getLogger(__name__)


class Trainer(Parts):
    """One start of a run: `Trainer(config).run()`.

    Attributes (besides those of `Parts`), for callbacks:
        tokens_per_step: of a global batch.
        callbacks: those that this rank calls.
        metrics: where reports go, on rank 0; None on others and once training is over.
        latest: what the last step gave; None before the first one of this start.
        stop: why all ranks stop here, as far as they have agreed.
        outcome: "done", "preempted" or "failed", once the status says so.
    """

    def __init__(
        self,
        config: Config,
        sentinel: Sentinel | None = None,
        directory: RunDirectory | None = None,
        peers: Peers | None = None,
    ) -> None:
        super().__init__(config, sentinel, directory, peers)
        self.tokens_per_step = config.datamodule.train_batch_size * config.datamodule.train_batch_len
        self.latest: Step | None = None
        self.stop = Stop.NO
        self.outcome: str | None = None
        # The loop and the sentinel's thread may end the run in the same moment: the first one says how.
        self._ending = threading.Lock()
        self.callbacks = callbacks_of(self)
        self.kinds |= self.callbacks.kinds
        self.metrics = open_metrics(self) if self.fabric.is_global_zero else None
        self.sentinel.callback = lambda: self.callbacks.running.name if self.callbacks.running else None

    def run(self) -> str:
        """Returns "done" or "preempted"."""
        self.sentinel.on_end = self._ended_by_sentinel
        config, counters = self.config, self.counters
        self.callbacks.start()
        with self._ending:
            if self.outcome is None:
                self._write_status("running")
        if self.metrics is not None:
            log.info("about to train %s:\n%s", config.tag, start_block(self))
        self._evaluate_what_was_broken_off()
        self.begin("first batch")
        remaining = math.ceil((config.train.max_tokens - counters.token_count) / self.tokens_per_step)
        if remaining <= 0:
            log.info("nothing left to train: %s tokens are done", f"{counters.token_count:,}")
        elif self.compiled:
            self.compilation.announce()
        began = time.perf_counter() - counters.total_time
        for batch in self._batches(remaining) if remaining > 0 and not self.stop else ():
            started = time.perf_counter()
            first = self.latest is None
            self.clock.switch("first step" if first else "steps")
            if first:
                self.begin("first step")
            self.latest = self.step(self.fabric.to_device(batch))
            counters.token_count += self.tokens_per_step
            counters.batch_count += 1
            counters.flop_count += round(self.tokens_per_step * self.flops_per_token)
            counters.update_time += time.perf_counter() - started
            counters.total_time = time.perf_counter() - began
            self.callbacks.on_step(self.latest)
            if first:
                self._first_step_is_done(self.latest)

            if self.finished or self.crossed(config.log_interval):
                self.wait_for_device()
                self.callbacks.call_all("on_interval", "log")
            if self.finished or self.crossed(config.train_eval_interval):
                self.callbacks.call_all("on_interval", "train_eval")
            if first:
                self.checkpointer.reserve(self.model.module, self.optimizer.optimizer, self.callbacks.large_state())
            if (every := config.strategy.compare_steps) and counters.batch_count % every == 0:
                self.compare_ranks()
            self.beat()
            if not self.stop and (due := self.callbacks.evaluations_due()):
                self.evaluate(due)
            if self.stop == Stop.CORRUPT:
                break
            keep = self.crossed(config.checkpoint_keep_interval)
            if self.finished or self.stop or keep or self.crossed(config.checkpoint_interval):
                self.save(permanent=keep, must_succeed=self.finished or bool(self.stop))
            counters.total_time = time.perf_counter() - began
            if self.stop:
                break
            self.clock.switch("data")
        return self._finish()

    def step(self, batch: dict[str, Tensor]) -> Step:
        """One update from one global batch.

        The batch is this rank's rows, (B, T); it takes its part of each (parallel/ranks.py). Gradients are those of the
        mean loss per token of the global batch: each micro-batch has the same number of tokens, and the strategy
        averages over all ranks.
        """
        config = self.config
        lr = self.schedule(self.counters.token_count)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        setup.seed_step(config.seed, self.counters.batch_count, self.ranks.data_rank)
        self.optimizer.zero_grad()

        sequences = max(1, config.train.grad_acc_tokens // config.datamodule.train_batch_len)
        # Summed over ranks in one go: loss at every position, and loss of every sequence of the global batch.
        length, local = config.datamodule.train_batch_len, len(batch["input_ids"])
        starts = range(0, local, sequences)
        losses = torch.zeros(
            2 * length + config.datamodule.train_batch_size, dtype=torch.float64, device=self.fabric.device
        )
        sums, loss_B = PositionSums(losses[: 2 * length]), losses[2 * length :]
        for start in starts:
            # FSDP2 needs *every* backward pass inside this context, the synchronised last one too.
            last = start == starts[-1]
            with (
                self.fabric.no_backward_sync(self.model, enabled=not last),
                self.ranks.share(),
                self.graphs.micro_batch(last),
            ):
                inputs = model_inputs(batch, slice(start, start + sequences))
                loss_bT = self.model(**self.ranks.part_of(inputs)).loss
                self.fabric.backward(loss_bT.mean() / len(starts))
            sums.add(loss_bT.detach(), position_BT=packed_positions(inputs), part=self.ranks.part(length))
            row = self.ranks.data_rank * local + start
            loss_B[row : row + len(loss_bT)] = loss_bT.detach().mean(1, dtype=torch.float64) / self.ranks.sharing
        # A non-finite norm must not raise on one rank while others go on: all judge it alike below.
        grad_norm: Any = self.fabric.clip_gradients(
            self.model, self.optimizer, max_norm=config.train.max_grad_norm, error_if_nonfinite=False
        )
        grad_norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
        self.sum_over_ranks(losses)
        bad = self.guard.judge(self.counters.batch_count, loss_B, grad_norm)
        self.guard.update(self.optimizer.optimizer, self.optimizer.step, bad)
        loss = sums.loss_T.sum() / (config.datamodule.train_batch_size * length)
        return Step(loss, grad_norm, lr, sums.loss_T, sums.sequences_T, bad)

    def evaluate(self, due: Sequence[Callback]) -> Stop:
        """Evaluates with the weights as they are.

        Returns why it was broken off, if it was: then the next start does again what was not reported.
        """
        with self.clock.during("evaluation"):
            for callback in due:
                if not self.stop:
                    self.callbacks.call(callback, "on_interval", "eval")
        if self.compiled:
            self.compilation.warn_of_uncompiled()
        return self.stop

    def beat(self) -> Stop:
        """Called by all ranks once a step and once a batch of an evaluation: training moves, and may have to stop.

        Returns:
            Why all ranks stop here, if they do. Then an evaluation leaves without a report.

        Raises:
            RuntimeError: a callback of rank 0 alone calls it, and no other rank would answer.
        """
        running = self.callbacks.running
        if running is not None and not running.all_ranks and self.fabric.world_size > 1:
            raise RuntimeError(f"the callback {running.name!r} calls Trainer.beat and so needs all_ranks = True")
        self.sentinel.beat()
        self.saver.collect(self)
        self.guard.poll()
        wish = Stop.PREEMPTED if self.sentinel.request else Stop.NO
        if self.guard.longest_row >= self.config.train.max_bad_steps:
            wish = Stop.BAD_STEPS
        if self.comparison is not None and self.comparison.difference() is not None:
            wish = Stop.CORRUPT
        self.stop = self.vote.cast(wish)
        return self.stop

    @property
    def finished(self) -> bool:
        """Whether all tokens are done."""
        return self.counters.token_count >= self.config.train.max_tokens

    def crossed(self, interval: int) -> bool:
        """Whether the last step crossed a multiple of `interval` training tokens."""
        after = self.counters.token_count
        return (after - self.tokens_per_step) // interval != after // interval

    def report(
        self, kind: str, values: dict[str, Any], arrays: dict[str, Any] | None = None, step: int | None = None
    ) -> None:
        """Writes a line of `kind` on rank 0; on others nothing. An evaluation's is handed to all callbacks here.

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
        if self.callbacks.running is not None and self.callbacks.running.evaluates:
            self.callbacks.call_all("on_evaluate", kind, values)

    def save(self, permanent: bool, must_succeed: bool) -> None:
        self.wait_for_device()
        with self.clock.during("checkpoint"):
            self.saver.save(self, permanent, must_succeed)

    def compare_ranks(self) -> None:
        """Begins to compare what all ranks hold alike, if they do."""
        if self.comparison is not None:
            tensors = weights_and_moments(self.model.module, self.optimizer.optimizer)
            self.comparison.begin(self.counters.batch_count, tensors)

    def sum_over_ranks(self, tensor: Tensor) -> None:
        """In place. Fabric's own all_reduce would put a barrier before it, for which the host waits."""
        if self.fabric.world_size > 1:
            dist.all_reduce(tensor)

    def wait_for_device(self) -> None:
        """Until the device has done the steps it was given; that time is the steps' time."""
        started = time.perf_counter()
        setup.synchronize(self.fabric.device)
        waited = time.perf_counter() - started
        self.counters.update_time += waited
        self.counters.total_time += waited

    def failed(self, error: BaseException) -> None:
        """Notes how the run ended, for people and for the other ranks."""
        reason = f"{type(error).__name__}: {error}"
        self.peers.failed(reason)
        # The end of training is not yet that of the run: metrics are still to be written, say.
        self._end("failed", reason, unless=("failed",))
        self.sentinel.closing()  # what the process has to say of it may take as long as a step

    def close(self) -> None:
        self.checkpointer.close()
        self.sentinel.closing()
        if self.metrics is not None:
            self.metrics.close()
            self.metrics = None
        self.directory.release()

    def _batches(self, count: int) -> Iterator[dict[str, Tensor]]:
        """This rank's shares of the next `count` global batches.

        Raises:
            DataError: the corpus gives something else than a batch. TrainingError: it gives fewer.
        """
        first, data = self.counters.batch_count, self.config.datamodule
        corpus = f"datamodule.name={data.name!r}"
        rank, size = self.ranks.data_rank, self.ranks.data_size
        batches = feed(
            lambda done: self.data.train_loader(first + done, first + count, rank, size),
            lambda: self.sentinel.reading(corpus),
        )
        given = 0
        for given, batch in enumerate(itertools.islice(batches, count), 1):
            check_batch(batch, corpus, data.train_batch_size // size, data.train_batch_len)
            if given == 1:
                check_tokens(batch, corpus, self.data_info.vocab_size)
            yield batch
        if given < count:
            raise TrainingError(
                f"{corpus} gave {given} batches instead of {count}, from batch {first:,} on; "
                f"{self.last_good_checkpoint}. Its train_loader must give all that it is asked for"
            )

    def _first_step_is_done(self, step: Step) -> None:
        self.wait_for_device()
        self.startup.switch(None)
        self.sentinel.started()
        log.info("the first step is done, loss %.4f, %s", step.loss.item(), self.startup)
        if self.compiled:
            self.compilation.first_step_took(self.startup.seconds()["first step"])
            self.compilation.warn_of_uncompiled()

    def _evaluate_what_was_broken_off(self) -> None:
        """Does what was due at the checkpoint that this start goes on from, and has no line: a signal came first."""
        step = self.counters.token_count
        if not step or step != self.saver.saved_step:
            return
        due = self.callbacks.evaluations_due()
        missing = setup.on_rank_zero(
            self.fabric, lambda: [c.name for c in due if self.metrics and not self.metrics.has(c.kinds[0], step)]
        )
        missing = self.fabric.broadcast(missing) or []
        if todo := [callback for callback in due if callback.name in missing]:
            self.begin("evaluation")
            self.evaluate(todo)

    def _finish(self) -> str:
        """After the last step, on every rank alike."""
        self.saver.collect(self, wait=True, must_succeed=self.stop != Stop.CORRUPT)
        self.callbacks.call_all("on_end")
        if self.stop == Stop.CORRUPT and self.comparison is not None:
            self.comparison.refuse(self.last_good_checkpoint)
        if self.stop == Stop.BAD_STEPS:
            raise TrainingError(
                f"{self.guard.longest_row} updates in a row were left out, because a loss or gradient was not finite "
                f"or much larger than usual; {self.last_good_checkpoint}, without them. "
                f"metrics/jsonlines/bad_step.jsonl in {self.directory.root} names their documents and tokens. Lower "
                "optimizer.lr (in a fork), mend the data, or raise train.max_bad_steps"
            )
        if left_out := self.guard.left_out:
            log.warning(
                "%s of %s updates were left out (metrics/jsonlines/bad_step.jsonl in %s)",
                *(f"{left_out:,}", f"{self.counters.batch_count:,}", self.directory.root),
            )
        outcome = "preempted" if self.stop else "done"
        self._end(outcome, self.sentinel.request or "")
        done = f"{self.counters.token_count:,} tokens in {self.directory.root}"
        log.info("%s: %s", "training finished" if outcome == "done" else "stopped and saved", done)
        return outcome

    def preempted(self, reason: str) -> str:
        """Notes that a signal has ended the run on another rank; returns the outcome."""
        self._end("preempted", reason)
        return "preempted"

    def _ended_by_sentinel(self, outcome: str, reason: str) -> str:
        if self.outcome is None:  # else that is how the run ended, whatever hangs behind it
            outcome, reason = self.peers.ended(outcome, reason)
            self._end(outcome, f"{reason}; {self.last_good_checkpoint}")
        return self.outcome or outcome

    def _end(self, outcome: str, reason: str, unless: Sequence[str] = ("done", "preempted", "failed")) -> None:
        """Notes how the run ended, unless it has ended in one of these ways already."""
        with self._ending:
            if self.outcome not in unless:
                self._write_status(outcome, reason)
                self.outcome = outcome

    def _write_status(self, name: str, reason: str = "") -> None:
        status.write_own(self.directory, name, self.counters.token_count, reason)
