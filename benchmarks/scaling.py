#!/usr/bin/env python
"""Measures steps of training on several GPUs of this machine under each strategy, beside one GPU alone.

    python benchmarks/scaling.py                                     # FoX (Pro) 760M on two GPUs
    python benchmarks/scaling.py --experiments forgetting_transformer/pro_125m_2b --batch_size 4 --micro_batches 4
    python benchmarks/scaling.py --devices 4 --micro_batches 1 8 --out results.json
    python benchmarks/scaling.py --accelerator cpu --experiments demo/fox_pro --seq_len 256 --steps 2      # to try it

A step is forward and backward of each micro-batch (--batch_size sequences of random tokens on every GPU), the reduction
of gradients, clipping and AdamW, from random weights. Every step has fresh tokens, because a model learns by heart what
is repeated, and its forget gates change. Every case has the same. Steps follow each other without waiting, as in
training. The paper's experiments take half a million tokens a step: on two GPUs 16 micro-batches of one
sequence. A row is printed and saved to --out (record.py) as soon as it is measured. All cases share one start of the
processes. After a case that fails or runs out of memory they are started again; only the former is an error.

one           rank 0 alone, the others wait
one_graphs    the same with train.cuda_graphs=true; all cases without _graphs have train.cuda_graphs=false
ddp           strategy=ddp
ddp_graphs    strategy=ddp train.cuda_graphs=true
ddp_rebuilt   DDP without find_unused_parameters, which regroups gradients after its first step
fsdp_plain    FSDP2 with a unit per block and everything in fp32, as in version 0.2.0
fsdp          strategy=fsdp strategy.keep_gathered=false
fsdp_kept     strategy=fsdp strategy.keep_gathered=true

tokens/s      of one GPU: tokens of its micro-batches / mean seconds of --steps steps
efficiency    this divided by that of `one`, at the same tokens per GPU and step; of `_graphs` by that of `one_graphs`
MFU           of one GPU: model FLOPs per second / peak dense FLOP/s, counted as in benchmarks/training.py
exposed       milliseconds of a step in which rank 0's GPU communicates and computes nothing
hidden        milliseconds in which it does both
idle          milliseconds in which it does neither. The profiler slows the host, so without it there are fewer
weights       a digest of all weights after the steps: equal digests are bitwise equal runs
resumed       whether a new model with the weights and moments of this one takes bitwise the same steps
"""

import argparse
import copy
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from lightning.fabric.plugins.environments.lightning import find_free_network_port
from record import Record, RecordError, add_options, device_name, end_with_parent, run_main

from forgetting_transformer.command_line import count, positive
from training import compose, experiment_file, time_steps

CASES = ("one", "one_graphs", "fsdp_plain", "fsdp", "fsdp_kept", "ddp", "ddp_rebuilt", "ddp_graphs")
VOCABULARY = 50257
#: What a worker exits with when a case does not fit: ENOMEM.
OUT_OF_MEMORY = 12
#: Prefix of a case's status where its processes failed.
FAILED = "failed: processes ended with"
#: Steps of a trace, and steps before the first measured one, the one that compiles included.
TRACED, WARMUP = 2, 3
HEADER = (
    "| experiment | case | micro-batches | ms per step | tokens/s | efficiency | MFU "
    "| exposed ms | hidden ms | idle ms | memory GB |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = ["forgetting_transformer/pro_760m_16b"]
    parser.add_argument("--experiments", nargs="+", default=models, metavar="NAME")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--devices", type=count, default=2)
    parser.add_argument("--seq_len", type=count, default=16384)
    parser.add_argument("--batch_size", type=count, default=1, help="sequences of a micro-batch (default 1)")
    parser.add_argument("--micro_batches", type=count, nargs="+", default=[16], help="of a step (default 16)")
    parser.add_argument("--steps", type=count, default=8, help="measured steps (default 8)")
    parser.add_argument("--checkpointing", action="store_true", help="with activation checkpointing")
    parser.add_argument("--overrides", nargs="+", default=[], metavar="KEY=VALUE", help="config overrides for all")
    parser.add_argument("--accelerator", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--time_limit", type=positive, default=900, help="seconds for all (default 900)")
    add_options(parser)
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in args.experiments:
        if not experiment_file(name).is_file():
            parser.error(f"there is no experiment {name!r} in configs/experiment")
    return args


# The parent: starts the processes and keeps their rows.


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.worker:
        work(args, Path(args.worker))
        return 0
    try:
        record = Record("scaling", args, argv, args.accelerator, leave_out=("time_limit", "worker"))
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.devices} x {device_name(record.environment)}\n{HEADER}", flush=True)
    wanted = [
        {"experiment": experiment, "case": case, "micro_batches": count}
        for experiment in args.experiments
        for case in args.cases
        for count in args.micro_batches
    ]
    missing = []
    for case in wanted:
        if row := record.find(case):
            print(describe(row, record.rows), flush=True)
        else:
            missing.append(case)
    if missing:
        for row in run(args, missing, list(sys.argv[1:] if argv is None else argv)):
            print(describe(record.add(row), record.rows), flush=True)
    return 1 if record.failed else 0


def run(
    args: argparse.Namespace, cases: list[dict[str, Any]], argv: list[str], script: str = __file__
) -> Iterator[dict[str, Any]]:
    """Rows of the cases as they are measured; those that were not say why.

    Args:
        script: whose workers measure them. One argument is added: the file with the cases. A worker appends a line of
            JSON for each to rows.jsonl beside it, and ends with OUT_OF_MEMORY where the first without one does not fit.
    """
    deadline = time.monotonic() + args.time_limit
    useless = 0
    while cases:
        rows, problem = yield from start(args, cases, argv, script, deadline)
        left = list(cases)
        for row in rows:
            left.remove(next(case for case in left if case.items() <= row.items()))
        failed = problem.startswith(FAILED)
        useless = useless + 1 if failed and not rows else 0
        # The first case without a row is taken to be the one that did not fit or failed. Where cells of one GPU run
        # side by side and a process is killed, it may be another.
        given_up = left[:1] if failed or problem == "out of memory" else left
        yield from ({**case, "status": problem} for case in given_up)
        cases = left[len(given_up) :]
        if useless == 2:
            yield from ({**case, "status": "stopped: two starts in a row measured nothing"} for case in cases)
            return


def start(
    args: argparse.Namespace, cases: list[dict[str, Any]], argv: list[str], script: str, deadline: float
) -> Generator[dict[str, Any], None, tuple[list[dict[str, Any]], str]]:
    """One start of the processes. Returns the rows of the cases that it measured, and why it ended there."""
    with tempfile.TemporaryDirectory() as folder:
        job, rows = Path(folder) / "job.json", Path(folder) / "rows.jsonl"
        job.write_text(json.dumps(cases), encoding="utf-8")
        rows.touch()
        shared = {"WORLD_SIZE": args.devices, "LOCAL_WORLD_SIZE": args.devices, "GROUP_WORLD_SIZE": 1, "GROUP_RANK": 0}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": find_free_network_port()}
        shared |= {"TORCHELASTIC_RUN_ID": "scaling"}
        shared |= {"LT_CLI_USED": 1, "LT_DEVICES": args.devices, "LT_ACCELERATOR": args.accelerator}
        command = [sys.executable, script, *argv, "--worker", str(job)]
        processes = [
            subprocess.Popen(
                command,
                env=os.environ | {key: str(value) for key, value in (shared | {"RANK": k, "LOCAL_RANK": k}).items()},
                preexec_fn=end_with_parent,
            )
            for k in range(args.devices)
        ]
        found: list[dict[str, Any]] = []
        problem = ""
        try:
            while not problem:
                time.sleep(0.2)
                codes = [process.poll() for process in processes]
                if OUT_OF_MEMORY in codes:
                    problem = "out of memory"
                elif any(codes):
                    problem = f"{FAILED} {codes}"
                elif time.monotonic() > deadline:
                    problem = f"stopped after {args.time_limit:g} s"
                elif None not in codes:
                    problem = "failed: not measured"
                # A line that is being written has no end yet.
                whole = [line for line in rows.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]
                for line in whole[len(found) :]:
                    found.append(json.loads(line))
                    yield found[-1]
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
    return found, problem


# A worker: one rank of all cases.


def work(args: argparse.Namespace, job: Path) -> None:
    import torch
    import torch.distributed as dist
    from lightning.fabric.utilities.distributed import _destroy_dist_connection

    from forgetting_transformer.training.compilation import Compilation

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if args.accelerator == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    cases = json.loads(job.read_text(encoding="utf-8"))
    initial: dict[str, dict[str, Any]] = {}
    for case in cases:
        name = case["experiment"]
        config = compose(name, [f"fabric.accelerator={args.accelerator}", *args.overrides])
        config.train.gradient_checkpointing = args.checkpointing
        if name not in initial:
            compilation = Compilation(config, VOCABULARY, device, rank, world)
            initial = {name: build(config).state_dict()}
        row = {**case, "status": "ok"}
        try:
            if not is_alone(case) or rank == 0:
                row |= measure(args, case, config, initial[name], compilation, device)
        except torch.OutOfMemoryError:
            # At once: the others may wait in the middle of a step, and what this process has open may wait for them.
            os._exit(OUT_OF_MEMORY)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        # A rank that runs out of memory does so in the first case without a row: all have measured a case before it has
        # one, and none begins the next one until it does.
        if dist.is_initialized():
            wait_for_all()
        if rank == 0:
            with job.with_name("rows.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")
        if dist.is_initialized():
            wait_for_all()
    _destroy_dist_connection()


def is_alone(case: dict[str, Any]) -> bool:
    """Whether rank 0 runs it and the others wait."""
    return case["case"].startswith("one")


def compared_with(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Of these rows that of one GPU which `row` is compared with: with CUDA graphs if it has them."""
    case = "one_graphs" if row["case"].endswith("_graphs") else "one"
    same = {key: row[key] for key in ("experiment", "micro_batches")} | {"case": case, "status": "ok"}
    return next((other for other in rows if same.items() <= other.items()), None)


def build(config: Any, initialise: bool = True) -> Any:
    from forgetting_transformer.training import setup

    return setup.build_model(config, SimpleNamespace(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0), initialise)


@functools.cache
def waiting_group() -> Any:
    import torch.distributed as dist

    return dist.new_group(backend="gloo")


def wait_for_all() -> None:
    """Without work for a GPU, as NCCL's barrier would be."""
    import torch.distributed as dist

    dist.barrier(waiting_group())


def measure(
    args: argparse.Namespace, case: dict[str, Any], config: Any, weights: dict[str, Any], compilation: Any, device: Any
) -> dict[str, Any]:
    """The values of a row, on rank 0."""
    import torch

    from forgetting_transformer.training import hardware
    from forgetting_transformer.training.faults.corruption import digests_of_whole

    has_graphs = case["case"].endswith("_graphs")
    if device.type == "cuda":
        # With graphs the peak is that of all steps: PyTorch counts their memory only while they are recorded.
        torch.cuda.reset_peak_memory_stats(device)
    draws = torch.Generator(device).manual_seed(0 if is_alone(case) else int(os.environ["RANK"]))
    step, model, optimizer = prepare(args, case, config, weights, compilation, device, draws)
    for _ in range(WARMUP):
        loss = step()
    if device.type == "cuda":
        if not has_graphs:
            torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
    losses = [loss.item()]
    seconds = time_steps(step, args.steps, device, losses)
    rate = case["micro_batches"] * args.batch_size * args.seq_len / statistics.mean(seconds)
    peak = hardware.peak_flops(device, config.fabric.precision)
    # Later micro-batches record further graphs, while those of the first are no longer counted.
    is_counted = device.type == "cuda" and not (has_graphs and case["micro_batches"] > 1)
    row = {
        "step_seconds": seconds,
        "tokens_per_second": rate,
        "mfu": rate * model.config.flops_per_token(args.seq_len) / peak if peak else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if is_counted else None,
        "loss": losses[-1],
    }
    sums = digests_of_whole(dict(model.named_parameters())) if not is_alone(case) else {}
    row["weights"] = f"{sum(int(value, 16) for value in sums.values()) % 2**64:016x}" if sums else None
    if not is_alone(case) and case["micro_batches"] == args.micro_batches[-1]:
        row["resumed"] = resumes(args, case, config, weights, compilation, device, draws, (step, model, optimizer))
    if device.type == "cuda":
        row |= trace(step)
    return row


def prepare(
    args: argparse.Namespace,
    case: dict[str, Any],
    config: Any,
    weights: dict[str, Any],
    compilation: Any,
    device: Any,
    draws: Any,
) -> tuple[Callable[[], Any], Any, Any]:
    """A step, the model and the optimizer as a run would have them under the case's strategy.

    Args:
        draws: a generator on the device; each step takes its tokens from it.
    """
    import torch
    from lightning.fabric import Fabric

    from forgetting_transformer.training import launch, setup
    from forgetting_transformer.training.graphs import Graphs
    from forgetting_transformer.training.parameter_groups import undecayed_parameters

    kind, count, alone = case["case"], case["micro_batches"], is_alone(case)
    config.strategy.name = kind.partition("_")[0] if not alone else "auto"
    config.strategy.keep_gathered = kind == "fsdp_kept"
    model = build(config, initialise=False)
    model.load_state_dict(weights)
    model.train()
    undecayed = undecayed_parameters(model, config.train)
    shape = (count, args.batch_size, args.seq_len + 1)
    if alone:
        model.to(device)
        optimizer = setup.build_optimizer(model, undecayed, config.optimizer)
        wrapped, fabric = model, None
        dtype = torch.float32 if config.fabric.precision == "32-true" else torch.bfloat16
        autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    else:
        fabric = Fabric(
            accelerator=args.accelerator,
            devices=args.devices,
            strategy=strategy_of(kind, launch, config, args.devices),
            plugins=[launch._precision(config)],
        )
        wrapped = fabric.setup_module(model)
        optimizer = setup.build_optimizer(wrapped.module, undecayed, config.optimizer)
        model = wrapped.module
    compiles = config.train.compile is True or (config.train.compile == "auto" and device.type == "cuda")
    graphs = Graphs(kind.endswith("_graphs"), compiles, model.parameters(), reduced=not alone)
    if compiles:
        compilation.compile(model)

    def step() -> Any:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for k, tokens in enumerate(torch.randint(VOCABULARY, shape, generator=draws, device=device)):
            inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            last = k == count - 1
            if fabric is None:
                with graphs.micro_batch(last):
                    with autocast:
                        loss = wrapped(input_ids=inputs, labels=labels).loss.mean() / count
                    loss.backward()
            else:
                with fabric.no_backward_sync(wrapped, enabled=not last), graphs.micro_batch(last):
                    loss = wrapped(input_ids=inputs, labels=labels).loss.mean() / count
                    fabric.backward(loss)
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
        optimizer.step()
        return total

    return step, model, optimizer


def strategy_of(kind: str, launch: Any, config: Any, devices: int) -> Any:
    """The strategy that train.py would take, or what is compared with it."""
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

    if kind == "ddp_rebuilt":
        return DDPStrategy(gradient_as_bucket_view=True)
    if kind == "fsdp_plain":
        return ModelParallelStrategy(plain, data_parallel_size=1, tensor_parallel_size=devices)
    return launch._strategy(config, devices, devices if config.strategy.name == "fsdp" else 1)


def plain(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    from forgetting_transformer.model.decoder import DecoderBlock

    for module in model.modules():
        if isinstance(module, DecoderBlock):
            fully_shard(module, mesh=mesh["tensor_parallel"])
    return fully_shard(model, mesh=mesh["tensor_parallel"])


def resumes(
    args: argparse.Namespace,
    case: dict[str, Any],
    config: Any,
    weights: Any,
    compilation: Any,
    device: Any,
    draws: Any,
    now: Any,
) -> bool:
    """Whether two further steps of a new model, with the weights and moments of this one, are bitwise this one's."""
    import torch

    from forgetting_transformer.training.faults.corruption import digests_of_whole
    from forgetting_transformer.training.faults.shards import local

    step, model, optimizer = now
    kept = [local(parameter.detach()).clone() for parameter in model.parameters()]
    moments, place = copy.deepcopy(optimizer.state_dict()), draws.get_state()
    for _ in range(2):
        step()
    want = digests_of_whole(dict(model.named_parameters()))
    draws.set_state(place)
    again, other, its_optimizer = prepare(args, case, config, weights, compilation, device, draws)
    with torch.no_grad():
        for parameter, value in zip(other.parameters(), kept, strict=True):
            local(parameter).copy_(value)
    its_optimizer.load_state_dict(moments)
    for _ in range(2):
        again()
    return digests_of_whole(dict(other.named_parameters())) == want


def trace(step: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of a step in which the GPU computes, communicates, does both, or neither."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(TRACED):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return {key: value / TRACED for key, value in overlap(events).items()}


def overlap(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of a trace's events, in ms: `compute_ms`, `communication_ms`, `hidden_ms`, `exposed_ms` and `idle_ms`."""
    work: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            work[event["name"].startswith("nccl")].append(span)
    compute, communication, either = (_union(spans) for spans in (work[False], work[True], work[False] + work[True]))
    length = {name: sum(end - start for start, end in spans) / 1000 for name, spans in
              (("compute", compute), ("communication", communication), ("either", either))}  # fmt: skip
    whole = (either[-1][1] - either[0][0]) / 1000 if either else 0.0
    return {
        "compute_ms": length["compute"],
        "communication_ms": length["communication"],
        "hidden_ms": length["compute"] + length["communication"] - length["either"],
        "exposed_ms": length["either"] - length["compute"],
        "idle_ms": whole - length["either"],
    }


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same stretches of time, in order and without overlaps."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def describe(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    name = f"| {row['experiment']} | {row['case']} | {row['micro_batches']} |"
    if row["status"] != "ok":
        return f"{name} {row['status'].replace('|', '/')} | | | | | | | |"
    one = compared_with(row, rows)
    efficiency = "–" if one is None else f"{row['tokens_per_second'] / one['tokens_per_second']:.1%}"
    times = [f"{row[key]:.1f}" if key in row else "–" for key in ("exposed_ms", "hidden_ms", "idle_ms")]
    memory = "–" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 1e9:.1f}"
    step = f"{statistics.mean(row['step_seconds']) * 1000:,.1f}"
    mfu = "–" if row.get("mfu") is None else f"{row['mfu']:.1%}"
    return f"{name} {step} | {row['tokens_per_second']:,.0f} | {efficiency} | {mfu} | {' | '.join(times)} | {memory} |"


if __name__ == "__main__":
    sys.exit(run_main(main))
