"""Scores of a study are read from the folders of evaluations, seed by seed, and shown as means."""

import json

import pytest

from forgetting_transformer.analysis import study_scores
from forgetting_transformer.analysis.evaluations import from_lm_eval, from_longbench, from_needle


def write(folder, evaluation):
    folder.mkdir(parents=True)
    numbers = [vars(number) for number in evaluation.numbers]
    content = {"format": 1, "kind": evaluation.kind, "model": "m", "numbers": numbers, "about": evaluation.about}
    (folder / "evaluation.json").write_text(json.dumps(content))


@pytest.fixture
def found(tmp_path):
    for run, share in (("fox_seed0", 0.5), ("fox_seed1", 0.7)):
        cells = [(512, share, 0.0), (1024, 1.0, 1.0), (2048, 0.1, 0.0)]
        records = [{"length": length, "depth": 0.5, "words": words, "exact": exact} for length, words, exact in cells]
        content = {"mode": "paper", "model": "m", "train_length": 1024, "records": records}
        write(tmp_path / "needle" / run / "paper", from_needle(content))
        write(tmp_path / "lm_eval" / run, from_lm_eval({"next_line": {"acc,none": share, "acc_stderr,none": 0.1}}))
    write(tmp_path / "next_line/fox_seed0", from_longbench({"lcc": 31.5}))
    return study_scores.read_scores(tmp_path, [("fox_seed0", "fox"), ("fox_seed1", "fox"), ("mamba_seed0", "mamba")])


def test_scores_are_read_seed_by_seed(found):
    assert found == {
        "fox": {
            "fox_seed0": {
                "needle/standard/within/words": 75.0, "needle/standard/within/exact": 50.0,
                "needle/standard/beyond/words": 10.0, "needle/standard/beyond/exact": 0.0,
                "next line/similarity": 31.5, "next_line/acc": 50.0,
            },
            "fox_seed1": {
                "needle/standard/within/words": pytest.approx(85.0), "needle/standard/within/exact": 50.0,
                "needle/standard/beyond/words": 10.0, "needle/standard/beyond/exact": 0.0,
                "next_line/acc": 70.0,
            },
        }
    }  # fmt: skip


def test_scores_are_shown_with_intervals_over_seeds(found):
    study = {"scores": found, "names": {"fox": "FoX"}}
    header, _, row = ([c.strip() for c in line.split("|")] for line in study_scores.needle_table(study).splitlines())
    # Student's t of one degree of freedom, 12.706, times the standard error of 75 and 85, which is 5.
    assert header[1:3] == ["model", "standard, up to the training length"]
    assert row[1:5] == ["FoX", "80.0 ± 63.5; 50.0 ± 0.0", "10.0 ± 0.0; 0.0 ± 0.0", "2"], (
        "columns without any are left out"
    )
    header, _, row = (
        [c.strip() for c in line.split("|")] for line in study_scores.downstream_table(study).splitlines()
    )
    assert header[1:5] == ["model", "next line, similarity", "next line, acc", "seeds"]
    assert row[1:5] == ["FoX", "31.5", "60.0 ± 127.1", "2"]


def test_what_was_not_asked_is_not_run():
    assert study_scores.needle_table({}) == study_scores.downstream_table({"scores": {}}) == "Not run yet."
