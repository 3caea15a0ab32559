"""Reads what a training run wrote: its logged losses and its loss at every position.

Files of a run that are read here (``step`` is the number of training tokens):

    output_dir/metrics/jsonlines/train.jsonl             one JSON object per line: step, train/loss, ...
    output_dir/metrics/jsonlines/val.jsonl               step, val/loss, ...
    output_dir/metrics/npz/val/step-%015d.npz            val/loss_per_token: (seq_len,), mean loss at each position
    output_dir/metrics/npz/train_eval/step-%015d.npz     train_eval/loss_per_token: the same over training batches
"""

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class LossHistory:
    """The losses a run logged, in nats per token, at growing numbers of training tokens."""

    name: str
    train_tokens: np.ndarray  # (n,)
    train_loss: np.ndarray  # (n,)
    heldout_tokens: np.ndarray  # (m,), m = 0 before the first validation
    heldout_loss: np.ndarray  # (m,)


@dataclass(frozen=True)
class PositionLoss:
    """Mean loss at every position of a sequence: ``loss[i]`` is that of predicting token i from those before it."""

    name: str
    loss: np.ndarray  # (seq_len,), nats per token
    train_tokens: int  # how long the run had been trained
    source: Literal["val", "train_eval"]  # held-out documents, or the latest training batches


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a ``.jsonl`` file, in order of ``step``; an empty list if there is no such file.

    A last line without its newline is left out if it is not whole: the run is writing it, or was killed while it did.
    Records that a resumed run logged again replace those of the first time.

    Raises:
        ValueError: another line is not a JSON object with a ``step``.
    """
    if not path.exists():
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
            raise ValueError(
                f"{path}, line {number}: expected a JSON object with a 'step', found {line[:80]!r}. "
                "Remove the line to read the rest."
            ) from error
        while records and records[-1]["step"] >= step:
            records.pop()
        records.append(record)
    return records


def read_loss_history(run_dir: Path, name: str) -> LossHistory:
    """Reads ``train/loss`` and ``val/loss`` of a run.

    Raises:
        FileNotFoundError: ``run_dir`` is not a run's folder, or no loss has been logged yet.
        ValueError: a metrics file has a line that cannot be read (see :func:`read_metrics`).
    """
    jsonlines = _metrics_dir(run_dir) / "jsonlines"
    train = _column(jsonlines / "train.jsonl", "train/loss")
    heldout = _column(jsonlines / "val.jsonl", "val/loss")
    if train[0].size == 0 and heldout[0].size == 0:
        raise FileNotFoundError(
            f"{jsonlines}: no 'train/loss' in train.jsonl and no 'val/loss' in val.jsonl yet. "
            "They appear when the run has logged for the first time."
        )
    return LossHistory(name, *train, *heldout)


def read_position_loss(run_dir: Path, name: str) -> PositionLoss:
    """Reads a run's newest loss at every position: on held-out documents, else on its training batches.

    Raises:
        FileNotFoundError: ``run_dir`` is not a run's folder, or no such file has been written yet.
        ValueError: the newest file is not whole, or does not hold the array.
    """
    npz = _metrics_dir(run_dir) / "npz"
    for source in ("val", "train_eval"):
        files = sorted((npz / source).glob("step-*.npz"))
        if files:
            try:
                with np.load(files[-1]) as arrays:
                    loss = np.asarray(arrays[f"{source}/loss_per_token"], dtype=np.float64)
            except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
                raise ValueError(
                    f"{files[-1]}: cannot read the array '{source}/loss_per_token' ({error}). If the run is writing "
                    "the file, try again; if it was killed while it did, delete the file."
                ) from error
            return PositionLoss(name, loss, int(files[-1].stem.removeprefix("step-")), source)
    raise FileNotFoundError(
        f"{npz}: no val/step-*.npz and no train_eval/step-*.npz yet. They appear after the run's first validation."
    )


def run_names(run_dirs: Sequence[Path]) -> list[str]:
    """A short name for each run: the last parts of its path, as many as it takes to tell all of them apart."""
    parts = [run_dir.resolve().parts for run_dir in run_dirs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-depth:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"The same run is given twice: {', '.join(map(str, run_dirs))}.")


def _metrics_dir(run_dir: Path) -> Path:
    metrics = run_dir / "metrics"
    if not metrics.is_dir():
        raise FileNotFoundError(
            f"{run_dir} has no folder 'metrics': give a run's output_dir (and wait until the run has logged once)."
        )
    return metrics


def _column(path: Path, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the records that have ``key``."""
    pairs = [(record["step"], record[key]) for record in read_metrics(path) if key in record]
    steps, values = zip(*pairs, strict=True) if pairs else ((), ())
    return np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64)


def read_unigram_entropy(run_dir: Path) -> float | None:
    """Entropy of the training corpus's token frequencies in nats, if the corpus stated it when the run started."""
    file = Path(run_dir) / "metrics" / "jsonlines" / "train_data_info.jsonl"
    return read_description(file).get("unigram_entropy_nats")


def read_description(file: Path) -> dict[str, Any]:
    """What a run says of itself in `<kind>_info.jsonl`, by names without their prefix; {} if there is nothing yet.

    Raises:
        ValueError: a line cannot be read (see `read_metrics`).
    """
    entries = read_metrics(file)
    # Earlier versions wrote no prefix.
    return {name.rpartition("/")[2]: value for name, value in entries[0].items()} if entries else {}
