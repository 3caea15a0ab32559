"""Checks for missing GPUs."""

import logging
import os

import torch
from torch import nn

from forgetting_transformer.training.config import Config

log = logging.getLogger(__name__)
#: Parameters from which on training on a CPU by accident is worth a warning.
LARGE = 100_000_000


def missing() -> str | None:
    """Reason why PyTorch finds no GPU, with the fix; None if it finds one."""
    if torch.cuda.is_available():
        return None
    build = "CPUs" if torch.version.cuda is None and torch.version.hip is None else "GPUs"
    return (
        f"PyTorch {torch.__version__}, a build for {build}, finds none with CUDA_VISIBLE_DEVICES="
        f"{os.environ.get('CUDA_VISIBLE_DEVICES')}: look whether `nvidia-smi` lists them and whether the driver is "
        "recent enough, or install a build for CUDA (https://pytorch.org/get-started)"
    )


def warn_without(config: Config, device: torch.device, model: nn.Module) -> None:
    """Warns about a large model on a CPU, which is seldom intended."""
    if device.type != "cpu" or os.environ.get("LT_ACCELERATOR", config.fabric.accelerator) != "auto":
        return
    if (parameters := sum(p.numel() for p in model.parameters())) >= LARGE:
        log.warning(
            "no GPU was found, and %.1fM parameters train very slowly on a CPU. %s. Choose the CPU with "
            "fabric.accelerator=cpu (`fabric run`: --accelerator cpu) if that is intended",
            parameters / 1e6,
            missing(),
        )
