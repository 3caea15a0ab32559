#!/usr/bin/env python
"""Plots training runs.

    python scripts/plot_run.py runs/demo                           # writes runs/demo/plots/*.png
    python scripts/plot_run.py runs/fox runs/llama --out compare   # both in the same figures

loss_tokens.png     training loss (as logged and smoothed) and held-out loss against training tokens
training.png        loss against wall time, learning rate, gradient norm, throughput, memory, shares of wall time
norms.png           norms of weights and gradients, block by block; of a single run
evaluations.png     scores of the callbacks lm_eval, needle and gate_statistics against training tokens
loss_sets.png       held-out loss on each of eval_sets, if there are any; then also loss_position_NAME.png of each
loss_position.png   left: loss at each position in the context; right: perplexity over a context of each length.
                    From the newest validation; before the first one, from training batches.

Works while a run is still training. RUN_DIR is the output_dir of the run.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from forgetting_transformer import command_line
from forgetting_transformer.analysis import outputs
from forgetting_transformer.analysis.conditions import conditions, position_label, shown_names
from forgetting_transformer.analysis.plots.losses import loss_against_position, loss_against_tokens, loss_on_sets
from forgetting_transformer.analysis.plots.training import (
    has_metrics,
    norms,
    scores_over_training,
    training_metrics,
)
from forgetting_transformer.analysis.runs import read_logged_run, read_position_losses
from forgetting_transformer.analysis.scores_in_training import read_scores
from forgetting_transformer.command_line import positive

T = TypeVar("T")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", nargs="+", type=command_line.path, metavar="RUN_DIR", help="output_dir of a run")
    parser.add_argument(
        "--out",
        type=command_line.path,
        metavar="DIR",
        help="folder for the figures; default RUN_DIR/plots, required if there are several runs",
    )
    parser.add_argument(
        "--entropy",
        type=positive,
        metavar="NATS",
        help="entropy of the corpus's token frequencies, drawn as a horizontal line: the loss of a model that "
        "ignores context. Default: what the corpus's manifest said when the run started, if the runs agree",
    )
    command_line.add_plugins(parser)
    args = parser.parse_args(argv)
    if len(args.run_dirs) > 1 and args.out is None:
        parser.error("several runs are drawn into one figure: say where with --out DIR")
    return args


def read_all(run_dirs: Sequence[Path], names: Sequence[str], read: Callable[[Path, str], T]) -> list[T]:
    """Result of ``read`` for each run; a run that has nothing yet is named on stderr and left out."""
    found = []
    for run_dir, name in zip(run_dirs, names, strict=True):
        try:
            found.append(read(run_dir, name))
        except FileNotFoundError as error:
            print(f"left out: {error}", file=sys.stderr)
    return found


def plot(args: argparse.Namespace) -> list[Path]:
    """Draws what there is to draw and returns the files."""
    names = shown_names(args.run_dirs)
    runs = read_all(args.run_dirs, names, read_logged_run)
    out = args.out or args.run_dirs[0] / "plots"
    made_with = conditions(runs)
    with outputs.writing(out, "scripts/plot_run.py") as new:
        if runs:
            recorded = {run.unigram_entropy for run in runs}
            entropy = recorded.pop() if args.entropy is None and len(recorded) == 1 else args.entropy
            loss_against_tokens(runs, new / "loss_tokens.png", entropy, made_with)
        if any(map(has_metrics, runs)):
            training_metrics(runs, new / "training.png", made_with)
        if len(runs) == 1 and runs[0].weight_norms:
            norms(runs[0], new / "norms.png", made_with)
        if scored := [run for run in runs if read_scores(run)]:
            scores_over_training(scored, new / "evaluations.png", conditions(scored))
        sets = list(dict.fromkeys(name for run in runs for name in run.eval_sets))
        if sets:
            loss_on_sets(runs, new / "loss_sets.png", made_with)
        for eval_set in ("", *sets):
            having = [run for run in runs if eval_set in run.eval_sets]
            folders = [run.output_dir for run in having] if eval_set else args.run_dirs
            read = partial(read_position_losses, eval_set=eval_set)
            found = read_all(folders, [run.name for run in having] if eval_set else names, read)
            if found:
                curves = {position_label(curve): curve.loss for several in found for curve in several}
                of_set = conditions([run.on(eval_set) for run in having]) if eval_set else made_with
                path = new / f"loss_position{'_' * bool(eval_set)}{eval_set}.png"
                loss_against_position(curves, path, conditions=of_set, of="runs")
        written = [out / path.name for path in sorted(new.iterdir())]
        if not written:
            raise ValueError("nothing to plot yet.")
    return written


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        for path in plot(args):
            print(path)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run(main))
