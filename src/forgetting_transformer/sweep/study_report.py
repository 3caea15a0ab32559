"""What a study (sweep/study.py) found: all numbers as one JSON file, and the tables that are made of them.

The folder of a study is large; what is worth keeping of it is small. `collect` reads the folder, `TABLES` turn what it
returns into Markdown, `fill_in` puts that into a page between marks, so that no number is copied by hand.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forgetting_transformer.evaluation import per_token_loss
from forgetting_transformer.evaluation.runs import read_metrics
from forgetting_transformer.sweep import SweepError, statistics
from forgetting_transformer.sweep.compare import differing_settings
from forgetting_transformer.sweep.learning_rate import grid_text, nearest_grid_index
from forgetting_transformer.sweep.results import TRAIN_WINDOW, RunRecord, read_run
from forgetting_transformer.sweep.tables import markdown_table

#: How models are called in tables and figures; others go by the name of their config.
NAMES = {
    "fox_pro": "FoX (Pro)",
    "fox_llama": "FoX (LLaMA)",
    "transformer_pro": "Transformer (Pro)",
    "transformer_llama": "Transformer (LLaMA)",
    "mamba2": "Mamba-2",
    "hgrn2": "HGRN2",
    "delta_net": "DeltaNet",
}
#: States of a run.
FINISHED, DIVERGED, UNFINISHED = "finished", "diverged", "unfinished"
#: In the place of a table or figure of which there is nothing.
NOT_RUN = "Not run yet."
#: Points of a training curve that are kept.
_CURVE_POINTS = 200
#: Position from which models are compared document by document, in tables.
_COMPARED_FROM = 256


def display_name(model: str) -> str:
    return NAMES.get(model, model)


def in_order(models: Sequence[str]) -> list[str]:
    """The models that have a name of their own in its order, then the others by name."""
    known = list(NAMES)
    return sorted(models, key=lambda model: (known.index(model) if model in known else len(known), model))


def split_seed(run: str) -> tuple[str, int]:
    """ "fox_pro_seed0" -> ("fox_pro", 0).

    Raises:
        SweepError: the name does not end with a seed.
    """
    model, found, seed = run.rpartition("_seed")
    if not found or not seed.isdecimal():
        raise SweepError(f"{run!r} is not the name of a study's run, which ends with its seed as in fox_pro_seed0")
    return model, int(seed)


def runs_in(study: Path, kind: str) -> dict[str, list[Path]]:
    """Runs of a study that have logged: model -> a run per seed, that of the searches first.

    Args:
        study: its folder.
        kind: "runs" or "variants".

    Raises:
        SweepError: runs of one model differ in more than their seed, so that a mean of them would be of no model.
    """
    first = {split_seed(path.name)[1] for path in study.glob("search/*/lr*_seed*")}
    found: dict[str, dict[int, Path]] = {}
    for file in (study / kind).glob("*/metrics/jsonlines/train.jsonl"):
        model, seed = split_seed(file.parents[2].name)
        found.setdefault(model, {})[seed] = file.parents[2]
    runs: dict[str, list[Path]] = {}
    for model in in_order(list(found)):
        seeds = sorted(found[model], key=lambda seed: (seed not in first, seed))
        runs[model] = [found[model][seed] for seed in seeds]
        for other in runs[model][1:]:
            if keys := differing_settings(runs[model][0], other):
                raise SweepError(
                    f"{runs[model][0]} and {other} differ in {', '.join(keys)}, and seeds of one model are averaged: train "
                    "them with the same settings, or move one of them away"
                )
    return runs


def collect(
    folder: Path,
    position_loss: Path,
    speed: Sequence[Path] = (),
) -> dict[str, Any]:
    """All numbers of a study, for JSON; what is not there yet is left out.

    Args:
        folder: of the study.
        position_loss: folder of per_token_loss with a result per run.
        speed: results of benchmarks/training.py on runs of the study.

    Returns:
        Among others an empty "pruned", for model -> text length -> share of tiles that pruning skips.

    Raises:
        SweepError: there is no run in the folder.
    """
    runs, variants = runs_in(folder, "runs"), runs_in(folder, "variants")
    searched = sorted(path for path in (folder / "search").glob("*/lr*_seed*") if path.is_dir())
    if not runs and not searched:
        raise SweepError(f"{folder}: neither search/ nor runs/ holds a run; give the output_dir of scripts/study.py")
    search: dict[str, dict[str, float | None]] = {}
    heldout = False
    for path in searched:
        run = read_run(path)
        if run.finished(run.config.get("train", {}).get("max_tokens", math.inf)) or run.diverged:
            rates = search.setdefault(path.parent.name, {})
            heldout = heldout or run.heldout_loss.size > 0
            loss = math.nan if run.diverged else run.final_loss(run.heldout_loss.size > 0)
            rates[grid_text(nearest_grid_index(run.config["optimizer"]["lr"]))] = loss if math.isfinite(loss) else None
    found: dict[str, Any] = {
        "models": {name: _describe(paths) for name, paths in runs.items()},
        "search": {name: search[name] for name in in_order(list(search))},
        "search_loss": "held-out loss" if heldout else f"training loss, last {TRAIN_WINDOW:.0%} of tokens",
        "variants": {name: _describe(paths) for name, paths in variants.items()},
        "speed": _speeds(speed, {paths[0].name: name for name, paths in runs.items()}),
        "pruned": {},
    }
    for name, paths in runs.items():
        if (file := position_loss / paths[0].name / "results.json").is_file():
            found["models"][name]["per_token_loss"] = json.loads(file.read_text(encoding="utf-8"))
    for path in [*(paths[0] for paths in runs.values()), *searched]:
        if (starts := path / "starts.jsonl").is_file():
            start = json.loads(starts.read_text(encoding="utf-8").splitlines()[0])
            found["environment"] = {
                "versions": start["versions"],
                "machine": start["machine"],
                "commit": start["git"].get("commit"),
            }
            found["started"] = start["time"]
            found["corpus"] = read_metrics(path / "metrics" / "jsonlines" / "train_data_info.jsonl")[0]
            break
    return found


def _describe(paths: Sequence[Path]) -> dict[str, Any]:
    """Runs that differ in their seed: what they share, and of each its losses."""
    runs = [read_run(path) for path in paths]
    info = read_metrics(paths[0] / "metrics" / "jsonlines" / "model_info.jsonl")[0]
    config = runs[0].config
    states = [_state(run) for run in runs]
    return {
        "budget": config["train"]["max_tokens"],
        "learning_rate": config["optimizer"]["lr"],
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
    }


def _state(run: RunRecord) -> str:
    if run.diverged:
        return DIVERGED
    return FINISHED if run.finished(run.config["train"]["max_tokens"]) else UNFINISHED


def _curve(run: RunRecord) -> list[list[float]]:
    keep = np.unique(np.linspace(0, run.tokens and len(run.train_tokens) - 1, _CURVE_POINTS).round().astype(int))
    return [[int(run.train_tokens[i]), round(float(run.train_loss[i]), 4)] for i in keep]


def _heldout_at_end(run: RunRecord) -> float | None:
    """The held-out loss, if the last evaluation was at the end of the budget."""
    at_end = run.heldout_tokens.size and run.heldout_tokens[-1] >= run.config["train"]["max_tokens"]
    return _finite(float(run.heldout_loss[-1])) if at_end else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _speeds(files: Sequence[Path], models: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Model -> what the benchmark measured of its run; `models` maps the names of the runs of interest to them."""
    speeds: dict[str, dict[str, Any]] = {}
    for file in files:
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
            if row["status"] == "ok" and row["trained"] and (run := Path(row["experiment"]).name) in models:
                kept = ("tokens_per_second", "mfu", "peak_memory_bytes", "tokens_per_step")
                speeds[models[run]] = {key: row[key] for key in kept}
    return speeds


def models_table(study: Mapping[str, Any]) -> str:
    """One row per model: losses and speed."""
    models = study["models"]
    with_loss = [name for name in models if _mean(models[name]) is not None]
    best = min(with_loss, key=lambda name: _mean(models[name]).value, default=None)
    rows = []
    for name, model in models.items():
        speed = study["speed"].get(name, {})
        rows.append(
            [
                display_name(name),
                *_settings(model),
                _text(_mean(model, "train_loss")),
                *_heldout(model),
                "best" if name == best else _against(model, models.get(best)),
                f"{speed['tokens_per_second']:,.0f}" if speed else "",
                f"{speed['mfu']:.0%}" if speed and speed["mfu"] else "",
                ", ".join(f"{share:.0%} ({length})" for length, share in study["pruned"].get(name, {}).items()),
            ]
        )
    header = ["model", "body", "rate", "tokens", "seeds", "training loss", "held-out loss", "perplexity"]
    header += ["above the best", "tokens/s", "MFU", "tiles pruned (text length)"]
    return markdown_table(header, rows, "l" + 11 * "r") if rows else NOT_RUN


def search_table(study: Mapping[str, Any]) -> str:
    """Loss of every model at every learning rate tried."""
    rates = sorted({rate for losses in study["search"].values() for rate in losses}, key=float)
    rows = []
    for name, losses in study["search"].items():
        best = min((loss for loss in losses.values() if loss is not None), default=None)
        cells = [("diverged" if losses[r] is None else f"{losses[r]:.4f}") if r in losses else "" for r in rates]
        rows.append(
            [
                display_name(name),
                *(
                    f"**{c}**" if c and best is not None and losses.get(r) == best else c
                    for r, c in zip(rates, cells, strict=True)
                ),
            ]
        )
    return markdown_table(["model", *rates], rows, "l" + "r" * len(rates)) if rows else NOT_RUN


def positions_table(study: Mapping[str, Any]) -> str:
    """By how much the loss changes with every doubling of the context, per model."""
    return _by_position(
        study,
        lambda position: f"at {position:,}",
        lambda entry: f"{entry['per_doubling']:+.3f} ± {entry['standard_error'] or math.nan:.3f}",
    )


def octaves_table(study: Mapping[str, Any]) -> str:
    """Mean loss in every octave of positions, per model."""
    return _by_position(
        study, lambda position: f"{position:,} to {2 * position:,}", lambda entry: _number(entry["after"])
    )


def _by_position(
    study: Mapping[str, Any], title: Callable[[int], str], cell: Callable[[Mapping[str, Any]], str]
) -> str:
    """A row per model, a column for each position from 128 on at which loss before and after is compared."""
    slopes = {
        name: {entry["position"]: entry for entry in model["per_token_loss"]["slope"]}
        for name, model in study["models"].items()
        if "per_token_loss" in model
    }
    if not slopes:
        return NOT_RUN
    positions = sorted({position for slope in slopes.values() for position in slope if position >= 128})
    rows = [
        [display_name(name), *(cell(slope[position]) if position in slope else "" for position in positions)]
        for name, slope in slopes.items()
    ]
    return markdown_table(["model", *(title(position) for position in positions)], rows, "l" + "r" * len(positions))


def variants_table(study: Mapping[str, Any]) -> str:
    """One row per variant, like the paper's Table 3."""
    if not study["variants"]:
        return NOT_RUN
    reference = study["variants"].get("fox_pro")
    rows = [
        [
            display_name(name),
            *_settings(variant),
            *_heldout(variant),
            "" if name == "fox_pro" else _against(variant, reference),
        ]
        for name, variant in study["variants"].items()
    ]
    header = ["model", "body", "rate", "tokens", "seeds", "held-out loss", "perplexity", "against FoX (Pro)"]
    return markdown_table(header, rows, "l" + 7 * "r")


def _settings(model: Mapping[str, Any]) -> list[str]:
    """Cells of what a model is, how long it was trained, and how many seeds the losses are a mean of."""
    counted, diverged = _counted(model), model["states"].count(DIVERGED)
    seeds = f"{len(counted)} of {len(model['seeds'])}" if len(counted) < len(model["seeds"]) else str(len(counted))
    return [
        f"{model['body_parameters'] / 1e6:.1f}M",
        f"{model['learning_rate']:.0e}".replace("e-0", "e-"),
        f"{min((model['tokens'][i] for i in counted), default=0) / 1e6:,.1f}M",
        f"{seeds}, {diverged} diverged" if diverged else seeds,
    ]


def _counted(model: Mapping[str, Any]) -> list[int]:
    """Indices of the seeds whose losses are averaged: the finished ones, or all while none is."""
    return [i for i, loss in enumerate(model["train_loss"]) if loss is not None]


def evaluated_runs(study: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Folder name and model of each run whose loss is in the tables."""
    models = study["models"].items()
    return [(f"{name}_seed{model['seeds'][i]}", name) for name, model in models for i in _counted(model)]


def _heldout(model: Mapping[str, Any]) -> list[str]:
    """Cells of the held-out loss and its perplexity."""
    mean = _mean(model)
    return [_text(mean), "" if mean is None else f"{math.exp(mean.value):.3f}"]


def _losses(model: Mapping[str, Any], which: str = "heldout_loss") -> list[float]:
    """Of the seeds that have one."""
    return [loss for loss in model[which] if loss is not None]


def _mean(model: Mapping[str, Any], which: str = "heldout_loss") -> statistics.Estimate | None:
    losses = _losses(model, which)
    return statistics.mean(losses) if losses else None


def _against(model: Mapping[str, Any], other: Mapping[str, Any] | None) -> str:
    """The difference in held-out loss to another model, if both have one."""
    if other is None or not _losses(model) or not _losses(other):
        return ""
    return statistics.difference(_losses(model), _losses(other)).text("+")


def _text(estimate: statistics.Estimate | None) -> str:
    return "" if estimate is None else estimate.text()


def comparison_table(study: Mapping[str, Any], positions: Path) -> str:
    """Models against the first on the same documents, octave by octave, mean of seeds, from the file that `save_positions`
    wrote."""
    results = []
    with np.load(positions, allow_pickle=False) as arrays:
        for run, name in evaluated_runs(study):
            summary = study["models"][name].get("per_token_loss")
            if run in arrays and summary is not None:
                results.append(
                    per_token_loss.Result(display_name(name), arrays[run], summary, arrays[f"{run}/octaves"])
                )
    return per_token_loss.comparison_table(results, _COMPARED_FROM) if len(results) > 1 else NOT_RUN


def save_positions(position_loss: Path, runs: Sequence[str], file: Path) -> None:
    """Loss at every position `(T,)`, and per document and octave `(documents, octaves)`, of every run in one .npz."""
    arrays: dict[str, np.ndarray] = {}
    for name in runs:
        if (position_loss / name / "results.json").is_file():  # written after results.npz
            result = per_token_loss.read_result(position_loss / name)
            arrays[name] = result.loss_T.astype(np.float32)
            arrays[f"{name}/octaves"] = result.octaves_NO
    np.savez_compressed(file, **arrays)


def missing(study: Mapping[str, Any]) -> list[str]:
    """What a study does not have yet, a line each."""
    lines = []
    for kind, models in (("", study["models"]), ("variant ", study["variants"])):
        seeds = {seed: None for model in models.values() for seed in model["seeds"]}
        for name, model in models.items():
            for seed, state, tokens in zip(model["seeds"], model["states"], model["tokens"], strict=True):
                if state != FINISHED:
                    why = (
                        "which diverged" if state == DIVERGED else f"{tokens:,} of {model['budget']:,} tokens are done"
                    )
                    lines.append(f"the rest of {kind}{name}_seed{seed}: {why}")
            lines += [
                f"{kind}{name}_seed{seed}: others have a run with it" for seed in seeds if seed not in model["seeds"]
            ]
    for what, have in (
        ("a run at the rate found", study["models"]),
        ("loss at every position", {n for n, model in study["models"].items() if "per_token_loss" in model}),
        ("speed", study["speed"]),
    ):
        known = in_order([*{**study["search"], **study["models"]}])
        if lacking := [name for name in known if name not in have]:
            lines.append(f"{what}: none of {', '.join(lacking)}")
    if not study["variants"]:
        lines.append("variants: none has run")
    return lines


def source(study: Mapping[str, Any]) -> str:
    """On what and from what the study was made, in a sentence."""
    if "environment" not in study:
        return ""
    environment, corpus = study["environment"], study["corpus"]
    machine, versions = environment["machine"], environment["versions"]
    day = study["started"][:10]
    return (
        f"Started on {day} on {machine['device']}, PyTorch {versions['torch']}, commit "
        f"{(environment['commit'] or 'unknown')[:7]}; {corpus['total_tokens']:,} training tokens."
    )


#: Figures that `collect` of scripts/study_report.py draws, and what they show.
FIGURES = {
    "compare": "loss against training tokens and training FLOPs",
    "per_token_loss": "loss at every position, and perplexity over the context",
    "memory": "memory length of every head of the first model that forgets",
    "search": "loss against learning rate",
}
TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "models": models_table,
    "search": search_table,
    "octaves": octaves_table,
    "positions": positions_table,
    "variants": variants_table,
}


def fill_in(page: str, tables: Mapping[str, str]) -> str:
    """A page with what stands between `<!-- NAME -->` and `<!-- end of NAME -->` replaced by the table of that name.

    Raises:
        SweepError: the page has marks for a table that is not there.
    """

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name not in tables:
            raise SweepError(f"the page wants a table {name!r}; there are {', '.join(tables)}")
        return f"<!-- {name} -->\n{tables[name].strip()}\n<!-- end of {name} -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end of \1 -->", replace, page, flags=re.DOTALL)


def _number(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"
