#!/usr/bin/env python
"""Measures time and memory of scripts/add_forget_gates.py on a Llama with random weights.

    python benchmarks/converting.py --out converting.json

Memory is the most that the command's process held, which includes pages of the files that it had mapped.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import parse, parser, run, run_main

from forgetting_transformer.command_line import count

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "add_forget_gates.py"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--layers", type=count, default=16, help="of width 2,048 with 8 key heads (default 16)")
    made.add_argument("--vocabulary", type=count, default=65536, help="ids, not tied (default 65,536)")
    made.set_defaults(device="cpu")
    return parse(made, argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    cases = [{"layers": args.layers, "vocabulary": args.vocabulary, "dtype": "bfloat16"}]
    return run(__file__, args, argv, cases, measure)


def measure(case: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=case["vocabulary"], hidden_size=2048, intermediate_size=8192, num_hidden_layers=case["layers"],
        num_attention_heads=32, num_key_value_heads=8, dtype=torch.bfloat16,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        model.save_pretrained(f"{folder}/original")
        parameters = model.num_parameters()
        size = sum(file.stat().st_size for file in Path(folder, "original").glob("*.safetensors"))
        del model
        began = time.monotonic()
        subprocess.run([sys.executable, str(SCRIPT), f"{folder}/original", f"{folder}/gates"], check=True)
        seconds = time.monotonic() - began
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {"parameters": parameters, "source_bytes": size, "seconds": seconds, "peak_bytes": memory}


if __name__ == "__main__":
    sys.exit(run_main(main))
