"""The scores that callbacks logged while a run was trained: lm_eval, needle, gate_statistics.

Lines have keys `<kind>/<task>/<metric>`, with `<metric>_stderr` beside it where a standard error is known.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from forgetting_transformer import metric_names as names
from forgetting_transformer.analysis.published import LM_EVAL
from forgetting_transformer.analysis.runs import Run, Series


class Score(NamedTuple):
    """One score over training.

    Attributes:
        errors: (n,) standard errors, NaN where none is known.
        baseline: what the score would be without any skill: a guess, or the needle test without a needle. Empty where
            that is not known.
    """

    series: Series
    errors: np.ndarray
    baseline: Series


def read_scores(run: Run) -> dict[str, Score]:
    """The scores that are drawn of a run by their names, as in "arc_easy acc": of every task of lm_eval its main
    metrics, of needles loss and accuracy at each length, of gates the shortest, median and longest memory."""
    found = {}
    for kind, task, metric, baseline in (*_lm_eval(run), *_needle(run), *_gates()):
        name = f"{task} {metric}" if kind == names.LM_EVAL else f"{kind} {task} {metric}"
        if (score := _score(run, kind, task, metric, baseline)).series.tokens.size:
            found[" ".join(name.replace("_", " ").split())] = score
    return found


def _lm_eval(run: Run) -> Iterator[tuple[str, str, str, str]]:
    tasks: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for record in run.records(names.LM_EVAL) for key in record):
        task, _, metric = key.partition("/")[2].rpartition("/")
        if task and metric not in (names.CHANCE, names.EXAMPLES) and names.STANDARD_ERROR not in metric:
            tasks.setdefault(task, []).append(metric)
    # A group comes with all of its parts, which would be too many curves.
    wanted = [task for task in run.setting("callbacks", names.LM_EVAL, "tasks") or () if task in tasks] or list(tasks)
    for task in wanted:
        for metric in [one for one in tasks[task] if f"{task}/{one}" in LM_EVAL] or tasks[task][:1]:
            yield names.LM_EVAL, task, metric, names.CHANCE if "acc" in metric else ""


def _needle(run: Run) -> Iterator[tuple[str, str, str, str]]:
    places = {key.split("/")[1] for key in run.last(names.NEEDLE) if f"/{names.LENGTH}" in key}
    for place in sorted(places, key=lambda place: int(place.removeprefix(names.LENGTH))):
        yield names.NEEDLE, place, names.ANSWER_LOSS, names.LOSS_WITHOUT_NEEDLE
        yield names.NEEDLE, place, names.ACCURACY, ""


def _gates() -> Iterator[tuple[str, str, str, str]]:
    for key in (names.SHORTEST, names.MEDIAN, names.LONGEST):
        yield names.GATES, "", key.partition("/")[2], ""


def _score(run: Run, kind: str, task: str, metric: str, baseline: str) -> Score:
    def series(of: str) -> Series:
        return run.series(kind, names.name_of(kind, *filter(None, (task, of))))

    name, comma, variant = metric.partition(",")
    scores, errors = series(metric), dict(zip(*series(f"{name}{names.STANDARD_ERROR}{comma}{variant}"), strict=True))
    aligned = np.array([errors.get(tokens, np.nan) for tokens in scores.tokens], dtype=np.float64)
    return Score(scores, aligned, series(baseline))
