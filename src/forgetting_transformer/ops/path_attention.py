"""Attention whose positions are products of Householder-like matrices along the way, with forget gates: PaTH-FoX.

Source: Yang et al., "PaTH Attention: Position Encoding via Accumulating Householder Transformations", 2025 (arXiv
2505.16381). Every token has a matrix `H_t = I - β_t w_t w_tᵀ`, and a query sees a key through all that lie between:

    score_ij = scale · q_iᵀ H_i H_{i-1} … H_{j+1} k_j + Σ_{s=j+1..i} log f_s       j ≤ i
    out_i    = Σ_j softmax_j(score_ij) v_j

**In chunks of 64 tokens.** Within a chunk products of H are `I - Wᵀ M W` with rows w_t of W and the lower triangular
`M = (I + diag(β) tril(W Wᵀ, -1))⁻¹ diag(β)`; that of tokens j + 1 … i has the rows and columns of M that belong to
them. So queries are carried to the start of their chunk and keys to the end of theirs. Then the queries of all chunks
go back one chunk at a time, past `I - Wᵀ M W` of each. Sums of log gates run along, from near to far, so that -inf (a
hard reset) is exact.

In PyTorch memory for the backward pass grows with T²: T/64 times the queries, and all scores. On a GPU the kernels of
flash-linear-attention run where they can (`path_attention_fla.py`).

Axes: `forgetting_transformer/ops/__init__.py`. n chunks of c tokens; N past tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.ops import path_attention_fla
from forgetting_transformer.ops.arguments import check_tensors

CHUNK_LENGTH = 64
# Longer sequences are left out of compiled graphs.
_MAX_COMPILED_LENGTH = 1024
# Scores of keys that a hard reset hides. Finite, so that no gradient is NaN.
_HIDDEN = -1e30


class Past(NamedTuple):
    """Keys, values and decays of earlier tokens, kept for the next call.

    Attributes:
        keys: `(B, N, H, D)`, carried past the H of all tokens after them, in float32 or wider.
        values: `(B, N, H, V)`.
        log_decay: `(B, N, H)`, sums of the log forget gates of all tokens after them.
    """

    keys: Tensor
    values: Tensor
    log_decay: Tensor


def path_attention(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHV: Tensor,
    w_BTHD: Tensor,
    beta_BTH: Tensor,
    log_fgate_BTH: Tensor,
    *,
    past: Past | None = None,
    returns_past: bool = False,
    has_resets: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Past | None]:
    """Attend to this token and those before it.

    In bfloat16 on a GPU, without a past and resets, kernels of flash-linear-attention do it for heads of 64 channels.
    The bits of their gradients differ from call to call.

    Args:
        q_BTHD, k_BTHD, v_BTHV: queries, keys and values, of one floating dtype.
        w_BTHD: directions of the Householder-like matrices, of length 1 or 0.
        beta_BTH: their strengths in [0, 2]; float32 is recommended.
        log_fgate_BTH: log forget gates ≤ 0, -inf for a token that sees nothing before itself; float32 is recommended.
        past: `Past` that an earlier call returned for the tokens before these.
        returns_past: whether to make `Past` for the tokens after these.
        has_resets: False promises that no gate is -inf, which the kernels do not take.
        scale: factor on `q·k`. Default 1/√D.

    Returns:
        The output `(B, T, H, V)` in v's dtype, computed in float32 (float64 for float64 inputs), under autocast too;
        and `Past` or None.

    Raises:
        TypeError, ValueError: arguments that do not fit together. The message names the argument.
    """
    check_tensors(
        {
            "q": (q_BTHD, "BTHD"),
            "k": (k_BTHD, "BTHD"),
            "v": (v_BTHV, "BTHV"),
            "w": (w_BTHD, "BTHD"),
            "beta": (beta_BTH, "BTH"),
            "log_fgate": (log_fgate_BTH, "BTH"),
        },
        {},
    )
    length, dim = q_BTHD.shape[1], q_BTHD.shape[3]
    scale = dim**-0.5 if scale is None else scale
    if past is None and not (returns_past or has_resets) and path_attention_fla.supports(q_BTHD, v_BTHV):
        out_BTHV = path_attention_fla.path_attention(q_BTHD, k_BTHD, v_BTHV, w_BTHD, beta_BTH, log_fgate_BTH, scale)
        if out_BTHV is not None:
            return out_BTHV, None
    in_chunks: Callable[..., tuple[Tensor, Past | None]] = _in_chunks
    if length > _MAX_COMPILED_LENGTH and torch.compiler.is_compiling() and _keep_out_of_graphs():
        in_chunks = _opaque["in_chunks"]
    with torch.autocast(q_BTHD.device.type, enabled=False):
        return in_chunks(q_BTHD, k_BTHD, v_BTHV, w_BTHD, beta_BTH, log_fgate_BTH, past, returns_past, scale)


def path_attention_reference(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHV: Tensor,
    w_BTHD: Tensor,
    beta_BTH: Tensor,
    log_fgate_BTH: Tensor,
    scale: float,
) -> Tensor:
    """The definition, one step per token: each carries all keys before it past its own H. Any floating dtype."""
    outs = []
    keys_BNHD, log_decay_BNH = k_BTHD[:, :0], log_fgate_BTH[:, :0]
    for t in range(q_BTHD.shape[1]):
        w_BHD, step_BH = w_BTHD[:, t], beta_BTH[:, t]
        along_BNH = (keys_BNHD * w_BHD[:, None]).sum(-1)
        keys_BNHD = keys_BNHD - (step_BH[:, None] * along_BNH)[..., None] * w_BHD[:, None]
        keys_BNHD = torch.cat((keys_BNHD, k_BTHD[:, t : t + 1]), dim=1)
        log_decay_BNH = log_decay_BNH + log_fgate_BTH[:, t : t + 1]
        log_decay_BNH = torch.cat((log_decay_BNH, torch.zeros_like(log_fgate_BTH[:, t : t + 1])), dim=1)
        score_BNH = scale * (q_BTHD[:, t : t + 1] * keys_BNHD).sum(-1) + log_decay_BNH
        outs.append((score_BNH.softmax(1)[..., None] * v_BTHV[:, : t + 1]).sum(1))
    return torch.stack(outs, dim=1)


def path_attention_flops_per_token(heads: int, head_dim: int, seq_len: int) -> float:
    """Forward FLOPs per token in chunks of c = 64.

    Per head, in the chunk: products of w with w, queries and keys, of queries with keys and of M with W, queries and
    keys on their way through the chunk, and weighted values, eight of `2cD`; two with M of `2c²`, and M itself, `c²`.
    For a chunk before it: scores and weighted values, `2cD` each, and where one more comes before that, past its H,
    `4cD`.
    """
    chunks = -(-seq_len // CHUNK_LENGTH)
    length = min(CHUNK_LENGTH, 1 << (seq_len - 1).bit_length())
    own = 8 * 2 * length * head_dim + 5 * length**2
    pairs, further = (chunks - 1) / 2, (chunks - 1) * (chunks - 2) / (2 * chunks)
    return heads * (own + 4 * length * head_dim * (pairs + further))


def _in_chunks(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHV: Tensor,
    w_BTHD: Tensor,
    beta_BTH: Tensor,
    log_fgate_BTH: Tensor,
    past: Past | None,
    returns_past: bool,
    scale: float,
) -> tuple[Tensor, Past | None]:
    dtype = torch.promote_types(q_BTHD.dtype, torch.float32)
    length = q_BTHD.shape[1]
    chunk_length = min(CHUNK_LENGTH, 1 << (length - 1).bit_length())

    def into_chunks(x: Tensor) -> Tensor:
        """`(B, T, H, …)` to `(B, H, n, c, …)`; tokens of 0 at the end change nothing."""
        missing = -length % chunk_length
        x = F.pad(x.to(dtype), (0, 0) * (x.ndim - 2) + (0, missing))
        return x.transpose(1, 2).unflatten(2, (-1, chunk_length))

    q, k, v, w, beta, log_fgate = map(into_chunks, (q_BTHD, k_BTHD, v_BTHV, w_BTHD, beta_BTH, log_fgate_BTH))
    q = scale * q
    wT = w.transpose(-1, -2)
    system = (beta[..., None] * (w @ wT)).tril(-1)
    M = torch.linalg.solve_triangular(system, torch.diag_embed(beta), upper=False, unitriangular=True)
    Mw, q_on_w = M @ w, (q @ wT).tril()
    M_on_k = M @ (w @ k.transpose(-1, -2)).tril(-1)
    before, after, between = _log_decays(log_fgate)
    scores = [q @ k.transpose(-1, -2) - q_on_w @ M_on_k + between]
    q, k = q - q_on_w @ Mw, k - M_on_k.transpose(-1, -2) @ w

    chunks = q.shape[2]
    gap = torch.zeros_like(before[..., :1])  # sums of log gates of the chunks that queries have gone past, (B, H, n, 1)
    for apart in range(1, chunks):
        # Queries of chunk I stand before chunk I - apart + 1 and look at the keys of chunk I - apart.
        near, far = slice(apart, None), slice(0, chunks - apart)
        bias = (before + gap)[:, :, near, :, None] + after[:, :, far, None]
        scores.append(q[:, :, near] @ k[:, :, far].transpose(-1, -2) + bias.clamp(min=_HIDDEN))
        # States of chunk `apart` are at the start, and continue only for the past.
        moved = apart if past is not None else apart + 1
        if moved < chunks:
            gone = q[:, :, moved:] @ wT[:, :, moved - apart : chunks - apart] @ Mw[:, :, moved - apart : chunks - apart]
            q = torch.cat((q[:, :, :moved], q[:, :, moved:] - gone), dim=2)
        gap = torch.cat((gap[:, :, :apart], gap[:, :, near] + before[:, :, far, -1:]), dim=2)
    values = [v[:, :, : chunks - apart] for apart in range(chunks)]
    if past is not None:
        past_keys, past_values, past_log_decay = (x.to(dtype).transpose(1, 2)[:, :, None] for x in past)
        bias = (before + gap)[..., None] + past_log_decay[..., None, :]
        scores.append(q @ past_keys.transpose(-1, -2) + bias.clamp(min=_HIDDEN))
        values.append(past_values)
    out = _weighted(scores, values)
    out_BTHV = out.flatten(2, 3).transpose(1, 2)[:, :length].to(v_BTHV.dtype)
    if not returns_past:
        return out_BTHV, None

    for chunk in range(1, chunks):  # keys of all chunks before this one go past it
        gone = k[:, :, :chunk] @ Mw[:, :, chunk, None].transpose(-1, -2) @ w[:, :, chunk, None]
        k = torch.cat((k[:, :, :chunk] - gone, k[:, :, chunk:]), dim=2)
    total = before[..., -1]
    later = total.flip(-1).cumsum(-1).flip(-1)[..., 1:]
    log_decay = after + F.pad(later, (0, 1))[..., None]
    keys_BTHD, log_decay_BTH = (x.flatten(2, 3).transpose(1, 2)[:, :length] for x in (k, log_decay))
    v_wide_BTHV = v_BTHV
    if past is not None:
        keys = past.keys.to(dtype).transpose(1, 2)
        for chunk in range(chunks):
            keys = keys - keys @ Mw[:, :, chunk].transpose(-1, -2) @ w[:, :, chunk]
        keys_BTHD = torch.cat((keys.transpose(1, 2), keys_BTHD), dim=1)
        v_wide_BTHV = torch.cat((past.values, v_BTHV), dim=1)
        log_decay_BTH = torch.cat((past.log_decay + total.sum(-1)[:, None], log_decay_BTH), dim=1)
    return out_BTHV, Past(keys_BTHD, v_wide_BTHV, log_decay_BTH)


# `_in_chunks` for torch.compile, once `_keep_out_of_graphs` has made it.
_opaque: dict[str, Callable[..., tuple[Tensor, Past | None]]] = {}


def _keep_out_of_graphs() -> bool:
    """Lets torch.compile leave long sequences alone: unrolled, their chunks take minutes to compile."""
    _opaque.setdefault("in_chunks", torch.compiler.disable(_in_chunks))
    return True


# the mark that `torch.compiler.assume_constant_result` sets, without importing the compiler.
_keep_out_of_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _log_decays(log_fgate_BHnc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of log gates within chunks: up to and including i, after j, and from after j up to i, hidden above."""
    length = log_fgate_BHnc.shape[-1]
    is_after = torch.ones(length, length, dtype=torch.bool, device=log_fgate_BHnc.device).triu(1)
    # Row j holds the log gates after j only, so that its running sum never contains what must cancel.
    between_ji = log_fgate_BHnc[..., None, :].masked_fill(~is_after, 0).cumsum(-1)
    after = between_ji[..., -1]
    between_ji = between_ji.masked_fill(is_after.transpose(0, 1), _HIDDEN).clamp(min=_HIDDEN)
    return log_fgate_BHnc.cumsum(-1), after, between_ji.transpose(-1, -2)


def _weighted(scores: list[Tensor], values: list[Tensor]) -> Tensor:
    """One softmax over all scores of a query, and the sum of the values with its weights, `(B, H, n, c, V)`.

    Args:
        scores: `(B, H, up to n, c, keys)` each, of the last chunks where they are fewer than n; the first of all.
        values: of the same chunks of keys, `(B, H, up to n or 1, keys, V)`.
    """
    chunks = scores[0].shape[2]

    def of_all_chunks(x: Tensor, value: float) -> Tensor:
        """Before the last chunks come those that have nothing there."""
        return F.pad(x, (0, 0) * (x.ndim - 3) + (chunks - x.shape[2], 0), value=value)

    log_sums = torch.stack([of_all_chunks(x.logsumexp(-1), _HIDDEN) for x in scores])
    log_sum = log_sums.logsumexp(0)
    out = (scores[0] - log_sum[..., None]).exp() @ values[0]
    for x, value in zip(scores[1:], values[1:], strict=True):
        weights = (x - log_sum[:, :, chunks - x.shape[2] :, :, None]).exp()
        out = out + of_all_chunks(weights @ value, 0.0)
    return out
