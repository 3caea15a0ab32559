"""One report of several, of other models, variants or seeds of a study, whose runs are no longer there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.analysis import AnalysisError, position_loss
from studies.engine.plan import StudyPlan
from studies.engine.results import Study, read_study, split_seed

#: Of a model, what has an entry per seed, and what seeds of one model must share.
_BY_SEED = ("seeds", "states", "tokens", "train_loss", "heldout_loss", "heldout_curve", "heads")
_SHARED = ("budget", "learning_rate", "warmup_tokens", "parameters", "train_length")


def join(reports: Sequence[Path], plan: StudyPlan) -> tuple[Study, dict[str, position_loss.Result]]:
    """The joined study, without what depends on loss by position of all of them, and that loss.

    Args:
        plan: of the joined study.

    Raises:
        AnalysisError: a report is damaged, of another corpus, or has a run that an earlier one has, or seeds of one
            model with other settings.
    """
    parts = {place: read_study(place).content for place in reports}
    first = parts[reports[0]]
    kept = ("environment", "started", "corpus")
    content: dict[str, Any] = {key: first[key] for key in kept}
    content |= {key: {} for key in ("models", "variants", "search", "pruning_speed", "pruning_loss", "scores")}
    content["parts"] = []
    for place, part in parts.items():
        if part["corpus"]["fingerprint"] != first["corpus"]["fingerprint"]:
            raise AnalysisError(f"{place} is of another corpus than {reports[0]}, so their losses cannot be compared")
        for kind in ("models", "variants"):
            for name, model in part[kind].items():
                known = content[kind].get(name)
                content[kind][name] = model if known is None else _with_seeds(f"{place} has {name}", known, model)
        content["search"] = {**part["search"], **content["search"]}
        for key in ("pruning_speed", "pruning_loss"):
            for name, lists in part[key].items():
                known = content[key].get(name, {})
                content[key][name] = {which: [*known.get(which, []), *values] for which, values in lists.items()}
        for name, runs in part["scores"].items():
            content["scores"].setdefault(name, {}).update(runs)
        own = {key: part[key] for key in ("environment", "started", "corpus", "source") if key in part}
        content["parts"] += part.get("parts") or [own]
    study = Study(plan, content)
    positions: dict[str, position_loss.Result] = {}
    for place, part in parts.items():
        positions |= _positions(place / "positions.npz", Study(plan, part))
    return study, {run: positions[run] for run, _ in study.evaluated_runs() if run in positions}


def _with_seeds(whose: str, known: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """A model with the seeds of another report."""
    if twice := sorted({*known["seeds"]} & {*model["seeds"]}):
        raise AnalysisError(f"{whose} with seed {twice[0]}, and so has an earlier report; leave one out")
    if other := [key for key in _SHARED if known[key] != model[key]]:
        raise AnalysisError(
            f"{whose} with {other[0]} {model[other[0]]} and not {known[other[0]]}: seeds share settings"
        )
    machines = [*dict.fromkeys([*known["machines"], *model["machines"]])]
    return {**model, **known, "machines": machines, **{key: [*known[key], *model[key]] for key in _BY_SEED}}


def _positions(file: Path, study: Study) -> dict[str, position_loss.Result]:
    found = {}
    if file.is_file():
        with np.load(file, allow_pickle=False) as arrays:
            for run, model in study.evaluated_runs():
                if run in arrays:
                    # The summary is of the model's first seed, for which a figure of several would be taken.
                    summary = {**study["models"][model].get("per_token_loss", {}), "seed": split_seed(run)[1]}
                    rest = (arrays.get(f"{run}/octaves"), arrays.get(f"{run}/groups"))
                    loss_T = np.asarray(arrays[run], dtype=np.float64)
                    found[run] = position_loss.Result(study.name(model), loss_T, summary, *rest)
    return found
