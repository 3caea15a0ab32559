"""Scores question by question: differences of two models on the same questions.

lm_eval and LongBench report the mean of each model. Some questions are hard for all models, so the difference on the
same questions has a smaller error than the two means suggest.

An evaluation that asks questions leaves `question_scores.json` beside its evaluation.json:

    {task: {"scores": {metric: [the score of every question, in their order]},
            "digest": of the questions,
            "groups": [what text each question is from]}}      only where questions are known to share texts
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.analysis.evaluations import Evaluation, read_json
from forgetting_transformer.analysis.statistics import Estimate, mean, mean_over_texts
from forgetting_transformer.analysis.tables import Table
from forgetting_transformer.files import write_json

FILE = "question_scores.json"
#: Key of a question in a data set: the held-out group of texts that it was made of.
GROUP = "heldout_group"


@dataclass(frozen=True)
class QuestionScores:
    """Scores of one task.

    Attributes:
        scores: metric -> score of every question.
        digest: of the questions: only scores of the same ones are compared.
        groups: the group of texts that each question is from, if that is known.
    """

    scores: Mapping[str, Sequence[float]]
    digest: str
    groups: Sequence[int | str] | None = None


def digest_of(questions: Iterable[object]) -> str:
    """Digest of questions as JSON, in their order."""
    return hashlib.sha256(json.dumps([*questions], sort_keys=True).encode()).hexdigest()[:16]


def write_question_scores(folder: Path, scores: Mapping[str, QuestionScores]) -> None:
    """Writes question_scores.json."""
    write_json(folder / FILE, {task: asdict(of) for task, of in scores.items()}, durable=False)


def read_question_scores(folder: Path) -> dict[str, QuestionScores]:
    """Task -> scores, of the folder of an evaluation; {} if it has none.

    Raises:
        AnalysisError: the file is damaged.
    """
    if not (file := folder / FILE).is_file():
        return {}
    try:
        return {task: QuestionScores(**of) for task, of in read_json(file).items()}
    except (TypeError, AttributeError) as error:
        raise AnalysisError(f"{file} is damaged ({error}); run the evaluation again") from error


def difference(
    of: Sequence[Sequence[float]], than: Sequence[Sequence[float]], groups: Sequence[int | str] | None = None
) -> Estimate:
    """Mean score of one model less that of another, on the same questions, with a 95 % interval.

    With one seed of each, the interval is over questions: what other questions would change, for these weights
    (`statistics.mean_over_texts`). With several seeds it is over seeds too: both parts add up as variances.

    Args:
        of, than: for each seed, the score of every question; the seeds of both in the same order.
        groups: the group of texts that each question is from; None where questions count as independent.
    """
    apart_SN = np.array(of, dtype=np.float64) - np.array(than, dtype=np.float64)
    value, of_questions = mean_over_texts(apart_SN.mean(0), None if groups is None else np.array(groups))
    of_seeds = mean(apart_SN.mean(1).tolist()).half_width if len(apart_SN) > 1 else 0.0
    return Estimate(value, math.hypot(of_questions, of_seeds))


def differences_table(models: Mapping[str, Sequence[Evaluation]], baseline: str) -> Table:
    """A row for each model, task and metric with question scores of both it and the baseline: their difference.

    Args:
        models: name -> the evaluations of its seeds, in an order that all models share.
        baseline: the name of the model that the others are compared with.

    Raises:
        AnalysisError: there is no such model, an evaluation has no question_scores.json, or models were asked other
            questions or have other numbers of seeds.
    """
    if baseline not in models:
        raise AnalysisError(f"--against={baseline}: there is no such model; there are {', '.join(models)}")
    scores = {name: [_scores_of(one) for one in several] for name, several in models.items()}
    rows = []
    for name, seeds in scores.items():
        if len(seeds) != len(scores[baseline]):
            raise AnalysisError(
                f"--against={baseline}: {name} has {len(seeds)} results and {baseline} {len(scores[baseline])}; "
                "give the same number of seeds of both, in the same order"
            )
        for task in seeds[0] if name != baseline else ():
            every = [one[task] for one in (*seeds, *scores[baseline]) if task in one]
            if len(every) < 2 * len(seeds):
                continue
            if len({one.digest for one in every}) > 1:
                raise AnalysisError(
                    f"{name} and {baseline} were not asked the same questions of {task}: run both evaluations with the "
                    "same data, and without --limit or with the same one"
                )
            for metric in every[0].scores:
                values = [one.scores[metric] for one in every]
                apart = difference(values[: len(seeds)], values[len(seeds) :], every[0].groups)
                rows.append([name, task, metric, apart.text("+"), f"{len(values[0]):,}", str(len(seeds))])
    if not rows:
        raise AnalysisError(f"--against={baseline}: no other model has a task of it")
    return Table(["Model", "task", "metric", f"minus {baseline}", "questions", "seeds"], rows, "lllrrr")


def _scores_of(evaluation: Evaluation) -> dict[str, QuestionScores]:
    if found := read_question_scores(evaluation.folder):
        return found
    raise AnalysisError(
        f"{evaluation.folder} has no {FILE} with the score of every question: another program made it, or its tasks "
        "have none, as WikiText's perplexity. run_lm_eval.py and LongBench's eval.py write it"
    )
