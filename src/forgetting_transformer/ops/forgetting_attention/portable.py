"""Forgetting attention on any device, through PyTorch's `scaled_dot_product_attention`. Exact; O(M + N) memory.

Softmax does not change when a constant is added to a row, so of the decay Σ_{l=j+1..i} log f_l = c_i - c_j (c the
running sum of log f) only the part that depends on the key counts, b_j = c_r - c_j for any reference position r:

    softmax_j(s·q_i·k_j + c_i - c_j) = softmax_j(s·[q_i, 1]·[k_j, b_j/s]).

One more channel makes forgetting attention an ordinary causal attention, and autograd gives every gradient.

Floating-point numbers are dense near 0 only, so b is computed anew for every block of queries, outwards from
a reference in the middle of the block: pairs near the diagonal, the ones that carry weight, get small accurate numbers
however long the sequence is. The forward pass of a block is repeated in the backward pass instead of being stored.

Axes: B batch, H heads, M queries, N keys, D channels of a head, E = D + the bias channels + zeros up to
a multiple of 8. Lower case m, n: the queries of one block and the keys that it sees.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# log f is clamped here: finite numbers keep -inf - (-inf) = NaN out of the running sums. exp(-256) is 0 in float32 even
# against a score difference of 150, and a larger number would cost accuracy after a hard reset (2e-5 with this one).
_MIN_LOG_FGATE = -256.0
# Bias of padded keys: exactly 0 weight for every real query, and far from float32's limits.
_PADDING_BIAS = -1e9


def forgetting_attention_portable(
    q_BHMD: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    log_fgate_BHN: Tensor,
    seq_start_B: Tensor | None,
    sm_scale: float,
    *,
    block_size: int = 1024,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Forgetting attention with arguments as in `forgetting_attention`, head first. Returns `(B, H, M, D)`, q's dtype.

    Args:
        block_size: queries per block.
        compute_dtype: what the attention runs in, see `_choose_compute_dtype`. bfloat16 splits the bias into three
            channels whose sum has float32's precision.
    """
    if compute_dtype is None:
        compute_dtype = _choose_compute_dtype(q_BHMD)
    num_queries, num_keys = q_BHMD.shape[2], k_BHND.shape[2]
    first_query = num_keys - num_queries
    q, k, v = (x.to(compute_dtype) for x in (q_BHMD, k_BHND, v_BHND))
    bias_dtype = torch.promote_types(compute_dtype, torch.float32)
    log_fgate = log_fgate_BHN.to(bias_dtype).clamp(min=_MIN_LOG_FGATE)

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
    out_blocks = []
    for start in range(0, num_queries, block_size):
        stop = min(start + block_size, num_queries)
        keys = slice(0, first_query + stop)
        padding_Bn = None if padding_BN is None else padding_BN[:, keys]
        out_blocks.append(attend(q[:, :, start:stop], k[:, :, keys], v[:, :, keys], log_fgate[:, :, keys], padding_Bn))
    out = out_blocks[0] if len(out_blocks) == 1 else torch.cat(out_blocks, dim=2)
    return out.to(q_BHMD.dtype)


def _choose_compute_dtype(q: Tensor) -> torch.dtype:
    """Return bfloat16 for bfloat16 inference on a GPU (tensor cores), float64 for float64, float32 for all else.

    Against float64, bfloat16 gives the output to 2e-3 and dq, dk, dv to 5e-3 at usual gates, but the gradient of
    log f only to 1e-2 to 7e-2, as it sums many rounded terms that nearly cancel. float32 gives the output to 1e-5 and
    every gradient to 2e-4.
    """
    if q.dtype == torch.bfloat16 and q.is_cuda and not torch.is_grad_enabled():
        return torch.bfloat16
    return torch.promote_types(q.dtype, torch.float32)


def _attend_block(
    q_BHmD: Tensor,
    k_BHnD: Tensor,
    v_BHnD: Tensor,
    log_fgate_BHn: Tensor,
    padding_Bn: Tensor | None,
    sm_scale: float,
) -> Tensor:
    """Attend from one block of queries, which are the last m of the n keys."""
    num_queries, num_keys, head_dim = q_BHmD.shape[2], k_BHnD.shape[2], q_BHmD.shape[3]
    bias_BHn = _key_bias(log_fgate_BHn, reference=num_keys - 1 - num_queries // 2)
    if padding_Bn is not None:
        bias_BHn = bias_BHn.masked_fill(padding_Bn[:, None, :], _PADDING_BIAS)
    bias_BHnX = _split_into_channels(bias_BHn / sm_scale, k_BHnD.dtype)

    num_bias_channels = bias_BHnX.shape[-1]
    num_zeros = -(head_dim + num_bias_channels) % 8
    q_BHmE = F.pad(F.pad(q_BHmD, (0, num_bias_channels), value=1.0), (0, num_zeros))
    k_BHnE = F.pad(torch.cat((k_BHnD, bias_BHnX), dim=-1), (0, num_zeros))
    # The memory-efficient kernels want v as wide as q and k.
    v_BHnE = F.pad(v_BHnD, (0, num_bias_channels + num_zeros))

    is_square = num_queries == num_keys
    mask_mn = None
    if not is_square and num_queries > 1:
        mask_mn = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_BHmD.device)
        mask_mn = mask_mn.tril(num_keys - num_queries)
    out_BHmE = F.scaled_dot_product_attention(
        q_BHmE, k_BHnE, v_BHnE, attn_mask=mask_mn, is_causal=is_square, scale=sm_scale
    )
    return out_BHmE[..., :head_dim]


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
