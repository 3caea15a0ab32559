"""The state of the run for people: a live bar on a terminal, plain lines in the log."""

import logging
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from forgetting_transformer.metric_names import LOSS, VAL, VAL_SET, name_of
from forgetting_transformer.training.callbacks.base import Callback, Interval, Step
from forgetting_transformer.training.callbacks.throughput import Throughput
from forgetting_transformer.training.records.logs import ON_THE_BAR
from forgetting_transformer.training.records.metrics import duration

if TYPE_CHECKING:
    from forgetting_transformer.training.interface import TrainerInterface

log = logging.getLogger(__name__)


class Progress(Callback):
    """A live bar on a terminal (tokens done, tokens/s, time left, loss), and lines in the log; elsewhere lines in both.

    Args:
        total: tokens of the whole run.
        done: tokens trained on before this process started.
        enabled: on rank 0 only.
        throughput: which knows the rate.
    """

    name = "progress"

    def __init__(self, total: int, done: int, enabled: bool, throughput: Throughput | None = None) -> None:
        self._total, self._enabled, self._throughput = total, enabled, throughput
        # Where stderr is no terminal, None disables it.
        hidden = None if enabled else True
        self._bar = tqdm(
            desc="train", unit="tok", unit_scale=True, total=total, initial=done, dynamic_ncols=True, disable=hidden
        )

    @property
    def live(self) -> bool:
        """Whether there is a terminal to draw bars on."""
        return not self._bar.disable

    def on_step(self, trainer: "TrainerInterface", step: Step) -> None:
        self._bar.update(trainer.tokens_per_step)

    def on_interval(self, trainer: "TrainerInterface", kind: Interval) -> None:
        if kind == "log" and trainer.latest is not None:
            rate = self._throughput.tokens_per_second if self._throughput is not None else None
            latest = trainer.latest
            self.show(trainer.counters.token_count, self._total, latest.loss.item(), latest.lr, rate)

    def on_evaluate(self, trainer: "TrainerInterface", kind: str, values: dict[str, Any]) -> None:
        tokens = f"{trainer.counters.token_count:,}"
        if kind.startswith(VAL_SET) and kind.removeprefix(VAL_SET) in trainer.eval_sets:
            name = kind.removeprefix(VAL_SET)
            log.info(
                "held-out loss of %s %.4f nats per token after %s tokens", name, values[name_of(kind, LOSS)], tokens
            )
        if kind != VAL:
            return
        unigram = trainer.data_info.unigram_entropy_nats
        known = f" (knowing only how frequent each token is: {unigram:.4f})" if unigram else ""
        log.info("held-out loss %.4f nats per token%s after %s tokens", values[name_of(VAL, LOSS)], known, tokens)

    def on_end(self, trainer: "TrainerInterface") -> None:
        self.close()

    def show(self, tokens: int, total: int, loss: float, lr: float, tokens_per_second: float | None) -> None:
        """Called where losses are logged, so that the bar adds no synchronisation."""
        if self.live:
            self._bar.set_postfix(loss=f"{loss:.4f}", lr=f"{lr:.2e}")
        if self._enabled:
            rate = f"{tokens_per_second:,.0f} tokens/s" if tokens_per_second else "first steps"
            left = f", {duration((total - tokens) / tokens_per_second)} left" if tokens_per_second else ""
            log.info(
                *("%s of %s tokens, loss %.4f, lr %.2e, %s%s", f"{tokens:,}", f"{total:,}", loss, lr, rate, left),
                extra={ON_THE_BAR: self.live},
            )

    def close(self) -> None:
        self._bar.close()
