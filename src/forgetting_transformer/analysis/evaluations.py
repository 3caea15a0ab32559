"""Results of evaluations: one schema for all, written and read here.

Every evaluation writes to its folder

    evaluation.json    its numbers, in the form below
    table.md           the same for people

beside its own files (arrays, pictures, and the formats of the paper's repository). It replaces no file that it did
not write (outputs.py). evaluation.json:

    {
      "format": 1,
      "kind":     "per_token_loss", "niah", "lm_eval_harness", "longbench" or "forget_gates",
      "model":    name of the model,
      "about":    what is known of it: source, train_length, train_tokens, weights (a digest),
      "settings": what it was evaluated with,
      "numbers":  [{"task": …, "metric": …, "value": …, "standard_error": … or null, "samples": … or null,
                    "at": {…}}, …]
    }

`at` says where a number was measured if a task has several: {"length": 4096, "depth": 0.5} of a needle, {"layer": 3,
"head": 0} of a gate, {"context": 2048} of a mean loss. A standard error is that of a mean over `samples` examples.

A folder may also hold results.json of lm_eval or result.json of LongBench alone, as the paper's repository writes them.
Training writes the other half of the schema, JSON lines of numbers by training tokens (runs.py).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer import files
from forgetting_transformer import metric_names as names
from forgetting_transformer.analysis import AnalysisError, outputs
from forgetting_transformer.analysis.statistics import Estimate, mean_and_error
from forgetting_transformer.analysis.tables import Table, plain_number

FORMAT = 1
#: Files of every evaluation.
FILES = ("evaluation.json", "table.md")
#: Files with the results of the paper's repository.
_OFFICIAL = ("results.json", "result.json")
#: LongBench's English sets that are in the paper's Table 2, in its order: title and group.
LONGBENCH = {
    "narrativeqa": ("NarrativeQA", "Single-Document QA"),
    "qasper": ("Qasper", "Single-Document QA"),
    "multifieldqa_en": ("MFQA", "Single-Document QA"),
    "hotpotqa": ("HotpotQA", "Multi-Document QA"),
    "2wikimqa": ("2WikiMQA", "Multi-Document QA"),
    "musique": ("Musique", "Multi-Document QA"),
    "gov_report": ("GovReport", "Summarization"),
    "qmsum": ("QMSum", "Summarization"),
    "multi_news": ("MultiNews", "Summarization"),
    "trec": ("TREC", "Few-shot Learning"),
    "triviaqa": ("TriviaQA", "Few-shot Learning"),
    "samsum": ("SamSum", "Few-shot Learning"),
    "lcc": ("LCC", "Code"),
    "repobench-p": ("RepoBench-P", "Code"),
}


@dataclass(frozen=True)
class Number:
    """One number of an evaluation; see the module docstring."""

    task: str
    metric: str
    value: float
    standard_error: float | None = None
    samples: int | None = None
    at: Mapping[str, Any] = field(default_factory=dict)

    @property
    def estimate(self) -> Estimate:
        """The value with its 95 % interval, 1.96 standard errors to either side, where there is one."""
        return Estimate(self.value, math.nan if self.standard_error is None else 1.96 * self.standard_error)


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of one model; see the module docstring. `folder` is where it was read from."""

    kind: str
    model: str
    numbers: Sequence[Number]
    about: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()

    def find(self, task: str, metric: str, **at: Any) -> Number | None:
        """The first number of this task and metric that was measured there."""
        found = (n for n in self.numbers if (n.task, n.metric) == (task, metric) and at.items() <= n.at.items())
        return next(found, None)


def write_evaluation(
    evaluation: Evaluation,
    folder: Path,
    write_more: Callable[[Path], object] = lambda _: None,
    table: Table | None = None,
) -> None:
    """Writes evaluation.json and table.md, each atomically.

    Args:
        write_more: writes further files, as pictures, into the folder it is given.
        table: for people; default that of all numbers.

    Raises:
        AnalysisError: the folder holds a file of one of these names that this kind of evaluation did not write.
    """
    content = {"format": FORMAT, **asdict(evaluation)}
    del content["folder"]
    with outputs.writing(folder, evaluation.kind) as new:
        files.write_json(new / "evaluation.json", content, durable=False)
        text = (table or number_table(evaluation)).markdown()
        files.write_atomically(new / "table.md", f"{text}\n", durable=False)
        write_more(new)


def read_evaluation(folder: Path) -> Evaluation | None:
    """The evaluation in one folder; None if there is none.

    Raises:
        AnalysisError: a file is damaged.
    """
    if (file := folder / "evaluation.json").is_file():
        content = read_json(file)
        try:
            if content.pop("format") != FORMAT:
                raise AnalysisError(f"{file} is not in format {FORMAT}; read it with the version that wrote it")
            numbers = tuple(Number(**number) for number in content.pop("numbers"))
            return Evaluation(numbers=numbers, folder=folder, **content)
        except (LookupError, TypeError, AttributeError) as error:
            raise AnalysisError(f"{file} is damaged ({error}); run the evaluation again") from error
    for file in (folder / name for name in _OFFICIAL if (folder / name).is_file()):
        content, model = read_json(file), folder.resolve().name
        if isinstance(content, dict) and content and content.keys() <= LONGBENCH.keys():
            return from_longbench(content, model, folder=folder)
        if isinstance(content, dict) and content and all(isinstance(metrics, dict) for metrics in content.values()):
            return from_lm_eval(content, model, folder=folder)
    return None


def read_evaluations(folders: Iterable[Path]) -> list[Evaluation]:
    """All evaluations in these folders, at any depth, by path.

    Raises:
        AnalysisError: a file is damaged.
    """
    found = {file.parent for folder in folders for name in (FILES[0], *_OFFICIAL) for file in folder.rglob(name)}
    return [evaluation for folder in sorted(found) if (evaluation := read_evaluation(folder)) is not None]


def read_named(texts: Sequence[str]) -> dict[str, list[Evaluation]]:
    """The evaluations of every `[NAME=]FOLDER` on a command line, by name, in that order.

    Raises:
        AnalysisError: one is not there or damaged, or `named_folders` refuses the names.
    """
    found: dict[str, list[Evaluation]] = {}
    for name, folder in named_folders(texts):
        if (evaluation := read_evaluation(folder)) is None:
            raise AnalysisError(
                f"there are no results in {folder}: run the evaluation that writes them first, to its end"
            )
        found.setdefault(name, []).append(evaluation)
    return found


def named_folders(texts: Sequence[str]) -> list[tuple[str, Path]]:
    """Name and folder of every `[NAME=]FOLDER`. A NAME that is given again is the same model with another seed.

    Raises:
        AnalysisError: a folder without a NAME is called as another, which may be by chance.
    """
    found, unnamed = [], []
    for text in texts:
        name, separator, path = text.partition("=")
        if not separator or Path(text).exists():
            name, path = Path(text).resolve().name, text
            unnamed.append(name)
        found.append((name, Path(path)))
    names = [name for name, _ in found]
    if same := [name for name in unnamed if names.count(name) > 1]:
        raise AnalysisError(f"two results are called {same[0]!r}: give them names, NAME=FOLDER")
    return found


def number_table(evaluation: Evaluation) -> Table:
    """All numbers, a row each."""
    rows = [
        [
            n.task,
            n.metric,
            ", ".join(f"{key} {value}" for key, value in n.at.items()),
            plain_number(n.value, 4) + ("" if n.standard_error is None else f" ± {plain_number(n.standard_error, 2)}"),
            "" if n.samples is None else str(n.samples),
        ]
        for n in evaluation.numbers
    ]
    return Table(["task", "metric", "at", "value ± standard error", "examples"], rows, "lllrr").without_empty_columns()


def from_lm_eval(results: Mapping[str, Mapping[str, Any]], model: str = "", **more: Any) -> Evaluation:
    """lm_eval's results by task: {"piqa": {"acc,none": 0.5, "acc_stderr,none": 0.1, …}, …}."""
    numbers = []
    for task, metrics in results.items():
        for key, value in metrics.items():
            name, _, variant = key.partition(",")
            if isinstance(value, float) and not name.endswith("_stderr"):
                error = metrics.get(f"{name}_stderr,{variant}")
                error = error if isinstance(error, float) and math.isfinite(error) else None
                metric = name if variant in ("", "none") else key
                numbers.append(Number(task, metric, value, error, metrics.get("sample_len")))
    return Evaluation("lm_eval_harness", model, tuple(numbers), **more)


def from_longbench(
    scores: Mapping[str, Any],
    model: str = "",
    errors: Mapping[str, tuple[float | None, int]] | None = None,
    **more: Any,
) -> Evaluation:
    """Set -> score from 0 to 100, or of LongBench-E set -> range of lengths -> score.

    Args:
        errors: set -> standard error and number of examples.
    """
    numbers = []
    for name, of_set in scores.items():
        by_range = of_set if isinstance(of_set, Mapping) else {None: of_set}
        for words, value in by_range.items():
            if value is not None:
                error, samples = (errors or {}).get(name, (None, None))
                at = {} if words is None else {"words": words}
                numbers.append(Number(name, "score", value, error, samples, at))
    return Evaluation("longbench", model, tuple(numbers), **more)


def from_needle(content: Mapping[str, Any]) -> Evaluation:
    """The content of scores.json, or of judge.json: a record per prompt with `length`, `depth` and scores."""
    cells: dict[tuple, list[Mapping[str, Any]]] = {}
    for record in content["records"]:
        cells.setdefault((record["length"], record["depth"]), []).append(record)
    numbers = []
    for (length, depth), records in cells.items():
        for score in ("words", "exact", "judge"):
            values = np.array([r[score] for r in records if r.get(score) is not None], dtype=np.float64)
            if values.size:
                value, error = mean_and_error(values)
                at = {"length": length, "depth": depth}
                numbers.append(Number(f"needle, {content['mode']}", score, value, error, values.size, at))
    settings = {key: content[key] for key in ("mode", "judge") if key in content}
    about = {"train_length": content.get("train_length")}
    return Evaluation("niah", content["model"], tuple(numbers), about, settings)


def from_position_loss(summary: Mapping[str, Any]) -> Evaluation:
    """The content of results.json of per_token_loss."""
    samples = summary["eval_tokens"] // summary["eval_len"] if "eval_len" in summary else None
    numbers = []
    for key, value in summary.items():
        kind, _, name = key.partition("/")
        metric, found, length = name.partition("_len_")
        if found and kind == names.VAL:
            error = summary.get("loss_standard_error", {}).get(length)
            if error is not None and metric == "perplexity":
                error *= value  # exp, to first order
            numbers.append(Number("loss", metric, value, error, samples, {"context": int(length)}))
    for entry in summary.get("slope", ()):
        at = {"position": entry["position"]}
        numbers.append(
            Number("slope", "change_per_doubling", entry["per_doubling"], entry["standard_error"], samples, at)
        )
    about_keys = ("source", "train_length", "train_tokens", "seed", "weights")
    about = {key: summary[key] for key in about_keys if key in summary}
    settings_keys = ("corpus", "eval_tokens", "eval_len", "data", "precision")
    settings = {key: summary[key] for key in settings_keys if key in summary}
    return Evaluation("per_token_loss", summary.get("model", ""), tuple(numbers), about, settings)


def read_json(file: Path) -> Any:
    """
    Raises:
        AnalysisError: the file is not there, or damaged.
    """
    try:
        return files.read_json(file)
    except FileNotFoundError as error:
        raise AnalysisError(f"there is no {file}: run the evaluation that writes it first, to its end") from error
    except (OSError, files.UnreadableError) as error:
        raise AnalysisError(f"{file} cannot be read ({error}); start what wrote it again") from error
