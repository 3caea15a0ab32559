"""The scores that callbacks logged while a run was trained: lm_eval, needle, gate_statistics; and the samples.

Lines say `<kind>/<task>/<metric>`, with `<metric>_stderr` beside it where a standard error is known, and what was
asked: how many examples, and a fingerprint of the texts. Where that changed during a run, another score begins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forgetting_transformer import metric_names as names
from forgetting_transformer.analysis.published import TASKS
from forgetting_transformer.analysis.runs import Run, Series, series_of

#: Names of the lines below or above which nothing is learnt: of a guess, and of the needle test without a needle.
CHANCE, NO_NEEDLE = "chance", "the answer's loss with no needle in the text"
ACCURACY = "accuracy (%)"
#: Of needles: apart from the accuracies of tasks, which it would hide.
_FOUND = "needle: answered\nword for word (%)"
_ANSWER = "needle: loss of the answer\n(nats per token)"
#: Parts of the names of lm_eval's metrics -> what the vertical axis says, and the factor to its unit.
_UNITS = {
    "acc": (ACCURACY, 100.0),
    "exact_match": ("exact match (%)", 100.0),
    "f1": ("F1 (%)", 100.0),
    "bits_per_byte": ("bits per byte", 1.0),
}
_NOTHING = Series(np.zeros(0, dtype=np.int64), np.zeros(0))


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
        test: what else the lines say of the test, by name.
    """

    task: str
    metric: str
    unit: str
    series: Series
    errors: np.ndarray
    baseline: Series = _NOTHING
    baseline_name: str = CHANCE
    test: Mapping[str, Any] = field(default_factory=dict)


def labels(scores: Sequence[Score]) -> list[str]:
    """A name for each score: its task, and the settings in which it differs from a score of the same task."""
    found = []
    for score in scores:
        same = [other.test for other in scores if other.task == score.task]
        differing = [name for name, value in score.test.items() if any(one.get(name) != value for one in same)]
        found.append(", ".join([score.task, *(f"{name} {score.test[name]}" for name in differing)]))
    return found


def read_scores(run: Run) -> list[Score]:
    """The scores that are drawn of a run: of every task of lm_eval its main metrics, of needles loss and accuracy at
    each length, of gates the shortest, median and longest memory."""
    return [*_lm_eval(run), *_needle(run), *_gates(run)]


def read_samples(run: Run) -> list[tuple[int, list[dict[str, str]]]]:
    """Training tokens, and a row of texts (`prompt`, `text`, perhaps `document`) for each prompt."""
    found = []
    for record in run.records(names.SAMPLES):
        rows: dict[str, dict[str, str]] = {}
        for key, value in record.items():
            kind, _, rest = key.partition("/")
            number, _, name = rest.partition("/")
            if kind == names.SAMPLES and name:
                rows.setdefault(number, {})[name] = str(value)
        found.append((record["step"], list(rows.values())))
    return found


def _lm_eval(run: Run) -> list[Score]:
    records = run.records(names.LM_EVAL)
    tasks: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for record in records for key in record):
        kind, _, name = key.partition("/")
        task, _, metric = name.rpartition("/")
        of_test = metric in (names.CHANCE, names.EXAMPLES) or names.STANDARD_ERROR in metric
        if kind == names.LM_EVAL and task and not of_test:
            tasks.setdefault(task, []).append(metric)
    # A group comes with all of its parts, which would be too many curves.
    wanted = [task for task in run.setting("callbacks", names.LM_EVAL, "tasks") or () if task in tasks] or list(tasks)
    published = {task.name: list(task.columns) for task in TASKS}
    found = []
    for task in wanted:
        keys = {names.EXAMPLES: names.name_of(names.LM_EVAL, task, names.EXAMPLES)}
        keys[names.MAX_LENGTH] = names.name_of(names.LM_EVAL, names.MAX_LENGTH)
        for metric in [one for one in published.get(task, ()) if one in tasks[task]] or tasks[task][:1]:
            unit = next((unit for part, unit in _UNITS.items() if part in metric), (metric.replace("_", " "), 1.0))
            for test, lines in _tests(records, names.name_of(names.LM_EVAL, task, metric), keys):
                count = test.pop(names.EXAMPLES, None)
                title = task if count is None else f"{task} ({count:,} example{'s' * (count != 1)})"
                chance = names.CHANCE if "acc" in metric else None
                found.append(_score(lines, title, names.name_of(names.LM_EVAL, task), metric, unit, test, chance))
    return found


def _needle(run: Run) -> list[Score]:
    records = run.records(names.NEEDLE)
    beginning = names.name_of(names.NEEDLE, names.LENGTH)
    lengths = {
        int(key.split("/")[1].removeprefix(names.LENGTH)) for r in records for key in r if key.startswith(beginning)
    }
    found = []
    for length in sorted(lengths):
        at = f"{beginning}{length}"
        asked = {name: names.name_of(names.NEEDLE, name) for name in (names.MODE, names.DEPTHS, names.PROMPTS)}
        for test, lines in _tests(records, names.name_of(at, names.ANSWER_LOSS), asked):
            prompts, mode = test[names.PROMPTS] * len(test[names.DEPTHS].split()), test.pop(names.MODE)
            title = f"needle, {length:,} tokens ({mode}, {prompts:,} prompt{'s' * (prompts != 1)})"
            loss = (names.ANSWER_LOSS, (_ANSWER, 1.0), test, names.LOSS_WITHOUT_NEEDLE, NO_NEEDLE)
            found.append(_score(lines, title, at, *loss))
            found.append(_score(lines, title, at, names.ACCURACY, (_FOUND, 100.0), test))
    return found


def _gates(run: Run) -> list[Score]:
    found = []
    for key in (names.SHORTEST, names.MEDIAN, names.LONGEST):
        name, series = key.partition("/")[2], run.series(names.GATES, key)
        if series.tokens.size:
            errors = np.full(series.values.size, np.nan)
            found.append(Score(f"{name} memory of a head", name, "memory length (tokens)", series, errors))
    return found


def _tests(
    records: Sequence[dict[str, Any]], metric: str, keys: Mapping[str, str]
) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The lines with `metric`, those of each test together: what they say of it by the names of `keys`, and they."""
    found: dict[tuple, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    for record in records:
        if metric in record:
            test = {name: record[key] for name, key in keys.items() if key in record}
            found.setdefault(tuple(test.items()), (test, []))[1].append(record)
    return list(found.values())


def _score(
    lines: Sequence[dict[str, Any]],
    task: str,
    at: str,
    metric: str,
    unit: tuple[str, float],
    test: Mapping[str, Any],
    baseline: str | None = None,
    baseline_name: str = CHANCE,
) -> Score:
    """A score in its unit.

    Args:
        at: the beginning of the names of the numbers, to which `metric` and `baseline` are added.
    """
    text, factor = unit
    name, comma, variant = metric.partition(",")
    series = series_of(lines, names.name_of(at, metric))
    known = dict(
        zip(*series_of(lines, names.name_of(at, f"{name}{names.STANDARD_ERROR}{comma}{variant}")), strict=True)
    )
    errors = factor * np.array([known.get(tokens, np.nan) for tokens in series.tokens], dtype=np.float64)
    level = _NOTHING if baseline is None else series_of(lines, names.name_of(at, baseline)).scaled(factor)
    return Score(task, metric, text, series.scaled(factor), errors, level, baseline_name, test)
