"""The page of the study in adding_gates.py: results.json of what was measured, tables and numbers of it, the figure."""

import itertools
import json
import operator
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import NullLocator

from forgetting_transformer import command_line
from forgetting_transformer.analysis.plots.losses import position_axis
from forgetting_transformer.analysis.plots.style import curve_styles, draw_line, line_handle, picture, reference_line
from forgetting_transformer.analysis.statistics import mean
from forgetting_transformer.analysis.tables import markdown_table
from forgetting_transformer.files import write_json

PRETRAINED = "pretrained"
COMMAND = "python -m studies.adding_gates run output/retrofit"
#: Points of a curve of the loss by position, each a mean.
BINS = 128
TITLES = {
    PRETRAINED: "pretrained, not trained on",
    "original": "without gates",
    "gates": "gates from 16 contexts",
    "gates_rate_10": "their rate × 10",
    "gates_rate_100": "their rate × 100",
    "gates_spread": "from ⅛ to 64 contexts over heads",
    "gates_1_context": "from 1 context",
    "gates_256_contexts": "from 256 contexts",
    "gates_base_kept": "rotary base kept",
}


def collect(folder: Path, out: Path, settings: Mapping[str, int]) -> None:
    """Writes results.json of all that was measured, and the figure.

    Args:
        settings: lengths and tokens that the runs share.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = sorted((folder / "measured").glob("*.json"))
    measured = {file.stem: json.loads(file.read_text("utf-8")) for file in files}
    if not measured:
        raise command_line.CommandError(f"{folder} has no measured/*.json; run `studies.adding_gates run` first")
    one = next(run for run in measured.values() if "torch" in run)
    environment = {
        "date": datetime.fromtimestamp(min(file.stat().st_mtime for file in files), UTC).isoformat("T", "seconds"),
        "hardware": {"device": one["device"]}, "versions": {"torch": one["torch"]}, "command": COMMAND,
        "commit": os.environ.get("BENCHMARK_COMMIT", ""),
    }  # fmt: skip
    found: dict[str, Any] = {"environment": environment, "settings": settings, "measured": measured}
    if not environment["commit"]:
        found["source"] = "a copy of the repository whose commit is not known (BENCHMARK_COMMIT says it)"
    write_json(out / "results.json", found)
    draw(out / "results.json", out / "positions.png")


def by_octave(loss_by_bin: Sequence[float], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Middle of each octave of positions, and its mean loss; the first octave is one bin, of `width` positions."""
    edges = [*itertools.pairwise([0, *(2**n for n in range(len(loss_by_bin).bit_length()))])]
    means = [np.mean(loss_by_bin[begin:end]) for begin, end in edges]
    return np.array([width * (begin + end) / 2 for begin, end in edges]), np.array(means)


def of_seeds(measured: dict[str, Any], arm: str) -> list[dict[str, Any]]:
    return [measured[name] for name in sorted(measured) if name.rpartition("_seed")[0] == arm]


def sections(file: Path) -> dict[str, str]:
    """Tables and numbers of the study's page, from results.json."""
    found = json.loads(file.read_text("utf-8"))
    settings, measured = found["settings"], found["measured"]
    behind = settings["long"] // settings["bin"]

    def mean_loss(run: dict[str, Any], part: slice) -> float:
        return float(np.mean(run["loss_by_bin"][part]))

    base = of_seeds(measured, "original")
    rows: list[list[str]] = []
    texts: dict[str, str] = {}
    # Variants that seed 0 alone has are compared with the same gates of that seed.
    listed = [(arm, of_seeds(measured, arm)) for arm in TITLES]
    listed[3:3] = [("gates_seed_0", of_seeds(measured, "gates")[:1])]
    for arm, runs in listed:
        if not runs:
            continue
        row = [TITLES.get(arm, "the same, seed 0")]
        for where, part in (("within", slice(0, behind)), ("behind", slice(behind, None))):
            apart = mean([mean_loss(a, part) - mean_loss(b, part) for a, b in zip(runs, base, strict=False)])
            texts[f"{arm}_{where}"] = apart.text("+")
            losses = [mean_loss(run, part) for run in runs]
            row.append(f"{np.mean(losses):.4f}" if arm == "original" else apart.text("+"))
        gates = [run for run in runs if "memory" in run]
        shares = [[run["below_half"], run["pruned"][str(settings["long"])]] for run in gates]
        for key, share in zip(("half", "pruned"), np.mean(shares, 0) if gates else (), strict=False):
            row.append(f"{100 * share:.0f} %")
            texts[f"{arm}_{key}"] = row[-1]
        rows.append(row if gates else [*row, "", ""])
    header = ["trained on", "to 8,192", "8,192 to 16,384", "heads below half", "pruned"]
    costs = [run["loss"] for name, run in sorted(measured.items()) if name.startswith("cost_")]
    texts |= {f"cost_{name}": f"{np.mean([c[name] - c['inf'] for c in costs]):+.5f}" for name in costs[0]}
    if speed := measured.get("speed"):
        for key, way in (("open", "open"), ("pruning", "open, pruning")):
            for dim in (64, 128):
                times = (speed[f"head_dim {dim}, gates {gates}"] for gates in (way, "none"))
                texts[f"{key}_{dim}"] = f"{100 * (operator.truediv(*times) - 1):+.0f} %"
    return texts | {"arms": markdown_table(header, rows, "lrrrr")}


def draw(results: Path, path: Path) -> None:
    """Loss by position with gates and without, their difference, and memory lengths of heads."""
    found = json.loads(results.read_text("utf-8"))
    settings, measured = found["settings"], found["measured"]
    names = [name for name in TITLES if of_seeds(measured, name)]

    def shade(style: Any) -> dict[str, Any]:
        return {"color": style.colour, "alpha": 0.2, "linewidth": 0}

    styles = dict(zip(names, curve_styles(names), strict=True))
    seeds = len(of_seeds(measured, "gates"))
    with picture(
        path, "A 20M Transformer with forget gates, trained on in longer texts of code", (9.6, 3.1), 1, 3
    ) as drawn:
        losses, difference, memory = drawn.axes[0]
        octaves = {
            name: np.stack([by_octave(run["loss_by_bin"], settings["bin"])[1] for run in of_seeds(measured, name)])
            for name in names
        }
        position = by_octave(of_seeds(measured, names[0])[0]["loss_by_bin"], settings["bin"])[0]
        for name in (PRETRAINED, "original", "gates"):
            if name in octaves:
                draw_line(losses, styles[name], position, octaves[name].mean(0))
                losses.fill_between(position, octaves[name].min(0), octaves[name].max(0), **shade(styles[name]))
        trained = np.stack([octaves[name].mean(0) for name in ("original", "gates") if name in octaves])
        losses.set_ylim(trained.min() - 0.05, trained.max() + 0.3)
        losses.set_ylabel("loss, nats per token")
        for name in names:
            if name not in (PRETRAINED, "original"):
                apart = octaves[name] - octaves["original"][: len(octaves[name])]
                draw_line(difference, styles[name], position, apart.mean(0))
                difference.fill_between(position, apart.min(0), apart.max(0), **shade(styles[name]))
        difference.axhline(0, color="#555555", linewidth=0.8)
        low, high = difference.get_ylim()
        difference.set_ylim(low, min(high, -2 * low))
        difference.set_ylabel("loss minus that without gates")
        for axes in (losses, difference):
            position_axis(axes, int(position[0]), settings["evaluated"])
            axes.set_xlabel("token position, by octaves")
            for length in (settings["short"], settings["long"]):
                line = reference_line(axes, length, "training lengths, before and after", vertical=True)
        for name in names:
            runs = of_seeds(measured, name)
            if "memory" in runs[0]:
                lengths = np.sort(np.array(runs[0]["memory"]).ravel())
                draw_line(memory, styles[name], np.arange(1, lengths.size + 1), np.maximum(lengths, 1))
        memory.set_yscale("log")
        memory.yaxis.set_minor_locator(NullLocator())
        memory.axhline(settings["long"] / 2, color="#555555", linewidth=0.8)
        memory.set_xlabel("head, in order")
        memory.set_ylabel("memory length, tokens")
        drawn.handles += [line_handle(styles[name], TITLES[name]) for name in names]
        drawn.handles.append(line)
        drawn.notes += [
            f"{settings['pretraining']:,} tokens at {settings['short']:,}, then {settings['training']:,} at "
            f"{settings['long']:,}",
            f"without gates and gates from 16 contexts: mean and range of {seeds} seeds; others: seed 0",
            f"right: seed 0, line at half of {settings['long']:,}",
            of_seeds(measured, names[0])[0]["device"],
        ]
