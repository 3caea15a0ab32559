"""The figures that there are of runs: scripts/plot_run.py writes them, the page shows them, and wandb and TensorBoard
get those of an evaluation while a run is trained.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from forgetting_transformer import metric_names as names
from forgetting_transformer.analysis.conditions import conditions, position_label, shown_names
from forgetting_transformer.analysis.plots.losses import (
    has_loss,
    loss_against_position,
    loss_against_tokens,
    loss_on_sets,
)
from forgetting_transformer.analysis.plots.training import (
    has_metrics,
    norms,
    scores_over_training,
    training_metrics,
)
from forgetting_transformer.analysis.runs import Run, check_logged, read_position_losses, read_run
from forgetting_transformer.analysis.scores_in_training import read_scores

T = TypeVar("T")


@dataclass(frozen=True)
class RunFigure:
    """One figure.

    Attributes:
        name: of its file, without the suffix.
        title: of its section on the page.
        draw: writes it.
    """

    name: str
    title: str
    draw: Callable[[Path], object]


def read_runs(run_dirs: Sequence[Path]) -> list[Run]:
    """The runs, under the names that figures show.

    Raises:
        ValueError: a run is given twice, or a metrics file has a line that cannot be read.
    """
    return [read_run(folder, name) for folder, name in zip(run_dirs, shown_names(run_dirs), strict=True)]


def of_runs(runs: Sequence[Run], left_out: list[str], entropy: float | None = None) -> Iterator[RunFigure]:
    """The figures that there is something to draw for, with all runs in each.

    Args:
        left_out: gets a line about every run that has nothing yet for a figure that each run has sooner or later.
        entropy: for `loss_against_tokens`; default as the corpus stated it when the runs started, if they agree.

    Raises:
        ValueError: a file is damaged.
    """
    logged = [run for run, _ in _read(check_logged, runs, left_out)]
    made_with = conditions(logged)
    if any(map(has_loss, logged)):
        recorded = {run.unigram_entropy for run in logged}
        entropy = recorded.pop() if entropy is None and len(recorded) == 1 else entropy
        draw = partial(loss_against_tokens, logged, entropy=entropy, conditions=made_with)
        yield RunFigure("loss_tokens", "Loss against training tokens", draw)
    sets = list(dict.fromkeys(name for run in logged for name in run.eval_sets))
    if sets:
        draw = partial(loss_on_sets, logged, conditions=made_with)
        yield RunFigure("loss_sets", "Loss on every held-out set", draw)
    if any(map(has_metrics, logged)):
        draw = partial(training_metrics, logged, conditions=made_with)
        yield RunFigure("training", "Learning rate, gradient norm, throughput and wall time", draw)
    if len(logged) == 1 and names.NORM in logged[0].kinds:
        yield RunFigure("norms", "Norms of weights and gradients", partial(norms, logged[0], conditions=made_with))
    if scored := [run for run in logged if read_scores(run)]:
        draw = partial(scores_over_training, scored, conditions=conditions(scored))
        yield RunFigure("evaluations", "Evaluations during training", draw)
    for eval_set in ("", *sets):
        members = [run.on(eval_set) for run in runs if not eval_set or eval_set in run.eval_sets]
        curves, lengths = {}, {}
        for run, several in _read(read_position_losses, members, left_out):
            for curve in several:
                label = position_label(curve)
                curves[label], lengths[label] = curve.loss, run.setting("datamodule", "train_batch_len")
        if curves:
            made_with = conditions(members)
            draw = partial(loss_against_position, curves, train_length=lengths, conditions=made_with, of="runs")
            title = "Loss at every position, in training" + (f", on {eval_set}" if eval_set else "")
            name = f"loss_position{'_' * bool(eval_set)}{eval_set}"
            yield RunFigure(name, title, draw)


def of_evaluation(output_dir: Path, kind: str, folder: Path) -> dict[str, Path]:
    """Draws the figure that shows what an evaluation has just found, and returns the file by name; {} without one.

    Args:
        kind: of the lines that the evaluation wrote, such as "val" or "lm_eval".
        folder: to write into.
    """
    wanted = f"loss_position_{kind.removeprefix(names.VAL_SET)}"
    if kind in (names.VAL, names.VAL_EMA):
        wanted = "loss_position"
    elif kind in (names.LM_EVAL, names.NEEDLE, names.GATES):
        wanted = "evaluations"
    for figure in of_runs(read_runs([output_dir]), []):
        if figure.name == wanted:
            figure.draw(folder / f"{wanted}.png")
            return {wanted: folder / f"{wanted}.png"}
    return {}


def _read(read: Callable[[Run], T], runs: Sequence[Run], left_out: list[str]) -> list[tuple[Run, T]]:
    """The runs that `read` finds something of, each with that."""
    found = []
    for run in runs:
        try:
            found.append((run, read(run)))
        except FileNotFoundError as error:
            left_out.append(str(error))
    return found
