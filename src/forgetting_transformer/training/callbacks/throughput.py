"""Speed of a run: tokens, batches and FLOPs per second, MFU, memory; a live bar on a terminal, lines in the log."""

import logging
import sys
from collections import deque

import torch
from tqdm import tqdm

from forgetting_transformer import metric_names as names
from forgetting_transformer.training.callbacks.base import Callback, Interval, Step
from forgetting_transformer.training.interface import TrainerInterface
from forgetting_transformer.training.records.logs import ON_THE_BAR
from forgetting_transformer.training.records.metrics import duration

log = logging.getLogger(__name__)


class Throughput(Callback):
    """Rates and MFU, over all of a run and over the last `window` steps, under the names the paper's runs used.

        throughput/{token,batch,flop}_count_per_second_{total,update}_{recent,cum}
        throughput/mfu_{total,update}_{recent,cum}
        throughput/peak_memory_bytes                of rank 0's device, since this start

    "total" counts wall time of the training loop, evaluations and checkpoints included; "update" only the steps.
    "recent" is the window, "cum" the whole run with its restarts; MFU's "cum" begins at the last start, because a
    restart may have other GPUs.

    MFU is model FLOPs per second over the peak of all GPUs. Convention: model FLOPs are those of
    `DecoderConfig.flops_per_token`. Causal attention counts the pairs it needs, recomputation is not counted, and
    pruned attention counts as if full. So MFU shows how fast a model trains, by whatever means, and with pruning it may
    exceed what the hardware computes. FLOPs "as run", less the tiles that pruning skips, would need the kernel to count
    those tiles; they are not reported. There is no MFU where the peak is unknown.

    Args:
        peak_flops: FLOP/s of all devices of the job together; None if unknown.
        start: the counters when this process began to train.
        window: steps that "recent" looks back, or as many as there are since the start.
    """

    name = "throughput"
    KEYS = ("token_count", "batch_count", "flop_count")

    def __init__(self, peak_flops: float | None, start: dict[str, float], window: int = 100) -> None:
        self._peak_flops, self._start = peak_flops, start
        self._steps: deque[dict[str, float]] = deque(maxlen=window + 1)
        #: Tokens per second over the last `window` steps, as reported last; None after the first step.
        self.rate: float | None = None

    def on_step(self, trainer: TrainerInterface, step: Step) -> None:
        self._steps.append(trainer.counters.as_floats())

    def on_interval(self, trainer: TrainerInterface, kind: Interval) -> None:
        if kind == "log" and (rates := self.metrics(trainer.counters.as_floats())):
            self.rate = rates[names.per_second("token_count", "total", "recent")]
            rates[names.PEAK_MEMORY] = peak_memory_bytes(trainer.fabric.device)
            trainer.report(names.THROUGHPUT, rates)

    def metrics(self, counters: dict[str, float]) -> dict[str, float]:
        """Rates to report after the step taken last; nothing after the first.

        Args:
            counters: as they are now, after waiting for the device, in place of what that step left.
        """
        self._steps[-1] = counters
        metrics = {**counters}
        if len(self._steps) < 2:
            return {}
        beginning = dict.fromkeys(counters, 0.0)
        for span, since, since_on_these_gpus in (
            ("recent", self._steps[0], self._steps[0]),
            ("cum", beginning, self._start),
        ):
            for clock in ("total", "update"):
                for key in self.KEYS:
                    metrics[names.per_second(key, clock, span)] = _rate(key, clock, since, counters)
                if self._peak_flops is not None:
                    rate = _rate("flop_count", clock, since_on_these_gpus, counters)
                    metrics[names.mfu(clock, span)] = rate / self._peak_flops
        return metrics


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory in use so far: of PyTorch's tensors on a GPU, and of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows, which trains nothing but may import this

    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _rate(key: str, clock: str, before: dict[str, float], now: dict[str, float]) -> float:
    """Gain of `key` per second of `clock` ("total" or "update") between two states of the counters."""
    return (now[key] - before[key]) / max(now[f"{clock}_time"] - before[f"{clock}_time"], 1e-9)


class Progress(Callback):
    """A live bar on a terminal (tokens done, tokens/s, time left, loss), and lines in the log; elsewhere lines in both.

    Args:
        throughput: knows the rate.
    """

    name = "progress"

    def __init__(self, throughput: Throughput) -> None:
        self._throughput = throughput
        self._bar = tqdm(disable=True)

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
        live = not self._bar.disable  # there is a terminal to draw on
        if live:
            self._bar.set_postfix(loss=f"{loss:.4f}", lr=f"{lr:.2e}")
        rate = f"{per_second:,.0f} tokens/s" if per_second else "first steps"
        left = f", {duration((total - tokens) / per_second)} left" if per_second else ""
        log.info(
            *("%s of %s tokens, loss %.4f, lr %.2e, %s%s", f"{tokens:,}", f"{total:,}", loss, lr, rate, left),
            extra={ON_THE_BAR: live},
        )

    def on_end(self, trainer: TrainerInterface) -> None:
        self._bar.close()
