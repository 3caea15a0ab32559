"""What a forward pass keeps: nothing of blocks that are done, and with activation checkpointing their inputs, here or
in the host's memory."""

import weakref

import torch

from forgetting_transformer.model import block as blocks
from tests.model.small_models import PRO, small


def step(model, ids) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids.roll(-1, 1)).loss
    loss.sum().backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_block_inputs_wait_on_the_host_and_change_nothing(monkeypatch):
    model = small("forgetting_transformer", **PRO).train()
    model.gradient_checkpointing_enable()
    ids = torch.randint(61, (2, 24))
    expected = step(model, ids)
    moved = []

    class Recorded(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(lambda x: moved.append(tuple(x.shape)) or x.clone(), lambda x: x)

    monkeypatch.setattr(blocks, "save_on_cpu", Recorded)
    model.keep_block_inputs_on_host()
    actual = step(model, ids)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    # Nothing but what blocks are called with.
    assert moved == [(2, 24, model.config.hidden_size)] * model.config.num_hidden_layers


def test_a_block_that_is_done_leaves_nothing_behind_in_an_evaluation():
    model = small("forgetting_transformer", num_hidden_layers=4).eval()
    inputs, alive = [], []

    def look(block, arguments) -> None:
        alive.append([x() is not None for x in inputs])
        inputs.append(weakref.ref(arguments[0]))

    for block in model.decoder.layers:
        block.register_forward_pre_hook(look)
    with torch.no_grad():
        ids = torch.zeros(1, 8, dtype=torch.long)
        model(input_ids=ids, labels=ids)
    assert alive == [[], [False], [False, False], [False, False, False]]
