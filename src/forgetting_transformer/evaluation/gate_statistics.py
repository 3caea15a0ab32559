"""The callback `gate_statistics`: while a FoX model is trained, how far back each head sees and what pruning skips.

Heads of a Transformer (Pro) have no gates: their memory length is the whole context, and the log says so.

    python train.py … callbacks=[gate_statistics] callbacks.gate_statistics.interval=1000000000

Writes gates.jsonl: `gates/layer_<l>/head_<h>`, the memory length of a head in tokens (forget_gates.memory_lengths),
mean over the first held-out batch of every rank; `gates/shortest`, `gates/median` and `gates/longest` of all heads.
For a model that prunes also `gates/pruned`, the share of tiles that pruning skips, mean over heads and the same texts.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forgetting_transformer import metric_names as names
from forgetting_transformer import plugins
from forgetting_transformer.data.corpus import model_inputs
from forgetting_transformer.evaluation.forget_gates import (
    AttentionInputs,
    attention_layers,
    memory_lengths,
    pruned_share,
    watching,
)
from forgetting_transformer.evaluation.in_training import EvaluationCallback
from forgetting_transformer.training.config import Tokens
from forgetting_transformer.training.interface import TrainerInterface

log = logging.getLogger(__name__)


@dataclass
class GateStatisticsConfig:
    #: Training tokens between measurements; the last one follows config.final_eval.
    interval: Tokens


@plugins.CALLBACKS.register("gate_statistics", config=GateStatisticsConfig, free=[plugins.ALL])
class GateStatistics(EvaluationCallback):
    kinds = (names.GATES,)

    def prepare(self, trainer: TrainerInterface) -> None:
        self._layers = attention_layers(trainer.model.module)
        if all(layer.fgate_type == "none" for layer in self._layers.values()):
            log.warning("callbacks=[gate_statistics]: no head has a gate, so each memory length is the whole context")
        trainer.data.eval_info()

    @torch.no_grad()
    def evaluate(self, trainer: TrainerInterface) -> dict[str, Any]:
        fabric = trainer.fabric
        with trainer.sentinel.reading("the corpus (datamodule.name)"):
            batch = next(iter(trainer.data.eval_loader(fabric.global_rank, fabric.world_size)))
        memory: dict[int, list[Tensor]] = {layer: [] for layer in self._layers}
        pruned: dict[int, list[Tensor]] = {layer: [] for layer in self._layers}

        def measure(inputs: AttentionInputs) -> None:
            memory[inputs.layer].append(memory_lengths(inputs.log_fgate_HT)[0])
            if inputs.tolerance is not None:
                pruned[inputs.layer].append(pruned_share(inputs, inputs.tolerance))

        def means(of: dict[int, list[Tensor]]) -> Tensor:
            """`(L, H)` float64, over the sequences of all ranks."""
            mean_LH = torch.stack([torch.stack(of_layer).mean(0) for of_layer in of.values()])
            trainer.sum_over_ranks(mean_LH)
            return mean_LH / fabric.world_size

        # The whole model, in which shards of weights come together when they are needed.
        with watching(self._layers, measure):
            trainer.model(**model_inputs(fabric.to_device(batch)))
        memory_LH = means(memory)
        least, median, most = memory_LH.min().item(), memory_LH.median().item(), memory_LH.max().item()
        found = {names.SHORTEST: least, names.MEDIAN: median, names.LONGEST: most}
        for layer, row in zip(self._layers, memory_LH.tolist(), strict=True):
            found |= {names.name_of(names.GATES, f"layer_{layer}", f"head_{h}"): value for h, value in enumerate(row)}
        if all(pruned.values()):
            found[names.name_of(names.GATES, "pruned")] = means(pruned).mean().item()
        return found
