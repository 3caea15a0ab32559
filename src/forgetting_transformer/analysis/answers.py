"""Scores question by question: how far apart two models are on the same questions.

lm_eval and LongBench report the mean of each model. Some questions are hard for all models, so the difference on the
same questions has a smaller error than the two means suggest.

An evaluation that asks questions leaves `answers.json` beside its evaluation.json:

    {task: {"scores": {metric: [the score of every question, in their order]},
            "digest": of the questions,
            "groups": [what text each question is from]}}      only where questions are known to share texts
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.analysis.evaluations import Evaluation, read_json
from forgetting_transformer.analysis.statistics import Estimate, with_texts_and_seeds
from forgetting_transformer.analysis.tables import Table
from forgetting_transformer.files import write_json

FILE = "answers.json"
#: Key of a question in a data set: the held-out group of texts that it was made of (scripts/code_tasks.py).
GROUP = "heldout_group"


@dataclass(frozen=True)
class Answers:
    """To the questions of one task.

    Attributes:
        scores: metric -> score of every question.
        digest: of the questions: only answers to the same ones are compared.
        groups: the group of texts that each question is from, if that is known.
    """

    scores: Mapping[str, Sequence[float]]
    digest: str = ""
    groups: Sequence[int | str] | None = None


def digest_of(questions: Iterable[object]) -> str:
    """Of questions as JSON has them, in their order."""
    return hashlib.sha256(json.dumps([*questions], sort_keys=True).encode()).hexdigest()[:16]


def write_answers(folder: Path, answers: Mapping[str, Answers]) -> None:
    """Writes answers.json."""
    content = {
        task: {"scores": of.scores, "digest": of.digest, **({} if of.groups is None else {"groups": of.groups})}
        for task, of in answers.items()
    }
    write_json(folder / FILE, content, durable=False)


def read_answers(folder: Path) -> dict[str, Answers]:
    """Task -> answers, of the folder of an evaluation; {} if it has none, as those of earlier versions.

    Raises:
        AnalysisError: the file is damaged.
    """
    if not (file := folder / FILE).is_file():
        return {}
    content = read_json(file)
    try:
        found = {task: Answers(of["scores"], of["digest"], of.get("groups")) for task, of in content.items()}
        for answers in found.values():
            lengths = {len(scores) for scores in answers.scores.values()}
            lengths |= set() if answers.groups is None else {len(answers.groups)}
            if len(lengths) > 1:
                raise ValueError("lists of different lengths")
        return found
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise AnalysisError(f"{file} is damaged ({error}); run the evaluation again") from error


def difference(
    of: Sequence[Sequence[float]], than: Sequence[Sequence[float]], groups: Sequence[int | str] | None = None
) -> Estimate:
    """Mean score of one model less that of another, on the same questions, with a 95 % interval.

    The interval is over questions: whole groups of them are drawn, or, without groups, questions count as independent.
    With several seeds it is over seeds too.

    Args:
        of, than: for each seed, the score of every question; the seeds of both in the same order.
        groups: the group of texts that each question is from.

    Raises:
        ValueError: the lists differ in length.
    """
    apart_SN = np.array(of, dtype=np.float64) - np.array(than, dtype=np.float64)
    found, of_questions, _ = with_texts_and_seeds(apart_SN, None if groups is None else np.array(groups))
    return found if len(apart_SN) > 1 else Estimate(found.value, of_questions)


def differences_table(models: Mapping[str, Sequence[Evaluation]], baseline: str) -> Table:
    """A row for each model and metric that both it and the baseline have: the difference on the same questions.

    Args:
        models: name -> the evaluations of its seeds, in an order that all models share.
        baseline: the name of the model that the others are compared with.

    Raises:
        AnalysisError: there is no such model, evaluations have no answers.json, or models were asked other questions or
            with other numbers of seeds.
    """
    if baseline not in models:
        raise AnalysisError(f"--against={baseline}: there is no such model; there are {', '.join(models)}")
    answers = {name: [read_answers(one.folder) for one in several] for name, several in models.items()}
    for name, seeds in answers.items():
        if lacking := [one.folder for one, found in zip(models[name], seeds, strict=True) if not found]:
            raise AnalysisError(
                f"{lacking[0]} has no {FILE}, which says how each question was answered: it was made by an earlier "
                "version; run the evaluation again in a new folder"
            )
        if len(seeds) != len(answers[baseline]):
            raise AnalysisError(
                f"--against={baseline}: {name} has {len(seeds)} results and {baseline} {len(answers[baseline])}; "
                "give the same number of seeds of both, in the same order"
            )
    rows = []
    for name, seeds in answers.items():
        if name == baseline:
            continue
        for task, first in seeds[0].items():
            if not all(task in found for found in (*seeds, *answers[baseline])):
                continue
            if len({found[task].digest for found in (*seeds, *answers[baseline])}) > 1:
                raise AnalysisError(
                    f"{name} and {baseline} were not asked the same questions of {task}: run both evaluations with the "
                    "same data, and without --limit or with the same one"
                )
            shared = [m for m in first.scores if all(m in found[task].scores for found in (*seeds, *answers[baseline]))]
            for metric in shared:
                of, than = ([found[task].scores[metric] for found in one] for one in (seeds, answers[baseline]))
                apart = difference(of, than, first.groups)
                rows.append([name, task, metric, apart.text("+"), f"{len(than[0]):,}", str(len(seeds))])
    if not rows:
        raise AnalysisError(f"--against={baseline}: no other model has a task of it")
    return Table(["Model", "task", "metric", f"less {baseline}", "questions", "seeds"], rows, "lllrrr")
