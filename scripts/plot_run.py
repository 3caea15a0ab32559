#!/usr/bin/env python
"""Plots training runs.

    python scripts/plot_run.py runs/demo                           # writes runs/demo/plots/*.png
    python scripts/plot_run.py runs/fox runs/llama --out compare   # both in the same figures

loss_tokens.png     training loss (as logged and smoothed) and held-out loss against training tokens
training.png        loss against wall time, learning rate, gradient norm, throughput, memory
norms.png           norms of weights and gradients, block by block; of a single run
evaluations.png     scores of the callbacks lm_eval, needle and gate_statistics against training tokens
loss_position.png   left: loss at each position in the context; right: perplexity over a context of each length.
                    From the newest validation; before the first one, from training batches.

Works while a run is still training. RUN_DIR is the output_dir of the run.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from forgetting_transformer import command_line
from forgetting_transformer.analysis import AnalysisError, outputs, run_figures


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.make_parser(__doc__)
    parser.add_argument("run_dirs", nargs="+", type=command_line.path, metavar="RUN_DIR", help="output_dir of a run")
    parser.add_argument(
        "--out",
        type=command_line.path,
        metavar="DIR",
        help="folder for the figures; default RUN_DIR/plots, required if there are several runs",
    )
    command_line.add_plugins(parser)
    args = parser.parse_args(argv)
    if len(args.run_dirs) > 1 and args.out is None:
        parser.error("several runs are drawn into one figure: choose its folder with --out DIR")
    return args


def plot(args: argparse.Namespace) -> list[Path]:
    """Draws the figures and returns their files."""
    out = args.out or args.run_dirs[0] / "plots"
    with outputs.writing(out, "scripts/plot_run.py") as new:
        run_figures.draw_runs(run_figures.read_runs(args.run_dirs), new)
        written = [out / path.name for path in sorted(new.iterdir())]
        if not written:
            raise AnalysisError("nothing to plot yet: give a run's output_dir, and wait until it has logged a loss")
    return written


def main(argv: Sequence[str] | None = None) -> None:
    print(*plot(parse_args(argv)), sep="\n")


if __name__ == "__main__":
    sys.exit(command_line.run(main))
