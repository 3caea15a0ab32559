"""FSDP2: weights gathered in bf16 are those that products round anyway, and when they are gathered changes no bit."""

import gzip
import json

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from forgetting_transformer.model import registry
from forgetting_transformer.model.block import DecoderBlock
from forgetting_transformer.training import parse
from forgetting_transformer.training.parallel.sharding import shard, units
from tests.tiny import VOCAB
from tests.training.conftest import STEP, assert_same_tensors, blocks, changed, losses, train
from tests.training.test_compile import architecture, build, one_process_group

#: For a training process: FSDP2 as it is used without care, one unit for each block, all in fp32.
PLAIN = """
from torch.distributed.fsdp import fully_shard
from forgetting_transformer.model.block import DecoderBlock
from forgetting_transformer.training.parallel import sharding
def shard(model, mesh, found, keeps):
    for module in model.modules():
        if isinstance(module, DecoderBlock):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
sharding.shard = shard
"""
#: Appends how often each step gathers a unit to the file FOLDER/gathers-RANK.
COUNT = """
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from forgetting_transformer.training import trainer
gathers, original, step = [0], _fsdp_param_group.foreach_all_gather, trainer.Trainer.step
def count(*args, **kwargs):
    gathers[0] += 1
    return original(*args, **kwargs)
_fsdp_param_group.foreach_all_gather = count
def counted(self, batch):
    gathers[0] = 0
    result = step(self, batch)
    with open(f"{folder}/gathers-{self.fabric.global_rank}", "a") as out:
        print(gathers[0], file=out)
    return result
trainer.Trainer.step = counted
"""


def small_model(tiny: dict, name: str) -> nn.Module:
    return build(parse(OmegaConf.create(architecture(tiny, name))))


@pytest.mark.parametrize("name", registry.model_names())
def test_what_is_gathered_in_bf16_is_what_autocast_rounds(tiny, tmp_path, name):
    """Losses and gradients of two accumulated micro-batches are bitwise those without FSDP2."""
    batches = torch.randint(1, VOCAB, (2, 3, 40), generator=torch.Generator().manual_seed(0))

    def run(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        found = []
        for ids in batches:
            with torch.autocast("cpu", torch.bfloat16):
                found.append(model(input_ids=ids, labels=ids).loss)
            found[-1].mean().backward()
        whole = lambda gradient: gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient  # noqa: E731
        return torch.stack(found), {name: whole(p.grad) for name, p in model.named_parameters()}

    want_loss, want = run(small_model(tiny, name).train())
    with one_process_group(tmp_path):
        model = small_model(tiny, name).train()
        model = shard(model, init_device_mesh("cpu", (1,)), units(model, torch.bfloat16), False)
        seen: set[torch.dtype] = set()
        for block in model.modules():
            if isinstance(block, DecoderBlock):
                block.register_forward_pre_hook(
                    lambda block, _: seen.update(m.weight.dtype for m in block.modules() if type(m) is nn.Linear)
                )
        loss, got = run(model)
        assert seen == {torch.bfloat16}
        assert all(p.dtype == torch.float32 for p in model.parameters())
    assert torch.equal(loss, want_loss)
    assert got.keys() == want.keys()
    for key, gradient in want.items():
        assert gradient is got[key] is None or torch.equal(got[key], gradient), key


def test_norms_gates_convolutions_and_the_output_layer_are_gathered_in_fp32(tiny):
    model = small_model(tiny, "samba")
    names = {parameter: name for name, parameter in model.named_parameters()}
    *of_blocks, head = units(model, torch.bfloat16)
    rounded = {names[parameter] for unit in of_blocks for parameter in unit.parameters}
    assert {unit.dtype for unit in of_blocks} == {torch.bfloat16}
    assert all(name.endswith("proj.weight") and "dt_proj" not in name for name in rounded), rounded
    assert any("in_proj" in name for name in rounded)
    assert ({names[parameter] for parameter in head.parameters}, head.dtype) == ({"lm_head.weight"}, torch.float32)
    assert all(unit.dtype == torch.float32 for unit in units(model)), "32-true rounds nothing"


@pytest.mark.slow
def test_a_run_is_bitwise_that_of_plain_fsdp2_also_where_steps_are_traced(tiny, tmp_path):
    """With gathers in bf16, units that are prefetched, and weights that stay gathered over micro-batches."""
    tiny = changed(tiny, strategy__name="fsdp", fabric__precision="bf16-mixed", train__max_tokens=8 * STEP)
    tiny = changed(tiny, train__grad_acc_tokens=32, datamodule__train_batch_size=8, skip_eval=True)
    found = {}
    for kind, keep, patch in (("plain", False, PLAIN), ("units", False, COUNT), ("kept", True, COUNT)):
        config = changed(tiny, strategy__keep_gathered=keep, output_dir=str(tmp_path / kind))
        config = changed(config, train__profile_steps=[2, 3] if keep else None)
        train(config, 2, patch=patch.replace("{folder}", str(tmp_path / f"{kind}.errors")))
        found[kind] = config["output_dir"]
    notes = "linear layers of blocks gathered in bf16; weights gathered once a step)"
    assert blocks(str(tmp_path / "kept"))[0]["precision"].endswith(notes)
    # Two blocks, output layer and the rest in four micro-batches: kept, or gathered in each, blocks backward too.
    for kind, count in (("kept", 4), ("units", 4 * (4 + 2))):
        assert {*(tmp_path / f"{kind}.errors/gathers-0").read_text().split()} == {str(count)}
    for kind in ("units", "kept"):
        assert losses(found[kind]) == losses(found["plain"]), kind
        assert_same_tensors(found["plain"], found[kind], 8 * STEP)
    traces = sorted((tmp_path / "kept/traces").iterdir())
    assert [trace.name.partition(".")[0] for trace in traces] == [f"start-{0:015d}-rank-{rank}" for rank in range(2)]
    for trace in traces:
        names = {event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
        assert {name for name in names if name.startswith("ProfilerStep")} == {"ProfilerStep#1", "ProfilerStep#2"}
