"""Files of measurements: JSON lines and arrays. Only rank 0 has a log; the others hold none.

Files under `output_dir/metrics/`: `jsonlines/<kind>.jsonl`, one object per report with `step` in training tokens, and
`npz/<kind>/step-%015d.npz` for loss at every position. After a resume everything past the checkpoint is cut off, and
the same steps are then written again, so no step is missing or doubled. A damaged line is lost, with a warning.
"""

import contextlib
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.files import naming, replacing, write_atomically
from forgetting_transformer.metric_names import RESUME, name_of
from forgetting_transformer.training.records.run_directory import RunDirectory

log = logging.getLogger(__name__)


class MetricsLog:
    """Writes reports of one run to its files.

    Args:
        directory: the run's folder.
        resume_step: training tokens of the checkpoint the run continues from, 0 for a new run.
    """

    def __init__(self, directory: RunDirectory, resume_step: int) -> None:
        self.directory = directory
        #: Receivers of every report besides the files, with methods `log(step, values)` and `close()`, which raise
        #: nothing.
        self.sinks: list[Any] = []
        directory.jsonlines.mkdir(parents=True, exist_ok=True)
        for file in self.files():
            # An earlier continuation from this very checkpoint has left its line too.
            truncate(file, resume_step - 1 if file.stem == RESUME else resume_step)
        for file in directory.npz.glob("*/step-*.npz"):
            name = re.fullmatch(r"step-(\d{15})\.npz", file.name)
            if name and int(name[1]) > resume_step and file.is_file():
                file.unlink()

    def files(self) -> list[Path]:
        """The files of lines that the run has written so far, by name."""
        return sorted(file for file in self.directory.jsonlines.glob("*.jsonl") if file.is_file())

    def report(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Appends one object to `jsonlines/<kind>.jsonl` and hands it to the sinks. Names get the kind before them.

        Raises:
            TypeError: the values are not JSON.
        """
        values = _named(kind, values)
        line = json.dumps({"step": step, **values}) + "\n"
        path = _file(self.directory, kind)
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write(line)
        for sink in self.sinks:
            sink.log(step, values)

    def rows(self) -> list[tuple[int, dict[str, Any]]]:
        """Values of all lines, step by step, under names that no two kinds share."""
        rows: dict[int, dict[str, Any]] = {}
        for file in self.files():
            for entry in read_lines(file):
                rows.setdefault(entry["step"], {}).update({k: v for k, v in entry.items() if k != "step"})
        return sorted(rows.items())

    def has(self, kind: str, step: int) -> bool:
        """Whether `jsonlines/<kind>.jsonl` has a line of `step`."""
        file = _file(self.directory, kind)
        return file.is_file() and any(entry["step"] == step for entry in read_lines(file))

    def report_arrays(self, kind: str, step: int, arrays: dict[str, Any]) -> None:
        """Writes `npz/<kind>/step-<step>.npz`, of arrays and numbers, without texts; the step is in the file too."""
        folder = self.directory.npz / kind
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / f"step-{step:015d}.npz", durable=False) as stream:
            numbers = {name: value for name, value in _named(kind, arrays).items() if not isinstance(value, str)}
            np.savez_compressed(stream, step=step, **numbers)

    def flush(self) -> None:
        """Forces the lines to disk: called with each checkpoint, so that a resume finds every step before it."""
        for file in self.files():
            with naming(file), file.open("a") as stream:
                os.fsync(stream.fileno())

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def _file(directory: RunDirectory, kind: str) -> Path:
    return directory.jsonlines / f"{kind}.jsonl"


def _named(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """Values under names that no other kind has: wandb keeps one row per step for all kinds."""
    return {name if "/" in name else name_of(kind, name): value for name, value in values.items()}


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, without damaged lines and without a last line that a crash cut short."""
    entries = []
    for line in file.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
            entry = json.loads(line)
            if isinstance(entry["step"], int):
                entries.append(entry)
    return entries


def truncate(file: Path, step: int) -> None:
    """Drops the lines past `step`, all at once, and damaged ones."""
    entries, content = read_lines(file), file.read_bytes()
    if not entries and content.endswith(b"\n"):
        return  # somebody else's
    if (damaged := content.count(b"\n") - len(entries)) > 0:
        log.warning("%s: %d damaged lines are left out", file, damaged)
    write_atomically(file, "".join(json.dumps(entry) + "\n" for entry in entries if entry["step"] <= step))


def duration(seconds: float) -> str:
    """3725 -> "1:02:05", 125 -> "2:05", 42 -> "42 s"."""
    minutes, seconds = divmod(round(seconds), 60)
    if not minutes:
        return f"{seconds} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
