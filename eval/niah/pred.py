#!/usr/bin/env python
"""Answers the prompts of prompt.py, one text file each in pred/EXP/MODEL. The same command continues.

    cd eval/niah
    python pred.py --exp max_len_32k_easy --model fox-pro-760m-longcrawl64-48b --model_path MODEL --device_id 0
    torchrun --nproc-per-node 4 pred.py --exp max_len_32k_easy --model fox --model_path MODEL      # on four GPUs

MODEL is an export of save_model.py, a training run's output_dir, or a hub id. Answers are decoded greedily and have
1,024 tokens, or fewer if the model ends its text.
"""

import argparse
import logging
import sys
from pathlib import Path

from forgetting_transformer import command_line, console
from forgetting_transformer.command_line import at_least, count, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exp", type=command_line.name, required=True, help="folder of prompts, as in prompt.py")
    parser.add_argument("--model", type=command_line.name, required=True, help="name of the folder of answers")
    parser.add_argument(
        "--model_path", type=command_line.name, required=True, help="exported folder, output_dir of a run, or hub id"
    )
    command_line.add_plugins(parser)
    parser.add_argument("--step", type=step, help="training tokens of a run's checkpoint; default the newest valid one")
    parser.add_argument("--tokenizer", type=command_line.name, help="folder or hub id, for a model without a tokenizer")
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--device_id", type=at_least(0), help="number of the GPU")
    device.add_argument("--device", help="cpu, cuda or cuda:N; default: a GPU if available")
    parser.add_argument("--max_new_tokens", type=count, default=1024, help="tokens of an answer; default %(default)s")
    parser.add_argument("--precision", default="auto", choices=["auto", "bf16", "fp32"])
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")

    import transformers

    from forgetting_transformer.evaluation import niah_files, official
    from forgetting_transformer.evaluation.models import EvaluationError, load_chosen
    from forgetting_transformer.evaluation.workers import start_workers

    transformers.utils.logging.disable_progress_bar()
    config = Path(__file__).with_name("config-pred.yaml")
    try:
        folders = niah_files.read_yaml(config)
        prompts = Path(folders["prompt_dir"]) / niah_files.one_folder("--exp", args.exp)
        workers = start_workers(official.device_of(args.device, args.device_id))
        model = load_chosen(args, workers.device)
        folder = Path(folders["save_dir"]) / args.exp / model.name
        answered = niah_files.answer_prompts(
            model, prompts, folder, workers, max_new_tokens=args.max_new_tokens, precision=args.precision
        )
        if workers.is_first:
            print(f"answers to {answered} prompts in {folder}")
        workers.close()
    except EvaluationError as error:
        console.fail(f"error: {error}")
    except KeyError as error:
        sys.exit(f"error: {config} lacks the key {error.args[0]}")


if __name__ == "__main__":
    sys.exit(command_line.run(main))
