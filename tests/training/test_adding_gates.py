"""scripts/add_forget_gates.py: a pretrained Transformer as a FoX that computes the same, and training from it."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from forgetting_transformer.training.export import ExportError, export
from forgetting_transformer.training.export.forget_gates import add_forget_gates
from tests.training.conftest import STEP, changed, checkpoint_tensors, rank_log, train, word_tokenizer

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"rms_norm_eps": 1e-3}),
    "llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "linear": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LINEAR, "num_key_value_heads": 4}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 7}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32, "rms_norm_eps": 1e-4}),
}


def original(folder: Path, family: str = "llama", shard: str = "5GB", **fields):
    """A random model of transformers, saved in `folder`. Its norms are not 1, and its scores spread."""
    model_class, config_class, own = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**{**SIZES, **own, **fields})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=shard)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_are_those_of_the_original(tmp_path, family):
    theirs = original(tmp_path / "original", family)
    add_forget_gates(str(tmp_path / "original"), tmp_path / "gates", [math.inf])
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "gates")
    ids, mask = torch.randint(1, 97, (3, 45)), torch.ones(3, 45, dtype=torch.long)
    mask[1, :5] = mask[2, :17] = 0
    want, real = theirs(ids, attention_mask=mask).logits, mask.bool()
    got = ours(ids, attention_mask=mask).logits
    assert want[real].std() > 0.5 and (got - want)[real].abs().max() <= 1e-5
    # Tokens that come in parts, into a cache.
    cache, parts = None, []
    for begin, end in ((0, 30), (30, 31), (31, 45)):
        out = ours(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    assert (torch.cat(parts, 1) - want)[real].abs().max() <= 1e-5
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    written = [model.generate(ids, attention_mask=mask, **options) for model in (theirs, ours)]
    assert torch.equal(*written)


def test_weights_in_several_files_and_what_lies_beside_them(tmp_path):
    source = tmp_path / "original"
    theirs = original(source, "qwen3", shard="20KB")
    word_tokenizer(source)
    assert len([*source.glob("*.safetensors")]) > 3
    said = add_forget_gates(str(source), tmp_path / "gates", [16, 1024])
    assert "memory length 16 to 1,024 tokens" in said and "tokenizer" not in said
    files = sorted(file.name for file in (tmp_path / "gates").glob("*"))
    assert {"README.md", "config.json", "configs", "generation_config.json", "tokenizer.json"} < {*files}
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "gates")
    mlp = theirs.model.layers[1].mlp
    stacked = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    assert torch.equal(ours.decoder.layers[1].mlp.gate_proj.weight, stacked)
    gate = ours.decoder.layers[0].attn.fgate_proj
    assert not gate.weight.any()
    lengths = -1 / torch.nn.functional.logsigmoid(gate.bias.double())
    torch.testing.assert_close(lengths, torch.tensor([16.0, 64, 256, 1024], dtype=torch.float64), rtol=1e-4, atol=0)
    fields = yaml.safe_load((tmp_path / "gates/configs/model/with_gates.yaml").read_text())["config"]
    assert fields["head_dim"] == 32 and fields["qk_norm_eps"] == 1e-4 and "vocab_size" not in fields
    with pytest.raises(ExportError, match=r"gates is there already; choose another folder"):
        add_forget_gates(str(source), tmp_path / "gates")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architectures": ["Gemma2ForCausalLM"]}, "architectures is Gemma2ForCausalLM"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "rope_type is yarn"),
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}, "use_sliding_window is True"),
        ({"intermediate_size": 95}, "mlp.gate_proj.weight has shape"),
        ({"num_hidden_layers": 3}, "the source has no model.layers.2"),
    ],
)
def test_what_fox_has_not_is_refused_by_name_and_nothing_is_left(tmp_path, fields, said):
    original(tmp_path / "original")
    file = tmp_path / "original/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(ExportError, match=said):
        add_forget_gates(str(tmp_path / "original"), tmp_path / "gates")
    assert [path.name for path in tmp_path.iterdir()] == ["original"]


def test_lengths_that_cannot_be_are_refused(tmp_path):
    original(tmp_path / "original")
    for lengths in ([0], [64, 16], [1, 2, 3], [16, math.inf]):
        with pytest.raises(ExportError, match="--memory_length="):
            add_forget_gates(str(tmp_path / "original"), tmp_path / "gates", lengths)


@pytest.mark.slow
def test_training_from_it_moves_what_it_is_told_to_and_resumes_bitwise(tiny, tmp_path, finished):
    """A Transformer of this project, given gates: frozen but for them, then all with a rate of their own for gates."""
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2}
    run = Path(finished(changed(tiny, model={"name": "transformer", "config": config}, train__max_tokens=8 * STEP)))
    export(run, tmp_path / "hf", tokenizer=str(word_tokenizer(tmp_path / "tokenizer")))
    add_forget_gates(str(tmp_path / "hf"), tmp_path / "gates", [64])
    fields = yaml.safe_load((tmp_path / "gates/configs/model/with_gates.yaml").read_text())
    start = {f"model.{name}": t for name, t in load_file(tmp_path / "gates/model.safetensors").items()}
    model = {"name": fields["name"], "config": fields["config"]}
    new = changed(tiny, model=model, init_from=str(tmp_path / "gates"), datamodule__train_batch_len=64)
    new = changed(new, final_eval=False, train__max_tokens=8 * STEP)
    pattern = ["*.fgate_proj.*"]
    for changes in ({"train__only": pattern}, {"optimizer__lr_scale": 10.0, "optimizer__lr_scale_for": pattern}):
        train(changed(new, **changes))
        end = checkpoint_tensors(new["output_dir"], 8 * STEP)
        # As if it had been killed soon after its checkpoint at step 4.
        shutil.rmtree(Path(new["output_dir"]) / f"checkpoints/step-{8 * STEP:015d}")
        train(changed(new, **changes))
        again = checkpoint_tensors(new["output_dir"], 8 * STEP)
        assert "continuing from" in rank_log(new, 0) and all(torch.equal(end[name], again[name]) for name in end)
        moved = {name: (end[name] - start[name]).abs().max().item() for name in start}
        frozen = {name for name, distance in moved.items() if distance == 0}
        assert frozen == ({name for name in start if "fgate" not in name} if "train__only" in changes else set())
        assert any(".mlp." in name for name in end if name.startswith("optimizer.")) != bool(frozen)
        shutil.rmtree(new["output_dir"])
