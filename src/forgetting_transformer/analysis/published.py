"""The tables of scores that were published: the paper's Table 1 (lm-evaluation-harness) and Table 2 (LongBench).

Source: Lin et al., "Forgetting Transformer", ICLR 2025. Table 1 is zero-shot; "acc-n" is accuracy with log-likelihoods
divided by the length of the answer. Levels of chance are those of a guess among the answers offered.

A table's cell has a 95 % interval where that is known: over the seeds of a model that has several, else 1.96 standard
errors over examples.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from forgetting_transformer.analysis import statistics
from forgetting_transformer.analysis.evaluations import LONGBENCH, LONGBENCH_OF_PAPER, PERCENT, Evaluation
from forgetting_transformer.analysis.statistics import Estimate
from forgetting_transformer.analysis.tables import Column


@dataclass(frozen=True)
class Task:
    """One task of the paper's Table 1.

    Attributes:
        name: in lm_eval.
        dataset: on the Hugging Face hub.
        columns: lm_eval's metric, without its filter `none` -> the column it fills.
    """

    name: str
    dataset: str
    columns: Mapping[str, Column]


def _accuracy(name: str, title: str, dataset: str, choices: int, normalised: bool = False) -> Task:
    metric = "acc_norm" if normalised else "acc"
    column = Column(name, f"{title} {'acc-n' if normalised else 'acc'}", "higher", unit=PERCENT, chance=100 / choices)
    return Task(name, dataset, {metric: column})


#: The eleven tasks, in the order of the table. All zero-shot.
TASKS = (
    Task(
        "wikitext",
        "EleutherAI/wikitext_document_level",
        {"word_perplexity": Column("wikitext", "Wiki. ppl", "lower", unit="perplexity of words")},
    ),
    Task(
        "lambada_openai",
        "EleutherAI/lambada_openai",
        {
            "perplexity": Column("lambada_openai_ppl", "LMB. ppl", "lower", unit="perplexity of the last word"),
            "acc": Column("lambada_openai", "LMB. acc", "higher", unit=PERCENT),
        },
    ),
    _accuracy("piqa", "PIQA", "baber/piqa", 2),
    _accuracy("hellaswag", "Hella.", "Rowan/hellaswag", 4, normalised=True),
    _accuracy("winogrande", "Wino.", "allenai/winogrande", 2),
    _accuracy("arc_easy", "ARC-e", "allenai/ai2_arc", 4),
    _accuracy("arc_challenge", "ARC-c", "allenai/ai2_arc", 4, normalised=True),
    _accuracy("copa", "COPA", "aps/super_glue", 2),
    _accuracy("openbookqa", "OBQA", "allenai/openbookqa", 4, normalised=True),
    _accuracy("sciq", "SciQ", "allenai/sciq", 4),
    _accuracy("boolq", "BoolQ", "aps/super_glue", 2),
)
#: What guessing gives in sets of LongBench with a list to choose from: 50 classes of questions, 30 paragraphs.
_CHANCE = {"trec": 100 / 50, "passage_retrieval_en": 100 / 30}
AVERAGE = Column("average", "Avg", "higher", unit=PERCENT)
# Which values are good, by what the names of lm_eval's metrics contain.
_BETTER: dict[str, Literal["higher", "lower"]] = {
    "perplexity": "lower",
    "per_byte": "lower",
    "acc": "higher",
    "exact_match": "higher",
    "f1": "higher",
}

#: Models by name, each with its evaluations: one, or one per seed.
Models = Mapping[str, Sequence[Evaluation]]


def lm_eval_table(models: Models) -> tuple[dict[str, dict[str, Estimate]], list[Column]]:
    """Rows and columns of the paper's Table 1; the mean is there when all ten accuracies are.

    Perplexities are as they are, accuracies in percent. Other tasks of lm_eval follow, a column for each metric, as
    lm_eval gives them; where no model has a task of the paper, they are the table.
    """
    columns = [column for task in TASKS for column in task.columns.values()] + [AVERAGE]
    tasks = {found.task for evaluations in models.values() for one in evaluations for found in one.numbers}
    if not any(task.name in tasks for task in TASKS):
        columns = []
    others = {column.key: column for several in models.values() for one in several for column in _other_columns(one)}
    rows = {name: over_seeds([lm_eval_row(one) for one in several]) for name, several in models.items()}
    return rows, [*columns, *others.values()]


def lm_eval_row(evaluation: Evaluation) -> dict[str, Estimate]:
    """The numbers of one evaluation by the keys of their columns."""
    row: dict[str, Estimate] = {}
    for task in TASKS:
        for metric, column in task.columns.items():
            if (found := evaluation.find(task.name, metric)) is not None:
                row[column.key] = found.estimate.scaled(100 if column.unit == PERCENT else 1)
    accuracies = [column.key for task in TASKS for column in task.columns.values() if column.better == "higher"]
    if row.keys() >= {*accuracies}:
        row[AVERAGE.key] = Estimate(sum(row[key].value for key in accuracies) / len(accuracies))
    known = {task.name for task in TASKS}
    return row | {f"{n.task}/{n.metric}": n.estimate for n in evaluation.numbers if n.task not in known}


def longbench_table(models: Models) -> tuple[dict[str, dict[str, Estimate]], list[Column]]:
    """Rows and columns of the paper's Table 2; sets that are not in it where a model has them."""
    rows = {
        name: over_seeds([{n.task: n.estimate for n in one.numbers if not n.at} for one in several])
        for name, several in models.items()
    }
    return rows, longbench_columns({task for row in rows.values() for task in row} | {*LONGBENCH_OF_PAPER})


def longbench_by_length(evaluation: Evaluation) -> tuple[dict[str, dict[str, Estimate]], list[Column]]:
    """LongBench-E: a row per range of lengths, whose scores are not compared with each other."""
    rows: dict[str, dict[str, Estimate]] = {}
    for n in evaluation.numbers:
        rows.setdefault(n.at["words"], {})[n.task] = n.estimate
    columns = longbench_columns({n.task for n in evaluation.numbers})
    return rows, [replace(column, better=None) for column in columns]


def longbench_columns(sets: Collection[str]) -> list[Column]:
    """The columns of these sets."""
    return [
        Column(name, title, "higher", group=group, unit=unit, chance=_CHANCE.get(name))
        for name, (title, group, unit) in LONGBENCH.items()
        if name in sets
    ]


def sample_counts(models: Models) -> list[str]:
    """How many examples scores are a mean of, for the foot of a figure; [] where that is not known."""
    numbers = [n for several in models.values() for one in several for n in one.numbers]
    counts = {n.samples for n in numbers if n.samples and not n.at}
    if len(counts) <= 1:
        return [f"{count:,} examples of each task" for count in counts]
    return [f"{min(counts):,} to {max(counts):,} examples of a task"]


def over_seeds(rows: Sequence[dict[str, Estimate]]) -> dict[str, Estimate]:
    """One row for the seeds of a model: the mean of what all have, with its interval."""
    if len(rows) == 1:
        return rows[0]
    common = [key for key in rows[0] if all(key in row for row in rows)]
    return {key: statistics.mean([row[key].value for row in rows]) for key in common}


def _other_columns(evaluation: Evaluation) -> list[Column]:
    """Columns of the tasks that are not in the paper's table."""
    known = {task.name for task in TASKS}
    return [
        Column(
            f"{n.task}/{n.metric}",
            f"{n.task} {n.metric}",
            next((better for part, better in _BETTER.items() if part in n.metric), None),
            digits=4,
            unit="accuracy (0 to 1)" if n.metric.startswith("acc") else n.metric.replace("_", " "),
        )
        for n in evaluation.numbers
        if n.task not in known
    ]
