"""Scores of a study are read from the folders of evaluations, seed by seed, and shown as means."""

import json
import math

import numpy as np
import pytest

from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.analysis.evaluations import from_lm_eval, from_longbench, from_needle
from forgetting_transformer.analysis.question_scores import QuestionScores, difference, write_question_scores
from studies.engine import scores as study_scores

pytestmark = [pytest.mark.slow, pytest.mark.rare("no contract: studies")]


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


def test_differences_are_on_the_same_questions_in_the_seeds_that_both_have(tmp_path):
    answers = {
        "fox_seed0": [1, 1, 0, 1], "fox_seed1": [1, 0, 0, 1], "rnn_seed1": [0, 0, 0, 1], "rnn_seed2": [0, 0, 0, 0],
        "other_seed0": [1, 1],
    }  # fmt: skip
    for run, scores in answers.items():
        (tmp_path / "lm_eval" / run).mkdir(parents=True)
        write_question_scores(
            tmp_path / "lm_eval" / run,
            {"next_line": QuestionScores({"acc": scores}, f"{len(scores)}", [0, 0, 1, 2][: len(scores)])},
        )
    for run, scores in (("fox_seed0", [50.0, 10.0]), ("rnn_seed0", [40.0, 30.0])):
        (tmp_path / "next_line" / run).mkdir(parents=True)
        write_question_scores(tmp_path / "next_line" / run, {"lcc": QuestionScores({"score": scores})})
    models = {"fox": [0, 1], "rnn": [0, 1, 2], "other": [0]}
    runs = [(f"{model}_seed{seed}", model) for model, seeds in models.items() for seed in seeds]
    found = study_scores.read_differences(tmp_path, runs, "fox")
    assert [*found] == ["rnn"], "the other model was asked other questions"
    half_width = difference([answers["rnn_seed1"]], [answers["fox_seed1"]], [0, 0, 1, 2]).half_width
    assert found["rnn"] == {
        "next line/similarity": {
            "value": 5.0, "half_width": pytest.approx(12.7062 * 15, rel=1e-5), "questions": 2, "seeds": 1,
        },
        "next_line/acc": {"value": -25.0, "half_width": pytest.approx(100 * half_width), "questions": 4, "seeds": 1},
    }  # fmt: skip
    scores = {"fox": {"fox_seed1": {"next_line/acc": 50.0}}, "rnn": {"rnn_seed1": {"next_line/acc": 25.0}}}
    study = {
        "scores": scores,
        "score_differences": found,
        "models": scores,
        "baseline": "fox",
        "names": {"fox": "FoX"},
    }
    table = [[c.strip() for c in line.split("|")[1:-1]] for line in study_scores.downstream_table(study).splitlines()]
    assert table[0] == ["model", "next line, acc", "next line, acc, against FoX", "seeds"]
    assert table[2:] == [
        ["FoX", "50.0", "", "1"],
        ["rnn", "25.0", f"-25.0 ± {100 * half_width:.1f}", "1"],
    ]
    assert study_scores.read_differences(tmp_path, runs, "absent") == {}


def test_each_task_has_its_own_column_of_differences_which_says_where_seeds_are_missing():
    scores = {"next_line/acc": 50.0, "piqa/acc": 60.0}
    runs = {"fox": {f"fox_seed{n}": scores for n in range(2)}, "rnn": {f"rnn_seed{n}": scores for n in range(2)}}
    apart = {"half_width": 2.0, "questions": 9}
    differences = {
        "next_line/acc": {"value": -10.0, "seeds": 2, **apart},
        "piqa/acc": {"value": -1.0, "seeds": 1, **apart},
    }
    study = {"scores": runs, "score_differences": {"rnn": differences}, "models": runs}
    head, _, _, row = (
        [c.strip() for c in line.split("|")[1:-1]] for line in study_scores.downstream_table(study).splitlines()
    )
    assert dict(zip(head, row, strict=True)) == {
        "model": "rnn", "next line, acc": "50.0 ± 0.0", "next line, acc, against fox": "-10.0 ± 2.0",
        "piqa, acc": "60.0 ± 0.0", "piqa, acc, against fox": "-1.0 ± 2.0 (1 of 2 seeds)", "seeds": "2",
    }  # fmt: skip


def needle(folder, run, mode, cells, prompts=1):
    records = [
        {"length": length, "depth": depth, "words": words, "exact": float(words == 1), "prediction": f"{words} " * 90}
        for length, depth, words in cells
        for _ in range(prompts)
    ]
    place = folder / "needle" / run / mode
    place.mkdir(parents=True)
    content = {"mode": mode, "model": run, "train_length": 1024, "records": records}
    (place / "scores.json").write_text(json.dumps(content))


def test_needles_are_read_by_depth_and_length_with_the_beginnings_of_the_answers(tmp_path):
    needle(tmp_path, "fox_seed0", "paper_easy", [(512, 0.0, 1.0), (2048, 0.0, 0.25), (512, 1.0, 0.5)])
    found = study_scores.read_needles(tmp_path, [("fox_seed0", "fox"), ("mamba_seed0", "mamba")])
    assert [*found] == ["fox"] and [*found["fox"]["fox_seed0"]] == ["easy"]
    easy = found["fox"]["fox_seed0"]["easy"]
    answers = easy.pop("answers")
    assert easy == {
        "train_length": 1024, "lengths": [512, 2048], "depths": [0.0, 1.0],
        "words": [[1.0, 0.25], [0.5, None]], "exact": [[1.0, 0.0], [0.0, None]],
    }  # fmt: skip
    assert [[answer and answer[:4] for answer in row] for row in answers] == [["1.0 ", "0.25"], ["0.5 ", None]]
    assert {len(answer) for row in answers for answer in row if answer} == {100}


def test_means_of_several_prompts_have_no_answer(tmp_path):
    needle(tmp_path, "fox_seed0", "paper", [(512, 0.0, 1.0), (2048, 0.0, 0.0)], prompts=3)
    (mode,) = study_scores.read_needles(tmp_path, [("fox_seed0", "fox")])["fox"]["fox_seed0"].values()
    assert mode["words"] == [[1.0, 0.0]] and "answers" not in mode


def test_grids_are_means_of_the_seeds_on_all_lengths_and_depths(tmp_path):
    needle(tmp_path, "fox_seed0", "paper", [(512, 0.0, 1.0), (2048, 0.0, 0.5)])
    needle(tmp_path, "fox_seed1", "paper", [(512, 0.0, 0.0), (512, 1.0, 0.2)])
    needle(tmp_path, "mamba_seed0", "paper_easy", [(2048, 1.0, 0.1)])
    runs = [("fox_seed0", "fox"), ("fox_seed1", "fox"), ("mamba_seed0", "mamba")]
    study = {"needles": study_scores.read_needles(tmp_path, runs), "names": {"fox": "FoX"}}
    lengths, depths, grids = study_scores.needle_grids(study)
    assert lengths == [512, 2048] and depths == [0.0, 1.0] and [*grids] == [("standard", "FoX"), ("easy", "mamba")]
    assert np.array_equal(grids["standard", "FoX"], [[0.5, 0.5], [0.2, math.nan]], equal_nan=True)
    assert np.array_equal(grids["easy", "mamba"], [[math.nan, math.nan], [math.nan, 0.1]], equal_nan=True)
    assert study_scores.needle_grids({})[2] == {}


def test_a_damaged_file_of_answers_is_named(tmp_path):
    for number, content in enumerate(("[]", "{}", '{"records": [{}], "mode": "paper"}')):
        place = tmp_path / f"needle/fox_seed{number}/paper"
        place.mkdir(parents=True)
        (place / "scores.json").write_text(content)
        with pytest.raises(AnalysisError, match=r"paper.scores\.json is damaged .*; run the evaluation again"):
            study_scores.read_needles(tmp_path, [(f"fox_seed{number}", "fox")])
