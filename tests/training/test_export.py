"""Export: what is loaded elsewhere is what was trained."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import forgetting_transformer.model  # noqa: F401  (registers the classes)
from forgetting_transformer.training.checkpoint import CheckpointError, newest_valid
from forgetting_transformer.training.export import ExportError, build_from_checkpoint, export
from tests.processes import ROOT, run_command
from tests.training.conftest import STEP, VOCAB, changed, train
from tests.waiting import HANG

pytestmark = pytest.mark.slow


def word_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{n}": n for n in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w0", bos_token="w0").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("strategy", "world_size"), [("auto", 1), ("ddp", 2), ("fsdp", 2)])
def test_reloaded_logits_equal_the_checkpoints(tiny, tmp_path, finished, strategy, world_size):
    run, folder = Path(finished(changed(tiny, strategy__name=strategy), world_size)), tmp_path / "hf"
    tokenizer = word_tokenizer(tmp_path / "tokenizer")
    export(run, folder, tokenizer=str(tokenizer))
    reloaded = AutoModelForCausalLM.from_pretrained(folder)
    checkpoint = newest_valid(run / "checkpoints")
    trained = build_from_checkpoint(checkpoint, checkpoint.trainer_state())
    input_ids = torch.arange(60).reshape(2, 30) % VOCAB
    with torch.no_grad():
        assert torch.equal(reloaded(input_ids=input_ids).logits, trained(input_ids=input_ids).logits)
    # And these are the weights training ended with: they predict the corpus as the run's last evaluation says.
    val = json.loads((run / "metrics/jsonlines/val.jsonl").read_text().splitlines()[-1])["val/loss"]
    import zarr

    tokens = torch.from_numpy(zarr.open_array(Path(tiny["data_dir"]) / "tiny/heldout.zarr")[:10].astype("int64"))
    labels = tokens.reshape(20, 32)
    inputs = labels.roll(1, 1)
    inputs[:, 0] = 0
    with torch.no_grad():
        loss = reloaded(input_ids=inputs, labels=labels).loss.mean().item()
    assert loss == pytest.approx(val, abs=1e-6)
    assert (folder / "model.safetensors").is_file()
    assert AutoTokenizer.from_pretrained(folder).model_max_length == 32


def test_generation_stops_at_the_end_of_text_token(tiny, tmp_path, finished):
    export(Path(finished(tiny)), tmp_path / "hf", tokenizer=str(word_tokenizer(tmp_path / "tokenizer")))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 0
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every token is as likely, and the first, 0, wins
    generated = model.generate(torch.tensor([[5, 6]]), max_new_tokens=10)
    assert generated.tolist() == [[5, 6, 0]]


@pytest.mark.quick
def test_any_step_can_be_exported_and_a_missing_one_is_refused(tiny, tmp_path, finished):
    run, tokenizer = Path(finished(tiny)), str(word_tokenizer(tmp_path / "tokenizer"))
    first = export(run, tmp_path / "a", step=8 * STEP, tokenizer=tokenizer)
    assert f"step-{8 * STEP:015d}" in first
    assert f"step-{20 * STEP:015d}" in export(run, tmp_path / "b", tokenizer=tokenizer)
    with pytest.raises(CheckpointError, match=rf"no valid checkpoint at step 5 in .*\[{8 * STEP}, {16 * STEP}"):
        export(run, tmp_path / "c", step=5, tokenizer=tokenizer)
    with pytest.raises(CheckpointError, match=r"no valid checkpoint in .*; it holds nothing"):
        export(tmp_path / "nothing", tmp_path / "d")


def test_the_run_keeps_its_corpus_tokenizer_and_the_export_gets_it(tiny, tmp_path):
    import shutil

    shutil.copytree(tiny["data_dir"], tmp_path / "data")
    word_tokenizer(tmp_path / "data/tiny/tokenizer")
    train(changed(tiny, data_dir=str(tmp_path / "data"), train__max_tokens=4 * STEP))
    shutil.rmtree(tmp_path / "data")
    export(Path(tiny["output_dir"]), tmp_path / "hf")
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").decode([3, 4]) == "w3 w4"


def test_without_a_tokenizer_the_weights_are_written_and_the_message_says_how_to_go_on(tiny, tmp_path, finished):
    with pytest.raises(ExportError, match=r"the model is in .*hf, but without a tokenizer .*--tokenizer"):
        export(Path(finished(tiny)), tmp_path / "hf")
    assert (tmp_path / "hf/model.safetensors").is_file()


def test_the_commands_export_and_generate(tiny, tmp_path, finished):
    tokenizer = word_tokenizer(tmp_path / "tokenizer")
    arguments = ["--hf_load_dir", finished(changed(tiny, train__max_tokens=4 * STEP)), "--hf_save_dir", str(tmp_path / "hf")]
    command = [sys.executable, "save_model.py", *arguments, "--tokenizer", str(tokenizer)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0 and "is now" in done.stdout, done.stderr
    done = run_command("scripts/generate.py", str(tmp_path / "hf"), "--prompt", "w3 w4", "--max_new_tokens", "5")
    assert done.returncode == 0 and done.stdout.startswith("w3 w4"), done.stderr
    done = run_command("save_model.py", "--hf_load_dir", str(tmp_path / "no"), "--hf_save_dir", str(tmp_path / "hf"))
    assert done.returncode == 1 and "no valid checkpoint" in done.stderr and "Traceback" not in done.stderr
