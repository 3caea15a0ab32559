"""init_from: a new run begins with the weights of an export or of a model of the hub."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

import forgetting_transformer.model  # noqa: F401  (registers the classes)
from forgetting_transformer import training
from forgetting_transformer.training.export import MARK, export
from forgetting_transformer.training.trainer import Trainer
from tests.tiny import VOCAB
from tests.training.conftest import (
    STEP,
    before,
    blocks,
    changed,
    checkpoint_tensors,
    lines,
    losses,
    made_once,
    refused,
    train,
    word_tokenizer,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def exported(tiny, tmp_path, finished, shared_folder) -> Path:
    """A copy of what save_model.py makes of a finished run, and beside it the tokenizer that it was given."""
    once = shared_folder / "exported"
    with made_once(once) as missing:
        if missing:
            tokenizer = str(word_tokenizer(once / "tokenizer"))
            export(Path(finished(tiny)), once / "hf", tokenizer=tokenizer)
    shutil.copytree(once, tmp_path, dirs_exist_ok=True)
    return tmp_path / "hf"


def begun(config: dict) -> Trainer:
    """A trainer before its first step, in this process."""
    trainer = Trainer(training.parse(OmegaConf.create(config)))
    trainer.close()
    return trainer


def one_line(config: dict) -> str:
    """What a start is refused with, in this process."""
    with pytest.raises(training.ConfigError) as refusal:
        training.run(training.parse(OmegaConf.create(config)))
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_an_export_gives_its_weights_also_for_another_length(tiny, tmp_path, finished):
    tied = changed(tiny, model__config__tie_word_embeddings=True)
    run = finished(tied)
    export(Path(run), tmp_path / "hf", step=8 * STEP, tokenizer=str(word_tokenizer(tmp_path / "tokenizer")))
    weights = checkpoint_tensors(run, 8 * STEP)
    new = changed(tied, init_from=str(tmp_path / "hf"), seed=3, datamodule__train_batch_len=16)
    trainer = begun(changed(new, train__grad_acc_tokens=16))
    assert trainer.counters.token_count == 0 and not trainer.optimizer.state
    model = trainer.model.module
    assert not [name for name, t in model.state_dict().items() if not torch.equal(t, weights[f"model.{name}"])]
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_ranks_begin_with_the_same_weights_which_rank_0_alone_reads(tiny, exported):
    still = {"optimizer__lr": 0.0, "optimizer__weight_decay": 0.0, "strategy__name": "fsdp"}
    patch = before("training.initialisation.from_model", "find_model", 'assert os.environ["RANK"] == "0"')
    train(changed(tiny, init_from=str(exported), train__max_tokens=STEP, **still), 2, patch=patch)
    saved, stored = checkpoint_tensors(tiny["output_dir"], STEP), load_file(exported / "model.safetensors")
    assert len(stored) > 20
    assert not [name for name, tensor in stored.items() if not torch.equal(tensor, saved[f"model.{name}"])]


def test_the_run_is_a_new_one_and_says_where_its_weights_come_from(tiny, tmp_path, finished, exported):
    new = changed(tiny, init_from=str(exported), train__max_tokens=8 * STEP)
    train(new)
    assert sorted(losses(new["output_dir"])) == [n * STEP for n in range(1, 9)], "counters begin at 0"
    assert losses(new["output_dir"])[STEP] < losses(finished(tiny))[STEP] - 0.5, "it has learned before"
    origin = f"a new run, weights from {exported} ({20 * STEP:,} tokens, of debug)"
    assert blocks(new["output_dir"])[0]["start"] == origin
    (start,) = map(json.loads, (Path(new["output_dir"]) / "starts.jsonl").read_text().splitlines())
    assert start["origin"] == origin and start["step"] == 0
    assert lines(new["output_dir"], "train")[0]["train/lr"] == 0, "the schedule begins too"
    # The source may be gone: the checkpoint wins.
    shutil.rmtree(exported)
    train(changed(new, train__max_tokens=10 * STEP))
    assert f"init_from: {exported} -> /elsewhere" in refused(changed(new, init_from="/elsewhere"))
    assert f"init_from: {exported} -> None" in refused(changed(new, init_from=None))


def test_tensors_that_do_not_match_are_named_and_refused_and_nothing_is_moved(tiny, interrupted, exported):
    interrupted(tiny, 4)
    before = sorted(Path(tiny["output_dir"]).rglob("*"))

    tensors = load_file(exported / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :16].contiguous()
    tensors["model.layers.0.extra.weight"] = torch.ones(3)
    del tensors["model.norm.weight"]
    save_file(tensors, exported / "model.safetensors", metadata={"format": "pt"})
    new = changed(tiny, init_from=str(exported), resume=False, train__max_tokens=STEP)
    said = one_line(new)
    assert said == (
        f"init_from={exported} does not fit: lm_head.weight is of another shape, (64, 16) instead of (64, 32); "
        "model.layers.0.extra.weight is unexpected; model.norm.weight is missing. Train the model, and a corpus of "
        "the tokenizer, that the weights are of; or let these begin with fresh weights, and leave unexpected ones out, "
        "with "
        "init_allow=[lm_head.weight,model.layers.0.extra.weight,model.norm.weight]"
    )
    other = {"name": "hgrn2", "config": {"hidden_size": 32, "num_hidden_layers": 2, "expand_ratio": 16}}
    said = one_line(changed(new, model=other))
    assert said.count(" is ") == 8 and re.search(r"; and \d\d more\. Train .*,…\]$", said)
    assert sorted(Path(tiny["output_dir"]).rglob("*")) == before, "the old run stays where it was"
    # Those that are left are named, and so is a pattern that names nothing.
    assert "does not fit: model.norm.weight is missing. " in one_line(
        changed(new, init_allow=["lm_head.*", "*.extra.weight"])
    )
    said = one_line(changed(new, init_allow=["lm_heed.weight"]))
    assert said.startswith("init_allow=lm_heed.weight names no tensor") and "did you mean lm_head.weight?" in said
    assert said.endswith("?")
    allowed = changed(new, init_allow=["lm_head.weight", "*.extra.weight", "model.norm.weight"])
    train(changed(allowed, optimizer__lr=0.0, optimizer__weight_decay=0.0))
    weights, stored = checkpoint_tensors(tiny["output_dir"], STEP), load_file(exported / "model.safetensors")
    drawn = begun(changed(tiny, output_dir=tiny["output_dir"] + "-drawn")).model.module.state_dict()
    for name, tensor in drawn.items():
        expected = tensor if name in ("lm_head.weight", "model.norm.weight") else stored[name]
        assert torch.equal(weights[f"model.{name}"], expected), name
    assert blocks(tiny["output_dir"])[-1]["start"].endswith(
        "; fresh: lm_head.weight, model.norm.weight; not used: model.layers.0.extra.weight"
    )


def test_another_vocabulary_is_refused_unless_embeddings_may_be_fresh(tiny, tmp_path, exported):
    wider = changed(tiny, init_from=str(exported), datamodule__vocab_size=VOCAB + 6, train__max_tokens=STEP)
    said = one_line(wider)
    assert f"it has another vocabulary than the corpus ({VOCAB} ids, and the corpus {VOCAB + 6})" in said
    assert said.endswith("init_allow=[lm_head.weight,model.embeddings.weight]")
    # As many ids, and other tokens.
    shutil.copytree(tiny["data_dir"], tmp_path / "data")
    word_tokenizer(tmp_path / "data/tiny/tokenizer")
    same = changed(tiny, init_from=str(exported), data_dir=str(tmp_path / "data"), train__max_tokens=STEP)
    file = tmp_path / "data/tiny/tokenizer/tokenizer.json"
    text = file.read_text()
    swapped = text.replace('"w5"', '"w?"').replace('"w7"', '"w5"').replace('"w?"', '"w7"')
    assert swapped != text
    file.write_text(swapped)
    said = one_line(same)
    assert f"another vocabulary than the corpus (id 5 is 'w7' there and 'w5' in {exported}); " in said
    allowed = changed(same, init_allow=["lm_head.weight", "*.embeddings.weight"])
    fresh = begun(changed(allowed, output_dir=str(tmp_path / "allowed"))).model.module.state_dict()
    drawn = begun(changed(tiny, output_dir=str(tmp_path / "drawn"))).model.module.state_dict()
    for name in ("lm_head.weight", "model.embeddings.weight"):
        assert torch.equal(fresh[name], drawn[name])
    file.write_text(text)
    train(same)


def test_what_cannot_be_begun_with_is_one_line(tiny, finished, exported):
    run, folder = finished(tiny), str(exported)
    for source, changes, message in (
        ("nothing/at/all", {}, "nothing/at/all is no folder, and no model of the hub has such a name; give a folder,"),
        ("nobody/no-such-model", {}, "the hub's model of this name cannot be had"),
        (run, {}, "has no config.json with *.safetensors, and nothing else is read; give a folder"),
        (folder, {"model__config__num_heads": 4}, "trained with in model.config: num_heads=2 (not 4)"),
        (folder, {"fork_dir": run, "fork_step": 8 * STEP}, "both say what to begin with"),
        (None, {"init_allow": ["lm_head.weight"]}, "init_allow=['lm_head.weight'] has no effect without init_from"),
    ):
        said = one_line(changed(tiny, init_from=source, **changes))
        assert message in said and "init_from" in said, said


def test_without_a_network_the_hub_is_refused_on_every_rank_and_the_cache_serves(tiny, tmp_path, exported):
    new = changed(tiny, init_from="some-lab/fox", train__max_tokens=STEP)
    said = refused(new, 2)
    refusals = [line for line in said.splitlines() if "ConfigError: init_from=some-lab/fox: " in line]
    advice = "run `hf download some-lab/fox --local-dir FOLDER` elsewhere and give that folder"
    assert len(refusals) == 2 and all(advice in line for line in refusals)
    cache = tmp_path / "cache/models--some-lab--fox"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs/main").write_text("0123abc")
    shutil.copytree(exported, cache / "snapshots/0123abc")
    (cache / "snapshots/0123abc" / MARK).unlink()
    train(new, patch=f"import huggingface_hub.constants as c; c.HF_HUB_CACHE = {str(tmp_path / 'cache')!r}")
    assert "some-lab/fox, revision 0123abc" in blocks(tiny["output_dir"])[0]["start"]


def test_nothing_is_unpickled_and_what_is_damaged_is_one_line(tiny, exported):
    new, weights = changed(tiny, init_from=str(exported)), exported / "model.safetensors"
    tensors = load_file(weights)
    tensors["lm_head.weight"][0, 0] = torch.nan
    save_file(tensors, weights, metadata={"format": "pt"})
    assert "lm_head.weight holds 1 of 2,048 values that are not finite" in one_line(new)
    weights.write_bytes(weights.read_bytes()[:500])
    assert f"init_from={exported}: " in one_line(new)
    weights.unlink()
    (exported / "pytorch_model.bin").write_bytes(b"a pickle")
    assert "has no config.json with *.safetensors, and nothing else is read" in one_line(new)
