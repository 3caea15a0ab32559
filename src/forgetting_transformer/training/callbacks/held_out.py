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

from forgetting_transformer.data.corpus import model_inputs
from forgetting_transformer.model.padding import packed_positions
from forgetting_transformer.training.callbacks.base import Callback, Interval
from forgetting_transformer.training.feed import feed
from forgetting_transformer.training.loss_by_position import PositionSums, by_length, mean_loss

if TYPE_CHECKING:
    from forgetting_transformer.training.interface import TrainerInterface

log = logging.getLogger(__name__)


class HeldOut(Callback):
    """val.jsonl: mean loss at every position over the held-out documents, with the weights as they are."""

    name = "held_out"
    all_ranks = True
    evaluates = True
    kinds = ("val",)

    @torch.no_grad()
    def on_interval(self, trainer: "TrainerInterface", kind: Interval) -> None:
        if kind != "eval":
            return
        started = time.perf_counter()
        fabric, length = trainer.fabric, trainer.config.datamodule.eval_batch_len
        sums = PositionSums.zeros(length, fabric.device)
        trainer.model.eval()

        def read(done: int) -> Iterator[dict[str, Tensor]]:
            return itertools.islice(trainer.data.eval_loader(fabric.global_rank, fabric.world_size), done, None)

        shown = fabric.is_global_zero and sys.stderr.isatty()
        for batch in tqdm(feed(read), desc="held-out", unit="batch", leave=False, disable=not shown):
            if trainer.beat():
                log.info("the evaluation after %s tokens was broken off", f"{trainer.counters.token_count:,}")
                return
            batch = fabric.to_device(batch)
            inputs = model_inputs(batch)
            loss_BT = trainer.model(**inputs).loss
            sums.add(loss_BT, batch["weight"], packed_positions(inputs))
        trainer.sum_over_ranks(sums.flat)
        mean_T, counts_T = sums.mean_T(), sums.counts_T()
        sequences, tokens = int(sums.sequences_T[0].item()), int(sums.sequences_T.sum().item())
        seconds = time.perf_counter() - started
        values = {
            "val/loss": mean_loss(mean_T, counts_T),
            "val/val_token_count": tokens,
            "val/val_seq_count": sequences,
            "val/val_time": seconds,
            "val/val_tokens_per_second": tokens / seconds,
            **by_length("val", mean_T, trainer.config.eval.min_val_length, counts_T),
            **{f"val/train_{name}": value for name, value in vars(trainer.counters).items()},
        }
        trainer.report("val", values, {"val/loss_per_token": mean_T})
