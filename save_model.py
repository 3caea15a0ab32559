#!/usr/bin/env python
"""Exports a run's checkpoint as a Hugging Face folder: weights (safetensors), configs, tokenizer and a model card.

    python save_model.py --hf_load_dir output/demo --hf_save_dir output/hf/demo

README.md is the model card: how to load the model. Edit it to choose a licence; a card that you have edited is kept as
it is. `hf upload ACCOUNT/NAME output/hf/demo` shares the export.

exported_from.json names the checkpoint and the files that the export wrote. A later export of the same run replaces
these files, and one of another run with --replace. A folder with other files, or with files that were edited since, is
refused.

Load the export with

    import forgetting_transformer.model  # registers the model classes
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("output/hf/demo")
"""

import logging
import sys

from forgetting_transformer import command_line
from forgetting_transformer.command_line import step


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
    print(export(args.hf_load_dir, args.hf_save_dir, args.hf_load_step, args.tokenizer, args.replace))


if __name__ == "__main__":
    sys.exit(command_line.run(main, "interrupted: the same command exports again"))
