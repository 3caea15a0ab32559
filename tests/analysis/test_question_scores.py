"""Two models on the same questions: the difference and its interval, and which answers cannot be compared."""

import math

import numpy as np
import pytest

from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.analysis.evaluations import Evaluation
from forgetting_transformer.analysis.question_scores import (
    QuestionScores,
    difference,
    differences_table,
    digest_of,
    write_question_scores,
)

RIGHT, WRONG = [1.0, 1.0, 1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0, 1.0, 0.0]


def test_the_error_is_that_of_the_differences_question_by_question():
    apart = np.array(RIGHT) - np.array(WRONG)
    found = difference([RIGHT], [WRONG])
    assert found.value == pytest.approx(1 / 6)
    # Student's t of five degrees of freedom.
    assert found.half_width == pytest.approx(2.570582 * apart.std(ddof=1) / math.sqrt(6), rel=1e-5)
    assert difference([RIGHT], [RIGHT]) == (0, 0), "hard for both is no reason for doubt"


def test_questions_of_one_text_are_no_independent_ones():
    """The same scores ten times over tell no more than once, where the groups say so."""
    of, than, groups = RIGHT * 10, WRONG * 10, [0, 1, 2, 3, 4, 5] * 10
    once = difference([RIGHT], [WRONG]).half_width
    assert difference([of], [than]).half_width < 0.4 * once
    assert difference([of], [than], groups).half_width == pytest.approx(once, rel=0.05)
    assert math.isnan(difference([RIGHT], [WRONG], [0] * 6).half_width), "one group has no error"


def test_several_seeds_have_an_interval_over_seeds_too():
    alike = difference([RIGHT, RIGHT], [WRONG, WRONG])
    assert alike == pytest.approx(difference([RIGHT], [WRONG]))
    other = [1.0] * 6
    assert difference([RIGHT, other], [WRONG, WRONG]).half_width > alike.half_width
    assert math.isnan(difference([[1.0]], [[0.0]]).half_width), "one question has no error"


def evaluation(folder, **tasks) -> Evaluation:
    folder.mkdir()
    write_question_scores(
        folder, {task: QuestionScores({"acc": of}, digest_of(range(len(of)))) for task, of in tasks.items()}
    )
    return Evaluation("lm_eval_harness", folder.name, (), folder=folder)


def test_the_table_has_a_row_for_each_task_that_both_models_have(tmp_path):
    models = {
        "fox": [evaluation(tmp_path / "fox", one=RIGHT, two=[1.0, 0.0])],
        "llama": [evaluation(tmp_path / "llama", one=WRONG)],
    }
    head, _, row = (line.split("|")[1:-1] for line in differences_table(models, "fox").markdown().splitlines())
    assert [cell.strip() for cell in head] == ["Model", "task", "metric", "minus fox", "questions", "seeds"]
    half_width = difference([RIGHT], [WRONG]).half_width
    assert [cell.strip() for cell in row] == ["llama", "one", "acc", f"-0.1667 ± {half_width:.4f}", "6", "1"]


def test_what_cannot_be_compared_is_refused_by_name(tmp_path):
    fox = evaluation(tmp_path / "fox", one=RIGHT)
    fewer = evaluation(tmp_path / "fewer", one=WRONG[:5])
    (old := evaluation(tmp_path / "old", one=RIGHT)).folder.joinpath("question_scores.json").unlink()
    for models, baseline, message in (
        ({"fox": [fox]}, "llama", "--against=llama: there is no such model; there are fox"),
        (
            {"fox": [fox], "old": [old]},
            "fox",
            r"old has no question_scores\.json with the score of every question: another program",
        ),
        ({"fox": [fox], "old": [old]}, "old", r"old has no question_scores\.json"),
        ({"fox": [fox], "fewer": [fewer]}, "fox", "fewer and fox were not asked the same questions of one"),
        ({"fox": [fox]}, "fox", "no other model has a task of it"),
        ({"fox": [fox], "llama": [fox, fox]}, "fox", "llama has 2 results and fox 1; give the same number of seeds"),
    ):
        with pytest.raises(AnalysisError, match=message):
            differences_table(models, baseline)
