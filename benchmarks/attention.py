#!/usr/bin/env python
"""Measures forgetting attention on a GPU against attention without a gate, and with pruning against without.

    python benchmarks/attention.py                         # the cases of docs/performance.md, about a minute
    python benchmarks/attention.py --shapes 1,16384,24,64 --baselines cudnn flash fla
    python benchmarks/attention.py --out results.json

The first table has forward and backward of B,T,H,D in bf16. TFLOP/s counts 2·B·H·T²·D forward, the causal half of two
products, and 2.5 times that backward, for every kernel, whatever it really computes. Baselines: PyTorch's
scaled_dot_product_attention through cuDNN and FlashAttention-2, without gates (cudnn, flash); flash-linear-attention's
forgetting attention (fla); and the fallbacks of this project without Gluon (triton) and without Triton (pytorch).

The second table has pruning, with QK-normed inputs (weights 1, so scores are at most √D) and tolerance e^-10. `half`:
all gates are 1/2, as at initialisation. `spread`: constant gates whose time constants are spread logarithmically over
the heads, from 4 to 10^6 tokens. `one`: nothing is forgotten, so nothing can be skipped. Bounds on scores come from
the `weights` of QK-norm, one for each head, or from the norms in each `tile`. `skipped` is the share of skipped blocks
of 128 × 128 pairs. `search` is the share of time that bounds, sums of gates and the choice of blocks take.

Forgetting attention has two more columns, of both passes together: `graph`, replayed from a CUDA graph, and `queued`,
24 calls that the host launches one after the other, by its clock.

Times are medians of --repeats runs measured with device events, forward and backward apart. Pruned attention ends
before Python has launched the next kernel, so runs of the second table are replayed from CUDA graphs.

Each row is printed and saved to --out (record.py) as soon as it is measured. The same command measures missing rows.
"""

import argparse
import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from record import Record, RecordError, add_options, device_name, run_main

from forgetting_transformer.command_line import count

SHAPES = ["1,16384,24,64", "1,16384,12,128", "1,65536,24,64", "8,2048,24,64"]
PRUNE_SHAPES = ["1,16384,24,64", "8,2048,24,64"]
BASELINES = ("cudnn", "flash", "flash4", "fla", "triton", "pytorch")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=SHAPES, metavar="B,T,H,D", help=f"default {' '.join(SHAPES)}")
    parser.add_argument("--baselines", nargs="*", default=["cudnn", "flash"], choices=BASELINES)
    parser.add_argument(
        "--prune_shapes", nargs="*", default=PRUNE_SHAPES, metavar="B,T,H,D", help="none: no second table"
    )
    parser.add_argument("--repeats", type=count, default=10)
    add_options(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        print("this benchmark measures GPU kernels, and PyTorch sees no GPU", file=sys.stderr)
        return 2
    shapes, prune_shapes = ([parse_shape(text) for text in texts] for texts in (args.shapes, args.prune_shapes))
    try:
        record = Record("attention", args, argv, "cuda")
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(KERNELS_HEADER, flush=True)
    for shape in shapes:
        for row in measure_shape(shape, args, record):
            print(describe_kernel(row), flush=True)
    if prune_shapes:
        print(f"\n{PRUNING_HEADER}", flush=True)
    for shape in prune_shapes:
        for row in measure_pruning(shape, args.repeats, record):
            print(describe_pruning(row), flush=True)
    print(footer(record.content))
    return 0


def parse_shape(text: str) -> tuple[int, int, int, int]:
    try:
        batch, length, heads, head_dim = map(count, text.split(","))
    except (ValueError, argparse.ArgumentTypeError):
        sys.exit(f"a shape is four numbers B,T,H,D from 1 on; got {text!r}")
    return batch, length, heads, head_dim


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


def measure_shape(
    shape: tuple[int, int, int, int], args: argparse.Namespace, record: Record
) -> Iterator[dict[str, Any]]:
    """A row per kernel, of table "kernels"."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from forgetting_transformer import forgetting_attention
    from forgetting_transformer.ops import backends

    batch, length, heads, head_dim = shape
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    log_fgate = F.logsigmoid(torch.randn(batch, length, heads, device="cuda") + 4)

    def sdpa(backend: SDPBackend) -> Callable[..., Any]:
        def attend(q, k, v):
            with sdpa_kernel(backend):
                heads_first = (x.transpose(1, 2) for x in (q, k, v))
                return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)

        return attend

    ours = (forgetting_attention, [q, k, v, log_fgate])
    kernels: dict[str, tuple[Callable[..., Any], list[Any]]] = {"forgetting attention": ours}
    left_out: dict[str, tuple[str, ...]] = {}
    if "cudnn" in args.baselines:
        kernels["cuDNN, no gate"] = (sdpa(SDPBackend.CUDNN_ATTENTION), [q, k, v])
    if "flash" in args.baselines:
        kernels["FlashAttention-2, no gate"] = (sdpa(SDPBackend.FLASH_ATTENTION), [q, k, v])
    if "flash4" in args.baselines:
        from flash_attn.cute import flash_attn_func

        def flash4(q, k, v, deterministic):
            out = flash_attn_func(q, k, v, causal=True, deterministic=deterministic)
            return out[0] if isinstance(out, tuple) else out

        for name, deterministic in (("reproducible", True), ("not reproducible", False)):
            attend = functools.partial(flash4, deterministic=deterministic)
            kernels[f"FlashAttention-4, {name}, no gate"] = (attend, [q, k, v])
    if "fla" in args.baselines:
        from fla.ops.forgetting_attn import parallel_forgetting_attn

        kernels["FLA forgetting attention"] = (parallel_forgetting_attn, [q, k, v, log_fgate])
    if "triton" in args.baselines:
        kernels["forgetting attention, without Gluon"] = ours
        left_out["forgetting attention, without Gluon"] = (backends.GLUON,)
    if "pytorch" in args.baselines:
        kernels["forgetting attention, in PyTorch"] = ours
        left_out["forgetting attention, in PyTorch"] = (backends.GLUON, backends.TRITON)
    flops = 2 * batch * heads * length**2 * head_dim

    def measure(name: str) -> dict[str, float]:
        with backends.without("attention", *left_out.get(name, ())):
            forward, backward = time_both_ways(*kernels[name], args.repeats)
            launched = time_launched(*ours, args.repeats) if name == "forgetting attention" else {}
        tflops = 3.5 * flops / (forward + backward) / 1e9
        return {"forward_ms": forward, "backward_ms": backward, "tflops": tflops, **launched}

    for name in kernels:
        yield record.row({"table": "kernels", "shape": shape, "kernel": name}, functools.partial(measure, name))


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


def time_launched(attend: Callable[..., Any], inputs: list[Any], repeats: int) -> dict[str, float]:
    """Milliseconds of both passes, replayed from a graph, and launched by the host 24 times."""
    import torch

    leaves = [x.detach().requires_grad_() for x in inputs]
    d_out = torch.randn_like(inputs[0])

    def both() -> Any:
        return torch.autograd.grad(attend(*leaves), leaves, d_out)

    graph = replayed_ms(both, repeats)
    calls, times = 24, []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            both()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / calls * 1e3)
    return {"graph_ms": graph, "queued_ms": statistics.median(times)}


def measure_pruning(shape: tuple[int, int, int, int], repeats: int, record: Record) -> Iterator[dict[str, Any]]:
    """A row per kind of gates and of bounds, of table "pruning"."""
    import torch
    import torch.nn.functional as F

    from forgetting_transformer import forgetting_attention
    from forgetting_transformer.ops.forgetting_attention.pruning import score_bounds, skipped_share

    batch, length, heads, head_dim = shape
    scale, tolerance = 1 / math.sqrt(head_dim), -10.0
    torch.manual_seed(0)
    q, k = ((F.normalize(torch.randn(shape, device="cuda"), dim=-1) * math.sqrt(head_dim)).bfloat16() for _ in range(2))
    v = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    heads_first = [x.transpose(1, 2) for x in (q, k)]
    log_tolerance = torch.full((batch, heads), tolerance, device="cuda")
    threshold = log_tolerance - 2 * math.sqrt(head_dim) - math.log(length)
    times = torch.logspace(math.log10(4), 6, heads, dtype=torch.float64)
    gates = {"half": torch.full((heads,), -math.log(2)), "spread": -1 / times, "one": torch.zeros(heads)}

    @functools.cache
    def unpruned(name: str) -> tuple[list[Any], tuple[float, float]]:
        """Inputs with these gates, and the time without pruning."""
        log_fgate = gates[name].float().cuda().expand(batch, length, heads).contiguous()
        inputs = [q, k, v, log_fgate]
        return inputs, time_replayed(forgetting_attention, inputs, repeats)

    def measure(name: str, bounds: str) -> dict[str, Any]:
        inputs, full = unpruned(name)
        option = threshold if bounds == "weights" else "auto"
        attend = functools.partial(forgetting_attention, adaptive_threshold=option, log_tolerance=tolerance)
        pruned = time_replayed(attend, inputs, repeats)
        log_fgate_BHN = inputs[-1].transpose(1, 2)
        rule = (threshold, None) if bounds == "weights" else (log_tolerance, score_bounds(*heads_first, scale))
        search = time_search(*heads_first, log_fgate_BHN, rule[0], bounds == "tile", repeats)
        return {
            "full_ms": full, "pruned_ms": pruned, "speedup": sum(full) / sum(pruned),
            "skipped": skipped_share(log_fgate_BHN, length, *rule).mean().item(),
            "search": search / sum(pruned),
        }  # fmt: skip

    for name, bounds in itertools.product(gates, ("weights", "tile")):
        case = {"table": "pruning", "shape": shape, "gates": name, "bounds": bounds}
        yield record.row(case, functools.partial(measure, name, bounds))


def time_search(q: Any, k: Any, log_fgate: Any, threshold: Any, is_bounded: bool, repeats: int) -> float:
    """Milliseconds of bounds, sums of gates and the search for what to leave out; heads first."""
    import torch

    ops = torch.ops.forgetting_transformer

    def search() -> None:
        found = (None, None, None)
        if is_bounded:
            found = ops.forgetting_attention_bounds(q, k, None, 1 / math.sqrt(q.shape[-1]))
        ops.forgetting_attention_decay(log_fgate, q.shape[2], threshold, *found, None)

    return replayed_ms(search, repeats)


KERNELS_HEADER = (
    "| B,T,H,D | kernel | forward ms | backward ms | both TFLOP/s | graph ms | queued ms |\n"
    "|---|---|---|---|---|---|---|"
)
PRUNING_HEADER = (
    "| B,T,H,D | gates | bounds | full ms | pruned ms | speed-up | skipped | search |\n"
    "|---|---|---|---|---|---|---|---|"
)


def describe_kernel(row: dict[str, Any]) -> str:
    shape = ",".join(str(n) for n in row["shape"])
    times = f"{row['forward_ms']:.2f} | {row['backward_ms']:.2f}"
    launched = " | ".join(f"{row[key]:.2f}" if key in row else "" for key in ("graph_ms", "queued_ms"))
    return f"| {shape} | {row['kernel']} | {times} | {row['tflops']:.0f} | {launched} |"


def describe_pruning(row: dict[str, Any]) -> str:
    shape = ",".join(str(n) for n in row["shape"])
    full, pruned = (f"{f:.2f} + {b:.2f}" for f, b in (row["full_ms"], row["pruned_ms"]))
    shares = f"{row['skipped']:.1%} | {row['search']:.1%}"
    return f"| {shape} | {row['gates']} | {row['bounds']} | {full} | {pruned} | {row['speedup']:.2f} | {shares} |"


def footer(result: dict[str, Any]) -> str:
    versions = result["environment"]["versions"]
    return f"\n{device_name(result['environment'])}, torch {versions['torch']}, Triton {versions['triton']}, bf16."


if __name__ == "__main__":
    sys.exit(run_main(main))
