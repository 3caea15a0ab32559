#!/usr/bin/env python
"""Scores the answers of pred.py: pred/MODEL/result.json as the paper does, result_benchmark.json by LongBench's rules.

    cd eval/longbench
    python eval.py --model fox-pro-760m-longcrawl64-48b
    python eval.py --model fox-pro-760m-longcrawl64-48b --e         # LongBench-E, in pred_e

The paper's code keeps only the first line of every answer. LongBench does so only for TREC, TriviaQA and SAMSum.
"""

import argparse
import dataclasses
import sys

from forgetting_transformer import command_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=command_line.name, required=True, help="as in pred.py")
    parser.add_argument("--e", action="store_true", help="LongBench-E")
    args = parser.parse_args()

    from forgetting_transformer.analysis import tables
    from forgetting_transformer.evaluation import longbench, longbench_files
    from forgetting_transformer.evaluation.models import EvaluationError

    try:
        folder = longbench_files.folder_of(args.model, args.e)
        scores, missing = longbench_files.score_sets(folder, args.e)
    except EvaluationError as error:
        sys.exit(f"error: {error}")
    if missing:
        print(f"warning: {', '.join(missing)} not finished by pred.py and left out", file=sys.stderr)
    for file, found in scores.items():
        rows = {file: found}
        if args.e:
            rows = {label: {name: of[label] for name, of in found.items()} for label in longbench.RANGES}
        _, columns = longbench.table(rows)
        # No range of lengths is better than another.
        shown = [dataclasses.replace(column, better=None) for column in columns if column.key in found]
        print(f"{folder / file}\n\n{tables.markdown(rows, shown, 'Words' if args.e else 'Scores')}")


if __name__ == "__main__":
    sys.exit(command_line.run(main))
