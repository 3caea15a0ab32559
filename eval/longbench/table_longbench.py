#!/usr/bin/env python
"""Prints the paper's Table 2 for any number of models: best bold, second best underlined.

    cd eval/longbench
    python table_longbench.py                              # all models in ./pred, after pred.py and eval.py
    python table_longbench.py "FoX (Pro)=pred/fox" pred/llama --out ../../output/tables/longbench

Several RESULTs with one NAME are seeds of one model: the table has their mean and its 95 % interval.
The table is printed in Markdown and LaTeX (package booktabs). With --out, the script writes OUT/table.md
and OUT/table.tex.
"""

import sys
from pathlib import Path

from forgetting_transformer import command_line


def main() -> None:
    parser = command_line.make_parser(__doc__)
    parser.add_argument(
        "results",
        type=command_line.name,
        nargs="*",
        metavar="RESULT",
        help="[NAME=]FOLDER with result.json; default all models in ./pred",
    )
    parser.add_argument("--out", type=command_line.path, metavar="DIR", help="folder to write to; made if needed")
    args = parser.parse_args()

    from forgetting_transformer.analysis import known_models
    from forgetting_transformer.analysis.evaluations import read_named
    from forgetting_transformer.analysis.published import longbench_table, write_tables

    results = args.results or known_models.results_in(Path("pred"), "result.json")
    write_tables(*longbench_table(read_named(results)), args.out)


if __name__ == "__main__":
    sys.exit(command_line.run(main))
