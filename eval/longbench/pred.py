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

from forgetting_transformer import command_line, elastic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=command_line.name, required=True, help="name of the folder of answers")
    parser.add_argument(
        "--model_path", type=command_line.name, required=True, help="exported folder, output_dir of a run, or hub id"
    )
    parser.add_argument(
        "--max_length",
        type=int,
        required=True,
        help="tokens of a prompt (the paper: 15500); longer ones lose their middle",
    )
    parser.add_argument("--e", action="store_true", help="LongBench-E")
    parser.add_argument("--sets", help="with commas between them, or `all`; default the paper's")
    parser.add_argument(
        "--data_dir",
        type=command_line.path,
        help="LongBench's data.zip, or a folder with it or with <set>.jsonl; default the hub",
    )
    parser.add_argument("--step", type=int, help="training tokens of a run's checkpoint; default the newest valid one")
    parser.add_argument("--tokenizer", type=command_line.name, help="folder or hub id, for a model without a tokenizer")
    parser.add_argument("--limit", type=int, help="examples of each set, for a quick test; default: all")
    parser.add_argument("--precision", default="auto", choices=["auto", "bf16", "fp32"])
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: a GPU if available")
    args = parser.parse_args()
    for flag, least in (("max_length", 4), ("limit", 1)):
        value = getattr(args, flag)
        if value is not None and value < least:
            parser.error(f"--{flag}={value} must be at least {least}")
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
        elastic.end_with(f"error: {error}")


if __name__ == "__main__":
    sys.exit(command_line.run(main))
