"""Which figures show what an evaluation has just found: for wandb and TensorBoard, while a run is trained."""

from pathlib import Path

from forgetting_transformer.analysis.conditions import conditions, position_label, shown_names
from forgetting_transformer.analysis.plots.evaluations import has_scores, scores_over_training
from forgetting_transformer.analysis.plots.losses import loss_against_position
from forgetting_transformer.analysis.runs import read_position_loss, read_run

#: Kinds of lines that `scores_over_training` draws.
_SCORES = ("lm_eval", "needle", "gates")


def of_evaluation(output_dir: Path, kind: str, folder: Path) -> dict[str, Path]:
    """Draws them into `folder`, as `scripts/plot_run.py` would now, and returns the files by name.

    Args:
        kind: of the lines that the evaluation wrote, such as "val" or "lm_eval".
    """
    run = read_run(output_dir)
    of_set = next((name for name in run.eval_sets if kind == run.on(name).heldout_kind), "")
    ema = kind == "val_ema" and not of_set
    if kind not in ("val", *_SCORES) and not of_set and not ema:
        return {}
    (name,) = shown_names([output_dir])
    run = read_run(output_dir, name)
    if kind == "val" or of_set or ema:
        curve = read_position_loss(output_dir, name, of_set, ema)
        title = f"loss_position_{of_set}" if of_set else "loss_position_ema" if ema else "loss_position"
        file, made_with = folder / f"{title}.png", conditions([run.on(of_set) if of_set else run])
        loss_against_position({position_label(curve): curve.loss}, file, conditions=made_with, of="runs")
        return {title: file}
    if has_scores(run):
        scores_over_training([run], folder / "evaluations.png", conditions([run]))
        return {"evaluations": folder / "evaluations.png"}
    return {}
