#!/usr/bin/env python
"""Measures whole training steps of our models and of the models of other packages with the same sizes, in one run.

    python benchmarks/peers.py                                              # all, defaults below
    python benchmarks/peers.py --experiments mamba2/760m_16b --codes ours fla --out results.json

A step is forward, backward, gradient clipping and AdamW for one micro-batch of random tokens on one device, without
activation checkpointing. Weights are fp32 and autocast is bf16 on a GPU. Each model of each package runs in a separate
process, first eager, then under torch.compile: ours as train.py compiles it, others with torch.compile(model). Packages
tune their kernels and choose their loss by their own defaults. Each row is printed as soon as it is measured, and --out
saves it as JSON (record.py). The same command measures missing rows. Running out of memory or of time, and a model that
a package cannot run here, are results that say why.

ours   this repository
fla    flash-linear-attention: pip install flash-linear-attention==0.6.0. Its Mamba-2 needs the Triton kernels of
       mamba-ssm, and its Transformer and Samba need flash-attn; all three compile CUDA code when they are installed
hf     transformers. Its Mamba-2 loads kernels from the hub or from mamba-ssm, and else runs in PyTorch

Defaults on a GPU: the 760M models and 16,384 tokens. On a CPU, to try it: demo models, 512 tokens, fp32; the kernels of
fla need a GPU. Columns: benchmarks/training.py; MFU counts the FLOPs of our model of the same size for all.
"""

import argparse
import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from record import Record, RecordError, add_options, device_name, run_main

import training
from forgetting_transformer.command_line import count, positive

#: Packages that the rows depend on, beside those of training.
PACKAGES = ("flash-linear-attention", "mamba-ssm", "causal-conv1d", "flash-attn")
CODES = {"ours": "ours", "fla": "flash-linear-attention", "hf": "Hugging Face"}
#: Experiments that have no file: another experiment, and what changes it.
VARIANTS = {"gated_delta_net/760m_16b": ("delta_net/760m_16b", "model=gated_delta_net")}
ON_GPU = [
    "mamba2/760m_16b",
    "delta_net/760m_16b",
    "gated_delta_net/760m_16b",
    "hgrn2/760m_16b",
    "transformer/llama_760m_16b",
    "forgetting_transformer/llama_760m_16b",
    "samba/760m_16b",
]
ON_CPU = ["demo/transformer_llama", "demo/mamba2"]


class NotRun(Exception):
    """A package does not run a model here; the message says why."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", nargs="+", metavar="NAME", help="as in benchmarks/training.py")
    parser.add_argument("--codes", nargs="+", choices=CODES, default=list(CODES), help="whose models (default all)")
    parser.add_argument("--compiled", choices=("both", "yes", "no"), default="both", help="under torch.compile or not")
    parser.add_argument("--seq_len", type=count, help="tokens of the one sequence")
    parser.add_argument("--steps", type=count, default=5, help="measured steps (default 5)")
    parser.add_argument(
        "--warmup_steps", type=count, default=3, help="steps before them, the first included (default 3)"
    )
    parser.add_argument(
        "--time_limit", type=positive, default=600, help="seconds a model of a package may take (default 600)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    add_options(parser)
    parser.add_argument("--worker", nargs=3, metavar=("EXPERIMENT", "CODE", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.device is None:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.experiments = args.experiments or (ON_GPU if args.device == "cuda" else ON_CPU)
    known = [*VARIANTS, *ON_GPU, *(f"demo/{file.stem}" for file in (training.CONFIGS / "experiment/demo").glob("*"))]
    for name in args.experiments:
        if name not in VARIANTS and not training.experiment_file(name).is_file():
            parser.error(f"there is no experiment {name!r}; choose from {', '.join(dict.fromkeys(known))}")
    return args


def options_of_training(args: argparse.Namespace, experiment: str, compiled: bool) -> tuple[argparse.Namespace, str]:
    """The options that benchmarks/training.py would have for this row, and the experiment that has a file."""
    experiment, *overrides = VARIANTS.get(experiment, (experiment,))
    chosen = ["--optimizer_step", "--checkpointing", "off", "--device", args.device, "--experiments", experiment]
    chosen += ["--steps", str(args.steps), "--warmup_steps", str(args.warmup_steps)]
    chosen += ["--overrides", *overrides, f"train.compile={str(compiled).lower()}"]
    if args.seq_len is not None:
        chosen += ["--seq_len", str(args.seq_len)]
    return training.parse_args(chosen), experiment


# The parent: one process per model of a package.


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.worker:
        experiment, code, file = args.worker
        work(args, experiment, code, Path(file))
        return 0
    try:
        record = Record("peers", args, argv, args.device, leave_out=("time_limit", "worker"), packages=PACKAGES)
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(HEADER, flush=True)
    for experiment in args.experiments:
        for code in args.codes:
            if code != "ours" and model_of(experiment) not in PEERS[code]:
                continue
            missing = []
            for case in cases(args, experiment, code):
                if row := record.find(case):
                    print(describe_row(row), flush=True)
                else:
                    missing.append(case)
            if missing:
                given = list(sys.argv[1:] if argv is None else argv)
                chosen = "both" if len(missing) > 1 else "yes" if missing[0]["compiled"] else "no"
                command = [sys.executable, __file__, *given, "--compiled", chosen, "--device", args.device]
                command += ["--worker", experiment, code]
                for row in training.rows_of_process(command, missing, args.time_limit):
                    print(describe_row(record.add(row)), flush=True)
    print(
        f"\n{device_name(record.environment)}; a step is forward, backward, clipping and AdamW without activation "
        "checkpointing. MFU: causal-exact FLOPs of our model, pruned attention as if full, over dense peak."
    )
    return 1 if record.failed else 0


def cases(args: argparse.Namespace, experiment: str, code: str) -> list[dict[str, Any]]:
    """Eager first: what it tunes is tuned when the compiled model comes."""
    chosen = {"both": (False, True), "yes": (True,), "no": (False,)}[args.compiled]
    return [{"experiment": experiment, "code": code, "compiled": compiled} for compiled in chosen]


# The worker: measures one model of one package and appends a line of JSON per case.


def work(args: argparse.Namespace, experiment: str, code: str, file: Path) -> None:
    for i, row in enumerate(cases(args, experiment, code)):
        row |= training.attempt(functools.partial(measure, args, row, cold=i == 0))
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")


def measure(args: argparse.Namespace, row: dict[str, Any], cold: bool) -> dict[str, Any]:
    """What is measured of a row. `row` gets what is known of a peer before its first step."""
    chosen, experiment = options_of_training(args, row["experiment"], row["compiled"])
    if row["code"] == "ours":
        return training.measure(chosen, experiment, False, cold)
    try:
        return measure_peer(chosen, experiment, row, cold)
    except NotRun as reason:
        return {"status": f"not run: {reason}"}


def measure_peer(chosen: argparse.Namespace, experiment: str, row: dict[str, Any], cold: bool) -> dict[str, Any]:
    """Steps of another package's model, used as its documentation says: ids and labels in, a mean loss out."""
    import torch

    from forgetting_transformer.training import setup

    device = torch.device(chosen.device)
    config = training.compose(experiment, chosen.overrides)
    with torch.device("meta"):
        ours = setup.build_model(
            config, SimpleNamespace(vocab_size=chosen.vocab_size, bos_token_id=0, eos_token_id=0)
        ).config
    with device:
        model, row["remark"], inputs = PEERS[row["code"]][model_of(row["experiment"])](ours)
    row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        betas=tuple(config.optimizer.betas),
        weight_decay=config.optimizer.weight_decay,
        fused=True,
    )
    training.keep_weights(optimizer)
    tokens_BT = torch.randint(chosen.vocab_size, (chosen.batch_size, chosen.seq_len), device=device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=chosen.precision == "bf16-mixed")
    run = torch.compile(model) if row["compiled"] else model

    def step() -> torch.Tensor:
        with autocast:
            loss = run(input_ids=tokens_BT, labels=tokens_BT, **inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    flops_per_token = ours.flops_per_token(chosen.seq_len)
    return training.measure_steps(chosen, step, tokens_BT.numel(), flops_per_token, device, cold)


def model_of(experiment: str) -> str:
    """The architecture: an experiment's folder, or the demo of this name."""
    folder, name = experiment.split("/")[-2:]
    demos = {"transformer_llama": "transformer", "fox_llama": "forgetting_transformer"}
    return demos.get(name, name) if folder == "demo" else folder


# The peers: of our config, their model, a remark on what runs, and further inputs of the model. Sizes are ours; what is
# not named stays as the package has it.

Built = tuple[Any, str | None, dict[str, Any]]


def fla_shared(ours: Any) -> dict[str, Any]:
    """What all configs of fla have."""
    if importlib.util.find_spec("fla") is None or importlib.util.find_spec("fla.models") is None:
        raise NotRun("flash-linear-attention is not installed; fla-core alone has no models")
    return {"vocab_size": ours.vocab_size, "hidden_size": ours.hidden_size, "num_hidden_layers": ours.num_hidden_layers}


def fla_mamba2(ours: Any) -> Built:
    shared = fla_shared(ours)
    from fla.layers import mamba2
    from fla.models import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        **shared,
        head_dim=ours.head_dim,
        state_size=ours.state_size,
        expand=ours.expand,
        n_groups=ours.n_groups,
        conv_kernel=ours.conv_kernel,
    )
    model = Mamba2ForCausalLM(config)
    if not mamba2.is_fast_path_available:
        return model, "mamba-ssm cannot be imported: recurrence in PyTorch", {}
    if mamba2.causal_conv1d_fn is None:
        # The one call for all of it needs the CUDA code of causal-conv1d; with a cache the layer calls its parts.
        return model, "kernels of mamba-ssm in Triton, convolution in Triton by fla", {"use_cache": True}
    return model, "kernels of mamba-ssm and causal-conv1d", {}


def fla_hgrn2(ours: Any) -> Built:
    shared = fla_shared(ours)
    from fla.models import HGRN2Config, HGRN2ForCausalLM

    sizes = {"expand_ratio": ours.expand_ratio, "hidden_ratio": ours.hidden_ratio}
    return HGRN2ForCausalLM(HGRN2Config(**shared, **sizes)), None, {}


def fla_delta_net(ours: Any) -> Built:
    shared = fla_shared(ours)
    from fla.models import DeltaNetConfig, DeltaNetForCausalLM

    sizes = {"num_heads": ours.num_heads, "conv_size": ours.conv_size, "hidden_ratio": ours.hidden_ratio}
    return DeltaNetForCausalLM(DeltaNetConfig(**shared, **sizes)), None, {}


def fla_gated_delta_net(ours: Any) -> Built:
    shared = fla_shared(ours)
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    config = GatedDeltaNetConfig(
        **shared,
        num_heads=ours.num_heads,
        head_dim=ours.key_size // ours.num_heads,
        expand_v=ours.value_size / ours.key_size,
        conv_size=ours.conv_size,
        hidden_ratio=ours.hidden_ratio,
    )
    return GatedDeltaNetForCausalLM(config), None, {}


def fla_forgetting_transformer(ours: Any) -> Built:
    shared = fla_shared(ours)
    from fla.models import ForgettingTransformerConfig, ForgettingTransformerForCausalLM

    sizes = {"num_heads": ours.num_heads, "hidden_ratio": ours.hidden_ratio}
    return ForgettingTransformerForCausalLM(ForgettingTransformerConfig(**shared, **sizes)), None, {}


def fla_transformer(ours: Any) -> Built:
    shared = fla_shared(ours)
    needs_flash_attention()
    from fla.models import TransformerConfig, TransformerForCausalLM

    sizes = {"num_heads": ours.num_heads, "hidden_ratio": ours.hidden_ratio, "rope_theta": ours.rope_base}
    return TransformerForCausalLM(TransformerConfig(**shared, **sizes)), None, {}


def fla_samba(ours: Any) -> Built:
    shared = fla_shared(ours)
    needs_flash_attention()
    from fla.models import SambaConfig, SambaForCausalLM

    layers = [i for i in range(ours.num_hidden_layers) if ours.has_attention(i)]
    attention = {key: ours.attn[key] for key in ("num_heads", "num_kv_heads", "window_size")}
    attention |= {"layers": layers, "qkv_bias": False, "rope_theta": ours.rope_base}
    sizes = {"state_size": ours.state_size, "expand": ours.expand, "hidden_ratio": ours.attn_hidden_ratio}
    return SambaForCausalLM(SambaConfig(**shared, **sizes, attn=attention)), None, {}


def needs_flash_attention() -> None:
    if importlib.util.find_spec("flash_attn") is None:
        raise NotRun("its attention needs flash-attn, which is not installed")


def hf_llama(ours: Any) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    from forgetting_transformer.model.layers import swiglu_width

    config = LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        num_hidden_layers=ours.num_hidden_layers,
        num_attention_heads=ours.num_heads,
        intermediate_size=ours.intermediate_size or swiglu_width(ours.hidden_size, ours.hidden_ratio),
        max_position_embeddings=1 << 20,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_base},
        attn_implementation="sdpa",
        use_cache=False,
    )
    return LlamaForCausalLM(config), "SDPA", {}


def hf_mamba2(ours: Any) -> Built:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        num_hidden_layers=ours.num_hidden_layers,
        num_heads=ours.num_heads,
        head_dim=ours.head_dim,
        state_size=ours.state_size,
        expand=ours.expand,
        n_groups=ours.n_groups,
        conv_kernel=ours.conv_kernel,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return Mamba2ForCausalLM(config), None, {}


PEERS: dict[str, dict[str, Callable[[Any], Built]]] = {
    "fla": {
        "mamba2": fla_mamba2,
        "hgrn2": fla_hgrn2,
        "delta_net": fla_delta_net,
        "gated_delta_net": fla_gated_delta_net,
        "forgetting_transformer": fla_forgetting_transformer,
        "transformer": fla_transformer,
        "samba": fla_samba,
    },
    "hf": {"transformer": hf_llama, "mamba2": hf_mamba2},
}


# The table.

HEADER = (
    "| model | code | compiled | ms per step | tokens/s | MFU | memory GB | remark |\n|---|---|---|---|---|---|---|---|"
)


def describe_row(row: dict[str, Any]) -> str:
    cells = [row["experiment"], CODES[row["code"]], "yes" if row["compiled"] else "no"]
    if row["status"] == "ok":
        measured = training.describe_row(row | {"checkpointing": False}).strip("| ").split(" | ")
        cells += [*measured[2:6], row.get("remark") or ""]
    else:
        cells += ["", "", "", "", "; ".join(filter(None, [row["status"].replace("|", "/"), row.get("remark")]))]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(run_main(main))
