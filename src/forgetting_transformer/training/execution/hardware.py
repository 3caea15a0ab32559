"""The device of a run, and peak matrix-product rates of GPUs, the denominator of model FLOPs utilisation (MFU).

MFU is model FLOPs per second divided by what the GPUs could do at most. A wrong peak gives a wrong MFU that looks
right, so GPUs are matched by the exact name PyTorch reports and an unknown one has no peak: vendors sell chips of the
same family at half the rate, and a slice of a GPU (MIG) has another name.

All rates are dense. Datasheets often print the rate with 2:4 structured sparsity, which is twice as high and which
training does not use.
"""

import functools
import logging
import os

import torch
from torch import nn

from forgetting_transformer.training.config import Config, FabricConfig

log = logging.getLogger(__name__)


#: FLOP/s of a GPU: with bf16 inputs and fp32 accumulation on tensor cores; and in fp32 outside tensor cores, because
#: PyTorch leaves TF32 off for matrix products.
Peak = tuple[float, float]

PEAKS: dict[str, Peak] = {
    # NVIDIA A100 datasheet: bf16 312 TFLOPS dense, fp32 19.5, the same for SXM and PCIe, 40 and 80 GB.
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB"), (312e12, 19.5e12)),
    "NVIDIA A100 80GB PCIe": (312e12, 19.5e12),
    # NVIDIA H100 datasheet: bf16 1,979 (SXM), 1,513 (PCIe), 1,671 (NVL) TFLOPS with sparsity; the H100 architecture
    # whitepaper prints the dense 989.4 and 756. fp32: 67, 51 and 60. H200 and GH200 have the compute of the H100.
    **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"), (989.4e12, 67e12)),
    "NVIDIA H100 PCIe": (756e12, 51e12),
    **dict.fromkeys(("NVIDIA H100 NVL", "NVIDIA H200 NVL"), (835.5e12, 60e12)),
    # HGX B200 and GB200 NVL72 datasheets, per GPU: bf16 4.5 and 5 PFLOPS with sparsity, fp32 75 and 80 TFLOPS.
    "NVIDIA B200": (2250e12, 75e12),
    "NVIDIA GB200": (2500e12, 80e12),
    # L40S datasheet: bf16 362.05 dense, fp32 91.6.
    "NVIDIA L40S": (362.05e12, 91.6e12),
    # Ada architecture whitepaper, RTX 4090: bf16 with fp32 accumulation 165.2 dense, fp32 82.6.
    "NVIDIA GeForce RTX 4090": (165.2e12, 82.6e12),
}


def expected_device(config: Config) -> torch.device:
    """Type of the device that will train, as far as is known before the processes are connected."""
    accelerator = os.environ.get("LT_ACCELERATOR", config.fabric.accelerator)
    return torch.device("cuda" if accelerator in ("auto", "cuda", "gpu") and torch.cuda.is_available() else "cpu")


def peak_of(fabric: FabricConfig, device: torch.device) -> float | None:
    """Peak FLOP/s of `device` in a run: `fabric.peak_flops`, else `peak_flops` at the run's precision."""
    return fabric.peak_flops or peak_flops(device, fabric.precision)


@functools.cache  # the log names an unknown GPU once
def peak_flops(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s of `device` at `precision` ("bf16-mixed" or "32-true"); None for a CPU and for an unlisted GPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if name not in PEAKS:
        log.info(
            "no MFU, and no CUDA graphs with train.cuda_graphs=auto: the peak FLOP/s of %r is not known; set "
            "fabric.peak_flops to have them",
            name,
        )
        return None
    return PEAKS[name][precision != "bf16-mixed"]


#: Parameters from which on training on a CPU by accident is worth a warning.
LARGE = 100_000_000


def warn_without_gpu(config: Config, device: torch.device, model: nn.Module) -> None:
    """Warns about a large model on a CPU, which is seldom intended."""
    if device.type != "cpu" or os.environ.get("LT_ACCELERATOR", config.fabric.accelerator) != "auto":
        return
    if (parameters := sum(p.numel() for p in model.parameters())) >= LARGE:
        log.warning(
            "no GPU was found, and %.1fM parameters train very slowly on a CPU. PyTorch %s, a build for %s, finds none "
            "with CUDA_VISIBLE_DEVICES=%s: look whether `nvidia-smi` lists them and whether the driver is recent "
            "enough, or install a build for CUDA (https://pytorch.org/get-started). Choose the CPU with "
            "fabric.accelerator=cpu (`fabric run`: --accelerator cpu) if that is intended",
            parameters / 1e6,
            torch.__version__,
            "CPUs" if torch.version.cuda is None and torch.version.hip is None else "GPUs",
            os.environ.get("CUDA_VISIBLE_DEVICES"),
        )
