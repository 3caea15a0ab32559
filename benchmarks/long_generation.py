#!/usr/bin/env python
"""Measures generation behind a long prompt, from a cache that keeps all keys and from caches that forget some.

    python benchmarks/long_generation.py                            # FoX (Pro) 760M behind 65,536 and 262,144 tokens
    python benchmarks/long_generation.py --seq_len 131072 --evict_below -5 -10 -25 --out results.json
    python benchmarks/long_generation.py --device cpu --experiment demo/fox_pro --seq_len 256 --part 64      # to try it

The prompt, random tokens, goes through the model in parts of --part tokens. Then --decode tokens go through it one by
one, as in generation; they are the same for all caches. Weights are random. The gates have time constants spread
logarithmically over the heads of a layer, in no order (--time_constants). Each row is printed and saved to --out
(record.py) when it is measured; the same command measures missing rows. Running out of memory is a result.

evict below   ln ε of new_cache(evict_below=…): what a head has evicted has less than ε of the weights of a token. `–`
              keeps all keys; `– (half)` too, with prompts in parts of half the size: how far rounding alone goes
CUDA graph    whether tokens run as a CUDA graph (new_cache(cuda_graph=…), the default of `generate` on a GPU)
prompt s      seconds for the prompt
ms per token  median of the tokens after it, one sequence, weights in float32 under autocast, as scripts/generate.py
cache GB      of keys, values and sums of gates behind all tokens, room to spare included
peak GB       of PyTorch's allocator, weights included
difference    the largest difference of a decoded token's log-probability from the cache that keeps all keys
"""

import argparse
import gc
import itertools
import statistics
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from long_contexts import VOCABULARY, add_time_constants, set_time_constants
from record import Record, RecordError, add_options, device_name, run_main
from tables import long_generation_cells, long_generation_header

from forgetting_transformer.command_line import at_least, count, log_of_small
from training import compose, experiment_file


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="forgetting_transformer/pro_760m_16b", help="default %(default)s")
    parser.add_argument("--seq_len", type=count, nargs="+", default=[65536, 262144], help="tokens of a prompt")
    parser.add_argument(
        "--evict_below", type=log_of_small, nargs="+", default=[-10.0], metavar="LN_E", help="default -10"
    )
    parser.add_argument(
        "--part", type=at_least(2), default=16384, help="tokens of the prompt at a time (default %(default)s)"
    )
    parser.add_argument("--decode", type=count, default=64, help="tokens after the prompt (default %(default)s)")
    add_time_constants(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_options(parser)
    args = parser.parse_args(argv)
    if not experiment_file(args.experiment).is_file():
        parser.error(f"there is no experiment {args.experiment!r} in configs/experiment")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: this needs a GPU, and PyTorch sees none; try --device cpu", file=sys.stderr)
        return 2
    try:
        record = Record("long_generation", args, argv, args.device)
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    model = build(args)
    try:
        for value in args.evict_below:
            model.new_cache(evict_below=value)
    except ValueError as error:
        print(f"error: --evict_below: {error}", file=sys.stderr)
        return 2
    print(device_name(record.environment))
    header = long_generation_header()
    print(f"| {' | '.join(header)} |\n{'|---' * len(header)}|", flush=True)
    for length in args.seq_len:
        graph = args.device == "cuda"
        caches = [(None, args.part, graph), (None, args.part // 2, graph)]
        caches += [(value, args.part, graph) for value in args.evict_below]
        caches += [(value, args.part, False) for value in (None, *args.evict_below) if graph]
        for evict_below, part, cuda_graph in caches:
            case = {"experiment": args.experiment, "tokens": length, "evict_below": evict_below, "part": part}
            case["cuda_graph"] = cuda_graph
            if (row := record.find(case)) is None:
                row = record.add({**case, **measured(model, args, case)})
            print(f"| {' | '.join(long_generation_cells(row, record.rows))} |", flush=True)
    return 1 if record.failed else 0


def build(args: argparse.Namespace) -> Any:
    from forgetting_transformer.training import setup

    config = compose(args.experiment, [f"fabric.accelerator={args.device}"])
    model = setup.build_model(config, SimpleNamespace(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0)).to(
        args.device
    )
    set_time_constants(model, args.time_constants)
    return model.eval()


def measured(model: Any, args: argparse.Namespace, case: dict[str, Any]) -> dict[str, Any]:
    """The values of a row."""
    import torch

    if args.device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        with (
            warnings.catch_warnings(),
            torch.no_grad(),
            torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"),
        ):
            warnings.filterwarnings("error", message="no CUDA graph is used")
            return {"status": "ok", **generate(model, args, case)}
    except RuntimeWarning as error:  # that there is no graph
        return {"status": f"failed: {error}"}
    except torch.OutOfMemoryError as error:
        error.__traceback__ = None  # its frames hold the cache
        return {"status": "out of memory"}


def generate(model: Any, args: argparse.Namespace, case: dict[str, Any]) -> dict[str, Any]:
    import torch

    length, on_gpu = case["tokens"], args.device == "cuda"
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (1, length + args.decode + 1), generator=draws).to(args.device)
    cache = model.new_cache(evict_below=case["evict_below"], cuda_graph=case["cuda_graph"])

    def ahead(part: Any) -> Any:
        return model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1].float()

    def seconds() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    began = seconds()
    for part in tokens[:, :length].split(case["part"], dim=1):
        ahead(part)
    times, logits = [seconds()], []
    for k in range(length, length + args.decode):
        logits.append(ahead(tokens[:, k : k + 1]))
        times.append(seconds())
    expected = tokens[0, length + 1 :, None]
    return {
        "prompt_seconds": times[0] - began,
        "token_seconds": statistics.median(after - before for before, after in itertools.pairwise(times)),
        "cache_bytes": cache.memory_bytes,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "log_probabilities": torch.stack(logits).log_softmax(-1).gather(1, expected)[:, 0].tolist(),
    }


if __name__ == "__main__":
    sys.exit(run_main(main))
