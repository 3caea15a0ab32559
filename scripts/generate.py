"""Continue a prompt with an exported model.

python scripts/generate.py output/hf/demo --prompt "import os" --max_new_tokens 64 --temperature 0.8
"""

import argparse
import sys
from pathlib import Path

from forgetting_transformer import command_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", type=command_line.name, help="folder that save_model.py wrote, or the hub id of a released model"
    )
    parser.add_argument("--prompt", default="", help="text to continue; empty begins a new text")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token each time")
    parser.add_argument("--seed", type=int, default=0, help="for temperatures above 0")
    arguments = parser.parse_args()

    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    import forgetting_transformer.model  # noqa: F401  (registers the models)
    from forgetting_transformer import vocabulary
    from forgetting_transformer.tokenizer import load_tokenizer

    if Path(arguments.model).exists() and not (Path(arguments.model) / "config.json").is_file():
        sys.exit(f"{arguments.model} holds no config.json; export a run with save_model.py first")
    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        # Neither runs code that the folder may bring along.
        model = AutoModelForCausalLM.from_pretrained(arguments.model, trust_remote_code=False).to(device)
        tokenizer = load_tokenizer(arguments.model)
    except (OSError, ValueError) as error:
        sys.exit(f"error: cannot load {arguments.model}: {str(error).strip().splitlines()[0]}")
    prompt_ids = vocabulary.encode(tokenizer, arguments.prompt)
    input_ids = torch.tensor([[model.config.bos_token_id, *prompt_ids]], device=device)
    torch.manual_seed(arguments.seed)
    sampling = {"do_sample": True, "temperature": arguments.temperature} if arguments.temperature > 0 else {}
    output_ids = model.generate(input_ids, max_new_tokens=arguments.max_new_tokens, **sampling)
    print(tokenizer.decode(output_ids[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
