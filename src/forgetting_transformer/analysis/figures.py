"""Figures of what an evaluation has just found: for wandb and TensorBoard, while a run is trained."""

from pathlib import Path

from forgetting_transformer import metric_names as names
from forgetting_transformer.analysis.conditions import conditions, position_label, shown_names
from forgetting_transformer.analysis.plots.losses import loss_against_position
from forgetting_transformer.analysis.plots.training import scores_over_training
from forgetting_transformer.analysis.runs import read_position_losses, read_run
from forgetting_transformer.analysis.scores_in_training import read_scores


def of_evaluation(output_dir: Path, kind: str, folder: Path) -> dict[str, Path]:
    """Draws them into `folder`, as `scripts/plot_run.py` would now, and returns the files by name.

    Args:
        kind: of the lines that the evaluation wrote, such as "val" or "lm_eval".
    """
    (name,) = shown_names([output_dir])
    run = read_run(output_dir, name)
    eval_set = kind.removeprefix(names.VAL_SET)
    if kind in (names.VAL, names.VAL_EMA) or eval_set in run.eval_sets:
        shown = run if kind in (names.VAL, names.VAL_EMA) else run.on(eval_set)
        curves = {position_label(one): one.loss for one in read_position_losses(output_dir, name, shown.eval_set)}
        title = f"loss_position_{shown.eval_set}" if shown.eval_set else "loss_position"
        loss_against_position(curves, folder / f"{title}.png", conditions=conditions([shown]), of="runs")
    elif kind in (names.LM_EVAL, names.NEEDLE, names.GATES) and read_scores(run):
        title = "evaluations"
        scores_over_training([run], folder / f"{title}.png", conditions([run]))
    else:
        return {}
    return {title: folder / f"{title}.png"}
