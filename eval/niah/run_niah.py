#!/usr/bin/env python
"""Runs needle in a haystack: generates answers over a grid of lengths and depths, scores them and draws a heat-map.

    python eval/niah/run_niah.py --model_path output/hf/fox --haystack_dir essays --mode easy --save_dir output/niah
    python eval/niah/run_niah.py --model_path output/hf/fox --mode paper --save_dir output/niah     # and paper_easy
    torchrun --nproc-per-node 4 eval/niah/run_niah.py --model_path runs/fox --data_path data/longcrawl64 …

MODEL_PATH is an export of save_model.py, a training run's output_dir, or a hub id. The haystack is a folder of texts,
held-out documents of the model's training corpus, or Python's documentation if neither is given. The modes paper and
paper_easy are the standard and the easy mode with the paper's prompts and answers of 1,024 tokens. SAVE_DIR/MODEL/MODE
receives:

predictions/*.json          one file per prompt; a later start computes only missing ones, on any number of GPUs
scores.json                 every prediction with its scores
words.png, exact.png        heat-maps: the share of the reference answer's words in the answer, in order; whether the
                            answer is exact

judge_niah.py lets a language model rate the answers instead.
"""

import argparse
import logging
import sys
from pathlib import Path

from forgetting_transformer import command_line, console
from forgetting_transformer.command_line import count, step


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model_path", type=command_line.name, required=True, help="exported folder, output_dir of a run, or hub id"
    )
    command_line.add_plugins(parser)
    parser.add_argument(
        "--model", type=command_line.name, help="name of the results' folder; default the last part of --model_path"
    )
    parser.add_argument("--step", type=step, help="training tokens of a run's checkpoint; default the newest valid one")
    parser.add_argument("--tokenizer", type=command_line.name, help="folder or hub id, for a model without a tokenizer")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--haystack_dir",
        type=command_line.path,
        help="folder of texts (.txt, .md, .py; in the paper's modes .txt). Default: Python's documentation, or in the "
        "paper's modes PaulGrahamEssays beside this script if it exists",
    )
    source.add_argument(
        "--data_path", type=command_line.name, help="folder of a corpus with heldout.zarr, or the folder that holds it"
    )
    parser.add_argument(
        "--dataset", type=command_line.name, default="longcrawl64", help="the corpus, if --data_path holds several"
    )
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
    parser.add_argument("--train_len", type=count, help="sequence length of training, where the model does not say")
    parser.add_argument("--precision", default="auto", choices=["auto", "bf16", "fp32"])
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: a GPU if available")
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
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")

    import transformers

    from forgetting_transformer.analysis import AnalysisError
    from forgetting_transformer.data import DataError
    from forgetting_transformer.evaluation.models import EvaluationError

    transformers.utils.logging.disable_progress_bar()
    try:
        run(args)
    except (AnalysisError, EvaluationError, DataError) as error:
        console.fail(f"error: {error}")


def run(args: argparse.Namespace) -> None:
    import numpy as np

    from forgetting_transformer.evaluation import niah, niah_paper
    from forgetting_transformer.evaluation.models import load_chosen
    from forgetting_transformer.evaluation.workers import start_workers

    workers = start_workers(args.device)
    model = load_chosen(args, workers.device, train_length=args.train_len)
    chosen = {key: getattr(args, key) for key in ("question", "statement", "answer")}
    needle = niah.Needle(**{key: value for key, value in chosen.items() if value is not None})
    lengths = [round(float(x)) for x in np.linspace(args.min_length, args.max_length, args.num_lengths)]
    depths = [round(float(x), 4) for x in np.linspace(0, 1, args.num_depths)] if args.num_depths > 1 else [0.5]
    if args.mode in niah_paper.MODES:
        text = niah_paper.find_text(args.haystack_dir, Path(__file__).with_name(niah_paper.ESSAYS))
        haystack = niah_paper.Essays(model.require_tokenizer(), text, bos=model.bos_token_id is not None)
    elif args.haystack_dir is not None:
        haystack = niah.Haystack.from_folder(model, args.haystack_dir)
    elif args.data_path is None:
        haystack = niah.Haystack.from_text(model, niah_paper.free_text())
    else:
        haystack = niah.Haystack.from_heldout(model, args.data_path, args.dataset, args.samples * args.max_length)
    folder = args.save_dir / model.name / args.mode
    records = niah.evaluate(
        model,
        haystack,
        niah.grid(lengths, depths, args.samples),
        folder,
        workers,
        needle=needle,
        mode=args.mode,
        max_new_tokens=args.max_new_tokens,
        batch_size=args.local_batch_size,
        precision=args.precision,
    )
    if workers.is_first:
        grid = {"lengths": lengths, "depths": depths, "train_length": model.train_length}
        means = niah.write_results(folder, {"model": model.name, "mode": args.mode, **grid, "records": records})
        words, exact = (100 * mean for mean in means)
        found = f"{words:.1f} % of the answer's words found, {exact:.1f} % answered word for word"
        print(f"{len(records)} prompts: {found}; {folder}")
    workers.close()


if __name__ == "__main__":
    sys.exit(command_line.run(main))
