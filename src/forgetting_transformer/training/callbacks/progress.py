"""The state of the run for people: a live bar on a terminal, plain lines in the log."""

import logging

from tqdm import tqdm

from forgetting_transformer.training.callbacks.base import Callback, Interval, Step
from forgetting_transformer.training.callbacks.throughput import Throughput
from forgetting_transformer.training.interface import TrainerInterface
from forgetting_transformer.training.records.logs import ON_THE_BAR
from forgetting_transformer.training.records.metrics import duration

log = logging.getLogger(__name__)


class Progress(Callback):
    """A live bar on a terminal (tokens done, tokens/s, time left, loss), and lines in the log; elsewhere lines in both.

    Args:
        throughput: knows the rate.
    """

    name = "progress"

    def __init__(self, throughput: Throughput) -> None:
        self._throughput = throughput
        self._bar = tqdm(disable=True)

    @property
    def live(self) -> bool:
        """Whether there is a terminal to draw bars on."""
        return not self._bar.disable

    def on_start(self, trainer: TrainerInterface) -> None:
        self._bar = tqdm(
            desc="train", unit="tok", unit_scale=True, total=trainer.config.train.max_tokens,
            initial=trainer.counters.token_count, dynamic_ncols=True, disable=None,  # where stderr is no terminal
        )  # fmt: skip

    def on_step(self, trainer: TrainerInterface, step: Step) -> None:
        self._bar.update(trainer.tokens_per_step)

    def on_interval(self, trainer: TrainerInterface, kind: Interval) -> None:
        if kind != "log" or trainer.latest is None:
            return
        tokens, total, per_second = trainer.counters.token_count, trainer.config.train.max_tokens, self._throughput.rate
        loss, lr = trainer.latest.loss.item(), trainer.latest.lr
        if self.live:
            self._bar.set_postfix(loss=f"{loss:.4f}", lr=f"{lr:.2e}")
        rate = f"{per_second:,.0f} tokens/s" if per_second else "first steps"
        left = f", {duration((total - tokens) / per_second)} left" if per_second else ""
        log.info(
            *("%s of %s tokens, loss %.4f, lr %.2e, %s%s", f"{tokens:,}", f"{total:,}", loss, lr, rate, left),
            extra={ON_THE_BAR: self.live},
        )

    def on_end(self, trainer: TrainerInterface) -> None:
        self._bar.close()
