"""Forgetting attention on any device, through PyTorch's `scaled_dot_product_attention`. Exact; O(T + N) memory.

Softmax does not change when a constant is added to a row. With c the running sum of log f, the decay is Σ_{l=j+1..i}
log f_l = c_i - c_j, of which only the part of the key counts, b_j = c_r - c_j for any reference position r:

    softmax_j(s·q_i·k_j + c_i - c_j) = softmax_j(s·[q_i, 1]·[k_j, b_j/s]).

One more channel makes forgetting attention an ordinary causal attention, and autograd gives every gradient.

Floating-point numbers are dense near 0 only, so every block of queries computes its own b, outwards from
a reference in the middle of the block: pairs near the diagonal, the ones that carry weight, get small accurate numbers
however long the sequence is. The forward pass of a block is repeated in the backward pass instead of being stored.

Windows and packed documents need an explicit mask, one block at a time.

Axes: `forgetting_transformer/ops/__init__.py`. X is D, the bias channels, and zeros up to a multiple of 8.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from forgetting_transformer.ops.forgetting_attention.constants import MIN_LOG_FGATE

# Bias of padded keys: exactly 0 weight for every real query, and far from float32's limits.
_PADDING_BIAS = -1e9


def forgetting_attention_portable(
    q_BHTD: Tensor,
    k_BGND: Tensor,
    v_BGND: Tensor,
    log_fgate_BHN: Tensor,
    seq_start_B: Tensor | None,
    sm_scale: float,
    *,
    first_key_BT: Tensor | None = None,
    window: int | None = None,
    block_size: int = 1024,
) -> Tensor:
    """Forgetting attention with arguments as in `forgetting_attention`, head first.

    Args:
        first_key_BT: the first key that each query sees, for windows and packed documents. Default 0.
        window: keys that a query sees at most, which must be in `first_key_BT` too: blocks leave out what lies before.
        block_size: queries per block.

    Returns:
        The output `(B, H, T, D)` in q's dtype.
    """
    compute_dtype = _choose_compute_dtype(q_BHTD)
    num_queries, num_keys = q_BHTD.shape[2], k_BGND.shape[2]
    first_query = num_keys - num_queries
    group = q_BHTD.shape[1] // k_BGND.shape[1]
    q, k, v = (x.to(compute_dtype) for x in (q_BHTD, k_BGND, v_BGND))
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    bias_dtype = torch.promote_types(compute_dtype, torch.float32)
    log_fgate = log_fgate_BHN.to(bias_dtype).clamp(min=MIN_LOG_FGATE)

    padding_BN = None
    if seq_start_B is not None:
        # Zeros in place of padding make its outputs and gradients exactly 0, whatever it held.
        key_N = torch.arange(num_keys, device=q.device)
        padding_BN = key_N < seq_start_B[:, None]
        q = q.masked_fill(padding_BN[:, None, first_query:, None], 0)
        k = k.masked_fill(padding_BN[:, None, :, None], 0)
        v = v.masked_fill(padding_BN[:, None, :, None], 0)
        # The gate of the first real token acts on padding only.
        log_fgate = log_fgate.masked_fill((key_N <= seq_start_B[:, None])[:, None, :], 0)

    attend = functools.partial(_attend_block, sm_scale=sm_scale)
    if num_queries > block_size and torch.is_grad_enabled():
        attend = functools.partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
    blocks = []
    for start in range(0, num_queries, block_size):
        stop = min(start + block_size, num_queries)
        keys = slice(0 if window is None else max(0, first_query + start - window + 1), first_query + stop)
        padding_Bn = None if padding_BN is None else padding_BN[:, keys]
        visible = None
        if first_key_BT is not None:
            visible = _visible(first_key_BT[:, start:stop], first_query + start, keys, padding_Bn)
        blocks.append(
            attend(q[:, :, start:stop], k[:, :, keys], v[:, :, keys], log_fgate[:, :, keys], padding_Bn, visible)
        )
    out = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)
    return out.to(q_BHTD.dtype)


def _visible(first_key_Bt: Tensor, first_query: int, keys: slice, padding_Bn: Tensor | None) -> Tensor:
    """Pairs of a block that count, `(B, 1, m, n)`. A query in padding is left to see itself, which is 0 there."""
    query_t = torch.arange(first_query, first_query + first_key_Bt.shape[1], device=first_key_Bt.device)
    key_n = torch.arange(keys.start, keys.stop, device=first_key_Bt.device)
    visible_Btn = (key_n <= query_t[:, None]) & (key_n >= first_key_Bt[..., None])
    if padding_Bn is not None:
        visible_Btn = visible_Btn & ~padding_Bn[:, None] | (key_n == query_t[:, None])
    return visible_Btn[:, None]


def _choose_compute_dtype(q: Tensor) -> torch.dtype:
    """Return bfloat16 for bfloat16 inference on a GPU (tensor cores), float64 for float64, float32 for all else.

    Against float64, bfloat16 gives the output to 2e-3 and dq, dk, dv to 5e-3 at usual gates. The gradient of log f, a
    sum of many rounded terms that nearly cancel, is only good to 1e-2 to 7e-2. float32 gives the output to 1e-5 and
    every gradient to 2e-4.
    """
    if q.dtype == torch.bfloat16 and q.is_cuda and not torch.is_grad_enabled():
        return torch.bfloat16
    return torch.promote_types(q.dtype, torch.float32)


def _attend_block(
    q_BHtD: Tensor,
    k_BHnD: Tensor,
    v_BHnD: Tensor,
    log_fgate_BHn: Tensor,
    padding_Bn: Tensor | None,
    visible_B1tn: Tensor | None,
    sm_scale: float,
) -> Tensor:
    """Attend from one block of queries, which are the last m of the n keys."""
    num_queries, num_keys, head_dim = q_BHtD.shape[2], k_BHnD.shape[2], q_BHtD.shape[3]
    reference = num_keys - 1 - num_queries // 2
    bias_BHn = _key_bias(log_fgate_BHn, reference)
    if padding_Bn is not None:
        bias_BHn = bias_BHn.masked_fill(padding_Bn[:, None, :], _PADDING_BIAS)
    bias_BHnX = _split_into_channels(bias_BHn / sm_scale, k_BHnD.dtype)

    num_bias_channels = bias_BHnX.shape[-1]
    num_zeros = -(head_dim + num_bias_channels) % 8
    q_BHtX = F.pad(F.pad(q_BHtD, (0, num_bias_channels), value=1.0), (0, num_zeros))
    k_BHnX = F.pad(torch.cat((k_BHnD, bias_BHnX), dim=-1), (0, num_zeros))
    # The memory-efficient kernels want v as wide as q and k.
    v_BHnX = F.pad(v_BHnD, (0, num_bias_channels + num_zeros))

    is_plain = num_queries == num_keys and visible_B1tn is None
    mask = visible_B1tn
    if not is_plain and mask is None and num_queries > 1:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_BHtD.device)
        mask = mask.tril(num_keys - num_queries)
    out_BHtX = F.scaled_dot_product_attention(
        q_BHtX, k_BHnX, v_BHnX, attn_mask=mask, is_causal=is_plain, scale=sm_scale
    )
    return out_BHtX[..., :head_dim]


def _key_bias(log_fgate_BHn: Tensor, reference: int) -> Tensor:
    """Return b_j = c_r - c_j: Σ_{l=j+1..r} log f_l left of the reference r, -Σ_{l=r+1..j} log f_l right of it."""
    left = log_fgate_BHn[..., 1 : reference + 1].flip(-1).cumsum(-1).flip(-1)
    right = -log_fgate_BHn[..., reference + 1 :].cumsum(-1)
    return torch.cat((left, torch.zeros_like(log_fgate_BHn[..., :1]), right), dim=-1)


def _split_into_channels(x_BHn: Tensor, dtype: torch.dtype) -> Tensor:
    """Return channels of `dtype` whose sum is x: x itself, or in bfloat16 its leading, middle and trailing 8 bits."""
    if dtype != torch.bfloat16:
        return x_BHn.to(dtype)[..., None]
    high = x_BHn.to(dtype)
    with torch.no_grad():  # every channel gets the same gradient, so that of the first is the gradient of x
        middle = (x_BHn - high.float()).to(dtype)
        low = (x_BHn - high.float() - middle.float()).to(dtype)
    return torch.stack((high, middle, low), dim=-1)
