"""Choice of compilation and of the backend of each op.

Other kernels add in another order. So checkpoints record the choice; a resume takes the recorded one where the config
leaves it open (`train.compile: auto`), and warns where it computes otherwise: from there on the run is not bitwise that
of an uninterrupted one. A fork is a new run and chooses for itself.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from forgetting_transformer.ops import backends as op_backends
from forgetting_transformer.ops.selftest import Backend, choose_backends
from forgetting_transformer.training.config import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Execution:
    """Choices that decide the order of additions, besides the config and the number of processes.

    Attributes:
        compile: whether blocks and loss are compiled.
        device: type of the device; None if a checkpoint has none.
        backends: op: name of its backend; empty if a checkpoint has none.
    """

    compile: bool
    device: str
    backends: dict[str, str]


def choose(
    choice: bool | str, device: torch.device, before: Execution | None, backends: dict[str, Backend], rank: int = 0
) -> Execution:
    """Resolve `train.compile`; rank 0 warns of differences from before.

    Args:
        choice: True, False or "auto": as `before`, and for a new run, or on another type of device, on for CUDA.
        before: execution of the checkpoint that the run continues from, if it continues.
        backends: of each op.

    Raises:
        ConfigError: True, and the compiler cannot work here.
    """
    if choice == "auto":
        same_device = before is not None and before.device == device.type
        wanted: bool = before.compile if before is not None and same_device else device.type == "cuda"
    else:
        wanted = choice is True
    if wanted and (obstacle := _obstacle(device)):
        if choice is True:
            raise ConfigError(f"train.compile=true cannot work here: {obstacle}. Mend it, or leave train.compile=auto")
        log.warning("train.compile=auto: nothing is compiled, which about halves the speed: %s", obstacle)
        wanted = False
    now = Execution(wanted, device.type, {op: found.name for op, found in backends.items()})
    if before is not None and rank == 0:
        old, new = ({"train.compile": e.compile, "device": e.device, **e.backends} for e in (before, now))
        changed = [key for key in sorted(old.keys() & new.keys()) if old[key] != new[key]]
        if changes := [f"{key} was {old[key]} and is {new[key]} now" for key in changed]:
            log.warning("not bitwise from here: %s", "; ".join(changes))
    return now


def _obstacle(device: torch.device) -> str | None:
    """Reason why torch.compile cannot work on this device, if known in advance."""
    if device.type != "cuda":
        return None
    try:
        from torch.utils._triton import has_triton

        return None if has_triton() else "PyTorch finds no Triton that works with this GPU (pip install triton)"
    except Exception as error:  # a Triton that is broken raises whatever it wants
        return f"Triton cannot be used ({type(error).__name__}: {error})"


def choose_on_all_ranks(
    model: Any, dtype: torch.dtype, device: torch.device, lengths: Sequence[int] | None, packed: bool = False
) -> dict[str, Backend]:
    """Test the kernels that the model will use, on every rank; a kernel that one rank cannot use is used by none.

    Rank 0 logs one WARNING for each of these.

    Args:
        model: anything with `op_uses()`. What has none is not tested.
        dtype: of queries, keys and values.
        device: of this rank.
        lengths: tokens of the sequences to come; None if any may, with padding and decoding too.
        packed: documents in them are kept apart.

    Returns:
        op: what runs it.
    """
    uses = [use._replace(packed=packed) for use in (model.op_uses() if hasattr(model, "op_uses") else [])]
    found = choose_backends(uses, dtype, device, lengths)
    messages = op_backends.faults()
    if dist.is_initialized() and dist.get_world_size() > 1:
        per_rank: list[dict] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(per_rank, messages)
        everywhere: dict = {}
        for rank, faults in enumerate(per_rank):
            for key, message in faults.items():
                everywhere.setdefault(key, f"rank {rank}: {message}")
        if everywhere.keys() != messages.keys():
            op_backends.adopt(everywhere)
            found = choose_backends(uses, dtype, device, lengths)
        messages = everywhere if dist.get_rank() == 0 else {}
    for message in messages.values():
        log.warning("%s", message)
    return found
