#!/usr/bin/env python
"""Measures one-token decoding with forgetting attention on a GPU against attention without a gate.

    python benchmarks/decode.py                          # the default cases, about a minute
    python benchmarks/decode.py --shapes 1,24,24,64,16384 --kernels decode flash
    python benchmarks/decode.py --out results.json

A shape is B,H,G,D,N: sequences, query heads, key and value heads (fewer than query heads: grouped-query attention),
channels of a head, tokens in the cache. Everything is in bf16. The cache has the layout of generation, (B, G, N, D).

Kernels:
  decode         forgetting_attention_decode, which splits the keys over the GPU, from cumulative sums of log gates;
                 slow gates
  half           the same, pruned, all gates 1/2 as at initialisation, QK-normed inputs, tolerance e^-10
  spread         the same, pruned, time constants spread logarithmically over the heads from 4 to 10^6 tokens
  whole          forgetting_attention with one query, which sums all gates in each call and gives a head to one program
  flash, cudnn   PyTorch's scaled_dot_product_attention without gates, through FlashAttention-2 and through cuDNN

Values: `us` per call. `tokens_per_second` is B tokens per call, as if a model had only this layer. `gb_per_second` is
the size of keys and values (decode: also of cumulative sums) divided by the time, `share_of_peak` that of --peak_gb_s.
Pruned kernels read less and have neither. `error` is ‖out - exact‖ / ‖exact‖ against float64.

Each call is timed inside a CUDA graph with at least 4 calls on separate caches of together at least --min_mib, like
the layers of a model. Otherwise a small cache would stay in the GPU's L2. The median of --repeats replays counts.
"""

import argparse
import functools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from attention import replayed_ms, shape_of
from cases import parse, parser, run, run_main

from forgetting_transformer.command_line import count, positive

SHAPES = [
    [1, 24, 24, 64, 16384],
    [1, 24, 24, 64, 65536],
    [8, 24, 24, 64, 16384],
    [1, 24, 4, 64, 16384],
    [8, 24, 4, 64, 16384],
]
KERNELS = ("decode", "half", "spread", "whole", "flash", "cudnn")
PRUNED = ("half", "spread")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--shapes", nargs="*", type=shape_of("BHGDN"), default=SHAPES, metavar="B,H,G,D,N")
    made.add_argument("--kernels", nargs="*", default=list(KERNELS), choices=KERNELS, help="default all")
    made.add_argument("--repeats", type=count, default=20)
    made.add_argument("--min_mib", type=count, default=400, help="MiB of caches that a CUDA graph goes through")
    made.add_argument("--peak_gb_s", type=positive, default=4800, help="of the GPU's memory; default an H200's")
    return parse(made, argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    cases = [{"shape": shape, "kernel": kernel} for shape in args.shapes for kernel in args.kernels]
    return run(__file__, args, argv, cases, lambda case: measure(case["shape"], case["kernel"], args), gpu_only=True)


def measure(shape: list[int], kernel: str, args: argparse.Namespace) -> dict[str, Any]:
    """Time and error of a kernel; an `unavailable` reason where PyTorch has none for the shape."""
    import torch

    batch, heads, groups, head_dim, keys = shape
    num_bytes = 2 * batch * groups * keys * head_dim * 2
    num_caches = max(4, math.ceil(args.min_mib * 2**20 / num_bytes))
    torch.manual_seed(0)
    calls = [make_call(shape, kernel) for _ in range(num_caches)]
    attend, exact = calls[0]
    try:
        error = (attend().double() - exact()).norm() / exact().norm()
        seconds = replayed_seconds([attend for attend, _ in calls], args.repeats)
    except RuntimeError as reason:
        if kernel not in ("flash", "cudnn"):
            raise
        return {"unavailable": str(reason).splitlines()[0]}
    if kernel == "decode":
        num_bytes += 8 * batch * heads * keys
    bandwidth = None if kernel in PRUNED else num_bytes / seconds / 1e9
    return {
        "us": seconds * 1e6, "tokens_per_second": batch / seconds, "gb_per_second": bandwidth,
        "share_of_peak": bandwidth and bandwidth / args.peak_gb_s, "error": error.item(),
    }  # fmt: skip


def make_call(shape: list[int], kernel: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A call of the kernel on a separate cache, and one that computes the same in float64."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from forgetting_transformer import forgetting_attention, forgetting_attention_decode
    from forgetting_transformer.ops.forgetting_attention import cumulative_log_fgate

    batch, heads, groups, head_dim, keys = shape
    q = torch.randn(batch, heads, 1, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, groups, keys, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    log_fgate = F.logsigmoid(torch.randn(batch, heads, keys, device="cuda") + 6)
    options: dict[str, Any] = {"head_first": True}
    if kernel in PRUNED:
        q, k = (F.normalize(x.float(), dim=-1).mul(math.sqrt(head_dim)).bfloat16() for x in (q, k))
        times = torch.logspace(math.log10(4), 6, heads, dtype=torch.float64, device="cuda")
        log_fgate_H = (-1 / times).float() if kernel == "spread" else torch.full((heads,), -math.log(2), device="cuda")
        log_fgate = log_fgate_H[:, None].expand(batch, heads, keys).contiguous()
        bound = -10 - 2 * math.sqrt(head_dim) - math.log(keys)
        options["adaptive_threshold"] = torch.full((batch, heads), bound, device="cuda")
    if kernel in ("flash", "cudnn"):
        log_fgate = torch.zeros_like(log_fgate)
    running = cumulative_log_fgate(log_fgate, head_first=True)

    def exact() -> Any:
        return forgetting_attention_decode(*(x.double() for x in (q, k, v)), running, head_first=True)

    def sdpa() -> Any:
        backend = SDPBackend.FLASH_ATTENTION if kernel == "flash" else SDPBackend.CUDNN_ATTENTION
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=heads != groups)

    if kernel in ("flash", "cudnn"):
        return sdpa, exact
    if kernel == "whole":
        return functools.partial(forgetting_attention, q, k, v, log_fgate, **options), exact
    return functools.partial(forgetting_attention_decode, q, k, v, running, **options), exact


def replayed_seconds(calls: list[Callable[[], Any]], repeats: int) -> float:
    """Seconds of one call, from replays of a CUDA graph that makes them all."""

    def call_all() -> None:
        for call in calls:
            call()

    return replayed_ms(call_all, repeats) / 1e3 / len(calls)


if __name__ == "__main__":
    sys.exit(run_main(main))
