"""Data-dependent token shift: mix every token with the one before it.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import torch
from torch import Tensor


def token_shift(
    y_BTHD: Tensor, alpha_BTH: Tensor, previous_BHD: Tensor | None = None, begins_BT: Tensor | None = None
) -> Tensor:
    """Return `alpha_t · y_{t-1} + (1 - alpha_t) · y_t`, one alpha per token and head.

    The weight of the *previous* token comes from the current one (Lin et al. 2025, "KV-shift").

    Args:
        y_BTHD: the sequence to shift.
        alpha_BTH: weights in [0, 1].
        previous_BHD: y_{-1}, the token before the first. Default 0.
        begins_BT: True for the first token of each packed document, before which y counts as 0.

    Returns:
        `(B, T, H, D)` in y's dtype; the blend is computed in float32 or wider.
    """
    if alpha_BTH.shape != y_BTHD.shape[:3]:
        raise ValueError(f"alpha has shape {tuple(alpha_BTH.shape)}; it must be {tuple(y_BTHD.shape[:3])}")
    if previous_BHD is None:
        previous_BHD = torch.zeros_like(y_BTHD[:, 0])
    elif previous_BHD.shape != y_BTHD[:, 0].shape:
        raise ValueError(f"previous has shape {tuple(previous_BHD.shape)}; it must be {tuple(y_BTHD[:, 0].shape)}")
    shifted_BTHD = torch.cat((previous_BHD[:, None].to(y_BTHD.dtype), y_BTHD[:, :-1]), dim=1)
    if begins_BT is not None:
        shifted_BTHD = shifted_BTHD.masked_fill(begins_BT[..., None, None], 0)
    dtype = torch.promote_types(y_BTHD.dtype, torch.float32)
    alpha_BTH1 = alpha_BTH.to(dtype)[..., None]
    return (alpha_BTH1 * shifted_BTHD.to(dtype) + (1 - alpha_BTH1) * y_BTHD.to(dtype)).to(y_BTHD.dtype)
