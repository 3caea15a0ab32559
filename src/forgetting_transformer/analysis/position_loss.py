"""Results of an evaluation of loss at every position: curves, slopes, comparisons.

evaluation/per_token_loss.py makes and describes these results.

Axes: N sequences, T positions, O octaves of positions.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer import metric_names as names
from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.analysis.statistics import mean_and_error
from forgetting_transformer.analysis.tables import Table, with_error
from forgetting_transformer.files import read_json

#: Arrays of results.npz: (positions,), (sequences, octaves), (sequences,).
LOSS_PER_TOKEN = names.name_of(names.VAL, names.LOSS_PER_TOKEN)
LOSS_PER_OCTAVE = names.name_of(names.VAL, "loss_per_octave")
GROUP_OF_SEQUENCE = "group_of_sequence"


def octave_edges(length: int) -> list[int]:
    """Edges [0, …, length/4, length/2, length) of octaves of positions; the first range is short."""
    edges = [length]
    while edges[0] >= 16:
        edges.insert(0, edges[0] // 2)
    return [0, *edges]


def slopes(length: int, octaves_NO: np.ndarray) -> list[dict[str, Any]]:
    """Slopes of L between neighbouring octaves of `length` positions. Sequences count as independent.

    Returns:
        For each `position` i: the mean loss `before`, in [i/2, i), and `after`, in [i, 2i), in nats; `per_doubling`,
        the change, negative where the model profits from a context of i to 2i tokens; its `standard_error` from the
        differences within sequences, None for a single sequence; `per_token`, the change divided by the distance of
        the octaves' centres.
    """
    edges, mean_O = octave_edges(length), octaves_NO.mean(0).tolist()
    found = []
    for o, (before, after) in enumerate(itertools.pairwise(mean_O)):
        change, error = mean_and_error(octaves_NO[:, o + 1] - octaves_NO[:, o])
        entry = {"position": edges[o + 1], "before": before, "after": after, "per_doubling": change}
        found.append({**entry, "standard_error": error, "per_token": 2 * change / (edges[o + 2] - edges[o])})
    return found


def standard_errors(length: int, octaves_NO: np.ndarray) -> dict[str, float]:
    """Standard errors of the mean loss over the first L positions, from differences of sequences; {} for one sequence.

    Args:
        octaves_NO: mean loss of each sequence in each octave.

    Returns:
        L as text, as JSON has it, for every L that octaves end at -> standard error in nats.
    """
    edges = octave_edges(length)
    if len(octaves_NO) < 2:
        return {}
    sum_NO = np.cumsum(octaves_NO * np.diff(edges), axis=1)
    error_O = (sum_NO / edges[1:]).std(axis=0, ddof=1) / math.sqrt(len(octaves_NO))
    return {str(end): float(error) for end, error in zip(edges[1:], error_O, strict=True)}


def made_with(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Conditions of results, for a figure's foot; unknown ones, and those that differ between results, are left out.

    Args:
        results: the content of each results.json.
    """
    shared = {key: value for key, value in results[0].items() if all(one.get(key) == value for one in results)}
    tokens, length = shared.get("eval_tokens"), shared.get("eval_len")
    texts = f" in {tokens // length:,} texts" if tokens and length else ""
    return [
        text.format(value)
        for text, value in (
            ("held-out texts of {}", shared.get("corpus")),
            (f"{{:,}} tokens{texts}", tokens),
            ("after {:,} training tokens", shared.get("train_tokens")),
            ("seed {}", shared.get("seed")),
            ("{}", shared.get("precision")),
        )
        if value is not None
    ]


@dataclass(frozen=True)
class Result:
    """One evaluation as read back from its folder.

    Attributes:
        octaves_NO: mean loss of each sequence in each octave; None in files of other programs.
        group_N: the held-out group of texts that each sequence is from; None where that is not known.
    """

    name: str
    loss_T: np.ndarray
    summary: dict[str, Any]
    octaves_NO: np.ndarray | None = None
    group_N: np.ndarray | None = None


def read_result(folder: Path, name: str) -> Result:
    """Reads a result under a name.

    Raises:
        AnalysisError: there is none, or it is damaged.
    """
    file = folder / "results.npz"
    try:
        with np.load(file, allow_pickle=False) as arrays:
            loss_T = np.asarray(arrays[LOSS_PER_TOKEN], dtype=np.float64)
            octaves_NO, group_N = arrays.get(LOSS_PER_OCTAVE), arrays.get(GROUP_OF_SEQUENCE)
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise AnalysisError(
            f"{file}: cannot read the array {LOSS_PER_TOKEN!r} ({error}); give SAVE_DIR/MODEL of run_per_token_loss.py"
        ) from error
    summary_file = file.with_suffix(".json")
    summary = read_json(summary_file) if summary_file.is_file() else {}
    return Result(name, loss_T, summary, octaves_NO, group_N)


def group_seeds(results: Sequence[Result]) -> dict[str, np.ndarray]:
    """Curves for a figure: `(T,)` for a name that occurs once, `(seeds, T)` for one that occurs again.

    Raises:
        AnalysisError: seeds of one model have curves of different lengths.
    """
    curves: dict[str, list[np.ndarray]] = {}
    for result in results:
        curves.setdefault(result.name, []).append(result.loss_T)
    for name, losses in curves.items():
        if len({loss.size for loss in losses}) > 1:
            raise AnalysisError(
                f"the results called {name!r} have {', '.join(str(loss.size) for loss in losses)} positions: seeds of "
                "one model must be evaluated at one length. Give different models different names, NAME=FOLDER"
            )
    return {name: losses[0] if len(losses) == 1 else np.stack(losses) for name, losses in curves.items()}


def slope_table(results: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    """The slope of every model at every power-of-two fraction of its length, with standard errors.

    From the training length on it states whether a doubling of the context changes the loss by more than two of them.

    Args:
        results: names and the contents of results.json; seeds have one name.
    """
    rows = []
    for name, summary in results:
        trained = summary.get("train_length") or math.inf
        for entry in summary.get("slope", []):
            change, error = entry["per_doubling"], entry["standard_error"]
            verdict = "falls: the added context helps" if change < 0 else "rises: the added context hurts"
            if error is None or abs(change) <= 2 * error:
                verdict = "one sequence: no standard error" if error is None else "flat within two standard errors"
            losses = [f"{entry[key]:.4f}" for key in ("before", "after")]
            slope = [with_error(change, error), f"{1000 * entry['per_token']:+.4f}"]
            beyond = verdict if entry["position"] >= trained else ""
            rows.append([name, f"{entry['position']:,}", *losses, *slope, beyond])
    header = ["Model", "at position i", "loss in [i/2, i)", "loss in [i, 2i)", "change per doubling (nats)"]
    header += ["dL/di (nats per 1,000 tokens)", "beyond the training length"]
    return Table(header, rows, "lrrrrrl").without_empty_columns()


def compare(results: Sequence[Result], from_position: int = 1) -> list[dict[str, Any]]:
    """Every model against the first, sequence by sequence; models evaluated on other sequences are left out.

    Documents differ much more than models do. On the same documents this cancels, so a difference of two models has a
    much smaller error than either slope. Results of one name are seeds, and are averaged first.

    Args:
        results: of at least one model.
        from_position: octaves that begin before it are left out.

    Returns:
        Per model and octave `begin` to `end` of positions: the mean difference in `loss`, and in its `change` from the
        octave before (nats), each with its standard error over sequences, which is None for a single one. Where the
        groups of texts that sequences are from are known, whole groups are drawn for it (`statistics.clustered_error`).
    """
    by_name: dict[str, list[Result]] = {}
    for result in results:
        by_name.setdefault(result.name, []).append(result)
    first, *others = by_name
    rows = []
    for name in others:
        group = by_name[first] + by_name[name]
        octaves = [r.octaves_NO for r in group if r.octaves_NO is not None]
        texts = {(r.summary.get("data"), r.loss_T.size) for r in group}
        if len(octaves) < len(group) or len({one.shape for one in octaves}) > 1 or len(texts) > 1:
            continue
        if group[0].summary.get("data") is None:
            continue
        of_first = len(by_name[first])
        difference_NO = np.mean(octaves[of_first:], axis=0) - np.mean(octaves[:of_first], axis=0)
        edges = octave_edges(group[0].loss_T.size)
        for o in (o for o in range(1, difference_NO.shape[1]) if edges[o] >= from_position):
            row = {"model": name, "against": first, "begin": int(edges[o]), "end": int(edges[o + 1])}
            row["loss"], row["loss_error"] = mean_and_error(difference_NO[:, o], group[0].group_N)
            change_N = difference_NO[:, o] - difference_NO[:, o - 1]
            row["change"], row["change_error"] = mean_and_error(change_N, group[0].group_N)
            rows.append(row)
    return rows


def comparison_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Results of `compare`, a row per model and octave."""
    header = ["Model", "against", "positions", "difference in loss (nats)", "difference in change per doubling (nats)"]
    cells = [
        [
            row["model"],
            row["against"],
            f"{row['begin']:,} to {row['end']:,}",
            with_error(row["loss"], row["loss_error"]),
            with_error(row["change"], row["change_error"]),
        ]
        for row in rows
    ]
    return Table(header, cells, "lllrr")
