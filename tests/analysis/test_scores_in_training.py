"""The numbers of callbacks are read as scores: lm_eval, needle, gate_statistics and samples."""

import numpy as np
import pytest

from forgetting_transformer.analysis.runs import read_run
from forgetting_transformer.analysis.scores_in_training import ACCURACY, labels, read_samples, read_scores
from tests.analysis.conftest import STEPS, MakeRun, add_callbacks, write_lines


def test_the_main_scores_of_every_task_are_read_with_errors_and_chance(make_run: MakeRun) -> None:
    run = read_run(add_callbacks(make_run()))
    scores = read_scores(run)
    assert [(score.task, score.metric) for score in scores] == [
        ("arc_easy", "acc"),  # the paper's metric of it, not acc_norm
        ("wikitext", "word_perplexity"),
        ("mine", "exact_match,strict"),
        ("needle, 512 tokens (easy, 4 prompts)", "loss"),
        ("needle, 512 tokens (easy, 4 prompts)", "accuracy"),
        ("needle, 1,024 tokens (easy, 4 prompts)", "loss"),
        ("needle, 1,024 tokens (easy, 4 prompts)", "accuracy"),
        ("longest memory of a head", "longest"),
    ]
    arc = scores[0]
    assert arc.unit == ACCURACY and arc.series.values.tolist() == pytest.approx([25, 35, 45])
    assert arc.errors.tolist() == pytest.approx([2, 2, 2]) and arc.baseline.values.tolist() == [25, 25, 25]
    assert scores[2].errors.tolist() == pytest.approx([10, 10, 10]) and not scores[2].baseline.values.size
    assert np.isnan(scores[1].errors).all() and scores[3].baseline.values.tolist() == [5.5] * 3
    assert [tokens for tokens, _ in read_samples(run)] == list(STEPS)
    assert read_samples(run)[0][1] == [{"prompt": "Once <b>", "text": "upon\n time 0"}]


def test_a_test_that_was_changed_is_another_score_with_another_name(make_run: MakeRun) -> None:
    folder = make_run()
    lm_eval, needle = [], []
    for number, step in enumerate(STEPS):
        last = number == 2
        asked = {"lm_eval/mine/examples": 40 if last else 4, "lm_eval/max_length": 512}
        lm_eval.append({"step": step, "lm_eval/mine/acc": 0.5, **asked})
        test = {"needle/mode": "easy", "needle/depths": "50" if last else "0 100", "needle/samples": 4 if last else 2}
        needle.append({"step": step, "needle/length_512/loss": 5.0, **test})
    write_lines(folder, "lm_eval", lm_eval)
    write_lines(folder, "needle", needle)
    scores = [score for score in read_scores(read_run(folder)) if score.metric != "accuracy"]
    assert [(name, len(score.series.tokens)) for name, score in zip(labels(scores), scores, strict=True)] == [
        ("mine (4 examples)", 2),
        ("mine (40 examples)", 1),
        ("needle, 512 tokens (easy, 4 prompts), depths 0 100, samples 2", 2),
        ("needle, 512 tokens (easy, 4 prompts), depths 50, samples 4", 1),
    ]
