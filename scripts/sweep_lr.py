#!/usr/bin/env python
"""Finds a learning rate as the paper did.

    python scripts/sweep_lr.py +experiment/demo=fox_pro output_dir=output/sweep data_dir=quickstart/data
    python scripts/sweep_lr.py +experiment/longcrawl64/forgetting_transformer=pro_125m_2b fabric.devices=1 \\
        output_dir=output/sweep data_dir=data --seeds 0,1,2 --head_dims 64,128

The search trains at {1, 2, 5} x 10^i around the guess and extends the grid until both neighbours of the best rate are
worse. It repeats this for every given head dimension and starts from the best rate so far. Runs are compared by their
held-out loss if the config evaluates at the end (skip_eval=false), otherwise by their training loss over the last 5 %
of the tokens.

OVERRIDE is any override of train.py. output_dir holds a folder per run, sweep.md (the table) and sweep.png. Runs share
the GPUs of this node and use fabric.devices each; hydra.launcher.… limits them (docs/sweep.md). The same command skips
finished runs and continues interrupted ones. You may add seeds or head dimensions later.
"""

import argparse
import sys
from collections.abc import Sequence

from forgetting_transformer import command_line
from forgetting_transformer.command_line import positive


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.make_parser(__doc__)
    parser.add_argument(
        "overrides",
        nargs="+",
        metavar="OVERRIDE",
        help="of train.py, as in key=value or +group=choice",
    )
    parser.add_argument(
        "--guess", type=positive, metavar="RATE", help="learning rate to start from; default: the experiment's"
    )
    parser.add_argument(
        "--seeds",
        type=command_line.whole_numbers,
        metavar="N,…",
        help="the first is used everywhere, the others at the best rate and its neighbours; default: the config's seed",
    )
    parser.add_argument(
        "--head_dims",
        type=command_line.whole_numbers,
        default=[],
        metavar="D,…",
        help="head dimensions to search around, as in 64,128",
    )
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    # Only now, so that --help is quick.
    from forgetting_transformer.sweep.learning_rate import LearningRateSweep, grid_text

    sweep = LearningRateSweep(args.overrides, args.guess, args.seeds, args.head_dims)
    complete = sweep.run()
    if any(search.losses for search in sweep.searches.values()):
        print(f"\n{sweep.table()}\n\n{sweep.folder / 'sweep.md'}\n{sweep.folder / 'sweep.png'}")
    if not complete:
        print("the search is not complete; the same command continues it", file=sys.stderr)
        return 1
    for warning in sweep.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    head_dim, index = sweep.winner()
    heads = "" if head_dim is None else f" with head dimension {head_dim}"
    print(f"best: optimizer.lr={grid_text(index)}{heads}, strictly inside the grid")
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run(main, "interrupted: the same command continues the search"))
