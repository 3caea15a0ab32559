"""The tables of scores that were published: the paper's Table 1 (lm-evaluation-harness) and Table 2 (LongBench).

Source: Lin et al., "Forgetting Transformer", ICLR 2025. Table 1 is zero-shot; "acc-n" is accuracy with log-likelihoods
divided by the length of the answer.

A table's cell has a 95 % interval where that is known: over the seeds of a model that has several, else 1.96 standard
errors over examples.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from forgetting_transformer.analysis import AnalysisError, outputs, statistics
from forgetting_transformer.analysis.evaluations import LONGBENCH, Evaluation
from forgetting_transformer.analysis.statistics import Estimate
from forgetting_transformer.analysis.tables import Column, Rows, has_numbers, latex, score_table
from forgetting_transformer.files import write_atomically

#: The columns of Table 1, in its order: "task/metric" as lm_eval calls them -> head. All are zero-shot.
LM_EVAL = {
    "wikitext/word_perplexity": "Wiki. ppl",
    "lambada_openai/perplexity": "LMB. ppl",
    "lambada_openai/acc": "LMB. acc",
    "piqa/acc": "PIQA acc",
    "hellaswag/acc_norm": "Hella. acc-n",
    "winogrande/acc": "Wino. acc",
    "arc_easy/acc": "ARC-e acc",
    "arc_challenge/acc_norm": "ARC-c acc-n",
    "copa/acc": "COPA acc",
    "openbookqa/acc_norm": "OBQA acc-n",
    "sciq/acc": "SciQ acc",
    "boolq/acc": "BoolQ acc",
}
_ACCURACIES = [key for key in LM_EVAL if "perplexity" not in key]
#: The eleven tasks of the table.
TASKS = list(dict.fromkeys(key.partition("/")[0] for key in LM_EVAL))
#: Models by name, each with its evaluations: one, or one per seed.
Models = Mapping[str, Sequence[Evaluation]]


def lm_eval_table(models: Models) -> tuple[dict[str, dict[str, Estimate]], list[Column]]:
    """Rows and columns of the paper's Table 1; the mean is there when all ten accuracies are.

    Perplexities are as they are, accuracies in percent. Other tasks of lm_eval follow, a column for each metric, as
    lm_eval gives them and without marks; where no model has a task of the paper, they are the table.
    """
    rows = {name: over_seeds([lm_eval_row(one) for one in several]) for name, several in models.items()}
    numbers = [number for several in models.values() for one in several for number in one.numbers]
    columns = [Column(key, head, "higher" if key in _ACCURACIES else "lower") for key, head in LM_EVAL.items()]
    columns.append(Column("average", "Avg", "higher"))
    if not any(number.task in TASKS for number in numbers):
        columns = []
    others = {(number.task, number.metric): None for number in numbers if number.task not in TASKS}
    return rows, columns + [Column(f"{task}/{metric}", f"{task} {metric}", digits=4) for task, metric in others]


def lm_eval_row(evaluation: Evaluation) -> dict[str, Estimate]:
    """The numbers of one evaluation by the keys of their columns."""
    row = {f"{number.task}/{number.metric}": number.estimate for number in evaluation.numbers}
    row |= {key: row[key].scaled(100) for key in _ACCURACIES if key in row}
    if row.keys() >= {*_ACCURACIES}:
        row["average"] = Estimate(sum(row[key].value for key in _ACCURACIES) / len(_ACCURACIES))
    return row


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


def write_tables(rows: Rows, columns: Sequence[Column], folder: Path | None) -> None:
    """Prints the tables and, if there is a folder, writes `table.md` and `table.tex` into it.

    Raises:
        AnalysisError: there is no number at all, or the folder holds a file of one of these names that is not such a
            table or was changed since.
    """
    if not has_numbers(rows, columns):
        raise AnalysisError(f"nothing to table: the results of {', '.join(rows)} hold no number")
    texts = {"table.md": f"{score_table(rows, columns).markdown()}\n", "table.tex": latex(rows, columns)}
    print("\n".join(texts.values()), end="")
    if folder is not None:
        with outputs.writing(folder, "a table of scores") as new:
            for name, text in texts.items():
                write_atomically(new / name, text, durable=False)
