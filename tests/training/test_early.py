"""Compiling for the first step while kernels are tested: what the first step finds, and what must not stay."""

import logging
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric
from omegaconf import OmegaConf

from forgetting_transformer.ops import backends
from forgetting_transformer.training import parse, setup
from forgetting_transformer.training.execution import early
from tests.training.test_compile import VOCAB, architecture, build, captured, tokens  # noqa: F401 (a fixture)

INFO = SimpleNamespace(vocab_size=VOCAB, bos_token_id=0, eos_token_id=0)


def test_the_first_step_compiles_nothing_again(captured, tiny):  # noqa: F811
    config = parse(OmegaConf.create(architecture(tiny, "hybrid", compile=True, gradient_checkpointing=True)))
    empty = setup.as_trained(setup.outline(config, INFO), config)
    early.compile_blocks(empty, torch.device("cpu"), 2, 40)
    before = captured["stats"]["unique_graphs"]
    assert before
    model = build(config).train()
    model.run_compiled()
    ids = tokens(2, 40)
    model(input_ids=ids, labels=ids).loss.mean().backward()
    assert captured["stats"]["unique_graphs"] == before


@pytest.fixture
def wanted(monkeypatch):
    monkeypatch.setattr(early, "_serves", lambda *_: True)


@pytest.fixture
def config(tiny):
    return parse(OmegaConf.create(architecture(tiny, "forgetting_transformer", compile=True)))


def test_compiled_code_goes_with_a_kernel_that_is_ruled_out(captured, wanted, config, monkeypatch):  # noqa: F811
    fabric, empty = Fabric(accelerator="cpu", devices=1), setup.outline(config, INFO)
    resets, faults = [], {}
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(True))
    monkeypatch.setattr(backends, "_faults", faults)
    with early.compiling(config, fabric, empty, packed=False):
        pass
    assert not resets and captured["stats"]["unique_graphs"]
    with early.compiling(config, fabric, empty, packed=False):
        faults["attention", backends.TRITON] = "its self-test found it wrong"
    assert resets == [True]


def test_an_error_is_left_to_the_first_step_and_hides_none_of_the_body(wanted, config, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(early, "compile_blocks", broken)
    caplog.set_level(logging.DEBUG, "forgetting_transformer")
    fabric, empty = Fabric(accelerator="cpu", devices=1), setup.outline(config, INFO)
    with early.compiling(config, fabric, empty, packed=False):
        pass
    assert "nothing was compiled early: no compiler" in caplog.text
    with pytest.raises(ValueError, match="a kernel"), early.compiling(config, fabric, empty, packed=False):
        raise ValueError("a kernel")


def test_nothing_is_compiled_early_beside_the_test_of_kernels_of_fla(tiny, monkeypatch):
    """They keep state of the whole process: two threads at once have ruled out kernels that were right."""
    gpu = SimpleNamespace(device=torch.device("cuda", 0), world_size=1)
    monkeypatch.setattr(early.graphs, "choose", lambda *_: False)
    monkeypatch.setattr(early, "find_backend", lambda use, *_: backends.FLA if use.op == "kda" else backends.TRITON)
    for name, served in (("forgetting_transformer", True), ("mamba2", True), ("kda", False)):
        config = parse(OmegaConf.create(architecture(tiny, name, compile=True)))
        assert early._serves(config, gpu, setup.outline(config, INFO)) == served
