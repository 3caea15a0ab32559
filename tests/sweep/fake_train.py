"""Stands in for a run of train.py where a test is about sweeps: writes the files of a run in a moment.

    python fake_train.py CONFIG_JSON FAULTS_JSON

The loss is a parabola of log(lr) around 2e-3, plus 0.05 for every head above two and, in thousandths, what the seed
decides. FAULTS_JSON maps "fail", "diverge", "preempt", "die" (at the very end) or "hang" to a part of the output_dir
that is hit.
"""

import json
import math
import os
import sys
import time
from pathlib import Path

import yaml

STEPS = 10
FLOPS_PER_TOKEN = 1e6


def loss_of(config: dict) -> float:
    lr, seed = config["optimizer"]["lr"], config["seed"]
    heads = config["model"]["config"].get("num_heads", 2)
    return 3 + 0.1 * math.log(lr / 2e-3) ** 2 + 0.001 * ((seed * 7919) % 5 - 2) + 0.05 * (heads - 2)


def append(file: Path, **entry: float) -> None:
    with file.open("a") as stream:
        stream.write(json.dumps(entry) + "\n")


def write_status(output_dir: Path, status: str, reason: str) -> None:
    entry = {"status": status, "reason": reason, "pid": os.getpid()}
    (output_dir / "status.json").write_text(json.dumps(entry))


def main() -> None:
    config, faults = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    output_dir = Path(config["output_dir"])
    final_loss = loss_of(config)
    hit = {fault for fault, part in faults.items() if part in str(output_dir)}
    lines = output_dir / "metrics" / "jsonlines"
    lines.mkdir(parents=True, exist_ok=True)
    with (output_dir / "starts.txt").open("a") as file:
        file.write(f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'all')} {os.environ['OMP_NUM_THREADS']}\n")
    (output_dir / "config.yaml").write_text(yaml.safe_dump(config))
    if "fail" in hit:
        sys.exit("Traceback (most recent call last):\nRuntimeError: the GPU fell off the bus")
    sizes = {"total_params": 10**6, "embedding_params": 10**5}
    append(lines / "model_info.jsonl", step=0, flops_per_token=FLOPS_PER_TOKEN, **sizes)
    log = lines / "train.jsonl"
    done = len(log.read_text().splitlines()) if log.exists() else 0
    max_tokens = config["train"]["max_tokens"]
    for step in range(done + 1, STEPS + 1):
        loss = final_loss + 4 * (1 - step / STEPS)
        append(log, **{"step": max_tokens * step // STEPS, "train/loss": loss})
        if "diverge" in hit:
            write_status(output_dir, "failed", "10 updates in a row were left out, because a loss was not finite")
            sys.exit(1)
        if "preempt" in hit and step >= STEPS // 2:
            write_status(output_dir, "preempted", "SIGTERM")
            sys.exit(1)  # what a launcher makes of train.py's 75
        if "hang" in hit and step >= STEPS // 2:
            time.sleep(3600)
    append(lines / "val.jsonl", **{"step": max_tokens, "val/loss": final_loss})
    append(lines / "checkpoint.jsonl", **{"step": max_tokens, "checkpoint/checkpoint_time": 0.0})
    if "die" in hit:
        os._exit(1)
    write_status(output_dir, "done", "")


if __name__ == "__main__":
    main()
