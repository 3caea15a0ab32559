"""Packed documents: the losses and gradients of a batch are those of its documents, each by itself."""

import pytest
import torch

from forgetting_transformer.model import registry
from tests.model.small_models import GROUPED, PRO, WINDOWS, small

#: Two rows of 12 tokens, of five documents and of one; ends repeated, as loaders pad them.
LENGTHS = [3, 1, 4, 2, 2, 12]
CU_SEQLENS = torch.tensor([0, 3, 4, 8, 10, 12, 24, 24, 24])

PACKING = {
    "FoX": ("forgetting_transformer", {}),
    "FoX (Pro)": ("forgetting_transformer", PRO),
    "FoX with rotary positions, pruning": (
        "forgetting_transformer",
        {"use_rope": True, "qk_norm": True, "log_pruning_tolerance": -10.0},
    ),
    "FoX without gates": ("forgetting_transformer", {"fgate_type": "none", "use_rope": True, "use_k_shift": True}),
    "FoX with grouped keys and a window": ("forgetting_transformer", {**PRO, **GROUPED, "window_size": 3}),
    "FoX in a hybrid of windows": ("hybrid", WINDOWS),
    "Transformer": ("transformer", {}),
    "Transformer with a window": ("transformer", {"window_size": 3}),
    "Transformer with grouped heads": ("transformer", {"num_heads": 4, "num_kv_heads": 2}),
    "Mamba-2": ("mamba2", {}),
    "Mamba-2 with groups of heads": ("mamba2", {"n_groups": 2, "num_heads": 4, "head_dim": 16}),
    "Samba": ("samba", {"attn": {"num_heads": 2, "window_size": 3, "layers": None}}),
    "Mamba-1 alone": ("samba", {"attn": None}),
}
#: What has no attention is exact in float64.
EXACT = ("Mamba-2", "Mamba-2 with groups of heads", "Mamba-1 alone")


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(0, 61, (2, 12), generator=generator) for _ in range(2))


@pytest.mark.parametrize("kind", PACKING)
def test_losses_and_gradients_are_those_of_the_documents_one_by_one(kind):
    """The packed ones with activation checkpointing."""
    name, fields = PACKING[kind]
    model = small(name, **fields).double().train()
    model.gradient_checkpointing_enable()
    input_ids, labels = tokens()
    packed = model(input_ids=input_ids, labels=labels, cu_seqlens=CU_SEQLENS).loss
    assert packed.shape == input_ids.shape
    packed.sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    model.zero_grad()
    model.gradient_checkpointing_disable()
    alone = []
    for inputs, targets in zip(input_ids.view(-1).split(LENGTHS), labels.view(-1).split(LENGTHS), strict=True):
        alone.append(model(input_ids=inputs[None], labels=targets[None]).loss[0])
    torch.cat(alone).sum().backward()
    limit = 1e-10 if kind in EXACT else 1e-6
    torch.testing.assert_close(packed.view(-1), torch.cat(alone), rtol=0, atol=limit)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=10 * limit, atol=limit, msg=name)
    whole = model(input_ids=input_ids, labels=labels).loss
    assert not torch.allclose(packed, whole, atol=1e-2), "without cu_seqlens documents see each other"


@pytest.mark.parametrize(
    "name",
    [n for n in registry.model_names() if n not in ("forgetting_transformer", "transformer", "mamba2", "samba")],
)
def test_models_that_carry_a_state_refuse_by_name(name):
    input_ids, labels = tokens()
    with pytest.raises(ValueError, match=f"^cu_seqlens: {name.split('-')[0]}.* carries a state"):
        small(name)(input_ids=input_ids, labels=labels, cu_seqlens=CU_SEQLENS)
