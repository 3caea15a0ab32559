#!/usr/bin/env python
"""Measures forgetting attention on a GPU against attention without a gate, with pruning against without, and layouts.

    python benchmarks/attention.py                         # the cases of docs/performance.md, about a minute
    python benchmarks/attention.py --shapes 1,16384,24,64 --baselines cudnn flash fla
    python benchmarks/attention.py --out results.json

The first table has forward and backward of B,T,H,D in bf16. TFLOP/s counts 2·B·H·T²·D forward, the causal half of two
products, and 2.5 times that backward, for every kernel, whatever it really computes. Baselines: PyTorch's
scaled_dot_product_attention through cuDNN and FlashAttention-2, without gates (cudnn, flash); FlashAttention-4 without
gates, from the package flash-attn-4 (flash4); flash-linear-attention's forgetting attention (fla); and the fallbacks of
this project without Hopper kernels (triton) and without Triton (pytorch). A package that is not installed is the row's
status.

The second table has pruning, with QK-normed inputs (weights 1, so scores are at most √D) and tolerance e^-10. `half`:
all gates are 1/2, as at initialisation. `spread`: constant gates whose time constants are spread logarithmically over
the heads, from 4 to 10^6 tokens. `one`: nothing is forgotten, so nothing can be skipped. Bounds on scores come from
the `weights` of QK-norm, one for each head, or from the norms in each `tile`. `skipped` is the share of skipped blocks
of 128 × 128 pairs.

The third table has layouts: packed documents, windows, padding on the left, a length that is no multiple of 128, and
query heads that share keys. `ratio` is the time of a tile of 128 × 128 pairs that a query sees something of, relative
to that time of the full kernel, which is measured in turn; forward, backward and both.

Times are medians of --repeats runs measured with device events, forward and backward apart. Pruned attention ends
before Python has launched the next kernel, so runs of the second and third table are replayed from CUDA graphs.
"""

import argparse
import functools
import importlib
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import Case, NotMeasured, parse, parser, run, run_main

from forgetting_transformer.command_line import count

SHAPES = [[1, 16384, 24, 64], [1, 16384, 12, 128], [1, 65536, 24, 64], [8, 2048, 24, 64]]
PRUNE_SHAPES = [SHAPES[0], SHAPES[-1]]
#: Layout: what differs from whole sequences of full attention.
LAYOUTS = {
    **{f"documents of {length:,}": {"document": length} for length in (1024, 4096, 16384)},
    **{f"window of {window:,}": {"window": window} for window in (512, 2048)},
    "16,300 tokens": {"length": 16300},
    "left padding of 1,000": {"padding": 1000},
    "four query heads for a key head": {"group": 4},
}
GATES = ("half", "spread", "one")
OURS = "forgetting attention"
#: Names of rows for each choice of --baselines.
BASELINES = {
    "cudnn": ["cuDNN, no gate"],
    "flash": ["FlashAttention-2, no gate"],
    "flash4": [f"FlashAttention-4, {name}, no gate" for name in ("reproducible", "not reproducible")],
    "fla": ["FLA forgetting attention"],
    "triton": ["forgetting attention, without Hopper kernels"],
    "pytorch": ["forgetting attention, in PyTorch"],
}
#: PyTorch's backend of scaled_dot_product_attention.
SDPA = {"cuDNN, no gate": "CUDNN_ATTENTION", "FlashAttention-2, no gate": "FLASH_ATTENTION"}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--shapes", nargs="*", type=shape_of("BTHD"), default=SHAPES, metavar="B,T,H,D")
    made.add_argument("--baselines", nargs="*", default=["cudnn", "flash"], choices=BASELINES)
    made.add_argument("--prune_shapes", nargs="*", type=shape_of("BTHD"), default=PRUNE_SHAPES, metavar="B,T,H,D")
    made.add_argument("--layout_shapes", nargs="*", type=shape_of("BTHD"), default=SHAPES[:2], metavar="B,T,H,D")
    made.add_argument("--repeats", type=count, default=10)
    return parse(made, argv)


def shape_of(names: str) -> Callable[[str], list[int]]:
    """A type of argument: as many numbers as there are names."""

    def read(text: str) -> list[int]:
        shape = [count(number) for number in text.split(",")]
        if len(shape) != len(names):
            raise argparse.ArgumentTypeError(f"{text!r}: a shape is {len(names)} numbers {','.join(names)}")
        return shape

    return read


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    cases = [
        {"table": "kernels", "shape": shape, "kernel": kernel}
        for shape in args.shapes
        for kernel in [OURS, *(kernel for name in args.baselines for kernel in BASELINES[name])]
    ]
    cases += [
        {"table": "pruning", "shape": shape, "gates": gates, "bounds": bounds}
        for shape in args.prune_shapes
        for gates in GATES
        for bounds in ("weights", "tile")
    ]
    cases += [
        {"table": "layouts", "shape": shape, "layout": layout} for shape in args.layout_shapes for layout in LAYOUTS
    ]
    measures = {"kernels": measure_kernel, "pruning": measure_pruning, "layouts": measure_layout}
    return run(__file__, args, argv, cases, lambda case: measures[case["table"]](case, args.repeats), gpu_only=True)


def median_ms(function: Callable[[], Any], repeats: int) -> float:
    import torch

    for _ in range(3):
        function()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def replayed_ms(function: Callable[[], Any], repeats: int) -> float:
    """The median of replays of a CUDA graph of it, without the time it takes to launch kernels."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return median_ms(graph.replay, repeats)


def time_both_ways(attend: Callable[..., Any], inputs: list[Any], repeats: int) -> tuple[float, float]:
    """Milliseconds of the forward pass, and of the backward pass."""
    import torch

    with torch.no_grad():
        forward = median_ms(lambda: attend(*inputs), repeats)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    d_out = torch.randn_like(out)
    backward = median_ms(lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True), repeats)
    return forward, backward


def measure_kernel(case: Case, repeats: int) -> dict[str, float]:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from forgetting_transformer import forgetting_attention
    from forgetting_transformer.ops import backends

    shape, kernel = case["shape"], case["kernel"]
    batch, length, heads, head_dim = shape
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    log_fgate = F.logsigmoid(torch.randn(batch, length, heads, device="cuda") + 4)
    attend: Callable[..., Any] = forgetting_attention
    left_out: tuple[str, ...] = ()
    if kernel in SDPA:

        def attend(*inputs: Any) -> Any:
            with sdpa_kernel(getattr(SDPBackend, SDPA[kernel])):
                q, k, v = (x.transpose(1, 2) for x in inputs)
                return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    elif kernel.startswith("FlashAttention-4"):
        flash_attn_func = peer("flash_attn.cute", "flash_attn_func", "flash-attn-4")

        def attend(*inputs: Any) -> Any:
            out = flash_attn_func(*inputs, causal=True, deterministic="not reproducible" not in kernel)
            return out[0] if isinstance(out, tuple) else out

    else:
        inputs.append(log_fgate)
        if kernel == "FLA forgetting attention":
            attend = peer("fla.ops.forgetting_attn", "parallel_forgetting_attn", "fla-core")
        elif kernel != OURS:
            left_out = (backends.HOPPER, backends.TRITON) if "PyTorch" in kernel else (backends.HOPPER,)
    with backends.without("attention", *left_out):
        forward, backward = time_both_ways(attend, inputs, repeats)
    tflops = 7 * batch * heads * length**2 * head_dim / (forward + backward) / 1e9
    return {"forward_ms": forward, "backward_ms": backward, "tflops": tflops}


def peer(module: str, function: str, package: str) -> Callable[..., Any]:
    """
    Raises:
        NotMeasured: its package is not installed.
    """
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError:
        raise NotMeasured(f"not measured: pip install {package}") from None


def time_replayed(attend: Callable[..., Any], inputs: list[Any], repeats: int) -> tuple[float, float]:
    """Milliseconds of the forward pass, and of the backward pass, without the time it takes to launch kernels."""
    import torch

    leaves = [x.detach().requires_grad_() for x in inputs]
    d_out = torch.randn_like(inputs[0])

    def forward() -> Any:
        with torch.no_grad():
            return attend(*leaves)

    def both() -> Any:
        return torch.autograd.grad(attend(*leaves), leaves, d_out)

    times = [replayed_ms(function, repeats) for function in (forward, both)]
    return times[0], times[1] - times[0]


def measure_pruning(case: Case, repeats: int) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F

    from forgetting_transformer import forgetting_attention
    from forgetting_transformer.ops.forgetting_attention.reference import score_bounds, skipped_share

    batch, length, heads, head_dim = shape = case["shape"]
    scale, tolerance, by_weights = 1 / math.sqrt(head_dim), -10.0, case["bounds"] == "weights"
    torch.manual_seed(0)
    q, k = ((F.normalize(torch.randn(shape, device="cuda"), dim=-1) * math.sqrt(head_dim)).bfloat16() for _ in range(2))
    v = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    heads_first = [x.transpose(1, 2) for x in (q, k)]
    log_tolerance = torch.full((batch, heads), tolerance, device="cuda")
    threshold = log_tolerance - 2 * math.sqrt(head_dim) - math.log(length)
    times = torch.logspace(math.log10(4), 6, heads, dtype=torch.float64)
    gates = {"half": torch.full((heads,), -math.log(2)), "spread": -1 / times, "one": torch.zeros(heads)}
    log_fgate = gates[case["gates"]].float().cuda().expand(batch, length, heads).contiguous()
    inputs = [q, k, v, log_fgate]
    full = time_replayed(forgetting_attention, inputs, repeats)
    option = threshold if by_weights else "auto"
    attend = functools.partial(forgetting_attention, adaptive_threshold=option, log_tolerance=tolerance)
    pruned = time_replayed(attend, inputs, repeats)
    log_fgate_BHN = log_fgate.transpose(1, 2)
    rule = (threshold, None) if by_weights else (log_tolerance, score_bounds(heads_first[0], heads_first[1], scale))
    return {
        "full_ms": full,
        "pruned_ms": pruned,
        "speedup": sum(full) / sum(pruned),
        "skipped": skipped_share(log_fgate_BHN, length, *rule).mean().item(),
    }


def measure_layout(case: Case, repeats: int) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F

    from forgetting_transformer import forgetting_attention

    batch, full_length, heads, head_dim = case["shape"]
    given = LAYOUTS[case["layout"]]
    length, group = given.get("length", full_length), given.get("group", 1)
    first = torch.zeros(length, dtype=torch.long)
    options: dict[str, Any] = {}
    if document := given.get("document"):
        first = torch.arange(length) // document * document
        options["cu_seqlens"] = torch.arange(0, length + 1, document, dtype=torch.int32, device="cuda")
    if window := given.get("window"):
        first, options["window_size"] = (torch.arange(length) - window + 1).clamp(min=0), window
    if padding := given.get("padding"):
        first = torch.where(torch.arange(length) < padding, length, padding)
        options["seq_start"] = torch.full((batch,), padding, device="cuda")
    torch.manual_seed(0)

    def inputs(length: int, group: int) -> list[Any]:
        q = torch.randn(batch, length, heads, head_dim, dtype=torch.bfloat16, device="cuda")
        k, v = torch.randn(2, batch, length, heads // group, head_dim, dtype=torch.bfloat16, device="cuda")
        return [q, k, v, F.logsigmoid(torch.randn(batch, length, heads, device="cuda") + 4)]

    attend = functools.partial(forgetting_attention, **options)
    whole, other = inputs(full_length, 1), inputs(length, group)
    # In turn, so that a clock that changes its speed changes both.
    pairs = [
        (time_replayed(forgetting_attention, whole, repeats), time_replayed(attend, other, repeats)) for _ in range(3)
    ]
    full_ms, ms = (tuple(map(statistics.median, zip(*times, strict=True))) for times in zip(*pairs, strict=True))
    full_tiles, tiles = tiles_of(torch.zeros(full_length, dtype=torch.long)), tiles_of(first)
    ratios = [b / tiles / (a / full_tiles) for a, b in zip((*full_ms, sum(full_ms)), (*ms, sum(ms)), strict=True)]
    return {"full_ms": full_ms, "ms": ms, "tiles": tiles, "full_tiles": full_tiles, "ratio": ratios}


def tiles_of(first: Any) -> int:
    """Tiles of 128 × 128 pairs that a query sees something of, from the first key that each query sees."""
    tiles = 0
    for start in range(0, len(first), 128):
        keys, end = first[start : start + 128].min().item(), min(start + 128, len(first))
        tiles += max(0, -(-end // 128) - keys // 128)
    return tiles


if __name__ == "__main__":
    sys.exit(run_main(main))
