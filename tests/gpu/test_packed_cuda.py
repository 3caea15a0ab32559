"""Packed documents on a GPU: the kernels keep them apart, as blocks are and as they are compiled."""

import pytest
import torch

from forgetting_transformer.data.corpus import cu_seqlens_of
from forgetting_transformer.ops import backends
from forgetting_transformer.ops.forgetting_attention import forgetting_attention
from forgetting_transformer.ops.selftest import choose_backends
from tests.model.small_models import PRO, small

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
        model.compile_parts()
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


def test_the_self_test_covers_packed_documents():
    model = small("forgetting_transformer", **PRO, hidden_size=256, num_heads=2)
    uses = [use._replace(packed=True) for use in model.op_uses()]
    found = choose_backends(uses, torch.bfloat16, torch.device("cuda"), [1024])
    assert found["attention"].name == backends.TRITON and "self-test within" in found["attention"].text


@pytest.mark.parametrize("given", [{"window_size": 100}, {"seq_start": [0, 700, 3]}])
def test_compiled_attention_sees_the_keys_of_each_sequence(given):
    """1,500 first visible keys per sequence: TorchInductor pads rows of such a length."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(3, 1500, 2, 64, device="cuda", generator=generator, dtype=torch.bfloat16) for _ in range(3))
    log_fgate = torch.nn.functional.logsigmoid(torch.randn(3, 1500, 2, device="cuda", generator=generator) + 4)
    if "seq_start" in given:
        given = {"seq_start": torch.tensor(given["seq_start"], device="cuda")}

    def attend(q, k, v, log_fgate):
        return forgetting_attention(q, k, v, log_fgate, **given)

    out = torch.compile(attend, dynamic=False)(q, k, v, log_fgate)
    torch.testing.assert_close(out, attend(q, k, v, log_fgate), rtol=0, atol=2e-2)
