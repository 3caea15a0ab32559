#!/usr/bin/env python
"""Measures steps of training on long sequences that several GPUs of this machine share, beside one GPU alone.

    python benchmarks/long_contexts.py                               # FoX (Pro), Transformer, Mamba-2 760M on two GPUs
    python benchmarks/long_contexts.py --devices 8 --seq_len 524288 1048576 --no-unpruned --out results.json
    python benchmarks/long_contexts.py --devices 1                   # what one GPU does alone
    python benchmarks/long_contexts.py --accelerator cpu --experiments demo/fox_pro --seq_len 256 512   # to try it

A step is forward and backward of one sequence of random tokens with activation checkpointing, and the sum of gradients
over the GPUs that share it (`strategy.context`). Weights are random. FoX is measured with pruning and without. Its
gates have time constants spread logarithmically over the heads of a layer, in no order (--time_constants). A row is
printed and saved to --out (record.py) when it is measured; the same command measures missing rows. Lengths are measured
in the order of --seq_len, cells of one GPU side by side, one on each GPU. With --devices 1, models are measured one by
one, each at all lengths. Running out of memory is a result.

tokens/s     tokens of the sequence / median seconds of --steps steps (more where they are short), on all GPUs together
attention    milliseconds of a step in kernels of attention or of a recurrence; exchange, gradients: in the collectives
             among the GPUs, with the time that this GPU waits there for others; other: in all other kernels
exposed      milliseconds in which a GPU communicates and computes nothing; idle: neither
by_rank      the same of every GPU. The least of the exchanges is that of the GPU that the others wait for
memory       peak of PyTorch's allocator: weights, gradients, activations, without AdamW's moments
"""

import argparse
import gc
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from record import Record, RecordError, add_options, device_name, run_main
from scaling import OUT_OF_MEMORY, overlap, run, wait_for_all, waiting_group

from forgetting_transformer.command_line import count, positive
from forgetting_transformer.ops.backends import describe_error
from training import compose, experiment_file

VOCABULARY = 50257
HEADER = (
    "| experiment | pruned | tokens | GPUs | ms per step | tokens/s | times one GPU | attention ms | exchange ms "
    "| memory GB |\n|---|---|---|---|---|---|---|---|---|---|"
)
#: Seconds from which on the last measured step is the one that is traced.
LONG_STEP = 5
#: Seconds that short steps are measured for at least, with --steps of at least 2.
SHORT_STEPS = 3
#: Kernels of attention and of recurrences: ours by name, those of other packages by parts of their names. What is in no
#: list is "other".
MIXERS = re.compile(
    r"^(forward|backward|finish|key_gradient|query_gradient|stretch|bound|running|delta|gate_sum|gate_gradient|split|merge"
    r"|decay|score|state|output|value_gradient|score_gradient|group_gradient|decay_gradient|carry|state_gradient)_kernel$"
    r"|flash|fmha|cudnn.*sdpa|^_?chunk_|recurrent|delta_rule|prepare_wy",
    re.IGNORECASE,
)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = ["forgetting_transformer/pro_760m_16b", "transformer/llama_760m_16b", "mamba2/760m_16b"]
    parser.add_argument("--experiments", nargs="+", default=models, metavar="NAME")
    parser.add_argument("--seq_len", type=count, nargs="+", default=[16384, 65536, 131072, 262144])
    parser.add_argument("--devices", type=count, default=2, help="that share a sequence (default 2; 1: alone)")
    parser.add_argument(
        "--alone", action=argparse.BooleanOptionalAction, default=True, help="one GPU alone, too (default)"
    )
    parser.add_argument(
        "--unpruned",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="models that prune, also without pruning (default), whose time grows with the square of the length",
    )
    parser.add_argument("--steps", type=count, default=2, help="to measure at least (default 2); short ones for 3 s")
    add_time_constants(parser)
    parser.add_argument("--overrides", nargs="+", default=[], metavar="KEY=VALUE", help="config overrides for all")
    parser.add_argument("--accelerator", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--time_limit", type=positive, default=1800, help="seconds for all (default 1800)")
    add_options(parser)
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in args.experiments:
        if not experiment_file(name).is_file():
            parser.error(f"there is no experiment {name!r} in configs/experiment")
    for length in args.seq_len:
        if length % args.devices:
            parser.error(f"--seq_len {length} tokens have no equal parts for --devices {args.devices}")
    return args


def add_time_constants(parser: argparse.ArgumentParser) -> None:
    """Adds --time_constants, for `set_time_constants`."""
    parser.add_argument(
        "--time_constants",
        type=positive,
        nargs=2,
        default=[4, 1e4],
        metavar=("MIN", "MAX"),
        help="tokens after which FoX's gates have let a weight fall to 1/e (default 4 to 10,000)",
    )


# The parent: starts the processes and keeps their rows.


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.worker:
        work(args, Path(args.worker))
        return 0
    try:
        record = Record("long_contexts", args, argv, args.accelerator, leave_out=("time_limit", "worker"))
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.devices} x {device_name(record.environment)}\n{HEADER}", flush=True)
    missing = []
    for case in cases_of(args):
        if row := record.find(case):
            print(describe(row, record.rows), flush=True)
        else:
            missing.append(case)
    if missing:
        for row in run(args, missing, list(sys.argv[1:] if argv is None else argv), __file__):
            print(describe(record.add(row), record.rows), flush=True)
    return 1 if record.failed else 0


def cases_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Length by length, one GPU before all of them; model by model where there is only one GPU."""
    cases = [
        {"experiment": experiment, "pruned": pruned, "tokens": length, "context": size}
        for length in args.seq_len
        for size in sorted({1, args.devices} if args.alone else {args.devices})
        for experiment in args.experiments
        for pruned in ((True, False)[: 1 + args.unpruned] if prunes(experiment) else (None,))
    ]
    if args.devices == 1:
        cases.sort(key=lambda case: (args.experiments.index(case["experiment"]), case["pruned"] is False))
    return cases


def prunes(experiment: str) -> bool:
    config = compose(experiment, [])
    return config.model.config.get("log_pruning_tolerance") is not None


def describe(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    pruned = {True: "yes", False: "no", None: "–"}[row["pruned"]]
    name = f"| {row['experiment']} | {pruned} | {row['tokens']:,} | {row['context']} |"
    if row["status"] != "ok":
        return f"{name} {row['status'].replace('|', '/')} | | | | | |"
    same = {key: row[key] for key in ("experiment", "pruned", "tokens")} | {"context": 1, "status": "ok"}
    alone = next((r for r in rows if same.items() <= r.items()), None)
    gain = "–" if alone is None else f"{row['tokens_per_second'] / alone['tokens_per_second']:.2f}"
    times = [f"{row[key]:.0f}" if key in row else "–" for key in ("attention_ms", "exchange_ms")]
    memory = "–" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 1e9:.1f}"
    step = f"{statistics.median(row['step_seconds']) * 1000:,.0f}"
    return f"{name} {step} | {row['tokens_per_second']:,.0f} | {gain} | {' | '.join(times)} | {memory} |"


# A worker: one rank of all cases.


def work(args: argparse.Namespace, job: Path) -> None:
    import torch
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if args.accelerator == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    bench = Bench(args, device, rank, world)
    cases = json.loads(job.read_text(encoding="utf-8"))
    counters = dist.FileStore(str(job.with_name("counters")), world)

    def keep(row: dict[str, Any]) -> None:
        with job.with_name("rows.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")

    while cases:
        # Cells of one GPU: each GPU takes the next one when it is free.
        alone = list(itertools.takewhile(lambda case: case["context"] == 1, cases))
        while (number := counters.add(f"before the last {len(cases)}", 1) - 1) < len(alone):
            keep(bench.row(alone[number]))
        cases = cases[len(alone) :]
        wait_for_all()
        if cases:
            now, *cases = cases
            everybodys: list[Any] = [None] * world
            dist.all_gather_object(everybodys, bench.row(now), group=waiting_group())
            if rank == 0:
                by_rank = [{key: row.get(key) for key in row if key.endswith("_ms")} for row in everybodys]
                keep({**everybodys[0], "by_rank": by_rank})
            wait_for_all()  # as in scaling.py: none begins the next case until this one has its row
    dist.destroy_process_group()


class Bench:
    """Measures cells, and keeps the model of the last one."""

    def __init__(self, args: argparse.Namespace, device: Any, rank: int, world: int) -> None:
        self.args, self.device, self.rank, self.world = args, device, rank, world
        self.name: tuple[str, bool | None] | None = None
        self.model: Any = None
        self.exchanged = 0
        self._count_bytes()

    def row(self, case: dict[str, Any]) -> dict[str, Any]:
        import torch

        try:
            return {**case, "status": "ok", **self.measure(case)}
        except torch.OutOfMemoryError as error:
            error.__traceback__ = None
            self.name = self.model = None
            if case["context"] > 1:
                os._exit(OUT_OF_MEMORY)  # the others may wait in the middle of a step
            return {**case, "status": "out of memory"}
        except Exception as error:
            if case["context"] > 1:
                print(f"rank {self.rank}: {case} failed", file=sys.stderr, flush=True)
                raise
            traceback.print_exc()
            self.name = self.model = None
            return {**case, "status": f"failed: {describe_error(error)}"}

    def measure(self, case: dict[str, Any]) -> dict[str, Any]:
        import torch

        from forgetting_transformer.ops import context

        shared = context.Context(self.rank, self.world) if case["context"] > 1 else None
        model, length = self.model_of(case["experiment"], case["pruned"]), case["tokens"]
        draws = torch.Generator().manual_seed(0)
        tokens = torch.randint(model.config.vocab_size, (1, length + 1), generator=draws).to(self.device)
        part = slice(length) if shared is None else shared.part(length)
        inputs, labels = tokens[:, :-1][:, part].contiguous(), tokens[:, 1:][:, part].contiguous()

        def step() -> Any:
            self.exchanged = 0
            model.zero_grad(set_to_none=True)
            with context.sharing(shared):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                    loss = model(input_ids=inputs, labels=labels).loss.sum() / length
                loss.backward()
            if shared is not None:
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        torch.distributed.all_reduce(parameter.grad)
            return loss.detach()

        # Before they are measured: one block has all that is compiled for this length.
        decoder, blocks = model.decoder, model.decoder.layers
        decoder.layers = torch.nn.ModuleList(blocks[:1])
        try:
            for _ in range(2):
                step()
        finally:
            decoder.layers = blocks
        if length <= 32768:
            step()  # the host has to learn the launches of all blocks
        synchronize(self.device)
        if shared is not None:
            wait_for_all()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds: list[float] = []

        def timed() -> None:
            synchronize(self.device)
            began = time.perf_counter()
            losses.append(step())
            synchronize(self.device)
            seconds.append(time.perf_counter() - began)

        losses: list[Any] = []
        while agreed(another(self.args.steps, seconds), shared):
            timed()
        traced: dict[str, Any] = {}
        if self.device.type != "cuda":
            timed()
        elif agreed(bool(seconds) and min(seconds) > LONG_STEP, shared):
            traced = trace(timed)  # takes as long with a trace as without
        else:
            timed()
            traced = trace(step)
        row = {
            "step_seconds": seconds,
            "tokens_per_second": length / statistics.median(seconds),
            "peak_memory_bytes": torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
            "exchange_bytes": self.exchanged,
            "compiled": model._is_compiled,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            **traced,
        }
        if shared is not None:
            torch.distributed.all_reduce(losses[-1])
        return {**row, "loss": losses[-1].item()}

    def model_of(self, experiment: str, pruned: bool | None) -> Any:
        import torch

        from forgetting_transformer.training import setup
        from forgetting_transformer.training.compilation import Compilation

        if self.name == (experiment, pruned):
            return self.model
        self.name = self.model = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        overrides = ["model.config.log_pruning_tolerance=null"] if pruned is False else []
        accelerator = f"fabric.accelerator={self.args.accelerator}"
        config = compose(experiment, [accelerator, *overrides, *self.args.overrides])
        config.train.gradient_checkpointing = True
        model = setup.build_model(config, SimpleNamespace(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0)).to(
            self.device
        )
        set_time_constants(model, self.args.time_constants)
        if config.train.compile is True or (config.train.compile == "auto" and self.device.type == "cuda"):
            Compilation(config, VOCABULARY, self.device, self.rank, self.world).compile(model)
        self.name, self.model = (experiment, pruned), model.train()
        return self.model

    def _count_bytes(self) -> None:
        """Adds up what this GPU sends in a step to others among those that share a sequence."""
        import torch.distributed as dist

        original = dist.all_to_all_single

        def counted(received: Any, sent: Any, **options: Any) -> Any:
            self.exchanged += sent.numel() * sent.element_size() * (len(sent) - 1) // len(sent)
            return original(received, sent, **options)

        dist.all_to_all_single = counted


def set_time_constants(model: Any, time_constants: Sequence[float]) -> None:
    """Spreads the time constants of forget gates logarithmically over the heads of a layer, in no order.

    Args:
        time_constants: the shortest and the longest, in tokens.
    """
    import torch

    from forgetting_transformer.model.mixers.forgetting_attention import decay_time_bias

    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, bias in model.named_parameters():
            if name.endswith("fgate_proj.bias"):
                spread = decay_time_bias(len(bias), *time_constants)
                bias.copy_(spread[torch.randperm(len(bias), generator=draws)])


def another(steps: int, seconds: Sequence[float]) -> bool:
    """Whether to measure one more step before the last. A pause of the host is as long as a short step."""
    if len(seconds) < steps - 1:
        return True
    if steps == 1 or min(seconds) > LONG_STEP:
        return False
    return len(seconds) < 2 or len(seconds) * min(seconds) < SHORT_STEPS


def agreed(decision: bool, shared: Any) -> bool:
    """What rank 0 decides, among ranks that share a sequence and must take the same steps."""
    import torch.distributed as dist

    decided = [decision]
    if shared is not None:
        dist.broadcast_object_list(decided, src=0, group=waiting_group())
    return decided[0]


def synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def trace(step: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds of a step by kind of kernel, and in which the GPU communicates alone or waits for the host."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return by_kind(events) | overlap(events)


def by_kind(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of a trace's events, in ms: `attention_ms`, `exchange_ms`, `gradients_ms` and `other_ms`."""
    found = dict.fromkeys(("attention_ms", "exchange_ms", "gradients_ms", "other_ms"), 0.0)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            if event["name"].startswith("nccl"):
                kind = "gradients_ms" if "AllReduce" in event["name"] else "exchange_ms"
            else:
                kind = "attention_ms" if MIXERS.search(event["name"]) else "other_ms"
            found[kind] += float(event["dur"]) / 1000
    return found


if __name__ == "__main__":
    sys.exit(run_main(main))
