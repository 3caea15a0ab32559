"""A training checkpoint of the authors' code is exported and continued here, and nothing in it is run."""

import os
from pathlib import Path

import pytest
import torch
import yaml

from forgetting_transformer.training.checkpoint.folder import CheckpointError
from forgetting_transformer.training.export import export, official_checkpoint
from forgetting_transformer.training.export.official_checkpoint import import_run, load_model
from forgetting_transformer.training.records.run_directory import RunDirectory
from tests.processes import run_here
from tests.tiny import VOCAB
from tests.training.conftest import (
    STEP,
    assert_same_tensors,
    changed,
    lines,
    losses,
    rank_log,
    refused,
    train,
)
from tests.training.official import official_run

pytestmark = pytest.mark.slow
AT = 8 * STEP


@pytest.fixture(autouse=True)
def tiny_vocabulary(monkeypatch):
    """LongCrawl64's is as large as that of the tiny corpus."""
    monkeypatch.setattr(official_checkpoint, "_GPT2_IDS", VOCAB)
    monkeypatch.setattr(official_checkpoint, "_GPT2_BOS", 0)


@pytest.fixture
def official(tiny, finished, tmp_path) -> Path:
    """A run of the authors' code at step 8."""
    official_run(Path(finished(tiny)), tmp_path / "official", AT)
    return tmp_path / "official"


def test_it_goes_on_where_it_was(tiny, official, finished, capsys):
    """The run that was not moved is the measure: the same losses, rates and windows of loss by position."""
    before = {path: path.stat().st_mtime_ns for path in official.rglob("*")}
    assert not run_here("scripts/import_checkpoint.py", str(official), tiny["output_dir"])
    assert "holds the run at 1,024 of 2,560 tokens" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in official.rglob("*")}
    assert "model.config.num_heads: 2 -> 4" in refused(changed(tiny, model__config__num_heads=4))
    checkpoints = Path(tiny["output_dir"], "checkpoints").rename(official.with_name("elsewhere"))
    assert "says that a checkpoint was finished" in refused(tiny), "a lost import does not start over"
    checkpoints.rename(Path(tiny["output_dir"], "checkpoints"))
    train(tiny)
    straight = finished(tiny)
    ours = losses(tiny["output_dir"])
    assert ours == {step: loss for step, loss in losses(straight).items() if step > AT}
    for name in ("train/lr", "train/batch_count", "train/flop_count"):
        assert lines(tiny["output_dir"], "train")[0][name] == lines(straight, "train")[8][name]
    windows = [lines(folder, "train_eval")[position] for folder, position in ((tiny["output_dir"], 0), (straight, 1))]
    assert windows[0]["train_eval/loss_avg_len_32"] == windows[1]["train_eval/loss_avg_len_32"]
    assert lines(tiny["output_dir"], "resume")[0]["resume/resume_step"] == AT
    assert "not bitwise from here" not in rank_log(tiny, 0), "there is nothing of this project's to compare with"


@pytest.mark.parametrize("numbered", [False, True], ids=["by name (FSDP)", "by number (DDP)"])
def test_every_tensor_finds_its_parameter(tiny, finished, tmp_path, numbered):
    run = Path(finished(tiny))
    official_run(run, tmp_path / "official", AT, numbered)
    import_run(tmp_path / "official", tmp_path / "imported", AT)
    assert_same_tensors(str(tmp_path / "imported"), str(run), AT)


def test_another_step_and_a_checkpoint_that_was_not_finished_are_not_there(official, tmp_path):
    with pytest.raises(CheckpointError, match=rf"no checkpoint of the authors' code at step 5 in .*\[{AT}\]"):
        export(official, tmp_path / "out", step=5)
    (official / f"checkpoints/step-{AT:015d}.pt.done").unlink()
    for use in (import_run, export):
        with pytest.raises(CheckpointError, match=r"no step-\*.pt with a .pt.done beside it"):
            use(official, tmp_path / "out")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("made_by_a_checkpoint",)


def test_code_in_it_is_not_run(official, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = official / f"checkpoints/step-{AT:015d}.pt"
    torch.save({"model": Evil()}, file)
    with pytest.raises(CheckpointError, match=r"cannot be used, or is not what the authors' code .*\(UnpicklingError"):
        load_model(RunDirectory(official))
    assert not (tmp_path / "made_by_a_checkpoint").exists()


def edited(file: Path, **values) -> None:
    torch.save(torch.load(file, weights_only=False) | values, file)


def test_a_damaged_one_is_one_line(official, tmp_path):
    file = official / f"checkpoints/step-{AT:015d}.pt"
    whole = file.read_bytes()

    def problem() -> str:
        with pytest.raises(CheckpointError) as error:
            import_run(official, tmp_path / "imported")
        file.write_bytes(whole)
        assert str(file) in str(error.value) and "\n" not in str(error.value)
        assert not (tmp_path / "imported").exists()
        return str(error.value)

    file.write_bytes(whole[: len(whole) // 2])
    assert "cannot be used" in problem()
    edited(file, batch_count=9)
    assert "it counts 1024 tokens in 9 batches" in problem()
    edited(file, optimizer={"state": {}, "param_groups": []})
    assert "(KeyError: " in problem()
    weights = torch.load(file, weights_only=False)["model"]
    weights["lm_head.weight"][0, 0] = torch.nan
    edited(file, model=weights)
    assert "lm_head.weight holds 1 of 2,048 values that are not finite" in problem()


def test_its_configuration_is_held_to_what_is_known(official, tmp_path):
    config = yaml.safe_load((official / "config.yaml").read_text())

    def problem(**sections) -> str:
        text = yaml.safe_dump(config | {name: config[name] | values for name, values in sections.items()})
        (official / "config.yaml").write_text(text)
        with pytest.raises(CheckpointError) as error:
            import_run(official, tmp_path / "imported")
        assert "config.yaml" in str(error.value) and "\n" not in str(error.value)
        return str(error.value)

    assert "is not what the authors' code writes (KeyError: 'system')" in problem(model={"_target_": "posix.system"})
    assert "${…}" in problem(train={"max_tokens": "${oc.env:HOME}"})
    (official / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"config\.yaml cannot be used"):
        import_run(official, tmp_path / "imported")


def test_another_vocabulary_than_longcrawl64s_is_not_imported(official, tmp_path, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"vocabulary of 64 ids is not LongCrawl64's"):
        import_run(official, tmp_path / "imported")
    assert not (tmp_path / "imported").exists()
