"""DDP as train.py sets it up, on a real GPU."""

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

#: PyTorch gives each of its warnings once per process, so that the check has a process of its own.
SCRIPT = """
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from forgetting_transformer.training.parallel.launch import _DDP

fabric = Fabric(accelerator="cuda", devices=1, strategy={strategy}(find_unused_parameters=True))
fabric.launch()
model = fabric.setup_module(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))))
for _ in range(2):
    loss = model(torch.ones(4, 64, device="cuda")).square().mean()
    fabric.backward(loss)
assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
print("done")
"""


def warned(strategy: str) -> bool:
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(strategy=strategy)], capture_output=True, text=True, timeout=300
    )
    assert found.stdout.strip().endswith("done"), found.stderr
    return "AccumulateGrad" in found.stderr


def test_gradients_are_accumulated_in_the_stream_of_the_backward_pass():
    if not warned("DDPStrategy"):
        pytest.skip("this PyTorch does not warn of another stream")
    assert not warned("_DDP")
