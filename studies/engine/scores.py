"""Scores of a study's models: needle in a haystack, and choosing the next line of code.

The stage `downstream` leaves the evaluations in lm_eval/RUN and needle/RUN/MODE; this reads them as one.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.analysis.evaluations import Evaluation, read_evaluation
from forgetting_transformer.analysis.statistics import mean
from studies.engine.results import Study

#: Modes of the needle -> what pages call them.
_MODES = {"paper": "standard", "paper_easy": "easy"}


def read_downstream(folder: Path, study: Study) -> dict[str, Any]:
    """Downstream evaluations as a study.json has them.

    Returns:
        `scores`: model -> run -> score -> value, shares in percent.

    Raises:
        AnalysisError: a file is damaged.
    """
    scores: dict[str, dict[str, dict[str, float]]] = {}
    for run, model in study.evaluated_runs():
        found: dict[str, float] = {}
        for mode, title in _MODES.items():
            evaluation = read_evaluation(folder / "needle" / run / mode)
            found |= {} if evaluation is None else _needle(evaluation, title)
        if (evaluation := read_evaluation(folder / "lm_eval" / run)) is not None:
            found |= {
                f"{n.task}/{n.metric}": n.value * (100 if n.metric in ("acc", "acc_norm") else 1)
                for n in evaluation.numbers
            }
        if found:
            scores.setdefault(model, {})[run] = found
    return {"scores": scores}


def _needle(evaluation: Evaluation, mode: str) -> dict[str, float]:
    """Mean over the cells up to the training length and over those beyond it, in percent."""
    length = evaluation.about.get("train_length") or np.inf
    cells: dict[str, list[float]] = {}
    for number in evaluation.numbers:
        where = "within" if number.at["length"] <= length else "beyond"
        cells.setdefault(f"needle/{mode}/{where}/{number.metric}", []).append(number.value)
    return {name: 100 * float(np.mean(values)) for name, values in cells.items()}


def score_texts(study: Study) -> dict[str, str]:
    """MODEL_SCORE -> mean of the seeds with its interval, such as fox_pro_needle_easy_within_words."""
    found = {}
    for model, runs in study["scores"].items():
        for name in {name for scores in runs.values() for name in scores}:
            values = [scores[name] for scores in runs.values() if name in scores]
            found[re.sub(r"\W", "_", f"{model}_{name}")] = mean(values).text(digits=1)
    return found
