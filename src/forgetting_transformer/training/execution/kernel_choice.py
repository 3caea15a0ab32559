"""Which backend each op of a model uses: found out, and tested, before the first step, and the same on every rank."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from forgetting_transformer.ops import backends
from forgetting_transformer.ops.selftest import Backend, choose_backends

log = logging.getLogger(__name__)


def choose_on_all_ranks(
    model: Any, dtype: torch.dtype, device: torch.device, lengths: Sequence[int] | None, packed: bool = False
) -> dict[str, Backend]:
    """Test the kernels that the model will use, on every rank; what one rank cannot use, none uses.

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

    def choose() -> dict[str, Backend]:
        return choose_backends(uses, dtype, device, lengths)

    found = choose()
    messages = backends.faults()
    several = dist.is_initialized() and dist.get_world_size() > 1
    if several:
        per_rank: list[dict] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(per_rank, messages)
        everywhere: dict = {}
        for rank, faults in enumerate(per_rank):
            for key, message in faults.items():
                everywhere.setdefault(key, f"rank {rank}: {message}")
        if everywhere.keys() != messages.keys():
            backends.adopt(everywhere)
            found = choose()
        messages = everywhere
    if not several or dist.get_rank() == 0:
        for message in messages.values():
            log.warning("%s", message)
    return found
