"""Where measurements go: JSON lines, arrays, wandb, and the terminal. Only rank 0 has a log; the others hold none.

Files under `output_dir/metrics/`: `jsonlines/<kind>.jsonl`, one object per report with `step` in training tokens, and
`npz/<kind>/step-%015d.npz` for loss at every position. After a resume everything past the checkpoint is cut off, and
the same steps are then written again, so no step is missing or doubled. A damaged line is lost, with a warning, and the
file as it was is kept beside it as `<kind>.jsonl.damaged`.
"""

import contextlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from forgetting_transformer.files import replacing, write_atomically
from forgetting_transformer.progress import bar
from forgetting_transformer.redaction import redact_tree
from forgetting_transformer.training.config import Config
from forgetting_transformer.training.run_directory import ARRAY_KINDS, KINDS, RunDirectory

log = logging.getLogger(__name__)


class MetricsLog:
    """Writes reports of one run to its files and to wandb. Files of other names in its folders are left alone.

    Args:
        directory: the run's folder.
        config: for wandb's settings.
        resume_step: training tokens of the checkpoint the run continues from, 0 for a new run.
    """

    def __init__(self, directory: RunDirectory, config: Config, resolved: dict[str, Any], resume_step: int) -> None:
        self.directory = directory
        directory.make(directory.jsonlines)
        for file in _written(directory):
            # An earlier continuation from this very checkpoint has left its line too.
            truncate(file, resume_step - 1 if file.stem == "resume" else resume_step)
        for kind in ARRAY_KINDS:
            for file in (directory.npz / kind).glob("step-*.npz"):
                name = re.fullmatch(r"step-(\d{15})\.npz", file.name)
                if name and int(name[1]) > resume_step:
                    file.unlink()
        self._wandb = _Wandb(directory, config, resolved)

    @property
    def wandb_place(self) -> str:
        """Where wandb writes, for people."""
        return self._wandb.place

    def report(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Appends one object to `jsonlines/<kind>.jsonl` and sends it to wandb.

        Raises:
            ValueError: `kind` is not in KINDS, so no resume would cut its lines.
        """
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is not in KINDS of training/run_directory.py; add it there")
        line = json.dumps({"step": step, **values}) + "\n"
        with _file(self.directory, kind).open("a", encoding="utf-8") as file:
            file.write(line)
        self._wandb.log(step, values)

    def has(self, kind: str, step: int) -> bool:
        """Whether `jsonlines/<kind>.jsonl` has a line of `step`."""
        file = _file(self.directory, kind)
        return file.is_file() and any(entry["step"] == step for entry in read_lines(file))

    def report_once(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Reports what holds for the whole run, if an earlier start has not; names get `kind` as their prefix."""
        file = _file(self.directory, kind)
        if not file.is_file() or not read_lines(file):
            self.report(kind, step, _prefixed(kind, values))

    def report_arrays(self, kind: str, step: int, arrays: dict[str, Any]) -> None:
        """Writes `npz/<kind>/step-<step>.npz`, of arrays and numbers; the step is in the file too.

        Raises:
            ValueError: `kind` is not in ARRAY_KINDS.
        """
        if kind not in ARRAY_KINDS:
            raise ValueError(f"{kind!r} is not in ARRAY_KINDS of training/run_directory.py; add it there")
        folder = self.directory.npz / kind
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / f"step-{step:015d}.npz", durable=False) as stream:
            np.savez_compressed(stream, step=step, **arrays)

    def flush(self) -> None:
        """Forces the lines to disk: called with each checkpoint, so that a resume finds every step before it."""
        for file in _written(self.directory):
            with file.open("a") as stream:
                os.fsync(stream.fileno())

    def close(self) -> None:
        self._wandb.close()


def _file(directory: RunDirectory, kind: str) -> Path:
    return directory.jsonlines / f"{kind}.jsonl"


def _prefixed(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """Values under names that no other kind has: wandb keeps one row per step for all kinds."""
    return {name if "/" in name else f"{kind}/{name}": value for name, value in values.items()}


def _written(directory: RunDirectory) -> list[Path]:
    """The files of lines that the run has written so far, by name."""
    return [file for kind in sorted(KINDS) if (file := _file(directory, kind)).exists()]


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, without damaged lines and without a last line that a crash cut short."""
    return _parse(file)[0]


def truncate(file: Path, step: int) -> None:
    """Drops the lines past `step`, all at once. Where lines are damaged, a copy of the file as it is stays beside it."""
    entries, damaged = _parse(file)
    if damaged:
        copy, number = file.with_name(f"{file.name}.damaged"), 0
        while copy.exists():
            number += 1
            copy = file.with_name(f"{file.name}.damaged.{number}")
        shutil.copyfile(file, copy)
        lines = f"line {damaged[0]} is" if len(damaged) == 1 else f"lines {', '.join(map(str, damaged))} are"
        log.warning("%s: %s damaged and left out; the file as it was is %s", file, lines, copy.name)
    write_atomically(file, "".join(json.dumps(entry) + "\n" for entry in entries if entry["step"] <= step))


def _parse(file: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The objects of a file, and the numbers of its damaged lines, from 1."""
    entries, damaged = [], []
    *lines, last = file.read_bytes().split(b"\n")
    for number, line in enumerate([*lines, last], 1):
        try:
            entry = json.loads(line)
            if not isinstance(entry["step"], int):
                raise TypeError("step is not a number")
            entries.append(entry)
        except (ValueError, LookupError, TypeError, RecursionError):
            if number <= len(lines):  # else there is no end of line: a crash came before it was written
                damaged.append(number)
    return entries, damaged


def by_length(kind: str, mean_T: np.ndarray, shortest: int) -> dict[str, float]:
    """Mean loss over the first L positions, for L the full length, half of it, …, down to `shortest`."""
    values, length = {}, mean_T.size
    while length >= min(shortest, mean_T.size):
        loss = float(mean_T[:length].mean())
        values[f"{kind}/loss_avg_len_{length}"] = loss
        values[f"{kind}/perplexity_len_{length}"] = math.exp(min(loss, 700.0))
        length //= 2
    return values


class _Wandb:
    """wandb if it is there and willing; a run never stops for its sake.

    wandb keeps rows in memory for a while, so a killed process loses some. On every start it therefore gets the rows it
    lacks from the JSON-lines files: online those past the last step on the server, offline all of them, in a new folder
    that supersedes the older ones of the run. Either way every step is there once.
    """

    def __init__(self, directory: RunDirectory, config: Config, resolved: dict[str, Any]) -> None:
        self._run = None
        #: For people: the mode, and the folder or address it writes to.
        self.place = config.wandb.mode
        if config.wandb.mode == "disabled":
            return
        try:
            import wandb
        except ImportError:
            log.info("wandb is not installed; metrics are in %s", directory.jsonlines)
            self.place = "not installed"
            return
        try:
            run_id = _wandb_run_id(directory)
            log_dir = Path(config.wandb.log_dir or directory.root)
            log_dir.mkdir(parents=True, exist_ok=True)
            if config.wandb.mode == "offline":
                for folder in log_dir.glob(f"wandb/offline-run-*-{run_id}"):
                    folder.rename(folder.with_name(f"superseded-{folder.name}"))
            with _command_line_without_passwords():
                self._run = wandb.init(
                    project=config.wandb.project,
                    name=config.tag,
                    group=config.exp,
                    id=run_id,
                    dir=str(log_dir),
                    mode=config.wandb.mode,
                    resume="allow",
                    config=resolved,
                    settings=wandb.Settings(silent=True, init_timeout=60),
                )
        except Exception as error:  # no network, no login, a full quota: none of these may stop a run
            log.warning("wandb is not available (%s); metrics are in %s", error, directory.jsonlines)
            self.place = "not available"
            return
        address = getattr(self._run, "url", None) if config.wandb.mode == "online" else None
        self.place = f"{config.wandb.mode}, {address or log_dir / 'wandb'}"
        rows: dict[int, dict[str, Any]] = {}
        for file in _written(directory):
            for entry in read_lines(file):
                # Descriptions of earlier versions have names without a prefix.
                row = _prefixed(file.stem, {k: v for k, v in entry.items() if k != "step"})
                rows.setdefault(entry["step"], {}).update(row)
        for step in sorted(rows):
            self.log(step, rows[step])

    def log(self, step: int, values: dict[str, Any]) -> None:
        try:
            if self._run is not None and step >= self._run.step:
                self._run.log(values, step=step)
        except Exception as error:
            log.warning("wandb stopped taking metrics (%s); they are in the JSON-lines files", error)
            self._run = None

    def close(self) -> None:
        try:
            if self._run is not None:
                self._run.finish()
        except Exception as error:
            log.warning("wandb did not finish (%s); all metrics are in the JSON-lines files", error)


def _wandb_run_id(directory: RunDirectory) -> str:
    """The id of this folder's run in wandb. A copy of a folder gets a new one: the other may go on under its own."""
    file, home = directory.wandb_run_id, directory.wandb_run_id.with_name("folder.json")
    here = {"output_dir": str(directory.root), "inode": directory.root.stat().st_ino}
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        recorded = json.loads(home.read_text(encoding="utf-8"))
        # One that was moved keeps its inode, and so does one that a link leads to.
        known = any(recorded[key] == value for key, value in here.items())
    except FileNotFoundError:
        known, recorded = True, None  # of an earlier version
    except (ValueError, LookupError, TypeError):
        known, recorded = False, {}
    if not file.is_file() or not known:
        if file.is_file():
            log.info("this folder is a copy: wandb gets a run of its own for it, with all that its metrics hold")
        write_atomically(file, secrets.token_hex(4))
    if recorded != here:
        write_atomically(home, json.dumps(here))
    return file.read_text(encoding="utf-8").strip()


@contextlib.contextmanager
def _command_line_without_passwords() -> Iterator[None]:
    """wandb records the command line, and has no setting to leave it out alone."""
    arguments = sys.argv
    sys.argv = redact_tree(arguments)
    try:
        yield
    finally:
        sys.argv = arguments


#: Marks a record of the log that a live bar shows too.
ON_THE_BAR = "on_the_bar"


class Progress:
    """A live bar on a terminal (tokens done, tokens/s, time left, loss), and plain lines in the log; anywhere else plain lines in both.

    Args:
        total: tokens of the whole run.
        done: tokens trained on before this process started.
        enabled: on rank 0 only.
    """

    def __init__(self, total: int, done: int, enabled: bool) -> None:
        self._enabled = enabled
        self._bar = bar(desc="train", unit="tok", total=total, done=done, shown=enabled)

    @property
    def live(self) -> bool:
        """Whether there is a terminal to draw bars on."""
        return not self._bar.disable

    def advance(self, tokens: int) -> None:
        self._bar.update(tokens)

    def show(self, tokens: int, total: int, loss: float, lr: float, tokens_per_second: float | None) -> None:
        """Called where losses are logged anyway, so that the bar costs no synchronisation of its own."""
        if self.live:
            self._bar.set_postfix(loss=f"{loss:.4f}", lr=f"{lr:.2e}")
        if self._enabled:
            rate = f"{tokens_per_second:,.0f} tokens/s" if tokens_per_second else "first steps"
            left = f", {duration((total - tokens) / tokens_per_second)} left" if tokens_per_second else ""
            log.info(
                *("%s of %s tokens, loss %.4f, lr %.2e, %s%s", f"{tokens:,}", f"{total:,}", loss, lr, rate, left),
                extra={ON_THE_BAR: self.live},
            )

    def close(self) -> None:
        self._bar.close()


class TerminalHandler(logging.Handler):
    """Prints log records above a live progress bar instead of through it, except what the bar itself shows."""

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, ON_THE_BAR, False):
            tqdm.write(self.format(record), file=sys.stderr)


class LogFile(logging.FileHandler):
    """A run's log. Where it cannot be written, on a full disk say, the terminal says so once instead of a traceback per line."""

    _said = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            tqdm.write(
                f"{self.baseFilename} cannot be written: {error.strerror}; lines of the log are lost", file=sys.stderr
            )


def duration(seconds: float) -> str:
    """3725 -> "1:02:05", 125 -> "2:05", 42 -> "42 s"."""
    minutes, seconds = divmod(round(seconds), 60)
    if not minutes:
        return f"{seconds} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class Throughput:
    """Rates and MFU, over all of a run and over the last `window` steps, under the names the paper's runs used.

        throughput/{token,batch,flop}_count_per_second_{total,update}_{recent,cum}
        throughput/mfu_{total,update}_{recent,cum}

    "total" counts wall time of the training loop, evaluations and checkpoints included; "update" only the steps.
    "recent" is the window, "cum" the whole run with its restarts; MFU's "cum" begins at the last start, because a
    restart may have other GPUs.

    MFU is model FLOPs per second over the peak of all GPUs. Convention: model FLOPs are those of
    `DecoderConfig.flops_per_token`. Causal attention counts the pairs it needs, recomputation is not counted, and
    pruned attention counts as if full. So MFU says how fast a model trains, whatever tricks it trains with, and with
    pruning it may exceed what the hardware computes. FLOPs "as run", less the tiles that pruning skips, would need
    the kernel to count those tiles; they are not reported. There is no MFU where the peak is unknown.

    Args:
        peak_flops: FLOP/s of all devices of the job together; None if unknown.
        start: the counters when this process began to train.
        window: steps that "recent" looks back, or as many as there are since the start.
    """

    KEYS = ("token_count", "batch_count", "flop_count")

    def __init__(self, peak_flops: float | None, start: dict[str, float], window: int = 100) -> None:
        self._peak_flops, self._start = peak_flops, start
        self._steps: deque[dict[str, float]] = deque(maxlen=window + 1)

    def step(self, counters: dict[str, float]) -> None:
        """Takes the counters after a step: KEYS, total_time and update_time (seconds)."""
        self._steps.append(counters)

    def metrics(self, counters: dict[str, float]) -> dict[str, float]:
        """What to report after the step taken last; nothing after the first.

        Args:
            counters: as they are now, after waiting for the device, in place of what that step left.
        """
        self._steps[-1] = counters
        metrics = {f"throughput/{name}": value for name, value in counters.items()}
        if len(self._steps) < 2:
            return {}
        first = self._steps[0]
        beginning = dict.fromkeys(counters, 0.0)
        for clock in ("total_time", "update_time"):
            name = clock.removesuffix("_time")
            for key in self.KEYS:
                metrics[f"throughput/{key}_per_second_{name}_recent"] = _rate(key, clock, first, counters)
                metrics[f"throughput/{key}_per_second_{name}_cum"] = _rate(key, clock, beginning, counters)
            if self._peak_flops is not None:
                recent = _rate("flop_count", clock, first, counters)
                metrics[f"throughput/mfu_{name}_recent"] = recent / self._peak_flops
                since_start = _rate("flop_count", clock, self._start, counters)
                metrics[f"throughput/mfu_{name}_cum"] = since_start / self._peak_flops
        return metrics


def _rate(key: str, clock: str, before: dict[str, float], now: dict[str, float]) -> float:
    """What `key` gained per second of `clock` between two states of the counters."""
    return (now[key] - before[key]) / max(now[clock] - before[clock], 1e-9)
