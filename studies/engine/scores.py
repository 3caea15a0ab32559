"""Scores of a study's models: needle in a haystack, and writing and choosing the next line of code.

The stage `downstream` leaves the evaluations in KIND/RUN and needle/RUN/MODE; this reads them as one.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.analysis.evaluations import Evaluation, read_evaluation
from forgetting_transformer.analysis.needles import score_matrix
from forgetting_transformer.analysis.question_scores import QuestionScores, compare, read_question_scores
from forgetting_transformer.analysis.statistics import Estimate, mean
from forgetting_transformer.analysis.tables import markdown_table
from studies.engine.results import Study, split_seed

#: Modes of the needle -> what tables call them.
_MODES = {"paper": "standard", "paper_easy": "easy"}
#: Scores of an answer.
_METRICS = ("words", "exact")
#: Kinds of tasks.
_TASKS = ("next_line", "lm_eval")
#: The score of LongBench's task that studies/code_tasks.py makes.
_NEXT_LINE = "next line/similarity"


def read_downstream(folder: Path, study: Study) -> dict[str, Any]:
    """Downstream evaluations as a study.json has them.

    Returns:
        `scores`: model -> run -> score -> value, shares in percent.
        `needles`: model -> run -> "standard" or "easy" -> `lengths`, `depths`, `train_length` and matrices `(depths,
        lengths)` of the share of the answer's words (`words`) and of answers word for word (`exact`).
        `score_differences`: model -> score -> how far it is from the baseline on the same questions, in the seeds that
        both have: `value` and `half_width` (None without an interval), numbers of `questions` and `seeds`.

    Raises:
        AnalysisError: a file is damaged.
    """
    scores: dict[str, dict[str, dict[str, float]]] = {}
    needles: dict[str, dict[str, dict[str, Any]]] = {}
    questions: dict[str, dict[int, dict[str, QuestionScores]]] = {}
    for run, model in study.evaluated_runs():
        found: dict[str, float] = {}
        modes: dict[str, dict[str, Any]] = {}
        for mode, title in _MODES.items():
            evaluation = read_evaluation(folder / "needle" / run / mode)
            if evaluation is not None and evaluation.numbers:
                modes[title] = _by_cell(evaluation)
                found |= _needle(evaluation, title)
        for kind in _TASKS:
            evaluation = read_evaluation(folder / kind / run)
            found |= {} if evaluation is None else _tasks(evaluation, kind)
        if found:
            scores.setdefault(model, {})[run] = found
        if modes:
            needles.setdefault(model, {})[run] = modes
        questions.setdefault(model, {})[split_seed(run)[1]] = _question_scores(folder, run)
    theirs = questions.pop(study.baseline("models")) if questions else {}
    apart = {model: differences for model, own in questions.items() if (differences := _differences(own, theirs))}
    return {"scores": scores, "needles": needles, "score_differences": apart}


def _by_cell(evaluation: Evaluation) -> dict[str, Any]:
    found: dict[str, Any] = {"train_length": evaluation.about.get("train_length")}
    for metric in _METRICS:
        found["lengths"], found["depths"], matrix = score_matrix(evaluation, metric)
        found[metric] = [[None if np.isnan(value) else value for value in row] for row in matrix.tolist()]
    return found


def _needle(evaluation: Evaluation, mode: str) -> dict[str, float]:
    """Mean over the cells up to the training length and over those beyond it, in percent."""
    length = evaluation.about.get("train_length") or np.inf
    cells: dict[str, list[float]] = {}
    for number in evaluation.numbers:
        where = "within" if number.at["length"] <= length else "beyond"
        cells.setdefault(f"needle/{mode}/{where}/{number.metric}", []).append(number.value)
    return {name: 100 * float(np.mean(values)) for name, values in cells.items()}


def _tasks(evaluation: Evaluation, kind: str) -> dict[str, float]:
    if kind == "next_line":
        return {_NEXT_LINE: evaluation.numbers[0].value} if evaluation.numbers else {}
    return {f"{n.task}/{n.metric}": n.value * _scale(n.metric) for n in evaluation.numbers}


def _question_scores(folder: Path, run: str) -> dict[str, QuestionScores]:
    """Of a run: score, as `_tasks` names it -> of every question, as `_tasks` scales it."""
    found = {}
    for kind in _TASKS:
        for task, of_task in read_question_scores(folder / kind / run).items():
            for metric, scores in of_task.scores.items():
                name = _NEXT_LINE if kind == "next_line" else f"{task}/{metric}"
                scaled = [score * _scale(metric) for score in scores]
                found[name] = replace(of_task, scores={name.rpartition("/")[2]: scaled})
    return found


def _differences(
    own: Mapping[int, Mapping[str, QuestionScores]], theirs: Mapping[int, Mapping[str, QuestionScores]]
) -> dict[str, dict[str, Any]]:
    found = {}
    for name in dict.fromkeys(name for of_seed in own.values() for name in of_seed):
        metric = name.rpartition("/")[2]
        both = [seed for seed in own if name in own[seed] and name in theirs.get(seed, {})]
        of, than = ([one[seed][name] for seed in both] for one in (own, theirs))
        if (apart := compare(of, than, metric)) is not None:
            half_width = None if np.isnan(apart.half_width) else apart.half_width
            count = len(of[0].scores[metric])
            found[name] = {"value": apart.value, "half_width": half_width, "questions": count, "seeds": len(both)}
    return found


def _scale(metric: str) -> int:
    """Shares are shown in percent."""
    return 100 if metric in ("acc", "acc_norm") else 1


def needle_grids(study: Study) -> tuple[list[int], list[float], dict[tuple[str, str], np.ndarray]]:
    """Lengths and depths, and for each mode and model, by name, the share of the answer's words, mean of the seeds.

    Returns:
        Matrices `(depths, lengths)`, NaN where there is no prompt.
    """
    every = [of_mode for runs in study["needles"].values() for modes in runs.values() for of_mode in modes.values()]
    lengths = sorted({length for one in every for length in one["lengths"]})
    depths = sorted({depth for one in every for depth in one["depths"]})
    grids = {}
    for mode in _MODES.values():
        for model, runs in study["needles"].items():
            seeds = []
            for of_mode in (modes[mode] for modes in runs.values() if mode in modes):
                grid = np.full((len(depths), len(lengths)), np.nan)
                rows = [depths.index(depth) for depth in of_mode["depths"]]
                columns = [lengths.index(length) for length in of_mode["lengths"]]
                grid[np.ix_(rows, columns)] = np.array(of_mode["words"], dtype=np.float64)
                seeds.append(grid)
            if seeds:
                mean_of_seeds = np.ma.masked_invalid(seeds).mean(axis=0)
                grids[mode, study.name(model)] = np.ma.filled(mean_of_seeds, np.nan)
    return lengths, depths, grids


def needle_table(study: Study) -> str:
    """A row per model: the share of the answer's words, and of answers word for word, of both modes."""
    columns = [(mode, where) for mode in _MODES.values() for where in ("within", "beyond")]
    rows = []
    for model, seeds in study["scores"].items():
        if not any(name.startswith("needle/") for scores in seeds.values() for name in scores):
            continue
        cells = [[_cell(seeds, f"needle/{mode}/{where}/{metric}") for mode, where in columns] for metric in _METRICS]
        both = [f"{words}; {exact}" if words else "" for words, exact in zip(*cells, strict=True)]
        rows.append([study.name(model), *both, str(len(seeds))])
    lengths = {"within": "up to the training length", "beyond": "beyond it"}
    header = ["model", *(f"{mode}, {lengths[where]}" for mode, where in columns), "seeds"]
    return markdown_table(header, rows, "l" + "r" * (len(columns) + 1)) if rows else "Not run yet."


def downstream_table(study: Study) -> str:
    """A row per model: every score but those of the needle, mean of seeds with its interval; and how far it is from the
    baseline's on the same questions."""
    found, apart = study["scores"], study["score_differences"]
    every = [name for seeds in found.values() for scores in seeds.values() for name in scores]
    columns: dict[str, list[str]] = {}
    for name in [name for name in dict.fromkeys(every) if not name.startswith("needle/")]:
        title = name.replace("/", ", ").replace("_", " ")
        columns[title] = [_cell(seeds, name) for seeds in found.values()]
        if any(name in of_model for of_model in apart.values()):
            columns[f"{title}, against {study.name(study.baseline('models'))}"] = [
                _difference(apart.get(model, {}).get(name), sum(name in scores for scores in seeds.values()))
                for model, seeds in found.items()
            ]
    rows = [
        [study.name(model), *cells, str(len(found[model]))]
        for model, *cells in zip(found, *columns.values(), strict=True)
        if any(cells)
    ]
    return markdown_table(["model", *columns, "seeds"], rows, "lr" + "r" * len(columns)) if rows else "Not run yet."


def _cell(seeds: Mapping[str, Mapping[str, float]], name: str) -> str:
    values = [scores[name] for scores in seeds.values() if name in scores]
    return mean(values).text(digits=1) if values else ""


def _difference(found: Mapping[str, Any] | None, seeds: int) -> str:
    """A cell; `seeds` is how many the score beside it is a mean of."""
    if found is None:
        return ""
    half_width = found["half_width"]
    text = Estimate(found["value"], np.nan if half_width is None else half_width).text("+", digits=1)
    return text if found["seeds"] == seeds else f"{text} ({found['seeds']} of {seeds} seeds)"
