"""On CUDA: half a million tokens of wide rows, more than 2³¹ elements, give bitwise what copies of the parts give."""

import functools
import gc

import pytest
import torch
import torch.nn.functional as F

from forgetting_transformer import forgetting_attention
from forgetting_transformer.model.decoder import DecoderBlock
from forgetting_transformer.ops.layers.cross_entropy import linear_cross_entropy
from tests.gpu.test_hopper_cuda import random_leaves
from tests.model.small_models import small

LENGTH, WIDTH = 2**19, 6208  # as the joint projection of a layer of 1,536 channels


@pytest.fixture(autouse=True)
def room():
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 70 << 30:
        pytest.skip("needs 70 GB of memory on the GPU")
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


def gradients(function, leaves):
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = function(*leaves)
    d_out = torch.linspace(-1, 1, out.shape[-1], device="cuda").to(out.dtype).expand(out.shape).contiguous()
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def test_attention_of_slices_of_one_projection():
    wide = torch.empty(1, LENGTH, WIDTH, dtype=torch.bfloat16, device="cuda")
    parts = [wide[:, :, start : start + 64].unflatten(2, (1, 64)) for start in (0, 1536, WIDTH - 64)]
    for part in parts:
        part.normal_()
    log_fgate = F.logsigmoid(torch.randn(1, LENGTH, 1, device="cuda") + 6)

    for threshold in (None, -30.0):
        attend = functools.partial(forgetting_attention, adaptive_threshold=threshold)
        found = gradients(attend, [*parts, log_fgate])
        expected = gradients(attend, [*(part.contiguous() for part in parts), log_fgate])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_last_sequence_of_a_large_batch_has_the_gradients_that_it_has_alone(head_dim):
    length, heads = 256, 64
    batch = 2**31 // (length * heads * head_dim) + 2
    leaves, d_out = random_leaves(batch, length, heads, head_dim)

    def backward(leaves, d_out):
        return torch.autograd.grad(forgetting_attention(*leaves), leaves, d_out)

    found = [x[-1:].clone() for x in backward(leaves, d_out)]
    alone = [x[-1:].detach().clone().requires_grad_() for x in leaves]
    assert all(torch.equal(a, b) for a, b in zip(found, backward(alone, d_out[-1:].clone()), strict=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_of_more_than_2_31_logits(compiled):
    """2¹⁹ tokens of 50,257 words are 26 billion logits."""
    hidden = torch.randn(1, LENGTH, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(50257, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    labels = torch.randint(50257, (1, LENGTH), device="cuda")
    loss = linear_cross_entropy(hidden, weight, labels, compiled=compiled)
    loss.sum().backward()
    for rows in (slice(0, 2048), slice(LENGTH - 2048, LENGTH)):
        part = hidden.detach()[:, rows].float().requires_grad_()
        expected = F.cross_entropy((part[0] @ weight.detach().float().T), labels[0, rows], reduction="none")
        expected.sum().backward()
        assert (loss.detach()[0, rows] - expected.detach()).abs().max() < 0.2
        assert ((hidden.grad[:, rows].float() - part.grad).norm() / part.grad.norm()).item() < 0.02


def test_block_inputs_on_the_host_give_the_same_bits_and_leave_memory_free():
    peaks, found = [], []
    for on_host in (False, True):
        torch.manual_seed(0)
        model = small("forgetting_transformer", hidden_size=512, num_heads=8, num_hidden_layers=12).cuda().train()
        model.gradient_checkpointing_enable()
        if on_host:
            model.keep_block_inputs_on_host()
        assert all(b.inputs_on_host == on_host for b in model.modules() if isinstance(b, DecoderBlock))
        ids = torch.arange(32768, device="cuda")[None] % 61
        gc.collect()  # what is freed meanwhile, of tests before or of the other model, would count
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids.roll(-1, 1)).loss
        loss.mean().backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        del model
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    # 12 inputs of 32,768 x 512 float32 numbers, but for the one in use and one on its way.
    assert peaks[0] - peaks[1] > 8 * 32768 * 512 * 4
