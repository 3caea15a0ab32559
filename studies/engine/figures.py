"""Figures of a study: differences of losses with their intervals, and what heads do while models are trained."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator

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
from forgetting_transformer.analysis.statistics import Estimate

#: Marker, legend and colour of a difference.
_APART = ("o", "interval excludes zero", ACCENT)
_TOGETHER = ("o", "interval includes zero", MAIN)
_FEW_SEEDS = ("D", "no interval (too few seeds)", GREY)


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
    models: Mapping[str, Sequence[Sequence[Mapping[str, float]]]],
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
