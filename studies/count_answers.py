#!/usr/bin/env python
"""Counts what the models of a study write for the next line of code.

    python studies/count_answers.py output/three_seeds_100m --out studies/three_seeds_100m/next_line_answers.json

FOLDER is that of studies/study.sh, after its stages downstream and collect. FILE has for each run how many `answers` it
gave, how many have no line of code that LongBench would score (`no_code`), and in how many that line is the right one
(`right`; blanks at both ends do not count).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from forgetting_transformer import command_line
from forgetting_transformer.evaluation.longbench import code_line
from forgetting_transformer.files import write_json

COMMAND = "python studies/count_answers.py FOLDER --out FILE"


def is_earlier(file: Path) -> bool:
    """Whether this script wrote the file."""
    try:
        return json.loads(file.read_text("utf-8"))["environment"]["command"] == COMMAND
    except (ValueError, LookupError, TypeError):
        return False


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=command_line.path, metavar="FOLDER")
    parser.add_argument(
        "--out", type=command_line.path, required=True, metavar="FILE", help="an earlier one is replaced"
    )
    args = parser.parse_args(argv)
    if args.out.exists() and not is_earlier(args.out):
        parser.error(f"--out={args.out} is there and not of this script; move it, or choose another name")
    files = sorted(args.folder.glob("downstream/next_line/*/pred/lcc.*.jsonl"))
    report = args.folder / "report" / "study.json"
    if not files or not report.is_file():
        parser.error(f"{args.folder} lacks predictions or a report; run the stages downstream and collect of study.sh")
    runs: dict[str, dict[str, int]] = {}
    for file in files:
        counts = runs.setdefault(file.parents[1].name, {"answers": 0, "no_code": 0, "right": 0})
        for record in map(json.loads, file.read_text("utf-8").splitlines()):
            line = code_line(record["pred"])
            counts["answers"] += 1
            counts["no_code"] += line is None
            counts["right"] += line is not None and line.strip() in {answer.strip() for answer in record["answers"]}
    study = json.loads(report.read_text("utf-8"))
    place = {"command": COMMAND, **study["environment"]}
    corpus = study["corpus"]["fingerprint"]
    write_json(args.out, {"environment": place, "started": study["started"], "corpus": corpus, "runs": runs})
    print(f"{len(runs)} runs in {args.out}")


if __name__ == "__main__":
    main()
