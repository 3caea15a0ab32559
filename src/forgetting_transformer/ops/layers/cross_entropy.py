"""Cross-entropy of a linear output layer, per token, without holding all logits.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from forgetting_transformer.ops import compiling

# Label of positions that do not count.
_IGNORED = -100
# Logits per slice: 512 MiB in float32, about 2,700 tokens of a 50,257-word vocabulary.
_MAX_LOGITS = 2**27
# The same where they are kept, compiled: 21,000 tokens of that vocabulary, whose places in memory 32 bits can count.
_MAX_KEPT_LOGITS = 2**30
# The part of a GPU's memory that all logits together may take to be kept for the backward pass.
_KEPT_PART = 0.05


def linear_cross_entropy(hidden_BTE: Tensor, weight_VE: Tensor, labels_BT: Tensor, *, compiled: bool = False) -> Tensor:
    """Return `-log softmax(hidden @ weightᵀ)[label]` for every token.

    The tokens are walked in slices. With more than one slice the logits are computed again in the backward pass (one
    more output-layer product), except on a GPU of whose memory all of them take a small part: there they are kept.
    Compiled, slices that are kept are longer, and their gradient takes their place in memory: every slice rounds the
    weight again, and reads and writes the weight's gradient.

    Args:
        hidden_BTE: last hidden states.
        weight_VE: output embedding.
        labels_BT: the token to predict at each position, int64, not shifted here. -100 gives loss 0 and no gradient.
        compiled: fuse casts, softmax and loss with torch.compile. The first call of a shape takes seconds.

    Returns:
        Loss in nats `(B, T)`, float32 (float64 for float64 inputs). Under autocast the product runs in the autocast
        dtype, softmax and loss in float32.

    Raises:
        ValueError: shapes do not agree, or a label is out of range. The range is checked on the CPU only, and not under
            torch.compile: a GPU would stall, a compiled graph break.
    """
    vocab_size = weight_VE.shape[0]
    if labels_BT.shape != hidden_BTE.shape[:-1]:
        raise ValueError(
            f"labels have shape {tuple(labels_BT.shape)}; they must be {tuple(hidden_BTE.shape[:-1])}, one per token"
        )
    if labels_BT.device.type == "cpu" and not torch.compiler.is_compiling():
        bad = (labels_BT != _IGNORED) & ((labels_BT < 0) | (labels_BT >= vocab_size))
        if bad.any():
            raise ValueError(
                f"label {labels_BT[bad][0].item()} is out of range; labels must lie in [0, {vocab_size}), or be "
                f"{_IGNORED} to be ignored"
            )

    slice_loss = _compiled_slice_loss() if compiled else _slice_loss
    hidden_AE, labels_A = hidden_BTE.flatten(0, -2), labels_BT.flatten()
    keeps = _keeps_logits(len(labels_A) * vocab_size * _kept_bytes(hidden_AE, compiled), labels_A.device)
    max_logits = _MAX_KEPT_LOGITS if keeps and compiled else _MAX_LOGITS
    num_slices = _count_slices(len(labels_A), max_logits // vocab_size)
    if num_slices == 1:
        loss_A = slice_loss(hidden_AE, weight_VE, labels_A)
    else:
        run = slice_loss
        if not keeps:
            run = functools.partial(checkpoint, slice_loss, use_reentrant=False, preserve_rng_state=False)
        slices = zip(hidden_AE.chunk(num_slices), labels_A.chunk(num_slices), strict=True)
        loss_A = torch.cat([run(hidden, weight_VE, labels) for hidden, labels in slices])
    # A copy, not a view: FSDP2 hangs its backward hooks on a module's outputs, and warns if those are views.
    return loss_A.view(labels_BT.shape).clone()


def _count_slices(length: int, max_slice: int) -> int:
    """The fewest slices that are short enough; a few more if that makes all of one length, which is compiled once."""
    fewest = -(-length // max(1, max_slice))
    return next((n for n in range(fewest, 2 * fewest) if length % n == 0), fewest) if length else 1


def _kept_bytes(hidden_AE: Tensor, compiled: bool) -> int:
    """Bytes that autograd keeps of a logit: compiled itself, else the logarithm of its softmax in float32."""
    if not compiled:
        return 4
    kind = hidden_AE.device.type
    return torch.get_autocast_dtype(kind).itemsize if torch.is_autocast_enabled(kind) else hidden_AE.element_size()


def _keeps_logits(size: int, device: torch.device) -> bool:
    """Whether so many bytes may stay in memory until the backward pass."""
    if device.type != "cuda" or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return size <= _KEPT_PART * torch.cuda.get_device_properties(device).total_memory


def _vocab_multiple(device: torch.device) -> int:
    """The vocabulary is padded to a multiple of this.

    Tensor cores read blocks: where rows are not multiples of 16 bytes, as logits of GPT-2's 50,257 words, products are
    several times slower.
    """
    return 64 if device.type == "cuda" else 1


def _pad_vocabulary(weight_VE: Tensor) -> tuple[Tensor, Tensor | None]:
    """The weight with rows for words that do not exist, if the device wants them, and biases that rule those out."""
    missing = -weight_VE.shape[0] % _vocab_multiple(weight_VE.device)
    if missing == 0:
        return weight_VE, None
    bias_V = F.pad(weight_VE.new_zeros(weight_VE.shape[0]), (0, missing), value=float("-inf"))
    return F.pad(weight_VE, (0, 0, 0, missing)), bias_V


def _slice_loss(hidden_AE: Tensor, weight_VE: Tensor, labels_A: Tensor) -> Tensor:
    logits_AV = F.linear(hidden_AE, *_pad_vocabulary(weight_VE))
    logits_AV = logits_AV.to(torch.promote_types(logits_AV.dtype, torch.float32))
    return F.cross_entropy(logits_AV, labels_A, reduction="none", ignore_index=_IGNORED)


@functools.cache
def _compiled_slice_loss() -> Callable[..., Tensor]:
    return compiling.compiled(_slice_loss)
