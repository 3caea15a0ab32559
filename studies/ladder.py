#!/usr/bin/env python
"""Finds learning rates at several sizes, and how the best one moves with the size.

    python -m studies.ladder +experiment/demo=fox_pro --scales 125m_2b 360m_7b 760m_16b --shrink 4 \\
        --shrink_tokens 4096 output_dir=output/ladder data_dir=quickstart/data

Each scale of configs/scale is made smaller: its width, blocks and heads are divided by --shrink, its training tokens by
--shrink_tokens (default: the cube of --shrink, as the weights of the blocks). At each size, the search of sweep_lr.py
runs in output_dir/SCALE, the smallest size first; the next search starts from the best rate so far. output_dir gets
ladder.json, table.md and figure.png: loss against learning rate, the best rate against parameters, loss against
compute, with power laws, their 95 % intervals, and the extrapolation to the sizes that are not shrunk.

OVERRIDE is any override of train.py but those that the ladder sets. The same command continues it; you may add scales
and seeds (docs/sweep.md).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from forgetting_transformer import command_line
from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.command_line import count, number, positive
from forgetting_transformer.ranges import Range
from forgetting_transformer.sweep import SweepError
from forgetting_transformer.sweep.jobs import quote
from forgetting_transformer.train.composer import Composer
from forgetting_transformer.training import ConfigError
from studies import ROOT
from studies.engine import ladder


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="+", metavar="OVERRIDE", help="of train.py")
    parser.add_argument("--scales", nargs="+", required=True, metavar="NAME", help="of configs/scale, two or more")
    parser.add_argument(
        "--shrink", type=count, default=1, metavar="F", help="divides width, blocks and heads (default 1)"
    )
    parser.add_argument(
        "--shrink_tokens", type=number(Range(1, 1e9)), metavar="G", help="divides the training tokens; default F cubed"
    )
    parser.add_argument("--seeds", type=command_line.whole_numbers, metavar="N,…", help="as in sweep_lr.py")
    parser.add_argument(
        "--guess", type=positive, metavar="RATE", help="where the first search starts; default: the config's"
    )
    parser.add_argument("--dry_run", action="store_true", help="show the sizes, and train nothing")
    args = parser.parse_intermixed_args(argv)
    args.shrink_tokens = float(args.shrink**3) if args.shrink_tokens is None else args.shrink_tokens
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        composer = Composer(ROOT / "configs", args.overrides)
        ladder.check_common(composer.task_overrides)
        base = composer.compose(composer.task_overrides)
        folder = Path(base.output_dir).expanduser().absolute()
        common = [override for override in composer.task_overrides if not override.startswith("output_dir=")]
        common.append(f"output_dir={quote(str(folder))}")
        rungs = [ladder.rung(composer.compose, name, args.shrink, args.shrink_tokens, common) for name in args.scales]
        print(ladder.plan(rungs, args.shrink).markdown(padded=True))
        seeds = [base.seed] if args.seeds is None else args.seeds
        machine = composer.machine()
        climbed = ladder.Ladder(rungs, folder, args.shrink, composer.compose, machine, seeds, args.guess)
        complete = args.dry_run or climbed.run()
    except (SweepError, ConfigError, AnalysisError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if (folder / "table.md").is_file():
        print(f"\n{(folder / 'table.md').read_text(encoding='utf-8')}\n{folder / 'figure.png'}")
    if not complete:
        print("the ladder is not complete; the same command continues it", file=sys.stderr)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(command_line.run(main, "interrupted: the same command continues the ladder"))
