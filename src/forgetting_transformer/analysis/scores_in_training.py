"""The scores that callbacks logged while a run was trained: lm_eval, needle, gate_statistics; and the samples.

Lines say `<kind>/<task>/<metric>`, with `<metric>_stderr` beside it where a standard error is known, and what was
asked: how many examples, and a fingerprint of the texts. Where that changed during a run, another score begins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from forgetting_transformer.analysis.published import TASKS
from forgetting_transformer.analysis.runs import Run, Series

#: What a guess reaches, and what the needle test gives without a needle: lines below or above which nothing is learnt.
CHANCE, NO_NEEDLE = "chance", "the answer's loss with no needle in the text"
ACCURACY = "accuracy (%)"
#: What a test calls the fingerprint of all that it asks.
_TEXTS = "texts"
#: What lines of lm_eval say of a task besides its metrics.
_OF_TASK = ("chance", "examples", _TEXTS)
#: Of needles: apart from the accuracies of tasks, which it would hide.
_FOUND = "needle: answered\nword for word (%)"
#: Parts of the names of metrics -> what the vertical axis says, and the factor to its unit. The first that fits.
_UNITS = (
    ("acc", ACCURACY, 100.0),
    ("exact_match", "exact match (%)", 100.0),
    ("f1", "F1 (%)", 100.0),
    ("perplexity", "perplexity", 1.0),
    ("bits_per_byte", "bits per byte", 1.0),
    ("loss", "needle: loss of the answer\n(nats per token)", 1.0),
)


@dataclass(frozen=True)
class Score:
    """One score over training.

    Attributes:
        task: for people, with what matters most of the test; `labels` tells apart what it leaves equal.
        metric: as the line calls it.
        unit: what the axis says; scores of one unit share a panel.
        series: training tokens and scores, in `unit`.
        errors: (n,) standard errors, NaN where none is known.
        baseline: what the score would be without any skill, in `unit`; empty where that is not known.
        baseline_name: CHANCE or NO_NEEDLE.
        test: what else the lines say of the test, by name; {} in lines of earlier versions.
    """

    task: str
    metric: str
    unit: str
    series: Series
    errors: np.ndarray
    baseline: Series
    baseline_name: str = CHANCE
    test: Mapping[str, Any] = field(default_factory=dict)


def labels(scores: Sequence[Score]) -> list[str]:
    """A name for each score: its task, and the settings in which it differs from a score of the same task."""
    tests: dict[str, list[Mapping[str, Any]]] = {}
    for score in scores:
        tests.setdefault(score.task, []).append(score.test)
    found = []
    for score in scores:
        same = tests[score.task]
        differing = [name for name, value in score.test.items() if any(one.get(name) != value for one in same)]
        # A fingerprint says little to people, so it stands only where nothing else does.
        said = [name for name in differing if name != _TEXTS] or differing
        found.append(", ".join([score.task, *(f"{name} {score.test[name]}" for name in said)]))
    return found


def read_scores(run: Run) -> list[Score]:
    """What is drawn of a run's scores: of every task of lm_eval its main metrics, of needles loss and accuracy at each
    length, of gates the shortest, median and longest memory."""
    return [*_lm_eval(run), *_needle(run), *_gates(run)]


def read_samples(run: Run) -> list[tuple[int, list[dict[str, str]]]]:
    """Training tokens, and a row of texts (`prompt`, `text`, perhaps `document`) for each prompt."""
    found = []
    for record in run.records("samples"):
        rows: dict[str, dict[str, str]] = {}
        for key, value in record.items():
            if key.startswith("samples/") and key.count("/") == 2:
                _, number, name = key.split("/")
                rows.setdefault(number, {})[name] = str(value)
        found.append((record["step"], list(rows.values())))
    return found


def _lm_eval(run: Run) -> list[Score]:
    records = run.records("lm_eval")
    tasks: dict[str, list[str]] = {}
    for record in records:
        for key in record:
            kind, _, name = key.partition("/")
            task, _, metric = name.rpartition("/")
            if kind == "lm_eval" and task and "_stderr" not in metric and metric not in _OF_TASK:
                tasks.setdefault(task, [])
                tasks[task] += [metric] * (metric not in tasks[task])
    # A group comes with all of its parts, which would be too many curves.
    section = (run.config.get("callbacks") or {}).get("lm_eval") or {}
    wanted = [task for task in section.get("tasks", ()) if task in tasks] or list(tasks)
    published = {task.name: list(task.columns) for task in TASKS}
    found = []
    for task in wanted:
        main = [metric for metric in published.get(task, ()) if metric in tasks[task]] or tasks[task][:1]
        keys = {name: f"lm_eval/{task}/{name}" for name in ("examples", _TEXTS)} | {"max_length": "lm_eval/max_length"}
        for metric in main:
            name, comma, variant = metric.partition(",")
            error = f"lm_eval/{task}/{name}_stderr{comma}{variant}"
            for test, part in _tests(records, f"lm_eval/{task}/{metric}", keys):
                count = test.pop("examples", None)
                title = task if count is None else f"{task} ({count:,} example{'s' * (count != 1)})"
                chance = _series(part, f"lm_eval/{task}/chance") if "acc" in metric else None
                score = _score(part, title, metric, f"lm_eval/{task}/{metric}", error, chance)
                found.append(replace(score, test=test))
    return found


def _needle(run: Run) -> list[Score]:
    records = run.records("needle")
    lengths = {key.split("/")[1] for record in records for key in record if key.startswith("needle/length_")}
    found = []
    for length in sorted(lengths, key=lambda name: int(name.removeprefix("length_"))):
        at = f"needle/{length}"
        keys = {name: f"needle/{name}" for name in ("mode", "depths", "samples")} | {_TEXTS: f"{at}/{_TEXTS}"}
        for test, part in _tests(records, f"{at}/loss", keys):
            task, mode = f"needle, {int(length.removeprefix('length_')):,} tokens", test.pop("mode", None)
            if mode is not None:
                prompts = test["samples"] * len(test["depths"].split())
                task += f" ({mode}, {prompts:,} prompt{'s' * (prompts != 1)})"
            without = _series(part, f"{at}/loss_without")
            loss = _score(part, task, "loss", f"{at}/loss", f"{at}/loss_stderr", without, NO_NEEDLE)
            accuracy = _score(part, task, "accuracy", f"{at}/accuracy", f"{at}/accuracy_stderr")
            found += [replace(loss, test=test), replace(accuracy, unit=_FOUND, test=test)]
    return found


def _tests(
    records: Sequence[dict[str, Any]], metric: str, keys: Mapping[str, str]
) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The lines with `metric`, those of each test together: what they say of it by the names of `keys`, and they.

    A line of an earlier version says nothing, and is taken to be of the test that comes next.
    """
    found: dict[tuple, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    unknown: list[dict[str, Any]] = []
    for record in records:
        if metric not in record:
            continue
        test = {name: record[key] for name, key in keys.items() if key in record}
        if test:
            _, lines = found.setdefault(tuple(test.items()), (test, []))
            lines += [*unknown, record]
            unknown = []
        else:
            unknown.append(record)
    if unknown:
        found.setdefault((), ({}, []))[1].extend(unknown)
    return list(found.values())


def _gates(run: Run) -> list[Score]:
    records, unit = run.records("gates"), "memory length (tokens)"
    names = [name for name in ("shortest", "median", "longest") if any(f"gates/{name}" in r for r in records)]
    found = []
    for name in names:
        series = _series(records, f"gates/{name}")
        empty = Series(np.zeros(0, dtype=np.int64), np.zeros(0))
        found.append(Score(f"{name} memory of a head", name, unit, series, np.full(series.values.size, np.nan), empty))
    return found


def _score(
    records: list[dict[str, Any]],
    task: str,
    metric: str,
    key: str,
    error: str,
    baseline: Series | None = None,
    baseline_name: str = CHANCE,
) -> Score:
    name, factor = next(
        ((text, factor) for part, text, factor in _UNITS if part in metric), (metric.replace("_", " "), 1.0)
    )
    series = _series(records, key)
    known = dict(zip(*_series(records, error), strict=True))
    errors = np.array([known.get(tokens, np.nan) for tokens in series.tokens], dtype=np.float64)
    baseline = baseline if baseline is not None else _series([], "")
    return Score(
        task,
        metric,
        name,
        series._replace(values=factor * series.values),
        factor * errors,
        baseline._replace(values=factor * baseline.values),
        baseline_name,
    )


def _series(records: list[dict[str, Any]], key: str) -> Series:
    pairs = [(record["step"], record[key]) for record in records if isinstance(record.get(key), int | float)]
    steps, values = zip(*pairs, strict=True) if pairs else ((), ())
    return Series(np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64))
