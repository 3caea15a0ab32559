"""A step that was trained is run again: the same tokens, the same loss, the same gradient norm."""

import errno
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

from tests.training.conftest import STEP, changed, train
from tests.training.test_export import word_tokenizer
from tests.training.test_resume import lines, losses

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import replay as command


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus) -> dict:
    from tests.training import conftest

    tiny = changed(conftest.tiny.__wrapped__(corpus, tmp_path_factory.mktemp("replay")), strategy__name="fsdp")
    train(tiny, 2)
    return tiny


@pytest.mark.slow
def test_loss_and_norm_are_the_logged_ones(finished, tmp_path, capsys):
    run = finished["output_dir"]
    for step in (1, 9, 17):  # from the initial weights, and right after two checkpoints that stay
        arguments = [f"output_dir={run}", f"step={step * STEP}", "device=cpu", f"out={tmp_path / 'step.npz'}"]
        assert command.main(arguments) == 0, capsys.readouterr().err
        said = capsys.readouterr().out
        arrays = np.load(tmp_path / "step.npz")
        assert arrays["loss_BT"].mean() == pytest.approx(losses(run)[step * STEP], abs=1e-5)
        logged = next(e for e in lines(run, "train") if e["step"] == step * STEP)["train/global_grad_norm"]
        assert f"gradient norm {logged:.4g}"[:-1] in said
        tokens = zarr.open_array(Path(finished["data_dir"]) / "tiny/train.zarr")[:]
        first = 4 * (step - 1)
        assert np.array_equal(arrays["labels_BT"], tokens[first : first + 4, :32])
        assert "older than" not in said
    assert "weights: the checkpoint at 2,048 tokens" in said
    for part in (
        "0–0",
        "16–31",
        "layer 0",
        "layer 1",
        "embeddings",
        "norm",
        "lm_head",
        "f mean",
        "document 64, tokens 0–31",
    ):
        assert part in said, said


def test_text_is_decoded_and_older_weights_are_said_to_be(finished, tmp_path, capsys):
    tokenizer = word_tokenizer(tmp_path / "tokenizer")
    arguments = [f"output_dir={finished['output_dir']}", f"step={12 * STEP}", f"tokenizer={tokenizer}", "sequences=1"]
    assert command.main([*arguments, "device=cpu"]) == 0
    said = capsys.readouterr().out
    assert said.count("hardest:") == 1 and "'w" in said
    assert f"the checkpoint at {8 * STEP:,} tokens, 3 steps older" in said


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("forgetting_transformer.training.replay.replay", lambda *_: pytest.fail("it has begun"))
    (tmp_path / "file").touch()
    (tmp_path / "folder.npz").mkdir()
    for out, written, why in (
        ("none/step.npz", "none/step.npz", "No such file or directory"),
        ("file/step", "file/step.npz", "Not a directory"),
        ("folder", "folder.npz", "Is a directory"),
    ):
        assert command.main(["output_dir=run", "step=128", f"out={tmp_path / out}"]) == 1
        assert capsys.readouterr().err == (
            f"error: out={tmp_path / out}: {tmp_path / written} cannot be written ({why}); give a file in a folder "
            "where you may write\n"
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.npz"]


def test_a_look_whether_a_file_can_be_written_changes_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("old.npz", **dict.fromkeys(command.ARRAYS, np.zeros(1)))
    content = Path("old.npz").read_bytes()
    command.check_out("old")
    command.check_out("new.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["old.npz"] and Path("old.npz").read_bytes() == content
    np.savez("other.npz", weights=np.zeros(1))
    Path("text.npz").write_text("text")
    for name in ("other.npz", "text"):
        with pytest.raises(ValueError, match=rf"^out={name}: .* is not of a replay; name another"):
            command.check_out(name)


def test_a_disk_that_is_full_at_the_end_is_answered_with_the_key(finished, tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "savez_compressed", full)
    out = tmp_path / "step.npz"
    assert command.main([f"output_dir={finished['output_dir']}", "step=128", "device=cpu", f"out={out}"]) == 1
    assert f"error: out={out}: {out} cannot be written (No space left on device); " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step=128"], "output_dir=… and step=… are needed"),
        (["output_dir={run}", "steps=128"], "'steps=128': give key=value, with one of output_dir, step"),
        (["output_dir={run}", "step=many"], "'step=many'"),
        (["output_dir={run}", "step=130"], "use step=128 or step=256"),
        (["output_dir=/nonexistent", "step=128"], "no valid checkpoint in /nonexistent/checkpoints"),
        (["output_dir={run}", "step=128", "data_dir=/nonexistent"], "no token array at /nonexistent/tiny/train.zarr"),
    ],
)
def test_what_cannot_be_replayed_is_refused(finished, capsys, arguments, message):
    assert command.main([argument.format(run=finished["output_dir"]) for argument in arguments]) == 1
    assert message in capsys.readouterr().err
