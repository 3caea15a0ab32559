"""Scores of a study's models: needle in a haystack, writing and choosing the next line of code, and what else was run.

The stage `downstream` of scripts/study.sh leaves the evaluations in folders by kind and run; this reads them as one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.analysis.evaluations import Evaluation, of_needle, read_evaluation, read_json
from forgetting_transformer.analysis.needles import score_matrix
from forgetting_transformer.analysis.statistics import mean
from forgetting_transformer.analysis.studies import display_name
from forgetting_transformer.analysis.tables import markdown_table

#: Modes of the needle -> what tables call them.
_MODES = {"paper": "standard", "paper_easy": "easy"}
#: Scores of an answer.
_METRICS = ("words", "exact")
#: Characters of an answer that a study keeps.
_BEGINNING = 100
#: Kind of folder -> kind of score.
_TASKS = ("next_line", "lm_eval", "longbench")


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
        return {"next line/similarity": evaluation.numbers[0].value} if evaluation.numbers else {}
    share = {"acc", "acc_norm"}
    return {
        f"{number.task}/{number.metric}": number.value * (100 if number.metric in share else 1)
        for number in evaluation.numbers
    }


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
    """A row per model: every score but those of the needle, mean of seeds with its interval."""
    found = study.get("scores", {})
    every = [name for seeds in found.values() for scores in seeds.values() for name in scores]
    names = [name for name in dict.fromkeys(every) if not name.startswith("needle/")]
    rows = [
        [display_name(study, model), *(_cell(seeds, name) for name in names), str(len(seeds))]
        for model, seeds in found.items()
    ]
    rows = [row for row in rows if any(row[1:-1])]
    header = ["model", *(name.replace("/", ", ").replace("_", " ") for name in names), "seeds"]
    return markdown_table(header, rows, "l" + "r" * (len(names) + 1)) if rows else "Not run yet."


def _cell(seeds: Mapping[str, Mapping[str, float]], name: str) -> str:
    values = [scores[name] for scores in seeds.values() if name in scores]
    if not values:
        return ""
    value, half_width = mean(values)
    return f"{value:.1f}" if np.isnan(half_width) else f"{value:.1f} ± {half_width:.1f}"
