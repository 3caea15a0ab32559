"""Sums of losses at every position, of whole rows and of packed documents."""

import numpy as np
import pytest
import torch

from forgetting_transformer.data.corpus import model_inputs
from forgetting_transformer.data.packed import cu_seqlens_of
from forgetting_transformer.model.padding import packed_positions
from forgetting_transformer.training.records.loss_by_position import PositionSums, by_length, mean_loss


def sums_of(*arguments, **options) -> PositionSums:
    sums = PositionSums(4, torch.device("cpu"))
    sums.add(*arguments, **options)
    return sums


def test_a_position_of_a_packed_document_is_that_in_the_document():
    input_ids = torch.tensor([[0, 5, 0, 6], [0, 8, 9, 0]])
    batch = {"input_ids": input_ids, "labels": input_ids, "cu_seqlens": cu_seqlens_of(input_ids, 0)}
    loss_BT = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    position_BT = packed_positions(model_inputs(batch))
    assert position_BT.tolist() == [[0, 1, 0, 1], [0, 1, 2, 0]]
    sums = sums_of(loss_BT, position_BT=position_BT)
    assert sums.loss_T.tolist() == [1 + 3 + 5 + 8, 2 + 4 + 6, 7, 0] and sums.sequences_T.tolist() == [4, 3, 1, 0]
    counts_T, mean_T = sums.counts_T(), sums.mean_T()
    assert mean_loss(mean_T, counts_T) == pytest.approx(loss_BT.mean().item()), "each token counts once"
    found = by_length("val", mean_T, 2, counts_T)
    assert found["val/loss_avg_len_4"] == pytest.approx(36 / 8)
    assert found["val/loss_avg_len_2"] == pytest.approx(29 / 7), "tokens with at most one before them"
    weighted = sums_of(loss_BT, torch.tensor([1.0, 0.0], dtype=torch.float64), position_BT)
    assert weighted.loss_T.tolist() == [4, 6, 0, 0] and weighted.sequences_T.tolist() == [2, 2, 0, 0]


def test_whole_rows_have_all_positions():
    loss_BT = torch.rand(3, 4)
    assert packed_positions({"input_ids": loss_BT, "labels": loss_BT}) is None
    sums, weighted = sums_of(loss_BT), sums_of(loss_BT, torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    assert sums.counts_T() is None and sums.sequences_T.tolist() == [3] * 4
    np.testing.assert_allclose(sums.mean_T(), loss_BT.double().mean(0))
    np.testing.assert_allclose(weighted.mean_T(), loss_BT[:2].double().mean(0))
