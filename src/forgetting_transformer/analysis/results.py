"""What a run's folder tells a sweep: how far it came, whether it is finished or diverged, and its losses."""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from forgetting_transformer.analysis.runs import read_description, read_metrics

#: Training loss at some tokens is the mean of what was logged over the last 5 % of the tokens before.
TRAIN_WINDOW = 0.05

# Evaluations are at whole steps, and a point of equal FLOPs need not be: so near, as a part of the tokens, is there.
_SAME_PLACE = 1e-3

_NOT_FINITE = re.compile(r"infinite or NaN|not finite")


@dataclass(frozen=True)
class RunRecord:
    """One run as its files describe it; all numbers are zero or empty before the run has logged.

    Attributes:
        output_dir: the run's folder.
        train_tokens, train_loss: (n,), training tokens and loss of the batch in nats per token, as logged.
        heldout_tokens, heldout_loss: (m,), the same for held-out documents.
        flops_per_token: training FLOPs for one token, by the formula of the architecture; None if not logged.
        saved_tokens: training tokens of the last checkpoint that was written.
    """

    output_dir: Path
    train_tokens: np.ndarray
    train_loss: np.ndarray
    heldout_tokens: np.ndarray
    heldout_loss: np.ndarray
    flops_per_token: float | None
    saved_tokens: int

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config of its newest start; {} before the first."""
        file = self.output_dir / "config.yaml"
        return yaml.safe_load(file.read_text(encoding="utf-8")) or {} if file.is_file() else {}

    @cached_property
    def status(self) -> dict[str, Any]:
        """How its last start ended (training/status.py); {} before the first, and where the file is damaged."""
        try:
            found = json.loads((self.output_dir / "status.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def diverged(self) -> bool:
        """Whether its last start ended because too many updates, or the weights, were not finite."""
        return self.status.get("status") == "failed" and _NOT_FINITE.search(self.status["reason"]) is not None

    @property
    def tokens(self) -> int:
        """Training tokens at the last logged step."""
        return int(self.train_tokens[-1]) if self.train_tokens.size else 0

    def finished(self, max_tokens: int) -> bool:
        """Whether the run has done all of this budget, with its last checkpoint and evaluation."""
        return self.saved_tokens >= max_tokens and self.status.get("status") == "done"

    def train_loss_at(self, tokens: float) -> float:
        """Mean training loss logged in the last TRAIN_WINDOW of `tokens`, nats per token; NaN without a line there."""
        inside = (self.train_tokens > (1 - TRAIN_WINDOW) * tokens) & (self.train_tokens <= tokens)
        if not inside.any() and self.train_tokens.size and self.train_tokens[0] <= tokens <= self.train_tokens[-1]:
            # Logged more rarely than that: the newest line before.
            inside = self.train_tokens == self.train_tokens[self.train_tokens <= tokens][-1]
        return float(self.train_loss[inside].mean()) if inside.any() else float("nan")

    def heldout_loss_at(self, tokens: float) -> float:
        """Held-out loss after `tokens`; NaN outside of what was evaluated.

        Between two evaluations it is linear in the logarithm of the tokens. A loss falls ever more slowly, so that a
        straight line would be too high everywhere between them.
        """
        if not self.heldout_tokens.size or not self.heldout_tokens[0] <= tokens <= self.heldout_tokens[-1]:
            return float("nan")
        place = np.log([tokens, *self.heldout_tokens])
        return float(np.interp(place[0], place[1:], self.heldout_loss))

    def heldout_losses_around(self, tokens: float) -> tuple[float, float]:
        """Held-out losses of the last evaluation not after `tokens` and the first not before: equal if it was evaluated there.

        NaN outside of what was evaluated.
        """
        before = self.heldout_loss[self.heldout_tokens <= tokens * (1 + _SAME_PLACE)]
        after = self.heldout_loss[self.heldout_tokens >= tokens * (1 - _SAME_PLACE)]
        if not before.size or not after.size:
            return float("nan"), float("nan")
        near = np.abs(self.heldout_tokens - tokens) <= tokens * _SAME_PLACE
        if near.any():
            return float(self.heldout_loss[near][0]), float(self.heldout_loss[near][0])
        return float(before[-1]), float(after[0])

    def loss_at(self, tokens: float, heldout: bool) -> float:
        return self.heldout_loss_at(tokens) if heldout else self.train_loss_at(tokens)

    def final_loss(self, heldout: bool) -> float:
        """The loss at the end of what was logged: held-out, or training over the last TRAIN_WINDOW of the tokens."""
        if heldout:
            return float(self.heldout_loss[-1]) if self.heldout_loss.size else float("nan")
        return self.train_loss_at(self.tokens)


def read_run(output_dir: Path) -> RunRecord:
    """Reads a run's folder, at any time of its life; it need not exist yet.

    Raises:
        ValueError: a metrics file has a line that cannot be read (see `runs.read_metrics`).
    """
    jsonlines = output_dir / "metrics" / "jsonlines"
    train = [line for line in read_metrics(jsonlines / "train.jsonl") if "train/loss" in line]
    heldout = [line for line in read_metrics(jsonlines / "val.jsonl") if "val/loss" in line]
    saved = read_metrics(jsonlines / "checkpoint.jsonl")
    info = read_description(jsonlines / "model_info.jsonl")
    return RunRecord(
        output_dir=output_dir,
        train_tokens=np.array([line["step"] for line in train], dtype=np.int64),
        train_loss=np.array([line["train/loss"] for line in train], dtype=np.float64),
        heldout_tokens=np.array([line["step"] for line in heldout], dtype=np.int64),
        heldout_loss=np.array([line["val/loss"] for line in heldout], dtype=np.float64),
        flops_per_token=info.get("flops_per_token"),
        saved_tokens=saved[-1]["step"] if saved else 0,
    )
