"""Attention where processes share sequences (`context.py`).

Axes: `forgetting_transformer/ops/__init__.py`. Lower case t is this process's part of T.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forgetting_transformer.ops import context


def attend_with_own_heads(
    attend: Callable[..., Tensor],
    q_BtHD: Tensor,
    k_BtGD: Tensor,
    v_BtGD: Tensor,
    log_fgate_BtH: Tensor | None,
    cu_seqlens: Tensor | None,
    window: int | None,
    pruning: Any,
) -> Tensor:
    """Attend by `attend` with all positions of some heads; returns some positions of all heads, `(B, t, H, D)`.

    Whole groups move, each with its key head, in an order that gives all processes about as much to do where pruning
    leaves some heads more than others. Key heads are copied where there are too few for all processes to have as many.
    """
    size = context.active().size  # type: ignore[union-attr]  # called where they share
    copies = size // math.gcd(size, k_BtGD.shape[2])
    if copies > 1:
        k_BtGD, v_BtGD = (x.repeat_interleave(copies, dim=2) for x in (k_BtGD, v_BtGD))
    groups, order = (k_BtGD.shape[2], -1), None
    moved = [q_BtHD.unflatten(2, groups), k_BtGD, v_BtGD]
    if log_fgate_BtH is not None:
        moved.append(log_fgate_BtH.unflatten(2, groups))
    if log_fgate_BtH is not None and pruning is not None:
        threshold_H = pruning.threshold(log_fgate_BtH.shape[1] * size, window)
        # The head of a group that forgets most slowly stands for it.
        threshold_G = None if threshold_H is None else threshold_H.unflatten(0, groups).amin(-1)
        with torch.no_grad():
            order = context.even_order(moved[3].amax(-1), threshold_G, cu_seqlens)
        if threshold_H is not None:
            bound_GR = pruning.score_bound_H.unflatten(0, groups)
            pruning = type(pruning)(pruning.log_tolerance, context.own_heads(bound_GR, order).flatten())
    q_BTGRD, k_BTGD, v_BTGD, *gates = (context.to_heads(x, cu_seqlens is not None, order) for x in moved)
    log_fgate_BTH = gates[0].flatten(2, 3) if gates else None
    out_BTHD = attend(q_BTGRD.flatten(2, 3), k_BTGD, v_BTGD, log_fgate_BTH, None, cu_seqlens, window, pruning)
    return context.to_sequence(out_BTHD.unflatten(2, q_BTGRD.shape[2:4]), len(q_BtHD), order).flatten(2, 3)
