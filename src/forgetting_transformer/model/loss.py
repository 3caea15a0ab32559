"""The loss that a language model returns, by the two conventions for labels.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forgetting_transformer.ops import context


def check_loss_arguments(
    model: Any,
    input_ids: Tensor | None,
    labels: Tensor,
    logits_to_keep: int | Tensor,
    num_items_in_batch: int | Tensor | None,
) -> None:
    """Refuse what the convention for labels has no use for, and warn once of labels that look like the other's."""
    if model.config.loss == "causal_lm":
        if context.active() is not None:
            raise ValueError(
                "config.loss is 'causal_lm', whose shift loses the first label of each process's part where "
                "processes share sequences; set it to 'per_token'"
            )
        if not isinstance(logits_to_keep, int) or logits_to_keep:
            raise ValueError("logits_to_keep is given with labels; the loss needs all logits, leave it out")
        return
    if num_items_in_batch is not None:
        raise ValueError(
            "num_items_in_batch is given, as transformers' Trainer does, but config.loss is 'per_token': a loss "
            "(B, T) of labels that are not shifted. Set model.config.loss = 'causal_lm'"
        )
    if model._has_looked_at_labels or not model.training or input_ids is None or torch.compiler.is_compiling():
        return
    model._has_looked_at_labels = True
    if labels.device.type != "meta" and _are_inputs(labels, input_ids):
        warnings.warn(
            "labels are input_ids, and are not shifted (config.loss is 'per_token', where labels[t] is the token "
            "after input_ids[t]): the model learns to copy. For Hugging Face's convention set "
            "model.config.loss = 'causal_lm'",
            stacklevel=2,
        )


def ignore_after_padding(labels_BT: Tensor, attention_mask_BN: Tensor) -> Tensor:
    """Labels without those that a position of padding would have to predict: in left padding a row's first token."""
    follows_padding_BT = F.pad(attention_mask_BN[:, -labels_BT.shape[1] :][:, :-1] == 0, (1, 0))
    return labels_BT.masked_fill(follows_padding_BT, -100)


def _are_inputs(labels_BT: Tensor, input_ids_BT: Tensor) -> bool:
    """Whether the labels that count are the tokens at the same positions, and not the next ones."""
    if labels_BT.shape != input_ids_BT.shape:
        return False
    counts_BT = labels_BT != -100
    differs_BT = (labels_BT != input_ids_BT) & counts_BT
    differs_from_next_BT = (labels_BT[:, :-1] != input_ids_BT[:, 1:]) & counts_BT[:, :-1]
    return not bool(differs_BT.any()) and bool(differs_from_next_BT.any())
