"""The loss on held-out documents."""

import itertools
import logging
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from forgetting_transformer import metric_names as names
from forgetting_transformer.data.batch_checks import check_batch
from forgetting_transformer.data.corpus import model_inputs
from forgetting_transformer.model.padding import packed_positions
from forgetting_transformer.training.callbacks.base import Callback, Interval
from forgetting_transformer.training.feed import restarted
from forgetting_transformer.training.interface import TrainerInterface
from forgetting_transformer.training.records.loss_by_position import PositionSums, by_length, mean_loss
from forgetting_transformer.training.records.metrics import prefixed

if TYPE_CHECKING:
    from forgetting_transformer.data.corpus import Corpus

log = logging.getLogger(__name__)


class HeldOut(Callback):
    """Mean loss at every position over held-out documents, with the weights as they are.

    Args:
        data: whose held-out documents.
    """

    name = "held_out"
    all_ranks = True
    evaluates = True
    kinds = (names.VAL,)

    def __init__(self, data: "Corpus") -> None:
        self._data, self._corpus = data, "the corpus (datamodule.name)"

    @torch.no_grad()
    def on_interval(self, trainer: TrainerInterface, kind: Interval) -> None:
        if kind != "eval":
            return
        started = time.perf_counter()
        fabric, ranks, length = trainer.fabric, trainer.ranks, trainer.config.datamodule.eval_batch_len
        sums = PositionSums.zeros(length, fabric.device)
        trainer.model.eval()

        def read(done: int) -> Iterator[dict[str, Tensor]]:
            return itertools.islice(self._data.eval_loader(ranks.data_rank, ranks.data_size), done, None)

        batches = restarted(read, lambda: trainer.watchdog.reading(self._corpus))
        shown = fabric.is_global_zero and sys.stderr.isatty()
        for batch in tqdm(batches, desc="held-out", unit="batch", leave=False, disable=not shown):
            if trainer.should_stop():
                done = f"{trainer.counters.token_count:,}"
                log.info("the evaluation after %s tokens was broken off", done)
                return
            check_batch(batch, self._corpus, None, length, weighted=True)
            batch = fabric.to_device(batch)
            inputs = model_inputs(batch)
            with ranks.share():
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
            **{f"{names.COUNTER}{counter}": value for counter, value in vars(trainer.counters).items()},
        }
        values = prefixed(names.VAL, values)
        values |= by_length(names.VAL, mean_T, trainer.config.eval.min_val_length, counts_T)
        trainer.report(names.VAL, values, {names.name_of(names.VAL, names.LOSS_PER_TOKEN): mean_T})
        if fabric.is_global_zero:
            unigram = trainer.data_info.unigram_entropy_nats
            known = f" (knowing only how frequent each token is: {unigram:.4f})" if unigram else ""
            done = f"{trainer.counters.token_count:,}"
            log.info("held-out loss %.4f nats per token%s after %s tokens", loss, known, done)
