"""Peak FLOP/s: known by exact device name, dense, and absent rather than guessed."""

import logging

import pytest
import torch

from forgetting_transformer.training.execution.hardware import peak_flops

CUDA = torch.device("cuda", 0)


def on(monkeypatch, name: str) -> None:
    """As if device 0 were a GPU that PyTorch calls `name`."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA H200", 989.4e12, 67e12),
        ("NVIDIA B200", 2250e12, 75e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
    ],
)
def test_the_peak_depends_on_the_gpu_and_the_precision(monkeypatch, name, bf16, fp32):
    on(monkeypatch, name)
    assert peak_flops(CUDA, "bf16-mixed") == bf16
    assert peak_flops(CUDA, "32-true") == fp32


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H20"])
def test_a_gpu_that_is_not_listed_has_no_peak_and_the_log_says_so(monkeypatch, caplog, name):
    """Names that begin like a listed one belong to slices, cut-down and laptop chips."""
    on(monkeypatch, name)
    with caplog.at_level(logging.INFO):
        assert peak_flops(CUDA, "bf16-mixed") is None
        assert peak_flops(CUDA, "bf16-mixed") is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("no MFU, and no CUDA graphs with train.cuda_graphs=auto: the peak FLOP/s of ")
    assert said.endswith(f" of {name!r} is not known; set fabric.peak_flops to have them")
