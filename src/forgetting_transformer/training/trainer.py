"""The training loop: `setup → run → step`.

Everything that decides what the weights become is a function of the config and the step: the tokens (data/order.py),
the learning rate (schedule.py), the random numbers (setup.seed_step). A checkpoint therefore carries only weights,
moments and counters, and a run that was killed continues as if it had not been.

What can go wrong has its own files: checkpoint.py (whole or not there, written in the background), step_guard.py
(losses that are not finite), sentinel.py and stop.py (signals, ranks that hang), feed.py (readers that die), status.py
and goodput.py (how it ended, where the time went). docs/reliability.md says what happens when.
"""

import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from forgetting_transformer.data.corpus import model_inputs
from forgetting_transformer.ops.selftest import Backend
from forgetting_transformer.training import execution, setup, status
from forgetting_transformer.training.backends import choose_on_all_ranks
from forgetting_transformer.training.callbacks import goodput
from forgetting_transformer.training.callbacks.norms import all_finite, parameter_norms
from forgetting_transformer.training.checkpoint import (
    Checkpoint,
    Checkpointer,
    CheckpointError,
    steps_in,
)
from forgetting_transformer.training.compilation import Compilation
from forgetting_transformer.training.config import (
    Config,
    ConfigError,
    check,
    check_continues,
    recorded,
)
from forgetting_transformer.training.corruption import Comparison, held
from forgetting_transformer.training.descriptions import data_description, model_info, write_descriptions
from forgetting_transformer.training.feed import DataWorkerError, feed
from forgetting_transformer.training.hardware import peak_flops
from forgetting_transformer.training.launch import launch
from forgetting_transformer.training.metrics import MetricsLog, Progress, Throughput, by_length
from forgetting_transformer.training.official_checkpoint import is_official
from forgetting_transformer.training.parameter_groups import undecayed_parameters
from forgetting_transformer.training.peers import Peers
from forgetting_transformer.training.provenance import describe
from forgetting_transformer.training.run_directory import RunDirectory, told
from forgetting_transformer.training.schedule import build_schedule
from forgetting_transformer.training.sentinel import Sentinel
from forgetting_transformer.training.start_block import start_block
from forgetting_transformer.training.startup import Startup
from forgetting_transformer.training.step_guard import StepGuard
from forgetting_transformer.training.stop import Stop, Vote

log = logging.getLogger(__name__)
#: How long the writer of a checkpoint on one rank waits for those on others. It is not what ends the wait for a writer
#: that hangs: the sentinel does, and knows a slow one from it.
_LET_WRITERS_WAIT = timedelta(days=7)


class TrainingError(RuntimeError):
    """Training cannot go on; the message says what happened and what still holds."""


@dataclasses.dataclass
class Counters:
    """What a run has done so far, over all ranks and restarts. Times in seconds."""

    token_count: int = 0
    batch_count: int = 0
    flop_count: int = 0
    total_time: float = 0.0
    update_time: float = 0.0

    def as_floats(self) -> dict[str, float]:
        return {name: float(value) for name, value in vars(self).items()}


def train(config: Config) -> str:
    """Trains one model, from its newest checkpoint or from the start, to `train.max_tokens`.

    Returns:
        "done", or "preempted" if a signal stopped it; then the same config continues it.
    """
    directory = RunDirectory(config.output_dir)
    with Sentinel(config.strategy.timeout_seconds) as sentinel:
        sentinel.on_end = lambda reason: status.end(directory, reason)
        peers = Peers()
        try:
            trainer = Trainer(config, sentinel, directory, peers)
        except BaseException as error:
            problem = error
            if isinstance(error, OSError):  # a full disk, or one that went away
                where = told(error, directory.root)
                problem = TrainingError(f"cannot start: {where}. Mend this and start the same command again")
            elif (blame := peers.explain(error)) is not None:
                problem = TrainingError(f"cannot start: {blame}. Start the same command again")
            reason = f"{type(problem).__name__}: {problem}"
            peers.failed(reason)
            status.end(directory, reason)
            raise problem from (None if problem is error else error)
        try:
            outcome = trainer.run()
            trainer.close()
            trainer.vote.together()  # so that no launcher takes an early rank's end for a reason to end the others
            return outcome
        except (OSError, DataWorkerError) as error:
            # A full disk, a file system that went away, readers that die. Checkpoints that could be skipped have been.
            trainer.settle()
            reason = told(error, directory.root) if isinstance(error, OSError) else str(error)
            problem = TrainingError(f"{reason}; {trainer.kept}. Mend this and start the same command again")
            trainer.failed(problem)
            raise problem from error
        except Exception as error:
            if (blame := peers.explain(error)) is not None:
                problem = TrainingError(f"{blame}; {trainer.kept}. Start the same command again")
                trainer.failed(problem)
                raise problem from error
            trainer.failed(error)
            raise
        finally:
            trainer.close()


class Trainer:
    def __init__(
        self,
        config: Config,
        sentinel: Sentinel | None = None,
        directory: RunDirectory | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.startup = Startup()
        self.config = config
        self.sentinel = sentinel or Sentinel(config.strategy.timeout_seconds)
        self.directory = directory or RunDirectory(config.output_dir)
        setup.claim_early(self.directory, config.resume)
        self.fabric = launch(config)
        self.peers = peers or Peers()
        self.peers.join(self.fabric.global_rank, self.fabric.world_size)
        self.sentinel.gone = self.peers.gone
        check(config, self.fabric.world_size)
        self._started("processes")
        self.goodput = goodput.Goodput(self.directory.goodput if self.fabric.is_global_zero else None)
        self.schedule = build_schedule(config.schedule, config.optimizer.lr)
        setup.on_rank_zero(self.fabric, lambda: status.claim(self.directory, config.resume))
        if config.resume:
            setup.start_logging(self.directory, self.fabric.global_rank)

        log.info("reading the corpus: %s in %s", config.datamodule.dataset, config.data_dir)
        recorded = setup.recorded_vocabulary(config, self.directory) if config.resume else None
        self.data = setup.build_data(config.data_dir, config.datamodule, recorded)
        self.data_info = self.data.train_info()
        self._check_budget()
        self._started("data")
        setup.warn_without_gpu(config, self.data_info, self.fabric.device)
        self.compilation = Compilation(
            config,
            self.data_info.vocab_size,
            self.fabric.device,
            self.fabric.global_rank,
            self.fabric.world_size,
        )
        self._started("compiler")
        timeout = timedelta(seconds=config.strategy.timeout_seconds)
        self.checkpointer = Checkpointer(
            self.directory.checkpoints,
            config.checkpoint_keep_last,
            self.fabric.global_rank,
            self.fabric.world_size,
            _LET_WRITERS_WAIT,
            config.checkpoint_background,
            self.directory.last_checkpoint,
        )
        self.checkpointer.watch = self.sentinel.waiting_for
        self.checkpointer.forked = config.fork_dir is not None
        self.vote = Vote(self.fabric.world_size, timeout)
        checkpoint, forked = self._find_checkpoint()
        self._started("checkpoint")
        log.info("building the model: %s", config.model.name)
        # Drawing initial weights takes one core, and testing kernels waits for compilers.
        with ThreadPoolExecutor(1, "model") as thread:
            outline = setup.outline(config, self.data_info)
            building = thread.submit(setup.build_model, config, self.data_info, initialise=checkpoint is None)
            #: op: what runs it, tested here and now.
            self.backends = self._choose_backends(outline)
            self._started("self-test")
            model = building.result()
        lengths = self.data.train_lengths().items()
        self.flops_per_token = sum(share * model.config.flops_per_token(length) for length, share in lengths)
        self._started("model")
        self.undecayed = undecayed_parameters(model, config.train)
        # Order matters: the optimizer must see the parameters that the strategy leaves behind.
        self.model = self.fabric.setup_module(model)
        optimizer = setup.build_optimizer(self.model.module, self.undecayed, config.optimizer)
        self.optimizer = self.fabric.setup_optimizers(optimizer)
        setup.check_optimizer_owns(self.model, self.optimizer)
        self._started("strategy")
        if not config.resume:
            # Only now: a command that is refused must leave the old run where it was.
            setup.on_rank_zero(self.fabric, self._move_aside)
            setup.start_logging(self.directory, self.fabric.global_rank)

        #: "done" or "preempted", once the status says so.
        self.outcome: str | None = None
        #: Where the weights come from, for people.
        self.origin = "a new run"
        #: Where this process comes from, told once: the code on disk may change while it runs.
        self.environment = describe(self.fabric.device)
        self.counters = Counters()
        #: Loss at every position, summed over the sequences since the last report of it.
        self.position_loss_T = torch.zeros(
            config.datamodule.train_batch_len, dtype=torch.float64, device=self.fabric.device
        )
        self.position_sequences = torch.zeros((), dtype=torch.float64, device=self.fabric.device)
        #: Compares what all ranks should hold alike; None where there is nothing to compare, or not wanted.
        self.comparison = self._comparison()
        self.guard = StepGuard(self.fabric.device, config.train.spike_factor)
        #: What the checkpoint that this start continues from was trained with.
        self.before: execution.Execution | None = None
        #: The hash of the corpus's list of checksums, or of the one that the run began with.
        self.data_checksums = self.data_info.checksums
        self.directory.make(self.directory.checkpoints)
        setup.on_rank_zero(self.fabric, self.checkpointer.clean)
        if checkpoint is not None:
            self._load(checkpoint, forked)
        #: Tokens of the checkpoint saved last, if any.
        self.saved_step = checkpoint.step if checkpoint is not None and not forked else None
        self.execution = execution.choose(
            config.train.compile, self.fabric.device, self.before, self.backends, self.fabric.global_rank
        )
        self.compilation.settle(self.model.module if self.compiled else None)
        self._started("checkpoint")
        self.goodput.begin(self.counters.token_count)
        self.metrics = self._open_metrics() if self.fabric.is_global_zero else None
        peak = config.fabric.peak_flops or peak_flops(self.fabric.device, config.fabric.precision)
        self.throughput = Throughput(peak and peak * self.fabric.world_size, self.counters.as_floats())
        self.progress = Progress(config.train.max_tokens, self.counters.token_count, self.fabric.is_global_zero)
        self._started("logs")

    def _started(self, stage: str) -> None:
        """The start has `stage` behind it."""
        self.startup.done(stage)
        self.sentinel.starting(stage)

    @property
    def compiled(self) -> bool:
        """Whether blocks and loss are compiled: what `train.compile` came to."""
        return self.execution.compile

    def run(self) -> str:
        """Returns "done" or "preempted"."""
        self.sentinel.on_end = self._ended_by_sentinel
        self._write_status("running")
        if self.metrics is not None:
            log.info("about to train %s:\n%s", self.config.tag, start_block(self))
        config, counters = self.config, self.counters
        tokens_per_batch = config.datamodule.train_batch_size * config.datamodule.train_batch_len
        stop = self._evaluate_what_was_broken_off(tokens_per_batch)
        remaining = math.ceil((config.train.max_tokens - counters.token_count) / tokens_per_batch)
        if remaining <= 0:
            log.info("nothing left to train: %s tokens are done", f"{counters.token_count:,}")
        elif self.compiled:
            self.compilation.foretell()
        clock = time.perf_counter() - counters.total_time
        category = "first step"
        for batch in self._batches(remaining) if remaining > 0 and not stop else ():
            started = time.perf_counter()
            self.goodput.switch(category)
            if category == "first step":
                self._started("first batch")
            before = counters.token_count
            loss, grad_norm, lr = self.step(self.fabric.to_device(batch))
            counters.token_count += tokens_per_batch
            counters.batch_count += 1
            counters.flop_count += round(tokens_per_batch * self.flops_per_token)
            counters.update_time += time.perf_counter() - started
            counters.total_time = time.perf_counter() - clock
            self.throughput.step(counters.as_floats())
            self.progress.advance(tokens_per_batch)
            if category == "first step":
                self._report_first_step(loss)

            last = counters.token_count >= config.train.max_tokens
            if last or self._due(config.log_interval, before):
                self._log(loss, grad_norm, lr)
            if last or self._due(config.train_eval_interval, before):
                self._report_position_loss()
            if category == "first step":
                self.checkpointer.reserve(self.model.module, self.optimizer.optimizer)
                category = "steps"
            if self.comparison is not None and counters.batch_count % config.strategy.compare_steps == 0:
                self._compare_ranks()
            stop = self._agree_to_stop()
            if not stop and self._evaluation_due(before):
                stop = self.evaluate()
            if stop == Stop.CORRUPT:
                break
            keep = self._due(config.checkpoint_keep_interval, before)
            if last or stop or keep or self._due(config.checkpoint_interval, before):
                self._save(permanent=keep, must_succeed=last or bool(stop))
            counters.total_time = time.perf_counter() - clock
            if stop:
                break
            self.goodput.switch("data")
        return self._finish(stop)

    def step(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, float]:
        """One update from one global batch; returns its loss and gradient norm as device tensors, and the rate used.

        The batch is this rank's share, (B, T). Gradients are those of the mean loss per token of the global batch: each
        micro-batch has the same number of tokens, and the strategy averages over ranks.
        """
        config = self.config
        lr = self.schedule(self.counters.token_count)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        setup.seed_step(config.seed, self.counters.batch_count, self.fabric.global_rank)
        self.optimizer.zero_grad()

        sequences = max(1, config.train.grad_acc_tokens // config.datamodule.train_batch_len)
        # Summed over ranks in one go: loss at every position, and loss of every sequence of the global batch.
        length, local = self.position_loss_T.numel(), len(batch["input_ids"])
        starts = range(0, local, sequences)
        losses = self.position_loss_T.new_zeros(length + config.datamodule.train_batch_size)
        loss_T, loss_B = losses[:length], losses[length:]
        for start in starts:
            # FSDP2 needs *every* backward pass inside this context, the synchronised last one too.
            with self.fabric.no_backward_sync(self.model, enabled=start != starts[-1]):
                loss_bT = self.model(**model_inputs(batch, slice(start, start + sequences))).loss
                self.fabric.backward(loss_bT.mean() / len(starts))
            loss_T += loss_bT.detach().sum(0, dtype=torch.float64)
            row = self.fabric.global_rank * local + start
            loss_B[row : row + len(loss_bT)] = loss_bT.detach().mean(1, dtype=torch.float64)
        # A non-finite norm must not raise on one rank while others go on: all judge it alike below.
        grad_norm = self.fabric.clip_gradients(
            self.model, self.optimizer, max_norm=config.train.max_grad_norm, error_if_nonfinite=False
        )
        grad_norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
        self._sum_over_ranks(losses)
        bad = self.guard.judge(self.counters.batch_count, loss_B, grad_norm)
        # What torch's gradient scaler uses too: the fused kernel changes neither weights nor moments where this is 1.
        self.optimizer.optimizer.found_inf = bad
        self.optimizer.step()

        self.position_loss_T += torch.where(bad.bool(), 0.0, loss_T)
        self.position_sequences += (1 - bad) * config.datamodule.train_batch_size
        return loss_T.sum() / (config.datamodule.train_batch_size * length), grad_norm, lr

    @torch.no_grad()
    def evaluate(self) -> Stop:
        """Mean loss at every position over the held-out documents, with the weights as they are.

        Returns why it was broken off, if it was: then nothing is reported, and the next start does it again.
        """
        with self.goodput.during("evaluation"):
            return self._evaluate()

    def _evaluate(self) -> Stop:
        started = time.perf_counter()
        length = self.config.datamodule.eval_batch_len
        loss_T = torch.zeros(length, dtype=torch.float64, device=self.fabric.device)
        sequences = torch.zeros((), dtype=torch.float64, device=self.fabric.device)
        self.model.eval()

        def read(done: int) -> Iterator[dict[str, Tensor]]:
            return itertools.islice(self.data.eval_loader(self.fabric.global_rank, self.fabric.world_size), done, None)

        stop = Stop.NO
        for batch in tqdm(feed(read), desc="held-out", unit="batch", leave=False, disable=not self.progress.live):
            if stop := self._agree_to_stop():
                break
            batch = self.fabric.to_device(batch)
            loss_BT = self.model(**model_inputs(batch)).loss
            loss_T += batch["weight"] @ loss_BT.double()
            sequences += batch["weight"].sum()
        self.model.train()
        if self.compiled:
            self.compilation.warn_of_uncompiled()
        if stop:
            log.info("the evaluation after %s tokens was broken off", f"{self.counters.token_count:,}")
            return stop
        self._sum_over_ranks(loss_T)
        self._sum_over_ranks(sequences)
        if self.metrics is None:
            return Stop.NO
        mean_T, count = (loss_T / sequences).cpu().numpy(), int(sequences.item())
        seconds = time.perf_counter() - started
        values = {
            "val/loss": float(mean_T.mean()),
            "val/val_token_count": count * length,
            "val/val_seq_count": count,
            "val/val_time": seconds,
            "val/val_tokens_per_second": count * length / seconds,
            **by_length("val", mean_T, self.config.eval.min_val_length),
            **{f"val/train_{name}": value for name, value in vars(self.counters).items()},
        }
        self.metrics.report("val", self.counters.token_count, values)
        self.metrics.report_arrays("val", self.counters.token_count, values | {"val/loss_per_token": mean_T})
        unigram = self.data_info.unigram_entropy_nats
        known = f" (knowing only how frequent each token is: {unigram:.4f})" if unigram else ""
        tokens = f"{self.counters.token_count:,}"
        log.info("held-out loss %.4f nats per token%s after %s tokens", mean_T.mean(), known, tokens)
        return Stop.NO

    def settle(self) -> None:
        """Learns how the save in flight ended, without telling anybody."""
        saved = self.checkpointer.finished(wait=True)
        if saved is not None and saved.error is None:
            self.saved_step = saved.step

    def _ended_by_sentinel(self, reason: str) -> None:
        if self.outcome is not None:
            return  # and that is how the run ended, whatever hangs behind it
        blame = self.peers.blame()
        self.peers.failed(reason)
        self._write_status("failed", f"{blame + '; ' if blame else ''}{reason}; {self.kept}")

    def failed(self, error: Exception) -> None:
        """Notes how the run ended, for people and for the other ranks."""
        reason = f"{type(error).__name__}: {error}"
        self.peers.failed(reason)
        self.outcome = "failed"
        self._write_status("failed", reason)

    def close(self) -> None:
        self.checkpointer.close()
        self.sentinel.closing()
        if self.metrics is not None:
            self.metrics.close()
            self.metrics = None
        self.directory.release()

    @property
    def kept(self) -> str:
        """What a later start can go on from, for messages."""
        step = self.checkpointer.last_good or self.saved_step
        return f"the last good checkpoint is at {step:,} tokens" if step else "nothing was saved"

    def _finish(self, stop: Stop) -> str:
        """After the last step, on every rank alike."""
        self.progress.close()
        self._report_saved(wait=True, must_succeed=stop != Stop.CORRUPT)
        done = f"{self.counters.token_count:,} tokens in {self.directory.root}"
        log.info("%s", goodput.describe(self.goodput.write(self.counters.token_count)))
        if stop == Stop.CORRUPT:
            self._refuse_differences()
        if stop == Stop.BAD_STEPS:
            raise TrainingError(
                f"{self.guard.longest_row} updates in a row were left out, because a loss or gradient was not finite "
                f"or much larger than usual; {self.kept}, without them. metrics/jsonlines/bad_step.jsonl in "
                f"{self.directory.root} names their documents and tokens, and scripts/replay.py looks into one. Lower "
                "optimizer.lr (in a fork), mend the data, or raise train.max_bad_steps"
            )
        outcome = "preempted" if stop else "done"
        self._write_status(outcome, self.sentinel.request or "")
        self.outcome = outcome
        log.info("%s: %s", "training finished" if outcome == "done" else "stopped and saved", done)
        return outcome

    def _batches(self, count: int) -> Iterator[dict[str, Tensor]]:
        """This rank's shares of the next `count` global batches."""
        first = self.counters.batch_count
        rank, world_size = self.fabric.global_rank, self.fabric.world_size
        return feed(lambda done: self.data.train_loader(first + done, first + count, rank, world_size))

    def _agree_to_stop(self) -> Stop:
        """Once a step, or batch of an evaluation: whether all ranks stop here, and what became of steps before."""
        self.sentinel.beat()
        self._report_saved()
        self._report_bad_steps()
        wish = Stop.PREEMPTED if self.sentinel.request else Stop.NO
        if self.guard.longest_row >= self.config.train.max_bad_steps:
            wish = Stop.BAD_STEPS
        if self.comparison is not None and self.comparison.difference() is not None:
            wish = Stop.CORRUPT
        return self.vote.cast(wish)

    def _evaluation_due(self, before: int) -> bool:
        config = self.config
        last = self.counters.token_count >= config.train.max_tokens
        return not config.skip_eval and (self._due(config.eval_interval, before) or (last and config.final_eval))

    def _evaluate_what_was_broken_off(self, tokens_per_batch: int) -> Stop:
        """The evaluation that was due at the checkpoint this start goes on from, if a signal came before its end."""
        step = self.counters.token_count
        if not step or step != self.saved_step or not self._evaluation_due(step - tokens_per_batch):
            return Stop.NO
        reported = setup.on_rank_zero(self.fabric, lambda: self.metrics.has("val", step))
        return Stop.NO if self.fabric.broadcast(reported) else self.evaluate()

    def _write_status(self, name: str, reason: str = "") -> None:
        if self.directory.held:
            status.write_status(self.directory.root, name, self.counters.token_count, reason)

    def _move_aside(self) -> None:
        status.restore(self.directory)
        moved = self.directory.move_aside()
        status.write_status(self.directory.root, "starting", 0)
        if moved:
            log.warning("resume=false: what the run in %s had written is now in %s", self.directory.root, moved)

    def _sum_over_ranks(self, tensor: Tensor) -> None:
        """In place. Fabric's own all_reduce would put a barrier before it, for which the host waits."""
        if self.fabric.world_size > 1:
            dist.all_reduce(tensor)

    def _choose_backends(self, model: nn.Module) -> dict[str, Backend]:
        config = self.config
        if self.fabric.device.type == "cuda":
            log.info("testing the kernels")
        dtype = torch.float32 if config.fabric.precision == "32-true" else torch.bfloat16
        lengths = [config.datamodule.train_batch_len, *([] if config.skip_eval else [config.datamodule.eval_batch_len])]
        return choose_on_all_ranks(model, dtype, self.fabric.device, lengths)

    def _check_budget(self) -> None:
        """Held-out data, the token budget and the cache of a remote corpus are looked at now, not after hours of training."""
        info, config = self.data_info, self.config
        if config.train.max_tokens > info.total_tokens and not config.datamodule.repeat:
            raise ConfigError(
                f"train.max_tokens={config.train.max_tokens:,} is more than the {info.total_tokens:,} tokens of "
                f"{info.path} at this batch shape; lower it, or set datamodule.repeat=true to read the data again"
            )
        if not config.skip_eval:
            self.data.eval_info()
        self.data.check_cache(self.fabric.world_size, evaluates=not config.skip_eval)

    def _find_checkpoint(self) -> tuple[Checkpoint | None, bool]:
        """What to start from, and whether it is another run's: the newest valid checkpoint, else the fork, else nothing."""
        config = self.config
        if not config.resume:
            return None, False
        checkpoint = self.checkpointer.newest()
        if checkpoint is not None or not config.fork_dir:
            return checkpoint, False
        folder = RunDirectory(config.fork_dir).checkpoints
        source = Checkpointer(folder, 1, self.fabric.global_rank, self.fabric.world_size)
        checkpoint = source.newest(config.fork_step)
        if checkpoint is None and is_official(RunDirectory(config.fork_dir)):
            raise CheckpointError(
                f"fork_dir={config.fork_dir} is a run of the authors' code; make a run of it with "
                f"scripts/import_checkpoint.py "
                "first, and continue or fork that"
            )
        if checkpoint is None:
            raise CheckpointError(
                f"fork_step={config.fork_step}: no valid checkpoint of that many tokens in {folder}; it holds "
                f"{steps_in(folder) or 'nothing'}"
            )
        return checkpoint, True

    def _load(self, checkpoint: Checkpoint, forked: bool) -> None:
        state = checkpoint.trainer_state()
        check_continues(str(checkpoint.path), state, self.config, self.data_info, forked)
        if not forked:
            self.before = execution.recorded(state)
            name, rank = str(checkpoint.path), self.fabric.global_rank
            self.data_checksums = setup.list_held_to(name, state, self.data_info, rank)
        how = "forked from" if forked else "continuing from"
        log.info("%s %s", how, checkpoint.path)
        self.origin = f"{how} {checkpoint.path} ({checkpoint.step:,} tokens)"
        self.checkpointer.load(checkpoint, self.model.module, self.optimizer.optimizer)
        self.counters = Counters(**{f.name: state[f.name] for f in dataclasses.fields(Counters)})
        windows = checkpoint.windows()
        self.position_loss_T += torch.from_numpy(windows["position_loss"]).to(self.fabric.device)
        self.position_sequences += float(windows["position_sequences"])
        self.guard.load({name: torch.from_numpy(array) for name, array in windows.items()})

    @property
    def resolved(self) -> dict[str, Any]:
        return recorded(self.config)

    def _open_metrics(self) -> MetricsLog:
        step = self.counters.token_count
        info = model_info(self.model.module, self.flops_per_token)
        start = {"step": step, "world_size": self.fabric.world_size, **self.environment}
        write_descriptions(self.directory, self.config, self.model.module, self.undecayed, info, start)
        setup.copy_tokenizer(self.data.folder, self.directory)
        metrics = MetricsLog(self.directory, self.config, self.resolved, step)
        metrics.report("resume", step, {"resume/resume_step": step})
        data, world_size = self.config.datamodule, self.fabric.world_size
        local = data.train_batch_size // world_size
        metrics.report_once("train_data_info", step, data_description(self.data_info, local, world_size))
        if not self.config.skip_eval:
            described = data_description(self.data.eval_info(), data.eval_local_batch_size, world_size)
            metrics.report_once("val_data_info", step, described)
        metrics.report_once("model_info", step, info)
        return metrics

    def _due(self, interval: int, before: int) -> bool:
        """Whether the step that began after `before` tokens crossed a multiple of `interval`."""
        return before // interval != self.counters.token_count // interval

    def _log(self, loss: Tensor, grad_norm: Tensor, lr: float) -> None:
        """The only place in the loop, besides evaluations and checkpoints, that waits for the device."""
        self._wait_for_device()
        norms = parameter_norms(self.model.module)
        rates = self.throughput.metrics(self.counters.as_floats())
        if self.metrics is None:
            return
        step, value = self.counters.token_count, loss.item()
        values = {f"train/{name}": count for name, count in vars(self.counters).items()}
        values |= {"train/lr": lr, "train/loss": value, "train/global_grad_norm": grad_norm.item()}
        self.metrics.report("train", step, values)
        self.metrics.report("norm", step, norms)
        if rates:
            self.metrics.report("throughput", step, rates)
        self.metrics.report("goodput", step, {f"goodput/{k}": v for k, v in self.goodput.write(step).items()})
        rate = rates.get("throughput/token_count_per_second_total_recent")
        self.progress.show(step, self.config.train.max_tokens, value, lr, rate)

    def _report_first_step(self, loss: Tensor) -> None:
        self._wait_for_device()
        self.startup.done("first step")
        self.sentinel.started()
        self.goodput.started(self.startup.seconds)
        log.info("the first step is done, loss %.4f, %s", loss.item(), self.startup)
        if self.compiled:
            self.compilation.first_step_took(self.startup.seconds["first step"])
            self.compilation.warn_of_uncompiled()

    def _report_position_loss(self) -> None:
        mean_T = (self.position_loss_T / self.position_sequences).cpu().numpy()
        sequences = int(self.position_sequences.item())
        self.position_loss_T.zero_()
        self.position_sequences.zero_()
        if self.metrics is None:
            return
        step = self.counters.token_count
        values = {
            **by_length("train_eval", mean_T, self.config.eval.min_val_length),
            "train_eval/window_seq_count": sequences,
            "train_eval/window_token_count": sequences * mean_T.size,
            **{f"train_eval/train_{name}": value for name, value in vars(self.counters).items()},
        }
        self.metrics.report("train_eval", step, values)
        self.metrics.report_arrays("train_eval", step, values | {"train_eval/loss_per_token": mean_T})

    def _save(self, permanent: bool, must_succeed: bool) -> None:
        self._wait_for_device()
        with self.goodput.during("checkpoint"):
            self._report_bad_steps(wait=True)  # their lines must be there before the checkpoint is
            self._report_saved(wait=True)
            if self.saved_step != self.counters.token_count:
                self._start_save(permanent)
            if must_succeed or not self.config.checkpoint_background:
                self._report_saved(wait=True, must_succeed=must_succeed)

    def _comparison(self) -> Comparison | None:
        same = self.fabric.world_size > 1 and isinstance(self.fabric.strategy, DDPStrategy)
        return Comparison(self.fabric.world_size) if same and self.config.strategy.compare_steps else None

    def _compare_ranks(self) -> None:
        self.comparison.begin(self.counters.batch_count, held(self.model.module, self.optimizer.optimizer))

    def _refuse_differences(self) -> None:
        """
        Raises:
            TrainingError: ranks hold different weights or moments; on every rank.
        """
        found = self.comparison.difference(wait=True)
        if found is not None:
            raise TrainingError(
                f"weights or moments are corrupt: {found}. All ranks should hold the same, so memory or a GPU has "
                f"failed; nothing was saved since, and {self.kept}. Leave that machine out, or test it, and start the "
                f"same command "
                "again"
            )

    def _start_save(self, permanent: bool) -> None:
        if self.comparison is not None:
            self._compare_ranks()
            self._refuse_differences()
        if not all_finite(self.model.module, self.optimizer.optimizer):
            raise TrainingError(
                f"weights or moments became infinite or NaN before {self.counters.token_count:,} tokens, though every "
                f"update that was made had a finite gradient; {self.kept}, and nothing was saved since. Lower "
                f"optimizer.lr, "
                "and if that does not help suspect the hardware"
            )
        state = {
            **vars(self.counters),
            "config": self.resolved,
            "model_config": self.model.module.config.to_dict(),
            "data_fingerprint": self.data_info.fingerprint,
            "data_checksums": self.data_checksums,
            "world_size": self.fabric.world_size,
            "environment": self.environment,
            "execution": self.execution.as_json(),
        }
        windows = {"position_loss": self.position_loss_T, "position_sequences": self.position_sequences}
        self.goodput.mark(self.counters.token_count)
        self.checkpointer.save(
            self.counters.token_count,
            self.model.module,
            self.optimizer.optimizer,
            state,
            windows | self.guard.state(),
            permanent,
            before_manifest=self.metrics.flush if self.metrics is not None else lambda: None,
        )

    def _report_saved(self, wait: bool = False, must_succeed: bool = False) -> None:
        """What became of the save in flight, if it has ended. A failed one costs a checkpoint and not the run."""
        saved = self.checkpointer.finished(wait)
        if saved is None:
            return
        if saved.error is None:
            self.saved_step = saved.step
            if self.metrics is not None:
                seconds = {"checkpoint_time": saved.copy_seconds, "write_time": saved.write_seconds}
                self.metrics.report("checkpoint", saved.step, {f"checkpoint/{k}": v for k, v in seconds.items()})
        elif must_succeed:
            raise TrainingError(f"{saved.error}; {self.kept}. Make room and start the same command again")
        else:
            log.error("%s; %s. Training goes on", saved.error, self.kept)

    def _report_bad_steps(self, wait: bool = False) -> None:
        data = self.config.datamodule
        for bad in self.guard.bad_steps(wait):
            where = self.data.locate(bad.batch)
            log.warning("the update of batch %d was left out: %s; %s", bad.batch, bad, where)
            if self.metrics is not None:
                step = (bad.batch + 1) * data.train_batch_size * data.train_batch_len
                self.metrics.report("bad_step", step, {f"bad_step/{k}": v for k, v in bad.describe(where).items()})

    def _wait_for_device(self) -> None:
        # Here the host waits until the device has done the steps it was given: that time is the steps' time.
        started = time.perf_counter()
        setup.synchronize(self.fabric.device)
        waited = time.perf_counter() - started
        self.counters.update_time += waited
        self.counters.total_time += waited
