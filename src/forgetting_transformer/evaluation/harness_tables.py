"""The eleven tasks of the paper's Table 1 in lm-evaluation-harness, and the table. Needs no lm_eval.

Source: Lin et al., "Forgetting Transformer", ICLR 2025, Table 1: zero-shot; "acc-n" is accuracy with log-likelihoods
    divided by
the length of the answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forgetting_transformer.analysis.tables import Column


@dataclass(frozen=True)
class Task:
    """One task of the paper's Table 1.

    Attributes:
        name: in lm_eval.
        dataset: on the Hugging Face hub.
        columns: lm_eval's metric -> the column it fills.
    """

    name: str
    dataset: str
    columns: Mapping[str, Column]


_PERCENT = "accuracy (%)"


def _accuracy(name: str, title: str, dataset: str, choices: int, normalised: bool = False) -> Task:
    metric = "acc_norm" if normalised else "acc"
    title = f"{title} {'acc-n' if normalised else 'acc'}"
    column = Column(name, title, "higher", unit=_PERCENT, chance=100 / choices)
    return Task(name, dataset, {f"{metric},none": column})


#: The eleven tasks, in the order of the table. All zero-shot.
TASKS = (
    Task(
        "wikitext",
        "EleutherAI/wikitext_document_level",
        {"word_perplexity,none": Column("wikitext", "Wiki. ppl", "lower", unit="perplexity of words")},
    ),
    Task(
        "lambada_openai",
        "EleutherAI/lambada_openai",
        {
            "perplexity,none": Column("lambada_openai_ppl", "LMB. ppl", "lower", unit="perplexity of the last word"),
            "acc,none": Column("lambada_openai", "LMB. acc", "higher", unit=_PERCENT),
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
AVERAGE = Column("average", "Avg", "higher", unit=_PERCENT)
# Which values are good, by what the names of lm_eval's metrics contain.
_BETTER: dict[str, Literal["higher", "lower"]] = {
    "perplexity": "lower",
    "per_byte": "lower",
    "acc": "higher",
    "exact_match": "higher",
    "f1": "higher",
}


def table_row(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The numbers of one model's row, with their standard errors: perplexities as they are, accuracies in percent.

    Metrics of tasks that are not in the paper's table are as lm_eval gives them.
    """
    row: dict[str, float] = {}
    for task in TASKS:
        for metric, column in task.columns.items():
            metrics = results.get(task.name, {})
            scale = 100 if column.better == "higher" else 1
            for key, value in ((column.key, metrics.get(metric)), (column.error_key, _error(metrics, metric))):
                if value is not None:
                    row[key] = scale * value
    accuracies = [column.key for task in TASKS for column in task.columns.values() if column.better == "higher"]
    if all(key in row for key in accuracies):
        row[AVERAGE.key] = sum(row[key] for key in accuracies) / len(accuracies)
    for column, value, error in _other_metrics(results):
        row |= {column.key: value} if error is None else {column.key: value, column.error_key: error}
    return row


def _error(metrics: Mapping[str, Any], metric: str) -> float | None:
    """lm_eval's standard error of a metric such as "acc,none"; None where it gives none."""
    error = metrics.get(metric.replace(",", "_stderr,", 1))
    return error if isinstance(error, float) else None


def table(
    results: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> tuple[dict[str, dict[str, float]], list[Column]]:
    """Rows and columns of the paper's Table 1 for models by name; the mean is there when all ten accuracies are.

    Other tasks of lm_eval follow, a column for each metric; where no model has a task of the paper, they are the table.
    """
    rows = {name: table_row(tasks) for name, tasks in results.items()}
    columns = [column for task in TASKS for column in task.columns.values()] + [AVERAGE]
    if not any(task.name in tasks for task in TASKS for tasks in results.values()):
        columns = []
    others = {column.key: column for tasks in results.values() for column, *_ in _other_metrics(tasks)}
    return rows, [*columns, *others.values()]


def _other_metrics(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[Column, float, float | None]]:
    """Metrics of the tasks that are not in the paper's table, each with its standard error."""
    known = {task.name for task in TASKS}
    found = []
    for task, metrics in results.items():
        for metric, value in metrics.items():
            if task not in known and isinstance(value, float) and "_stderr" not in metric:
                name = metric.removesuffix(",none")
                better = next((better for part, better in _BETTER.items() if part in name), None)
                unit = "accuracy (0 to 1)" if name.startswith("acc") else name.replace("_", " ")
                column = Column(f"{task}/{metric}", f"{task} {name}", better, digits=4, unit=unit)
                found.append((column, value, _error(metrics, metric)))
    return found
