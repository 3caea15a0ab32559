"""The scores that callbacks logged while a run was trained: lm_eval, needle, gate_statistics; and the samples.

Lines say `<kind>/<task>/<metric>`, with `<metric>_stderr` beside it where a standard error is known.
"""

from dataclasses import dataclass

import numpy as np

from forgetting_transformer import metric_names as names
from forgetting_transformer.analysis.published import TASKS
from forgetting_transformer.analysis.runs import Run, Series

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


@dataclass(frozen=True)
class Score:
    """One score over training.

    Attributes:
        task: for people, with how much was asked.
        metric: as the line calls it.
        unit: what the axis says; scores of one unit share a panel.
        series: training tokens and scores, in `unit`.
        errors: (n,) standard errors, NaN where none is known.
        baseline: what the score would be without any skill, in `unit`; empty where that is not known.
        baseline_name: CHANCE or NO_NEEDLE.
    """

    task: str
    metric: str
    unit: str
    series: Series
    errors: np.ndarray
    baseline: Series
    baseline_name: str = CHANCE


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
    tasks: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for record in run.records(names.LM_EVAL) for key in record):
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
        count = run.last(names.LM_EVAL).get(names.name_of(names.LM_EVAL, task, names.EXAMPLES))
        title = task if count is None else f"{task} ({count:,} example{'s' * (count != 1)})"
        for metric in [one for one in published.get(task, ()) if one in tasks[task]] or tasks[task][:1]:
            unit = next((unit for part, unit in _UNITS.items() if part in metric), (metric.replace("_", " "), 1.0))
            baseline = (names.CHANCE, CHANCE) if "acc" in metric else None
            found.append(_score(run, title, names.LM_EVAL, task, metric, unit, baseline))
    return found


def _needle(run: Run) -> list[Score]:
    last, beginning = run.last(names.NEEDLE), names.name_of(names.NEEDLE, names.LENGTH)
    lengths = {int(key.split("/")[1].removeprefix(names.LENGTH)) for key in last if key.startswith(beginning)}
    found = []
    for length in sorted(lengths):
        mode, depths, prompts = (
            last[names.name_of(names.NEEDLE, key)] for key in (names.MODE, names.DEPTHS, names.PROMPTS)
        )
        prompts *= len(depths.split())
        title = f"needle, {length:,} tokens ({mode}, {prompts:,} prompt{'s' * (prompts != 1)})"
        at, without = f"{names.LENGTH}{length}", (names.LOSS_WITHOUT_NEEDLE, NO_NEEDLE)
        found.append(_score(run, title, names.NEEDLE, at, names.ANSWER_LOSS, (_ANSWER, 1.0), without))
        found.append(_score(run, title, names.NEEDLE, at, names.ACCURACY, (_FOUND, 100.0)))
    return found


def _gates(run: Run) -> list[Score]:
    found = []
    for key in (names.SHORTEST, names.MEDIAN, names.LONGEST):
        name = key.partition("/")[2]
        score = _score(run, f"{name} memory of a head", names.GATES, "", name, ("memory length (tokens)", 1.0))
        found += [score] if score.series.tokens.size else []
    return found


def _score(
    run: Run,
    title: str,
    kind: str,
    task: str,
    metric: str,
    unit: tuple[str, float],
    baseline: tuple[str, str] | None = None,
) -> Score:
    """A score in its unit.

    Args:
        baseline: metric and name.
    """

    def series(metric: str) -> Series:
        return run.series(kind, names.name_of(kind, *filter(None, (task, metric)))).scaled(factor)

    (text, factor), (name, comma, variant) = unit, metric.partition(",")
    scores, known = series(metric), series(f"{name}{names.STANDARD_ERROR}{comma}{variant}")
    errors = dict(zip(*known, strict=True))
    level, level_name = baseline or ("", CHANCE)
    without = series(level) if level else Series(np.zeros(0, dtype=np.int64), np.zeros(0))
    aligned = np.array([errors.get(tokens, np.nan) for tokens in scores.tokens], dtype=np.float64)
    return Score(title, metric, text, scores, aligned, without, level_name)
