"""Scores of a study are read from the folders of evaluations, seed by seed, and shown as means."""

import json
import math

import numpy as np
import pytest

from forgetting_transformer.analysis.evaluations import from_lm_eval, from_longbench, from_needle
from forgetting_transformer.analysis.question_scores import QuestionScores, difference, write_question_scores
from studies.engine.plan import StudyPlan
from studies.engine.results import Study
from studies.engine.scores import downstream_table, needle_grids, needle_table, read_downstream

pytestmark = [pytest.mark.slow, pytest.mark.rare("no contract: studies")]
QUESTIONS = {"fox_seed0": [1, 1, 0, 1], "fox_seed1": [1, 0, 0, 1], "rnn_seed1": [0, 0, 0, 1], "other_seed0": [1, 1]}


def write(folder, evaluation):
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [vars(number) for number in evaluation.numbers]
    content = {"format": 1, "kind": evaluation.kind, "model": "m", "numbers": numbers, "about": evaluation.about}
    (folder / "evaluation.json").write_text(json.dumps(content))


@pytest.fixture
def study(tmp_path) -> Study:
    for run, share in (("fox_seed0", 0.5), ("fox_seed1", 0.7)):
        cells = [(512, share, 0.0), (1024, 1.0, 1.0), (2048, 0.1, 0.0)]
        records = [{"length": length, "depth": 0.5, "words": words, "exact": exact} for length, words, exact in cells]
        content = {"mode": "paper", "model": "m", "train_length": 1024, "records": records}
        write(tmp_path / "needle" / run / "paper", from_needle(content))
        write(tmp_path / "lm_eval" / run, from_lm_eval({"next_line": {"acc,none": share, "acc_stderr,none": 0.1}}))
    write(tmp_path / "next_line/fox_seed0", from_longbench({"lcc": 31.5}))
    for run, scores in QUESTIONS.items():
        (tmp_path / "lm_eval" / run).mkdir(parents=True, exist_ok=True)
        of = QuestionScores({"acc": scores}, f"{len(scores)}", [0, 0, 1, 2][: len(scores)])
        write_question_scores(tmp_path / "lm_eval" / run, {"next_line": of})
    models = {
        name: {"seeds": seeds, "train_loss": [1.0] * len(seeds), "heldout_loss": [1.0] * len(seeds)}
        for name, seeds in {"fox": [0, 1], "rnn": [0, 1, 2], "other": [0]}.items()
    }
    found = Study(StudyPlan("g", {"fox": "FoX", "rnn": "RNN", "other": "Other"}), {"models": models})
    found.content.update(read_downstream(tmp_path, found))
    return found


def test_scores_are_read_seed_by_seed_and_shown_with_intervals_over_seeds(study):
    assert study["scores"]["fox"]["fox_seed0"] == {
        "needle/standard/within/words": 75.0, "needle/standard/within/exact": 50.0,
        "needle/standard/beyond/words": 10.0, "needle/standard/beyond/exact": 0.0,
        "next line/similarity": 31.5, "next_line/acc": 50.0,
    }  # fmt: skip
    header, _, row = ([c.strip() for c in line.split("|")] for line in needle_table(study).splitlines())
    # Student's t of one degree of freedom, 12.706, times the standard error of 75 and 85, which is 5.
    assert header[1:3] == ["model", "standard, up to the training length"]
    assert row[1:5] == ["FoX", "80.0 ± 63.5; 50.0 ± 0.0", "10.0 ± 0.0; 0.0 ± 0.0", "2"]
    header, _, row = ([c.strip() for c in line.split("|")] for line in downstream_table(study).splitlines())
    assert [row[header.index(name)] for name in ("next line, similarity", "next line, acc")] == ["31.5", "60.0 ± 127.1"]


def test_differences_are_on_the_same_questions_in_the_seeds_that_both_have(study):
    half_width = difference([QUESTIONS["rnn_seed1"]], [QUESTIONS["fox_seed1"]], [0, 0, 1, 2]).half_width
    # The other model was asked other questions.
    assert study["score_differences"] == {
        "rnn": {
            "next_line/acc": {"value": -25.0, "half_width": pytest.approx(100 * half_width), "questions": 4, "seeds": 1}
        }
    }


def test_grids_are_means_of_the_seeds_on_all_lengths_and_depths(study):
    lengths, depths, grids = needle_grids(study)
    assert lengths == [512, 1024, 2048] and depths == [0.5] and [*grids] == [("standard", "FoX")]
    assert np.allclose(grids["standard", "FoX"], [[0.6, 1.0, 0.1]])
    study["needles"]["fox"]["fox_seed1"]["standard"] |= {"lengths": [4096], "words": [[0.5]]}
    assert np.array_equal(needle_grids(study)[2]["standard", "FoX"], [[0.5, 1.0, 0.1, 0.5]], equal_nan=True)
    study["needles"]["rnn"] = {"rnn_seed0": {"easy": study["needles"]["fox"]["fox_seed1"]["standard"]}}
    assert math.isnan(needle_grids(study)[2]["easy", "RNN"][0, 0])
