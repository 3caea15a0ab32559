"""What can be evaluated: runs, exports, hub models; and what is refused."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from forgetting_transformer.evaluation.models import EvaluationError, fingerprint, load_model, token_losses
from forgetting_transformer.evaluation.workers import start_workers
from forgetting_transformer.training.checkpoint import Checkpointer
from forgetting_transformer.training.checkpoint.folder import CheckpointError, read_newest
from forgetting_transformer.training.export import export, load_checkpoint
from tests.evaluation.conftest import TRAIN_LENGTH, VOCABULARY


def test_a_run_and_its_export_are_the_same_model(quickstart):
    run, exported = load_model(str(quickstart.run)), load_model(str(quickstart.hf))
    assert fingerprint(run.model) == fingerprint(exported.model)
    assert (run.name, exported.name) == ("run", "hf")
    assert run.train_length == exported.train_length == TRAIN_LENGTH
    assert run.train_tokens == 8 * 4 * TRAIN_LENGTH
    assert run.bos_token_id == exported.bos_token_id == 0
    assert run.require_tokenizer().decode([2, 3]) == exported.require_tokenizer().decode([2, 3]) == "the a"
    assert AutoModelForCausalLM.from_pretrained(quickstart.hf).config.max_position_embeddings == TRAIN_LENGTH


def test_a_runs_earlier_checkpoint_is_chosen_with_a_step(quickstart, tmp_path):
    """Without one, a folder that is both is the exported model."""
    early = load_model(str(quickstart.run), step=4 * 4 * TRAIN_LENGTH)
    assert early.train_tokens == 4 * 4 * TRAIN_LENGTH
    last = load_model(str(quickstart.run))
    assert fingerprint(early.model) != fingerprint(last.model)
    with pytest.raises(EvaluationError, match=r"no valid checkpoint at step 5 .*; it holds \[512, 1024"):
        load_model(str(quickstart.run), step=5)
    with pytest.raises(EvaluationError, match="--step=5 chooses a checkpoint of a training run"):
        load_model(str(quickstart.hf), step=5)
    shutil.copytree(quickstart.run, tmp_path / "both")
    early.model.save_pretrained(tmp_path / "both")
    assert fingerprint(load_model(str(tmp_path / "both")).model) == fingerprint(early.model)
    assert load_model(str(tmp_path / "both"), step=last.train_tokens).train_tokens == last.train_tokens


def test_what_is_no_model_is_refused_in_one_line(quickstart, tmp_path):
    def refused(source: object, message: str, **options) -> None:
        with pytest.raises(EvaluationError, match=message) as caught:
            load_model(str(source), **options)
        assert "\n" not in str(caught.value)

    for source in (tmp_path / "none", "./none", "output/hf/none"):
        refused(source, f"cannot load the model .*there is no folder {source} here")
    refused(tmp_path, r"It must be a run with checkpoints, or a folder or hub id with config\.json")
    refused(quickstart.hf, r"--model='a/b' names a folder", name="a/b")
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=1, n_positions=16))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    refused(tmp_path, r"the weights of .* are damaged \(.*again")
    file.unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    refused(tmp_path, r"cannot load the model .*safetensors")
    (tmp_path / "official/checkpoints").mkdir(parents=True)
    for name in ("step-000000000001280.pt", "step-000000000001280.pt.done"):
        (tmp_path / "official/checkpoints" / name).write_bytes(b"")
    refused(tmp_path / "official", r"a run of the authors' code: evaluate its export, python save_model\.py")


@pytest.mark.parametrize("change", ["prefix", "more", "shape"])
def test_weights_that_are_not_the_models_are_refused_by_name(quickstart, tmp_path, change, capfd):
    shutil.copytree(quickstart.hf, tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    weights = load_file(file)
    gate = "model.layers.0.attn.fgate_proj.weight"
    changed, message = {
        "prefix": (
            {f"_orig_mod.{name}": weight for name, weight in weights.items()},
            r"lm_head.weight is missing, the file has _orig_mod\.\S+ \(\d+ such in all\)",
        ),
        "more": (weights | {"model.layers.9.x": torch.ones(2)}, r"the model has no model.layers.9.x \(1 such in all\)"),
        "shape": (weights | {gate: weights[gate][:, 1:].clone()}, rf"{gate} has the shape"),
    }[change]
    save_file(changed, file, metadata={"format": "pt"})
    with pytest.raises(EvaluationError, match=message) as caught:
        load_model(str(tmp_path / "hf"))
    assert "\n" not in str(caught.value) and "REPORT" not in capfd.readouterr().err


@pytest.mark.parametrize("own", [True, False])
def test_an_exported_model_whose_weights_are_not_finite_is_refused_by_name(quickstart, tmp_path, own):
    if own:
        shutil.copytree(quickstart.hf, tmp_path, dirs_exist_ok=True)
    else:
        GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if "layers.1" in name or "h.0" in name)
    weights[name].flatten()[0] = math.inf
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    message = f"{tmp_path}: {name} holds 1 of {weights[name].numel():,} values that are not finite"
    with pytest.raises(EvaluationError, match=f"^{message}"):
        load_model(str(tmp_path))
    if own:
        with pytest.raises(ValueError, match=f"^{message}"):
            AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_checkpoint_whose_weights_are_not_finite_is_refused_by_all_that_use_it(quickstart, tmp_path):
    shutil.copytree(quickstart.run, tmp_path / "run")
    checkpoint, state, model = read_newest(tmp_path / "run/checkpoints", load_checkpoint)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        model.lm_head.weight[1] = math.nan
    checkpointer = Checkpointer(tmp_path / "run/checkpoints", 2)
    checkpointer.save(2 * checkpoint.step, model, optimizer, state, {}, permanent=False)
    assert checkpointer.take_result(wait=True).error is None
    size = model.config.hidden_size
    message = rf"/step-{2 * checkpoint.step:015d}.*: lm_head.weight holds {size} of .* values that are not finite"
    with pytest.raises(EvaluationError, match=message):
        load_model(str(tmp_path / "run"))
    with pytest.raises(CheckpointError, match=message):
        export(tmp_path / "run", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_foreign_models_losses_are_those_of_its_logits(tmp_path):
    """Its files as GPT-2's on the hub: without lm_head, which is tied, without the prefix, and with masks."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(VOCABULARY), n_embd=8, n_layer=1, n_head=1, n_positions=64, bos_token_id=0)
    model = GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path)
    weights = dict(model.transformer.state_dict()) | {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "other": torch.ones(1)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = load_model(str(tmp_path))
    assert fingerprint(found.model) == fingerprint(model) and found.train_length == 64
    input_ids, labels = torch.randint(len(VOCABULARY), (2, 3, 40))
    logits = found.model(input_ids=input_ids).logits
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(token_losses(found.model, input_ids, labels), expected)


def test_an_option_that_fabric_run_has_taken_is_not_lost_silently(monkeypatch):
    monkeypatch.setenv("LT_PRECISION", "bf16")
    with pytest.raises(EvaluationError, match=r"`fabric run` takes --precision=bf16 for itself .*torchrun"):
        start_workers("cpu")
