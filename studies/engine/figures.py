"""Figures of a study."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from forgetting_transformer.analysis.plots.losses import draw_differences, mark_training, position_axis
from forgetting_transformer.analysis.plots.style import (
    ACCENT,
    GREY,
    MAIN,
    curve_styles,
    draw_line,
    line_handle,
    marker_handle,
    picture,
    plain_text,
)
from forgetting_transformer.analysis.statistics import Estimate
from studies.engine.results import Study, counted_seeds

#: Marker, legend and colour of a difference.
_APART = ("o", "interval excludes zero", ACCENT)
_TOGETHER = ("o", "interval includes zero", MAIN)
_FEW_SEEDS = ("D", "no interval (too few seeds)", GREY)


def draw_figures(study: Study, folder: Path) -> None:
    """Draws the loss by octaves of positions and the differences of held-out losses, for which study.json suffices."""
    _octaves(study, folder / "octaves.png")
    _differences(study, folder / "differences.png")


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
            budget = f", {tokens.pop() / 1e6:,.1f}M tokens" if len(tokens) == 1 else ""
            most = by_family[0].seeds
            complete = all(len(counted_seeds(model)) >= most for model in study[kind].values())
            seeds = f"{'' if complete else 'up to '}{most} seed{'s' * (most != 1)}"
            panels[f"{kind}{budget}, {seeds}"] = (study.name(study.baseline(kind)), found)
    if panels:
        shown = [model for kind in ("models", "variants") for model in study[kind].values()]
        differences_to_baseline(panels, study.plan.models, path, study.machines(shown), families)


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


def loss_by_octave(
    losses: Mapping[str, Mapping[int, float]],
    rows: Sequence[Mapping[str, Any]],
    path: Path,
    conditions: Sequence[str] = (),
    train_length: int | Mapping[str, int | None] | None = None,
) -> None:
    """Draws the mean loss of every octave of positions (left) and the differences to the first model (right).

    `loss_against_position` shows every position, where that is at hand.

    Args:
        losses: model -> first position of an octave -> mean loss in it.
        rows, conditions, train_length: as for `loss_differences`.
    """
    with picture(path, f"Loss by position of {len(losses)} models", (8.2, 3.4), columns=2) as drawn:
        left, right = drawn.axes[0]
        for (name, octaves), style in zip(losses.items(), curve_styles(list(losses)), strict=True):
            x, y = np.array(list(octaves)) * math.sqrt(2), np.array(list(octaves.values()))
            draw_line(left, style, x, y, marker=style.marker, markersize=4.5)
            drawn.handles.append(line_handle(style, name, with_marker=True))
        begins = [begin for octaves in losses.values() for begin in octaves]
        position_axis(left, min(begins), 2 * max(begins))
        left.set(xlabel="token position, by octaves", ylabel="mean loss of the octave\n(nats per token)")
        draw_differences(right, rows)
        for axes in (left, right):
            marks = mark_training(axes, train_length, list(losses))
        drawn.handles += marks
        apart: dict[str, list[float]] = {}
        for row in rows:
            apart.setdefault(row["model"], []).append(row["loss"])
        cut = _end_axis(left, {name: [*octaves.values()] for name, octaves in losses.items()})
        cut |= _end_axis(right, {rows[0]["against"]: [0.0], **apart})
        left.set_title("mean of each octave of positions", loc="left")
        right.set_title(f"above {rows[0]['against']}, on the same documents", loc="left")
        drawn.notes += [*conditions, "bars: ± one standard error of the differences"]
        drawn.notes += [f"{name} rises beyond the axis" for name in sorted(cut)]


def _end_axis(axes: Axes, curves: Mapping[str, Sequence[float]]) -> set[str]:
    """Ends an axis above all curves but those that rise far above where curves begin; returns the names of these."""
    low = min(map(min, curves.values()))
    reach = 1.5 * (max(curve[0] for curve in curves.values()) - low)
    beyond = {name for name, curve in curves.items() if max(curve) > low + reach}
    high = max((max(curve) for name, curve in curves.items() if name not in beyond), default=low + reach)
    axes.set_ylim(low - 0.05 * reach, high + 0.08 * reach)
    return beyond
