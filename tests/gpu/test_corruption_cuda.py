"""On CUDA: digests are those of a CPU, NCCL finds ranks that differ, FSDP continues from its shards after faults."""

import json
from pathlib import Path

import pytest
import torch

from forgetting_transformer.training.checkpoint.folder import newest_valid
from forgetting_transformer.training.faults.corruption import digests
from tests.gpu.test_reliability_cuda import on_gpus, run  # noqa: F401 (a fixture)
from tests.training.conftest import STEP
from tests.training.test_corruption import FLIP, MOMENT

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
