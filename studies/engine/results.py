"""Reads the results of a study (sweep/study.py) from its folder: all numbers, as one small JSON file."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.analysis import AnalysisError, position_loss, statistics
from forgetting_transformer.analysis.comparisons import Decisive, differing_settings
from forgetting_transformer.analysis.conditions import conditions
from forgetting_transformer.analysis.evaluations import read_json
from forgetting_transformer.analysis.runs import TRAIN_WINDOW, Run, read_run
from forgetting_transformer.analysis.tables import rate_text
from forgetting_transformer.nested import flatten
from studies.engine.claim_rules import GLOBAL, LOCAL
from studies.engine.plan import StudyPlan, read_plan

#: States of a run.
FINISHED, DIVERGED, UNFINISHED = "finished", "diverged", "unfinished"
#: What benchmarks/training.py measures runs without pruning with.
UNPRUNED = "log_pruning_tolerance=null"
#: What a run must share with variants to stand among them.
_VARIANT_SHARES = ("budget", "learning_rate", "warmup_tokens")
#: Points of a training curve that are kept.
_CURVE_POINTS = 200


def display_name(study: Mapping[str, Any], model: str) -> str:
    """What the study calls a model in tables and figures."""
    return study.get("names", {}).get(model, model)


def in_order(models: Sequence[str], names: Collection[str]) -> list[str]:
    """The models that a study names in its order, then the others by name."""
    known = list(names)
    return sorted(models, key=lambda model: (known.index(model) if model in known else len(known), model))


#: Keys of every study.json.
_NEEDED = ("models", "variants", "search", "search_loss", "speed", "pruned")


def read_study(folder: Path) -> dict[str, Any]:
    """What `collect` found, from study.json; names are those of study.yaml beside it, if there is one.

    Raises:
        AnalysisError: the folder has no study.json, or a file is damaged.
    """
    if not (folder / "study.json").is_file():
        raise AnalysisError(f"{folder} is no report of a study: it has no study.json, which `collect` writes")
    study = read_json(folder / "study.json")
    lacking = _NEEDED if not isinstance(study, dict) else [key for key in _NEEDED if key not in study]
    if lacking:
        raise AnalysisError(f"{folder / 'study.json'} is no study: it lacks {', '.join(lacking)}; collect it again")
    if (file := folder / "study.yaml").is_file():
        plan = read_plan(file)
        study |= said_by(plan)
        if tokens := plan.overrides.get("search", {}).get("train.max_tokens"):
            study.setdefault("search_made_with", [f"{tokens:,} training tokens each"])
    return study


def machines_of(study: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
    """What a model was trained on; where its entry does not say so, as in older reports, the machines of the study."""
    environments = [part.get("environment", {}) for part in study.get("parts") or [study]]
    devices = [environment.get("machine", {}).get("device") for environment in environments]
    return model.get("machines") or [*dict.fromkeys(device for device in devices if device)]


def said_by(plan: StudyPlan | None) -> dict[str, Any]:
    """What tables need of a study's YAML."""
    plan = plan or StudyPlan("", {})
    claims = [dataclasses.asdict(claim) for claim in plan.claims]
    # With settings of their own, variants need the model at these settings too.
    groups = {} if plan.overrides.get("variants") else dict(plan.variants)
    said = {"names": plan.names, "baseline": plan.baseline, "equal_loss": dict(plan.equal_loss), "claims": claims}
    return said | {"variant_groups": groups, "families": [list(family) for family in plan.families]}


def split_seed(run: str) -> tuple[str, int]:
    """ "fox_pro_seed0" -> ("fox_pro", 0).

    Raises:
        AnalysisError: the name does not end with a seed.
    """
    model, found, seed = run.rpartition("_seed")
    if not found or not seed.isdecimal():
        raise AnalysisError(f"{run!r} is not the name of a study's run, which ends with its seed as in fox_pro_seed0")
    return model, int(seed)


def runs_in(study: Path, kind: str, names: Collection[str] = (), seeds: Collection[int] = ()) -> dict[str, list[Path]]:
    """Runs of a study that have logged: model -> a run per seed, that of the searches first.

    Args:
        study: its folder.
        kind: "runs" or "variants".
        names: of models, in the order of the tables.
        seeds: of the plan, whose first one comes first where nothing was searched.
    """
    first = [split_seed(path.name)[1] for path in study.glob("search/*/lr*_seed*")][:1] or list(seeds)[:1]
    found: dict[str, dict[int, Path]] = {}
    for file in (study / kind).glob("*/metrics/jsonlines/train.jsonl"):
        model, seed = split_seed(file.parents[2].name)
        found.setdefault(model, {})[seed] = file.parents[2]
    runs: dict[str, list[Path]] = {}
    for model in in_order(list(found), names):
        ordered = sorted(found[model], key=lambda seed: (seed not in first, seed))
        runs[model] = [found[model][seed] for seed in ordered]
    return runs


def collect(
    folder: Path,
    positions: Path,
    speed: Sequence[Path] = (),
    decisive: Decisive = flatten,
    plan: StudyPlan | None = None,
) -> dict[str, Any]:
    """All numbers of a study, for JSON; what is not there yet is left out.

    Args:
        folder: of the study.
        positions: folder of per_token_loss with a result per run.
        speed: results of benchmarks/training.py on runs of the study.
        plan: what the study calls its models, and in which order.
        decisive: what must be the same in the configs of a model's seeds, `training.continuing.decisive`.

    Returns:
        Among others an empty "pruned", for model -> text length -> share of tiles that pruning skips, and an empty
        "changes", for `position_changes`.

    Raises:
        AnalysisError: there is no run in the folder, or runs of one model differ in more than their seed.
    """
    names, seeds = (plan.names, plan.seeds) if plan else ({}, [])
    runs, variants = (runs_in(folder, kind, names, seeds) for kind in ("runs", "variants"))
    searched = sorted(path for path in (folder / "search").glob("*/lr*_seed*") if path.is_dir())
    if not (runs or variants or searched):
        raise AnalysisError(
            f"{folder}: none of search/, runs/ and variants/ holds a run; give the output_dir of studies/run.py"
        )
    search: dict[str, dict[str, float | None]] = {}
    heldout, counted = False, []
    for path in searched:
        run = read_run(path)
        if run.finished(run.config.get("train", {}).get("max_tokens", math.inf)) or run.diverged:
            counted.append(run)
            rates = search.setdefault(path.parent.name, {})
            heldout = heldout or run.heldout_loss.size > 0
            loss = math.nan if run.diverged else run.final_loss(run.heldout_loss.size > 0)
            rates[rate_text(run.config["optimizer"]["lr"])] = loss if math.isfinite(loss) else None
    found: dict[str, Any] = {
        **said_by(plan),
        "models": {name: describe(paths, decisive) for name, paths in runs.items()},
        "search": {name: search[name] for name in in_order(list(search), names)},
        "search_made_with": conditions(counted),
        "search_loss": "held-out loss" if heldout else f"training loss, last {TRAIN_WINDOW:.0%} of tokens",
        "variants": {name: describe(paths, decisive) for name, paths in variants.items()},
        "speed": _speeds(speed, {paths[0].name: name for name, paths in runs.items()}),
        "pruning_speed": _pruning_speeds(speed, {path.name: name for name, paths in runs.items() for path in paths}),
        "pruned": {},
        "changes": [],
    }
    for name, paths in runs.items():
        if (file := positions / paths[0].name / "results.json").is_file():
            found["models"][name]["per_token_loss"] = _without(read_json(file), "source")
    add_own_variants(found)
    for path in [*(paths[0] for paths in (*runs.values(), *variants.values())), *searched]:
        if starts := read_run(path).starts:
            start = starts[0]
            found["environment"] = {
                "versions": start["versions"],
                "machine": {key: start["machine"][key] for key in ("device", "platform") if key in start["machine"]},
                "commit": start["git"].get("commit"),
            }
            found["started"] = start["time"]
            found["corpus"] = _without(read_run(path).info("train_data"), "path")
            break
    return found


def add_own_variants(study: dict[str, Any]) -> None:
    """A model that is listed among its own variants, and was not trained as one, is its run.

    Only where the study's variants have no settings of their own (`variant_groups`), and the variants that were trained
    have the run's budget, learning rate and warm-up. It is marked as `of_run`, since it may have more seeds later.
    """
    groups: Mapping[str, Sequence[str]] = study["variant_groups"]
    trained = {name: variant for name, variant in study["variants"].items() if not variant.get("of_run")}
    found = dict(trained)
    for model, names in groups.items():
        run, others = study["models"].get(model), [trained[name] for name in names if name in trained]
        if model not in names or model in trained or run is None or not others:
            continue
        # Older reports do not have all of these.
        if all(run.get(key, other.get(key)) == other.get(key) for other in others for key in _VARIANT_SHARES):
            found[model] = {**run, "of_run": True}
    order = [*(name for names in groups.values() for name in names), *study["names"]]
    study["variants"] = {name: found[name] for name in in_order([*found], order)}


def _without(found: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Without its path: where something lies on this machine means nothing elsewhere."""
    return {key: value for key, value in found.items() if key != path}


def describe(paths: Sequence[Path], decisive: Decisive = flatten) -> dict[str, Any]:
    """Runs that differ in their seed: what they share, and of each its losses."""
    runs = [read_run(path) for path in paths]
    for other in runs[1:]:
        if keys := differing_settings(runs[0], other, decisive):
            raise AnalysisError(
                f"{runs[0].output_dir} and {other.output_dir} differ in {', '.join(keys)}, and seeds of one model are "
                "averaged: train them with the same settings, or move one of them away"
            )
    info = runs[0].info("model")
    config = runs[0].config
    states = [_state(run) for run in runs]
    return {
        "budget": config["train"]["max_tokens"],
        "learning_rate": config["optimizer"]["lr"],
        "warmup_tokens": config.get("schedule", {}).get("warmup_tokens"),
        "parameters": info["total_params"],
        # Without embedding and output layer, which have the same size in all models.
        "body_parameters": info["total_params"] - 2 * info["embedding_params"],
        "flops_per_token": runs[0].flops_per_token,
        # Of each seed, that of the searches first; a loss is None where there is none (yet).
        "seeds": [run.config["seed"] for run in runs],
        "states": states,
        "tokens": [run.tokens for run in runs],
        # What an unfinished run has come to is no loss to take a mean of with finished ones.
        "train_loss": [
            _finite(run.final_loss(heldout=False)) if state == FINISHED or FINISHED not in states else None
            for run, state in zip(runs, states, strict=True)
        ],
        "heldout_loss": [_heldout_at_end(run) for run in runs],
        "curve": [_curve(run) for run in runs],
        "heldout_curve": [
            [[int(t), round(float(loss), 5)] for t, loss in zip(*run.heldout, strict=True)] for run in runs
        ],
        "train_length": config["datamodule"].get("train_batch_len"),
        "heads": [_heads(run) for run in runs],
        "machines": [*dict.fromkeys(run.device for run in runs if run.device)],
    }


def _heads(run: Run) -> list[dict[str, float]]:
    """What the callback gate_statistics recorded, an entry per measurement; [] where it was not there.

    Returns:
        Training `tokens`; `shortest`, `median` and `longest` memory of a head, in tokens; the shares of `local` and
        `global` heads (claim_rules.py); and of the tiles that pruning skips, `pruned`, where there is pruning.
    """
    length = run.config["datamodule"].get("train_batch_len") or math.inf
    found = []
    for line in run.records("gates"):
        memory = np.array([value for key, value in line.items() if "/head_" in key])
        entry = {"tokens": line["step"], **{key: line[f"gates/{key}"] for key in ("shortest", "median", "longest")}}
        entry["local"] = float((memory < LOCAL * length).mean())
        entry["global"] = float((memory >= GLOBAL * length).mean())
        found.append(entry | ({"pruned": line["gates/pruned"]} if "gates/pruned" in line else {}))
    return found


def _state(run: Run) -> str:
    if run.diverged:
        return DIVERGED
    return FINISHED if run.finished(run.config["train"]["max_tokens"]) else UNFINISHED


def _curve(run: Run) -> list[list[float]]:
    keep = np.unique(np.linspace(0, run.tokens and len(run.train_tokens) - 1, _CURVE_POINTS).round().astype(int))
    return [[int(run.train_tokens[i]), round(float(run.train_loss[i]), 4)] for i in keep]


def _heldout_at_end(run: Run) -> float | None:
    """The held-out loss, if the last evaluation was at the end of the budget."""
    at_end = run.heldout_tokens.size and run.heldout_tokens[-1] >= run.config["train"]["max_tokens"]
    return _finite(float(run.heldout_loss[-1])) if at_end else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _speeds(files: Sequence[Path], models: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Model -> what the benchmark measured of its run; `models` maps the names of the runs of interest to them."""
    kept = ("tokens_per_second", "mfu", "peak_memory_bytes", "tokens_per_step")
    rows = _measured(files)
    return {models[run]: {key: row[key] for key in kept} for run, pruned, row in rows if run in models and pruned}


def _pruning_speeds(files: Sequence[Path], models: Mapping[str, str]) -> dict[str, dict[str, list[float]]]:
    """Model -> tokens per second of its runs as they were trained, "pruned", and with pruning switched off, "unpruned".

    Only runs of which both were measured.
    """
    rates: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for run, pruned, row in _measured(files):
        rates[pruned][run] = row["tokens_per_second"]
    speeds: dict[str, dict[str, list[float]]] = {}
    for run in (run for run in models if run in rates[True] and run in rates[False]):
        both = speeds.setdefault(models[run], {"pruned": [], "unpruned": []})
        both["pruned"].append(rates[True][run])
        both["unpruned"].append(rates[False][run])
    return speeds


def _measured(files: Sequence[Path]) -> list[tuple[str, bool, dict[str, Any]]]:
    """Rows of benchmarks/training.py of trained runs: name of the run, whether with the run's own pruning, the row."""
    found = []
    for file in files:
        content = read_json(file)
        own = not any(override.endswith(UNPRUNED) for override in content.get("settings", {}).get("overrides") or ())
        rows = [row for row in content["rows"] if row["status"] == "ok" and row["trained"]]
        found += [(Path(row["experiment"]).name, own, row) for row in rows]
    return found


def counted_seeds(model: Mapping[str, Any]) -> list[int]:
    """Indices of the seeds whose losses are averaged, those that have one: the finished ones, or all while none is."""
    losses = zip(model["train_loss"], model["heldout_loss"], strict=True)
    return [i for i, either in enumerate(losses) if either != (None, None)]


def losses_by_seed(model: Mapping[str, Any]) -> dict[int, float]:
    """Held-out loss at the end of each seed that has one."""
    losses = zip(model["seeds"], model["heldout_loss"], strict=True)
    return {seed: loss for seed, loss in losses if loss is not None}


def baseline_of(study: Mapping[str, Any], kind: str) -> str:
    """The model that the others of "models" or "variants" are compared with."""
    named = study.get("baseline")
    return str(named if named in study[kind] else next(iter(study[kind])))


def contrasts(
    study: Mapping[str, Any], kind: str, than: str | None = None, compared: Collection[str] | None = None
) -> list[statistics.Contrasts]:
    """Held-out losses of "models" or "variants" against the baseline's, for each family of models that has both.

    Args:
        than: another model than the study's baseline, and of `compared` models, for which the intervals hold at once.
            Only families that it is in.
    """
    if not study[kind]:
        return []
    losses = {name: losses_by_seed(model) for name, model in study[kind].items()}
    baseline = baseline_of(study, kind)
    if than is None or than == baseline:
        than, compared = baseline, None
    if not losses.get(than):
        return []
    named = [{baseline, *family} for family in study.get("families", ()) if kind == "models"]
    # Models of none, as where the command line named other models than the study, are one more.
    named.append({baseline, *(losses.keys() - set().union(*named))})
    return [
        statistics.against_baseline({name: of for name, of in losses.items() if name in family}, than, compared)
        for family in named
        if than in family and not family.isdisjoint(losses.keys() - {than})
    ]


def differences(found: Sequence[statistics.Contrasts]) -> dict[str, statistics.Estimate]:
    """Model -> its difference to the baseline, in the first family that it is in."""
    return {model: apart for family in reversed(found) for model, apart in family.against.items()}


def evaluated_runs(study: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Folder name and model of each run whose loss is in the tables."""
    models = study["models"].items()
    return [(f"{name}_seed{model['seeds'][i]}", name) for name, model in models for i in counted_seeds(model)]


def read_positions(study: Mapping[str, Any], folder: Path) -> dict[str, position_loss.Result]:
    """Loss at every position of the runs in the tables that have one, by the names of their folders."""
    return {
        run: position_loss.read_result(folder / run, display_name(study, model))
        for run, model in evaluated_runs(study)
        if (folder / run / "results.json").is_file()  # written after results.npz
    }


def position_changes(study: Mapping[str, Any], results: Mapping[str, position_loss.Result]) -> list[dict[str, Any]]:
    """How the loss changes with every doubling of the context, with intervals over seeds and texts.

    Args:
        results: loss at every position, by the names of the runs' folders (`read_positions`).

    Returns:
        An entry per model and position i, for the change from the octave before i to the octave after it in nats:
        `value`; `half_width` of its 95 % interval (`statistics.with_texts_and_seeds`; None where there is none), and
        the parts of it `of_texts` and `of_seeds`; how many `seeds`. And one per pair of models that a claim compares,
        seed by seed on the same texts, which has the other model as `than`.
    """
    octaves: dict[str, dict[int, tuple[Any, np.ndarray, position_loss.Result]]] = {}
    for run, model in evaluated_runs(study):
        result = results.get(run)
        if result is not None and result.octaves_NO is not None:
            texts = (result.summary.get("data"), result.loss_T.size, len(result.octaves_NO))
            octaves.setdefault(model, {})[split_seed(run)[1]] = (texts, result.octaves_NO, result)
    pairs = [
        (claim["than"], m) for claim in study["claims"] if claim["rule"] == "falls_behind" for m in claim["models"]
    ]
    entries = []
    for than, model in [*((None, model) for model in octaves), *dict.fromkeys(pairs)]:
        own, other = octaves.get(model, {}), octaves.get(than, {}) if than else None
        seeds = [seed for seed in own if other is None or (seed in other and other[seed][0] == own[seed][0])]
        seeds = [seed for seed in seeds if own[seed][0] == own[seeds[0]][0]]
        if not seeds:
            continue
        loss_SNO = np.stack([own[seed][1] - (other[seed][1] if other else 0.0) for seed in seeds])
        change_SNO = np.diff(loss_SNO, axis=2)
        first = own[seeds[0]][2]
        edges = position_loss.octave_edges(first.loss_T.size)
        for o in range(change_SNO.shape[2]):
            change, *parts = statistics.with_texts_and_seeds(change_SNO[:, :, o], first.group_N)
            entry = {"model": model, "than": than, "position": edges[o + 1], "value": change.value}
            entry |= zip(("half_width", "of_texts", "of_seeds"), map(_finite, (change.half_width, *parts)), strict=True)
            entries.append(entry | {"seeds": len(seeds)})
    return entries


def save_positions(results: Mapping[str, position_loss.Result], file: Path) -> None:
    """Loss at every position `(T,)`, and per document and octave `(documents, octaves)`, and the group of each
    document, of every run in one .npz."""
    arrays: dict[str, Any] = {}
    for run, result in results.items():
        arrays[run] = result.loss_T.astype(np.float32)
        if result.octaves_NO is not None:
            arrays[f"{run}/octaves"] = result.octaves_NO
        if result.group_N is not None:
            arrays[f"{run}/groups"] = result.group_N
    np.savez_compressed(file, allow_pickle=False, **arrays)
