#!/usr/bin/env python
"""Measures the recurrences on a GPU: this project's kernels, flash-linear-attention's as it launches them, and PyTorch.

    python benchmarks/recurrence.py                  # the head dimensions of the 760M models, about a minute
    python benchmarks/recurrence.py --ops gla --length 4096 --out results.json

`forward ms` and `backward ms` are medians of --repeats runs measured with device events, bf16, one sequence. `error` is
the largest ‖x - reference‖ / ‖reference‖ of the output and the gradients against float64, from the self-test that
training runs before its first step. `backend` is the backend that ran. On Hopper GPUs each of FLA's kernels has one
fixed launch configuration (ops/recurrence/fla_on_hopper.py). On others FLA tunes them in the first call, which takes
minutes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from attention import time_both_ways
from cases import parse, parser, run, run_main

from forgetting_transformer.command_line import count

#: op: heads, key channels, value channels.
SHAPES = {
    "simple_gla": (48, 128, 64),
    "gla": (12, 128, 128),
    "delta_rule": (12, 128, 128),
    "gated_delta_rule": (12, 128, 128),
    "kda": (12, 128, 128),
}
#: "triton" has kernels for simple_gla whose heads share one query and key, as in Mamba-2.
BACKENDS = ("triton", "fla", "pytorch")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--ops", nargs="+", default=list(SHAPES), choices=SHAPES)
    made.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    made.add_argument("--length", type=count, default=16384, help="tokens (default %(default)s)")
    made.add_argument("--repeats", type=count, default=10, help="runs of which the median counts (default %(default)s)")
    return parse(made, argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    cases = [
        {"op": op, "shape": SHAPES[op], "wanted": backend}
        for op in args.ops
        for backend in args.backends
        if backend != "triton" or op == "simple_gla"
    ]
    return run(__file__, args, argv, cases, lambda case: measure(case["op"], case["wanted"], args), gpu_only=True)


def measure(op: str, backend: str, args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F

    from forgetting_transformer.ops import backends, recurrence, selftest

    heads, key_dim, value_dim = SHAPES[op]
    device = torch.device("cuda", torch.cuda.current_device())
    left_out = (backends.FLA,) if backend == "pytorch" else ()
    with backends.without(op, *left_out):
        key_heads = 1 if backend == "triton" else None
        use = backends.OpUse(op, heads, key_dim, value_dim, key_heads=key_heads)
        error, _ = selftest.check(use, torch.bfloat16, device, None)
        torch.manual_seed(0)
        shape = (1, args.length, heads)
        of_keys = (1, args.length, key_heads or heads, key_dim)
        inputs = [torch.randn(of_keys, device=device).bfloat16()]
        inputs.append(F.normalize(torch.randn(of_keys, device=device), dim=-1).bfloat16())
        inputs.append(torch.randn(*shape, value_dim, device=device).bfloat16())
        has_beta, has_decay = op in ("delta_rule", "gated_delta_rule", "kda"), op != "delta_rule"
        if has_beta:
            inputs.append(torch.rand(*shape, device=device))
        if has_decay:
            channels = (key_dim,) if op in ("gla", "kda") else ()
            inputs.append(F.logsigmoid(torch.randn(*shape, *channels, device=device) + 4))

        def run(*tensors: torch.Tensor) -> torch.Tensor:
            q, k, v, *gates = tensors
            names = [name for name, has in (("beta", has_beta), ("log_decay", has_decay)) if has]
            return recurrence.recurrence(q, k, v, **dict(zip(names, gates, strict=True)))[0]

        forward, backward = time_both_ways(run, inputs, args.repeats)
        ran = selftest.choose_backends([use], torch.bfloat16, device, None)[op].name
    return {"backend": ran, "forward_ms": forward, "backward_ms": backward, "error": error}


if __name__ == "__main__":
    sys.exit(run_main(main))
