"""CUDA graphs of training (`train.cuda_graphs`): a block's kernels are recorded once and then launched by one call.

That helps a model whose kernels take less time than the host needs to start them one by one. Only micro-batches of
training are recorded. Evaluations and callbacks run the model as without graphs, and so overwrite nothing.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from forgetting_transformer.ops import compiling
from forgetting_transformer.training.config import Config, ConfigError
from forgetting_transformer.training.execution.hardware import peak_of

log = logging.getLogger(__name__)

#: Micro-batches until everything is replayed: one warms up, one records.
_REPLAYED = 3
#: With `auto`, graphs are recorded where a GPU at its peak rate would be done with a micro-batch in one block so soon.
#: Measured on H200s (docs/performance.md): up to 3.2 ms graphs are worth a lot. At 4.6 one GPU takes as long as its
#: host, which has more to do with DDP. From 5.6 on graphs are worth nothing, with DDP neither.
_AT_PEAK_SECONDS = 0.005


def flops_in_a_block(config: Config, world_size: int, flops_per_token: float, blocks: int) -> float:
    """FLOPs of a micro-batch, forward and backward, in each of `blocks` blocks that share those of a token."""
    sequences = config.sequences_at_once(world_size // config.strategy.context)
    return flops_per_token * sequences * config.datamodule.train_batch_len / blocks


def check_possible(config: Config, device: torch.device, world_size: int, compiled: bool) -> bool:
    """Whether blocks can be recorded.

    Raises:
        ConfigError: they cannot, and `train.cuda_graphs=true`.
    """
    needs = {
        "a CUDA GPU": device.type == "cuda",
        "compiled blocks (train.compile=true; a run that began uncompiled continues so)": compiled,
        "train.gradient_checkpointing=false": not config.train.gradient_checkpointing,
        "one process, or strategy=ddp and strategy.context=1": world_size == 1
        or (config.strategy.name in ("auto", "ddp") and config.strategy.context == 1),
    }
    lacks = [need for need, is_met in needs.items() if not is_met]
    if lacks and config.train.cuda_graphs is True:
        raise ConfigError(f"train.cuda_graphs=true needs {', and '.join(lacks)}; leave train.cuda_graphs=auto")
    return not lacks


def choose(config: Config, device: torch.device, world_size: int, compiled: bool, flops: float) -> bool:
    """Resolves `train.cuda_graphs`. Every bit is the same with graphs and without, so starts and ranks may differ.

    Args:
        flops: of a micro-batch in one block, forward and backward.

    Raises:
        ConfigError: as `check_possible`.
    """
    wanted = config.train.cuda_graphs
    if not check_possible(config, device, world_size, compiled) or wanted != "auto":
        return wanted is True
    peak = peak_of(config.fabric, device)
    return peak is not None and flops / peak <= _AT_PEAK_SECONDS


class Graphs:
    """
    Args:
        wanted: `train.cuda_graphs`, or what `auto` comes to.
        parameters: of the model.
        reduced: whether DDP adds up the gradients of all ranks in the backward pass of a step's last micro-batch.
    """

    def __init__(self, wanted: bool, parameters: Iterable[nn.Parameter], reduced: bool = False) -> None:
        self.on, self._reduced = wanted, reduced
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._micro_batches = 0

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Context of the forward and backward pass of a micro-batch; without graphs it does nothing.

        Args:
            last: of its step: its gradients are used up before the next one begins.
        """
        if not self.on:
            yield
            return
        # Each micro-batch makes its gradients in the graphs' memory, where the next one writes its own. DDP must find
        # the sum of all of them when the last one is ready: there autograd adds that one to the copy of those before,
        # as without graphs. Its gradients are then gone sooner than those of the others, so it has graphs of its own.
        taken = not (last and self._reduced)
        before = [parameter.grad for parameter in self._parameters]
        if taken:
            for parameter in self._parameters:
                parameter.grad = None
        with compiling.recording():
            yield
        if taken:
            self._add(before, last)
        self._micro_batches += 1
        if self._micro_batches == _REPLAYED:
            _warn_of_skipped()

    @torch.no_grad()
    def _add(self, before: list[Tensor | None], last: bool) -> None:
        """Adds new gradients to those before, outside of the graphs' memory, as autograd would have done."""
        copies, copied, sums, added = [], [], [], []
        for parameter, old in zip(self._parameters, before, strict=True):
            new = parameter.grad
            if new is None:
                parameter.grad = old
            elif old is not None:
                sums.append(old)
                added.append(new)
                parameter.grad = old
            elif not last:
                parameter.grad = torch.empty_like(new)
                copies.append(parameter.grad)
                copied.append(new)
        if sums:
            torch._foreach_add_(sums, added)
        if copies:
            torch._foreach_copy_(copies, copied)


def _warn_of_skipped() -> None:
    from torch._dynamo.utils import counters

    if skipped := counters["inductor"]["cudagraph_skips"]:
        log.warning(
            "CUDA graphs: %d parts of the model cannot be recorded and run without graphs "
            "(TORCH_LOGS=perf_hints says why)",
            skipped,
        )
