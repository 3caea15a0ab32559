"""Checks of what a corpus gives: the shape of each batch, and the tokens of the first."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forgetting_transformer.data.corpus import Batch
from forgetting_transformer.data.errors import DataError


def check_batch(batch: Any, corpus: str, rows: int | None, length: int, weighted: bool = False) -> None:
    """Refuses what would be trained on in silence, or fail far from its cause. Looks at no token.

    Args:
        batch: what a loader gave, which may be anything. corpus: whose it is, for the message.
        rows: sequences that it must have; None for any number from 1 on.
        length: T. weighted: whether it must have `weight`.

    Raises:
        DataError: it is no `Batch` of this shape.
    """
    if not isinstance(batch, Mapping):
        raise DataError(f"{corpus} gave a batch of type {type(batch).__name__}; it must be a dictionary of tensors")
    wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]]  # after the axis of sequences
    wanted = {"input_ids": (torch.int64, (length,)), "labels": (torch.int64, (length,))}
    wanted |= {"weight": (torch.float64, ())} if weighted else {}
    wanted |= {"cu_seqlens": (torch.int32, (length + 1,))} if "cu_seqlens" in batch else {}
    for name, (dtype, rest) in wanted.items():
        tensor = batch.get(name)
        if tensor is None:
            raise DataError(f"{corpus} gave a batch without {name!r}; it has {', '.join(map(str, batch)) or 'nothing'}")
        if not isinstance(tensor, Tensor):
            raise DataError(f"{corpus} gave a batch whose {name!r} is a {type(tensor).__name__}, not a tensor")
        rows = rows or max(1, len(tensor) if tensor.dim() else 1)
        shape = (rows, *rest)
        if tensor.shape != shape or tensor.dtype != dtype:
            raise DataError(
                f"{corpus} gave a batch whose {name!r} is {_named(tensor.shape, tensor.dtype)}; it must be "
                f"{_named(shape, dtype)} here"
            )


def check_tokens(batch: Batch, corpus: str, vocab_size: int) -> None:
    """Looks at every token, so it is for the first batch.

    Raises:
        DataError: an id is not below vocab_size, or labels are not the tokens that come next.
    """
    for name in ("input_ids", "labels"):
        least, most = (int(end) for end in batch[name].aminmax())
        if most >= vocab_size or (least < 0 and name == "input_ids"):
            wrong = most if most >= vocab_size else least
            raise DataError(
                f"{corpus} gave a batch with the token id {wrong} in {name!r}, and datamodule.vocab_size={vocab_size}: "
                "ids are from 0 on, and below it"
            )
    input_BT = batch["input_ids"]
    if torch.equal(input_BT, batch["labels"]) and (input_BT != input_BT[:, :1]).any():
        raise DataError(
            f"{corpus} gave a batch whose 'labels' are its 'input_ids'; labels are the tokens that come next "
            "(data.corpus.shifted makes both)"
        )


def _named(shape: Sequence[int], dtype: torch.dtype) -> str:
    """ "(4, 64) int64" """
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"
