"""Scores of a study are read from the folders of evaluations, seed by seed, and shown as means."""

import json

import pytest

from forgetting_transformer.analysis.evaluations import from_lm_eval, from_needle
from studies.engine.plan import StudyPlan
from studies.engine.results import Study
from studies.engine.scores import read_downstream, score_texts

pytestmark = [pytest.mark.slow, pytest.mark.rare("no contract: studies")]


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
        "next_line/acc": 50.0,
    }  # fmt: skip
    shown = score_texts(study)
    # Student's t of one degree of freedom, 12.706, times the standard error of 75 and 85, which is 5.
    assert shown["fox_needle_standard_within_words"] == "80.0 ± 63.5"
    assert shown["fox_next_line_acc"] == "60.0 ± 127.1"
