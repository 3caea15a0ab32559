#!/usr/bin/env python
"""Gives a pretrained Transformer forget gates, and writes the result as an exported model.

    python scripts/add_forget_gates.py SOURCE OUT                          gates open, so that training may close them
    python scripts/add_forget_gates.py SOURCE OUT --memory_length inf      the original exactly; its gates cannot learn
    python scripts/add_forget_gates.py SOURCE OUT --memory_length 4096 1e6

SOURCE is a folder or hub id of a LlamaForCausalLM, MistralForCausalLM or Qwen3ForCausalLM, or of a Transformer (LLaMA)
of this project. OUT is what save_model.py writes: init_from, scripts/generate.py and the evaluations take it. It holds
configs/model/with_gates.yaml, with which train.py trains it further (docs/use_a_model.md).
"""

import sys

from forgetting_transformer import command_line
from forgetting_transformer.ranges import Range


def main() -> None:
    parser = command_line.make_parser(__doc__)
    parser.add_argument("source", type=command_line.name, metavar="SOURCE", help="folder or hub id of the original")
    parser.add_argument("out", type=command_line.path, metavar="OUT", help="folder to write")
    tokens = command_line.number(Range(0, float("inf"), above=True))
    parser.add_argument(
        "--memory_length", type=tokens, nargs="+", default=[], metavar="TOKENS",
        help="after so many tokens a gate has let a weight decay to 1/e: of all heads, or of the first and the last of "
        "a layer, with those between spread logarithmically; default 16 times the original's context",
    )  # fmt: skip
    arguments = parser.parse_args()

    from forgetting_transformer.training.export.forget_gates import add_forget_gates

    print(add_forget_gates(arguments.source, arguments.out, arguments.memory_length))


if __name__ == "__main__":
    sys.exit(command_line.run(main, "interrupted: the same command begins again"))
