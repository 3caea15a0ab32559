#!/usr/bin/env python
"""Measures whole training steps of our models and of the models of other packages with the same sizes, in one run.

    python benchmarks/peers.py                                              # all, defaults below
    python benchmarks/peers.py --experiments mamba2/760m_16b --codes ours fla --out results.json

A step is forward, backward, gradient clipping and AdamW for one micro-batch of random tokens on one device, without
activation checkpointing. Weights are fp32 and autocast is bf16 on a GPU. Each model of each package runs in a separate
process, eager and under torch.compile: ours as train.py compiles it, others with torch.compile(model). Packages tune
their kernels and choose their loss by their own defaults. A model that a package cannot run here is a result.

ours   this repository
fla    flash-linear-attention: pip install flash-linear-attention==0.6.0. Its Mamba-2 needs the Triton kernels of
       mamba-ssm, which compiles CUDA code when it is installed
hf     transformers

Defaults on a GPU: the 760M models and 16,384 tokens. On a CPU, to try it: a demo model, 512 tokens, fp32; the kernels
of fla need a GPU. Values: benchmarks/training.py; `mfu` counts the FLOPs of our model of the same size for all.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import Case, NotMeasured, compose, parse, parser, run, run_main

import training
from forgetting_transformer.command_line import count

#: Packages that the rows depend on, beside those of training.
PACKAGES = ("flash-linear-attention", "mamba-ssm", "causal-conv1d")
#: Experiments that have no file: the file of another, and what changes it.
VARIANTS = {"gated_delta_net/760m_16b": ("delta_net/760m_16b", "model=gated_delta_net")}
ON_GPU = [
    "mamba2/760m_16b",
    "delta_net/760m_16b",
    "gated_delta_net/760m_16b",
    "hgrn2/760m_16b",
    "transformer/llama_760m_16b",
    "forgetting_transformer/llama_760m_16b",
]
COMPILED = {"both": (False, True), "yes": (True,), "no": (False,)}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--experiments", nargs="+", metavar="NAME", default=None, help="as in benchmarks/training.py")
    made.add_argument("--codes", nargs="+", choices=CODES, default=list(CODES), help="whose models (default all)")
    made.add_argument("--compiled", choices=COMPILED, default="both", help="under torch.compile or not")
    made.add_argument("--seq_len", type=count, help="tokens of the one sequence")
    made.add_argument("--steps", type=count, default=5, help="measured steps (default 5)")
    made.add_argument("--warmup_steps", type=count, default=3, help="steps before them (default 3)")
    return parse(made, argv, {"experiments": ON_GPU}, {"experiments": ["demo/transformer_llama"]}, VARIANTS)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    cases = [
        {"experiment": experiment, "code": code, "compiled": compiled}
        for experiment in args.experiments
        for code in args.codes
        if code == "ours" or model_of(experiment) in CODES[code]
        for compiled in COMPILED[args.compiled]
    ]
    return run(__file__, args, argv, cases, lambda case: measure(args, case), lambda _: 1, packages=PACKAGES)


def measure(args: argparse.Namespace, case: Case) -> dict[str, Any]:
    experiment, *overrides = VARIANTS.get(case["experiment"], (case["experiment"],))
    chosen = ["--optimizer_step", "--device", args.device, "--experiments", experiment]
    chosen += ["--steps", str(args.steps), "--warmup_steps", str(args.warmup_steps)]
    chosen += ["--overrides", *overrides, f"train.compile={str(case['compiled']).lower()}"]
    chosen += ["--seq_len", str(args.seq_len)] if args.seq_len else []
    options = training.parse_args(chosen)
    if case["code"] == "ours":
        return training.measure(options, {"experiment": experiment, "checkpointing": False})
    return measure_peer(options, experiment, case)


def measure_peer(options: argparse.Namespace, experiment: str, case: Case) -> dict[str, Any]:
    """Steps of another package's model, used as its documentation says: ids and labels in, a mean loss out."""
    import torch

    device = torch.device(options.device)
    config = compose(experiment, training.overrides(options, False))
    with torch.device("meta"):
        ours = training.build(config, options.vocab_size).config
    with device:
        model, remark, inputs = CODES[case["code"]][model_of(case["experiment"])](ours)
    model.train()
    settings = {"betas": tuple(config.optimizer.betas), "weight_decay": config.optimizer.weight_decay}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True, **settings)
    tokens_BT = torch.randint(options.vocab_size, (options.batch_size, options.seq_len), device=device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16-mixed")
    called = torch.compile(model) if case["compiled"] else model

    def step() -> torch.Tensor:
        with autocast:
            loss = called(input_ids=tokens_BT, labels=tokens_BT, **inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    flops_per_token = ours.flops_per_token(options.seq_len)
    times = training.measure_steps(options, step, tokens_BT.numel(), flops_per_token, device)
    return {"remark": remark, "parameters": sum(parameter.numel() for parameter in model.parameters()), **times}


def model_of(experiment: str) -> str:
    """The architecture: an experiment's folder, or that of a demo."""
    folder, name = experiment.split("/")[-2:]
    return name.partition("_")[0] if folder == "demo" else folder


# The peers: of our config, their model, a remark on what runs, and further inputs of the model. Sizes are ours; what is
# not named stays as the package has it.

Built = tuple[Any, str | None, dict[str, Any]]


def fla_shared(ours: Any) -> dict[str, Any]:
    """What all configs of fla have."""
    if importlib.util.find_spec("fla") is None or importlib.util.find_spec("fla.models") is None:
        raise NotMeasured("not run: flash-linear-attention is not installed; fla-core alone has no models")
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


CODES: dict[str, dict[str, Callable[[Any], Built]]] = {
    "ours": {},
    "fla": {
        "mamba2": fla_mamba2,
        "hgrn2": fla_hgrn2,
        "delta_net": fla_delta_net,
        "gated_delta_net": fla_gated_delta_net,
        "forgetting_transformer": fla_forgetting_transformer,
    },
    "hf": {"transformer": hf_llama},
}


if __name__ == "__main__":
    sys.exit(run_main(main))
