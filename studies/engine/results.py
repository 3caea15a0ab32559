"""The numbers of a study: collected from its folder into one small JSON file, and read from there."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.analysis import AnalysisError, position_loss, statistics
from forgetting_transformer.analysis.comparisons import differing_settings
from forgetting_transformer.analysis.evaluations import read_json
from forgetting_transformer.analysis.runs import Run, read_run
from forgetting_transformer.analysis.tables import rate_text
from forgetting_transformer.training.config.continuing import decisive
from studies.engine import noise
from studies.engine.plan import StudyPlan, read_plan

#: States of a run.
FINISHED, DIVERGED, UNFINISHED = "finished", "diverged", "unfinished"
#: A head is local or global by its memory length, as a share of the training length.
LOCAL, GLOBAL = 1 / 16, 1 / 2
#: Settings that a run must share with variants to stand among them.
_VARIANT_SHARES = ("budget", "learning_rate", "warmup_tokens")


@dataclass(frozen=True)
class Study:
    """Models and measurements of a study.

    Args:
        plan: its YAML.
        content: its JSON, as `collect` makes it.
    """

    plan: StudyPlan
    content: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.content[key]

    def name(self, model: str) -> str:
        return self.plan.name(model)

    def losses(self, kind: str, model: str) -> dict[int, float]:
        """Held-out loss at the end of each seed that has one, of "models" or "variants"."""
        found = self[kind].get(model, {"seeds": [], "heldout_loss": []})
        pairs = zip(found["seeds"], found["heldout_loss"], strict=True)
        return {seed: loss for seed, loss in pairs if loss is not None}

    def baseline(self, kind: str) -> str:
        """The model that the others of "models" or "variants" are compared with."""
        named = self.plan.baseline
        return named if named is not None and named in self[kind] else str(next(iter(self[kind])))

    def contrasts(
        self, kind: str, than: str | None = None, compared: Collection[str] | None = None
    ) -> list[noise.Contrasts]:
        """Held-out losses of "models" or "variants" against the baseline's, for each family of models that has both.

        Args:
            than: another model than the study's baseline, and of `compared` models, for which the intervals hold at
                once. Only families that it is in.
        """
        if not self[kind]:
            return []
        losses = {name: self.losses(kind, name) for name in self[kind]}
        baseline = self.baseline(kind)
        if than is None or than == baseline:
            than, compared = baseline, None
        if not losses.get(than):
            return []
        families = [{baseline, *family} for family in self.plan.families if kind == "models"]
        families.append({baseline, *(losses.keys() - set().union(*families))})
        return [
            noise.against_baseline({name: of for name, of in losses.items() if name in family}, than, compared)
            for family in families
            if than in family and not family.isdisjoint(losses.keys() - {than})
        ]

    def differences(self, kind: str) -> dict[str, statistics.Estimate]:
        """Model -> its difference to the baseline, in the first family that it is in."""
        found = self.contrasts(kind)
        return {model: apart for family in reversed(found) for model, apart in family.against.items()}

    def evaluated_runs(self) -> list[tuple[str, str]]:
        """Folder name and model of each run whose loss is in the tables."""
        models = self["models"].items()
        return [(f"{name}_seed{model['seeds'][i]}", name) for name, model in models for i in counted_seeds(model)]

    def evaluated(self) -> dict[str, dict[str, Any]]:
        """The models whose loss at every position is known."""
        return {name: model for name, model in self["models"].items() if "per_token_loss" in model}

    def machines(self, models: Iterable[Mapping[str, Any]]) -> list[str]:
        """The machines of some models, for figures."""
        machines = dict.fromkeys(machine for model in models for machine in model["machines"])
        return [f"on {', '.join(machines)}"] if machines else []


def read_study(folder: Path) -> Study:
    """Results of `collect`: study.json, and study.yaml beside it.

    Raises:
        AnalysisError: one is missing or damaged.
    """
    if not (folder / "study.json").is_file():
        raise AnalysisError(f"{folder} is no report of a study: it has no study.json, which `collect` writes")
    return Study(read_plan(folder / "study.yaml"), read_json(folder / "study.json"))


def split_seed(run: str) -> tuple[str, int]:
    """ "fox_pro_seed0" -> ("fox_pro", 0)."""
    model, _, seed = run.rpartition("_seed")
    return model, int(seed)


def counted_seeds(model: Mapping[str, Any]) -> list[int]:
    """Indices of the seeds whose losses are averaged, those that have one: the finished ones, or all while none is."""
    losses = zip(model["train_loss"], model["heldout_loss"], strict=True)
    return [i for i, either in enumerate(losses) if either != (None, None)]


def in_order(models: Iterable[str], names: Collection[str]) -> list[str]:
    """The models that a study names in its order, then the others by name."""
    known = list(names)
    return sorted(models, key=lambda model: (known.index(model) if model in known else len(known), model))


# Collecting.


def runs_in(folder: Path, kind: str, plan: StudyPlan) -> dict[str, list[Path]]:
    """The "runs" or "variants" of a study that have logged: model -> a run per seed, that of the searches first."""
    found: dict[str, dict[int, Path]] = {}
    for file in (folder / kind).glob("*_seed*/metrics/jsonlines/train.jsonl"):
        model, seed = split_seed(file.parents[2].name)
        found.setdefault(model, {})[seed] = file.parents[2]
    runs: dict[str, list[Path]] = {}
    for model in in_order(found, plan.models):
        ordered = sorted(found[model], key=lambda seed: (seed != plan.seeds[0], seed))
        runs[model] = [found[model][seed] for seed in ordered]
    return runs


def collect(folder: Path, plan: StudyPlan) -> dict[str, Any]:
    """All numbers of a study that need no model, for JSON; what is not there yet is left out.

    Args:
        folder: of the study.

    Raises:
        AnalysisError: there is no run in the folder, or runs of one model differ in more than their seed.
    """
    runs, variants = (runs_in(folder, kind, plan) for kind in ("runs", "variants"))
    searched = sorted(path for path in (folder / "search").glob("*/lr*_seed*") if path.is_dir())
    if not (runs or variants or searched):
        raise AnalysisError(f"{folder}: none of search/, runs/ and variants/ holds a run; name the folder of a study")
    search: dict[str, dict[str, float | None]] = {}
    for run in map(read_run, searched):
        if run.finished(run.config.get("train", {}).get("max_tokens", math.inf)) or run.diverged:
            loss = math.nan if run.diverged else run.final_loss(run.heldout.values.size > 0)
            rates = search.setdefault(run.output_dir.parent.name, {})
            rates[rate_text(run.config["optimizer"]["lr"])] = _finite(loss)
    found: dict[str, Any] = {
        "models": {name: _describe(paths) for name, paths in runs.items()},
        "search": {name: search[name] for name in in_order(search, plan.models)},
        "variants": _with_own(plan, {name: _describe(paths) for name, paths in variants.items()}),
        "pruning_speed": _pruning_speeds(folder / "speed", runs),
        "pruning_loss": {},
    }
    for name, paths in runs.items():
        if (file := folder / "position_loss" / paths[0].name / "results.json").is_file():
            found["models"][name]["per_token_loss"] = _without(read_json(file), "source")
    _add_own_variants(found, plan)
    every = [read_run(path) for path in [*(paths[0] for paths in (*runs.values(), *variants.values())), *searched]]
    first = next((run for run in every if run.starts), None)
    if first is not None:
        start = first.starts[0]
        found["environment"] = {
            "versions": start["versions"],
            "machine": {key: start["machine"][key] for key in ("device", "platform") if key in start["machine"]},
            "commit": start["git"].get("commit"),
        }
        found["started"] = start["time"]
        found["corpus"] = _without(first.info("train_data"), "path")
    return found


def _with_own(plan: StudyPlan, variants: dict[str, Any]) -> dict[str, Any]:
    order = [*(name for names in plan.variants.values() for name in names), *plan.models]
    return {name: variants[name] for name in in_order(variants, order)}


def _add_own_variants(found: dict[str, Any], plan: StudyPlan) -> None:
    """Puts the run of a model that is listed among its own variants, and was not trained as one, among them.

    Only where the variants have no settings of their own, and those that were trained share the run's settings.
    """
    variants = dict(found["variants"])
    for model, names in plan.variants.items() if not plan.overrides.get("variants") else ():
        run, others = found["models"].get(model), [variants[name] for name in names if name in variants]
        if model not in names or model in variants or run is None or not others:
            continue
        if all(run[key] == other[key] for other in others for key in _VARIANT_SHARES):
            variants[model] = {key: value for key, value in run.items() if key != "per_token_loss"}
    found["variants"] = _with_own(plan, variants)


def _without(found: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Without its path: where something lies on this machine means nothing elsewhere."""
    return {key: value for key, value in found.items() if key != path}


def _describe(paths: Sequence[Path]) -> dict[str, Any]:
    """Runs that differ in their seed: what they share, and of each its losses."""
    runs = [read_run(path) for path in paths]
    for other in runs[1:]:
        if keys := differing_settings(runs[0], other, decisive):
            raise AnalysisError(
                f"{runs[0].output_dir} and {other.output_dir} differ in {', '.join(keys)}, and seeds of one model are "
                "averaged: train them with the same settings, or move one of them away"
            )
    config, info = runs[0].config, runs[0].info("model")
    states = [_state(run) for run in runs]
    return {
        "budget": config["train"]["max_tokens"],
        "learning_rate": config["optimizer"]["lr"],
        "warmup_tokens": config.get("schedule", {}).get("warmup_tokens"),
        "parameters": info["total_params"],
        # Without embedding and output layer, which have the same size in all models.
        "body_parameters": info["total_params"] - 2 * info["embedding_params"],
        # By seed, that of the searches first; a loss is None where there is none (yet).
        "seeds": [run.config["seed"] for run in runs],
        "states": states,
        "tokens": [run.tokens for run in runs],
        # What an unfinished run has come to is no loss to take a mean of with finished ones.
        "train_loss": [
            _finite(run.final_loss(heldout=False)) if state == FINISHED or FINISHED not in states else None
            for run, state in zip(runs, states, strict=True)
        ],
        "heldout_loss": [_heldout_at_end(run) for run in runs],
        "heldout_curve": [
            [[int(t), round(float(loss), 5)] for t, loss in zip(*run.heldout, strict=True)] for run in runs
        ],
        "train_length": config["datamodule"].get("train_batch_len"),
        "heads": [_heads(run) for run in runs],
        "machines": [*dict.fromkeys(run.device for run in runs if run.device)],
    }


def _heads(run: Run) -> list[dict[str, float]]:
    """Records of the callback gate_statistics, an entry per measurement; [] without it.

    Returns:
        Training `tokens`; the shares of `local` and `global` heads; and of the tiles that pruning skips, `pruned`,
        where there is pruning.
    """
    length = run.config["datamodule"].get("train_batch_len") or math.inf
    found = []
    for line in run.records("gates"):
        memory = np.array([value for key, value in line.items() if "/head_" in key])
        entry = {"tokens": line["step"], "local": float((memory < LOCAL * length).mean())}
        entry["global"] = float((memory >= GLOBAL * length).mean())
        found.append(entry | ({"pruned": line["gates/pruned"]} if "gates/pruned" in line else {}))
    return found


def _state(run: Run) -> str:
    if run.diverged:
        return DIVERGED
    return FINISHED if run.finished(run.config["train"]["max_tokens"]) else UNFINISHED


def _heldout_at_end(run: Run) -> float | None:
    """The held-out loss, if the last evaluation was at the end of the budget."""
    at_end = run.heldout.tokens.size and run.heldout.tokens[-1] >= run.config["train"]["max_tokens"]
    return _finite(float(run.heldout.values[-1])) if at_end else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _pruning_speeds(folder: Path, runs: Mapping[str, Sequence[Path]]) -> dict[str, Any]:
    """Model -> tokens per second of the seeds that benchmarks/training.py measured both "pruned", as they were trained,
    and "unpruned".
    """

    def speed(file: Path) -> float | None:
        rows = read_json(file)["rows"] if file.is_file() else []
        return next((row["tokens_per_second"] for row in rows if row["status"] == "ok" and row["trained"]), None)

    found = {}
    for model, paths in runs.items():
        files = [f"{path.name}.json" for path in paths]
        pairs = [(speed(folder / file), speed(folder / "unpruned" / file)) for file in files]
        if both := [pair for pair in pairs if None not in pair]:
            found[model] = dict(zip(("pruned", "unpruned"), map(list, zip(*both, strict=True)), strict=True))
    return found


# Loss at every position.


def read_positions(study: Study, folder: Path) -> dict[str, position_loss.Result]:
    """Loss at every position of the runs in the tables that have one, by the names of their folders."""
    return {
        run: position_loss.read_result(folder / run, study.name(model))
        for run, model in study.evaluated_runs()
        if (folder / run / "results.json").is_file()  # written after results.npz
    }


def position_changes(study: Study, results: Mapping[str, position_loss.Result]) -> list[dict[str, Any]]:
    """Change of the loss with every doubling of the context, with intervals over seeds and texts.

    Args:
        results: loss at every position, by the names of the runs' folders (`read_positions`).

    Returns:
        An entry per model and position i, for the change from the octave before i to the octave after it in nats:
        `value`; `half_width` of its 95 % interval (`noise.with_texts_and_seeds`; None where there is none), and
        the parts of it `of_texts` and `of_seeds`; how many `seeds`. And one per pair of models that a claim compares,
        seed by seed on the same texts, which has the other model as `than`.
    """
    octaves: dict[str, dict[int, tuple[Any, np.ndarray, position_loss.Result]]] = {}
    for run, model in study.evaluated_runs():
        result = results.get(run)
        if result is not None and result.octaves_NO is not None:
            texts = (result.summary.get("data"), result.loss_T.size, len(result.octaves_NO))
            octaves.setdefault(model, {})[split_seed(run)[1]] = (texts, result.octaves_NO, result)
    pairs = [(claim.than, m) for claim in study.plan.claims if claim.rule == "falls_behind" for m in claim.models]
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
            change, *parts = noise.with_texts_and_seeds(change_SNO[:, :, o], first.group_N)
            entry = {"model": model, "than": than, "position": edges[o + 1], "value": change.value}
            entry |= zip(("half_width", "of_texts", "of_seeds"), map(_finite, (change.half_width, *parts)), strict=True)
            entries.append(entry | {"seeds": len(seeds)})
    return entries
