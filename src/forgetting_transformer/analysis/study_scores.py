"""Scores of a study's models: needle in a haystack, writing and choosing the next line of code, and what else was run.

The stage `downstream` of scripts/study.sh leaves the evaluations in folders by kind and run; this reads them as one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.analysis.evaluations import Evaluation, read_evaluation
from forgetting_transformer.analysis.statistics import mean
from forgetting_transformer.analysis.studies import display_name
from forgetting_transformer.analysis.tables import markdown_table

#: Modes of the needle -> what tables call them.
_MODES = {"paper": "standard", "paper_easy": "easy"}
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


_METRICS = ("words", "exact")


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
