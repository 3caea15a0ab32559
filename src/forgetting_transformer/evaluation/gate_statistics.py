"""The callback `gate_statistics`: while a FoX model is trained, how far back each head sees and what pruning skips.

Heads of a Transformer (Pro) have no gates: their memory length is the whole context, and the log says so.

    python train.py … callbacks=[gate_statistics] callbacks.gate_statistics.interval=1000000000

Writes gates.jsonl: `gates/layer_<l>/head_<h>`, the memory length of a head in tokens (forget_gates.memory_lengths),
mean over the first held-out batch of every rank; `gates/shortest`, `gates/median` and `gates/longest` of all heads.
For a model that prunes also `gates/pruned`, the share of tiles that pruning skips, mean over heads and the same texts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forgetting_transformer import metric_names as names
from forgetting_transformer import plugins
from forgetting_transformer.ranges import TOKENS, within
from forgetting_transformer.training.callbacks import Callback, Interval
from forgetting_transformer.training.config import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from forgetting_transformer.evaluation.forget_gates import AttentionInputs
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
    kinds = (names.GATES,)

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
        with trainer.sentinel.reading("the corpus (datamodule.name)"):
            batch = next(iter(trainer.data.eval_loader(fabric.global_rank, fabric.world_size)))
        batch = fabric.to_device(batch)
        with torch.no_grad():
            memory_LH, pruned_LH = self._measure(trainer, batch)
        trainer.sum_over_ranks(memory_LH)
        memory_LH /= fabric.world_size
        rows = zip(self._layers, memory_LH.tolist(), strict=True)
        heads = {
            names.name_of(names.GATES, f"layer_{layer}", f"head_{h}"): value
            for layer, row in rows
            for h, value in enumerate(row)
        }
        least, median, most = memory_LH.min().item(), memory_LH.median().item(), memory_LH.max().item()
        found = {names.SHORTEST: least, names.MEDIAN: median, names.LONGEST: most, **heads}
        if pruned_LH is not None:
            trainer.sum_over_ranks(pruned_LH)
            found[names.name_of(names.GATES, "pruned")] = pruned_LH.mean().item() / fabric.world_size
        trainer.report(names.GATES, found)

    def _measure(self, trainer: TrainerInterface, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Of every head, `(L, H)` float64, mean over the sequences of this rank's batch: its memory length, and the
        share of tiles that pruning skips, None for a model without pruning.
        """
        import torch

        from forgetting_transformer.data.corpus import model_inputs
        from forgetting_transformer.evaluation.forget_gates import memory_lengths, pruned_share, watching

        memory: dict[int, list[Tensor]] = {layer: [] for layer in self._layers}
        pruned: dict[int, list[Tensor]] = {layer: [] for layer in self._layers}

        def measure(inputs: AttentionInputs) -> None:
            memory[inputs.layer].append(memory_lengths(inputs.log_fgate_HT)[0])
            if inputs.tolerance is not None:
                pruned[inputs.layer].append(pruned_share(inputs, inputs.tolerance))

        def means(of: dict[int, list[Tensor]]) -> Tensor:
            return torch.stack([torch.stack(of_layer).mean(0) for of_layer in of.values()])

        trainer.model.eval()
        # The whole model, in which shards of weights come together when they are needed.
        with watching(self._layers, measure), trainer.uncompiled():
            trainer.model(**model_inputs(batch))
        return means(memory), means(pruned) if all(pruned.values()) else None
