#!/usr/bin/env python
"""Answers LongBench's questions as in the paper, in pred/MODEL/<set>.jsonl for its fourteen sets.

    cd eval/longbench
    python pred.py --model fox-pro-760m-longcrawl64-48b --model_path MODEL --max_length 15500
    torchrun --nproc-per-node 4 pred.py --model fox --model_path MODEL --max_length 15500        # on four GPUs
    python eval.py --model fox-pro-760m-longcrawl64-48b && python table_longbench.py

MODEL is an export of save_model.py, a training run's output_dir, or a hub id. --e answers LongBench-E, in pred_e. The
same command continues after an interruption. The data comes from the Hugging Face hub, or from --data_dir.
run_longbench.py answers and scores by LongBench's own rules.
"""

import argparse
import logging
import sys

from forgetting_transformer import command_line, console
from forgetting_transformer.evaluation import longbench_options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=command_line.name, required=True, help="name of the folder of answers")
    longbench_options.add_options(parser)
    args = parser.parse_args()
    if args.max_length is None:
        parser.error("--max_length is required here: tokens of a prompt (the paper: 15500)")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")

    import transformers

    from forgetting_transformer.evaluation import longbench, longbench_files
    from forgetting_transformer.evaluation.models import EvaluationError, load_chosen
    from forgetting_transformer.evaluation.workers import start_workers

    transformers.utils.logging.disable_progress_bar()
    try:
        sets, folder = longbench.choose_sets(args.sets, args.e), longbench_files.folder_of(args.model, args.e)
        workers = start_workers(args.device)
        model = load_chosen(args, workers.device)
        longbench_files.answer_sets(
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
            print(f"answers to {len(sets)} sets in {folder}")
        workers.close()
    except EvaluationError as error:
        console.fail(f"error: {error}")


if __name__ == "__main__":
    sys.exit(command_line.run(main))
