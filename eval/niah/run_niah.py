#!/usr/bin/env python
"""Runs needle in a haystack: generates answers over a grid of lengths and depths, scores them and draws a heat-map.

    python eval/niah/run_niah.py --model_path output/hf/fox --haystack_dir essays --mode easy --save_dir output/niah
    python eval/niah/run_niah.py --model_path output/hf/fox --mode paper --save_dir output/niah     # and paper_easy
    torchrun --nproc-per-node 4 eval/niah/run_niah.py --model_path runs/fox --data_path data/longcrawl64 …

MODEL_PATH is an export of save_model.py, a training run's output_dir, or a hub id. The haystack is a folder of texts,
held-out documents of the model's training corpus, or Python's documentation if neither is given. The modes paper and
paper_easy are the standard and the easy mode with the paper's prompts and answers of 1,024 tokens. SAVE_DIR/MODEL/MODE
receives:

answers.*.jsonl             the answers; a later start asks only for missing ones, on any number of GPUs
scores.json                 every prediction with its scores
words.png, exact.png        heat-maps: the share of the reference answer's words in the answer, in order; whether the
                            answer is exact
"""

import argparse
import sys
from pathlib import Path

from forgetting_transformer import command_line
from forgetting_transformer.command_line import count
from forgetting_transformer.evaluation import options


def parse_args() -> argparse.Namespace:
    parser = command_line.make_parser(__doc__)
    options.add_model(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--haystack_dir",
        type=command_line.path,
        help="folder of .txt files; default Python's documentation, or in the paper's modes PaulGrahamEssays beside "
        "this script if it exists",
    )
    source.add_argument("--data_path", type=command_line.name, help="folder of a corpus with heldout.zarr")
    parser.add_argument("--save_dir", type=command_line.path, required=True, help="results go to SAVE_DIR/MODEL/MODE")
    parser.add_argument(
        "--mode", choices=["standard", "easy", "paper", "paper_easy"], default="easy", help="default %(default)s"
    )
    parser.add_argument("--question", help="the question; default: about San Francisco")
    parser.add_argument("--statement", help="how the needle begins and the query ends")
    parser.add_argument("--answer", help="the reference answer")
    parser.add_argument("--min_length", type=count, default=1000, help="shortest prompt, tokens; default %(default)s")
    parser.add_argument("--max_length", type=count, default=32000, help="longest prompt, tokens; default %(default)s")
    parser.add_argument("--num_lengths", type=count, default=11, help="evenly spaced from one to the other")
    parser.add_argument("--num_depths", type=count, default=11, help="evenly spaced from 0 to 100 %%")
    parser.add_argument("--samples", type=count, default=1, help="prompts per cell, from different parts of the text")
    parser.add_argument(
        "--max_new_tokens", type=count, help="tokens of an answer; default 50, in the paper's modes 1024"
    )
    parser.add_argument("--local_batch_size", type=count, default=1, help="prompts that a process runs together")
    args = parser.parse_args()
    in_paper = args.mode.startswith("paper")
    if args.max_new_tokens is None:
        args.max_new_tokens = 1024 if in_paper else 50
    if args.max_length < args.min_length:
        parser.error(f"--max_length={args.max_length} must not be less than --min_length={args.min_length}")
    if in_paper and (args.data_path is not None or args.samples > 1):
        parser.error(
            f"--mode={args.mode} hides one needle a cell in --haystack_dir: leave --data_path and --samples out"
        )
    return args


def main() -> None:
    args = parse_args()

    import numpy as np

    from forgetting_transformer.evaluation import needle
    from forgetting_transformer.evaluation.workers import run

    def evaluate(model, workers):
        chosen = {key: getattr(args, key) for key in ("question", "statement", "answer")}
        hidden = needle.Needle(**{key: value for key, value in chosen.items() if value is not None})
        essays, needed = Path(__file__).with_name(needle.ESSAYS), args.samples * args.max_length
        haystack = needle.find_haystack(model, args.mode, args.haystack_dir, essays, args.data_path, needed)
        lengths = np.linspace(args.min_length, args.max_length, args.num_lengths)
        depths = np.linspace(0, 1, args.num_depths) if args.num_depths > 1 else [0.5]
        folder = args.save_dir / model.name / args.mode
        records = needle.evaluate(
            model,
            haystack,
            folder,
            workers,
            lengths=[round(float(length)) for length in lengths],
            depths=[round(float(depth), 4) for depth in depths],
            samples=args.samples,
            needle=hidden,
            mode=args.mode,
            max_new_tokens=args.max_new_tokens,
            batch_size=args.local_batch_size,
            precision=args.precision,
        )
        if workers.is_first:
            words, exact = (100 * np.mean([record[score] for record in records]) for score in ("words", "exact"))
            found = f"{words:.1f} % of the answer's words found, {exact:.1f} % answered word for word"
            print(f"{len(records)} prompts: {found}; {folder}")

    run(args, evaluate)


if __name__ == "__main__":
    sys.exit(command_line.run(main))
