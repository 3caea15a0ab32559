#!/usr/bin/env python
"""Makes the study of studies/retrofit/README.md: pretrained Transformers that are given forget gates and trained on.

    python -m studies.adding_gates run output/retrofit
    python -m studies.adding_gates collect output/retrofit --out studies/retrofit

run prepares a corpus of Python code, and for each seed pretrains a Transformer (LLaMA), exports it, adds forget gates
(scripts/add_forget_gates.py), trains it on with and without them, and measures. Jobs share the GPUs in
CUDA_VISIBLE_DEVICES, or all there are. Ctrl-C or SIGTERM saves them, and the same command continues. collect makes
results.json and the figure of measured/*.json. The other commands are jobs of run.
"""

import argparse
import math
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from forgetting_transformer import command_line
from forgetting_transformer.evaluation.forget_gates import attention_layers, memory_lengths, pruned_share, watching
from forgetting_transformer.evaluation.held_out import open_heldout
from forgetting_transformer.evaluation.models import EvaluationError, load_model, precision_context, token_losses
from forgetting_transformer.files import write_json
from forgetting_transformer.model.mixers.forgetting_attention import decay_time_bias
from forgetting_transformer.ops.attention import causal_attention
from forgetting_transformer.ops.forgetting_attention import forgetting_attention
from forgetting_transformer.sweep import runner
from forgetting_transformer.sweep.jobs import Command, State
from forgetting_transformer.training.export import export
from forgetting_transformer.training.export.forget_gates import add_forget_gates
from studies import ROOT
from studies.adding_gates_page import BINS, PRETRAINED, collect

#: Packages whose Python sources are the corpus, as far as they are installed, beside the standard library.
PACKAGES = ("torch", "transformers", "sympy", "scipy", "numpy", "pandas", "sklearn", "networkx", "triton", "vllm")
#: Contexts of the original in a memory length, for which the loss is computed before a step is made.
CONTEXTS = (1, 4, 16, 64, 256, math.inf)
#: Jobs that share a GPU.
JOBS_PER_GPU = 4


@dataclass(frozen=True)
class Sizes:
    """Tokens of sequences and runs, the seeds, and overrides of train.py for all runs."""

    short: int = 2048
    long: int = 8192
    evaluated: int = 16384
    batch: int = 65536
    pretraining: int = 67108864
    training: int = 25165824
    vocabulary: int = 8192
    heldout: int = 64
    seeds: tuple[int, ...] = (0, 1, 2)
    overrides: tuple[str, ...] = ()


TINY = Sizes(
    64, 128, 256, 512, 512 * 12, 512 * 6, 512, 8, (0,),
    ("scale.hidden_size=32", "scale.num_hidden_layers=2", "scale.heads_of_64=2", "fabric.precision=32-true",
     "fabric.accelerator=cpu", "datamodule.train_num_workers=0"),
)  # fmt: skip


class Arm(NamedTuple):
    """Settings with which a pretrained model is trained on.

    Attributes:
        contexts: memory lengths at the start in contexts of the original, as add_forget_gates.py takes them; empty: no
            gates.
        overrides: of train.py.
        seeds: the seeds that have it.
    """

    contexts: tuple[float, ...] = (16,)
    overrides: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)


RAISED = "model.config.rope_base=500000"
WITHOUT_GATES = ("model=transformer_llama", "optimizer.lr_scale_for=[]")
ARMS = {
    "original": Arm((), (RAISED,), (0, 1, 2)),
    "gates": Arm((16,), (RAISED,), (0, 1, 2)),
    "gates_rate_10": Arm((16,), (RAISED, "optimizer.lr_scale=10")),
    "gates_rate_100": Arm((16,), (RAISED, "optimizer.lr_scale=100")),
    "gates_spread": Arm((0.125, 64), (RAISED,)),
    "gates_1_context": Arm((1,), (RAISED,)),
    "gates_256_contexts": Arm((256,), (RAISED,)),
    "gates_base_kept": Arm((16,)),
}


def export_name(seed: int, contexts: Sequence[float]) -> str:
    return f"seed{seed}_" + ("_".join(f"{x:g}" for x in contexts) or "original")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "convert", "measure", "time", "collect"])
    parser.add_argument("folder", type=command_line.path, metavar="FOLDER")
    parser.add_argument("name", nargs="?", metavar="NAME", help="of a run, or of the file of what is timed")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU")
    parser.add_argument("--out", type=command_line.path, default=ROOT / "studies" / "retrofit", metavar="DIR")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    sizes = TINY if args.tiny else Sizes()
    folder = args.folder.absolute()
    if args.command == "run":
        return run(folder, sizes)
    if args.command == "convert":
        convert(folder, args.name, sizes)
    elif args.command == "measure":
        measure(folder, args.name, sizes)
    elif args.command == "time":
        write_json(folder / "measured" / f"{args.name}.json", _speed())
    else:
        lengths = {"short": sizes.short, "long": sizes.long, "evaluated": sizes.evaluated}
        lengths |= {"bin": sizes.evaluated // BINS, "pretraining": sizes.pretraining, "training": sizes.training}
        collect(folder, args.out, lengths)
    return 0


def run(folder: Path, sizes: Sizes) -> int:
    """Runs all jobs, stage by stage, and returns the exit code; a stage begins when the one before is done."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # for all jobs: nothing of the study is on the hub
    machine = runner.Machine(jobs_per_gpu=JOBS_PER_GPU)
    pretrained = [f"{PRETRAINED}_seed{seed}" for seed in sizes.seeds]
    arms = [(arm, seed) for arm in ARMS for seed in sizes.seeds if seed in ARMS[arm].seeds]
    stages = [
        [_corpus(folder, sizes), *([_own_job(folder, sizes, "time", "speed")] if machine.gpus else [])],
        [_pretraining(folder, sizes, seed) for seed in sizes.seeds],
        [_own_job(folder, sizes, "convert", name) for name in pretrained],
        [_training_on(folder, sizes, arm, seed) for arm, seed in arms],
        [_own_job(folder, sizes, "measure", name) for name in (*pretrained, *(f"{a}_seed{s}" for a, s in arms))],
    ]
    for jobs in stages:
        results = runner.run_jobs(jobs, machine, folder / "logs")
        print(f"\n{runner.summary(results)}\n")
        if any(result.state != State.FINISHED for result in results):
            return 1
    return 0


def _corpus(folder: Path, sizes: Sizes) -> Command:
    paths, out = sysconfig.get_paths(), folder / "data" / "python_code"
    packages = [Path(paths[where]) / package for where in ("purelib", "platlib") for package in PACKAGES]
    sources = [str(path) for path in dict.fromkeys(packages) if path.is_dir()]
    tiny = sizes is TINY
    arguments = (
        "scripts/prepare_data.py", *(sources[:1] if tiny else (paths["stdlib"], *sources)), "--glob", "*.py",
        "--tokenizer", f"train:{sizes.vocabulary}", "--doc_len", str(sizes.evaluated), "--heldout_docs",
        str(sizes.heldout), "--max_bytes", "2MB" if tiny else "200MB", "--exclude", "site-packages", "--exclude",
        "dist-packages", "--dedup", "--out", str(out),
    )  # fmt: skip
    return Command("corpus", arguments, out, accelerator="cpu")


def _pretraining(folder: Path, sizes: Sizes, seed: int) -> Command:
    own = ("--config-dir", "studies/configs", "+experiment/study=transformer_llama", "model.config.rope_base=10000")
    return _training(folder, sizes, PRETRAINED, seed, own, sizes.short, sizes.pretraining, sizes.batch)


def _training_on(folder: Path, sizes: Sizes, arm: str, seed: int) -> Command:
    contexts, of_arm, _ = ARMS[arm]
    source = folder / "exports" / export_name(seed, contexts)
    gates = ("--config-dir", str(source / "configs"), "model=with_gates") if contexts else WITHOUT_GATES
    own = (*gates, "+experiment/retrofit=all", f"init_from={source}", *of_arm)
    # Smaller micro-batches, since several runs share a GPU.
    return _training(folder, sizes, arm, seed, own, sizes.long, sizes.training, sizes.batch // 2)


def _training(
    folder: Path, sizes: Sizes, arm: str, seed: int, own: Sequence[str], length: int, tokens: int, micro_batch: int
) -> Command:
    out = folder / "runs" / f"{arm}_seed{seed}"
    never = 10**12
    arguments = (
        "train.py", *own, f"output_dir={out}", f"data_dir={folder / 'data'}", f"seed={seed}",
        f"datamodule.train_batch_len={length}", f"datamodule.train_batch_size={sizes.batch // length}",
        f"train.grad_acc_tokens={micro_batch}", f"train.max_tokens={tokens}", f"schedule.warmup_tokens={tokens // 20}",
        f"log_interval={sizes.batch * 4}", f"train_eval_interval={never}", "skip_eval=true", "final_eval=false",
        f"checkpoint_interval={never}", f"checkpoint_keep_interval={never}", "wandb.mode=disabled", *sizes.overrides,
    )  # fmt: skip
    return Command(out.name, arguments, out)


def _own_job(folder: Path, sizes: Sizes, command: str, name: str) -> Command:
    """A command of this file."""
    arguments = ("-m", "studies.adding_gates", command, str(folder), name, *["--tiny"] * (sizes is TINY))
    results = folder / ("exports" if command == "convert" else "measured") / name
    return Command(f"{command}_{name}", arguments, results)


# Jobs.


def convert(folder: Path, name: str, sizes: Sizes) -> None:
    """Exports a pretrained run and adds gates, once for each memory length of its arms."""
    seed = int(name.rpartition("seed")[2])
    original = folder / "exports" / export_name(seed, ())
    export(folder / "runs" / name, original)
    for contexts in {arm.contexts for arm in ARMS.values() if arm.contexts and seed in arm.seeds}:
        lengths = [factor * sizes.short for factor in contexts]
        print(add_forget_gates(str(original), original.with_name(export_name(seed, contexts)), lengths), flush=True)


def measure(folder: Path, name: str, sizes: Sizes) -> None:
    """Writes measured/NAME.json of a run; of one that is pretrained also what gates cost before a step is made."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    place, corpus = folder / "measured", folder / "data" / "python_code"
    place.mkdir(exist_ok=True)
    model, data = load_model(str(folder / "runs" / name), device=device), open_heldout(corpus)
    result: dict[str, Any] = {
        "name": name, "tokens": model.train_tokens, "corpus": data.fingerprint,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__,
        "parameters": model.model.num_parameters(),
    }  # fmt: skip
    result |= _losses(model.model, data, device) | _gates(model.model, data, device, sizes)
    write_json(place / f"{name}.json", result)
    kind, _, seed = name.rpartition("_seed")
    if kind == PRETRAINED:
        data = open_heldout(corpus, length=sizes.short)
        with_gates = folder / "exports" / export_name(int(seed), (16,))
        write_json(place / f"cost_seed{seed}.json", _cost(str(with_gates), data, device, sizes))


def _losses(model: Any, data: Any, device: str) -> dict[str, Any]:
    """Mean loss of each of BINS equal ranges of positions, and of each document."""
    rows = []
    for batch in data.read_batches([range(n, n + 1) for n in range(data.sequences)]):
        with precision_context("auto", torch.device(device)):
            loss_BT = token_losses(model, batch["input_ids"].to(device), batch["labels"].to(device))
        rows.append(loss_BT.double().unflatten(1, (-1, data.length // BINS)).mean(-1)[0].cpu().numpy())
    by_bin = np.stack(rows)
    return {"loss_by_bin": by_bin.mean(0).round(6).tolist(), "loss_by_document": by_bin.mean(1).round(6).tolist()}


def _gates(model: Any, data: Any, device: str, sizes: Sizes) -> dict[str, Any]:
    """Memory length of every head and the share of tiles that pruning skips, mean over eight documents."""
    try:
        layers = attention_layers(model)
    except EvaluationError:
        return {}
    memory: dict[int, list[Any]] = {layer: [] for layer in layers}
    pruned: dict[int, list[float]] = {length: [] for length in (sizes.long, sizes.evaluated)}

    for batch in data.read_batches([range(n, n + 1) for n in range(min(8, data.sequences))]):
        ids_T = batch["input_ids"][0].to(device)
        for length in pruned:

            def use(inputs: Any, length: int = length) -> None:
                pruned[length].append(pruned_share(inputs).mean().item())
                if length == sizes.evaluated:
                    memory[inputs.layer].append(memory_lengths(inputs.log_fgate_HT)[0].cpu())

            with precision_context("auto", torch.device(device)), watching(layers, use):
                model.decoder(input_ids=ids_T[None, :length], use_cache=False)
    memory_LH = torch.stack([torch.stack(rows).mean(0) for rows in memory.values()])
    return {
        "memory": memory_LH.round().tolist(),
        "pruned": {str(length): float(np.mean(shares)) for length, shares in pruned.items()},
        "below_half": (memory_LH < sizes.long / 2).double().mean().item(),
    }


def _cost(source: str, data: Any, device: str, sizes: Sizes) -> dict[str, Any]:
    """Loss with gates at each memory length before a step is made, at the original's context, in float32."""
    model = load_model(source, device=device, precision="fp32").model
    batches = [*data.read_batches([range(n, n + 8) for n in range(0, min(128, data.sequences) // 8 * 8, 8)])]
    found = {}
    for contexts in CONTEXTS:
        for block in model.decoder.layers:
            bias = block.sequence_mixer.fgate_proj.bias
            length = contexts * sizes.short
            value = decay_time_bias(1, length, length).item() if math.isfinite(length) else 128.0
            torch.nn.init.constant_(bias, value)
        with torch.no_grad():
            losses = [token_losses(model, x["input_ids"].to(device), x["labels"].to(device)).double() for x in batches]
        found[f"{contexts:g}"] = float(torch.stack([loss.mean() for loss in losses]).mean())
    return {"context": sizes.short, "tokens": sum(x["labels"].numel() for x in batches), "loss": found}


def _speed() -> dict[str, Any]:
    """Milliseconds of attention, forward and backward, in bf16: open gates against none."""
    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for head_dim, heads in ((64, 8), (128, 16)):
        q, k, v = (
            torch.randn(2, 8192, heads, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        gate = torch.full((2, 8192, heads), -1 / 32768, device="cuda", requires_grad=True)
        ways: dict[str, Callable[[], Any]] = {
            "none": partial(causal_attention, q, k, v),
            "open": partial(forgetting_attention, q, k, v, gate),
            "open, pruning": partial(forgetting_attention, q, k, v, gate, adaptive_threshold="auto"),
        }
        for name, call in ways.items():
            times = []
            for _ in range(15):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                out = call()
                out.backward(out.detach())
                end.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end))
            found[f"head_dim {head_dim}, gates {name}"] = float(np.median(times[5:]))
    return found


if __name__ == "__main__":
    sys.exit(command_line.run(main))
