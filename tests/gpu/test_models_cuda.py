"""On CUDA: layers and models against float64 and the official ones; packed documents; compiled blocks."""

from pathlib import Path

import pytest
import torch

from forgetting_transformer.data.packed import cu_seqlens_of
from forgetting_transformer.model import (
    ForgettingTransformerConfig,
    ForgettingTransformerForCausalLM,
)
from tests.gpu.test_cuda import relative_error
from tests.model.small_models import PRO, small

GOLDEN = Path(__file__).parents[1] / "data/golden/fox_pro_sharedqk.pt"
KINDS = {
    "FoX (Pro), pruned": ("forgetting_transformer", {**PRO, "log_pruning_tolerance": -10.0}),
    "Transformer": ("transformer", {}),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_documents_in_rows_of_their_own(kind, compiled):
    """Two rows of 384 tokens; the documents of each once more, one by one, in float32 and PyTorch."""
    name, fields = KINDS[kind]
    fields = fields | {"hidden_size": 128, "num_heads": 2, "initializer_range": 0.02}
    model, alone = small(name, **fields).cuda().train(), small(name, **fields).train()
    generator = torch.Generator().manual_seed(0)
    input_ids, labels = (torch.randint(1, 61, (2, 384), generator=generator) for _ in range(2))
    input_ids[0, [100, 101, 260]] = 0
    input_ids[1, 7] = 0
    rows = cu_seqlens_of(input_ids, 0)
    cu_seqlens = (rows + torch.tensor([[0], [384]], dtype=torch.int32)).flatten()
    if compiled:
        model.run_compiled()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=input_ids.cuda(), labels=labels.cuda(), cu_seqlens=cu_seqlens.cuda()).loss
    loss.mean().backward()
    lengths = cu_seqlens.diff()
    lengths = lengths[lengths > 0].tolist()
    assert lengths == [100, 1, 159, 124, 7, 377]
    parts = zip(input_ids.view(-1).split(lengths), labels.view(-1).split(lengths), strict=True)
    expected = torch.cat([alone(input_ids=inputs[None], labels=targets[None]).loss[0] for inputs, targets in parts])
    expected.mean().backward()
    torch.testing.assert_close(loss.view(-1).cpu().float(), expected, rtol=0, atol=3e-2)
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        error = (ours.grad.cpu().float() - theirs.grad).norm() / theirs.grad.norm()
        assert error < 5e-2, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize(("autocast", "tolerance"), [(False, 1e-4), (True, 2e-2)])
def test_the_official_outputs_are_reproduced(autocast, tolerance):
    golden = torch.load(GOLDEN, weights_only=True)
    model = ForgettingTransformerForCausalLM(ForgettingTransformerConfig(**golden["config"])).cuda().eval()
    model.load_state_dict(golden["state_dict"])
    input_ids, labels = golden["input_ids"].cuda(), golden["labels"].cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        logits = model(input_ids=input_ids).logits
        loss = model(input_ids=input_ids, labels=labels).loss
    loss.mean().backward()
    assert relative_error(logits, golden["logits"].cuda()) < tolerance
    assert relative_error(loss, golden["loss"].cuda()) < tolerance
    for name, parameter in model.named_parameters():
        error = relative_error(parameter.grad, golden["grads"][name].cuda())
        assert error < (tolerance if not autocast else 5e-2), f"{name}: {error:.2e}"
