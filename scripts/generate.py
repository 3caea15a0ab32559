#!/usr/bin/env python
"""Continues a prompt with a trained model.

    python scripts/generate.py output/demo --prompt "import os"        # the newest checkpoint of a run
    python scripts/generate.py output/hf/demo --temperature 0.8 --top_p 0.95 --samples 3
    python scripts/generate.py FOLDER --prompt - < text.txt            # the prompt from standard input
    python scripts/generate.py FOLDER --interactive                    # many prompts, one after the other

Without --temperature, each token is the most likely one. A single continuation is printed while it is generated.
Several continuations are generated together and printed one after the other.

--interactive reads prompts line by line. Each begins a new text: these are base models, which continue a text and know
no dialogue. Ctrl-C stops a text; at the prompt, Ctrl-C or Ctrl-D ends. /help lists the commands.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable

from forgetting_transformer import command_line
from forgetting_transformer.command_line import at_least, count, number
from forgetting_transformer.ranges import POSITIVE, Range

#: Below it the likeliest token is as good as certain, and at some point the divided logits overflow.
LEAST_TEMPERATURE = 1e-3


def temperature(text: str) -> float:
    """A type of argument: 0 for the likeliest token, or a temperature to draw at."""
    with contextlib.suppress(ValueError):
        if float(text) == 0:
            return 0.0
    return number(Range(LEAST_TEMPERATURE, POSITIVE.high, otherwise="0"))(text)


HELP = """Type the beginning of a text; a line that ends with \\ goes on in the next one. Ctrl-C stops a text.
  /more             continue the last text
  /options          show the options
  /temperature 0.8  set an option: temperature, top_p, top_k, max_new_tokens or seed
  /help             this
  /quit             end, as Ctrl-D and, at the prompt, Ctrl-C do"""
#: Options that /NAME VALUE sets, and their types.
ADJUSTABLE = {
    "temperature": temperature,
    "top_p": number(Range(0, 1, above=True)),
    "top_k": at_least(0),
    "max_new_tokens": count,
    "seed": command_line.seed,
}


def main() -> None:
    arguments = parse()

    import torch
    import transformers
    from transformers import TextStreamer

    from forgetting_transformer import model_tokenizer
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
    first = [] if found.bos_token_id is None else [found.bos_token_id]

    def tokens(text: str) -> list[int]:
        return [*first, *model_tokenizer.encode(tokenizer, text)]

    def generate(ids: list[int], streamer: TextStreamer | None) -> torch.Tensor:
        input_ids = torch.tensor([ids], device=found.device)
        # top_k=0 is no limit; transformers' own default is 50.
        sampling = {"temperature": arguments.temperature, "top_p": arguments.top_p, "top_k": arguments.top_k}
        options = {"do_sample": True, **sampling} if arguments.temperature > 0 else {"do_sample": False}
        with precision_context("auto", found.device):
            return found.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=arguments.max_new_tokens,
                num_return_sequences=arguments.samples,
                streamer=streamer,
                **options,
            )

    class Kept(TextStreamer):
        """Prints a continuation while it is generated, and keeps the tokens, also of one that was stopped."""

        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.ids: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.ids += value.flatten().tolist()
            super().put(value)

    def write(ids: list[int]) -> list[int]:
        streamer = Kept()
        try:
            generate(ids, streamer)
        except KeyboardInterrupt:
            streamer.end()
        return streamer.ids or ids

    torch.manual_seed(arguments.seed)
    if arguments.interactive:
        return converse(arguments, tokens, write, torch.manual_seed)
    ids = tokens(prompt)
    if not ids:
        sys.exit(f"error: {arguments.model} has no token to begin a text with; give a --prompt")
    if arguments.samples == 1:
        generate(ids, TextStreamer(tokenizer, skip_special_tokens=True))
        return
    for n, output_ids in enumerate(generate(ids, None), 1):
        print(f"--- {n} of {arguments.samples}\n{tokenizer.decode(output_ids, skip_special_tokens=True)}")


def converse(
    options: argparse.Namespace,
    tokens: Callable[[str], list[int]],
    write: Callable[[list[int]], list[int]],
    reseed: Callable[[int], object],
) -> None:
    """Reads prompts and commands until the end of standard input, /quit, or Ctrl-C at the prompt.

    Args:
        options: what commands set, and `write` reads.
        tokens: of a text that begins.
        write: prints a continuation of these tokens and returns all tokens; Ctrl-C stops it.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (editing and history of lines, where Python has it)
    print("Each prompt begins a new text. /help lists the commands; Ctrl-D ends.")
    last: list[int] = []
    while True:
        try:
            line = input("> ")
            while line.endswith("\\"):
                line = f"{line[:-1]}\n{input('. ')}"
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line.startswith("/"):
            if line:
                last = write(tokens(line))
            continue
        name, _, value = line[1:].strip().partition(" ")
        if name == "quit":
            return
        if name == "more" and last:
            last = write(last)
        elif name == "more":
            print("there is no text to continue yet")
        elif name == "options":
            print(", ".join(f"{key} {getattr(options, key)}" for key in ADJUSTABLE))
        elif name in ADJUSTABLE:
            print(adjusted(options, name, value.strip()))
            if name == "seed":
                reseed(options.seed)
        else:
            print(HELP if name == "help" else f"/{name} is no command; /help lists them (a text cannot begin with /)")


def adjusted(options: argparse.Namespace, name: str, value: str) -> str:
    """Sets an option and says so, or says why not."""
    try:
        setattr(options, name, ADJUSTABLE[name](value))
    except argparse.ArgumentTypeError as error:
        return f"{name}: {error}"
    idle = name in ("top_p", "top_k") and not options.temperature
    return f"{name} {getattr(options, name)}{', without effect at temperature 0' if idle else ''}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model",
        type=command_line.name,
        help="output_dir of a run, a folder that save_model.py wrote, or the hub id of a released model",
    )
    parser.add_argument(
        "--prompt", default="", help="text to continue; empty begins a new text, - reads standard input"
    )
    parser.add_argument("--interactive", action="store_true", help="ask for prompts, again and again")
    parser.add_argument("--max_new_tokens", type=count, default=64, help="default 64")
    parser.add_argument(
        "--temperature",
        type=temperature,
        default=0.0,
        help="divides the logits before a token is drawn; default 0, no drawing",
    )
    parser.add_argument(
        "--top_p",
        type=ADJUSTABLE["top_p"],
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
    if arguments.interactive and (arguments.prompt or arguments.samples != 1):
        parser.error(f"--{'prompt' if arguments.prompt else 'samples'} does not go with --interactive, which asks")
    if not arguments.temperature and not arguments.interactive:
        for key, default in (("samples", 1), ("top_p", 1.0), ("top_k", 0)):
            if getattr(arguments, key) != default:
                parser.error(
                    f"--{key}={getattr(arguments, key)} has no effect without --temperature; try --temperature 1"
                )
    return arguments


if __name__ == "__main__":
    sys.exit(command_line.run(main))
