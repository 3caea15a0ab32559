"""The recurrences on NVIDIA and AMD GPUs through the Triton kernels of flash-linear-attention (FLA, `fla.ops`).

FLA is imported when an op first runs on a GPU, never before; `fla-core`, which holds the kernels without models, is
enough. Written for FLA 0.6. Gates are passed in float32. The kernels sum log decays from the start of a chunk of 64
tokens. So after a decay of e^-10,000 the others of its chunk keep three digits, as many as the 16-bit inputs have.
gated_delta_rule adds products of states and their gradients in 16 bits: its gradient of a decay is good to 3 % in
bfloat16 and to 0.3 % in float16.
Axes: `forgetting_transformer/ops/__init__.py`.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.ops import backends
from forgetting_transformer.ops.recurrence import chunked, fla_on_hopper
from forgetting_transformer.ops.recurrence.reference import Gates

# op: module and function of FLA.
_KERNELS = {
    "simple_gla": ("fla.ops.simple_gla", "chunk_simple_gla"),
    "gla": ("fla.ops.gla", "chunk_gla"),
    "delta_rule": ("fla.ops.delta_rule", "chunk_delta_rule"),
    "gated_delta_rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "kda": ("fla.ops.kda", "chunk_kda"),
}
# The functions themselves, once `_is_installed` has imported them.
_loaded: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {}
# The kernels of the delta rules walk channels in blocks of 64, read out of bounds where blocks are not full, and hold
# all key channels of a state at once: 256 of them, with the launch configurations chosen here, take more shared memory
# than there is. So keys and values get channels of 0 until blocks are full.
_DELTA_BLOCK, _MAX_DELTA_KEY_DIM = 64, 128
_DELTA_RULES = ("delta_rule", "gated_delta_rule", "kda")
# On Hopper GPUs these take few value channels at a time.
_IN_PARTS = ("gated_delta_rule", "kda")


def serves(op: str, key_dim: int, value_dim: int, dtype: torch.dtype, device_index: int) -> bool:
    """Whether FLA has a kernel for such inputs that gives the right numbers. Warns, once, if FLA is what is missing.

    Only 16-bit inputs: products of float32 inputs would be TF32 (three digits), and the delta rules refuse them.
    Only head dimensions that are multiples of 16, the shape of a tensor core's tile; for the delta rules up to 128 key
    channels. On Hopper GPUs simple_gla, gated_delta_rule and kda serve the head dimensions that were right there; of
    values of the last two these are parts. Plain values, so that compiled graphs can take the answer as a constant.
    """
    if dtype not in (torch.float16, torch.bfloat16) or key_dim % 16 or value_dim % 16:
        return False
    if op in _DELTA_RULES:
        key_dim, value_dim = _whole_blocks(key_dim), _whole_blocks(value_dim)
        if key_dim > _MAX_DELTA_KEY_DIM:
            return False
    if not backends.is_usable(op, backends.FLA) or not _is_installed():
        return False
    if not fla_on_hopper.is_hopper(device_index):
        return True
    fla_on_hopper.choose_configurations()
    if op not in ("simple_gla", *_IN_PARTS):
        return True
    parts = _value_parts(op, key_dim, value_dim, device_index)
    return all(
        fla_on_hopper.serves_gated(op, key_dim, part, dtype, device_index) for part in sorted({*parts}, reverse=True)
    )


def _whole_blocks(channels: int) -> int:
    return -(-channels // _DELTA_BLOCK) * _DELTA_BLOCK


def _value_parts(op: str, key_dim: int, value_dim: int, device_index: int) -> tuple[int, ...]:
    """Value channels of each call of a kernel, all of them in one unless the kernel must be kept from such heads.

    Value channels do not act on each other, so that a state of many is several states of few.

    Args:
        key_dim, value_dim: whole blocks.
    """
    if op not in _IN_PARTS or not fla_on_hopper.is_hopper(device_index):
        return (value_dim,)
    widest = fla_on_hopper.widest_gated_values(key_dim)
    return tuple(min(widest, value_dim - start) for start in range(0, value_dim, widest))


_value_parts._dynamo_marked_constant = True  # type: ignore[attr-defined]


# the mark that `torch.compiler.assume_constant_result` sets, without importing the compiler.
serves._dynamo_marked_constant = True  # type: ignore[attr-defined]


def linear_recurrence(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, gates: Gates, scale: float, initial_state_BHKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in `reference.linear_recurrence`. If Triton fails: a warning, and `chunked`."""
    call = _call_in_whole_blocks if gates.op in _DELTA_RULES else _call
    try:
        return call(q_BTHK, k_BTHK, v_BTHV, gates, scale, initial_state_BHKV)
    except Exception as error:  # what a compiler raises is not one class
        backends.rule_out_compiling(gates.op, backends.FLA, error)
        return chunked.linear_recurrence(q_BTHK, k_BTHK, v_BTHV, gates, scale, initial_state_BHKV)


def _call_in_whole_blocks(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, gates: Gates, scale: float, initial_state_BHKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A delta rule whose heads have as many channels as the kernels want."""
    key_dim, value_dim = q_BTHK.shape[-1], v_BTHV.shape[-1]
    missing_keys, missing_values = _whole_blocks(key_dim) - key_dim, _whole_blocks(value_dim) - value_dim
    if missing_keys:
        q_BTHK, k_BTHK = F.pad(q_BTHK, (0, missing_keys)), F.pad(k_BTHK, (0, missing_keys))
    if missing_values:
        v_BTHV = F.pad(v_BTHV, (0, missing_values))
    if missing_keys and gates.op == "kda" and gates.log_decay is not None:
        gates = gates._replace(log_decay=F.pad(gates.log_decay, (0, missing_keys)))
    state = initial_state_BHKV
    if state is not None and (missing_keys or missing_values):
        state = F.pad(state, (0, missing_values, 0, missing_keys))
    parts = _value_parts(gates.op, q_BTHK.shape[-1], v_BTHV.shape[-1], q_BTHK.device.index)
    values = v_BTHV.split(parts, dim=-1)
    states = [None] * len(parts) if state is None else state.split(parts, dim=-1)
    pairs = [_call(q_BTHK, k_BTHK, v, gates, scale, s) for v, s in zip(values, states, strict=True)]
    outs, finals = zip(*pairs, strict=True)
    out_BTHV, state_BHKV = (x[0] if len(parts) == 1 else torch.cat(x, dim=-1) for x in (outs, finals))
    return out_BTHV[..., :value_dim], state_BHKV[..., :key_dim, :value_dim]


def _call(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, gates: Gates, scale: float, initial_state_BHKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One call of a kernel of FLA."""
    named = {"beta": gates.beta, "g": gates.log_decay}
    # The final state is always computed: it costs nothing beside the output, and one variant of a kernel is tuned, not
    # two. scale must be a float: Triton compiles an integer 1 into the kernel, which goes wrong on Hopper.
    out_BTHV, state_BHKV = _loaded[gates.op](
        q=q_BTHK,
        k=k_BTHK,
        v=v_BTHV,
        scale=scale,
        initial_state=None if initial_state_BHKV is None else initial_state_BHKV.float(),
        output_final_state=True,
        **{name: gate.float() for name, gate in named.items() if gate is not None},
    )
    return out_BTHV.to(v_BTHV.dtype), state_BHKV


@functools.cache
def _is_installed() -> bool:
    """Import FLA; False where that fails, with a warning for each op it would have served."""
    _loaded.update(functions := backends.load_fla("recurrences", _KERNELS))
    return bool(functions)
