"""Joins reports of one study whose runs were made in several places or at several times: by models, or by seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.analysis import AnalysisError, position_loss
from studies.engine.plan import StudyPlan
from studies.engine.results import (
    add_own_variants,
    baseline_of,
    display_name,
    evaluated_runs,
    in_order,
    machines_of,
    said_by,
    split_seed,
)

#: Of a model, what has an entry per seed.
_BY_SEED = ("seeds", "states", "tokens", "train_loss", "heldout_loss", "curve", "heldout_curve", "heads")
#: What seeds of one model must share.
_SHARED = (
    "budget", "learning_rate", "warmup_tokens", "parameters", "body_parameters", "flops_per_token", "train_length",
)  # fmt: skip
#: Of the first seed alone.
_OF_FIRST_SEED = ("speed", "pruned")
#: By model and run.
_ANSWERS = ("scores", "needles")


def join(studies: Mapping[str, Mapping[str, Any]], plan: StudyPlan | None = None) -> dict[str, Any]:
    """One study of all models and seeds of several, without what depends on loss by position of all of them.

    Runs that were made again, with the same losses in all bits, count once: the later report adds what the earlier one
    lacks, such as answers to tasks, for which weights were no longer there.

    Args:
        studies: where each is from, for messages -> its study.json.
        plan: of the joined study: names, claims and baseline; default that of the first, with the names of all.

    Raises:
        AnalysisError: one has another corpus or does not say which, or two have a run with other losses each, or seeds
            of one model with other settings.
    """
    places, parts = list(studies), list(studies.values())
    first = parts[0]
    said = {key: first[key] for key in ("baseline", "equal_loss", "claims")}
    said["families"] = next((part["families"] for part in parts if part.get("families")), [])
    for key in ("names", "variant_groups"):
        said[key] = {}
        for part in parts:
            said[key] |= {model: value for model, value in part.get(key, {}).items() if model not in said[key]}
    joined: dict[str, Any] = {
        **(said if plan is None else said_by(plan)),
        **{key: {} for key in ("models", "variants", "search", "speed", "pruned", "pruning_speed", "pruning_loss")},
        **{key: {} for key in _ANSWERS},
        "search_loss": first["search_loss"],
        "search_made_with": _shared_conditions(
            [part["search_made_with"] for part in parts if part.get("search_made_with")]
        ),
        "parts": [],
    }
    for place, part in zip(places, parts, strict=True):
        if "fingerprint" not in part.get("corpus", {}):
            raise AnalysisError(f"{place} does not say on which corpus it was made; collect it again from its runs")
        if part["corpus"]["fingerprint"] != first["corpus"]["fingerprint"]:
            raise AnalysisError(f"{place} is of another corpus than {places[0]}, so their losses cannot be compared")
        again = set()
        for kind in ("models", "variants"):
            for name, model in part[kind].items():
                if model.get("of_run"):
                    continue  # of which another part may have more seeds
                known = joined[kind].get(name)
                model = {**model, "machines": machines_of(part, model)}
                if known is not None and _has_all_of(known, model):
                    again.add(name)
                    joined[kind][name] = {**model, **known}
                else:
                    joined[kind][name] = dict(model) if known is None else _with_seeds(name, known, model, place)
        for name, losses in part["search"].items():
            if joined["search"].setdefault(name, losses) != losses:
                raise AnalysisError(f"{place} has another search of {name} than an earlier report; leave one out")
        for key in _OF_FIRST_SEED:
            joined[key] = {**part[key], **joined[key]}
        for key in ("pruning_speed", "pruning_loss"):
            for name, lists in part.get(key, {}).items():
                known = joined[key].get(name, {})
                if known and name in again:
                    continue
                joined[key][name] = {which: [*known.get(which, []), *values] for which, values in lists.items()}
        for key in _ANSWERS:
            for name, runs in part.get(key, {}).items():
                known = joined[key].setdefault(name, {})
                for run, found in runs.items():
                    known[run] = known.get(run, {}) | found
        joined["parts"] += part.get("parts") or [
            {key: part[key] for key in ("environment", "started", "corpus", "source") if key in part}
        ]
    for kind in ("models", "variants", *_ANSWERS):
        joined[kind] = {name: joined[kind][name] for name in in_order([*joined[kind]], joined["names"])}
    joined["score_differences"] = _differences(joined, parts)
    add_own_variants(joined)
    return joined | {key: first[key] for key in ("environment", "started", "corpus") if key in first}


def _differences(joined: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Differences of scores on the same questions that hold for the joined study too.

    A part knows the scores of single questions of its own runs alone. So its difference is kept if it is against the
    same baseline, and if no other part has further runs of either with that score.
    """
    found: dict[str, dict[str, Any]] = {}

    def runs(study: Mapping[str, Any], model: str, name: str) -> set[str]:
        return {run for run, scores in study.get("scores", {}).get(model, {}).items() if name in scores}

    for part in parts:
        for model, differences in part.get("score_differences", {}).items():
            baseline = baseline_of(part, "models")
            for name, apart in differences.items():
                complete = all(runs(part, one, name) == runs(joined, one, name) for one in (model, baseline))
                if baseline == baseline_of(joined, "models") and complete:
                    found.setdefault(model, {})[name] = apart
    return {model: found[model] for model in in_order([*found], joined["names"])}


def _shared_conditions(of_parts: Sequence[Sequence[str]]) -> list[str]:
    """What holds for the searches of all parts, and all their machines."""
    if len(of_parts) < 2:
        return [*of_parts[0]] if of_parts else []
    shared = [said for said in of_parts[0] if all(said in part for part in of_parts) and not said.startswith("on ")]
    named = [said.removeprefix("on ") for part in of_parts for said in part if said.startswith("on ")]
    machines = dict.fromkeys(machine for names in named for machine in names.split(", "))
    return [*shared, *([f"on {', '.join(machines)}"] if machines else [])]


def _has_all_of(known: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """Whether the runs of a model are known already: the same seeds with the same losses in all bits."""

    def losses(of: Mapping[str, Any]) -> dict[int, list[Any]]:
        each = zip(of["seeds"], *(of[key] for key in ("tokens", "train_loss", "heldout_loss", "curve")), strict=True)
        return {seed: values for seed, *values in each}

    return losses(model).items() <= losses(known).items()


def _with_seeds(name: str, known: Mapping[str, Any], model: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A model with the seeds of another report."""
    if twice := sorted(set(known["seeds"]) & set(model["seeds"])):
        seeds = ", ".join(map(str, twice))
        raise AnalysisError(f"{place} has {name} with seed {seeds}, and so has an earlier report; leave one out")
    # Older reports do not have all of these.
    if other := [key for key in _SHARED if known.get(key, model.get(key)) != model.get(key, known.get(key))]:
        values = ", ".join(f"{key} {model.get(key)} and not {known.get(key)}" for key in other)
        raise AnalysisError(f"{place} has {name} with {values}: seeds of one model need the same settings")
    machines = [*dict.fromkeys([*known["machines"], *model["machines"]])]
    return {**known, "machines": machines, **{key: [*known[key], *model[key]] for key in _BY_SEED}}


def read_positions(
    studies: Mapping[Path, Mapping[str, Any]], joined: Mapping[str, Any]
) -> dict[str, position_loss.Result]:
    """Loss at every position of all runs, by the names of their folders, from positions.npz of the reports.

    Args:
        studies: folder of a report -> its study.json.
        joined: of them, which names the models.

    Raises:
        AnalysisError: such a file is damaged, or is not of the study.json beside it.
    """
    found: dict[str, position_loss.Result] = {}
    for folder, study in studies.items():
        results = {}
        file = folder / "positions.npz"
        if not file.is_file():
            continue
        try:
            with np.load(file, allow_pickle=False) as arrays:
                for run, model in evaluated_runs(study):
                    if run in arrays:
                        summary = study["models"][model].get("per_token_loss", {})
                        own = (arrays.get(f"{run}/octaves"), folder, True, arrays.get(f"{run}/groups"))
                        loss_T = np.asarray(arrays[run], dtype=np.float64)
                        results[run] = position_loss.Result(display_name(joined, model), loss_T, summary, *own)
        except (OSError, ValueError, EOFError) as error:
            raise AnalysisError(f"{file} cannot be read ({error}); collect the report again") from error
        for run, result in results.items():
            _check_mean(run, result.summary, result.loss_T, file)
            # The summary is of one seed, for which a figure of several would be taken.
            found[run] = replace(result, summary={**result.summary, "seed": split_seed(run)[1]})
    return found


def _check_mean(run: str, summary: Mapping[str, Any], loss_T: np.ndarray, file: Path) -> None:
    """
    Args:
        summary: of one seed of the run's model.

    Raises:
        AnalysisError: the loss at every position is not that which the summary has the mean of.
    """
    mean = summary.get(f"val/loss_avg_len_{len(loss_T)}")
    if summary.get("seed") == split_seed(run)[1] and (mean is None or abs(loss_T.mean() - mean) > 1e-3):
        there = "none" if mean is None else f"{mean:.4f}"
        raise AnalysisError(
            f"{file} is not of the study.json beside it: {run} has a mean loss of {loss_T.mean():.4f} over "
            f"{len(loss_T):,} positions here and of {there} there; collect the report again"
        )
