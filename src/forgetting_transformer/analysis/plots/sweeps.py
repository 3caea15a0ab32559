"""Figures of sweeps: loss against learning rate; loss of several models against tokens and against FLOPs."""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from forgetting_transformer.analysis.comparisons import Model
from forgetting_transformer.analysis.markdown import rate_text
from forgetting_transformer.analysis.plots.losses import (
    COLOURS,
    STYLE,
    add_legend,
    format_tokens,
    line_handle,
    look,
    reference_line,
    save,
    smooth,
)


def loss_against_learning_rate(
    curves: Mapping[str, Mapping[float, Sequence[float]]], loss_name: str, path: Path, ring_each: bool = False
) -> None:
    """Draws a search: the mean loss at each learning rate as a line, each seed as a dot, the best ringed, and runs
    without a loss (diverged or ended early) as crosses on the upper edge.

    Args:
        curves: name -> learning rate -> the loss of each seed in nats per token, infinite where there is none. The
            name "" is not shown.
        path: where to write; the suffix chooses the format.
        ring_each: the best of every curve is ringed and not only the best of all, since each is a search of its own.
    """
    means = {
        name: {rate: float(np.mean(losses)) for rate, losses in sorted(curve.items())} for name, curve in curves.items()
    }
    finite = [loss for curve in curves.values() for losses in curve.values() for loss in losses if np.isfinite(loss)]
    best = [
        (*min((loss, rate) for rate, loss in curve.items()), look(number)[0] if ring_each else "#000000")
        for number, curve in enumerate(means.values())
    ]
    best = [point for point in (best if ring_each else [min(best)]) if np.isfinite(point[0])]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.8))
        axes = figure.add_subplot()
        for number, (name, curve) in enumerate(means.items()):
            colour, line, marker = look(number)
            inside = {rate: loss for rate, loss in curve.items() if np.isfinite(loss)}
            axes.plot(list(inside), list(inside.values()), line, color=colour, marker=marker, markersize=6, zorder=3)
            for rate, losses in curves[name].items():
                seen = [loss for loss in losses if np.isfinite(loss)]
                if len(losses) > 1:
                    axes.plot([rate] * len(seen), seen, ".", color=colour, alpha=0.5, markersize=5, zorder=2)
                if len(seen) < len(losses):
                    axes.plot([rate], [0.97], "x", color=colour, transform=axes.get_xaxis_transform(), zorder=3)
        for loss, rate, colour in best:
            axes.plot([rate], [loss], "o", mfc="none", mec=colour, markersize=12, zorder=4)
        rates = sorted({rate for curve in means.values() for rate in curve})
        axes.set_xscale("log")
        axes.set_xlim(rates[0] / 1.4, rates[-1] * 1.4)
        axes.xaxis.set_major_locator(FixedLocator(rates))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: rate_text(rate)))
        if finite:
            margin = 0.08 * max(max(finite) - min(finite), 1e-3)
            axes.set_ylim(min(finite) - margin, max(finite) + 2 * margin)
        axes.set(xlabel="peak learning rate", ylabel=f"{loss_name}\n(nats per token)")
        handles = [line_handle(number, name, with_marker=True) for number, name in enumerate(means) if name]
        if best:
            handles.append(_mark("o", "best of each" if ring_each else "best", mfc="none", markersize=10))
        if any(len(losses) > 1 for curve in curves.values() for losses in curve.values()):
            handles.append(_mark(".", "one seed", alpha=0.6))
        if any(not np.isfinite(losses).all() for curve in curves.values() for losses in curve.values()):
            handles.append(_mark("x", "diverged or ended early"))
        add_legend(figure, handles)
        save(figure, path)


def loss_against_parameters(
    parameters: Mapping[str, Sequence[Any]], losses: Sequence[float], log: Collection[str], loss_name: str, path: Path
) -> None:
    """Draws a free search: the loss of every finished run against each parameter, the later the darker, the best ringed.

    Args:
        parameters: name -> the value of each run; values that are no numbers become categories.
        losses: of each run, nats per token.
        log: the parameters that get a logarithmic axis.
        path: where to write; the suffix chooses the format.
    """
    columns = min(3, len(parameters))
    lines = math.ceil(len(parameters) / columns)
    best = int(np.argmin(losses))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(4.2, 3.1 * columns), 2.9 * lines))
        panels = figure.subplots(lines, columns, sharey=True, squeeze=False).flatten()
        for axes, (name, values) in zip(panels, parameters.items(), strict=False):
            if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
                values = [str(value) for value in values]
            age = np.linspace(0.25, 1, len(losses))
            axes.scatter(values, losses, c=COLOURS[0], alpha=age, s=24, linewidths=0, zorder=3)
            axes.plot([values[best]], [losses[best]], "o", mfc="none", mec="#000000", markersize=11, zorder=4)
            if name in log:
                axes.set_xscale("log")
            axes.set_xlabel(name)
        for axes in panels[len(parameters) :]:
            axes.set_axis_off()
        for axes in panels[::columns]:
            axes.set_ylabel(f"{loss_name}\n(nats per token)")
        add_legend(
            figure,
            [_mark(".", "a run, later ones darker", markersize=9), _mark("o", "best", mfc="none", markersize=10)],
        )
        save(figure, path)


def loss_against_tokens_and_flops(
    models: Sequence[Model], path: Path, tokens: float | None = None, flops: float | None = None
) -> None:
    """Draws each model's loss against training tokens (left) and training FLOPs (right): lines are training loss,
    smoothed and averaged over seeds, the shade from the lowest seed to the highest, markers held-out loss.

    The loss axis leaves out losses above those after a quarter of the tokens, so that differences can be seen.

    Args:
        path: where to write; the suffix chooses the format.
        tokens, flops: where the models are compared, drawn as vertical lines.
    """
    with_flops = all(np.isfinite(model.flops_per_token) for model in models)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 3.9) if with_flops else (5.2, 3.9))
        panels = figure.subplots(1, 2 if with_flops else 1, sharey=True, squeeze=False)[0]
        low, high = [], []
        for number, model in enumerate(models):
            colour, line, marker = look(number)
            steps, losses = _smoothed(model)
            late = losses[:, steps >= 0.25 * steps[-1]]
            low.append(late.min())
            high.append(late.max())
            heldout_steps, heldout = _heldout(model)
            low += list(heldout)
            for axes, scale in zip(panels, (1.0, model.flops_per_token), strict=False):
                axes.plot(steps * scale, losses.mean(0), color=colour, linestyle=line, zorder=3)
                if len(model.runs) > 1:
                    axes.fill_between(
                        steps * scale, losses.min(0), losses.max(0), color=colour, alpha=0.2, linewidth=0, zorder=2
                    )
                appearance = {"markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.7}
                axes.plot(heldout_steps * scale, heldout, marker, color=colour, zorder=20, **appearance)
        for axes, point in zip(panels, (tokens, flops), strict=False):
            if point is not None:
                axes.axvline(point, color="#555555", linestyle=(0, (6, 3)), linewidth=1.1, zorder=1)
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
        margin = 0.04 * max(max(high) - min(low), 1e-3)
        panels[0].set_ylim(min(low) - margin, max(high) + margin)
        panels[0].set(xlabel="training tokens", ylabel="loss (nats per token)")
        panels[0].xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tokens(value)))
        if with_flops:
            panels[1].set_xlabel("training FLOPs")
            panels[1].xaxis.set_major_formatter(FuncFormatter(_format_flops))
        has_heldout = any(_heldout(model)[1].size for model in models)
        handles = [line_handle(number, model.name, has_heldout) for number, model in enumerate(models)]
        several = any(len(model.runs) > 1 for model in models)
        mean = ", mean of seeds" if several else ""
        handles.append(Line2D([], [], color="#555555", label=f"line: training loss, smoothed{mean}"))
        if several:
            handles.append(Patch(color="#555555", alpha=0.2, linewidth=0, label="shade: lowest to highest seed"))
        if has_heldout:
            handles.append(_mark("o", f"marker: held-out loss{mean}", markersize=5))
        if tokens is not None or flops is not None:
            handles.append(reference_line("dashed: where the models are compared"))
        add_legend(figure, handles)
        save(figure, path)


def _smoothed(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Training tokens (n,) and smoothed training loss of each seed at them (seeds, n)."""
    steps = model.runs[0].train_tokens
    steps = steps[steps <= model.tokens]
    # Seeds may have been logged at other intervals.
    losses = [np.interp(steps, run.train_tokens, _smooth(run.train_loss)) for run in model.runs]
    return steps, np.array(losses)


def _smooth(loss: np.ndarray) -> np.ndarray:
    return smooth(loss, 0.25, most=math.ceil(loss.size / 40))


def _heldout(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Tokens at which all seeds were evaluated, (m,), and their mean held-out loss, (m,)."""
    steps = model.runs[0].heldout_tokens
    for run in model.runs[1:]:
        steps = np.intersect1d(steps, run.heldout_tokens)
    losses = [[run.heldout_loss_at(step) for step in steps] for run in model.runs]
    return steps, np.mean(losses, axis=0)


def _format_flops(flops: float, _: int) -> str:
    """2.5e17 -> 2.5e17, without the sign and the zeros that Python prints."""
    return f"{flops:.3g}".replace("e+", "e")


def _mark(marker: str, label: str, **look: object) -> Line2D:
    return Line2D([], [], color="#333333", linestyle="none", marker=marker, label=label, **look)
