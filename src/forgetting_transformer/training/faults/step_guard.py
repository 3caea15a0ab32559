"""Steps that must not count: those with a loss or gradient that is not finite.

Whether a step counts is decided on the device, from numbers that all ranks share, so every rank decides alike and the
host does not wait. PyTorch's fused optimizers then leave weights, moments and their count of steps as they are. The
host learns of it when the device gets there, a step or two later. Other optimizers would apply the step, so for these
the host waits for the decision and does not call them.
"""

import collections
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from forgetting_transformer.training.errors import TrainingError

log = logging.getLogger(__name__)


class BadStep(NamedTuple):
    """An update that was left out: a line of bad_step.jsonl, with the mean loss of every sequence of the batch."""

    batch: int
    in_a_row: int
    loss: float
    global_grad_norm: float
    sequence_losses: list[float]


def decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer skips a step on the device where its `found_inf` is 1, as PyTorch's fused ones do."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


class StepGuard:
    """Judges steps, and counts those that were left out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._skipped = torch.zeros((), dtype=torch.float64, device=device)
        self._in_a_row = torch.zeros((), dtype=torch.float64, device=device)
        #: On their way to the host: batch, verdict, and the event after which it is there (None: it is there).
        self._verdicts: collections.deque[tuple[int, Tensor, torch.cuda.Event | None]] = collections.deque()
        self._reports: list[BadStep] = []
        #: Bad steps in a row, as far as the host knows.
        self.most_in_a_row = 0

    def judge(self, batch: int, loss_B: Tensor, grad_norm: Tensor) -> Tensor:
        """1.0 on the device if the update of this step must be left out, else 0.0.

        Args:
            batch: index of the global batch. loss_B: mean loss of each of its sequences, and grad_norm: global gradient
                norm before clipping; both the same on every rank.
        """
        good = torch.isfinite(grad_norm) & torch.isfinite(loss_B).all()
        bad = (~good).double()
        self._skipped += bad
        self._in_a_row = (self._in_a_row + 1) * bad
        verdict = torch.cat([torch.stack([bad, self._in_a_row, grad_norm.double()]), loss_B.double()])
        event = None
        if verdict.is_cuda:
            verdict = torch.empty_like(verdict, device="cpu", pin_memory=True).copy_(verdict, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._verdicts.append((batch, verdict, event))
        return bad.float()

    @staticmethod
    def update(optimizer: torch.optim.Optimizer, step: Callable[[], Any], bad: Tensor) -> None:
        """Makes the update, unless the step must be left out.

        Args:
            step: makes it. bad: what `judge` returned.
        """
        if decides_on_device(optimizer):
            # torch's gradient scaler uses it too: the fused kernels change nothing where this is 1.
            cast(Any, optimizer).found_inf = bad
            step()
        elif not bad.item():
            step()

    def poll(self, wait: bool = False) -> None:
        """Collects steps that were left out. The loop calls this; a callback then calls `take_reports`.

        Args:
            wait: for the device, so that the last step is known too.
        """
        while self._verdicts and (wait or (event := self._verdicts[0][2]) is None or event.query()):
            batch, verdict, event = self._verdicts.popleft()
            if event is not None:
                event.synchronize()
            bad, in_a_row, norm, *losses = verdict.tolist()
            if bad:
                self.most_in_a_row = max(self.most_in_a_row, int(in_a_row))
                self._reports.append(BadStep(batch, int(in_a_row), sum(losses) / len(losses), norm, losses))

    def take_reports(self) -> list[BadStep]:
        """Bad steps that `poll` collected since the last call."""
        found, self._reports = self._reports, []
        return found

    def sum_up(self, batches: int, folder: Path) -> None:
        """Logs how many of all updates of the run were left out, if any were. Waits for the device."""
        if left_out := int(self._skipped.item()):
            said = "%d of %d updates were left out (metrics/jsonlines/bad_step.jsonl in %s)"
            log.warning(said, left_out, batches, folder)

    def refuse(self, last_good_checkpoint: str, folder: Path) -> NoReturn:
        """
        Raises:
            TrainingError: after too many updates in a row that were left out.
        """
        raise TrainingError(
            f"{self.most_in_a_row} updates in a row were left out, because a loss or gradient was not finite; "
            f"{last_good_checkpoint}, without them. metrics/jsonlines/bad_step.jsonl in {folder} "
            "names their documents and tokens. Lower optimizer.lr (in a fork), mend the data, or raise "
            "train.max_bad_steps"
        )

    def state(self) -> dict[str, Tensor]:
        """State for the checkpoint."""
        return {"guard_skipped": self._skipped, "guard_in_a_row": self._in_a_row}

    def load(self, state: dict[str, Tensor]) -> None:
        """From a checkpoint; one that was imported from the authors' code has no such state."""
        if "guard_skipped" in state:
            self._skipped = state["guard_skipped"].to(self._device)
            self._in_a_row = state["guard_in_a_row"].to(self._device)
