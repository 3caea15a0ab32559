"""A training run as its folder describes it, at any time of the run's life. `step` is the number of training tokens.

    output_dir/config.yaml, status.json, starts.jsonl    settings, how the last start ended, a line per start
    output_dir/metrics/jsonlines/<kind>.jsonl            a JSON object per line: step, and numbers by name
    output_dir/metrics/npz/<kind>/step-%015d.npz         mean loss at each position, (seq_len,)

Kinds and names are those of metric_names.py. A kind that a run does not have is empty here, and no error: a run that
has just begun lacks most.
"""

import json
import math
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forgetting_transformer import metric_names as names
from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.analysis.tables import format_tokens
from forgetting_transformer.files import parse_json_lines, read_yaml

#: Training loss at some tokens is the mean of what was logged over the last 5 % of the tokens before.
TRAIN_WINDOW = 0.05
_NOT_FINITE = re.compile(r"infinite or NaN|not finite")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


class Series(NamedTuple):
    """Numbers that a run logged under one name, at growing numbers of training tokens."""

    tokens: np.ndarray  # (n,)
    values: np.ndarray  # (n,)

    def scaled(self, factor: float) -> "Series":
        return Series(self.tokens, factor * self.values)


@dataclass(frozen=True)
class Run:
    """One run. Everything is read from its folder once, at first use, and empty before the run has logged it.

    Attributes:
        output_dir: the run's folder, which need not exist yet.
        name: for people.
        until: training tokens after which lines are left out.
    """

    output_dir: Path
    name: str
    until: float = math.inf
    _records: dict[str, list[dict[str, Any]]] = field(default_factory=dict, repr=False, compare=False)

    # Files.

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config of its newest start; {} before the first."""
        file = self.output_dir / "config.yaml"
        return read_yaml(file) or {} if file.is_file() else {}

    def setting(self, *keys: str) -> Any:
        """A value of the config, as of ("optimizer", "lr"); None where it has no such key."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @cached_property
    def status(self) -> dict[str, Any]:
        """Contents of status.json, of its last start; {} before the first, and where the file is damaged."""
        try:
            content = json.loads((self.output_dir / "status.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    @cached_property
    def starts(self) -> list[dict[str, Any]]:
        """A record per start, the oldest first: versions, git commit, machine."""
        file = self.output_dir / "starts.jsonl"
        return list(parse_json_lines(file.read_bytes(), file)) if file.is_file() else []

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The lines of one kind of metrics.

        Raises:
            AnalysisError: a line cannot be read (see `read_metrics`).
        """
        if kind not in self._records:
            self._records[kind] = read_metrics(_jsonlines(self.output_dir) / f"{kind}.jsonl")
        return [record for record in self._records[kind] if record["step"] <= self.until]

    def last(self, kind: str) -> dict[str, Any]:
        """The newest line of one kind; {} where there is none."""
        records = self.records(kind)
        return records[-1] if records else {}

    def series(self, kind: str, name: str) -> Series:
        """The numbers under one name, from the lines of one kind that have it."""
        records = self.records(kind)
        pairs = [(record["step"], record[name]) for record in records if isinstance(record.get(name), int | float)]
        steps, values = zip(*pairs, strict=True) if pairs else ((), ())
        return Series(np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64))

    def info(self, kind: str) -> dict[str, Any]:
        """The run's description of its "model", "train_data" or "val_data", by names without their prefix."""
        lines = self.records(f"{kind}_info")
        return {name.rpartition("/")[2]: value for name, value in lines[0].items()} if lines else {}

    # Losses.

    @cached_property
    def train(self) -> Series:
        """Loss of the batch in nats per token, as logged."""
        return self.series(names.TRAIN, names.TRAIN_LOSS)

    @cached_property
    def heldout(self) -> Series:
        """Loss on held-out documents."""
        return self.series(names.VAL, names.name_of(names.VAL, names.LOSS))

    # Other logged values.

    @property
    def device(self) -> str | None:
        """Device of the newest start: the name of a GPU, or "CPU (x86_64)"; None before the first start."""
        machine = self.starts[-1].get("machine", {}) if self.starts else {}
        device = machine.get("device")
        # On a CPU, a start records the architecture only, which is a part of its platform's name too.
        return f"CPU ({device})" if device and device in machine.get("platform", "") else device

    @cached_property
    def flops_per_token(self) -> float | None:
        """Training FLOPs for one token, by the formula of the architecture; None if not logged."""
        return self.info("model").get("flops_per_token")

    def norms(self, kind: str) -> dict[str, Series]:
        """L2 norms of the parameters of each block ("layer 0", …), and of the rest by the first part of their names.

        Args:
            kind: `PARAMETER_NORM`, or `GRADIENT_NORM_OF_PARAMETER` for their gradients after clipping.
        """
        records = self.records(names.NORM)
        members: dict[str, list[str]] = {}
        for key in records[-1] if records else ():
            of, _, parameter = key.partition("/")
            if of == kind:
                layer = _LAYER.search(parameter)
                block = f"layer {layer[1]}" if layer else parameter.removeprefix("model.").split(".")[0]
                members.setdefault(block, []).append(key)
        tokens = np.asarray([record["step"] for record in records], dtype=np.int64)
        return {
            block: Series(tokens, np.asarray([math.hypot(*(r.get(key, math.nan) for key in keys)) for r in records]))
            for block, keys in members.items()
        }

    @property
    def hours(self) -> Series:
        """Hours of the training loop, with evaluations and checkpoints, over all starts, at each line of losses."""
        return self.series(names.TRAIN, names.name_of(names.TRAIN, "total_time")).scaled(1 / 3600)

    # How far it is.

    @property
    def has_loss(self) -> bool:
        """Whether it has logged a finite loss."""
        return bool(np.isfinite(self.train.values).any() or np.isfinite(self.heldout.values).any())

    @property
    def tokens(self) -> int:
        """Training tokens at the last logged step."""
        return int(self.train.tokens[-1]) if self.train.tokens.size else 0

    @property
    def diverged(self) -> bool:
        """Whether its last start ended because too many updates, or the weights, were not finite."""
        return self.status.get("status") == "failed" and _NOT_FINITE.search(self.status["reason"]) is not None

    def finished(self, max_tokens: int) -> bool:
        """Whether the run has done all of this budget, with its last checkpoint and evaluation."""
        return self.last(names.CHECKPOINT).get("step", 0) >= max_tokens and self.status.get("status") == "done"

    # Losses at some point.

    def train_loss_at(self, tokens: float) -> float:
        """Mean training loss logged in the last TRAIN_WINDOW of `tokens`, nats per token; NaN without a line there."""
        inside = (self.train.tokens > (1 - TRAIN_WINDOW) * tokens) & (self.train.tokens <= tokens)
        if not inside.any() and self.train.tokens.size and self.train.tokens[0] <= tokens <= self.train.tokens[-1]:
            # Logged more rarely than that: the newest line before.
            inside = self.train.tokens == self.train.tokens[self.train.tokens <= tokens][-1]
        return float(self.train.values[inside].mean()) if inside.any() else math.nan

    def heldout_loss_at(self, tokens: float) -> float:
        """Held-out loss after `tokens`; NaN outside of what was evaluated.

        Between two evaluations it is linear in the logarithm of the tokens. A loss falls ever more slowly, so that a
        straight line would be too high everywhere between them.
        """
        if not self.heldout.tokens.size or not self.heldout.tokens[0] <= tokens <= self.heldout.tokens[-1]:
            return math.nan
        place = np.log([tokens, *self.heldout.tokens])
        return float(np.interp(place[0], place[1:], self.heldout.values))

    def loss_at(self, tokens: float, heldout: bool) -> float:
        return self.heldout_loss_at(tokens) if heldout else self.train_loss_at(tokens)

    def final_loss(self, heldout: bool) -> float:
        """The loss at the end of what was logged: held-out, or training over the last TRAIN_WINDOW of the tokens."""
        if heldout:
            return float(self.heldout.values[-1]) if self.heldout.values.size else math.nan
        return self.train_loss_at(self.tokens)


def read_run(output_dir: Path, name: str | None = None) -> Run:
    """The run of a folder, at any time of its life, under its name or another."""
    return Run(output_dir, output_dir.name if name is None else name)


def read_position_losses(run: Run) -> dict[str, np.ndarray]:
    """A run's newest loss at every position (seq_len,), under a description: "run3, held-out, after 5.12K tokens".

    Loss on held-out documents, else on training batches. {} before any validation.

    Raises:
        AnalysisError: the newest file is not whole, or does not hold the array.
    """
    folder = run.output_dir / "metrics" / "npz"
    for kind, what in ((names.VAL, "held-out"), (names.TRAIN_EVAL, "training batches")):
        if (file := max(folder.glob(f"{kind}/step-*.npz"), default=None)) is not None:
            tokens = format_tokens(int(file.stem.removeprefix("step-")))
            return {f"{run.name}, {what}, after {tokens} tokens": _position_loss(file, kind)}
    return {}


def _position_loss(file: Path, kind: str) -> np.ndarray:
    array = names.name_of(kind, names.LOSS_PER_TOKEN)
    try:
        with np.load(file) as arrays:
            return np.asarray(arrays[array], dtype=np.float64)
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise AnalysisError(
            f"{file}: cannot read the array {array!r} ({error}). If the run is writing the file, try again; if it was "
            "killed while it did, delete the file."
        ) from error


def run_names(run_dirs: Sequence[Path]) -> list[str]:
    """A short name for each run: the last parts of its path, as many as make all names differ."""
    parts = [run_dir.resolve().parts for run_dir in run_dirs]
    for depth in range(1, max(map(len, parts)) + 1):
        found = ["/".join(path[-depth:]) for path in parts]
        if len(set(found)) == len(found):
            return found
    raise AnalysisError(f"The same run is given twice: {', '.join(map(str, run_dirs))}.")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a ``.jsonl`` file, in order of ``step``; an empty list if there is no such file.

    A last line without its newline is left out if it is not whole: the run is writing it, or was killed while it did.
    Records that a resumed run logged again replace those of the first time.

    Raises:
        AnalysisError: another line is not a JSON object with a ``step``.
    """
    if not path.is_file():
        return []
    *lines, last = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate([*lines, last], start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            step = int(record["step"])
        except (ValueError, TypeError, KeyError) as error:
            if number > len(lines):
                break
            raise AnalysisError(
                f"{path}, line {number}: expected a JSON object with a 'step', found {line[:80]!r}. "
                "Remove the line to read the rest."
            ) from error
        while records and records[-1]["step"] >= step:
            records.pop()
        records.append(record)
    return records


def _jsonlines(output_dir: Path) -> Path:
    return output_dir / "metrics" / "jsonlines"
