"""The figures of runs, and the conditions at their foot.

scripts/plot_run.py writes them, and the page shows them.
"""

from collections.abc import Sequence
from pathlib import Path

from forgetting_transformer import metric_names as names
from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.analysis.plots.losses import loss_against_position, loss_against_tokens
from forgetting_transformer.analysis.plots.training import has_metrics, norms, scores_over_training, training_metrics
from forgetting_transformer.analysis.runs import Run, read_position_losses, read_run, run_names
from forgetting_transformer.analysis.scores_in_training import read_scores
from forgetting_transformer.analysis.tables import format_tokens

#: Most values of a setting that conditions list; of more, they show the number.
_LISTED = 4


def read_runs(run_dirs: Sequence[Path]) -> list[Run]:
    """The runs under the names that figures show, with the model in each, as in "run3 (fox_pro)": it gives the colour.

    Raises:
        AnalysisError: a run is given twice, or a folder is not a run's.
    """
    for folder in run_dirs:
        if not (folder / "config.yaml").is_file():
            raise AnalysisError(f"{folder} is not a run's output_dir: it holds no config.yaml")
    runs = [read_run(folder, name) for folder, name in zip(run_dirs, run_names(run_dirs), strict=True)]
    models = [run.setting("model", "label") or "" for run in runs]
    return [
        read_run(run.output_dir, run.name if model in run.name else f"{run.name} ({model})")
        for run, model in zip(runs, models, strict=True)
    ]


def conditions(runs: Sequence[Run]) -> list[str]:
    """Settings of the runs, from corpus to device, for a figure's foot; settings that no run has are left out."""
    heldout_tokens, found = names.name_of(names.VAL, names.TOKENS_EVALUATED), []
    for name, several, values in (
        ("{}", "corpora", [run.setting("datamodule", "dataset") for run in runs]),
        ("{} parameters", "model sizes", [_short(run.info("model").get("total_params")) for run in runs]),
        ("{} tokens of training", "budgets", [_short(run.tokens or None) for run in runs]),
        ("{} held-out tokens", "held-out sets", [_short(run.last(names.VAL).get(heldout_tokens)) for run in runs]),
        ("sequences of {} tokens", "sequence lengths", [run.setting("datamodule", "train_batch_len") for run in runs]),
        ("{} tokens a step", "batch sizes", [_tokens_per_step(run) for run in runs]),
        ("learning rate {}", "learning rates", [run.setting("optimizer", "lr") for run in runs]),
        ("seed {}", "seeds", [run.setting("seed") for run in runs]),
        ("on {}", "devices", [run.device for run in runs]),
    ):
        distinct = list(dict.fromkeys(value for value in values if value is not None))
        if len(distinct) > _LISTED:
            found.append(f"{len(distinct)} {several}")
        elif distinct:
            text = ", ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in distinct)
            found.append(name.format(text))
    return found


def draw_runs(runs: Sequence[Run], folder: Path) -> dict[str, Path]:
    """Draws every figure that some run has numbers for, with all runs that have them.

    Args:
        folder: gets the figures.

    Returns:
        Titles, as the page has them -> files.

    Raises:
        AnalysisError: a file is damaged.
    """
    logged = [run for run in runs if run.train.tokens.size or run.heldout.tokens.size]
    made_with, files = conditions(logged), {}
    if any(run.has_loss for run in logged):
        loss_against_tokens(logged, file := folder / "loss_tokens.png", made_with)
        files["Loss against training tokens"] = file
    if any(map(has_metrics, logged)):
        training_metrics(logged, file := folder / "training.png", made_with)
        files["Wall time, learning rate, gradient norm, throughput"] = file
    if len(logged) == 1 and logged[0].records(names.NORM):
        norms(logged[0], file := folder / "norms.png", made_with)
        files["Norms of weights and gradients"] = file
    if scored := [run for run in logged if read_scores(run)]:
        scores_over_training(scored, file := folder / "evaluations.png", conditions(scored))
        files["Evaluations during training"] = file
    if curves := {run: losses for run in logged if (losses := read_position_losses(run))}:
        lengths = {
            name: run.setting("datamodule", "train_batch_len") for run, losses in curves.items() for name in losses
        }
        shown = {name: loss for losses in curves.values() for name, loss in losses.items()}
        file = folder / "loss_position.png"
        loss_against_position(shown, file, lengths, conditions=conditions([*curves]), of="runs")
        files["Loss at every position, in training"] = file
    return files


def _short(number: int | None) -> str | None:
    """35732 -> 35.7K."""
    return None if number is None else format_tokens(number)


def _tokens_per_step(run: Run) -> int | None:
    length, batch = (run.setting("datamodule", key) for key in ("train_batch_len", "train_batch_size"))
    return None if length is None or batch is None else length * batch
