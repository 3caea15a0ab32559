"""How DDP is set up."""

import torch
from torch import nn

from forgetting_transformer.training.parallel import launch


def test_ddp_is_made_in_the_current_stream(monkeypatch):
    """The nodes that accumulate gradients keep the stream in which DDP is made."""
    made = []

    class Wrapped(nn.Module):
        def __init__(self, module, **options):
            super().__init__()
            made.append((module, options))

    def another_stream(*_):
        raise AssertionError("DDP is made in a stream of its own")

    monkeypatch.setattr(launch, "DistributedDataParallel", Wrapped)
    monkeypatch.setattr("lightning.fabric.strategies.ddp.DistributedDataParallel", Wrapped)
    for name in ("Stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, another_stream)
    strategy = launch._DDP(find_unused_parameters=True)
    monkeypatch.setattr(strategy, "_determine_ddp_device_ids", lambda: [0])
    module = nn.Linear(2, 2)
    strategy.setup_module(module)
    assert made == [(module, {"device_ids": [0], "find_unused_parameters": True})]
