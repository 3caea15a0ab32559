"""FSDP2 in this package: units that are gathered and reduced together, their precision, and how long they stay.

A unit is gathered by one collective and reduced by another. Every decoder block is a unit and so is the output layer:
communication of one overlaps with computing another. All other parameters belong to the model's own unit, which is
gathered at the beginning of a step and reduced at its end: the embedding, norms, and parameters of blocks besides
linear layers.

Under bf16-mixed the weights of a block's linear layers are gathered in bf16. Autocast rounds them to bf16 before every
product, so products and gradients are bitwise those of weights gathered in fp32, with half of the bytes. All other
parameters are gathered in fp32, the output layer too: its gradient is a sum over slices of the tokens
(ops/layers/cross_entropy.py), which is in fp32 only where the weight is. All gradients are reduced in fp32.
"""

import collections
import contextlib
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.fabric.strategies.model_parallel import _ParallelBackwardSyncControl
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from forgetting_transformer.model.block import DecoderBlock
from forgetting_transformer.model.decoder import OutputLayer

#: strategy.keep_gathered=auto keeps what takes no larger part of the device's memory. A 760M model has 1.4 GB of it.
_SMALL_PART = 0.05
#: Parameters of a block that are no linear layers go to the model's unit, which holds them during the whole step, if
#: they are no larger part of the block. Norms, gates and convolutions are less than a hundredth.
_REST_OF_BLOCK = 1 / 8


class Unit(NamedTuple):
    """Parameters that are gathered together.

    Attributes:
        module: before whose forward pass it is gathered. parameters: of it, those of this unit. dtype: of what is sent.
    """

    module: nn.Module
    parameters: set[nn.Parameter]
    dtype: torch.dtype


class Sharded(ModelParallelStrategy):
    """Fabric's FSDP2 with the units above.

    Fabric has a mesh of data-parallel by tensor-parallel ranks. Nothing here is tensor-parallel: there is one copy of
    the model, and the second dimension counts its shards.

    Args:
        dtype: in which products of linear layers are computed: float32 or bfloat16.
        keep: `strategy.keep_gathered`.

    Attributes:
        keeps: whether weights stay gathered between the forward and the backward pass and from one micro-batch to the
            next; False before the model is set up.
    """

    def __init__(self, shards: int, dtype: torch.dtype, keep: bool | str, timeout: timedelta | None = None) -> None:
        super().__init__(self._shard, 1, shards, timeout=timeout)
        self._backward_sync_control = _SyncControl(self)
        self._dtype, self._keep = dtype, keep
        self.keeps = False

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        found = units(model, self._dtype)
        self.keeps = _is_small(found, self.root_device) if self._keep == "auto" else bool(self._keep)
        return shard(model, mesh["tensor_parallel"], found, self.keeps)

    @property
    def notes(self) -> list[str]:
        """Notes for the start block."""
        rounded = ["linear layers of blocks gathered in bf16"] if self._dtype != torch.float32 else []
        return rounded + (["weights gathered once a step"] if self.keeps else [])


def units(model: nn.Module, dtype: torch.dtype = torch.float32) -> list[Unit]:
    """The units of a model besides its own, in the order of its forward pass."""
    uses = collections.Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    found = []
    for module in model.modules():
        if not isinstance(module, DecoderBlock | OutputLayer):
            continue
        own, sent_in = {p for p in module.parameters() if uses[p] == 1}, torch.float32
        if isinstance(module, DecoderBlock) and dtype != torch.float32:
            rounded = own & {
                linear.weight
                for linear in module.modules()
                # A class with a forward pass of its own may use its weight in fp32.
                if isinstance(linear, nn.Linear) and type(linear).forward is nn.Linear.forward
            }
            if _size(own - rounded) <= _REST_OF_BLOCK * _size(own):
                own, sent_in = rounded, dtype
        if own:
            found.append(Unit(module, own, sent_in))
    return found


def shard(model: nn.Module, mesh: DeviceMesh, found: list[Unit], keeps: bool = False) -> nn.Module:
    """Shards the model in place.

    Args:
        mesh: of all ranks, (shards,).
        found: the result of `units`.
        keeps: leave units gathered between the forward and the backward pass.
    """
    # The model before its units: PyTorch would not look into modules that are sharded already.
    in_units = {parameter for unit in found for parameter in unit.parameters}
    fully_shard(model, mesh=mesh, ignored_params=in_units)
    for unit in found:
        # Inputs stay as they are: the residual stream is in fp32.
        policy = MixedPrecisionPolicy(unit.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        others = {parameter for parameter in unit.module.parameters() if parameter not in unit.parameters}
        # The backward pass begins with the output layer.
        freed = not keeps and not isinstance(unit.module, OutputLayer)
        fully_shard(unit.module, mesh=mesh, mp_policy=policy, ignored_params=others, reshard_after_forward=freed)
    # The host asks for the next unit before it starts the work of this one, so that a busy host does not delay it.
    in_order: list[Any] = [model, *(unit.module for unit in found)]
    for module, following in itertools.pairwise(in_order):
        module.set_modules_to_forward_prefetch([following])
    return model


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _size(parameters: set[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _is_small(found: list[Unit], device: torch.device) -> bool:
    """Whether all units together take a small part of every rank's device."""
    if device.type != "cuda":
        return False
    memory = torch.tensor(torch.cuda.get_device_properties(device).total_memory, device=device)
    dist.all_reduce(memory, op=dist.ReduceOp.MIN)
    return sum(_size(unit.parameters) * unit.dtype.itemsize for unit in found) <= _SMALL_PART * memory.item()


class _SyncControl(_ParallelBackwardSyncControl):
    """Reduces nothing between micro-batches and, if the strategy keeps weights gathered, frees nothing."""

    def __init__(self, strategy: Sharded) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._backward(module, last=not enabled)

    @contextlib.contextmanager
    def _backward(self, module: nn.Module, last: bool) -> Iterator[None]:
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                unit.set_requires_gradient_sync(last, recurse=False)
                # The optimizer changes the shards, so after the last micro-batch what was gathered is old.
                unit.set_reshard_after_backward(last or not self._strategy.keeps, recurse=False)
        yield
