"""On CUDA: the self-tests pass for every kernel, name what runs, and catch a kernel that is wrong."""

import collections
import os
import subprocess
import sys

import pytest
import torch

from forgetting_transformer.ops import backends, selftest
from forgetting_transformer.ops.backends import FLA, HOPPER, PYTORCH, TRITON, OpUse
from tests.model.small_models import PRO, small
from tests.waiting import HANG

FOX = OpUse("attention", heads=4, key_dim=64, value_dim=64, is_gated=True, pruning="threshold")
GPU = torch.device("cuda", 0)


def choose(*uses, dtype=torch.bfloat16, lengths=(2048,)):
    return selftest.choose_backends(uses, dtype, GPU, lengths)


@pytest.mark.slow
@pytest.mark.parametrize(
    "head_dim, lengths, dtype",
    [
        (64, (16384,), torch.bfloat16),
        (64, None, torch.bfloat16),
        (128, None, torch.bfloat16),
        (64, (384,), torch.float32),
    ],
)
def test_every_kernel_of_attention_passes(head_dim, lengths, dtype):
    gated = FOX._replace(key_dim=head_dim, value_dim=head_dim)
    for use in (
        gated,
        gated._replace(pruning="auto"),
        gated._replace(pruning=None, key_heads=2),
        gated._replace(window=700, pruning=None),
        gated._replace(is_gated=False, pruning=None),
        gated._replace(is_gated=False, pruning=None, window=700, key_heads=1),
        gated._replace(packed=True),
    ):
        found = choose(use, dtype=dtype, lengths=lengths)["attention"]
        assert not backends.faults()
        if dtype == torch.float32:
            assert found.name == (TRITON if use.is_gated else PYTORCH)
        elif torch.cuda.get_device_capability() == (9, 0):
            assert found.name == HOPPER
        assert found.name == PYTORCH or "self-test within" in found.text


def test_every_kernel_of_a_recurrence_passes():
    pytest.importorskip("fla")
    uses = [OpUse(op, 12, 128, 128) for op in ("gla", "delta_rule", "gated_delta_rule", "kda")]
    for use in (OpUse("simple_gla", 24, 128, 64), *uses):
        found = choose(use)[use.op]
        assert not backends.faults() and found.name == FLA and "self-test within" in found.text
    found = choose(OpUse("simple_gla", 24, 128, 64, key_heads=1), lengths=(4096,))["simple_gla"]
    assert not backends.faults() and found.name == TRITON


@pytest.mark.parametrize("dtype", selftest.ELEMENTWISE_TOLERANCES)
def test_every_kernel_of_a_layer_passes(dtype):
    model = small("forgetting_transformer", **PRO)
    found = choose(*model.op_uses(), dtype=dtype)
    for op in ("swiglu", "residual_norm", "shift_norm"):
        assert found[op].name == TRITON and "self-test within" in found[op].text
    assert not backends.faults()


def test_a_self_test_takes_little_memory_and_no_random_numbers():
    before = torch.cuda.get_rng_state()
    torch.cuda.reset_peak_memory_stats()
    choose(FOX)
    assert torch.cuda.max_memory_allocated() < 4 << 30
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_the_backward_pass_compiled_early_is_the_one_that_runs(tmp_path):
    """With empty caches every kernel is compiled once: what the thread beside the forward pass compiled is found."""
    code = """
import torch
from forgetting_transformer.ops import selftest
from forgetting_transformer.ops.backends import OpUse
use = OpUse("attention", heads=4, key_dim=64, value_dim=64, is_gated=True, pruning="threshold")
print(selftest.choose_backends([use], torch.bfloat16, torch.device("cuda", 0), [16384]))
"""
    environ = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    compiled = collections.Counter(path.stem for path in tmp_path.rglob("*.cubin"))
    assert {"forward_kernel", "backward_kernel", "finish_kernel", "delta_kernel"} <= compiled.keys()
    assert set(compiled.values()) == {1}, compiled


def test_a_wrong_hopper_kernel_is_found_and_triton_runs(monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    from forgetting_transformer.ops.forgetting_attention import hopper

    right = hopper.forward

    def wrong(*args):
        out, log_normaliser = right(*args)
        out[:, :, 200:220] = 0
        return out, log_normaliser

    monkeypatch.setattr(hopper, "forward", wrong)
    found = choose(FOX)["attention"]
    # The gradients are taken from the wrong output too, on another thread: either may be the first to be found.
    assert found.name == TRITON and "self-test found the " in next(iter(backends.faults().values()))
