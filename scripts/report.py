#!/usr/bin/env python
"""Writes one self-contained HTML page about runs and their evaluations.

    python scripts/report.py runs/fox runs/llama
    python scripts/report.py runs/fox runs/llama --results output/per_token_loss output/niah --out output/my_page

RUN_DIR is the output_dir of a run, which may still be training. The page has a table of the runs, their losses against
training tokens and against position, and their configurations side by side with marked differences. For the folders in
--results it shows the evaluations: loss at every position with its slopes, needle in a haystack,
lm-evaluation-harness, LongBench.
"""

import sys
from pathlib import Path

from forgetting_transformer import command_line


def main() -> None:
    parser = command_line.make_parser(__doc__)
    parser.add_argument("run_dirs", nargs="*", type=command_line.path, metavar="RUN_DIR", help="output_dir of a run")
    parser.add_argument(
        "--results", nargs="+", type=command_line.path, default=[], metavar="DIR", help="results of evaluations"
    )
    command_line.add_plugins(parser)
    parser.add_argument(
        "--out",
        type=command_line.path,
        default=Path("output/report"),
        metavar="DIR",
        help="for report.html; default: %(default)s",
    )
    args = parser.parse_args()
    if args.out.suffix == ".html":
        parser.error(f"--out={args.out}: give a folder, in which the page is report.html")

    from forgetting_transformer.analysis.page import write_report

    write_report(args.run_dirs, args.results, args.out)
    print(args.out / "report.html")


if __name__ == "__main__":
    sys.exit(command_line.run(main))
