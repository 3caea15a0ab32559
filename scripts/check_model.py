#!/usr/bin/env python
"""Checks an architecture on a tiny model, in seconds on a CPU: your own before you train it.

    python scripts/check_model.py --model gated_delta_net
    python scripts/check_model.py --plugins my_lab --model retention hidden_size=64 num_heads=2
    python scripts/check_model.py --plugins my_lab --model hybrid pattern=[retention,forgetting_transformer]

Words after the options are fields of the architecture's configuration. Without them hidden_size is 64,
num_hidden_layers 2 (a hybrid's: 4), vocab_size 61, and num_heads 2; other fields have the defaults of their class. The
names in a hybrid's pattern are architectures.

One line for each check says "ok" and what was measured, or what is wrong, by how much, and the likely fix:

build      the model can be made and gives finite logits, and its FLOPs are a positive number
causality  changing a token changes no logits before it or of other sequences, and some after it
gradients  every trainable parameter gets a gradient, finite and not zero
cache      a text read in pieces or token by token has the logits of the text read at once
padding    a left-padded sequence of a batch has the logits of the sequence alone
saving     save_pretrained and AutoModelForCausalLM.from_pretrained give the same model

The exit code is 1 if a check failed. Begin with the first failure: later ones often follow from it. Whether the mixer
computes what its paper says needs a test of your own.
"""

import sys
from typing import Any

from forgetting_transformer import command_line


def parse_fields(words: list[str]) -> dict[str, Any]:
    """Fields from key=value arguments, whose values are read as YAML.

    Raises:
        ValueError: naming the argument and the fix.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    fields: Any = OmegaConf.create()
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ValueError(f"{word!r}: give fields as key=value after the options, as in hidden_size=64")
        try:
            fields.merge_with_dotlist([word])
            OmegaConf.resolve(fields)
        except (OmegaConfBaseException, YAMLError) as error:
            raise ValueError(f"{word!r}: {command_line.one_line(error)}; give a value as YAML has it") from error
    return {str(key): value for key, value in fields.items()}


def main() -> int:
    parser = command_line.make_parser(__doc__)
    parser.add_argument("--model", type=command_line.name, required=True, metavar="NAME", help="its registered name")
    parser.add_argument("--traceback", action="store_true", help="show where in your code an error was raised")
    command_line.add_plugins(parser)
    parser.add_argument("fields", nargs="*", metavar="FIELD=VALUE", help="of its configuration, after the options")
    arguments = parser.parse_args()

    import transformers

    from forgetting_transformer.model.checks import check_architecture

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        results = check_architecture(arguments.model, parse_fields(arguments.fields))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for result in results:
        print(f"{'ok' if result.is_ok else 'FAILED':<6} {result.name:<9} {result.detail}")
        if arguments.traceback and result.traceback:
            print(result.traceback)
    failed = [result.name for result in results if not result.is_ok]
    print(f"{len(failed)} of {len(results)} checks failed: {', '.join(failed)}" if failed else "all checks are ok")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(command_line.run(main))
