"""Several held-out sets: each has its own losses, is checked before the first step, and is free to change on resume."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models

from forgetting_transformer import training
from forgetting_transformer.analysis.runs import read_run
from tests.data.mirror import serve
from tests.evaluation.scripts import run_script
from tests.tiny import DOC_LEN, VOCAB
from tests.training.conftest import (
    HEARD,
    STEP,
    STOP,
    Job,
    assert_same_run,
    before,
    changed,
    lines,
    made_once,
    refused,
    train,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def sets(shared_folder) -> Path:
    """Folders of corpora of which only the held-out array is there: "easy" repeats itself, "hard" is random."""
    folder = shared_folder / "eval_sets"
    with made_once(folder) as missing:
        if missing:
            generator = np.random.default_rng(1)
            hard = generator.integers(1, VOCAB, size=(24, DOC_LEN)).astype(np.uint16)
            easy = np.repeat(generator.integers(1, VOCAB, size=(6, 1)), DOC_LEN, axis=1).astype(np.uint32)
            for name, tokens in (("hard", hard), ("easy", easy)):
                zarr.create_array(folder / name / "heldout.zarr", data=tokens, chunks=(8, 32))
    return folder


@pytest.fixture
def config(tiny, sets) -> dict:
    tiny = changed(tiny, eval_sets={"easy": str(sets / "easy"), "hard": str(sets / "hard")})
    return changed(tiny, train__max_tokens=12 * STEP, eval_interval=4 * STEP)


def untimed(entries: list[dict]) -> list[dict]:
    return [
        {key: value for key, value in entry.items() if not key.endswith(("_time", "per_second"))} for entry in entries
    ]


@pytest.mark.quick
def test_each_set_has_losses_of_its_own_and_the_default_is_as_without(config, finished, sets):
    run, alone = finished(config), finished(changed(config, eval_sets={}))
    assert untimed(lines(run, "val")) == untimed(lines(alone, "val"))
    assert [entry["step"] for entry in lines(run, "val_hard")] == [n * STEP for n in (4, 8, 12)]
    last = {name: lines(run, f"val_{name}")[-1] for name in ("easy", "hard")}
    assert last["easy"]["val_easy/val_token_count"] == 6 * DOC_LEN, "all, where eval_tokens are more"
    assert last["hard"]["val_hard/val_token_count"] == 10 * DOC_LEN == config["datamodule"]["eval_tokens"]
    assert last["hard"]["val_hard/path"] == str(sets / "hard/heldout.zarr")
    assert last["easy"]["val_easy/loss"] != last["hard"]["val_hard/loss"]
    for name in ("easy", "hard"):
        with np.load(Path(run) / f"metrics/npz/val_{name}/step-{12 * STEP:015d}.npz") as arrays:
            loss_T = arrays[f"val_{name}/loss_per_token"]
        assert loss_T.shape == (32,) and loss_T.mean() == pytest.approx(last[name][f"val_{name}/loss"])
    assert "eval_sets.hard" in (Path(run) / "logs/rank-0.log").read_text()
    assert "held-out loss of hard" in (Path(run) / "logs/rank-0.log").read_text()


def test_a_set_that_is_the_corpus_has_its_loss(config, finished):
    """Relative to data_dir, as datamodule.dataset is."""
    run = finished(changed(config, eval_sets={"again": "tiny"}, train__max_tokens=4 * STEP))
    for own, other in zip(lines(run, "val"), lines(run, "val_again"), strict=True):
        assert own["val/loss"] == other["val_again/loss"]


def test_several_processes_find_the_same_losses(config, finished):
    one, several = finished(config), finished(changed(config, strategy__name="fsdp"), 2)
    for kind in ("val_easy", "val_hard"):
        expected = [entry[f"{kind}/loss"] for entry in lines(one, kind)]
        assert [entry[f"{kind}/loss"] for entry in lines(several, kind)] == pytest.approx(expected, abs=1e-4)


def test_a_url_is_read_and_packed_and_other_corpora_have_sets_too(config, sets, finished, tmp_path):
    with serve(sets) as mirror:
        remote = changed(
            config, eval_sets={"hard": f"{mirror.url}/hard"}, datamodule__cache_dir=str(tmp_path / "cache")
        )
        train(remote)
    expected = [entry["val_hard/loss"] for entry in lines(finished(config), "val_hard")]
    assert [entry["val_hard/loss"] for entry in lines(remote["output_dir"], "val_hard")] == expected
    for name, parts in (("packed", None), ("mixture", {"tiny": 1})):
        other = changed(config, datamodule__name=name, train__max_tokens=4 * STEP)
        other = changed(other, datamodule__parts=parts) if parts else other
        assert len(lines(finished(other), "val_hard")) == 1


def test_comparisons_have_every_set(config, finished, sets, tmp_path):
    other = changed(config, model__label="other", model__config__qk_norm=False)
    said = run_script("scripts/compare.py", finished(config), finished(other), "--out", tmp_path / "compared")
    assert said.returncode == 0, said.stderr
    assert "training tokens: held-out loss on hard, nats per token" in said.stdout
    assert f"{lines(finished(other), 'val_easy')[-1]['val_easy/loss']:.4f}" in said.stdout
    assert (tmp_path / "compared/compare_hard.png").is_file() and (tmp_path / "compared/compare.png").is_file()
    # Another set under the same name, and one that only some runs have.
    misled = finished(changed(other, eval_sets={"hard": str(sets / "easy")}))
    said = run_script("scripts/compare.py", finished(config), misled, "--out", tmp_path / "misled")
    assert "the runs have different texts under the name hard: their losses on them cannot be compared" in said.stdout
    assert "on easy" not in said.stdout


# Resume -------------------------------------------------------------------------------------------------------


def test_an_evaluation_that_was_broken_off_goes_on_with_the_sets_that_have_no_line(config, finished):
    """The signal comes while "easy" is evaluated: the corpus's own loss is there, those of the sets are not."""
    easy = "kind == 'eval' and self.name == 'eval_sets.easy' and trainer.counters.batch_count == 8"
    place, arguments = "training.callbacks.held_out.HeldOut", "self, trainer, kind"
    patch = before(place, "on_interval", (STOP + HEARD).replace("self", "trainer"), easy, arguments)
    job = Job(config, patch=patch)
    assert job.wait() == [0], job.errors()
    run = config["output_dir"]
    assert [len(lines(run, kind)) for kind in ("val", "val_easy", "val_hard")] == [2, 1, 1]
    train(config)
    assert_same_run(finished(config), run)
    for kind in ("val", "val_easy", "val_hard"):
        assert untimed(lines(run, kind)) == untimed(lines(finished(config), kind))


def test_sets_may_change_and_a_resume_cuts_their_lines(config, finished, sets):
    run = config["output_dir"]
    shutil.copytree(finished(config), run)
    shutil.rmtree(Path(run) / f"checkpoints/step-{12 * STEP:015d}")
    train(changed(config, eval_sets={"new": str(sets / "hard")}))
    assert [entry["step"] for entry in lines(run, "val_hard")] == [4 * STEP, 8 * STEP], "cut at the checkpoint"
    assert not (Path(run) / f"metrics/npz/val_hard/step-{12 * STEP:015d}.npz").exists()
    expected = {entry["step"]: entry["val_hard/loss"] for entry in lines(finished(config), "val_hard")}
    # The checkpoint at step 8 was due for an evaluation, which the new set has not had.
    assert {entry["step"]: entry["val_new/loss"] for entry in lines(run, "val_new")} == {
        step * STEP: expected[step * STEP] for step in (8, 12)
    }
    train(config | {"eval_sets": {"late": str(sets / "easy")}})
    assert [entry["step"] for entry in lines(run, "val_late")] == [12 * STEP], "a finished run is evaluated on it"
    assert read_run(Path(run)).eval_sets == ["easy", "hard", "late", "new"]


# Refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"../up": "x"}, r"eval_sets: the name '\.\./up' must be of letters, digits"),
        ({"": "x"}, "must be of letters"),
        ({"ema": "x"}, "is that of a file of runs"),
        ({"code": ""}, r"eval_sets\.code= is empty"),
        (["code"], r"eval_sets=\['code'\] must be a mapping"),
    ],
)
def test_odd_names_and_what_is_no_path_are_refused_by_name(tiny, value, message):
    with pytest.raises(training.ConfigError, match=message) as refusal:
        training.parse(OmegaConf.create(tiny | {"eval_sets": value}))
    assert "\n" not in str(refusal.value)


def test_what_cannot_be_evaluated_is_refused_before_the_first_step(config, sets, tmp_path):
    def said(path: Path | str, **changes) -> str:
        text = refused(changed(config, eval_sets={"code": str(path)}, **changes))
        assert not (Path(config["output_dir"]) / "metrics").exists()
        line = text.strip().splitlines()[-1]
        assert f"DataError: eval_sets.code={path}: " in line
        return line

    assert "no held-out array at" in said(sets / "hrad") and "did you mean 'hard'?" in said(sets / "hrad")
    zarr.create_array(tmp_path / "short/heldout.zarr", data=np.ones((4, 40), dtype=np.uint16), chunks=(4, 40))
    assert "datamodule.eval_batch_len=32 must divide" in said(tmp_path / "short")
    # Another number of ids, another BOS token, and the same numbers of another tokenizer.
    shutil.copytree(sets / "hard", tmp_path / "other")
    manifest = tmp_path / "other/manifest.json"
    manifest.write_text(json.dumps({"vocab_size": VOCAB + 1, "bos_token_id": 0}))
    assert "has 65 ids, and the corpus" in said(tmp_path / "other")
    manifest.write_text(json.dumps({"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1}))
    assert "has 1 as its EOS token, and the corpus" in said(tmp_path / "other")
    manifest.write_text(json.dumps({"vocab_size": VOCAB, "bos_token_id": 0}))
    shutil.copytree(config["data_dir"], tmp_path / "data")
    for folder, first in ((tmp_path / "other", "b"), (tmp_path / "data/tiny", "a")):
        (folder / "tokenizer").mkdir()
        words = Tokenizer(models.WordLevel({first: 0, "c": 1}, unk_token="c"))
        words.save(str(folder / "tokenizer/tokenizer.json"))
    line = said(tmp_path / "other", data_dir=str(tmp_path / "data"))
    assert "id 0 is 'b' there and 'a' in" in line and "with another tokenizer; prepare it again" in line


def test_sets_are_not_read_where_nothing_is_evaluated_and_the_log_says_so(config):
    train(changed(config, eval_sets={"code": "not there"}, skip_eval=True, train__max_tokens=STEP))
    log = (Path(config["output_dir"]) / "logs/rank-0.log").read_text()
    assert "WARNING eval_sets is not evaluated, because of skip_eval=true; set skip_eval=false" in log


def test_a_name_that_gets_other_texts_is_refused(config, sets):
    """Their losses would stand in one file, and be one curve and one row of a comparison."""
    first = changed(config, eval_sets={"web": str(sets / "hard")}, train__max_tokens=4 * STEP)
    train(first)
    other = changed(first, eval_sets={"web": str(sets / "easy")})
    said = f"eval_sets.web was {sets / 'hard/heldout.zarr'} so far in this run, and {sets / 'easy/heldout.zarr'} has"
    assert said in refused(other)
    train(
        changed(first, eval_sets={"web": str(sets / "hard"), "web_2": str(sets / "easy")}, train__max_tokens=5 * STEP)
    )
