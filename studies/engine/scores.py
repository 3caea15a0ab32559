"""Scores of a study's models: needle in a haystack, writing and choosing the next line of code, and what else was run.

The stage `downstream` of studies/study.sh leaves the evaluations in folders by kind and run; this reads them as one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.analysis.evaluations import Evaluation, of_needle, read_evaluation, read_json
from forgetting_transformer.analysis.needles import score_matrix
from forgetting_transformer.analysis.question_scores import QuestionScores, compare, read_question_scores
from forgetting_transformer.analysis.statistics import Estimate, mean
from forgetting_transformer.analysis.tables import markdown_table
from studies.engine.results import baseline_of, display_name, evaluated_runs, split_seed

#: Modes of the needle -> what tables call them.
_MODES = {"paper": "standard", "paper_easy": "easy"}
#: Scores of an answer.
_METRICS = ("words", "exact")
#: Characters of an answer that a study keeps.
_BEGINNING = 100
#: Kind of folder -> kind of score.
_TASKS = ("next_line", "lm_eval", "longbench")
#: The score of LongBench's task that studies/code_tasks.py makes.
_NEXT_LINE = "next line/similarity"


def read_downstream(folder: Path | None, study: Mapping[str, Any]) -> dict[str, Any]:
    """What a study.json has of downstream evaluations: `scores`, `needles` and `score_differences`.

    Args:
        folder: as for `read_scores`; None where nothing was evaluated.

    Raises:
        AnalysisError: a file is damaged.
    """
    runs = evaluated_runs(study)
    if folder is None or not runs:
        return {"scores": {}, "needles": {}, "score_differences": {}}
    return {
        "scores": read_scores(folder, runs),
        "needles": read_needles(folder, runs),
        "score_differences": read_differences(folder, runs, baseline_of(study, "models")),
    }


def read_scores(folder: Path, runs: Sequence[tuple[str, str]]) -> dict[str, dict[str, dict[str, float]]]:
    """The scores of every run.

    Args:
        folder: of the downstream evaluations: KIND/RUN, and needle/RUN/MODE.
        runs: folder name and model of each run (`studies.evaluated_runs`).

    Returns:
        Model -> run -> score -> value, shares in percent. Models without any are left out.

    Raises:
        AnalysisError: a file is damaged.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for run, model in runs:
        scores: dict[str, float] = {}
        for mode, title in _MODES.items():
            evaluation = read_evaluation(folder / "needle" / run / mode)
            scores |= {} if evaluation is None else _needle(evaluation, title)
        for kind in _TASKS:
            evaluation = read_evaluation(folder / kind / run)
            scores |= {} if evaluation is None else _tasks(evaluation, kind)
        if scores:
            found.setdefault(model, {})[run] = scores
    return found


def read_needles(folder: Path, runs: Sequence[tuple[str, str]]) -> dict[str, dict[str, dict[str, Any]]]:
    """What every run has found of the needle, by length of the prompt and depth of the needle.

    Args:
        folder, runs: as for `read_scores`.

    Returns:
        Model -> run -> "standard" or "easy" -> `lengths`, `depths`, `train_length`, and matrices `(depths, lengths)`:
        the share of the answer's words (`words`), and of answers word for word (`exact`), null where there is no
        prompt. With one prompt per cell also the beginnings of the `answers`.

    Raises:
        AnalysisError: a file is damaged.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for run, model in runs:
        modes = {}
        for mode, title in _MODES.items():
            place = folder / "needle" / run / mode
            evaluation = _all_answers(place) or read_evaluation(place)
            if evaluation is not None and evaluation.numbers:
                modes[title] = _by_cell(evaluation)
        if modes:
            found.setdefault(model, {})[run] = modes
    return found


def _all_answers(place: Path) -> Evaluation | None:
    """An evaluation of the needle with all answers, of which evaluation.json has the first; None where it is not."""
    if not (file := place / "scores.json").is_file():
        return None
    content = read_json(file)
    try:
        return of_needle(content, place)
    except (LookupError, TypeError, AttributeError) as error:
        raise AnalysisError(f"{file} is damaged ({error}); run the evaluation again") from error


def _by_cell(evaluation: Evaluation) -> dict[str, Any]:
    found: dict[str, Any] = {"train_length": evaluation.about.get("train_length")}
    for metric in _METRICS:
        found["lengths"], found["depths"], matrix = score_matrix(evaluation, metric)
        found[metric] = [[None if np.isnan(value) else value for value in row] for row in matrix.tolist()]
    # Texts are in the order of the prompts, and so are numbers where each cell has one prompt.
    cells = [(n.at["depth"], n.at["length"]) for n in evaluation.numbers if n.metric == _METRICS[0]]
    if len(evaluation.texts) == len(cells):
        texts = dict(zip(cells, (text["text"][:_BEGINNING] for text in evaluation.texts), strict=True))
        found["answers"] = [[texts.get((depth, length)) for length in found["lengths"]] for depth in found["depths"]]
    return found


def read_differences(
    folder: Path, runs: Sequence[tuple[str, str]], baseline: str
) -> dict[str, dict[str, dict[str, Any]]]:
    """How far models are from the baseline on the same questions, in the seeds that both have.

    Args:
        folder, runs: as for `read_scores`.

    Returns:
        Model -> score -> `value` and `half_width` (`question_scores.difference`, shares in percent; None without an
        interval), the numbers of `questions` and `seeds`. Left out are scores that one of the two lacks for single
        questions, or has for other questions.

    Raises:
        AnalysisError: a file is damaged.
    """
    scores: dict[str, dict[int, dict[str, QuestionScores]]] = {}
    for run, model in runs:
        scores.setdefault(model, {})[split_seed(run)[1]] = _question_scores(folder, run)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    theirs = scores.pop(baseline, {})
    for model, seeds in scores.items():
        for name in dict.fromkeys(name for of_seed in seeds.values() for name in of_seed):
            metric = name.rpartition("/")[2]
            both = [seed for seed in seeds if name in seeds[seed] and name in theirs.get(seed, {})]
            of, than = ([one[seed][name] for seed in both] for one in (seeds, theirs))
            if (apart := compare(of, than, metric)) is None:
                continue
            found.setdefault(model, {})[name] = {
                "value": apart.value,
                "half_width": None if np.isnan(apart.half_width) else apart.half_width,
                "questions": len(of[0].scores[metric]),
                "seeds": len(both),
            }
    return found


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


def needle_grids(study: Mapping[str, Any]) -> tuple[list[int], list[float], dict[tuple[str, str], np.ndarray]]:
    """Lengths and depths, and for each mode and model, by name, the share of the answer's words, mean of the seeds.

    Returns:
        Matrices `(depths, lengths)`, NaN where there is no prompt.
    """
    needles = study.get("needles", {})
    every = [of_mode for runs in needles.values() for modes in runs.values() for of_mode in modes.values()]
    lengths = sorted({length for one in every for length in one["lengths"]})
    depths = sorted({depth for one in every for depth in one["depths"]})
    grids = {}
    for mode in _MODES.values():
        for model, runs in needles.items():
            seeds = []
            for of_mode in (modes[mode] for modes in runs.values() if mode in modes):
                grid = np.full((len(depths), len(lengths)), np.nan)
                rows = [depths.index(depth) for depth in of_mode["depths"]]
                columns = [lengths.index(length) for length in of_mode["lengths"]]
                grid[np.ix_(rows, columns)] = np.array(of_mode["words"], dtype=np.float64)
                seeds.append(grid)
            if seeds:
                mean_of_seeds = np.ma.masked_invalid(seeds).mean(axis=0)
                grids[mode, display_name(study, model)] = np.ma.filled(mean_of_seeds, np.nan)
    return lengths, depths, grids


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


def _scale(metric: str) -> int:
    """Shares are shown in percent."""
    return 100 if metric in ("acc", "acc_norm") else 1


def needle_table(study: Mapping[str, Any]) -> str:
    """A row per model: the share of the answer's words, and of answers word for word, of both modes."""
    columns = [(mode, where) for mode in _MODES.values() for where in ("within", "beyond")]
    rows = []
    for model, seeds in study.get("scores", {}).items():
        if not any(name.startswith("needle/") for scores in seeds.values() for name in scores):
            continue
        cells = [[_cell(seeds, f"needle/{mode}/{where}/{metric}") for mode, where in columns] for metric in _METRICS]
        both = [f"{words}; {exact}" if words else "" for words, exact in zip(*cells, strict=True)]
        rows.append([display_name(study, model), *both, str(len(seeds))])
    lengths = {"within": "up to the training length", "beyond": "beyond it"}
    header = ["model", *(f"{mode}, {lengths[where]}" for mode, where in columns), "seeds"]
    return markdown_table(header, rows, "l" + "r" * (len(columns) + 1)) if rows else "Not run yet."


def downstream_table(study: Mapping[str, Any]) -> str:
    """A row per model: every score but those of the needle, mean of seeds with its interval; and how far it is from the
    baseline's on the same questions."""
    found, apart = study.get("scores", {}), study.get("score_differences", {})
    every = [name for seeds in found.values() for scores in seeds.values() for name in scores]
    names = [name for name in dict.fromkeys(every) if not name.startswith("needle/")]
    baseline = display_name(study, baseline_of(study, "models")) if apart else ""
    columns: dict[str, list[str]] = {}
    for name in names:
        title = name.replace("/", ", ").replace("_", " ")
        columns[title] = [_cell(seeds, name) for seeds in found.values()]
        if any(name in of_model for of_model in apart.values()):
            columns[f"{title}, against {baseline}"] = [
                _difference(apart.get(model, {}).get(name), sum(name in scores for scores in seeds.values()))
                for model, seeds in found.items()
            ]
    rows = [
        [display_name(study, model), *cells, str(len(found[model]))]
        for model, *cells in zip(found, *columns.values(), strict=True)
        if any(cells)
    ]
    return markdown_table(["model", *columns, "seeds"], rows, "lr" + "r" * len(columns)) if rows else "Not run yet."


def _cell(seeds: Mapping[str, Mapping[str, float]], name: str) -> str:
    values = [scores[name] for scores in seeds.values() if name in scores]
    if not values:
        return ""
    return mean(values).text(digits=1)


def _difference(found: Mapping[str, Any] | None, seeds: int) -> str:
    """A cell; `seeds` is how many the score beside it is a mean of."""
    if found is None:
        return ""
    half_width = found["half_width"]
    text = Estimate(found["value"], np.nan if half_width is None else half_width).text("+", digits=1)
    return text if found["seeds"] == seeds else f"{text} ({found['seeds']} of {seeds} seeds)"
