"""PaTH attention on GPUs through the Triton kernels of flash-linear-attention (FLA, `fla.ops.path_attn`).

FLA is imported when the op first runs on a GPU, never before. Written for FLA 0.6. Three things differ from
`path_attention.py`:

- The kernels multiply the sum of log gates by `scale` together with `q·k`, which FoX does not. So they get log gates
  divided by it.
- They take sums of log gates from the start of the sequence, in float32: no gate may be -inf, and where the sum reaches
  -10,000 a bias has an error of 1e-3.
- Their backward pass adds gradients of keys, w and gates by atomics. So two calls differ in the last bits.

Memory for the backward pass is O(T) but for T/512 times the queries.

Only what was seen to be right on a GPU is served: 64 channels per head in bfloat16. On an H100 with Triton 3.6.0 heads
of 32 channels in float16 ended in an illegal memory access, which no self-test survives; in Triton's interpreter
nothing is read out of bounds.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from forgetting_transformer.ops import backends
from forgetting_transformer.ops.recurrence import fla_on_hopper

# Channels of a head, of keys and of values.
_HEAD_DIM = 64
_KERNEL = {"path_attention": ("fla.ops.path_attn", "parallel_path_attn")}
# The function itself, once `_is_installed` has imported it.
_loaded: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {}


def supports(q_BTHD: Tensor, v_BTHV: Tensor) -> bool:
    """Whether FLA serves these inputs. Warns, once, if FLA is what is missing."""
    return q_BTHD.is_cuda and serves(q_BTHD.shape[-1], v_BTHV.shape[-1], q_BTHD.dtype, q_BTHD.device.index)


def serves(key_dim: int, value_dim: int, dtype: torch.dtype, device_index: int) -> bool:
    """`supports` of plain values, so that compiled graphs can take the answer as a constant."""
    fits = dtype == torch.bfloat16 and key_dim == value_dim == _HEAD_DIM
    if not fits or not backends.is_usable("path_attention", backends.FLA) or not _is_installed():
        return False
    if fla_on_hopper.is_hopper(device_index):
        fla_on_hopper.choose_configurations()
    return True


# the mark that `torch.compiler.assume_constant_result` sets, without importing the compiler.
serves._dynamo_marked_constant = True  # type: ignore[attr-defined]


def path_attention(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHV: Tensor,
    w_BTHD: Tensor,
    beta_BTH: Tensor,
    log_fgate_BTH: Tensor,
    scale: float,
) -> Tensor | None:
    """The output `(B, T, H, V)` in v's dtype; arguments as of `path_attention.path_attention`, gates finite.

    None, after a warning, where Triton cannot compile the kernels.
    """
    gates = (w_BTHD.float(), beta_BTH.float(), log_fgate_BTH.float() / scale)
    try:
        with torch.autocast(q_BTHD.device.type, enabled=False):
            return _loaded["path_attention"](q_BTHD, k_BTHD, v_BTHV, *gates, scale)[0]
    except Exception as error:  # what a compiler raises is not one class
        backends.rule_out_compiling("path_attention", backends.FLA, error)
        return None


@functools.cache
def _is_installed() -> bool:
    """Import FLA; False where that fails, with a warning."""
    _loaded.update(functions := backends.load_fla("path_attention", _KERNEL))
    return bool(functions)
