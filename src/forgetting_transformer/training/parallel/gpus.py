"""Looks whether there are GPUs here, and if not, what is probably wrong."""

import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forgetting_transformer.training.config import Config

log = logging.getLogger(__name__)
#: Parameters from which on training on a CPU by accident is worth a warning.
LARGE = 100_000_000


def missing() -> str | None:
    """Why PyTorch finds no GPU, and what to do about it; None if it finds one."""
    import torch

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"PyTorch {torch.__version__} is a build for CPUs: install one for CUDA (https://pytorch.org/get-started)"
        )
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU: unset it, or name some"
    return (
        f"PyTorch {torch.__version__} is built for GPUs and finds none: look whether `nvidia-smi` lists them, and "
        "whether the driver is recent enough"
    )


def warn_without(config: "Config", device: "torch.device", model: "nn.Module") -> None:
    """A large model on a CPU is seldom meant, and would start without a complaint."""
    if device.type != "cpu" or os.environ.get("LT_ACCELERATOR", config.fabric.accelerator) != "auto":
        return
    parameters = sum(p.numel() for p in model.parameters())
    if parameters >= LARGE:
        log.warning(
            "no GPU was found, and %.1fM parameters train very slowly on a CPU. %s. Choose the CPU with "
            "fabric.accelerator=cpu (`fabric run`: --accelerator cpu) if it is meant",
            parameters / 1e6,
            missing(),
        )
