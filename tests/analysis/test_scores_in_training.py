"""The numbers of callbacks are read as scores: lm_eval, needle, gate_statistics and samples."""

import numpy as np
import pytest

from forgetting_transformer.analysis.runs import read_run
from forgetting_transformer.analysis.scores_in_training import ACCURACY, read_samples, read_scores
from tests.analysis.conftest import STEPS, MakeRun, add_callbacks


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
