"""On CUDA: digests are those of a CPU, NCCL finds ranks that differ, FSDP continues from its shards after faults."""

import json
import random
import signal
from pathlib import Path

import pytest
import torch

from forgetting_transformer.training.checkpoint.folder import newest_valid
from forgetting_transformer.training.faults.corruption import digests
from tests.gpu.test_reliability_cuda import on_gpus, run  # noqa: F401 (a fixture)
from tests.training.conftest import STEP, Job, assert_same_run, changed, losses, rank_log
from tests.training.test_corruption import FLIP, MOMENT
from tests.waiting import wait_until

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")


def checkpoints(config: dict) -> Path:
    return Path(config["output_dir"]) / "checkpoints"


def test_digests_are_those_of_a_cpu():
    """Other kernels, another order of additions: the same integers."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3000, 4001), (1,), (), (77,), (260, 1024), (0, 3), (12, 5, 7)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors += [x.bfloat16() for x in tensors]
    assert torch.equal(digests([tensor.cuda() for tensor in tensors]).cpu(), digests(tensors))


@two_gpus
def test_a_gpu_that_differs_stops_the_run(on_gpus):  # noqa: F811
    config = on_gpus("ddp", 2, skip_eval=True)
    config["strategy"]["compare_steps"] = 2
    run(config, 2, FLIP.format(batch=8, rank=1, tensor=MOMENT), codes=[1, 1])
    reason = json.loads((Path(config["output_dir"]) / "status.json").read_text())["reason"]
    assert "ranks 0, 1 differ in" in reason and "after step 10" in reason
    assert f"the last good checkpoint is at {8 * STEP:,} tokens" in reason
    assert newest_valid(checkpoints(config)).step == 8 * STEP


@two_gpus
def test_killed_at_a_random_moment_it_ends_in_the_same_weights(on_gpus, tmp_path):  # noqa: F811
    config = on_gpus("fsdp", 2, checkpoint_interval=2 * STEP, strategy__timeout_seconds=20)
    straight = changed(config, output_dir=str(tmp_path / "straight"))
    run(straight, 2)
    generator = random.Random(0)
    log, target = Path(config["output_dir"]) / "metrics/jsonlines/train.jsonl", generator.randint(2, 10)
    job = Job(config, 2, accelerator="cuda")
    wait_until(
        lambda: log.is_file() and len(losses(config["output_dir"])) >= target,
        alive=lambda: any(process.is_alive() for process in job.processes),
        said=job.errors,
    )
    victim = generator.choice(job.processes)
    victim.kill()
    for process in job.processes:
        process.join()  # the one that waits in NCCL for a killed one takes its timeout to notice
    assert victim.exitcode in (-signal.SIGKILL, 0)
    run(config, 2)
    assert_same_run(straight["output_dir"], config["output_dir"])


@two_gpus
def test_a_damaged_shard_costs_one_checkpoint(on_gpus, tmp_path):  # noqa: F811
    config = on_gpus("fsdp", 2)
    straight = changed(config, output_dir=str(tmp_path / "straight"))
    run(straight, 2)
    run(changed(config, train__max_tokens=12 * STEP), 2)
    shards = sorted((checkpoints(config) / f"step-{12 * STEP:015d}/state").glob("*.distcp"))
    assert len(shards) == 2
    data = bytearray(shards[1].read_bytes())
    data[len(data) // 2] ^= 1
    shards[1].write_bytes(data)
    run(config, 2)
    assert f"the contents of state/{shards[1].name} do not match its checksum" in rank_log(config, 0)
    assert_same_run(straight["output_dir"], config["output_dir"])
