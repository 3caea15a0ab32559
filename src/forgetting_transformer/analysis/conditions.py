"""Under which conditions runs were made, in a few words: what stands at the foot of a figure."""

from collections.abc import Sequence
from pathlib import Path

from forgetting_transformer import metric_names as names
from forgetting_transformer.analysis.runs import EMA_WEIGHTS, PositionLoss, Run, read_run, run_names
from forgetting_transformer.analysis.tables import format_tokens

#: Values that are listed; of more, only their number is said.
_LISTED = 4


def conditions(runs: Sequence[Run], heldout: bool = True) -> list[str]:
    """Settings of the runs, from the corpus to the device; what no run says is left out.

    Args:
        heldout: whether a figure shows what the runs measured on held-out tokens while they were trained.
    """
    found = []
    for name, several, values in (
        ("", "corpora", [run.setting("datamodule", "dataset") for run in runs]),
        ("{} parameters", "model sizes", [_rounded(run.info("model").get("total_params")) for run in runs]),
        ("{} tokens of training", "budgets", [_rounded(run.tokens or None) for run in runs]),
        ("{} held-out tokens", "held-out sets", [_heldout_tokens(run) if heldout else None for run in runs]),
        ("of the held-out set {}", "held-out sets", [(heldout and run.eval_set) or None for run in runs]),
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
            found.append((name or "{}").format(text))
    return found


def shown_names(run_dirs: Sequence[Path]) -> list[str]:
    """Names of runs for figures, with the model in each, which also gives it its colour: "run3 (fox_pro)".

    Raises:
        ValueError: a run is given twice.
    """
    found = run_names(run_dirs)
    models = [read_run(folder).setting("model", "label") for folder in run_dirs]
    return [
        name if not model or model in name else f"{name} ({model})" for name, model in zip(found, models, strict=True)
    ]


def position_label(curve: PositionLoss) -> str:
    """The name of a run's loss at every position: "run3 (fox_pro), held-out, after 5.12K tokens"."""
    texts = {
        names.VAL: "held-out",
        names.TRAIN_EVAL: "training batches",
        names.VAL_EMA: f"held-out, {EMA_WEIGHTS}",
    }.get(curve.kind, f"held-out ({curve.kind.removeprefix(names.VAL_SET)})")
    return f"{curve.name}, {texts}, after {_rounded(curve.train_tokens)} tokens"


def _heldout_tokens(run: Run) -> str | None:
    return _rounded(run.last(run.heldout_kind).get(names.name_of(run.heldout_kind, names.TOKENS_EVALUATED)))


def _rounded(number: int | None) -> str | None:
    """35732 -> 35.7K."""
    return None if number is None else format_tokens(float(f"{number:.3g}"))


def _tokens_per_step(run: Run) -> int | None:
    length, batch = (run.setting("datamodule", key) for key in ("train_batch_len", "train_batch_size"))
    return None if length is None or batch is None else length * batch
