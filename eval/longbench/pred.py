#!/usr/bin/env python
"""Answers LongBench's questions as in the paper, in pred/MODEL/<set>.jsonl for its fourteen sets.

    cd eval/longbench
    python pred.py --model fox-pro-760m-longcrawl64-48b --model_path MODEL --max_length 15500
    torchrun --nproc-per-node 4 pred.py --model fox --model_path MODEL --max_length 15500        # on four GPUs
    python eval.py --model fox-pro-760m-longcrawl64-48b && python table_longbench.py

MODEL is an export of save_model.py, a training run's output_dir, or a hub id. --e answers LongBench-E, in pred_e. The
same command continues after an interruption. The data comes from the Hugging Face hub, or from --data_dir.
"""

import sys

from forgetting_transformer import command_line
from forgetting_transformer.command_line import at_least, count
from forgetting_transformer.evaluation import options


def main() -> None:
    parser = command_line.make_parser(__doc__)
    options.add_model(parser, name_required=True)
    parser.add_argument("--sets", help="separated by commas; default: the paper's")
    parser.add_argument(
        "--data_dir",
        type=command_line.path,
        help="LongBench's data.zip, or a folder with it or with <set>.jsonl; default the hub",
    )
    parser.add_argument("--limit", type=count, help="examples of each set, for a quick test; default: all")
    parser.add_argument(
        "--max_length", type=at_least(4), required=True, help="tokens of a prompt (the paper: 15500 for 16384)"
    )
    parser.add_argument("--e", action="store_true", help="LongBench-E: scores by ranges of lengths")
    args = parser.parse_args()

    from forgetting_transformer.evaluation import longbench
    from forgetting_transformer.evaluation.workers import run

    def evaluate(model, workers):
        sets, folder = longbench.choose_sets(args.sets, args.e), longbench.folder_of(args.model, args.e)
        longbench.answer_sets(
            model,
            folder,
            workers,
            sets=sets,
            data=args.data_dir,
            max_length=args.max_length,
            even=args.e,
            precision=args.precision,
            limit=args.limit,
        )
        if workers.is_first:
            print(f"answers to {len(sets)} set{'s' * (len(sets) != 1)} in {folder}")

    run(args, evaluate)


if __name__ == "__main__":
    sys.exit(command_line.run(main))
