"""Needle in a haystack: an evaluation's scores as a grid of lengths and depths, and what a figure says of them."""

import math

import numpy as np

from forgetting_transformer.analysis.evaluations import Evaluation

#: The note of a figure of the share of words.
CHANCE = "chance is above 0: most texts have some of the words"
#: Modes, in the titles of figures.
MODES = {
    "standard": "standard mode",
    "easy": "easy mode",
    "paper": "standard mode as in the paper",
    "paper_easy": "easy mode as in the paper",
}
#: Score -> its name for people, and the ends of its scale.
SCORES = {
    "words": ("share of the answer's words", (0.0, 1.0)),
    "exact": ("answered word for word", (0.0, 1.0)),
    "judge": ("rating by {judge}", (1.0, 10.0)),
}


def score_matrix(evaluation: Evaluation, score: str) -> tuple[list[int], list[float], np.ndarray]:
    """Lengths, depths, and the mean score at each `(depths, lengths)`; NaN where there is none.

    Args:
        score: "words" or "exact" (0 to 1), or "judge" (1 to 10).
    """
    lengths = sorted({number.at["length"] for number in evaluation.numbers})
    depths = sorted({number.at["depth"] for number in evaluation.numbers})
    matrix = np.full((len(depths), len(lengths)), np.nan)
    for number in evaluation.numbers:
        if number.metric == score:
            matrix[depths.index(number.at["depth"]), lengths.index(number.at["length"])] = number.value
    return lengths, depths, matrix


def described(evaluation: Evaluation, score: str) -> list[str]:
    """How many prompts a grid shows, their mean score with its standard error, and what chance is."""
    cells = [number for number in evaluation.numbers if number.metric == score]
    samples = np.array([number.samples or 1 for number in cells])
    means = np.array([number.value for number in cells])
    most, total = int(max(samples, default=0)), int(samples.sum())
    found = [f"{most} prompt{'s' * (most != 1)} a cell"]
    if total > 1:
        mean = float(samples @ means / total)
        # Prompts differ within a cell, and cells differ.
        inside = (samples - 1) * samples @ np.array([number.standard_error or 0.0 for number in cells]) ** 2
        error = math.sqrt((inside + samples @ (means - mean) ** 2) / (total - 1) / total)
        found.append(f"mean {mean:.3f} ± {error:.3f} (standard error over {total} prompts)")
    chance = {"words": CHANCE, "exact": "chance is 0"}
    return [*found, chance[score]] if score in chance else found
