"""Peak FLOP/s: known by exact device name, dense, and absent rather than guessed."""

import logging

import torch

from forgetting_transformer.training.execution.hardware import peak_flops


def test_the_peak_depends_on_the_gpu_and_the_precision_and_is_not_guessed(monkeypatch, caplog):
    """Names that begin like a listed one belong to slices, cut-down and laptop chips."""
    for name, bf16, fp32 in (
        ("NVIDIA H200", 989.4e12, 67e12),
        ("NVIDIA B200", 2250e12, 75e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        with caplog.at_level(logging.INFO):
            assert peak_flops(torch.device("cuda", 0), "bf16-mixed") == bf16
            assert peak_flops(torch.device("cuda", 0), "32-true") == fp32
    said = caplog.records[0].getMessage()
    assert said.startswith("no MFU, and no CUDA graphs with train.cuda_graphs=auto: the peak FLOP/s of ")
    assert said.endswith(f" of {name!r} is not known; set fabric.peak_flops to have them")
