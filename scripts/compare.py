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

Where all runs have losses on other held-out sets (eval_sets), there are tables and a figure for each of these too.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forgetting_transformer import command_line
from forgetting_transformer.command_line import large

if TYPE_CHECKING:
    from forgetting_transformer.analysis import comparisons


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    # Only now, so that --help is quick.
    from forgetting_transformer.analysis import AnalysisError, comparisons, outputs
    from forgetting_transformer.analysis.conditions import conditions
    from forgetting_transformer.analysis.plots.sweeps import loss_against_tokens_and_flops
    from forgetting_transformer.files import write_atomically
    from forgetting_transformer.training.continuing import decisive

    command = "scripts/compare.py"
    try:
        models = [comparisons.named_model(name, [Path(run) for run in runs]) for name, *runs in args.model]
        models += comparisons.group(comparisons.find_runs(args.runs), decisive)
        names = [model.name for model in models]
        baseline = args.baseline or names[0]
        if len(set(names)) < len(names) or baseline not in names:
            raise AnalysisError(f"models {names}: names must differ, and --baseline {baseline!r} be one of them")
        heldout = None if args.loss is None else args.loss == "heldout"
        compared = [(models, points_of(models, args, heldout))]
        for eval_set in comparisons.common_sets(models) if heldout is not False else ():
            on_set = [model.on(eval_set) for model in models]
            try:
                compared.append((on_set, points_of(on_set, args, True)))
            except AnalysisError as error:
                print(f"not compared on {eval_set}: {error}", file=sys.stderr)
        figures = [f"compare{'_' * bool(of[0].eval_set)}{of[0].eval_set}.png" for of, _ in compared]
        outputs.check(args.out, command, ("compare.md", *figures), is_old_comparison)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    parts = []
    for members, points in compared:
        for comparison in points:
            notes = comparisons.warnings(comparison, members, baseline)
            table = comparisons.table(comparison, members, baseline)
            parts.append("\n".join([table, "", *(f"- {note}" for note in notes)]).rstrip())
    parts.append(
        "\n".join(["Runs:", "", *(f"- {m.name}: {', '.join(str(r.output_dir) for r in m.runs)}" for m in models)])
    )
    text = "\n\n".join(parts)
    print(text)
    try:
        with outputs.writing(args.out, command, is_old_comparison) as new:
            write_atomically(new / "compare.md", f"{text}\n", durable=False)
            for file, (members, (tokens, *flops)) in zip(figures, compared, strict=True):
                made_with = conditions([run for model in members for run in model.runs])
                at_flops = flops[0].amount if flops else None
                loss_against_tokens_and_flops(members, new / file, tokens.amount, at_flops, made_with)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("", *(args.out / file for file in ("compare.md", *figures)), sep="\n")
    return 0


def points_of(
    models: Sequence["comparisons.Model"], args: argparse.Namespace, heldout: bool | None
) -> list["comparisons.Comparison"]:
    """The models at equal tokens and, where all have recorded theirs, at equal FLOPs."""
    from forgetting_transformer.analysis import comparisons

    at_flops = comparisons.at_equal_flops(models, args.flops, heldout)
    return [comparisons.at_equal_tokens(models, args.tokens, heldout), *([at_flops] if at_flops else [])]


def is_old_comparison(path: Path) -> bool:
    """Whether the file lies beside a comparison of an earlier version, which ended with a list of runs."""
    page = path.with_name("compare.md")
    return page.is_file() and "\nRuns:\n\n- " in page.read_text(encoding="utf-8", errors="replace")


if __name__ == "__main__":
    sys.exit(command_line.run(main))
