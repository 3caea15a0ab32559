#!/usr/bin/env python
"""Measures the cost of a checkpoint: how long training waits, and how much slower its steps are during the writing.

    python benchmarks/checkpoint.py                                   # FoX (Pro) 760M on one GPU, a temporary folder
    python benchmarks/checkpoint.py --folder /scratch/x --saves 5     # on the file system that a run would use
    python benchmarks/checkpoint.py --experiment demo/fox_pro --device cpu --seq-len 128

Takes real steps on random tokens. Prints a line of JSON for the reservation of memory (`reserve_seconds`) and one per
save: `copy_seconds` that the loop waited, `write_seconds` in the background, and the median step in between. Every
byte is written and flushed, so the folder needs space for two checkpoints. --out saves each line as soon as it is
measured (record.py). The lines of one process belong together: an interrupted start is measured again from its first
line.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from record import Record, RecordError, add_options, run_main

from forgetting_transformer import command_line
from forgetting_transformer.command_line import count
from training import compose, keep_weights


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="longcrawl64/forgetting_transformer/pro_760m_48b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seq-len", type=count, default=4096)
    parser.add_argument("--batch-size", type=count, default=1)
    parser.add_argument("--vocab-size", type=count, default=50257)
    parser.add_argument("--steps", type=count, default=10, help="timed before the first save")
    parser.add_argument("--saves", type=count, default=3)
    parser.add_argument(
        "--folder", type=command_line.path, help="where to write; default: the system's temporary folder"
    )
    parser.add_argument("--foreground", action="store_true", help="training waits for the writing")
    add_options(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        record = Record("checkpoint", args, argv, args.device, leave_out=("folder",))
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if 0 < len(record.rows) < 1 + args.saves:
        record.start_over("an earlier start did not finish")
    for row in record.rows or map(record.add, measure(args)):
        print(json.dumps(row), flush=True)
    return 0


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row of what is reserved, with the step before it, and a row per save."""
    import torch

    from forgetting_transformer.training import setup
    from forgetting_transformer.training.checkpoint import Checkpointer
    from forgetting_transformer.training.parameter_groups import undecayed_parameters

    device = torch.device(args.device)
    config = compose(args.experiment, [])
    model = setup.build_model(config, SimpleNamespace(vocab_size=args.vocab_size, bos_token_id=0, eos_token_id=0))
    undecayed = undecayed_parameters(model, config.train)
    model = model.to(device).train()
    optimizer = setup.build_optimizer(model, undecayed, config.optimizer)
    keep_weights(optimizer)
    tokens_BT = torch.randint(args.vocab_size, (args.batch_size, args.seq_len), device=device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=config.fabric.precision == "bf16-mixed")

    def timed(action: Callable[[], object]) -> float:
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    def step() -> None:
        with autocast:
            loss = model(input_ids=tokens_BT, labels=tokens_BT.roll(-1, dims=1)).loss.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    alone = statistics.median(timed(step) for _ in range(args.steps))
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        checkpointer = Checkpointer(Path(folder), 1, 0, 1, background=not args.foreground)
        began = time.perf_counter()
        checkpointer.reserve(model, optimizer)
        while_reserving = []
        while checkpointer.reserving:
            while_reserving.append(timed(step))
        yield {
            "parameters": sum(p.numel() for p in model.parameters()),
            "step_seconds": alone,
            "reserve_seconds": time.perf_counter() - began,
            "slowest_step_while_reserving": max(while_reserving, default=None),
        }
        for number in range(1, args.saves + 1):
            # Until the copy is whole, as the GPU sees it: nothing launched later runs before.
            waited = timed(
                lambda n=number: checkpointer.save(n, model, optimizer, {"token_count": n}, {}, permanent=False)
            )
            meanwhile, saved = [], None
            while saved is None:
                meanwhile.append(timed(step))
                saved = checkpointer.finished()
            if saved.error is not None:
                sys.exit(str(saved.error))
            size = sum(file.stat().st_size for file in Path(folder).glob(f"step-{number:015d}/**/*") if file.is_file())
            yield {
                "save": number,
                "bytes": size,
                "device_waits_seconds": waited,
                "copy_seconds": saved.copy_seconds,
                "write_seconds": saved.write_seconds,
                "step_seconds_meanwhile": statistics.median(meanwhile),
            }
        checkpointer.close()


if __name__ == "__main__":
    sys.exit(run_main(main))
