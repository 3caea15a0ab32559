#!/usr/bin/env python
"""Answers the fourteen English sets of LongBench that the paper uses, and scores them (pip install -e ".[eval]").

    python eval/longbench/run_longbench.py --model_path output/hf/fox --max_length 15500 --save_dir output/longbench
    torchrun --nproc-per-node 4 eval/longbench/run_longbench.py --model_path runs/fox --save_dir output/longbench
    python eval/longbench/table_longbench.py output/longbench/*                          # Markdown and LaTeX

MODEL_PATH is an export of save_model.py, a training run's output_dir, or a hub id. SAVE_DIR/MODEL receives the answers
in pred/<set>.*.jsonl and the scores in results.json. The same command computes only missing answers, on any number of
GPUs. The data comes from the Hugging Face hub, or from --data_dir.
"""

import argparse
import logging
import sys

from forgetting_transformer import command_line, elastic


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model_path", type=command_line.name, required=True, help="exported folder, output_dir of a run, or hub id"
    )
    parser.add_argument(
        "--model", type=command_line.name, help="name of the results' folder; default the last part of --model_path"
    )
    parser.add_argument("--step", type=int, help="training tokens of a run's checkpoint; default the newest valid one")
    parser.add_argument("--tokenizer", type=command_line.name, help="folder or hub id, for a model without a tokenizer")
    parser.add_argument("--save_dir", type=command_line.path, required=True, help="results go to SAVE_DIR/MODEL")
    parser.add_argument(
        "--data_dir",
        type=command_line.path,
        help="LongBench's data.zip, or a folder with it or with <set>.jsonl; default the hub",
    )
    parser.add_argument("--sets", help="separated by commas, or `all` for all sixteen; default: the paper's")
    parser.add_argument(
        "--max_length",
        type=int,
        help="tokens of a prompt (the paper: 15500 for models trained at 16384); longer ones lose their middle. "
        "Default: the training length minus the tokens of the answer",
    )
    parser.add_argument("--limit", type=int, help="examples of each set, for a quick test; default: all")
    parser.add_argument("--precision", default="auto", choices=["auto", "bf16", "fp32"])
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: a GPU if available")
    args = parser.parse_args()
    for flag, least in (("max_length", 4), ("limit", 1)):
        value = getattr(args, flag)
        if value is not None and value < least:
            parser.error(f"--{flag}={value} must be at least {least}")
    return args


def main() -> None:
    args = parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")

    import transformers

    from forgetting_transformer.analysis import tables
    from forgetting_transformer.evaluation import longbench
    from forgetting_transformer.evaluation.models import EvaluationError, load_chosen
    from forgetting_transformer.evaluation.workers import start_workers

    transformers.utils.logging.disable_progress_bar()
    try:
        sets = longbench.choose_sets(args.sets)
        workers = start_workers(args.device)
        model = load_chosen(args, workers.device)
        folder = args.save_dir / model.name
        scores = longbench.evaluate(
            model,
            folder,
            workers,
            sets=sets,
            data=args.data_dir,
            max_length=args.max_length,
            precision=args.precision,
            limit=args.limit,
        )
        if workers.is_first:
            print(f"{folder}/results.json\n\n{tables.markdown(*longbench.table({model.name: scores}))}", end="")
        workers.close()
    except EvaluationError as error:
        elastic.end_with(f"error: {error}")


if __name__ == "__main__":
    sys.exit(command_line.run(main))
