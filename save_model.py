#!/usr/bin/env python
"""Exports a run's checkpoint as a Hugging Face folder: weights (safetensors), configs, tokenizer and a model card.

    python save_model.py --hf_load_dir output/demo --hf_save_dir output/hf/demo

README.md is the model card: corpus, tokens, losses, settings, versions, how to load the model. You choose the licence:
--license apache-2.0. A card that you have edited is kept as it is. `hf upload ACCOUNT/NAME output/hf/demo` shares the
export.

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
        "JSON-escaping tokenizer over this GPT-2 vocabulary, by default 'gpt2' from the hub",
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
        help="replace an export of another run; refused without it",
    )
    command_line.add_plugins(parser)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")

    import transformers

    from forgetting_transformer.training.export import export

    transformers.utils.logging.disable_progress_bar()
    print(export(args.hf_load_dir, args.hf_save_dir, args.hf_load_step, args.tokenizer, args.license, args.replace))


if __name__ == "__main__":
    sys.exit(command_line.run(main, "interrupted: the same command exports again"))
