"""The callback `ema`: an exponential moving average of the weights, kept beside them while they are trained.

    python train.py … callbacks=[ema] callbacks.ema.decay=0.9999
    python save_model.py --hf_load_dir=… --hf_save_dir=… --weights ema

The n-th step (n = 0, 1, …) makes the average d * average + (1 - d) * weights with d = min(decay, (1 + n) / (10 + n)),
and the first one takes the weights as they are. So early weights, which are far from the later ones, are soon forgotten
whatever the decay. The average is in float32, sharded as the weights are, and in every checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from forgetting_transformer import plugins
from forgetting_transformer.metric_names import VAL_EMA
from forgetting_transformer.training.callbacks.base import Callback, Interval, Step

if TYPE_CHECKING:
    from torch import Tensor

    from forgetting_transformer.training.callbacks.held_out import HeldOut
    from forgetting_transformer.training.interface import TrainerInterface


@dataclass
class EmaConfig:
    #: Share of the average that a step leaves; 0.999 averages over about 1000 steps.
    decay: Annotated[float, Field(ge=0, le=0.999999)] = 0.999
    #: Also evaluate the average on the held-out documents, when the weights are evaluated: val_ema.jsonl.
    evaluate: bool = True


@plugins.CALLBACKS.register("ema", config=EmaConfig, free=[plugins.ALL])
class Ema(Callback):
    all_ranks = True
    kinds = (VAL_EMA,)

    def __init__(self, config: EmaConfig) -> None:
        self.config = config
        self.evaluates = config.evaluate  # type: ignore[misc]  # of this one
        self._steps = 0
        #: The model's parameters and their averages, in one order; under FSDP both are shards.
        self._weights: dict[str, Tensor] = {}
        self._average: dict[str, Tensor] = {}
        self._held_out: HeldOut | None = None
        self.summary = f"decay {config.decay:g}"

    def on_start(self, trainer: TrainerInterface) -> None:
        from forgetting_transformer.training.callbacks.held_out import HeldOut

        if self.evaluates and not trainer.config.skip_eval:
            self._held_out = HeldOut(trainer.data, ema=True)

    def on_step(self, trainer: TrainerInterface, step: Step) -> None:
        import torch

        decay = min(self.config.decay, (1 + self._steps) / (10 + self._steps)) if self._steps else 0.0
        torch._foreach_lerp_(_local(self._average), _local(self._weights), 1 - decay)
        self._steps += 1

    def on_interval(self, trainer: TrainerInterface, kind: Interval) -> None:
        if kind == "eval" and self._steps and self._held_out is not None:
            self._swap(trainer)
            try:
                self._held_out.on_interval(trainer, kind)
            finally:
                self._swap(trainer)

    def state(self) -> dict[str, Tensor]:
        import torch

        return {"steps": torch.tensor(self._steps)}

    def load(self, state: dict[str, Tensor]) -> None:
        self._steps = int(state["steps"])

    def large_state(self, trainer: TrainerInterface) -> dict[str, Tensor]:
        if not self._average:
            # First asked for where nothing has been gathered: under FSDP these are the shards that the optimizer holds.
            self._weights = dict(trainer.model.module.named_parameters())
            self._average = {name: weight.detach().clone() for name, weight in self._weights.items()}
        return self._average

    def _swap(self, trainer: TrainerInterface) -> None:
        """Puts the average in the place of the weights and the other way round, bitwise."""
        from torch.distributed.fsdp import FSDPModule

        for module in trainer.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what a forward pass has gathered is of the weights before
        for weight, average in zip(_local(self._weights), _local(self._average), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)


def _local(tensors: dict[str, Tensor]) -> list[Any]:
    """This rank's parts."""
    from forgetting_transformer.training.faults.shards import local

    return [local(tensor).detach() for tensor in tensors.values()]
