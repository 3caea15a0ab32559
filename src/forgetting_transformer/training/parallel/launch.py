"""From a configuration to processes: the Fabric object, its strategy, and guards against silent mis-launches."""

import logging
import os
import warnings
import weakref
from datetime import timedelta

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.strategies import DDPStrategy, Strategy
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from forgetting_transformer import console
from forgetting_transformer.training.config import Config, ConfigError
from forgetting_transformer.training.execution.hardware import expected_device
from forgetting_transformer.training.parallel.sharding import Sharded

log = logging.getLogger(__name__)
#: NCCL ends a process whose operation takes too long, without a reason. The watchdog, which logs one, comes first.
_AFTER_THE_WATCHDOG_SECONDS = 60


def launch(config: Config) -> Fabric:
    """Builds Fabric and, when not started by `fabric run`, starts the other processes.

    Raises:
        ConfigError: the started processes are not those that the config asks for.
    """
    under_cli = os.environ.get("LT_CLI_USED") == "1"
    console.die_with_launcher()
    processes = expected_world_size(config)
    # The run's log replaces Lightning's banner; Lightning's warnings would come twice, by its handler and that log's.
    for name in ("lightning", "lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger(name).handlers.clear()
    if processes > 1:
        log.info("connecting %d processes", processes)
    try:
        fabric = Fabric(
            accelerator=config.fabric.accelerator,
            devices=config.fabric.devices,
            num_nodes=int(os.environ.get("LT_NUM_NODES", 1)),
            strategy=_strategy(config, processes),
            precision=config.fabric.precision,
        )
    except (MisconfigurationException, TypeError, ValueError, RuntimeError) as error:
        asked = f"fabric.devices={config.fabric.devices}, fabric.accelerator={config.fabric.accelerator}"
        raise ConfigError(f"{asked}: {' '.join(str(error).split())}") from error
    if not under_cli:
        fabric.launch()
    tasks = os.environ.get("SLURM_NTASKS") if SLURMEnvironment.detect() else None
    expected = int(os.environ.get("WORLD_SIZE") or tasks or fabric.world_size)
    if fabric.world_size != expected:
        # torchrun or srun with devices=1 starts N independent runs, all as rank 0.
        raise ConfigError(
            f"{expected} processes were started but each trains alone (world size {fabric.world_size}); "
            "start with `fabric run train.py --devices N …`, or set fabric.devices to the processes per node"
        )
    # `fabric run` tells every rank to use all cores; on a CPU the ranks of a node would then fight for them.
    ranks_per_node = max(1, fabric.world_size // int(os.environ.get("LT_NUM_NODES", 1)))
    torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // ranks_per_node)))
    return fabric


def expected_world_size(config: Config) -> int:
    """Number of processes that will train, as far as is known before they are connected."""
    if os.environ.get("LT_CLI_USED") == "1" or "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    devices = config.fabric.devices
    if devices != "auto":
        return devices
    return torch.cuda.device_count() if expected_device(config).type == "cuda" else 1


def _strategy(config: Config, world_size: int) -> Strategy | str:
    timeout = timedelta(seconds=config.strategy.timeout_seconds + _AFTER_THE_WATCHDOG_SECONDS)
    if world_size == 1 and config.strategy.name != "ddp":
        # One process has nothing to shard. FSDP2 would still copy every weight and gradient, and keep the host so busy
        # that an H200 waits for it: a 125M model trains at 250,000 tokens/s instead of 400,000.
        return "auto"
    if config.strategy.name == "fsdp":
        dtype = torch.float32 if config.fabric.precision == "32-true" else torch.bfloat16
        return Sharded(world_size, dtype, config.strategy.keep_gathered, timeout)
    # DDP would regroup its buckets after the first step, and with them the order in which gradients are added and
    # the alignment of what norms are taken of: the first step after a resume would not be bitwise the step it
    # repeats. Looking for unused parameters keeps the first grouping (and allows such parameters); gradients that
    # are no views into buckets keep their alignment.
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    return _DDP(timeout=timeout, find_unused_parameters=True, gradient_as_bucket_view=False)


class _DDP(DDPStrategy):
    """DDP in the stream of the training loop. The garbage collector never takes its weak reference to itself.

    Fabric makes DDP in a stream of its own, for CUDA graphs of whole steps, which this package does not record. The
    nodes that accumulate gradients keep the stream that they are made in. PyTorch warns on every rank that gradients
    may then wait for another stream.

    When DDP looks for unused parameters, its backward pass reaches the module through a weak reference. Python has one
    such object per module, and only the autograd graph of the step owns it. While an operator runs without the
    interpreter's lock, another thread (a reader's, a checkpoint's) may collect garbage. The collector can then take
    this graph for garbage, because the graph changes while it is counted, and Python 3.11 clears weak references
    before it counts again. The backward pass then fails with "'NoneType' object has no attribute 'reducer'". A second
    owner prevents that.
    """

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        wrapped = DistributedDataParallel(module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs)
        self._reference = weakref.ref(wrapped)
        return wrapped
