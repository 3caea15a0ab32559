"""The tables of scores that were published: the paper's Table 1 (lm-evaluation-harness) and Table 2 (LongBench).

Source: Lin et al., "Forgetting Transformer", ICLR 2025. Table 1 is zero-shot; "acc-n" is accuracy with log-likelihoods
divided by the length of the answer.

A table's cell has a 95 % interval where that is known: over the seeds of a model that has several, else 1.96 standard
errors over examples.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forgetting_transformer.analysis import AnalysisError, outputs, statistics
from forgetting_transformer.analysis.evaluations import LONGBENCH, Evaluation
from forgetting_transformer.analysis.statistics import Estimate
from forgetting_transformer.analysis.tables import Column, Rows, Table, has_numbers, latex, score_table
from forgetting_transformer.files import write_atomically


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


def _accuracy(name: str, title: str, dataset: str, metric: str = "acc") -> Task:
    head = f"{title} {'acc-n' if metric == 'acc_norm' else 'acc'}"
    return Task(name, dataset, {metric: Column(name, head, "higher")})


#: The eleven tasks, in the order of the table. All zero-shot.
TASKS = (
    Task(
        "wikitext", "EleutherAI/wikitext_document_level", {"word_perplexity": Column("wikitext", "Wiki. ppl", "lower")}
    ),
    Task(
        "lambada_openai",
        "EleutherAI/lambada_openai",
        {
            "perplexity": Column("lambada_openai_ppl", "LMB. ppl", "lower"),
            "acc": Column("lambada_openai", "LMB. acc", "higher"),
        },
    ),
    _accuracy("piqa", "PIQA", "baber/piqa"),
    _accuracy("hellaswag", "Hella.", "Rowan/hellaswag", "acc_norm"),
    _accuracy("winogrande", "Wino.", "allenai/winogrande"),
    _accuracy("arc_easy", "ARC-e", "allenai/ai2_arc"),
    _accuracy("arc_challenge", "ARC-c", "allenai/ai2_arc", "acc_norm"),
    _accuracy("copa", "COPA", "aps/super_glue"),
    _accuracy("openbookqa", "OBQA", "allenai/openbookqa", "acc_norm"),
    _accuracy("sciq", "SciQ", "allenai/sciq"),
    _accuracy("boolq", "BoolQ", "aps/super_glue"),
)
AVERAGE = Column("average", "Avg", "higher")
#: Models by name, each with its evaluations: one, or one per seed.
Models = Mapping[str, Sequence[Evaluation]]


def lm_eval_table(models: Models) -> tuple[dict[str, dict[str, Estimate]], list[Column]]:
    """Rows and columns of the paper's Table 1; the mean is there when all ten accuracies are.

    Perplexities are as they are, accuracies in percent. Other tasks of lm_eval follow, a column for each metric, as
    lm_eval gives them and without marks; where no model has a task of the paper, they are the table.
    """
    rows = {name: over_seeds([lm_eval_row(one) for one in several]) for name, several in models.items()}
    numbers = [number for several in models.values() for one in several for number in one.numbers]
    known = {task.name for task in TASKS}
    columns = [column for task in TASKS for column in task.columns.values()] + [AVERAGE]
    if not any(number.task in known for number in numbers):
        columns = []
    others = {(number.task, number.metric): None for number in numbers if number.task not in known}
    return rows, columns + [Column(f"{task}/{metric}", f"{task} {metric}", digits=4) for task, metric in others]


def lm_eval_row(evaluation: Evaluation) -> dict[str, Estimate]:
    """The numbers of one evaluation by the keys of their columns."""
    row: dict[str, Estimate] = {}
    for task in TASKS:
        for metric, column in task.columns.items():
            if (found := evaluation.find(task.name, metric)) is not None:
                row[column.key] = found.estimate.scaled(100 if column.better == "higher" else 1)
    accuracies = [column.key for task in TASKS for column in task.columns.values() if column.better == "higher"]
    if row.keys() >= {*accuracies}:
        row[AVERAGE.key] = Estimate(sum(row[key].value for key in accuracies) / len(accuracies))
    known = {task.name for task in TASKS}
    return row | {f"{n.task}/{n.metric}": n.estimate for n in evaluation.numbers if n.task not in known}


def longbench_table(models: Models) -> tuple[dict[str, dict[str, Estimate]], list[Column]]:
    """Rows and columns of the paper's Table 2."""
    rows = {
        name: over_seeds([{n.task: n.estimate for n in one.numbers if not n.at} for one in several])
        for name, several in models.items()
    }
    return rows, _longbench_columns(LONGBENCH)


def longbench_by_length(evaluation: Evaluation) -> tuple[dict[str, dict[str, Estimate]], list[Column]]:
    """LongBench-E: a row per range of lengths, whose scores are not compared with each other."""
    rows: dict[str, dict[str, Estimate]] = {}
    for n in evaluation.numbers:
        rows.setdefault(n.at["words"], {})[n.task] = n.estimate
    columns = _longbench_columns({n.task for n in evaluation.numbers})
    return rows, [replace(column, better=None) for column in columns]


def _longbench_columns(sets: Collection[str]) -> list[Column]:
    return [Column(name, title, "higher", group=group) for name, (title, group) in LONGBENCH.items() if name in sets]


def over_seeds(rows: Sequence[dict[str, Estimate]]) -> dict[str, Estimate]:
    """One row for the seeds of a model: the mean of what all have, with its interval."""
    if len(rows) == 1:
        return rows[0]
    common = [key for key in rows[0] if all(key in row for row in rows)]
    return {key: statistics.mean([row[key].value for row in rows]) for key in common}


def write_tables(rows: Rows, columns: Sequence[Column], folder: Path | None, differences: Table | None = None) -> None:
    """Prints the tables and, if there is a folder, writes `table.md` and `table.tex` into it.

    Args:
        differences: between models, on the same questions; for `table.md`, below the scores.

    Raises:
        AnalysisError: there is no number at all, or the folder holds a file of one of these names that is not such a
            table or was changed since.
    """
    if not has_numbers(rows, columns):
        raise AnalysisError(f"nothing to table: the results of {', '.join(rows)} hold no number")
    texts = {"table.md": f"{score_table(rows, columns).markdown()}\n", "table.tex": latex(rows, columns)}
    if differences is not None:
        texts["table.md"] += f"\n{differences.markdown()}\n"
    print("\n".join(texts.values()), end="")
    if folder is not None:
        with outputs.writing(folder, "a table of scores") as new:
            for name, text in texts.items():
                write_atomically(new / name, text, durable=False)
