"""Callbacks: the hooks that the trainer calls, and its work around them.

Importing this loads no PyTorch, so a module that registers a callback may define its class.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from forgetting_transformer.training.errors import TrainingError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from forgetting_transformer.training.checkpoint import Saved
    from forgetting_transformer.training.interface import TrainerInterface

#: Reason of a call: each name is that of a key of the config without `_interval`. "save": a checkpoint is about to be
#: made; "checkpoint_interval" is only one reason for that.
Interval = Literal["log", "train_eval", "eval", "save"]


@dataclass(frozen=True)
class Step:
    """Result of one training step. The tensors are on the device, which may still be computing them.

    Attributes:
        loss: mean loss per token of the global batch, nats.
        grad_norm: global L2 norm of the gradient before clipping.
        lr: learning rate of the update.
        loss_T: loss at each position, summed over the sequences of the global batch, float64; equal on all ranks.
        sequences_T: how many of these have each position; of packed documents, how many documents.
        left_out: 1.0 if the update was left out because of a bad loss or gradient, else 0.0.
    """

    loss: Tensor
    grad_norm: Tensor
    lr: float
    loss_T: Tensor
    sequences_T: Tensor
    left_out: Tensor


class Callback:
    """A measurement, or other work, during training. A subclass overrides the hooks that it needs.

    The trainer restores random numbers and train mode after every hook, so a hook need not.

    Attributes:
        name: its name in configs, the start block and checkpoints.
        all_ranks: whether the hooks run on every rank, which a hook with collective operations (a reduction, a forward
            pass of a sharded model, `trainer.should_stop`) needs; otherwise on rank 0 only.
        evaluates: whether it is called for "eval".
        kind: kind of the line that it reports then; a start repeats an evaluation whose line is missing.
        interval: training tokens between these calls; None: as the config's eval_interval and skip_eval say.
        summary: a line for the start block; "": none.
    """

    name: str
    all_ranks: ClassVar[bool] = False
    evaluates: ClassVar[bool] = False
    kind: str = ""
    interval: int | None = None
    summary: str = ""

    def on_start(self, trainer: TrainerInterface) -> None:
        """Called before the first step of this start: model, optimizer and data are there, a checkpoint is loaded."""

    def on_step(self, trainer: TrainerInterface, step: Step) -> None:
        """Called after every step. The device is still busy: do not wait for it (`.item()`, `.cpu()`) here."""

    def on_interval(self, trainer: TrainerInterface, kind: Interval) -> None:
        """Called when `kind` is due, by the interval of that name or after the last step.

        "log", "train_eval" and "save" are quick work; "eval", with `evaluates`, may be long. Long work runs on all
        ranks and calls `trainer.should_stop()` for every batch, equally often on every rank. Where that returns true,
        it leaves without a report, and the next start does it again.
        """

    def on_save(self, trainer: TrainerInterface, saved: Saved) -> None:
        """Called when a checkpoint is complete on the disk; training has continued meanwhile."""

    def on_end(self, trainer: TrainerInterface) -> None:
        """Called after the last step and the last checkpoint of this start; not after an error."""

    def state(self) -> dict[str, Tensor]:
        """Small tensors for the checkpoint, equal on all ranks that the callback runs on."""
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Takes `state()` back, before `on_start`; not called where the checkpoint has none of this callback."""


class Callbacks:
    """The callbacks of a run that this rank calls, in their order.

    Args:
        trainer: it calls the hooks.
        built_in: those of every run; they draw no random numbers in `on_step`.
        chosen: those that the config names; called after them.
    """

    def __init__(self, trainer: TrainerInterface, built_in: Sequence[Callback], chosen: Sequence[Callback]) -> None:
        self._trainer = trainer
        self._callbacks = [c for c in (*built_in, *chosen) if c.all_ranks or trainer.fabric.is_global_zero]
        self._on_step = [c for c in self._callbacks if _overrides(c, "on_step")]
        self._trusted = {id(c) for c in built_in}
        self._writers: dict[str, Callback] = {}
        for callback in chosen:
            if callback.evaluates and not callback.kind:
                raise TrainingError(
                    f"callbacks.{callback.name} evaluates, and has no kind: a start could not tell what was evaluated. "
                    "Set it to the kind of line that it reports then"
                )
        #: The one whose hook is running.
        self.running: Callback | None = None

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def on_step(self, step: Step) -> None:
        for callback in self._on_step:
            if id(callback) in self._trusted:
                callback.on_step(self._trainer, step)
            else:
                self.call(callback, "on_step", step)

    def call_all(self, hook: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            if _overrides(callback, hook):
                self.call(callback, hook, *arguments)

    def on_start(self) -> None:
        """Calls `on_start` of all, and checks their state, which would else be refused with the first checkpoint."""
        self.call_all("on_start")
        self.state()

    def call(self, callback: Callback, hook: str, *arguments: Any) -> None:
        """Calls one hook of one callback, and restores random numbers and train mode."""
        outer, self.running = self.running, callback
        try:
            with _left_as_found(self._modules, self._trainer.fabric.device):
                getattr(callback, hook)(self._trainer, *arguments)
        except Exception as error:
            error.add_note(f"raised by {hook} of callbacks.{callback.name}; {self._trainer.last_good_checkpoint}")
            raise
        finally:
            self.running = outer

    @functools.cached_property
    def _modules(self) -> list[nn.Module]:
        return list(self._trainer.model.modules())

    def evaluations_due(self) -> list[Callback]:
        """Callbacks whose evaluation is due after the last step; the same on every rank, but for those of rank 0."""
        trainer, config, due = self._trainer, self._trainer.config, []
        for callback in self._callbacks:
            interval = callback.interval or (None if config.skip_eval else config.eval_interval)
            if not callback.evaluates or interval is None:
                continue
            if trainer.crossed(interval) or (trainer.finished and config.final_eval):
                due.append(callback)
        return due

    def check_kind(self, kind: str) -> None:
        """Raises ValueError where another callback than the one that is running writes lines of `kind`."""
        if self.running is not None and (other := self._writers.setdefault(kind, self.running)) is not self.running:
            raise ValueError(f"a callback reports {kind!r}, which callbacks.{other.name} does too; use another name")

    def state(self) -> dict[str, Tensor]:
        """Small states for the checkpoint: `<callback>.<key>`.

        Raises:
            TrainingError: a callback's state is not a dictionary of tensors that a checkpoint can hold.
        """
        from forgetting_transformer.training.checkpoint.folder import pack

        found: dict[str, Tensor] = {}
        for callback in self._callbacks:
            state = callback.state()
            try:
                # An empty part of a tensor shows whether a checkpoint can hold it; a save then copies it once.
                pack({key: value.flatten()[:0] for key, value in state.items()})
            except Exception as error:  # of what a state may hold instead, each fails in its own way
                reason = str(error).partition("\n")[0]
                raise TrainingError(
                    f"callbacks.{callback.name}: state() gave {state!r}; it must give a dictionary of whole, dense "
                    f"tensors, as in {{'steps': torch.tensor(3)}} ({type(error).__name__}: {reason})"
                ) from error
            found |= {f"{callback.name}.{key}": value for key, value in state.items()}
        return found

    def load(self, callback_state: dict[str, Tensor]) -> None:
        """Gives every callback its part of a checkpoint's state."""
        for callback in self._callbacks:
            whose = f"{callback.name}."
            if state := {name[len(whose) :]: x for name, x in callback_state.items() if name.startswith(whose)}:
                callback.load(state)


def _overrides(callback: Callback, hook: str) -> bool:
    return getattr(type(callback), hook) is not getattr(Callback, hook)


@contextlib.contextmanager
def _left_as_found(modules: list[nn.Module], device: torch.device) -> Iterator[None]:
    """Restores random numbers, and each module's train or evaluation mode, at its end."""
    import numpy as np
    import torch

    modes = [module.training for module in modules]
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for module, training in zip(modules, modes, strict=True):
            if module.training is not training:  # to set it takes a while
                module.training = training
