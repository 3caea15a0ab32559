"""A run's folder is read at any time of its life; what is missing or damaged is named."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.analysis.runs import (
    Run,
    read_metrics,
    read_position_losses,
    read_run,
    run_names,
)
from tests.analysis.conftest import (
    MakeRun,
    add_callbacks,
    is_picture,
    write_lines,
    write_losses_by_position,
)
from tests.processes import load_script

plot_run = load_script("plot_run")


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    path = write_lines(tmp_path, "train", [{"step": 1, "train/loss": 9.0}])
    for half in ('{"step": 2, "train/lo', '{"step"', "\ud800é"):
        path.write_bytes(b'{"step": 1, "train/loss": 9.0}\n' + half.encode("utf-8", "surrogatepass")[:-1])
        assert read_metrics(path) == [{"step": 1, "train/loss": 9.0}]
    path.write_text('{"step": 1}\n{"step": 2}')
    assert [record["step"] for record in read_metrics(path)] == [1, 2], "a whole one without newline counts"


@pytest.mark.parametrize("line", ["{broken", '{"loss": 3}'])
def test_another_broken_line_is_an_error_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2"):
        read_metrics(path)


def test_lines_that_a_resumed_run_logged_again_replace_the_first_ones(tmp_path: Path) -> None:
    records = [{"step": s, "try": 1} for s in (1, 2, 3, 4)] + [{"step": s, "try": 2} for s in (3, 4, 5)]
    path = write_lines(tmp_path, "train", records)
    assert [(r["step"], r["try"]) for r in read_metrics(path)] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]


def test_losses_are_of_the_lines_that_have_one(tmp_path: Path) -> None:
    write_lines(tmp_path, "train", [{"step": 1}, {"step": 2, "train/loss": 5.0}, {"step": 3, "train/loss": 4.0}])
    run = read_run(tmp_path, "run")
    assert run.train.tokens.tolist() == [2, 3] and run.train.values.tolist() == [5.0, 4.0]
    assert not run.heldout.tokens.size and run.info("train_data") == {}
    assert Run(tmp_path, "run", until=2).train.tokens.tolist() == [2]


def test_the_newest_loss_at_every_position_is_read_and_held_out_comes_first(tmp_path: Path) -> None:
    write_losses_by_position(tmp_path, "train_eval", 900, np.array([9.0, 8.0]))
    assert [*read_position_losses(read_run(tmp_path, "run"))] == ["run, training batches, after 900 tokens"]
    write_losses_by_position(tmp_path, "val", 100, np.array([7.0, 6.0]))
    write_losses_by_position(tmp_path, "val", 5120, np.array([5.0, 4.0]))
    ((label, newest),) = read_position_losses(read_run(tmp_path, "run")).items()
    assert label == "run, held-out, after 5.12K tokens" and newest.tolist() == [5.0, 4.0]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    assert read_position_losses(read_run(tmp_path, "run")) == {}
    path = write_losses_by_position(tmp_path, "val", 5, np.ones(1000))
    whole = path.read_bytes()
    for broken in (b"", whole[:100], whole[:-30]):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"step-000000000000005\.npz: cannot read"):
            read_position_losses(read_run(tmp_path, "run"))
    np.savez(path, other=np.ones(2))
    with pytest.raises(ValueError, match="val/loss_per_token"):
        read_position_losses(read_run(tmp_path, "run"))


def test_names_are_as_short_as_they_can_be(tmp_path: Path) -> None:
    assert run_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert run_names([tmp_path / "x" / "lr1", tmp_path / "y" / "lr1"]) == ["x/lr1", "y/lr1"]
    with pytest.raises(ValueError, match="same run is given twice"):
        run_names([tmp_path / "a", tmp_path / "b" / ".." / "a"])


@pytest.mark.slow
def test_the_figures_of_one_run(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = add_callbacks(make_run())
    plot_run.main([str(run_dir)])
    files = ["evaluations", "loss_position", "loss_tokens", "norms", "training"]
    output = capsys.readouterr()
    assert output.out.split() == [str(run_dir / "plots" / f"{name}.png") for name in files]
    assert all(is_picture(run_dir / "plots" / f"{name}.png") for name in files)
    with pytest.raises(SystemExit):
        plot_run.main([str(run_dir), str(make_run("other"))])
    assert "--out DIR" in capsys.readouterr().err, "of several runs"


def test_a_run_that_cannot_be_drawn_is_named(tmp_path: Path) -> None:
    unfit = json.dumps({"step": 1, "train/loss": math.nan})
    for line, said in (
        ("broken", r"train\.jsonl, line 1"),
        (unfit, "nothing to plot yet"),
        ("", "nothing to plot yet"),
    ):
        write_lines(tmp_path, "train", []).write_text(line + "\n")
        (tmp_path / "config.yaml").touch()
        with pytest.raises(AnalysisError, match=said):
            plot_run.main([str(tmp_path)])
