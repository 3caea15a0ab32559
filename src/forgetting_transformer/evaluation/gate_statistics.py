"""The callback `gate_statistics`: how far back each head of a FoX model sees, while it is trained.

Heads of a Transformer (Pro) have no gates: their memory length is the whole context, and the log says so.

    python train.py … callbacks=[gate_statistics] callbacks.gate_statistics.interval=1000000000

Writes gates.jsonl: `gates/layer_<l>/head_<h>`, the memory length of a head in tokens (forget_gates.memory_lengths),
mean over the first held-out batch of every rank; and `gates/shortest`, `gates/median` and `gates/longest` of all heads.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forgetting_transformer import plugins
from forgetting_transformer.ranges import TOKENS, within
from forgetting_transformer.training.callbacks import Callback, Interval
from forgetting_transformer.training.config import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from forgetting_transformer.training.interface import TrainerInterface


log = logging.getLogger(__name__)


@dataclass
class GateStatisticsConfig:
    #: Training tokens between measurements; the last one follows config.final_eval.
    interval: int = within(TOKENS)


@plugins.CALLBACKS.register("gate_statistics", config=GateStatisticsConfig, free=[plugins.ALL])
class GateStatistics(Callback):
    all_ranks = True
    evaluates = True
    kinds = ("gates",)

    def __init__(self, config: GateStatisticsConfig) -> None:
        self.interval = config.interval

    def on_start(self, trainer: TrainerInterface) -> None:
        """
        Raises:
            ConfigError: the model has no layer of forgetting attention. DataError: there are no held-out documents.
        """
        from forgetting_transformer.evaluation.forget_gates import attention_layers
        from forgetting_transformer.evaluation.models import EvaluationError

        try:
            self._layers = attention_layers(trainer.model.module)
        except EvaluationError as error:
            raise ConfigError(f"callbacks=[gate_statistics]: {error}") from error
        if all(layer.fgate_type == "none" for layer in self._layers.values()):
            log.warning("callbacks=[gate_statistics]: no head has a gate, so each memory length is the whole context")
        trainer.data.eval_info()

    def on_interval(self, trainer: TrainerInterface, kind: Interval) -> None:
        if kind != "eval":
            return
        import torch

        fabric = trainer.fabric
        batch = fabric.to_device(next(iter(trainer.data.eval_loader(fabric.global_rank, fabric.world_size))))
        with torch.no_grad():
            memory_LH = self._memory(trainer, batch)
        trainer.sum_over_ranks(memory_LH)
        memory_LH /= fabric.world_size
        rows = zip(self._layers, memory_LH.tolist(), strict=True)
        heads = {f"gates/layer_{layer}/head_{h}": value for layer, row in rows for h, value in enumerate(row)}
        least, median, most = memory_LH.min().item(), memory_LH.median().item(), memory_LH.max().item()
        trainer.report("gates", {"gates/shortest": least, "gates/median": median, "gates/longest": most, **heads})

    def _memory(self, trainer: TrainerInterface, batch: dict[str, Tensor]) -> Tensor:
        """Memory length of every head, `(L, H)` float64, mean over the sequences of this rank's batch."""
        import torch

        from forgetting_transformer.data.corpus import model_inputs
        from forgetting_transformer.evaluation.forget_gates import memory_lengths

        found: list[Tensor] = []

        def measure(mixer: Any, inputs: tuple[Any, ...], _output: Any) -> None:
            log_fgate_BTH = mixer.log_forget_gate(inputs[0])
            lengths_BH = [memory_lengths(log_fgate_TH.T)[0] for log_fgate_TH in log_fgate_BTH]
            found.append(torch.stack(lengths_BH).mean(0))

        handles = [mixer.register_forward_hook(measure) for mixer in self._layers.values()]
        trainer.model.eval()
        try:
            # The whole model, in which shards of weights come together when they are needed.
            with trainer.uncompiled():
                trainer.model(**model_inputs(batch))
        finally:
            for handle in handles:
                handle.remove()
        return torch.stack(found)
