"""Processes that share an evaluation end together."""

import pytest
import torch

from forgetting_transformer.evaluation.models import EvaluationError
from forgetting_transformer.evaluation.workers import Workers


def test_what_the_first_process_refuses_every_process_refuses(monkeypatch):
    """Another that waited for it would end with another error, of the network."""
    sent = []

    def broadcast(workers, value):
        if workers.is_first:
            sent.append(value)
        return sent[-1]

    monkeypatch.setattr(Workers, "broadcast", broadcast)
    processes = [Workers(rank, 2, torch.device("cpu")) for rank in (0, 1)]

    def refuse():
        raise EvaluationError("the folder holds other results")

    for process in processes:
        with pytest.raises(EvaluationError, match="the folder holds other results"):
            process.on_first(refuse)
    calls = iter([7])
    assert [process.on_first(lambda: next(calls)) for process in processes] == [7, 7]
