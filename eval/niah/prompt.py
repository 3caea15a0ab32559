#!/usr/bin/env python
"""Writes the prompts of the paper's needle in a haystack: one file in prompts/EXP for every length and depth.

    cd eval/niah
    python prompt.py --config config-prompt-easy.yaml --exp max_len_32k_easy
    python prompt.py --config config-prompt-standard.yaml --exp max_len_32k_standard

This is the first of four steps: prompt.py, pred.py, eval.py, plot_niah.py. run_niah.py does all and needs no judge.
"""

import logging
import sys
from pathlib import Path

from forgetting_transformer import command_line


def main() -> None:
    parser = command_line.make_parser(__doc__)
    parser.add_argument(
        "--config",
        type=command_line.path,
        required=True,
        help="YAML file with all other settings, here or beside this script",
    )
    parser.add_argument("--exp", type=command_line.name, required=True, help="name of the folder of prompts")
    parser.add_argument("--haystack_dir", type=command_line.path, help="folder of .txt files, instead of the config's")
    parser.add_argument("--tokenizer", type=command_line.name, help="folder or hub id, instead of the config's")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")

    from forgetting_transformer.evaluation import needle

    beside = Path(__file__).with_name(args.config.name)
    file = beside if not args.config.exists() and beside.exists() else args.config
    folder, count = needle.write_prompts(file, args.exp, args.tokenizer, args.haystack_dir)
    print(f"{count} prompts in {folder}")


if __name__ == "__main__":
    sys.exit(command_line.run(main))
