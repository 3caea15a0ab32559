#!/usr/bin/env python
"""Scores the answers of pred.py as the paper does: pred/MODEL/result.json, with standard errors in evaluation.json.

    cd eval/longbench
    python eval.py --model fox-pro-760m-longcrawl64-48b
    python eval.py --model fox-pro-760m-longcrawl64-48b --e         # LongBench-E, in pred_e

The paper's code keeps only the first line of every answer. LongBench does so only for TREC, TriviaQA and SAMSum.
"""

import sys

from forgetting_transformer import command_line


def main() -> None:
    parser = command_line.make_parser(__doc__)
    parser.add_argument("--model", type=command_line.name, required=True, help="as in pred.py")
    parser.add_argument("--e", action="store_true", help="LongBench-E")
    args = parser.parse_args()

    from forgetting_transformer.evaluation import longbench

    folder = longbench.folder_of(args.model, args.e)
    table, missing = longbench.score_sets(folder, args.e)
    if missing:
        print(f"warning: {', '.join(missing)} not finished by pred.py and left out", file=sys.stderr)
    print(f"{folder / 'result.json'}\n\n{table.markdown()}")


if __name__ == "__main__":
    sys.exit(command_line.run(main))
