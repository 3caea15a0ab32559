"""From a configuration to processes: the Fabric object, its strategy, and guards against silent mis-launches."""

import ctypes
import os
import signal
import sys
import warnings
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from forgetting_transformer.model.decoder import DecoderBlock
from forgetting_transformer.training.config import Config, ConfigError


def launch(config: Config) -> Fabric:
    """Builds Fabric and, when not started by `fabric run`, starts the other processes.

    Raises:
        ConfigError: the processes that were started are not the processes that were asked for.
    """
    under_cli = os.environ.get("LT_CLI_USED") == "1"
    if under_cli:
        _die_with_launcher()
    else:
        stray = sorted(name for name in os.environ if name.startswith("LT_"))
        if stray:
            # Fabric would let these override the config without a word.
            raise ConfigError(f"environment variables {', '.join(stray)} would override the config; unset them")
    fabric = Fabric(
        accelerator=config.fabric.accelerator,
        devices=config.fabric.devices,
        num_nodes=int(os.environ.get("LT_NUM_NODES", 1)),
        strategy=_strategy(config, _expected_world_size(config, under_cli)),
        plugins=[_precision(config)],
    )
    if not under_cli:
        fabric.launch()
    tasks = os.environ.get("SLURM_NTASKS") if SLURMEnvironment.detect() else None
    expected = int(os.environ.get("WORLD_SIZE") or tasks or fabric.world_size)
    if fabric.world_size != expected:
        # torchrun or srun with devices=1 gives N independent runs that all believe to be rank 0.
        raise ConfigError(
            f"{expected} processes were started but each trains alone (world size {fabric.world_size}); "
            "start with `fabric run train.py --devices N …`, or set fabric.devices to the processes per node"
        )
    # `fabric run` tells every rank to use all cores; on a CPU the ranks of a node would then fight for them.
    ranks_per_node = max(1, fabric.world_size // int(os.environ.get("LT_NUM_NODES", 1)))
    torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // ranks_per_node)))
    return fabric


def _die_with_launcher() -> None:
    """Asks Linux to end this rank when `fabric run` ends, however it ends: a signal it does not handle, such as
    SIGUSR1, would otherwise leave ranks behind that hold the GPUs and the run's folder."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _expected_world_size(config: Config, under_cli: bool) -> int:
    if under_cli or "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    devices = config.fabric.devices
    if devices in ("auto", -1, "-1"):
        use_cuda = config.fabric.accelerator in ("auto", "cuda", "gpu") and torch.cuda.is_available()
        return torch.cuda.device_count() if use_cuda else 1
    return len(devices) if isinstance(devices, list) else int(devices)


def _strategy(config: Config, world_size: int) -> Strategy | str:
    timeout = timedelta(seconds=config.strategy.timeout_seconds)
    if config.strategy.name == "fsdp":
        # Fabric's defaults would make a tensor-parallel mesh; this one only shards over data-parallel ranks.
        return ModelParallelStrategy(
            parallelize_fn=shard, data_parallel_size=world_size, tensor_parallel_size=1, timeout=timeout
        )
    if config.strategy.name == "ddp" or world_size > 1:
        # DDP would regroup its buckets after the first step, and with them the order in which gradients are added and
        # the alignment of what norms are taken of: the first step after a resume would not be bitwise the step it
        # repeats. Looking for unused parameters keeps the first grouping (and allows such parameters); gradients that
        # are no views into buckets keep their alignment.
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        return DDPStrategy(timeout=timeout, find_unused_parameters=True, gradient_as_bucket_view=False)
    return "auto"


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2: one unit per decoder block, so that gathering one block overlaps with computing another, and one unit
    for embeddings, final norm and head. Weights, gradients and their reduction stay in fp32."""
    for module in model.modules():
        if isinstance(module, DecoderBlock):
            fully_shard(module, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


class _Bf16Autocast(MixedPrecision):
    """Fabric's bf16-mixed without its cast of floating-point *inputs* to bf16, which loses what a caller passes in."""

    def __init__(self, device: str) -> None:
        super().__init__("bf16-mixed", device=device)

    def convert_input(self, data: Any) -> Any:
        return data


def _precision(config: Config) -> Precision:
    if config.fabric.precision == "32-true":
        return Precision()
    on_cuda = config.fabric.accelerator in ("auto", "cuda", "gpu") and torch.cuda.is_available()
    return _Bf16Autocast("cuda" if on_cuda and os.environ.get("LT_ACCELERATOR") != "cpu" else "cpu")
