"""Every architecture trains, resumes bitwise and exports through the same code."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from forgetting_transformer.model import registry
from forgetting_transformer.training.checkpoint.folder import newest_valid
from forgetting_transformer.training.export import export, load_checkpoint
from tests.tiny import VOCAB
from tests.training.conftest import STEP, assert_same_tensors, changed, rank_log, train
from tests.training.test_compile import architecture

pytestmark = pytest.mark.slow

CASES: list = [(name, {}, "auto", 1) for name in registry.model_names() if name != "forgetting_transformer"]
# A parameter with two names.
CASES += [("forgetting_transformer", {"tie_word_embeddings": True}, "auto", 1)]
# A parameter without a gradient.
CASES += [("hgrn2", {}, strategy, 2) for strategy in ("ddp", "fsdp")]


@pytest.mark.parametrize(("name", "fields", "strategy", "world_size"), CASES)
def test_it_trains_resumes_bitwise_and_exports(tiny, tmp_path, name, fields, strategy, world_size):
    tiny = architecture(tiny, name)
    tiny["model"]["config"] |= fields
    straight = changed(tiny, strategy__name=strategy, train__max_tokens=4 * STEP, output_dir=str(tmp_path / "straight"))
    straight = changed(straight, skip_eval=True, checkpoint_interval=2 * STEP)
    stopped = changed(straight, output_dir=str(tmp_path / "stopped"))
    train(straight, world_size)
    # As if it had been killed soon after its checkpoint at step 2.
    shutil.copytree(tmp_path / "straight", tmp_path / "stopped")
    shutil.rmtree(tmp_path / f"stopped/checkpoints/step-{4 * STEP:015d}")
    train(stopped, world_size)
    assert f"continuing from {tmp_path}/stopped/checkpoints/step-{2 * STEP:015d}" in rank_log(stopped, 0)
    assert_same_tensors(straight["output_dir"], stopped["output_dir"], 4 * STEP)
    export(tmp_path / "stopped", tmp_path / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert type(exported) is registry.get(name).lm_class
    checkpoint = newest_valid(Path(tmp_path / "stopped/checkpoints"))
    trained = load_checkpoint(checkpoint)[2]
    ids = torch.arange(60).reshape(2, 30) % VOCAB
    with torch.no_grad():
        assert torch.equal(exported(input_ids=ids).logits, trained(input_ids=ids).logits)
