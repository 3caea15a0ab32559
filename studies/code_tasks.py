#!/usr/bin/env python
"""Makes downstream tasks of the held-out texts of a corpus of code, for a machine without a network.

    python -m studies.code_tasks --data_path data/python_code --out output/tasks
    python eval/longbench/run_longbench.py --model_path runs/fox --data_dir output/tasks --sets lcc \\
        --save_dir output/longbench
    python eval/lm_eval_harness/run_lm_eval.py --model_path runs/fox --include_path output/tasks --tasks next_line \\
        --save_dir output/lm_eval

OUT receives lcc.jsonl (LongBench's format: write the next line) and next_line.yaml with next_line.jsonl (lm_eval's:
which of four lines comes next?). It may be moved. The same corpus gives the same questions. Scores of models with one
corpus are comparable with each other, and not with those of LongBench's own set.

Two kinds of folders are refused: one that has such files of others, as LongBench's own lcc.jsonl, and one with other
questions, because answers to them may be there.
"""

import argparse
import sys
from collections.abc import Sequence

from forgetting_transformer import command_line
from forgetting_transformer.command_line import count


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data_path", type=command_line.name, required=True, help="folder of a corpus with heldout.zarr and tokenizer"
    )
    parser.add_argument("--questions", type=count, default=500, help="of each task, at most; default %(default)s")
    parser.add_argument("--out", type=command_line.path, required=True, metavar="DIR")
    args = parser.parse_args(argv)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    from forgetting_transformer.analysis import AnalysisError
    from forgetting_transformer.data import DataError
    from forgetting_transformer.evaluation.models import EvaluationError
    from studies.engine.code_tasks import make_tasks

    try:
        count = make_tasks(args.data_path, args.out, args.questions)
    except (AnalysisError, EvaluationError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{count} questions in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run(main))
