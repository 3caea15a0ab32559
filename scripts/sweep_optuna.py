#!/usr/bin/env python
"""Searches any keys of the config with Optuna: pip install -e ".[sweep]".

    python scripts/sweep_optuna.py +experiment/demo=fox_pro output_dir=output/search data_dir=quickstart/data \\
        --trials 20 'optimizer.lr=tag(log, interval(1e-4, 1e-2))' 'optimizer.weight_decay=interval(0.0, 0.2)' \\
        train.max_grad_norm=0.5,1.0

OVERRIDE is any override of train.py. One with a range is searched, in Hydra's syntax:

    key=a,b,c                          one of these
    key=interval(0.0, 0.2)             a number between the two
    key=tag(log, interval(1e-4, 1e-2)) the same on a logarithmic scale

output_dir holds a folder per run, optuna.jsonl (the study, for Optuna's own tools and figures) and sweep.md. Runs are
compared as in sweep_lr.py and share the GPUs of this node (docs/sweep.md). The same command continues a search. You may
increase --trials later.
"""

import argparse
import sys
from collections.abc import Sequence

from forgetting_transformer import command_line
from forgetting_transformer.command_line import CommandError, count
from forgetting_transformer.console import how_to_install


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.make_parser(__doc__)
    parser.add_argument("overrides", nargs="+", metavar="OVERRIDE", help="of train.py, with a value or a range")
    parser.add_argument("--trials", type=count, default=20, metavar="N", help="runs in all; default: %(default)s")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    # Only now, so that --help is quick.
    try:
        from forgetting_transformer.sweep.free_search import FreeSearch
    except ModuleNotFoundError as error:
        raise CommandError(f"{error}: {how_to_install('sweep')}") from error
    search = FreeSearch(args.overrides, args.trials)
    complete = search.run()
    print(f"\n{search.table()}\n\n{search.folder / 'sweep.md'}")
    if (best := search.best()) is not None:
        print(f"best: {' '.join(f'{key}={value}' for key, value in best.params.items())}")
    if not complete:
        print("not all trials finished; the same command continues interrupted ones", file=sys.stderr)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(command_line.run(main))
