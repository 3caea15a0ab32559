"""Under which conditions runs were made, in a few words: what stands at the foot of a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forgetting_transformer.analysis.plots.style import format_tokens
from forgetting_transformer.analysis.runs import EMA_WEIGHTS, PositionLoss, Run, read_run, run_names

#: Values that are listed; of more, only their number is said.
_LISTED = 4


def conditions(runs: Sequence[Run], heldout: bool = True) -> list[str]:
    """What the runs are and were made with, from the corpus to the device; what no run says is left out.

    Args:
        heldout: whether a figure shows what the runs measured on held-out tokens while they were trained.
    """
    found = []
    for name, several, values in (
        ("", "corpora", [_at(run, "datamodule", "dataset") for run in runs]),
        ("{} parameters", "model sizes", [_rounded(run.info("model").get("total_params")) for run in runs]),
        ("{} tokens of training", "budgets", [_rounded(run.tokens or None) for run in runs]),
        ("{} held-out tokens", "held-out sets", [_heldout_tokens(run) if heldout else None for run in runs]),
        ("of the held-out set {}", "held-out sets", [(heldout and run.eval_set) or None for run in runs]),
        ("sequences of {} tokens", "sequence lengths", [_at(run, "datamodule", "train_batch_len") for run in runs]),
        ("{} tokens a step", "batch sizes", [_tokens_per_step(run) for run in runs]),
        ("learning rate {}", "learning rates", [_at(run, "optimizer", "lr") for run in runs]),
        ("seed {}", "seeds", [_at(run, "seed") for run in runs]),
        ("on {}", "devices", [run.device for run in runs]),
    ):
        distinct = list(dict.fromkeys(value for value in values if value is not None))
        if len(distinct) > _LISTED:
            found.append(f"{len(distinct)} {several}")
        elif distinct:
            text = ", ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in distinct)
            found.append((name or "{}").format(text))
    return found


def shown_names(run_dirs: Sequence[Path]) -> list[str]:
    """Names of runs for figures, with the model in each, which also gives it its colour: "run3 (fox_pro)".

    Raises:
        ValueError: a run is given twice.
    """
    names = run_names(run_dirs)
    models = [_at(read_run(folder), "model", "label") for folder in run_dirs]
    return [
        name if not model or model in name else f"{name} ({model})" for name, model in zip(names, models, strict=True)
    ]


def position_label(curve: PositionLoss) -> str:
    """Names a run's loss at every position: "run3 (fox_pro), held-out, after 5.12K tokens"."""
    texts = "held-out" if curve.source == "val" else "training batches"
    texts += f" ({curve.eval_set})" if curve.eval_set else f", {EMA_WEIGHTS}" if curve.ema else ""
    return f"{curve.name}, {texts}, after {_rounded(curve.train_tokens)} tokens"


def _heldout_tokens(run: Run) -> str | None:
    return _rounded(run.last(run.heldout_kind).get(f"{run.heldout_kind}/val_token_count"))


def _rounded(number: int | None) -> str | None:
    """35732 -> 35.7K."""
    return None if number is None else format_tokens(float(f"{number:.3g}"))


def _at(run: Run, *keys: str) -> Any:
    """A value of the run's configuration; None where it has no such key."""
    value: Any = run.config
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _tokens_per_step(run: Run) -> int | None:
    length, batch = _at(run, "datamodule", "train_batch_len"), _at(run, "datamodule", "train_batch_size")
    return None if length is None or batch is None else length * batch
