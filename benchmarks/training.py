#!/usr/bin/env python
"""Measures training speed and memory of whole models with the configs of configs/experiment and the training code.

    python benchmarks/training.py                                    # one model per architecture, defaults below
    python benchmarks/training.py --experiments mamba2/760m_16b transformer/llama_760m_16b --out results.json
    python benchmarks/training.py --experiments forgetting_transformer/pro_760m_16b \\
        --overrides model.config.log_pruning_tolerance=null          # FoX without pruning
    python benchmarks/training.py --experiments output/run           # a run: config, trained weights, held-out tokens
    python benchmarks/training.py --experiments output/run --overrides model.config.log_pruning_tolerance=null

A step is forward and backward of one micro-batch of random tokens on one device. --optimizer_step adds gradient
clipping and AdamW at a learning rate of 0, which costs the same and changes no weight. Each experiment runs in a
separate process, first with activation checkpointing, then without. Each row of a Markdown table is printed as soon as
it is measured, and --out saves it with all details as JSON (record.py). The same command measures missing rows. Running
out of memory or of time is a result, not an error. Any other failure is also in the table, and the exit code is 1.

Defaults on a GPU: the 760M models, 16,384 tokens, bf16 autocast. Defaults on a CPU, to try it: the demo models, 512
tokens, fp32.

tokens/s     tokens of a step / median seconds of --steps steps, after --warmup_steps. On a GPU the host queues them
             without waiting, as train.py does, and seconds are those between marks in the GPU's queue
MFU          model FLOPs per second / peak dense FLOP/s of the GPU at this precision. Model FLOPs count what the model
             needs: causal attention has T(T+1)/2 pairs, backward is twice forward, recomputation is not counted, and
             pruned attention counts as full. Empty if the peak is unknown; --peak_flops gives it
memory       peak of PyTorch's allocator during the measured steps: weights, gradients, activations, with
             --optimizer_step AdamW's moments
first step   seconds of the first step of a process, which compiles and tunes kernels
cold start   seconds from the start of the process to the end of its first step: imports, building the model, and that
             step. It uses kernels that earlier runs left in the disk caches; --empty_kernel_cache hides them

Weights are those of initialisation, where forget gates are near 1/2 and pruning skips most, unless --experiments names
the output_dir of a run.
"""

import argparse
import contextlib
import functools
import gc
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from record import Record, RecordError, add_options, device_name, end_with_parent, run_main

from forgetting_transformer import command_line
from forgetting_transformer.command_line import at_least, count, large, positive

STARTED = time.perf_counter()
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
ON_GPU = {
    "experiments": [
        "forgetting_transformer/pro_760m_16b",
        "forgetting_transformer/llama_760m_16b",
        "transformer/pro_760m_16b",
        "transformer/llama_760m_16b",
        "transformer_swa/760m_16b",
        "mamba2/760m_16b",
        "hgrn2/760m_16b",
        "delta_net/760m_16b",
        "samba/760m_16b",
    ],
    "seq_len": 16384,
    "vocab_size": 50257,
    "precision": "bf16-mixed",
}
ON_CPU = {
    "experiments": ["demo/fox_pro", "demo/transformer_llama"],
    "seq_len": 512,
    "vocab_size": 4096,
    "precision": "32-true",
}
CHECKPOINTING = {"both": (True, False), "on": (True,), "off": (False,)}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--experiments",
        nargs="+",
        metavar="NAME",
        help="files of configs/experiment/longcrawl64, or demo/NAME, or runs",
    )
    parser.add_argument("--seq_len", type=count, help="tokens of a sequence")
    parser.add_argument("--batch_size", type=count, default=1, help="sequences of a micro-batch (default 1)")
    parser.add_argument("--vocab_size", type=count, help="tokens of the vocabulary; GPT-2's 50,257 on a GPU")
    parser.add_argument("--checkpointing", choices=CHECKPOINTING, default="both", help="activation checkpointing")
    parser.add_argument("--steps", type=count, default=5, help="measured steps (default 5)")
    parser.add_argument(
        "--warmup_steps", type=count, default=2, help="steps before them, the first included (default 2)"
    )
    parser.add_argument("--optimizer_step", action="store_true", help="a step includes clipping and AdamW")
    parser.add_argument(
        "--attention",
        choices=("ours", "cudnn"),
        default="ours",
        help="kernels of attention without gates: ours, or cuDNN's through PyTorch, to compare with (default ours)",
    )
    parser.add_argument("--precision", choices=("bf16-mixed", "32-true"))
    parser.add_argument(
        "--kernels", type=at_least(0), default=0, help="keep in --out the kernels that take most of a step, so many"
    )
    parser.add_argument("--peak_flops", type=large, help="peak FLOP/s of the device, for MFU")
    parser.add_argument("--overrides", nargs="+", default=[], metavar="KEY=VALUE", help="config overrides for all")
    command_line.add_plugins(parser)
    parser.add_argument("--empty_kernel_cache", action="store_true", help="start without compiled and tuned kernels")
    parser.add_argument(
        "--time_limit",
        type=positive,
        default=900,
        help="seconds an experiment may take before it is stopped (default 900)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    add_options(parser)
    parser.add_argument("--worker", nargs=2, metavar=("EXPERIMENT", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    del args.plugins  # which are imported, and change nothing that is measured
    if args.device is None:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    for key, value in (ON_GPU if args.device == "cuda" else ON_CPU).items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    for name in args.experiments:
        if not is_run(name) and not experiment_file(name).is_file():
            folder = CONFIGS / "experiment"
            known = sorted(str(f.relative_to(folder).with_suffix("")) for f in folder.glob("**/*.yaml"))
            parser.error(f"there is no experiment {name!r}; choose from {', '.join(known)}")
    return args


def experiment_file(name: str) -> Path:
    """`mamba2/760m_16b` is short for `longcrawl64/mamba2/760m_16b`."""
    file = CONFIGS / "experiment" / f"{name}.yaml"
    return file if file.is_file() else CONFIGS / "experiment" / "longcrawl64" / f"{name}.yaml"


def is_run(name: str) -> bool:
    """Whether this is the output_dir of a run with checkpoints."""
    return (Path(name) / "checkpoints").is_dir()


# The parent: one process per experiment.


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.worker:
        experiment, file = args.worker
        work(args, experiment, Path(file))
        return 0
    try:
        record = Record("training", args, argv, args.device, leave_out=("time_limit", "worker"))
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(HEADER, flush=True)
    for experiment in args.experiments:
        missing = []
        for checkpointing in CHECKPOINTING[args.checkpointing]:
            if row := record.find({"experiment": experiment, "checkpointing": checkpointing}):
                print(describe_row(row), flush=True)
            else:
                missing.append(checkpointing)
        if missing:
            for row in run_in_process(args, experiment, missing, list(sys.argv[1:] if argv is None else argv)):
                print(describe_row(record.add(row)), flush=True)
    print(footer(record.content))
    return 1 if record.failed else 0


def run_in_process(
    args: argparse.Namespace, experiment: str, settings: Sequence[bool], argv: list[str]
) -> Iterator[dict[str, Any]]:
    """Rows of one experiment as they are measured, one per checkpointing setting; what did not finish says why."""
    chosen = ["--checkpointing", "both" if len(settings) > 1 else "on" if settings[0] else "off"]
    command = [sys.executable, __file__, *argv, *chosen, "--device", args.device, "--worker", experiment]
    cases = [{"experiment": experiment, "checkpointing": checkpointing} for checkpointing in settings]
    yield from rows_of_process(command, cases, args.time_limit, args.empty_kernel_cache)


def rows_of_process(
    command: Sequence[str], cases: Sequence[dict[str, Any]], time_limit: float, empty_kernel_cache: bool = False
) -> Iterator[dict[str, Any]]:
    """Rows of a worker as it measures them; cases that it did not finish get a row that says why.

    Args:
        command: of the worker. One argument is added: the file that gets a line of JSON per case, in their order.
        cases: the values that tell the worker's rows apart.
        time_limit: seconds after which it is stopped.
        empty_kernel_cache: hide the kernels that Triton and Inductor have on disk.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.touch()
        environ = dict(os.environ)
        if empty_kernel_cache:
            environ |= {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        process = subprocess.Popen([*command, str(file)], env=environ, preexec_fn=end_with_parent)
        deadline, done = time.monotonic() + time_limit, 0
        problem = None
        try:
            while problem is None:
                try:
                    process.wait(min(0.2, max(0.0, deadline - time.monotonic())))
                    problem = f"failed: the process ended with code {process.returncode}"
                except subprocess.TimeoutExpired:
                    if time.monotonic() >= deadline:
                        process.kill()
                        process.wait()
                        problem = f"stopped after {time_limit:g} s"
                # A line that is being written has no end yet.
                lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
                whole = [line for line in lines if line.endswith("\n")]
                for line in whole[done:]:
                    yield json.loads(line)
                done = len(whole)
        finally:
            process.kill()
            process.wait()
    for case in cases[done:]:
        yield {**case, "status": problem}


# The worker: measures one experiment and appends a line of JSON per checkpointing setting.


def work(args: argparse.Namespace, experiment: str, file: Path) -> None:
    for i, checkpointing in enumerate(CHECKPOINTING[args.checkpointing]):
        row = {"experiment": experiment, "checkpointing": checkpointing}
        row |= attempt(functools.partial(measure, args, experiment, checkpointing, cold=i == 0))
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")


def attempt(measurement: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The measurement with `status` "ok", or the status that says why there is none."""
    import torch

    try:
        return {"status": "ok", **measurement()}
    except torch.OutOfMemoryError as error:
        # The traceback holds the frames, and the frames hold the tensors that the next measurement needs room for.
        error.__traceback__ = None
        return {"status": "out of memory"}
    except Exception as error:
        error.__traceback__ = None
        return {"status": f"failed: {type(error).__name__}: {' '.join(str(error).split())}"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure(args: argparse.Namespace, experiment: str, checkpointing: bool, cold: bool) -> dict[str, Any]:
    """Builds the model as a training run would, and times its steps. `cold`: the first measurement of a process."""
    import torch

    from forgetting_transformer.training import execution, setup
    from forgetting_transformer.training.compilation import Compilation
    from forgetting_transformer.training.graphs import Graphs, check_device
    from forgetting_transformer.training.graphs import choose as choose_graphs
    from forgetting_transformer.training.kernel_choice import choose_on_all_ranks
    from forgetting_transformer.training.parameter_groups import undecayed_parameters

    device = torch.device(args.device)
    if is_run(experiment):
        model, config, tokens_BT = read_run(args, experiment, checkpointing)
    else:
        config = compose(experiment, overrides(args, checkpointing))
        model = setup.build_model(config, SimpleNamespace(vocab_size=args.vocab_size, bos_token_id=0, eos_token_id=0))
        tokens_BT = torch.randint(args.vocab_size, (args.batch_size, args.seq_len + 1))
    with_cudnn = args.attention == "cudnn"
    if with_cudnn and not any(use.op == "attention" and not use.is_gated for use in model.op_uses()):
        raise ValueError("--attention cudnn: no layer of this model has attention without gates; leave it out")
    if with_cudnn and device.type != "cuda":
        raise ValueError("--attention cudnn needs a GPU")
    config.train.check()
    check_device(config.train.cuda_graphs, device)
    undecayed = undecayed_parameters(model, config.train)
    model = model.to(device).train()
    optimizer = setup.build_optimizer(model, undecayed, config.optimizer)
    keep_weights(optimizer)
    tokens_BT = tokens_BT.to(device)
    inputs_BT, labels_BT = tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16-mixed")

    dtype = torch.bfloat16 if args.precision == "bf16-mixed" else torch.float32
    chosen = choose_on_all_ranks(model, dtype, device, [inputs_BT.shape[1]])
    compiles = execution.choose(config.train.compile, device, None, chosen).compile
    flops_per_token = model.config.flops_per_token(args.seq_len)
    flops_per_block = flops_per_token * inputs_BT.numel() / model.config.num_hidden_layers
    graphs = Graphs(choose_graphs(config, device, compiles, flops_per_block), compiles, model.parameters())
    if compiles:
        Compilation(config, model.config.vocab_size, device).compile(model)

    def step() -> torch.Tensor:
        with graphs.micro_batch(last=args.optimizer_step):
            with autocast:
                loss = model(input_ids=inputs_BT, labels=labels_BT).loss.mean()
            loss.backward()
        # Without an optimizer step gradients add up, as they do over the micro-batches of a training step.
        if args.optimizer_step:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    with cudnn_attention() if with_cudnn else contextlib.nullcontext():
        times = measure_steps(args, step, inputs_BT.numel(), flops_per_token, device, cold, graphs=graphs.on)
    backends = {op: backend.text for op, backend in chosen.items()}
    if with_cudnn:
        backends["attention"] = "cuDNN"
    return {
        "trained": is_run(experiment),
        "compiled": model._is_compiled,
        "cuda_graphs": graphs.on,
        "pruned": getattr(model.config, "log_pruning_tolerance", None) is not None,
        "backends": backends,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **times,
    }


def keep_weights(optimizer: Any) -> None:
    """Lets steps change no weight. All have the same batch, which a model learns by heart, and its gates change."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0


@contextlib.contextmanager
def cudnn_attention() -> Iterator[None]:
    """Attention without gates runs in cuDNN, through `scaled_dot_product_attention`, and not in our kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from forgetting_transformer.ops import attention

    takes_kernel = attention.takes_kernel
    attention.takes_kernel = lambda *_, **__: False
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            yield
    finally:
        attention.takes_kernel = takes_kernel


def measure_steps(
    args: argparse.Namespace,
    step: Callable[[], Any],
    tokens: int,
    flops_per_token: float,
    device: Any,
    cold: bool,
    graphs: bool = False,
) -> dict[str, Any]:
    """Times of `step`, which returns its loss, after the warm-up: the part of a row that every model has.

    Args:
        graphs: CUDA graphs are replayed. PyTorch counts their memory while they are recorded, in the first steps.

    Raises:
        ArithmeticError: a loss is not finite.
    """
    import torch

    from forgetting_transformer.training import hardware

    started = time.perf_counter()
    losses = [step().item()]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    first_step, cold_start = time.perf_counter() - started, time.perf_counter() - STARTED
    for _ in range(args.warmup_steps - 1):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if not graphs:
            torch.cuda.reset_peak_memory_stats(device)
    seconds = time_steps(step, args.steps, device, losses)
    for loss in losses:
        if not math.isfinite(loss):
            raise ArithmeticError(f"the loss is {loss}")

    rate = tokens / statistics.median(seconds)
    peak = args.peak_flops or hardware.peak_flops(device, args.precision)
    return {
        "tokens_per_step": tokens,
        "flops_per_token": flops_per_token,
        "step_seconds": seconds,
        "tokens_per_second": rate,
        "mfu": rate * flops_per_token / peak if peak else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "first_step_seconds": first_step if cold else None,
        "cold_start_seconds": cold_start if cold else None,
        **({"kernels": slowest_kernels(step, args.kernels)} if args.kernels else {}),
    }


def time_steps(step: Callable[[], Any], count: int, device: Any, losses: list[float]) -> list[float]:
    """Seconds of each of `count` steps, one after another without waiting, as in training; adds to losses."""
    import torch

    if device.type != "cuda":
        seconds = []
        for _ in range(count):
            started = time.perf_counter()
            losses.append(step().item())
            seconds.append(time.perf_counter() - started)
        return seconds
    marks, found = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)], []
    marks[0].record()
    for mark in marks[1:]:
        found.append(step())
        mark.record()
    torch.cuda.synchronize(device)
    losses.extend(loss.item() for loss in found)
    return [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(marks)]


def slowest_kernels(step: Callable[[], Any], count: int) -> list[dict[str, Any]]:
    """What of a step takes most of the device's time: name, calls and milliseconds of each kernel."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as profiler:
        step()
    rows = []
    for event in profiler.key_averages():
        if not on_cuda or event.device_type == DeviceType.CUDA:
            microseconds = event.self_device_time_total if on_cuda else event.self_cpu_time_total
            rows.append({"name": event.key, "calls": event.count, "ms": round(microseconds / 1000, 4)})
    return sorted(rows, key=lambda row: -row["ms"])[:count]


def read_run(args: argparse.Namespace, output_dir: str, checkpointing: bool) -> tuple[Any, Any, Any]:
    """A trained model as its run trains it, the run's config, and held-out tokens (batch_size, seq_len + 1).

    --overrides change both; what does not fit the trained weights is an error.
    """
    import numpy as np
    import torch
    from omegaconf import OmegaConf

    from forgetting_transformer.evaluation.models import load_model
    from forgetting_transformer.evaluation.per_token_loss import find_heldout, open_heldout
    from forgetting_transformer.training import setup
    from forgetting_transformer.training.config import ConfigError
    from forgetting_transformer.training.parsing import parse

    stored = OmegaConf.load(Path(output_dir) / "config.yaml")
    # A run's config.yaml is resolved: it has values, and no groups to choose from.
    for override in overrides(args, checkpointing):
        key, equals, _ = override.partition("=")
        if not equals or not key.replace(".", "").isidentifier() or OmegaConf.is_dict(OmegaConf.select(stored, key)):
            raise ConfigError(f"--overrides {override}: for a run, give KEY=VALUE with a key of its config.yaml")
    config = parse(OmegaConf.merge(stored, OmegaConf.from_dotlist(overrides(args, checkpointing))))
    trained = load_model(output_dir).model
    model = setup.build_model(config, trained.config)  # its vocabulary, BOS and EOS
    model.load_state_dict(trained.state_dict())
    folder = find_heldout(config.data_dir, config.datamodule.dataset)
    data = open_heldout(folder, args.seq_len, args.batch_size * args.seq_len)
    labels_BT = torch.from_numpy(np.concatenate([data.read(i) for i in range(args.batch_size)]).astype(np.int64))
    first_B1 = torch.full((args.batch_size, 1), data.bos_token_id)
    return model, config, torch.cat([first_B1, labels_BT], dim=1)


def overrides(args: argparse.Namespace, checkpointing: bool) -> list[str]:
    """Those of a row. CUDA graphs and activation checkpointing exclude each other, so no config may have both first."""
    return [f"train.gradient_checkpointing={str(checkpointing).lower()}", *args.overrides]


def experiment_override(experiment: str) -> str:
    """What train.py is given to choose an experiment."""
    group, name = str(experiment_file(experiment).relative_to(CONFIGS).with_suffix("")).rsplit("/", 1)
    return f"+{group}={name}"


def compose(experiment: str, overrides: list[str]) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    from forgetting_transformer.training.parsing import parse

    chosen = experiment_override(experiment)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return parse(hydra_compose("config", overrides=[chosen, *overrides, "output_dir=unused", "data_dir=unused"]))


# The table: HEADER, a line per row, and the footer.

HEADER = (
    "| experiment | checkpointing | ms per step | tokens/s | MFU | memory GB | first step s | cold start s |\n"
    "|---|---|---|---|---|---|---|---|"
)


def footer(result: dict[str, Any]) -> str:
    """What the rows mean."""
    chosen = result["settings"]
    step = "forward, backward, clipping, AdamW" if chosen["optimizer_step"] else "forward and backward"
    return (
        f"\n{device_name(result['environment'])}, {chosen['precision']}, {chosen['batch_size']} x "
        f"{chosen['seq_len']:,} tokens a step; a step is {step}. MFU: causal-exact model FLOPs, recomputation not "
        f"counted, pruned attention as if "
        "full, over dense peak."
    )


def describe_row(row: dict[str, Any]) -> str:
    name, checkpointing = row["experiment"], "yes" if row["checkpointing"] else "no"
    if row["status"] != "ok":
        reason = row["status"].replace("|", "/")
        return f"| {name} | {checkpointing} | {reason} | | | | | |"
    cells = [
        name,
        checkpointing,
        f"{statistics.median(row['step_seconds']) * 1000:,.1f}",
        f"{row['tokens_per_second']:,.0f}",
        "–" if row["mfu"] is None else f"{row['mfu']:.1%}",
        "–" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 1e9:.1f}",
        "–" if row["first_step_seconds"] is None else f"{row['first_step_seconds']:.1f}",
        "–" if row["cold_start_seconds"] is None else f"{row['cold_start_seconds']:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(run_main(main))
