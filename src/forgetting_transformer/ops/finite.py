"""Check of weights before use: one NaN or infinity makes all outputs meaningless."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class NotFiniteError(ValueError):
    """Weights that cannot be used; the message names the first such tensor and where it is stored."""


@torch.no_grad()
def check_finite(weights: Iterable[tuple[str, Tensor]], where: Any) -> None:
    """Refuse weights that are NaN or infinite. The host waits for a GPU once.

    Args:
        weights: by name; those on "meta", and integers, are skipped.
        where: the file or folder that they are from, for the message.

    Raises:
        NotFiniteError: naming the first of them.
    """
    known = {name: t for name, t in weights if t.is_floating_point() and t.numel() and not t.is_meta}
    if not known:
        return
    device = next(iter(known.values())).device
    # The extremes are NaN where a value is. Unlike a sum they do not overflow, and they need no memory.
    extremes = [torch.aminmax(t.float() if t.element_size() == 1 else t) for t in known.values()]
    is_finite = torch.stack([torch.stack(pair).isfinite().all().to(device) for pair in extremes]).tolist()
    if wrong := [name for name, good in zip(known, is_finite, strict=True) if not good]:
        first = known[wrong[0]].float()
        more = f", and so do {len(wrong) - 1} other tensors" if len(wrong) > 1 else ""
        raise NotFiniteError(
            f"{where}: {wrong[0]} holds {int((~first.isfinite()).sum()):,} of {first.numel():,} values that are not "
            f"finite{more}; nothing can be done with such weights, take another checkpoint or get the file again"
        )
