"""One sequence on several processes: functions for layers in which a token needs data of another process.

Of N processes, the r-th holds the r-th of N equal parts of every sequence. Inside `activate` the functions below move
tensors between them, with gradients; outside they return their arguments, or None, and cost nothing. Attention and
delta rules take all positions of some heads (`to_heads`, `to_sequence`; Jacobs et al. 2023, "DeepSpeed-Ulysses"). Heads
are independent, so which process takes which is free (`even_order`). Token shift and convolutions need the tokens
before a part (`before`), recurrences with a decay the state before it (`state_before`).

All of it is one operation, `exchange`, which only moves numbers: results do not depend on the order of arrival. It is
opaque to torch.compile. All processes must call these functions in the same order, and so must their backward passes:
run both inside `activate`, because activation checkpointing computes the forward pass again.

Axes: `forgetting_transformer/ops/__init__.py`. Lower case t is this process's part of T, h its part of H. S is N, the
processes that share a sequence.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Assumed decay in nats beyond which pruning leaves pairs out, where it is unknown before the kernel runs: a tolerance
#: of 10, twice a bound of the scores of 8, and the logarithm of a million keys.
USUAL_THRESHOLD = 40.0
#: Positions of a tile of the kernels.
TILE = 128
#: By which work falls from head to head, in the shapes of work that `_dealings` tries.
FACTORS = (0.97, 0.94, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5, 0.4, 0.3)


@dataclass(frozen=True)
class Context:
    """The processes that share a sequence, as one of them sees them.

    Attributes:
        rank: which part of every sequence this process holds, from 0.
        size: how many processes share it.
    """

    rank: int
    size: int

    def part(self, length: int) -> slice:
        """This process's slice of `length` positions.

        Raises:
            ValueError: they have no equal parts.
        """
        if length % self.size:
            raise ValueError(f"sequences of {length} tokens have no equal parts for {self.size} processes")
        own = length // self.size
        return slice(self.rank * own, (self.rank + 1) * own)


_active: Context | None = None
# The process group of `_active`: a compiled graph must not see it.
_groups: list[Any] = []


@contextlib.contextmanager
def activate(context: Context | None, group: Any = None) -> Iterator[None]:
    """Context in which sequences are parts of longer ones.

    Args:
        context: None for whole sequences.
        group: the process group (`torch.distributed`) of the processes that share them.
    """
    global _active
    outer, _active = _active, context
    _groups.append(group)
    try:
        yield
    finally:
        _active = outer
        _groups.pop()


def active() -> Context | None:
    """The processes that share sequences now; None where sequences are whole."""
    return _active


@dataclass(frozen=True)
class Order:
    """Assignment of heads to processes: the first process has the first h of `heads`, and so on.

    Attributes:
        heads: (H,) int64, the heads in this order.
        places: (H,) int64, where in it each head is.
    """

    heads: Tensor
    places: Tensor


def even_order(
    log_fgate_BtH: Tensor, threshold_H: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Order | None:
    """Order of heads with which pruned attention takes all processes about as long; None where sequences are whole.

    Without it all wait for the process whose heads forget most slowly. A query of a head has all keys before it in its
    document, up to a distance: there, the mean gate has let a weight fall below the threshold of pruning. The order
    follows from the gates of the whole batch and is the same on every process.

    Args:
        log_fgate_BtH: logarithms of the gates here.
        threshold_H: logarithm of the decay beyond which pruning leaves pairs out; None: it is not known.
        cu_seqlens: `(documents + 1,)`, where packed documents begin and the last one ends; None: rows are documents.

    Raises:
        ValueError: the heads cannot be shared equally.
    """
    shared = _active
    if shared is None:
        return None
    _, own_length, num_heads = log_fgate_BtH.shape
    _check_heads(num_heads, shared.size)
    with torch.no_grad():
        mean_SH = _gather(log_fgate_BtH.float().mean((0, 1)))
        heads_H = _deal(mean_SH, threshold_H, cu_seqlens, own_length * shared.size)
        return Order(heads_H, heads_H.argsort())


@torch.library.custom_op("forgetting_transformer::deal", mutates_args=())
def _deal(mean_SH: Tensor, threshold_H: Tensor | None, cu_seqlens: Tensor | None, length: int) -> Tensor:
    """`Order.heads`, from the mean logarithm of the gates on each process; `length` is that of rows.

    In compiled code each process might add in another order, and a last bit may decide which of two ways is better.
    """
    work_H = _keys_per_query(mean_SH, threshold_H, cu_seqlens, length)
    sorted_H, heads_H = work_H.sort(descending=True, stable=True)
    ways_KSh = _dealings(len(work_H), len(mean_SH), work_H.device)
    longest_K = sorted_H[ways_KSh].sum(-1).amax(-1)
    # Not ways_KSh[…], for which the host would wait.
    return heads_H[ways_KSh.index_select(0, longest_K.argmin()[None]).flatten()]


@_deal.register_fake
def _(mean_SH, threshold_H, cu_seqlens, length):
    return mean_SH.new_empty(mean_SH.shape[1], dtype=torch.int64)


def _keys_per_query(mean_SH: Tensor, threshold_H: Tensor | None, cu_seqlens: Tensor | None, length: int) -> Tensor:
    """Keys that a query keeps in each head `(H,)`: a band under the diagonal of each document, and the tiles on it."""
    threshold = USUAL_THRESHOLD if threshold_H is None else threshold_H.abs()
    reach_H1 = (threshold / mean_SH.mean(0).abs())[:, None]
    lengths_N = mean_SH.new_full((1,), length) if cu_seqlens is None else cu_seqlens.diff()
    pairs_H = torch.zeros_like(reach_H1[:, 0])
    # There may be as many documents as tokens, or repeated ends, which cannot be known without waiting for the GPU.
    for length_N in lengths_N.split(2**16):
        within_HN = reach_H1.clamp(max=length_N)
        pairs_H += (within_HN * (length_N - within_HN / 2)).sum(1)
    return pairs_H / lengths_N.sum() + TILE


@functools.cache
def _dealings(num_heads: int, size: int, device: torch.device) -> Tensor:
    """K ways `(K, S, h)` to deal out heads that are sorted by their work, most first.

    Each gives the next head to the process that has least (Graham 1969, "Bounds on multiprocessing timing anomalies"),
    for work of one shape: some heads have equal work, and each further head less by a constant factor. For the work at
    hand this would take H steps on the GPU, one after the other. The best of these ways is about as good, in one step.
    """
    ways: dict[str, list[list[int]]] = {}
    for equal, factor in itertools.product(range(1, num_heads + 1), FACTORS):
        shares: list[list[int]] = [[] for _ in range(size)]
        loads = [0.0] * size
        for head in range(num_heads):
            least = min((s for s in range(size) if len(shares[s]) < num_heads // size), key=loads.__getitem__)
            shares[least].append(head)
            loads[least] += factor ** max(0, head + 1 - equal)
        ways.setdefault(str(shares), shares)
    return torch.tensor(list(ways.values()), device=device)


def to_heads(x_BtHX: Tensor, as_one_row: bool = False, order: Order | None = None) -> Tensor:
    """Exchange some positions of all heads, `(B, t, H, …)`, for all positions of some heads, `(B, T, h, …)`.

    Args:
        as_one_row: one row after another, `(1, B·T, h, …)`, as packed documents are kept apart.
        order: which process takes which heads; None: by their numbers.

    Raises:
        ValueError: the heads cannot be shared equally.
    """
    shared = _active
    if shared is None:
        return x_BtHX
    _check_heads(x_BtHX.shape[2], shared.size)
    if order is not None:
        x_BtHX = _Permuted.apply(x_BtHX, order.heads, order.places)
    x_SBthX = x_BtHX.unflatten(2, (shared.size, -1)).movedim(2, 0)
    x_BThX = _exchange(x_SBthX).movedim(0, 1).flatten(1, 2)
    return x_BThX.flatten(0, 1)[None] if as_one_row else x_BThX


def to_sequence(x_BThX: Tensor, batch: int, order: Order | None = None) -> Tensor:
    """Back: from all positions of some heads, `(B, T, h, …)`, to some positions of all heads, `(B, t, H, …)`.

    Args:
        batch: B; x may have all its rows as one.
        order: order of `to_heads`.
    """
    shared = _active
    if shared is None:
        return x_BThX
    x_SBthX = x_BThX.reshape(batch, shared.size, -1, *x_BThX.shape[2:]).movedim(1, 0)
    x_BtHX = _exchange(x_SBthX).movedim(0, 2).flatten(2, 3)
    return x_BtHX if order is None else _Permuted.apply(x_BtHX, order.places, order.heads)


def own_heads(x_H: Tensor, order: Order | None = None) -> Tensor:
    """Entries of the heads that `to_heads` brings here, of one entry per head."""
    if _active is None:
        return x_H
    return (x_H if order is None else x_H[order.heads])[_active.part(len(x_H))]


def _check_heads(num_heads: int, size: int) -> None:
    if num_heads % size:
        raise ValueError(f"{num_heads} heads cannot be shared equally by {size} processes")


class _Permuted(torch.autograd.Function):
    """x[:, :, index], whose gradient is taken by the inverse: that of an index in general is a sum over atomics."""

    @staticmethod
    def forward(ctx: Any, x_BtHX: Tensor, index_H: Tensor, inverse_H: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_H)
        return x_BtHX.index_select(2, index_H)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse_H,) = ctx.saved_tensors
        return gradients[0].index_select(2, inverse_H), None, None


def before(x_Bt: Tensor, count: int) -> Tensor | None:
    """The last `count` positions before x[:, 0] that another process holds, `(B, count, …)`; 0 before a sequence.

    None where sequences are whole, or `count` is 0.

    Raises:
        ValueError: parts are shorter than that.
    """
    shared = _active
    if shared is None or count == 0:
        return None
    if x_Bt.shape[1] < count:
        raise ValueError(
            f"each process has {x_Bt.shape[1]} tokens of a sequence and needs {count} of the process before it; let "
            "fewer processes share a sequence (strategy.context), or take longer ones"
        )
    last = _gather(x_Bt[:, x_Bt.shape[1] - count :])[shared.rank - 1]
    # Not left out on the first process, whose backward pass has to take part too.
    is_first = torch.full((), shared.rank == 0, device=x_Bt.device)
    return last.masked_fill(is_first, 0)


def state_before(own: Tensor, log_decay: Tensor) -> Tensor:
    """The state of a recurrence before this process's first token: `Σ_j own_j · Π decays of the parts in between`.

    Args:
        own: the state after this process's last token, had the one before its first been 0.
        log_decay: logarithm of what its tokens leave of the state before them; broadcast to `own`.
    """
    shared = _active
    assert shared is not None
    own_S, log_decay_S = _gather(own), _gather(log_decay)
    part_S = torch.arange(shared.size, device=own.device)
    is_before_S = part_S < shared.rank
    # Decays of the parts after part j and before this one. As a masked sum: TorchInductor fails on some running sums.
    between_jS = (part_S > part_S[:, None]) & is_before_S
    between_jS, is_before_S = (x.view(*x.shape, *[1] * own.ndim) for x in (between_jS, is_before_S))
    log_between_S = torch.where(between_jS, log_decay_S, 0).sum(1)
    return (own_S * log_between_S.exp().masked_fill(~is_before_S, 0)).sum(0)


def _gather(x: Tensor) -> Tensor:
    """x of every process, `(S, …)`."""
    assert _active is not None
    return _exchange(x.expand(_active.size, *x.shape))


def _exchange(x: Tensor) -> Tensor:
    """The r-th of the S slices of x along axis 0 goes to process r; slice r of the result came from there."""
    # Here, so that the compiled kernel that makes x writes it as it is sent. In the operator it would be a copy more.
    return _exchange_contiguous(x.contiguous())


@torch.library.custom_op("forgetting_transformer::exchange", mutates_args=())
def _exchange_contiguous(x: Tensor) -> Tensor:
    import torch.distributed as dist

    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=_groups[-1])
    return received


@_exchange_contiguous.register_fake
def _(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _exchange_back(_: Any, gradient: Tensor) -> Tensor:
    return _exchange(gradient)


_exchange_contiguous.register_autograd(_exchange_back)
