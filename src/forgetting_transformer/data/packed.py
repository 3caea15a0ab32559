"""Packed documents: where the texts in a row begin, for a model that keeps them apart (`datamodule=packed`).

No other module decides where documents begin. Axes: B rows, T tokens of a row, S = T + 1.
"""

import torch
from torch import Tensor


def keep_apart(batch: dict[str, Tensor], bos_token_id: int, eos_token_id: int) -> dict[str, Tensor]:
    """The batch with `cu_seqlens`, for a model that keeps the texts in each row apart. Changes its `input_ids`.

    A text begins with BOS, as a prompt does. Where BOS and EOS are two tokens and the array has none but EOS between
    two texts, BOS takes the place of that EOS in the inputs.
    """
    input_ids_BT = batch["input_ids"]
    input_ids_BT[(input_ids_BT == eos_token_id) & (batch["labels"] != bos_token_id)] = bos_token_id
    return batch | {"cu_seqlens": cu_seqlens_of(input_ids_BT, bos_token_id)}


def cu_seqlens_of(input_ids_BT: Tensor, bos_token_id: int) -> Tensor:
    """Beginnings of documents in each row, `(B, S)` int32 filled up with T: every BOS token, and 0."""
    n_rows, length = input_ids_BT.shape
    begins_BT = input_ids_BT == bos_token_id
    begins_BT[:, 0] = True
    row, begin = begins_BT.nonzero(as_tuple=True)
    number = begins_BT.cumsum(1)[row, begin] - 1
    cu_seqlens_BS = torch.full((n_rows, length + 1), length, dtype=torch.int32)
    cu_seqlens_BS[row, number] = begin.int()
    return cu_seqlens_BS


def one_after_another(cu_seqlens_BS: Tensor) -> Tensor:
    """`cu_seqlens` over the tokens of all rows, one row after another: `(B * S,)`."""
    n_rows, length = len(cu_seqlens_BS), cu_seqlens_BS.shape[1] - 1
    begin_B = torch.arange(0, n_rows * length, length, device=cu_seqlens_BS.device, dtype=torch.int32)
    return (cu_seqlens_BS + begin_B[:, None]).flatten()


def lengths_of(cu_seqlens_BS: Tensor) -> dict[int, float]:
    """The share of tokens in documents of each length."""
    lengths = cu_seqlens_BS.diff(dim=1).flatten()
    found, count = lengths[lengths > 0].unique(return_counts=True)
    shares = (found * count).double() / (found * count).sum()
    return dict(zip(found.tolist(), shares.tolist(), strict=True))
