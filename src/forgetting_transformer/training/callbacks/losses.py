"""Losses: of every step, at every position too, and on held-out documents; norms, and updates that were left out."""

import itertools
import logging
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from forgetting_transformer import metric_names as names
from forgetting_transformer.data.batch_checks import check_batch
from forgetting_transformer.data.corpus import model_inputs
from forgetting_transformer.model.padding import packed_positions
from forgetting_transformer.training.callbacks.base import Callback, Interval, Step
from forgetting_transformer.training.feed import restarted
from forgetting_transformer.training.interface import TrainerInterface
from forgetting_transformer.training.parallel.sharding import local
from forgetting_transformer.training.records.loss_by_position import PositionSums, by_length, mean_loss

log = logging.getLogger(__name__)


class Loss(Callback):
    """train.jsonl: counters, learning rate, loss and gradient norm of the last step."""

    name = "loss"

    def on_interval(self, trainer: TrainerInterface, kind: Interval) -> None:
        step = trainer.latest
        if kind == "log" and step is not None:
            values = {names.LEARNING_RATE: step.lr, names.TRAIN_LOSS: step.loss.item()}
            values |= {names.GRADIENT_NORM: step.grad_norm.item()}
            trainer.report(names.TRAIN, asdict(trainer.counters) | values)


class LossByPosition(Callback):
    """train_eval.jsonl: loss at every position, mean over all sequences since the last report. On every rank.

    Args:
        length: tokens of a training sequence.
        shortest: shortest prefix whose mean loss is reported.
    """

    name = "loss_by_position"
    all_ranks = True

    def __init__(self, length: int, shortest: int, device: torch.device) -> None:
        self._shortest = shortest
        self._sums = PositionSums(length, device)

    def on_step(self, trainer: TrainerInterface, step: Step) -> None:
        self._sums.loss_T += torch.where(step.left_out.bool(), 0.0, step.loss_T)
        self._sums.sequences_T += (1 - step.left_out) * step.sequences_T

    def on_interval(self, trainer: TrainerInterface, kind: Interval) -> None:
        if kind != names.TRAIN_EVAL:
            return
        mean_T, counts_T = self._sums.mean_T(), self._sums.counts_T()
        sequences, tokens = int(self._sums.sequences_T[0].item()), int(self._sums.sequences_T.sum().item())
        self._sums.flat.zero_()
        counters = {f"{names.COUNTER}{name}": value for name, value in asdict(trainer.counters).items()}
        values = {"window_seq_count": sequences, "window_token_count": tokens, **counters}
        values |= by_length(names.TRAIN_EVAL, mean_T, self._shortest, counts_T)
        trainer.report(names.TRAIN_EVAL, values, {names.LOSS_PER_TOKEN: mean_T})

    def state(self) -> dict[str, Tensor]:
        return {"loss_T": self._sums.loss_T, "sequences": self._sums.sequences_T}

    def load(self, state: dict[str, Tensor]) -> None:
        self._sums.loss_T.copy_(state["loss_T"])
        self._sums.sequences_T.copy_(state["sequences"])  # one number in an import of the authors' code


class Norms(Callback):
    """norm.jsonl: L2 norm of every parameter ("pnorm/<name>"), and of its gradient after clipping ("gnorm/<name>").

    Sharded parameters are never gathered: every rank squares its own shard, and one reduction of two numbers a
    parameter adds them up. Waits for the device once.
    """

    name = "norms"
    all_ranks = True

    @torch.no_grad()
    def on_interval(self, trainer: TrainerInterface, kind: Interval) -> None:
        if kind != "log":
            return
        named = list(trainer.model.module.named_parameters())
        tensors: dict[str, Tensor] = {names.name_of(names.PARAMETER_NORM, name): p for name, p in named}
        tensors |= {
            names.name_of(names.GRADIENT_NORM_OF_PARAMETER, name): p.grad for name, p in named if p.grad is not None
        }
        squares = torch.stack([torch.linalg.vector_norm(local(t)) for t in tensors.values()]).double() ** 2
        if any(isinstance(p, DTensor) for _, p in named):
            # unsharded parameters count on one rank
            counted = [isinstance(t, DTensor) or trainer.fabric.is_global_zero for t in tensors.values()]
            squares *= torch.tensor(counted, device=squares.device)
            dist.all_reduce(squares)
        trainer.report(names.NORM, dict(zip(tensors, squares.sqrt().tolist(), strict=True)))


class BadSteps(Callback):
    """bad_step.jsonl, and a warning in every rank's log, for updates that faults/step_guard.py left out."""

    name = "bad_steps"
    all_ranks = True

    def on_step(self, trainer: TrainerInterface, step: Step) -> None:
        self._report(trainer)

    def on_interval(self, trainer: TrainerInterface, kind: Interval) -> None:
        if kind == "save":  # their lines must be there before the checkpoint is
            self._report(trainer)

    def on_end(self, trainer: TrainerInterface) -> None:
        self._report(trainer)

    def _report(self, trainer: TrainerInterface) -> None:
        for bad in trainer.guard.take_reports():
            places = trainer.data.locate(bad.batch)
            said = f"loss {bad.loss:.4g}, gradient norm {bad.global_grad_norm:.4g} ({bad.in_a_row} in a row)"
            log.warning("the update of batch %d was left out: %s; from %s on", bad.batch, said, places[0])
            not_finite = [
                place for place, loss in zip(places, bad.sequence_losses, strict=True) if not math.isfinite(loss)
            ]
            values = {**bad._asdict(), "sequences": [*places], "sequences_not_finite": not_finite}
            step = (bad.batch + 1) * trainer.tokens_per_step
            trainer.report(names.BAD_STEP, values, step=step)


class HeldOut(Callback):
    """Mean loss at every position over held-out documents, with the weights as they are."""

    name = "held_out"
    all_ranks = True
    evaluates = True
    kind = names.VAL

    @torch.no_grad()
    def on_interval(self, trainer: TrainerInterface, kind: Interval) -> None:
        if kind != "eval":
            return
        started, done = time.perf_counter(), f"{trainer.counters.token_count:,}"
        corpus = "the corpus (datamodule.name)"
        fabric, ranks, length = trainer.fabric, trainer.ranks, trainer.config.datamodule.eval_batch_len
        sums = PositionSums(length, fabric.device)
        trainer.model.eval()

        def read(done: int) -> Iterator[dict[str, Tensor]]:
            return itertools.islice(trainer.data.eval_loader(ranks.data_rank, ranks.data_size), done, None)

        batches = restarted(read, lambda: trainer.watchdog.reading(corpus))
        shown = fabric.is_global_zero and sys.stderr.isatty()
        for batch in tqdm(batches, desc="held-out", unit="batch", leave=False, disable=not shown):
            if trainer.should_stop():
                log.info("the evaluation after %s tokens was broken off", done)
                return
            check_batch(batch, corpus, None, length, weighted=True)
            batch = fabric.to_device(batch)
            inputs = model_inputs(batch)
            with ranks.in_context():
                loss_BT = trainer.model(**ranks.part_of(inputs)).loss
            sums.add(loss_BT, batch["weight"], packed_positions(inputs), ranks.part(length))
        trainer.sum_over_ranks(sums.flat)
        mean_T, counts_T = sums.mean_T(), sums.counts_T()
        sequences, tokens = int(sums.sequences_T[0].item()), int(sums.sequences_T.sum().item())
        seconds, loss = time.perf_counter() - started, mean_loss(mean_T, counts_T)
        values = {
            names.LOSS: loss,
            names.TOKENS_EVALUATED: tokens,
            "val_seq_count": sequences,
            "val_time": seconds,
            "val_tokens_per_second": tokens / seconds,
            **{f"{names.COUNTER}{counter}": value for counter, value in asdict(trainer.counters).items()},
        }
        values |= by_length(names.VAL, mean_T, trainer.config.eval.min_val_length, counts_T)
        trainer.report(names.VAL, values, {names.LOSS_PER_TOKEN: mean_T})
        if fabric.is_global_zero:
            unigram = trainer.data_info.unigram_entropy_nats
            known = f" (knowing only how frequent each token is: {unigram:.4f})" if unigram else ""
            log.info("held-out loss %.4f nats per token%s after %s tokens", loss, known, done)
