#!/usr/bin/env python
"""Continues a prompt with a trained model.

    python scripts/generate.py output/demo --prompt "import os"        # the newest checkpoint of a run
    python scripts/generate.py output/hf/demo --temperature 0.8 --top_p 0.95 --samples 3
    python scripts/generate.py FOLDER --prompt - < text.txt            # the prompt from standard input

Without --temperature, each token is the most likely one. A single continuation is printed while it is generated.
Several continuations are generated together and printed one after the other.
"""

import argparse
import sys

from forgetting_transformer import command_line
from forgetting_transformer.command_line import at_least, count, number
from forgetting_transformer.ranges import POSITIVE, Range


def main() -> None:
    arguments = parse()

    import torch
    import transformers
    from transformers import TextStreamer

    from forgetting_transformer.data import model_tokenizer
    from forgetting_transformer.evaluation.models import (
        EvaluationError,
        load_model,
        pick_device,
        precision_context,
    )

    transformers.utils.logging.disable_progress_bar()
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    try:
        found = load_model(
            arguments.model, step=arguments.step, tokenizer=arguments.tokenizer, device=pick_device(arguments.device)
        )
        tokenizer = found.require_tokenizer()
    except (EvaluationError, ValueError) as error:
        sys.exit(f"error: {error}")
    ids = [] if found.bos_token_id is None else [found.bos_token_id]
    ids += model_tokenizer.encode(tokenizer, prompt)
    if not ids:
        sys.exit(f"error: {arguments.model} has no token to begin a text with; give a --prompt")
    torch.manual_seed(arguments.seed)
    input_ids, alone = torch.tensor([ids], device=found.device), arguments.samples == 1
    # top_k=0 is no limit; transformers' own default is 50.
    sampling = {"temperature": arguments.temperature, "top_p": arguments.top_p, "top_k": arguments.top_k}
    options = {"do_sample": True, **sampling} if arguments.temperature > 0 else {"do_sample": False}
    with precision_context("auto", found.device):
        texts = found.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=arguments.max_new_tokens,
            num_return_sequences=arguments.samples,
            streamer=TextStreamer(tokenizer, skip_special_tokens=True) if alone else None,
            **options,
        )
    for n, output_ids in enumerate([] if alone else texts, 1):
        print(f"--- {n} of {arguments.samples}\n{tokenizer.decode(output_ids, skip_special_tokens=True)}")


def parse() -> argparse.Namespace:
    parser = command_line.make_parser(__doc__)
    parser.add_argument(
        "model",
        type=command_line.name,
        help="output_dir of a run, a folder that save_model.py wrote, or the hub id of a released model",
    )
    parser.add_argument(
        "--prompt", default="", help="text to continue; empty begins a new text, - reads standard input"
    )
    parser.add_argument("--max_new_tokens", type=count, default=64, help="default 64")
    parser.add_argument(
        "--temperature",
        type=number(Range(0, POSITIVE.high)),
        default=0.0,
        help="divides the logits before a token is drawn; default 0, no drawing",
    )
    parser.add_argument(
        "--top_p",
        type=number(Range(0, 1, above=True)),
        default=1.0,
        help="draw from the fewest tokens that have this probability together (default 1)",
    )
    parser.add_argument(
        "--top_k", type=at_least(0), default=0, help="draw from this many likeliest tokens; default 0, from all"
    )
    parser.add_argument("--samples", type=count, default=1, help="continuations; more than one needs a --temperature")
    parser.add_argument("--seed", type=command_line.seed, default=0, help="of the drawing (default 0)")
    parser.add_argument(
        "--step", type=command_line.step, help="training tokens of a run's checkpoint; default the newest valid one"
    )
    parser.add_argument("--tokenizer", type=command_line.name, help="folder or hub id, for a model without a tokenizer")
    parser.add_argument("--device", help="default: cuda if available")
    command_line.add_plugins(parser)
    arguments = parser.parse_args()
    if 0 < arguments.temperature < 1e-3:  # divided logits may overflow
        parser.error("argument --temperature: below 0.001 takes the likeliest token, as 0 does; give 0")
    if not arguments.temperature:
        for key, default in (("samples", 1), ("top_p", 1.0), ("top_k", 0)):
            if getattr(arguments, key) != default:
                parser.error(
                    f"--{key}={getattr(arguments, key)} has no effect without --temperature; try --temperature 1"
                )
    return arguments


if __name__ == "__main__":
    sys.exit(command_line.run(main))
