"""Finds weights and moments that are finite and wrong, as failing memory or a failing GPU leaves them.

Every tensor has a digest, an integer of 64 bits: with b_i the bits of element i, taken as a signed integer,

    digest = sum over i of b_i * (2 i + 1)  mod 2^64

Sums of integers do not depend on the order in which they are made, so a digest is bitwise the same whatever device,
kernel or sharding computes it, and the digests of the shards of a tensor add up to that of the whole. One changed
element changes the digest, because 2 i + 1 is odd; so do two elements that trade places, because (b_i - b_j) * 2 (i -
j) is smaller than 2^64 (in tensors of 32-bit elements with fewer than 2^31 of them). Anything else goes unseen with a
probability of about 2^-64.

What they are used for:

- With data parallelism (ddp) all ranks hold the same weights and moments, and with hsdp one rank of every copy of the
  model holds the same shards. Every `strategy.compare_steps` steps, and before every checkpoint, each rank's digests
  are gathered on all ranks. Nobody waits for that but a checkpoint.
- A checkpoint keeps the digests of what was to be saved, and loading compares them with what has been loaded, also on
  another number of ranks or with another strategy. That covers sharded runs (fsdp), whose ranks hold different tensors.

What every rank computes alike and wrong is not found: a wrong gradient of one rank, once averaged,
is in the weights of all.
"""

import collections
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from forgetting_transformer.training.errors import TrainingError
from forgetting_transformer.training.faults.shards import first_element, is_counted, local

#: Elements that are added up at a time, by device: what fits into the caches of a core, or keeps a GPU busy.
_PIECES = {"cpu": 1 << 16}
_PIECE = 1 << 22
#: Tensors smaller than this part of a piece are put together, because each by itself would cost as much as a large one.
_SMALL = 16
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Comparison:
    """Compares weights and moments over the ranks that hold the same of them.

    The gathered digests are copied to the host behind the steps that follow, as StepGuard's verdicts are.

    Args:
        shards: ranks of one copy of the model, neighbours of which each holds another shard; 1: each holds all of it.
        steps: of training between two comparisons.
    """

    def __init__(self, world_size: int, shards: int = 1, steps: int = 1) -> None:
        self._world_size, self._shards, self.steps = world_size, shards, steps
        self._pending: collections.deque[tuple[int, list[str], Tensor, torch.cuda.Event | None]] = collections.deque()
        self._found: str | None = None

    @torch.no_grad()
    def begin(self, batch: int, tensors: Mapping[str, Tensor]) -> None:
        """Gathers the digests of `tensors` on all ranks; called by all of them after the same step, `batch`."""
        mine = digests([(local(tensor), 0) for tensor in tensors.values()])
        gathered = mine.new_empty(self._world_size, len(mine))
        dist.all_gather(list(gathered.unbind()), mine)
        table, event = gathered, None
        if gathered.is_cuda:
            table = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            table.copy_(gathered, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._pending.append((batch, list(tensors), table, event))

    def difference(self, wait: bool = False) -> str | None:
        """The first difference that was found, if any.

        Args:
            wait: for the device, so that the answer includes the last comparison. All ranks then get the same answer.
        """
        while self._found is None and self._pending:
            batch, names, table, event = self._pending[0]
            if event is not None and not event.query():
                if not wait:
                    break
                event.synchronize()
            self._pending.popleft()
            self._found = judge(batch, names, table, self._shards)
        return self._found

    def refuse(self, last_good_checkpoint: str) -> None:
        """
        Raises:
            TrainingError: ranks hold different weights or moments; on every rank.
        """
        found = self.difference(wait=True)
        if found is not None:
            raise TrainingError(
                f"weights or moments are corrupt: {found}. All ranks should hold the same, so memory or a GPU has "
                f"failed; nothing was saved since, and {last_good_checkpoint}. Leave that machine out, or test it, and "
                "start the same command again"
            )


def judge(batch: int, names: Sequence[str], table: Tensor, shards: int = 1) -> str | None:
    """The ranks that differ from the majority, or, without one, from the first rank, and where; None if none does.

    Args:
        batch: steps that had been made then.
        table: digests, (ranks, tensors), in which rows that are `shards` apart should be equal.
    """
    for first in range(shards):
        rows = {rank: tuple(row) for rank, row in enumerate(table.tolist()) if rank % shards == first}
        kinds = collections.Counter(rows.values()).most_common()
        if len(kinds) == 1:
            continue
        majority = kinds[0][1] > len(rows) / 2
        usual = kinds[0][0] if majority else rows[first]
        different = [rank for rank, row in rows.items() if row != usual]
        wrong = [name for k, name in enumerate(names) if any(rows[rank][k] != usual[k] for rank in different)]
        ranks = ", ".join(map(str, different if majority else [first, *different]))
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        who = f"rank(s) {ranks} differ from the other ranks" if majority else f"ranks {ranks} differ"
        return f"{who} in {wrong[0]}{more} after step {batch:,}"
    return None


def weights_and_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments by the names that a checkpoint gives them, as this rank holds them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after an evaluation some weights are still gathered
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"model.{name}": parameter for parameter, name in names.items()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if torch.is_tensor(value):
                tensors[f"optimizer.state.{names[parameter]}.{key}"] = value
    return tensors


@torch.no_grad()
def digests_of_whole(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Digests of whole tensors, as hexadecimal text, from what the ranks hold: shards are added up over the ranks.

    Called by all ranks where a tensor is sharded; waits for the device.
    """
    if not tensors:
        return {}
    parts = [(local(tensor), first_element(tensor)) for tensor in tensors.values()]
    found = digests(parts)
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        found *= torch.tensor([is_counted(tensor) for tensor in tensors.values()], device=found.device)
        dist.all_reduce(found)
    return {name: f"{value % 2**64:016x}" for name, value in zip(tensors, found.tolist(), strict=True)}


def differing(recorded: Mapping[str, str], tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that are not what their recorded digest says; those without a record are not judged."""
    known = {name: tensor for name, tensor in tensors.items() if name in recorded}
    return [name for name, digest in digests_of_whole(known).items() if digest != recorded[name]]


@torch.no_grad()
def digests(parts: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Digests of pieces of tensors: (K,) int64 on the device of the first.

    Args:
        parts: K tensors and, for each, the position of its first element in the tensor that it is a piece of.
    """
    device = parts[0][0].device
    bits = [_bits(tensor.to(device)) for tensor, _ in parts]
    found = torch.zeros(len(parts), dtype=torch.int64, device=device)
    piece = _PIECES.get(device.type, _PIECE)
    longest = min(piece, sum(len(one) for one in bits))
    odd = 2 * torch.arange(longest, device=device) + 1
    small: dict[torch.dtype, list[int]] = {}
    for number, one in enumerate(bits):
        if len(one) < piece // _SMALL:
            small.setdefault(one.dtype, []).append(number)
            continue
        for begin in range(0, len(one), longest):
            found[number] += _sum(one[begin : begin + longest], parts[number][1] + begin, odd)
    for numbers in small.values():
        for bucket in _buckets(numbers, [len(bits[number]) for number in numbers], len(odd)):
            starts = [parts[number][1] for number in bucket]
            found[torch.tensor(bucket, device=device)] = _sums([bits[number] for number in bucket], starts, odd)
    return found


def _sum(bits: Tensor, start: int, odd: Tensor) -> Tensor:
    """Digest of one piece, whose first element is number `start`."""
    numbers = bits.to(torch.int64, copy=True)
    plain = numbers.sum()
    return numbers.mul_(odd[: len(numbers)]).sum() + plain * (2 * start)


def _sums(pieces: list[Tensor], starts: list[int], odd: Tensor) -> Tensor:
    """Digests of several small pieces at once: differences of running sums over all of them, which are as exact."""
    numbers = torch.cat(pieces).to(torch.int64)
    ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0)
    begins = ends - torch.tensor([len(piece) for piece in pieces])
    # Positions were counted from the beginning of the bucket, and not from that of the tensor.
    shift = 2 * (torch.tensor(starts) - begins)

    def per_piece(values: Tensor) -> Tensor:
        running = torch.cat([values.new_zeros(1), values.cumsum(0)])
        return running[ends.to(running.device)] - running[begins.to(running.device)]

    plain = per_piece(numbers)
    return per_piece(numbers.mul_(odd[: len(numbers)])) + plain * shift.to(plain.device)


def _buckets(numbers: list[int], lengths: list[int], room: int) -> list[list[int]]:
    buckets: list[list[int]] = [[]]
    used = 0
    for number, length in zip(numbers, lengths, strict=True):
        if used + length > room:
            buckets.append([])
            used = 0
        buckets[-1].append(number)
        used += length
    return [bucket for bucket in buckets if bucket]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
