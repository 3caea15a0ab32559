"""The recurrences in chunks of 64 tokens, on any device: matrix products within a chunk, a step per chunk between them.

Three decays are products within a chunk: `p_i` from its start up to and including token i, `s_j` from after token j to
its end, and `d_ij` from after j up to and including i. A chunk of linear attention is

    out_i = scale · (p_i q_i)ᵀ S + scale · Σ_{j ≤ i} d_ij (q_i·k_j) v_j       S: the state before the chunk
    S'    = p_last S + Σ_j (s_j k_j) v_jᵀ

p, s and d are exponentials of sums of log decays, never quotients of cumulative products: every exponent is ≤ 0, so
nothing overflows, and every sum starts next to the tokens it concerns, so nothing cancels. Log decays of -1e4 or
-inf are exact.

Memory: a segment of 16 chunks is computed at once; with more than one segment each is computed again in the backward
pass, and only its inputs and the state before it are kept.

Axes: `forgetting_transformer/ops/__init__.py`. i, j are pairs of tokens of a chunk.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from forgetting_transformer.ops.recurrence.reference import Gates, start_state

CHUNK_LENGTH = 64
_SEGMENT_LENGTH = 1024


def linear_recurrence(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, gates: Gates, scale: float, initial_state_BHKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in `reference.linear_recurrence`."""
    segment: Callable[..., tuple[Tensor, Tensor]]
    given: tuple[Tensor, ...] = (gates.filled_log_decay(),)
    if gates.beta is not None:
        segment, given = _delta_rule_segment, (gates.beta, *given)
    else:
        segment = _gla_segment if given[0].ndim == 4 else _simple_gla_segment
    state = start_state(q_BTHK, v_BTHV, initial_state_BHKV)
    return _over_segments(functools.partial(segment, scale=scale), state, q_BTHK, k_BTHK, v_BTHV, *given)


def simple_gla_flops_per_token(heads: int, key_dim: int, value_dim: int) -> int:
    """Forward FLOPs per token with chunks of c = 64.

    Per head: scores and their sum over whole c×c squares, `2c(K + V)`; reading and updating the state, `2KV` each.
    """
    return heads * (2 * CHUNK_LENGTH * (key_dim + value_dim) + 4 * key_dim * value_dim)


def gla_flops_per_token(heads: int, key_dim: int, value_dim: int) -> int:
    """Forward FLOPs per token with chunks of c = 64.

    Per head: a token meets (c - 1)/2 earlier ones of its chunk, `(c - 1)(K + V)`, and itself, `2(K + V)`; reading and
    updating the state, `2KV` each. Exponentials are not counted.
    """
    return heads * ((CHUNK_LENGTH + 1) * (key_dim + value_dim) + 4 * key_dim * value_dim)


def delta_rule_flops_per_token(heads: int, key_dim: int, value_dim: int) -> int:
    """Forward FLOPs per token of the delta rule, without decay or with one per head, with chunks of c = 64.

    Per head: products of keys with keys and with queries, `2cK` each; the triangular system with K + V right sides,
    `c(K + V)`; the sum of values, `2cV`; three products with the state, `2KV` each (what it holds, reading, updating).
    """
    return heads * (CHUNK_LENGTH * (5 * key_dim + 3 * value_dim) + 6 * key_dim * value_dim)


def kda_flops_per_token(heads: int, key_dim: int, value_dim: int) -> int:
    """Forward FLOPs per token of the delta rule with a decay per key channel with chunks of c = 64.

    As `delta_rule_flops_per_token`, but a token meets (c - 1)/2 earlier ones of its chunk alone: keys with keys
    `(c - 1) K`, with queries `(c - 1) K`, its own key with its query `2K`. Exponentials are not counted.
    """
    return heads * (3 * CHUNK_LENGTH * (key_dim + value_dim) + 6 * key_dim * value_dim)


def _over_segments(
    segment: Callable[..., tuple[Tensor, Tensor]], state: Tensor, *sequences: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply `out, state = segment(state, *slices)` along axis 1 of the sequences, and join the outputs."""
    if sequences[0].shape[1] <= _SEGMENT_LENGTH:
        return segment(state, *sequences)
    if torch.compiler.is_compiling() and _keep_out_of_graphs():
        return _opaque["walk"](segment, state, *sequences)
    return _walk(segment, state, *sequences)


def _walk(segment: Callable[..., tuple[Tensor, Tensor]], state: Tensor, *sequences: Tensor) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled():
        segment = functools.partial(checkpoint, segment, use_reentrant=False, preserve_rng_state=False)
    outs = []
    for slices in zip(*(x.split(_SEGMENT_LENGTH, dim=1) for x in sequences), strict=True):
        out, state = segment(state, *slices)
        outs.append(out)
    return torch.cat(outs, dim=1), state


# `_walk` for torch.compile, once `_keep_out_of_graphs` has made it.
_opaque: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {}


def _keep_out_of_graphs() -> bool:
    """Lets torch.compile leave `_walk` alone: unrolled, 16 segments are thousands of nodes, minutes to compile."""
    _opaque.setdefault("walk", torch.compiler.disable(_walk))
    return True


# the mark that `torch.compiler.assume_constant_result` sets, without importing the compiler.
_keep_out_of_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _simple_gla_segment(
    state_BHKV: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, log_decay_BTH: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """One decay per head and token (Dao and Gu 2024, "state space duality", section 6)."""
    q, k, v, log_decay = _into_chunks(state_BHKV.dtype, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH)
    before, after, between = _decays(log_decay)
    summaries = (k * after[..., None]).transpose(-1, -2) @ v
    states, state_BHKV = _carry(state_BHKV, before[..., -1, None, None], summaries)
    out = (q * before[..., None]) @ states + (between * (q @ k.transpose(-1, -2))) @ v
    return _from_chunks(scale * out, v_BTHV), state_BHKV


def _gla_segment(
    state_BHKV: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, log_decay_BTHK: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """One decay per key channel and token (Yang et al. 2024, "Gated linear attention").

    The decay d_ij depends on the key channel, so pairs are taken in the groups of `_decays_by_channel`.
    """
    q, k, v, log_decay = _into_chunks(state_BHKV.dtype, q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK)
    between, before, after = _decays_by_channel(log_decay)
    out = (q * k).sum(-1, keepdim=True) * v
    for before_right, after_left in between:
        (_, q_right), (k_left, _), (v_left, _), (out_left, out_right) = (
            _left_and_right(x, before_right.shape[-2]) for x in (q, k, v, out)
        )
        scores = (q_right * before_right) @ (k_left * after_left).transpose(-1, -2)
        out = _join(out_left, out_right + scores @ v_left)
    summaries = (k * after).transpose(-1, -2) @ v
    states, state_BHKV = _carry(state_BHKV, before[..., -1, :, None], summaries)
    return _from_chunks(scale * (out + (q * before) @ states), v_BTHV), state_BHKV


def _delta_rule_segment(
    state_BHKV: Tensor,
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The delta rule (Yang et al. 2024, "Parallelizing linear transformers"; with decay 2025, "Gated delta networks").

    With a decay per key channel, `(B, T, H, K)` instead of `(B, T, H)`, it is Kimi Delta Attention (Kimi Team 2025).

    Within a chunk it is linear attention of k with values `u_i = β_i (v_i - what S_{i-1} holds for k_i)`. What S_{i-1}
    holds came from the state before the chunk and from earlier u's, so the u's solve a unit triangular system:

        u_i + Σ_{j < i} β_i d_ij (k_i·k_j) u_j = β_i v_i - (β_i p_i k_i)ᵀ S

    It is solved for both terms on the right at once, before S is known: `u = u_v - w S` (WY representation).
    """
    q, k, v, beta, log_decay = _into_chunks(state_BHKV.dtype, q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay)
    beta = beta[..., None]
    if log_decay.ndim == k.ndim:
        pairs, before, after = _decays_by_channel(log_decay)
        scores, of_keys = _scores_by_channel(q, k, pairs)
        system = (beta * of_keys).tril(-1)
    else:
        before, after, between = _decays(log_decay)
        before, after, k_transposed = before[..., None], after[..., None], k.transpose(-1, -2)
        scores = between * (q @ k_transposed)
        system = (beta * between * (k @ k_transposed)).tril(-1)
    right_sides = torch.cat((beta * v, beta * before * k), dim=-1)
    solved = torch.linalg.solve_triangular(system, right_sides, upper=False, unitriangular=True)
    u_v, w = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    k_after = (k * after).transpose(-1, -2)
    decay = before[..., -1, :, None]

    states, us = [], []
    for u_v_n, w_n, k_after_n, decay_n in zip(*(x.unbind(2) for x in (u_v, w, k_after, decay)), strict=True):
        states.append(state_BHKV)
        us.append(u_v_n - w_n @ state_BHKV)
        state_BHKV = decay_n * state_BHKV + k_after_n @ us[-1]
    u = torch.stack(us, dim=2)
    out = (q * before) @ torch.stack(states, dim=2) + scores @ u
    return _from_chunks(scale * out, v_BTHV), state_BHKV


def _decays(log_decay_BHnc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """p, s and d of the module's docstring: `(B, H, n, c)` twice and `(B, H, n, c, c)`, d_ij = 0 for i < j."""
    length = log_decay_BHnc.shape[-1]
    # Row j holds the log decays after j only, so that its running sum never contains what must cancel.
    is_after = torch.ones(length, length, dtype=torch.bool, device=log_decay_BHnc.device).triu(1)
    log_between_ji = log_decay_BHnc[..., None, :].masked_fill(~is_after, 0).cumsum(-1)
    log_between_ji = log_between_ji.masked_fill(is_after.transpose(0, 1), -torch.inf)
    between_ji = log_between_ji.exp()
    return log_decay_BHnc.cumsum(-1).exp(), between_ji[..., -1], between_ji.transpose(-1, -2)


def _decays_by_channel(log_decay_BHncK: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Factors of d, then p and s of the module's docstring, `(B, H, n, c, K)`, for decays that differ by channel.

    Take two neighbouring blocks of tokens. For i in the right and j in the left one, `d_ij = p_i s_j` with p counted
    from the start of the right block and s to the end of the left one. Blocks of 1, 2, 4, ... c/2 tokens cover every
    pair. For each of these sizes there are p of the right blocks and s of the left ones, `(B, H, n, blocks, size, K)`.
    """
    # Sums of log decays within blocks of `size` tokens: from the start of the block to i, and from after j to its end.
    log_before, log_after = log_decay_BHncK, torch.zeros_like(log_decay_BHncK)
    between = []
    size = 1
    while size < log_decay_BHncK.shape[-2]:
        before_left, before_right = _left_and_right(log_before, size)
        after_left, after_right = _left_and_right(log_after, size)
        between.append((before_right.exp(), after_left.exp()))
        log_before = _join(before_left, before_left[..., -1:, :] + before_right)
        log_after = _join(after_left + before_right[..., -1:, :], after_right)
        size *= 2
    return between, log_before.exp(), log_after.exp()


def _left_and_right(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Every other block of `size` rows, from the first and from the second on: `(..., c, D)` to `(..., m, size, D)`."""
    left, right = x.unflatten(-2, (-1, 2, size)).unbind(-3)
    return left, right


def _join(left: Tensor, right: Tensor) -> Tensor:
    """The inverse of `_left_and_right`."""
    return torch.stack((left, right), dim=-3).flatten(-4, -2)


def _scores_by_channel(q_BHncK: Tensor, k_BHncK: Tensor, between: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """`Σ_K d_ij q_i k_j` and `Σ_K d_ij k_i k_j` for j ≤ i, 0 above: `(B, H, n, c, c)` each.

    Args:
        q_BHncK, k_BHncK: queries and keys.
        between: result of `_decays_by_channel`.
    """
    both = torch.stack((q_BHncK, k_BHncK), dim=-2)  # (..., c, 2, K)
    # Blocks of `size` tokens: (..., blocks, size, 2, size).
    scores = (both * k_BHncK[..., None, :]).sum(-1)[..., None, :, None]
    for before_right, after_left in between:
        size = before_right.shape[-2]
        _, right = both.unflatten(-3, (-1, 2, size)).unbind(-4)
        k_left, _ = _left_and_right(k_BHncK, size)
        rows = (right * before_right[..., None, :]).flatten(-3, -2)
        block = (rows @ (k_left * after_left).transpose(-1, -2)).unflatten(-2, (size, 2))
        upper, lower = scores.unflatten(-4, (-1, 2)).unbind(-4)
        scores = torch.cat((F.pad(upper, (0, size)), torch.cat((block, lower), dim=-1)), dim=-3)
    of_queries, of_keys = scores.squeeze(-4).unbind(-2)
    return of_queries, of_keys


def _carry(state_BHKV: Tensor, decay_BHnK1: Tensor, summary_BHnKV: Tensor) -> tuple[Tensor, Tensor]:
    """The states before each chunk, `(B, H, n, K, V)`, and the one after the last: `S' = decay · S + summary`."""
    states = []
    for decay_BHK1, summary_BHKV in zip(decay_BHnK1.unbind(2), summary_BHnKV.unbind(2), strict=True):
        states.append(state_BHKV)
        state_BHKV = decay_BHK1 * state_BHKV + summary_BHKV
    return torch.stack(states, dim=2), state_BHKV


def _into_chunks(dtype: torch.dtype, *sequences: Tensor) -> list[Tensor]:
    """`(B, T, H, ...)` to `(B, H, n, c, ...)`, with zeros after the end, which change no state (log decay 0)."""
    length = sequences[0].shape[1]
    chunk_length = min(CHUNK_LENGTH, 1 << (length - 1).bit_length())
    return [
        _pad(x, chunk_length).to(dtype).transpose(1, 2).unflatten(2, (-1, chunk_length)).contiguous() for x in sequences
    ]


def _from_chunks(out_BHncV: Tensor, like_BTHV: Tensor) -> Tensor:
    return out_BHncV.flatten(2, 3).transpose(1, 2)[:, : like_BTHV.shape[1]].to(like_BTHV.dtype)


def _pad(x: Tensor, multiple: int) -> Tensor:
    """Append zeros to axis 1."""
    missing = -x.shape[1] % multiple
    return F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing)) if missing else x
