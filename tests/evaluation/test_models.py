"""What can be evaluated: runs, exports, hub models; and what is refused."""

import functools
import logging
import math
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from forgetting_transformer.analysis import page
from forgetting_transformer.evaluation.models import EvaluationError, fingerprint, load_model, token_losses
from forgetting_transformer.evaluation.workers import start_workers
from forgetting_transformer.training.checkpoint import Checkpointer
from forgetting_transformer.training.checkpoint.folder import CheckpointError, read_newest
from forgetting_transformer.training.export import export, load_checkpoint
from forgetting_transformer.training.export.averaging import average
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


@pytest.mark.slow
def test_a_folder_whose_name_is_not_utf_8_is_like_any_other(quickstart, tmp_path):
    """The libraries in Rust that read weights and tokenizers refuse such a path."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    shutil.copytree(quickstart.run, folder)
    export(folder, folder / "hf")
    run, exported = load_model(str(folder)), load_model(str(folder / "hf"))
    assert fingerprint(run.model) == fingerprint(exported.model) == fingerprint(load_model(str(quickstart.hf)).model)
    assert run.require_tokenizer().decode([2, 3]) == exported.require_tokenizer().decode([2, 3]) == "the a"
    page.write_report([folder, quickstart.run], [], folder / "report.html")
    assert "caf\\udce9" in (folder / "report.html").read_text(encoding="utf-8")


def test_a_runs_earlier_checkpoint_is_another_model(quickstart):
    early = load_model(str(quickstart.run), step=4 * 4 * TRAIN_LENGTH)
    assert early.train_tokens == 4 * 4 * TRAIN_LENGTH
    assert fingerprint(early.model) != fingerprint(load_model(str(quickstart.run)).model)
    with pytest.raises(EvaluationError, match=r"no valid checkpoint at --step=5 .*; it holds 512, 1024"):
        load_model(str(quickstart.run), step=5)
    with pytest.raises(EvaluationError, match="--step=5 chooses a checkpoint of a training run"):
        load_model(str(quickstart.hf), step=5)


def test_a_model_trained_with_hugging_faces_loss_is_evaluated_like_any_other(quickstart, tmp_path):
    AutoModelForCausalLM.from_pretrained(quickstart.hf, loss="causal_lm").save_pretrained(tmp_path)
    ids = torch.arange(8)[None]
    losses = [token_losses(load_model(str(folder)).model, ids, ids.roll(-1, 1)) for folder in (tmp_path, quickstart.hf)]
    assert losses[0].shape == ids.shape and torch.equal(*losses)


def test_a_run_of_the_authors_code_is_refused_with_the_way_to_evaluate_it(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in ("step-000000000001280.pt", "step-000000000001280.pt.done"):
        (tmp_path / "checkpoints" / name).write_bytes(b"")
    with pytest.raises(
        EvaluationError, match=r"a run of the authors' code: evaluate its export, python save_model\.py"
    ):
        load_model(str(tmp_path))


def test_a_folder_that_is_not_there_is_no_hub_id(tmp_path):
    for source in (str(tmp_path / "none"), "./none", "output/hf/none"):
        with pytest.raises(EvaluationError, match=f"^there is no folder {source}; give"):
            load_model(source)


def test_what_is_no_model_is_refused(tmp_path, quickstart):
    with pytest.raises(EvaluationError, match=r"neither a training run .* nor a model in Hugging Face format"):
        load_model(str(tmp_path))
    with pytest.raises(EvaluationError, match=r"--model='a/b' names a folder"):
        load_model(str(quickstart.hf), name="a/b")


def test_pickled_weights_are_refused(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=1, n_positions=16))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(EvaluationError, match=r"cannot load the model .*safetensors"):
        load_model(str(tmp_path))


def test_damaged_weights_are_one_line(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=1, n_positions=16))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(EvaluationError, match=r"the weights of .* are damaged \(.*again") as caught:
        load_model(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", ["prefix", "gone", "more", "shape"])
def test_weights_that_are_not_the_models_are_refused_by_name(quickstart, tmp_path, change, capfd):
    shutil.copytree(quickstart.hf, tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    weights = load_file(file)
    gate = "model.layers.0.attn.fgate_proj.weight"
    changed, message = {
        "prefix": (
            {f"_orig_mod.{name}": weight for name, weight in weights.items()},
            rf"lm_head.weight is missing \({len(weights)} in all; \d+ belong to another model, among them _orig_mod",
        ),
        "gone": (
            {name: weight for name, weight in weights.items() if name != gate},
            rf"{gate} is missing \(1 in all\)",
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
    checkpointer = Checkpointer(tmp_path / "run/checkpoints", 2, 0, 1)
    checkpointer.save(2 * checkpoint.step, model, optimizer, state, {}, permanent=False)
    assert checkpointer.finished(wait=True).error is None
    size = model.config.hidden_size
    message = rf"/step-{2 * checkpoint.step:015d}.*: lm_head.weight holds {size} of .* values that are not finite"
    with pytest.raises(EvaluationError, match=message):
        load_model(str(tmp_path / "run"))
    for use in (export, functools.partial(average, last=2)):
        with pytest.raises(CheckpointError, match=message):
            use(tmp_path / "run", tmp_path / "hf")
        assert not (tmp_path / "hf").exists()


def test_tied_weights_and_what_other_models_store_besides_are_no_reason_to_refuse(tmp_path):
    """As GPT-2's files on the hub: without lm_head, without the prefix, and with masks."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=1, n_positions=16))
    model.save_pretrained(tmp_path)
    weights = dict(model.transformer.state_dict())
    save_file(
        weights | {"h.0.attn.bias": torch.ones(1, 1, 16, 16), "other": torch.ones(1)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert fingerprint(load_model(str(tmp_path)).model) == fingerprint(model)


def test_a_folder_with_a_run_and_an_exported_model_is_not_guessed_about(quickstart, tmp_path):
    shutil.copytree(quickstart.run, tmp_path / "both")
    shutil.copytree(quickstart.hf, tmp_path / "both", dirs_exist_ok=True)
    with pytest.raises(EvaluationError, match=r"both holds both a training run .* and a model .*--step=") as caught:
        load_model(str(tmp_path / "both"))
    assert "\n" not in str(caught.value)
    early = load_model(str(tmp_path / "both"), step=4 * 4 * TRAIN_LENGTH)
    assert early.train_tokens == 4 * 4 * TRAIN_LENGTH
    # A folder of this name that no run made is the model's own business.
    shutil.copytree(quickstart.hf, tmp_path / "hf")
    (tmp_path / "hf/checkpoints").mkdir()
    assert load_model(str(tmp_path / "hf")).train_tokens == load_model(str(quickstart.run)).train_tokens


def test_a_foreign_models_losses_are_those_of_its_own_logits(tmp_path, monkeypatch):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(VOCABULARY), n_embd=8, n_layer=1, n_head=1, n_positions=64, bos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = load_model(str(tmp_path)).model
    assert load_model(str(tmp_path)).train_length == 64
    input_ids, labels = torch.randint(len(VOCABULARY), (2, 3, 40))
    logits = model(input_ids=input_ids).logits
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    # Slices of ten tokens: what is held at once must not change the result.
    monkeypatch.setattr("forgetting_transformer.evaluation.models._MAX_LOGITS", 10 * len(VOCABULARY))
    calls = []
    model.lm_head.register_forward_hook(lambda module, args, out: calls.append(out.shape[0]))
    torch.testing.assert_close(token_losses(model, input_ids, labels), expected)
    assert calls[-12:] == [10] * 12, "the output layer must be run on slices"


def test_a_model_whose_logits_are_changed_after_the_output_layer_still_gets_its_own_losses(tmp_path, caplog):
    class Capped(GPT2LMHeadModel):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = 0.1 * torch.tanh(output.logits / 0.1)
            return output

    torch.manual_seed(0)
    model = Capped(
        GPT2Config(vocab_size=23, n_embd=8, n_layer=1, n_head=1, n_positions=64, initializer_range=1.0)
    ).eval()
    input_ids, labels = torch.randint(23, (2, 3, 40))
    expected = torch.nn.functional.cross_entropy(
        model(input_ids=input_ids).logits.transpose(1, 2), labels, reduction="none"
    )
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(token_losses(model, input_ids, labels), expected)
    assert "all logits are computed at once" in caplog.text


def test_an_option_that_fabric_run_has_taken_is_not_lost_silently(monkeypatch):
    monkeypatch.setenv("LT_PRECISION", "bf16")
    with pytest.raises(EvaluationError, match=r"`fabric run` takes --precision=bf16 for itself .*torchrun"):
        start_workers("cpu")
