#!/usr/bin/env python
"""Exports a run's checkpoint as a Hugging Face folder: weights (safetensors), configs, tokenizer and a model card.

    python save_model.py --hf_load_dir output/demo --hf_save_dir output/hf/demo
    python save_model.py --hf_load_dir output/demo --hf_save_dir output/hf/demo --push_to_hub my-account/demo --private
    python save_model.py --hf_load_dir output/demo --hf_save_dir output/hf/demo-ema --weights ema

README.md is the model card: corpus, tokens, losses, settings, versions, how to load the model. You choose the licence:
--license apache-2.0. A card that you have edited is kept as it is.

exported_from.json names the checkpoint and the files that the export wrote. A later export of the same run replaces
these files, and one of another run with --replace. A folder with other files, or with files that were edited since, is
refused. So is the folder of a run or of a corpus.

Load the export with

    import forgetting_transformer.model  # registers the model classes
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("output/hf/demo")
"""

import argparse
import logging
import re
import sys

from forgetting_transformer import command_line
from forgetting_transformer.command_line import step


def licence(text: str) -> str:
    """A licence's id, which the hub writes in small letters."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+-]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no id of a licence; give one as the hub calls it, as in mit")
    return text.lower()


def main() -> None:
    parser = command_line.make_parser(__doc__)
    parser.add_argument("--hf_load_dir", type=command_line.path, required=True, help="output_dir of a training run")
    parser.add_argument("--hf_save_dir", type=command_line.path, required=True, help="folder to write; made if needed")
    parser.add_argument(
        "--hf_load_step", type=step, help="training tokens of the checkpoint; without it the newest valid one"
    )
    parser.add_argument(
        "--tokenizer",
        type=command_line.name,
        help="folder or hub id of the tokenizer, if the run has none. Runs on LongCrawl64 use its "
        "JSON-escaping tokenizer over this GPT-2 vocabulary, 'gpt2' from the hub unless told",
    )
    parser.add_argument(
        "--push_to_hub",
        type=command_line.name,
        metavar="REPO_ID",
        help="upload the export to this repository of the Hugging Face hub (ACCOUNT/NAME), which is made if needed; "
        "log in with `hf auth login` or set HF_TOKEN before",
    )
    parser.add_argument(
        "--private",
        action="store_true",
        help="make the repository of --push_to_hub a private one, and refuse a public one",
    )
    parser.add_argument("--revision", type=command_line.name, help="branch for --push_to_hub; made if needed")
    parser.add_argument(
        "--weights",
        choices=["ema"],
        help="export the moving average that a run with callbacks=[ema] keeps, instead of the weights themselves",
    )
    parser.add_argument(
        "--license",
        type=licence,
        metavar="ID",
        help="licence of the model for the card, as the hub calls it: apache-2.0, mit, cc-by-4.0, other, …",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="replace an export of another run, in --hf_save_dir and on the hub; refused without it",
    )
    command_line.add_plugins(parser)
    arguments = parser.parse_args()
    if arguments.push_to_hub is None and (arguments.private or arguments.revision):
        parser.error(f"{'--private' if arguments.private else '--revision'} has no effect without --push_to_hub")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")

    import transformers

    from forgetting_transformer.training.checkpoint.folder import CheckpointError
    from forgetting_transformer.training.export import ExportError, export, hub

    transformers.utils.logging.disable_progress_bar()
    repo_id, folder = arguments.push_to_hub, arguments.hf_save_dir
    try:
        if repo_id is not None:
            hub.check_repo_id(repo_id)
        at, tokenizer = arguments.hf_load_step, arguments.tokenizer
        weights, chosen = arguments.weights, arguments.license
        replace = arguments.replace
        print(export(arguments.hf_load_dir, folder, at, tokenizer, repo_id, weights, chosen, replace), flush=True)
        if repo_id is not None:
            print(hub.push(folder, repo_id, arguments.private or None, arguments.revision, replace))
    except (CheckpointError, ExportError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(command_line.run(main, "interrupted: the same command exports again"))
