#!/usr/bin/env python
"""Measures on a CPU the size of the differences from the authors' code that docs/differences.md lists.

    python benchmarks/differences.py --out benchmarks/results/differences.json

    reduction   gradients of four ranks added in bf16, as the authors' FSDP does, or in fp32, and the loss of models
                trained in both ways
    seeds       the same model from other initial weights, for comparison with the differences of losses
    rotary      attention scores with rotary tables in bf16 or fp32, against float64
    pruning     the share of a row's attention weights that pruning at e^-10 removes
    cumsum      the decay between positions 16 apart, from cumulative sums over the whole sequence in fp32
    fixed gate  the decay time of a constant forget gate whose bias is rounded to bf16

Models are FoX (Pro) with two layers of width 64, trained in fp32 on sequences in which the next token depends on the
last. Prints a line of JSON per row; --out saves them (record.py).
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from record import Record, RecordError, add_options, run_main

from forgetting_transformer.command_line import count

RANKS, SEQUENCES, LENGTH, VOCAB = 4, 2, 128, 256
#: Steps at the end over which losses are averaged.
LAST = 50


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=count, default=300, help="of the models that are trained (default 300)")
    parser.add_argument("--length", type=count, default=16384, help="tokens of a sequence for rotary and cumsum")
    add_options(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        record = Record("differences", args, argv, "cpu")
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = [record.row({"what": "reduction"}, lambda: reduction(args.steps))]
    rows += [record.row({"what": "seeds"}, lambda: seeds(args.steps))]
    rows += [
        record.row({"what": "rotary", "head_dim": dim}, lambda dim=dim: rotary(args.length, dim)) for dim in (64, 128)
    ]
    rows += [record.row({"what": "pruning"}, pruning)]
    rows += [record.row({"what": "cumsum", "length": n}, lambda n=n: cumsum(n)) for n in (args.length, 4 * args.length)]
    rows += [record.row({"what": "fixed gate"}, fixed_gate)]
    for row in rows:
        print(json.dumps(row), flush=True)
    return 0


def trained(steps: int, seed: int, low_precision: bool) -> tuple[list[float], list[float]]:
    """Losses of every step, and the relative distance between gradients added in bf16 and in fp32."""
    import torch

    from forgetting_transformer.model import registry

    parts = ("qk_norm", "use_output_gate", "use_output_norm", "use_k_shift", "use_v_shift")
    fields = dict.fromkeys(parts, True) | {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "vocab_size": VOCAB,
    }
    torch.manual_seed(seed)
    model = registry.get("forgetting_transformer").lm_class(registry.build_config("forgetting_transformer", **fields))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(1)
    followers = torch.randint(VOCAB, (VOCAB, 4), generator=generator)
    losses, errors = [], []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, step / 30)
        gradients, loss = [], 0.0
        for _ in range(RANKS):
            tokens_BT = torch.zeros(SEQUENCES, LENGTH + 1, dtype=torch.int64)
            for position in range(LENGTH):
                choice = torch.randint(4, (SEQUENCES,), generator=generator)
                tokens_BT[:, position + 1] = followers[tokens_BT[:, position], choice]
            loss_BT = model(input_ids=tokens_BT[:, :-1], labels=tokens_BT[:, 1:]).loss
            gradients.append(torch.autograd.grad(loss_BT.mean(), parameters))
            loss += loss_BT.mean().item() / RANKS
        exact = [sum(parts) / RANKS for parts in zip(*gradients, strict=True)]
        # A ring rounds after every addition; the division by a power of two is exact.
        coarse = []
        for parts in zip(*gradients, strict=True):
            total = parts[0].bfloat16()
            for part in parts[1:]:
                total = total + part.bfloat16()
            coarse.append(total.float() / RANKS)
        distance = math.sqrt(sum((a - b).square().sum().item() for a, b in zip(exact, coarse, strict=True)))
        errors.append(distance / math.sqrt(sum(g.square().sum().item() for g in exact)))
        for parameter, gradient in zip(parameters, coarse if low_precision else exact, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss)
    return losses, errors


def reduction(steps: int) -> dict[str, Any]:
    """Losses in nats; `gradient_error` is the median over steps."""
    exact, _ = trained(steps, 0, low_precision=False)
    coarse, errors = trained(steps, 0, low_precision=True)
    return {"gradient_error": statistics.median(errors), **apart(exact, coarse), "steps": steps}


def seeds(steps: int) -> dict[str, Any]:
    first, second = (trained(steps, seed, low_precision=False)[0] for seed in (0, 1))
    return {**apart(first, second), "steps": steps}


def apart(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """The mean loss at the end, and how far the second run's is from it; batches are the same in both."""
    mean, other = (statistics.mean(losses[-LAST:]) for losses in (first, second))
    pairs = zip(first[-LAST:], second[-LAST:], strict=True)
    return {"loss": mean, "difference": other - mean, "largest_of_a_step": max(abs(a - b) for a, b in pairs)}


def rotary(length: int, head_dim: int) -> dict[str, float]:
    """Root mean square of what is wrong with a score of the last query, relative to that of scores; q and k in bf16."""
    import torch

    from forgetting_transformer.ops.layers.rotary import rotate

    torch.manual_seed(0)
    base = 500_000.0
    q, k = (torch.randn(1, length, 4, head_dim).bfloat16() for _ in range(2))

    def scores(rotated_q: torch.Tensor, rotated_k: torch.Tensor) -> torch.Tensor:
        return torch.einsum("hd,khd->hk", rotated_q[0, -1].double(), rotated_k[0].double())

    exact = scores(rotate(q.double(), base=base), rotate(k.double(), base=base))

    def error(found: torch.Tensor) -> float:
        return ((found - exact).square().mean() / exact.square().mean()).sqrt().item()

    angle = torch.outer(torch.arange(length).float(), base ** (-torch.arange(0, head_dim, 2).float() / head_dim))
    cos, sin = (table.bfloat16().float()[:, None] for table in (angle.cos(), angle.sin()))

    def with_coarse_tables(x: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, -1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), -1).bfloat16()

    return {
        "length": length,
        "fp32_tables": error(scores(rotate(q, base=base), rotate(k, base=base))),
        "bf16_tables": error(scores(with_coarse_tables(q), with_coarse_tables(k))),
    }


def pruning() -> dict[str, float]:
    """Weight that is left out of a row, where gates are near 1/2 and where they differ from head to head."""
    import torch
    import torch.nn.functional as F

    from forgetting_transformer.ops.forgetting_attention.constants import STRETCH
    from forgetting_transformer.ops.forgetting_attention.pruning import first_kept_stretch, score_bounds

    torch.manual_seed(0)
    length, heads, head_dim, log_tolerance = 2048, 8, 64, -10.0
    q, k = (F.normalize(torch.randn(1, heads, length, head_dim), dim=-1) * head_dim**0.5 for _ in range(2))
    # Heads forget within two tokens, the first, up to within thousands, the last.
    means = torch.linspace(0, 8, heads)[None, :, None]
    log_fgate = F.logsigmoid(means + torch.randn(1, heads, length))
    bounds = score_bounds(q, k, head_dim**-0.5)
    kept = first_kept_stretch(log_fgate, length, torch.full((1, heads), log_tolerance), bounds)
    c = log_fgate.double().cumsum(-1)
    scores = q.double() @ k.double().mT * head_dim**-0.5 + c[..., :, None] - c[..., None, :]
    weights = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    first_key = kept.repeat_interleave(STRETCH, -1)[..., :length, None] * STRETCH
    skipped = torch.arange(length) < first_key
    lost = (weights * skipped).sum(-1)
    return {
        "log_tolerance": log_tolerance,
        "bound": math.exp(log_tolerance),
        "largest_of_a_row": lost.max().item(),
        "mean_of_a_row": lost.mean().item(),
        "skipped": skipped.tril().float().sum().item() / (heads * length * (length + 1) / 2),
    }


def cumsum(length: int) -> dict[str, float]:
    """Largest error, in nats, of a decay over 16 positions, of heads that forget within about two tokens."""
    import torch
    import torch.nn.functional as F

    torch.manual_seed(0)
    log_fgate = F.logsigmoid(torch.randn(16, length) - 1)
    coarse, exact = log_fgate.cumsum(-1), log_fgate.double().cumsum(-1)
    error = (coarse[:, 16:] - coarse[:, :-16]).double() - (exact[:, 16:] - exact[:, :-16])
    return {"largest": error.abs().max().item(), "typical": error.abs().median().item()}


def fixed_gate() -> dict[str, float]:
    """The decay times of `fgate_type=fixed` from 2 to 2,048 tokens; the largest relative change."""
    import torch.nn.functional as F

    from forgetting_transformer.model.mixers.forgetting_attention import decay_time_bias

    bias = decay_time_bias(24, 2.0, 2048.0).double()
    times = -1 / F.logsigmoid(bias), -1 / F.logsigmoid(bias.bfloat16().double())
    return {"largest_change": ((times[1] - times[0]) / times[0]).abs().max().item()}


if __name__ == "__main__":
    sys.exit(run_main(main))
