"""Export: what is loaded elsewhere is what was trained."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import forgetting_transformer.model  # noqa: F401  (registers the classes)
from forgetting_transformer.evaluation.generation import continue_prompts
from forgetting_transformer.evaluation.models import load_model
from forgetting_transformer.training.checkpoint.folder import CheckpointError, newest_valid
from forgetting_transformer.training.export import MARK, ExportError, export, load_checkpoint, tokenizer_of_run
from forgetting_transformer.training.export.card import CARD
from forgetting_transformer.training.export.folder import save_tokenizer
from forgetting_transformer.training.records.run_directory import RunDirectory
from tests.data.corpus_helpers import prepare, write_tree
from tests.processes import ROOT, run_command
from tests.tiny import VOCAB
from tests.training.conftest import STEP, changed, refused, train, word_tokenizer
from tests.training.test_checkpoint import snapshot

pytestmark = pytest.mark.slow


def held_out_loss(folder: Path, config: dict) -> float:
    """Loss of an export over the documents that runs of the tiny configuration are evaluated on."""
    tokens = torch.from_numpy(zarr.open_array(Path(config["data_dir"]) / "tiny/heldout.zarr")[:10].astype("int64"))
    labels = tokens.reshape(20, 32)
    inputs = labels.roll(1, 1)
    inputs[:, 0] = 0
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(input_ids=inputs, labels=labels).loss.mean().item()


@pytest.mark.parametrize(("strategy", "world_size"), [("auto", 1), ("fsdp", 2)])
def test_reloaded_logits_equal_the_checkpoints(tiny, tmp_path, finished, strategy, world_size):
    run, folder = Path(finished(changed(tiny, strategy__name=strategy), world_size)), tmp_path / "hf"
    tokenizer = word_tokenizer(tmp_path / "tokenizer")
    export(run, folder, tokenizer=str(tokenizer))
    reloaded = AutoModelForCausalLM.from_pretrained(folder)
    checkpoint = newest_valid(run / "checkpoints")
    trained = load_checkpoint(checkpoint)[2]
    input_ids = torch.arange(60).reshape(2, 30) % VOCAB
    with torch.no_grad():
        assert torch.equal(reloaded(input_ids=input_ids).logits, trained(input_ids=input_ids).logits)
    # And these are the weights training ended with: they predict the corpus as the run's last evaluation says.
    val = json.loads((run / "metrics/jsonlines/val.jsonl").read_text().splitlines()[-1])["val/loss"]
    assert held_out_loss(folder, tiny) == pytest.approx(val, abs=1e-6)
    # Whoever may read the configuration may read the weights.
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
    with pytest.raises(CheckpointError, match=rf"no valid checkpoint at step 5 in .*\[{8 * STEP}, {16 * STEP}"):
        export(run, tmp_path / "other", step=5, tokenizer=str(tokenizer))
    assert AutoTokenizer.from_pretrained(folder).model_max_length == 32


def test_a_folder_that_is_not_there_or_is_no_run_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    for name, said in (("nothing", "there is no such folder"), ("empty", "it holds no checkpoints")):
        with pytest.raises(CheckpointError, match=f"^--hf_load_dir={tmp_path / name}: {said}; give the output_dir"):
            export(tmp_path / name, tmp_path / "hf")
    (tmp_path / "empty/checkpoints").mkdir()
    with pytest.raises(CheckpointError, match=r"no valid checkpoint in .*/empty/checkpoints; it holds nothing"):
        export(tmp_path / "empty", tmp_path / "hf")


def test_prompts_begin_as_training_sequences_do_and_are_padded_on_the_left(tiny, tmp_path, finished):
    """transformers' pipeline, with one prompt and a batch of unequal ones, feeds the model what it was trained on."""
    export(Path(finished(tiny)), tmp_path / "hf", tokenizer=str(word_tokenizer(tmp_path / "tokenizer")))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("w3 w4").input_ids == [0, 3, 4]
    assert tokenizer("w3 w4", add_special_tokens=False).input_ids == [3, 4]
    batch = tokenizer(["w3 w4", "w5 w6 w7 w8"], padding=True, return_tensors="pt")
    assert batch.input_ids.tolist() == [[0, 0, 0, 3, 4], [0, 5, 6, 7, 8]]
    assert batch.attention_mask[0].tolist() == [0, 0, 1, 1, 1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    together = model.generate(**batch, max_new_tokens=6, min_new_tokens=6)
    for prompt, row in zip(("w3 w4", "w5 w6 w7 w8"), together, strict=True):
        alone = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=6, min_new_tokens=6)
        assert row[-6:].tolist() == alone[0, -6:].tolist()
    write = pipeline("text-generation", model=str(tmp_path / "hf"), device="cpu")
    [[said]] = [write("w3 w4", max_new_tokens=6, min_new_tokens=6, do_sample=False)]
    expected = tokenizer.decode([3, 4, *together[0, -6:].tolist()], skip_special_tokens=True)
    # The pipeline decodes the continuation by itself, and words at its ends lose the space between them.
    assert said["generated_text"].replace(" ", "") == expected.replace(" ", "")


def two_token_tokenizer(folder: Path, template: str | None = None, **special: str) -> Path:
    """Words, `<s>` = 0 and `</s>` = 1, which the template may put around a text."""
    ids = {"<s>": 0, "</s>": 1, "<unk>": 2, "<pad>": 3} | {f"w{n}": n for n in range(4, VOCAB)}
    return word_tokenizer(folder, ids, template, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **special)


def test_a_corpus_with_two_tokens_around_texts_trains_and_its_export_stops_at_the_second(tiny, tmp_path):
    tokenizer = two_token_tokenizer(tmp_path / "tokenizer", "<s> $A </s>", pad_token="<pad>")
    words = [f"w{n}" for n in range(4, VOCAB)]
    texts = {f"{n}.txt": " ".join(words[n : n + 9] * 5) for n in range(40)}
    manifest = prepare(tmp_path / "data/two", write_tree(tmp_path / "in", texts), tokenizer=str(tokenizer), doc_len=64)
    assert (manifest["bos_token_id"], manifest["eos_token_id"]) == (0, 1)
    config = changed(tiny, data_dir=str(tmp_path / "data"), train__max_tokens=2 * STEP, skip_eval=True)
    config["datamodule"] |= {"dataset": "two", "name": "packed", "vocab_size": None, "bos_token_id": None}
    train(changed(config, model__config__eos_token_id=1))
    assert "model.config.eos_token_id=0 is not the corpus's 1; leave it unset" in refused(
        changed(config, model__config__eos_token_id=0, output_dir=str(tmp_path / "other"))
    )
    shutil.rmtree(tmp_path / "data")
    shutil.rmtree(tokenizer)  # a run keeps its own
    export(Path(config["output_dir"]), tmp_path / "hf")
    model, exported = (auto.from_pretrained(tmp_path / "hf") for auto in (AutoModelForCausalLM, AutoTokenizer))
    assert (model.config.bos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id) == (0, 1, 1)
    assert model.generation_config.pad_token_id == exported.pad_token_id == 3
    prompt = exported(["w5 w6", "w7"], padding=True, return_tensors="pt")
    assert prompt.input_ids.tolist() == [[0, 5, 6], [3, 0, 7]]
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, torch.tensor([1]), 99.0))
    assert model.generate(**prompt, max_new_tokens=8)[:, 3:].tolist() == [[1], [1]]
    evaluated = load_model(str(config["output_dir"]))
    evaluated.model.lm_head = model.lm_head
    assert evaluated.eos_token_ids == [1]
    assert continue_prompts(evaluated, np.array([[0, 5, 6]]), 8) == [""]


@pytest.mark.parametrize("template", [None, "<s> $A", "<s> $A </s>"])
def test_a_prompt_has_bos_before_it_and_nothing_behind_it(tmp_path, template):
    run = RunDirectory(tmp_path / "run")
    two_token_tokenizer(run.tokenizer, template)
    state = {"config": {"datamodule": {"dataset": "two"}}, "model_config": {"vocab_size": VOCAB, "bos_token_id": 0}}
    save_tokenizer(tokenizer_of_run(run, state), tmp_path / "hf", 32, 0)
    exported, own = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "hf", run.tokenizer))
    if template == "<s> $A":  # it does what is wanted, and has other work, such as pairs of texts
        assert str(exported.backend_tokenizer.post_processor) == str(own.backend_tokenizer.post_processor)
    assert exported("w5 w6").input_ids == [0, 5, 6] and exported("").input_ids == [0]
    assert exported("w5 w6", add_special_tokens=False).input_ids == [5, 6]


def test_another_vocabulary_than_the_models_is_refused(tmp_path):
    run, words = RunDirectory(tmp_path / "run"), str(word_tokenizer(tmp_path / "words"))
    own = {"config": {"datamodule": {"dataset": "corpus", "train_batch_len": 32}}}
    fields = {"vocab_size": VOCAB, "bos_token_id": 0}
    with pytest.raises(ValueError, match=f"words: its vocabulary has {VOCAB} ids, and the model was trained with"):
        tokenizer_of_run(run, own | {"model_config": fields | {"vocab_size": VOCAB - 1}}, words)
    with pytest.raises(ValueError, match="words: its BOS token is 0, and the model was trained with 1"):
        tokenizer_of_run(run, own | {"model_config": fields | {"bos_token_id": 1}}, words)


def test_a_model_without_a_tokenizer_is_whole(tiny, tmp_path, finished):
    line = export(Path(finished(tiny)), tmp_path / "hf")
    assert "hf, without a tokenizer (" in line and "--tokenizer FOLDER" in line and "\n" not in line
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").generation_config.pad_token_id == 0


def test_the_commands_say_what_is_wrong_and_a_seed_decides_what_is_drawn(tiny, tmp_path, finished, tokenizer):
    run, folder = finished(changed(tiny, train__max_tokens=4 * STEP)), str(tmp_path / "hf")
    done = run_command("save_model.py", "--hf_load_dir", str(tmp_path / "no"), "--hf_save_dir", folder)
    assert done.returncode == 1 and "there is no such folder" in done.stderr and "Traceback" not in done.stderr
    # A run writes without an export, and the same for the same seed.
    drawn = ["--tokenizer", tokenizer, "--prompt", "w3 w4", "--max_new_tokens", "5", "--samples", "2", "--top_p", "0.9"]
    said = [run_command("scripts/generate.py", run, *drawn, "--temperature", "1.5", "--seed", seed) for seed in "112"]
    assert said[0].stdout == said[1].stdout != said[2].stdout and said[0].stdout.count("w3 w4 w") == 2, said


#: What lies in the folder -> what is said of it.
STRANGERS = {
    "model.safetensors.index.json": "/model.safetensors.index.json is not from an export, ",
    MARK: f"/{MARK} is not from an export, ",
    "starts.jsonl": "/starts.jsonl is not from an export, ",
    "train.zarr/zarr.json": "/train.zarr is not from an export, ",
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_folder_with_files_of_somebody_else_is_refused(tiny, tmp_path, finished, tokenizer, stranger):
    """Evaluations of a run would take the export for it, and a corpus's tokenizer has other settings."""
    folder = tmp_path / "hf"
    (folder / stranger).parent.mkdir(parents=True)
    (folder / stranger).write_text("mine")
    for replace in (False, True):
        with pytest.raises(ExportError, match=f"{STRANGERS[stranger]}.*choose another --hf_save_dir") as refused:
            export(Path(finished(tiny)), folder, tokenizer=tokenizer, replace=replace)
        assert "\n" not in str(refused.value)
    assert snapshot(folder) == {stranger: b"mine"}


def test_an_export_is_replaced_by_the_next_one_and_other_files_stay(tiny, tmp_path, finished, tokenizer):
    run, folder = Path(finished(tiny)), tmp_path / "hf"
    export(run, folder, step=8 * STEP, tokenizer=tokenizer)
    before = snapshot(folder)
    (folder / "notes.txt").write_text("mine")
    export(run, folder, tokenizer=tokenizer)
    after = snapshot(folder)
    assert after["model.safetensors"] != before["model.safetensors"] and after["notes.txt"] == b"mine"
    mark = json.loads(after[MARK])
    assert mark["checkpoint"] == 20 * STEP and set(mark["files"]) == after.keys() - {MARK, "notes.txt"}
    (folder / "config.json").unlink()
    (folder / ".unfinished-export-1").mkdir()  # by an export that was killed
    assert str(folder) in export(run, folder, tokenizer=tokenizer)
    assert snapshot(folder) == after and not list(folder.glob(".*"))
    # What was trained further has the same names.
    (folder / "model.safetensors").write_bytes(after["model.safetensors"] + b" ")
    with pytest.raises(ExportError, match=f"{folder}/model.safetensors is not from an export, or has changed since"):
        export(run, folder, tokenizer=tokenizer)
    wrong = str(word_tokenizer(tmp_path / "wrong"))
    (tmp_path / "wrong/tokenizer.json").write_text("{")
    with pytest.raises(ExportError, match=f"nothing is written: --tokenizer={wrong} cannot be used"):
        export(run, tmp_path / "other", tokenizer=wrong)
    assert not (tmp_path / "other").exists()


def test_another_runs_export_is_replaced_where_that_is_asked_for_alone(tiny, tmp_path, finished, tokenizer):
    folder = tmp_path / "hf"
    run, other = Path(finished(tiny)), Path(finished(changed(tiny, optimizer__lr=5e-3, train__max_tokens=8 * STEP)))
    export(run, folder, step=8 * STEP, tokenizer=tokenizer)
    before = snapshot(folder)
    with pytest.raises(ExportError, match=rf"{folder} holds the export of another run \(.*, seed 0, 1,024 tokens\)"):
        export(other, folder, tokenizer=tokenizer)
    assert snapshot(folder) == before
    export(other, folder, tokenizer=tokenizer, replace=True)
    assert snapshot(folder)["model.safetensors"] != before["model.safetensors"]


def test_the_card_of_an_export_loads_it_and_names_no_place(tiny, tmp_path, finished, tokenizer):
    run, folder = Path(finished(tiny)), tmp_path / "hf"
    export(run, folder, tokenizer=tokenizer)
    card = (folder / CARD).read_text(encoding="utf-8")
    done = run_command("-c", card.split("```python\n")[1].split("```")[0], folder=folder)
    assert done.returncode == 0 and done.stdout.startswith("w1 w1"), done.stderr
    for file in folder.iterdir():
        for place in (run, tmp_path, tiny["data_dir"], ROOT):
            assert str(place).encode() not in file.read_bytes(), file.name


def test_a_tag_that_is_not_utf_8_is_in_the_card(tiny, tmp_path, finished, tokenizer, monkeypatch):
    def tagged(checkpoint):
        checkpoint, state, model = load_checkpoint(checkpoint)
        state["config"]["tag"] = os.fsdecode(b"caf\xe9")
        return checkpoint, state, model

    monkeypatch.setattr("forgetting_transformer.training.export.folder.load_checkpoint", tagged)
    export(Path(finished(tiny)), tmp_path / "hf", tokenizer=tokenizer)
    assert "# caf\\udce9\n" in (tmp_path / "hf" / CARD).read_text(encoding="utf-8")


def test_a_card_that_no_export_wrote_or_that_was_edited_is_kept(tiny, tmp_path, finished, tokenizer):
    run, folder = Path(finished(tiny)), tmp_path / "hf"
    folder.mkdir()
    (folder / CARD).write_text("mine")
    assert f"{CARD} there is not as an export wrote it and is kept" in export(run, folder, tokenizer=tokenizer)
    assert (folder / CARD).read_text() == "mine"
    (folder / CARD).unlink()
    assert "kept" not in export(run, folder, step=8 * STEP, tokenizer=tokenizer)
    text = (folder / CARD).read_text()
    assert f"trained on {8 * STEP:,} tokens" in text
    (folder / CARD).write_text(text + "My words.")
    for _ in range(2):
        assert "is kept" in export(run, folder, tokenizer=tokenizer)
        assert (folder / CARD).read_text() == text + "My words."
