#!/usr/bin/env python
"""Compares the losses of models after equal training tokens and after equal training FLOPs.

    python scripts/compare.py output/fox_seed* output/transformer_seed*
    python scripts/compare.py output/sweep --out output/comparison
    python scripts/compare.py --model "FoX (Pro)" output/a output/b --model Transformer output/c output/d

Runs that differ only in their seed count as one model. --model groups runs explicitly and names the group. A folder
that is not a run stands for the runs inside it. The tables give the mean over seeds with its 95 % interval, and the
difference to the first model with Welch's interval. The figure shows losses over training. Runs may still be training.

"Equal" tokens or FLOPs are those that the shortest run has reached. A model that is cut off before its learning rate
has decayed is at a disadvantage; the table says how much of its schedule was left. FLOPs follow the architecture's
formula (docs/performance.md).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from forgetting_transformer import command_line
from forgetting_transformer.command_line import large


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.make_parser(__doc__)
    parser.add_argument(
        "runs", nargs="*", type=command_line.path, metavar="RUN", help="output_dir of a run, or a folder of them"
    )
    parser.add_argument(
        "--model",
        type=command_line.name,
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "RUN"),
        help="a model by name and runs (its seeds); may be repeated",
    )
    command_line.add_plugins(parser)
    parser.add_argument("--baseline", metavar="NAME", help="model that differences are to; default: the first")
    parser.add_argument("--loss", choices=["heldout", "train"], help="default: held-out loss where every run has one")
    parser.add_argument("--tokens", type=large, metavar="N", help="compare after N tokens, as in 2e9")
    parser.add_argument("--flops", type=large, metavar="N", help="compare after N FLOPs, as in 1e18")
    parser.add_argument(
        "--out",
        type=command_line.path,
        default=Path("output/comparison"),
        metavar="DIR",
        help="for compare.md and compare.png; default: %(default)s",
    )
    args = parser.parse_args(argv)
    if not args.runs and not args.model:
        parser.error("give output_dirs of runs, or --model NAME RUN [RUN …]")
    if any(len(model) < 2 for model in args.model):
        parser.error("--model needs a name and at least one run, as in --model FoX output/fox")
    return args


def compare(args: argparse.Namespace) -> list[Path]:
    """Prints the tables, writes them with the figure, and returns the files."""
    # Only now, so that --help is quick.
    from forgetting_transformer.analysis import AnalysisError, comparisons, outputs
    from forgetting_transformer.analysis.plots.losses import loss_of_models
    from forgetting_transformer.analysis.run_figures import conditions
    from forgetting_transformer.files import write_atomically
    from forgetting_transformer.training.config.continuing import decisive

    models = [comparisons.named_model(name, [Path(run) for run in runs]) for name, *runs in args.model]
    models += comparisons.group(comparisons.find_runs(args.runs), decisive)
    names = [model.name for model in models]
    baseline = args.baseline or names[0]
    if len(set(names)) < len(names) or baseline not in names:
        raise AnalysisError(f"models {names}: names must differ, and --baseline {baseline!r} be one of them")
    heldout = None if args.loss is None else args.loss == "heldout"
    tokens = comparisons.at_equal_tokens(models, args.tokens, heldout)
    flops = comparisons.at_equal_flops(models, args.flops, heldout)
    parts = []
    for comparison in [tokens, flops] if flops else [tokens]:
        notes = [f"- {note}" for note in comparisons.warnings(comparison, baseline)]
        parts.append("\n".join([comparisons.table(comparison, baseline), "", *notes]).rstrip())
    runs = [f"- {model.name}: {', '.join(str(run.output_dir) for run in model.runs)}" for model in models]
    text = "\n\n".join([*parts, "\n".join(["Runs:", "", *runs])])
    print(text)
    with outputs.writing(args.out, "scripts/compare.py") as new:
        write_atomically(new / "compare.md", f"{text}\n", durable=False)
        made_with = conditions([run for model in models for run in model.runs])
        loss_of_models(models, new / "compare.png", tokens.amount, flops.amount if flops else None, made_with)
    return [args.out / "compare.md", args.out / "compare.png"]


def main(argv: Sequence[str] | None = None) -> None:
    print("", *compare(parse_args(argv)), sep="\n")


if __name__ == "__main__":
    sys.exit(command_line.run(main))
