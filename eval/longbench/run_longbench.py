#!/usr/bin/env python
"""Answers the fourteen English sets of LongBench that the paper uses, and scores them (pip install -e ".[eval]").

    python eval/longbench/run_longbench.py --model_path output/hf/fox --max_length 15500 --save_dir output/longbench
    torchrun --nproc-per-node 4 eval/longbench/run_longbench.py --model_path runs/fox --save_dir output/longbench
    python eval/longbench/table_longbench.py output/longbench/*                          # Markdown and LaTeX

MODEL_PATH is an export of save_model.py, a training run's output_dir, or a hub id. SAVE_DIR/MODEL receives the answers
in pred/<set>.*.jsonl and the scores in results.json. The same command computes only missing answers, on any number of
GPUs. --e selects LongBench-E, in SAVE_DIR/MODEL_e. The default of --max_length is the training length minus the tokens
of the answer. The data comes from the Hugging Face hub, or from --data_dir.
"""

import argparse
import logging
import sys

from forgetting_transformer import command_line, console
from forgetting_transformer.evaluation import longbench_options


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=command_line.name, help="name of the results' folder; default the last part of --model_path"
    )
    parser.add_argument("--save_dir", type=command_line.path, required=True, help="results go to SAVE_DIR/MODEL")
    longbench_options.add_options(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")

    import transformers

    from forgetting_transformer.analysis import AnalysisError
    from forgetting_transformer.evaluation import longbench
    from forgetting_transformer.evaluation.models import EvaluationError, load_chosen
    from forgetting_transformer.evaluation.workers import start_workers

    transformers.utils.logging.disable_progress_bar()
    try:
        sets = longbench.choose_sets(args.sets, args.e)
        workers = start_workers(args.device)
        model = load_chosen(args, workers.device)
        folder = args.save_dir / f"{model.name}{'_e' * args.e}"
        longbench.evaluate(
            model,
            folder,
            workers,
            sets=sets,
            data=args.data_dir,
            max_length=args.max_length,
            precision=args.precision,
            limit=args.limit,
            even=args.e,
        )
        if workers.is_first:
            table = (folder / "table.md").read_text(encoding="utf-8")
            print(f"{folder}/results.json\n\n{table}", end="")
        workers.close()
    except (AnalysisError, EvaluationError) as error:
        console.fail(f"error: {error}")


if __name__ == "__main__":
    sys.exit(command_line.run(main))
