#!/usr/bin/env python
"""Answers the prompts of prompt.py, one text file each in pred/EXP/MODEL. The same command continues.

    cd eval/niah
    python pred.py --exp max_len_32k_easy --model fox-pro-760m-longcrawl64-48b --model_path MODEL --device_id 0
    torchrun --nproc-per-node 4 pred.py --exp max_len_32k_easy --model fox --model_path MODEL      # on four GPUs

MODEL is an export of save_model.py, a training run's output_dir, or a hub id. Answers are decoded greedily and have
1,024 tokens, or fewer if the model ends its text.
"""

import sys
from pathlib import Path

from forgetting_transformer import command_line
from forgetting_transformer.command_line import count
from forgetting_transformer.evaluation import options


def main() -> None:
    parser = command_line.make_parser(__doc__)
    parser.add_argument("--exp", type=command_line.name, required=True, help="folder of prompts, as in prompt.py")
    options.add_model(parser, name_required=True)
    parser.add_argument("--max_new_tokens", type=count, default=1024, help="tokens of an answer; default %(default)s")
    args = parser.parse_args()

    from forgetting_transformer.evaluation import needle
    from forgetting_transformer.evaluation.models import folder_name
    from forgetting_transformer.evaluation.workers import run

    def evaluate(model, workers):
        config, exp = needle.ConfigFile(Path(__file__).with_name("config-pred.yaml")), args.exp
        prompts = Path(config["prompt_dir"]) / folder_name("--exp", exp)
        folder = Path(config["save_dir"]) / exp / model.name
        limits = {"max_new_tokens": args.max_new_tokens, "precision": args.precision}
        answered = needle.answer_prompts(model, prompts, folder, workers, **limits)
        if workers.is_first:
            print(f"answers to {answered} prompts in {folder}")

    run(args, evaluate)


if __name__ == "__main__":
    sys.exit(command_line.run(main))
