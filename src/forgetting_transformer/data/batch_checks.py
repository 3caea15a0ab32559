"""Checks of a corpus: the shape of each batch, and the tokens of the first."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forgetting_transformer.data.corpus import Batch
from forgetting_transformer.data.errors import DataError


def check_batch(batch: Any, corpus: str, rows: int | None, length: int, weighted: bool = False) -> None:
    """Refuses a wrong batch, which would be trained on in silence or fail far from its cause. Looks at no token.

    Args:
        batch: anything that a loader may give. corpus: its name, for the message.
        rows: sequences that it must have; None for any number from 1 on.
        length: T. weighted: whether it must have `weight`.

    Raises:
        DataError: it is no `Batch` of this shape.
    """
    given = batch if isinstance(batch, Mapping) else {}
    labels = given.get("labels")
    rows = rows or (len(labels) if isinstance(labels, Tensor) and labels.dim() else 0) or 1
    wanted = {"input_ids": f"({rows}, {length}) int64", "labels": f"({rows}, {length}) int64"}
    wanted |= {"weight": f"({rows},) float64"} if weighted else {}
    wanted |= {"cu_seqlens": f"({rows}, {length + 1}) int32"} if "cu_seqlens" in given else {}
    found = {name: _named(given.get(name)) for name in wanted}
    if found != wanted:
        what = str(found) if given else type(batch).__name__
        raise DataError(f"{corpus} gave as a batch {what}; it must be {wanted}")


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


def _named(value: Any) -> str:
    """ "(4, 64) int64" of a tensor, the type of anything else."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "missing" if value is None else type(value).__name__
