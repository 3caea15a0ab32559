"""Figures of a study."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from forgetting_transformer.analysis import position_loss
from forgetting_transformer.analysis.needles import CHANCE
from forgetting_transformer.analysis.plots.losses import loss_against_position
from forgetting_transformer.analysis.plots.style import (
    ACCENT,
    GREY,
    MAIN,
    curve_styles,
    line_handle,
    log_axis,
    marker_handle,
    picture,
    plain_text,
    reference_line,
    token_axis,
)
from forgetting_transformer.analysis.plots.sweeps import loss_against_learning_rate
from forgetting_transformer.analysis.statistics import Estimate
from studies.engine.figures_of_models import loss_by_octave, score_grids
from studies.engine.results import Study, counted_seeds
from studies.engine.scores import needle_grids

#: Marker, legend and colour of a difference.
_APART = ("o", "interval excludes zero", ACCENT)
_TOGETHER = ("o", "interval includes zero", MAIN)
_FEW_SEEDS = ("D", "no interval (too few seeds)", GREY)


def draw_figures(study: Study, folder: Path) -> None:
    """Draws the figures that study.json alone suffices for: learning rates, loss by octave, differences of losses,
    heads over training, and the needle in a haystack.
    """
    draw: Sequence[Callable[[Study, Path], None]] = (_search, _octaves, _differences, _heads, _needle)
    for one in draw:
        one(study, folder / f"{one.__name__[1:]}.png")


def draw_positions(study: Study, results: Sequence[position_loss.Result], folder: Path) -> None:
    """Draws the loss at every position, if there is any."""
    if results:
        made_with = position_loss.made_with([result.summary for result in results])
        loss_against_position(
            position_loss.group_seeds(results),
            folder / "per_token_loss.png",
            {result.name: result.summary.get("train_length") for result in results},
            conditions=[*made_with, *study.machines(study.evaluated().values())],
        )


def _search(study: Study, path: Path) -> None:
    curves = {
        study.name(model): {float(rate): [math.inf if loss is None else loss] for rate, loss in losses.items()}
        for model, losses in study["search"].items()
    }
    if curves:
        title = f"Learning-rate search of {len(curves)} models"
        loss_against_learning_rate(
            curves, study["search_loss"], path, ring_each=True, title=title, conditions=study["search_made_with"]
        )


def _octaves(study: Study, path: Path) -> None:
    models, evaluated = study["models"].values(), study.evaluated()
    if not evaluated or not study["comparison"]:
        return
    octaves = {
        study.name(name): {entry["position"]: entry["after"] for entry in model["per_token_loss"]["slope"]}
        for name, model in evaluated.items()
    }
    tokens = {model["budget"] for model in models}
    several = max(len(counted_seeds(model)) for model in models)
    left = f"seed {', '.join(map(str, sorted({seed for model in models for seed in model['seeds'][:1]})))}"
    made_with = [f"{tokens.pop():,} training tokens"] if len(tokens) == 1 else []
    made_with.append(left if several == 1 else f"left: {left}; right: mean of {several} seeds")
    lengths = {study.name(name): model["train_length"] for name, model in evaluated.items()}
    loss_by_octave(octaves, study["comparison"], path, [*made_with, *study.machines(evaluated.values())], lengths)


def _differences(study: Study, path: Path) -> None:
    panels, families = {}, False
    for kind in ("models", "variants"):
        by_family, found = study.contrasts(kind), study.differences(kind)
        families = families or len(by_family) > 1
        if any(not math.isnan(apart.value) for apart in found.values()):
            tokens = {model["budget"] for model in study[kind].values()}
            budget = f", {tokens.pop() / 1e6:,.3g}M tokens" if len(tokens) == 1 else ""
            most = by_family[0].seeds
            complete = all(len(counted_seeds(model)) >= most for model in study[kind].values())
            seeds = f"{'' if complete else 'up to '}{most} seed{'s' * (most != 1)}"
            panels[f"{kind}{budget}, {seeds}"] = (study.name(study.baseline(kind)), found)
    if panels:
        shown = [model for kind in ("models", "variants") for model in study[kind].values()]
        differences_to_baseline(panels, study.plan.models, path, study.machines(shown), families)


def _heads(study: Study, path: Path) -> None:
    models = {name: model for name, model in study["models"].items() if any(model["heads"])}
    if models:
        recorded = {study.name(name): [heads for heads in model["heads"] if heads] for name, model in models.items()}
        lengths = {model["train_length"] for model in study["models"].values()}
        length = lengths.pop() if len(lengths) == 1 else None
        heads_over_training(recorded, path, length, study.machines(models.values()))


def _needle(study: Study, path: Path) -> None:
    prompt_lengths, depths, grids = needle_grids(study)
    if not grids:
        return
    asked = study["needles"]
    trained = {of["train_length"] for runs in asked.values() for modes in runs.values() for of in modes.values()}
    seeds = {len(runs) for runs in asked.values()}
    several = "one seed" if seeds == {1} else f"mean of {'up to ' * (len(seeds) > 1)}{max(seeds)} seeds"
    machines = study.machines([study["models"][name] for name in asked])
    score_grids(
        grids,
        prompt_lengths,
        depths,
        path,
        title="Needle in a haystack",
        label="share of the answer's words",
        limits=(0.0, 1.0),
        train_length=trained.pop() if len(trained) == 1 else None,
        conditions=["easy mode: the needle has the question before it", several, CHANCE, *machines],
    )


def differences_to_baseline(
    panels: Mapping[str, tuple[str, Mapping[str, Estimate]]],
    names: Mapping[str, str],
    path: Path,
    conditions: Sequence[str] = (),
    families: bool = False,
) -> None:
    """Draws the difference of every model to a baseline with its interval, a panel for each table of a study.

    Args:
        panels: title -> what the baseline is called, and the differences to it in nats.
        names: what models are called.
        path: where to write; the suffix chooses the format.
        conditions: for the foot of the figure.
        families: whether intervals hold for a part of the models only.
    """
    looks: set[tuple[str, str, str]] = set()
    rows = max(len(found) for _, found in panels.values())
    title = "Held-out loss against a baseline"
    with picture(path, title, (4.6 * len(panels), 1.0 + 0.24 * rows), columns=len(panels)) as drawn:
        for axes, (heading, (baseline, found)) in zip(drawn.axes[0], panels.items(), strict=True):
            known = {model: apart for model, apart in found.items() if not math.isnan(apart.value)}
            order = sorted(known, key=lambda model: -known[model].value)
            for place, model in enumerate(order):
                value, half_width = known[model]
                look = _FEW_SEEDS if math.isnan(half_width) else _APART if known[model].excludes_zero else _TOGETHER
                error = None if math.isnan(half_width) else half_width
                axes.errorbar([value], [place], xerr=error, fmt=look[0], color=look[2], markersize=4.5, capsize=2.5)
                looks.add(look)
            axes.axvline(0.0, color=GREY, linewidth=1.1, zorder=1)
            axes.set_yticks(range(len(order)), [plain_text(names.get(model, model), 40) for model in order])
            axes.set_ylim(-0.6, len(order) - 0.4)
            axes.grid(axis="y", visible=False)
            axes.set_xlabel(f"difference to {plain_text(baseline, 30)}\n(nats per token)")
            axes.set_title(heading, loc="left")
        drawn.handles += [marker_handle(*look) for look in (_APART, _TOGETHER, _FEW_SEEDS) if look in looks]
        drawn.notes += conditions
        if looks != {_FEW_SEEDS}:
            together = "each family of models" if families else "a panel"
            drawn.notes.append(f"bars: 95 % intervals that hold for {together} at once (Dunnett)")


def heads_over_training(
    models: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    path: Path,
    train_length: int | None = None,
    conditions: Sequence[str] = (),
) -> None:
    """Draws the memory lengths of the heads of models (left) and the share of tiles that pruning skips (right).

    Args:
        models: model -> seed -> measurement, as `studies.collect` has it: `tokens`, `shortest`, `median` and `longest`
            memory of a head in tokens, and `pruned` for models that prune. Seeds are drawn as separate curves.
        path: where to write; the suffix chooses the format.
        train_length: tokens of a sequence in training, drawn as a line.
        conditions: for the foot of the figure.
    """
    with picture(path, "Forget gates over training", (8.2, 3.2), columns=2) as drawn:
        left, right = drawn.axes[0]
        for (name, seeds), style in zip(models.items(), curve_styles(list(models)), strict=True):
            for measured in seeds:
                tokens = np.array([entry["tokens"] for entry in measured])
                for which, line in (("shortest", ":"), ("median", "-"), ("longest", "-.")):
                    # A memory of no token has no place on a logarithmic axis.
                    memory = [max(1.0, entry[which]) for entry in measured]
                    left.plot(tokens, memory, line, color=style.colour, marker=".", markersize=4, linewidth=1.2)
                if all("pruned" in entry for entry in measured):
                    share = [100 * entry["pruned"] for entry in measured]
                    right.plot(tokens, share, style.line, color=style.colour, marker=style.marker, markersize=3.5)
            drawn.handles.append(line_handle(style, name, with_marker=True))
        if train_length:
            drawn.handles.append(reference_line(left, train_length, f"training length ({train_length:,} tokens)"))
        log_axis(left)
        left.set(ylabel="memory of a head (tokens, at least 1)")
        left.set_title("shortest (dotted), median, longest (dash-dotted)", loc="left")
        right.set(ylabel="tiles that pruning skips (%)", ylim=(0, 100))
        right.set_title("adaptive computation pruning", loc="left")
        for axes in (left, right):
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
            token_axis(axes)
        several = any(len(seeds) > 1 for seeds in models.values())
        drawn.notes += [*conditions, *(["a curve for each seed"] if several else [])]
