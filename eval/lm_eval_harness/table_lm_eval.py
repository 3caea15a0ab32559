#!/usr/bin/env python
"""Prints the paper's Table 1 for any number of models: best bold, second best underlined.

    python eval/lm_eval_harness/table_lm_eval.py output/lm_eval/fox output/lm_eval/llama --out tables/lm_eval
    python eval/lm_eval_harness/table_lm_eval.py "FoX (Pro)=output/lm_eval/fox" …
    python eval/lm_eval_harness/table_lm_eval.py --result_dir output/lm_eval        # all models in it

Several RESULTs with one NAME are seeds of one model: the table has their mean and its 95 % interval.
The table is printed in Markdown and LaTeX (package booktabs). With --out, the script writes OUT/table.md
and OUT/table.tex.
"""

import sys

from forgetting_transformer import command_line


def main() -> None:
    parser = command_line.make_parser(__doc__)
    parser.add_argument(
        "results", type=command_line.name, nargs="*", metavar="RESULT", help="[NAME=]FOLDER with results.json"
    )
    parser.add_argument("--result_dir", type=command_line.path, help="all models whose results are in this folder")
    parser.add_argument("--out", type=command_line.path, metavar="DIR", help="folder to write to; made if needed")
    args = parser.parse_args()
    if not args.results and args.result_dir is None:
        parser.error("give RESULT folders, or --result_dir")

    from forgetting_transformer.analysis import known_models
    from forgetting_transformer.analysis.evaluations import read_named
    from forgetting_transformer.analysis.published import lm_eval_table, write_tables

    found = known_models.results_in(args.result_dir, "results.json") if args.result_dir else []
    write_tables(*lm_eval_table(read_named([*args.results, *found])), args.out)


if __name__ == "__main__":
    sys.exit(command_line.run(main))
