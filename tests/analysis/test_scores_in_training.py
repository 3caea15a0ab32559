"""What callbacks logged is read, drawn and shown on the page: lm_eval, needle, gate_statistics and samples."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest

from forgetting_transformer.analysis import figures
from forgetting_transformer.analysis.page import write_report
from forgetting_transformer.analysis.plots.evaluations import scores_over_training
from forgetting_transformer.analysis.plots.style import GREY
from forgetting_transformer.analysis.runs import read_run
from forgetting_transformer.analysis.scores_in_training import ACCURACY, labels, read_samples, read_scores
from tests.analysis.test_plots import (
    MakeRun,
    describe,
    drawn,  # noqa: F401 (a fixture)
    is_picture,
    make_run,  # noqa: F401 (a fixture)
    plot_run,  # noqa: F401 (a fixture)
    texts,
    write_jsonl,
)

STEPS = (50_000, 100_000, 150_000)


def evaluated(run_dir: Path, better: float = 0.0) -> Path:
    """A run with two tasks, a needle at two lengths, gates and samples."""
    lm_eval, needle, samples = [], [], []
    for number, step in enumerate(STEPS):
        score = 0.25 + 0.1 * number + better
        arc = {"lm_eval/arc_easy/acc": score, "lm_eval/arc_easy/acc_stderr": 0.02, "lm_eval/arc_easy/chance": 0.25}
        arc |= {"lm_eval/arc_easy/acc_norm": score / 2, "lm_eval/arc_easy/acc_norm_stderr": 0.02}
        wiki = {"lm_eval/wikitext/word_perplexity": 900.0 / (number + 1), "lm_eval/wikitext/bits_per_byte": 2.0}
        strict = {"lm_eval/mine/exact_match,strict": 0.5, "lm_eval/mine/exact_match_stderr,strict": 0.1}
        lm_eval.append({"step": step, **arc, **wiki, **strict})
        found = {}
        for length in (1024, 512):
            at = f"needle/length_{length}"
            found |= {f"{at}/loss": 5.0 - number, f"{at}/loss_stderr": 0.1, f"{at}/loss_without": 5.5}
            found |= {f"{at}/accuracy": 0.2 * number, f"{at}/depth_50/loss": 4.0}
        needle.append({"step": step, **found})
        samples.append({"step": step, "samples/0/prompt": "Once <b>", "samples/0/text": f"upon\n time {number}"})
    write_jsonl(run_dir, "lm_eval", lm_eval)
    write_jsonl(run_dir, "needle", needle)
    write_jsonl(run_dir, "samples", samples)
    write_jsonl(run_dir, "gates", [{"step": STEPS[0], "gates/longest": 70.0, "gates/layer_0/head_0": 3.0}])
    return run_dir


def test_the_main_scores_of_every_task_are_read_with_errors_and_chance(make_run: MakeRun) -> None:  # noqa: F811
    scores = read_scores(read_run(evaluated(make_run("run"))))
    assert [(score.task, score.metric) for score in scores] == [
        ("arc_easy", "acc"),  # the paper's metric of it, not acc_norm
        ("wikitext", "word_perplexity"),
        ("mine", "exact_match,strict"),
        ("needle, 512 tokens", "loss"),
        ("needle, 512 tokens", "accuracy"),
        ("needle, 1,024 tokens", "loss"),
        ("needle, 1,024 tokens", "accuracy"),
        ("longest memory of a head", "longest"),
    ]
    arc = scores[0]
    assert arc.unit == ACCURACY and arc.series.values.tolist() == pytest.approx([25, 35, 45])
    assert arc.errors.tolist() == pytest.approx([2, 2, 2]) and arc.baseline.values.tolist() == [25, 25, 25]
    assert scores[2].errors.tolist() == pytest.approx([10, 10, 10]) and not scores[2].baseline.values.size
    assert np.isnan(scores[1].errors).all() and scores[3].baseline.values.tolist() == [5.5] * 3


def test_one_run_has_a_panel_for_each_unit_and_several_have_one_for_each_task(
    make_run: MakeRun,  # noqa: F811
    drawn: list,  # noqa: F811
    tmp_path: Path,
) -> None:
    runs = [evaluated(make_run("fox_pro")), evaluated(make_run("hgrn2"), 0.1)]
    scores_over_training([read_run(runs[0])], tmp_path / "one.png", ["65 M parameters"])
    (figure,) = drawn
    panels = {axes.get_ylabel(): axes for axes in figure.axes if axes.get_ylabel()}
    units = {"accuracy (%)", "perplexity", "exact match (%)", "needle: loss of the answer\n(nats per token)"}
    units |= {"needle: answered\nword for word (%)"}
    assert panels.keys() == units | {"memory length (tokens)"}
    assert panels["perplexity"].get_yscale() == "linear" and is_picture(tmp_path / "one.png")
    dotted = [line.get_ydata() for line in panels["accuracy (%)"].lines if line.get_linestyle() == ":"]
    assert [sorted({*level}) for level in dotted] == [[25.0]]
    assert [line.get_color() for line in panels["accuracy (%)"].lines if line.get_linestyle() == ":"] == [GREY]
    bars = panels["accuracy (%)"].containers[0].lines[2][0].get_segments()
    assert bars[0][:, 1].tolist() == pytest.approx([25 - 1.96 * 2, 25 + 1.96 * 2])
    assert {"arc_easy", "needle, 512 tokens", "chance, or the answer's loss with no needle in the text"} <= {
        *texts(figure)
    }
    said = " ".join(text.get_text() for text in figure.texts)
    assert "training of fox_pro" in said and "65 M parameters" in said and "95 % intervals" in said
    scores_over_training([read_run(run) for run in runs], tmp_path / "two.png")
    titles = [axes.get_title() for axes in drawn[1].axes if axes.get_title()]
    assert titles.count("needle, 512 tokens") == 2 and titles.count("arc_easy") == 1
    assert {"fox_pro", "hgrn2"} <= {*texts(drawn[1])}
    with pytest.raises(ValueError, match="has logged no scores of evaluations yet"):
        scores_over_training([read_run(make_run("bare"))], tmp_path / "none.png")


def changed_test(run_dir: Path) -> Path:
    """A run whose needle test and task were other ones at its last evaluation, after a line of an earlier version."""
    lm_eval, needle = [], []
    for number, step in enumerate(STEPS):
        last = number == 2
        line = {"lm_eval/mine/acc": 0.5, "lm_eval/mine/examples": 40 if last else 4, "lm_eval/mine/texts": "ab"}
        lm_eval.append({"step": step, **line, "lm_eval/max_length": 512})
        test = {"needle/mode": "easy", "needle/depths": "50" if last else "0 100", "needle/samples": 4 if last else 2}
        test |= {"needle/length_512/texts": f"texts {last}", "needle/length_1024/texts": f"other {last}"}
        losses = {"needle/length_512/loss": 5.0, "needle/length_1024/loss": 4.0}
        needle.append({"step": step, **losses, **(test if number else {})})
    write_jsonl(run_dir, "lm_eval", lm_eval)
    write_jsonl(run_dir, "needle", needle)
    return run_dir


@pytest.mark.slow
def test_scores_of_a_test_that_was_changed_are_another_curve_with_another_name(
    make_run: MakeRun,  # noqa: F811
    drawn: list,  # noqa: F811
    tmp_path: Path,
) -> None:
    run = read_run(changed_test(make_run("run")))
    scores = read_scores(run)
    assert [
        (name, score.series.tokens.tolist())
        for name, score in zip(labels(scores), scores, strict=True)
        if score.metric != "accuracy"
    ] == [
        ("mine (4 examples)", [*STEPS[:2]]),
        ("mine (40 examples)", [STEPS[2]]),
        ("needle, 512 tokens (easy, 4 prompts), depths 0 100, samples 2", [*STEPS[:2]]),
        ("needle, 512 tokens (easy, 4 prompts), depths 50, samples 4", [STEPS[2]]),
        ("needle, 1,024 tokens (easy, 4 prompts), depths 0 100, samples 2", [*STEPS[:2]]),
        ("needle, 1,024 tokens (easy, 4 prompts), depths 50, samples 4", [STEPS[2]]),
    ]
    scores_over_training([run], tmp_path / "one.png")
    assert {"mine (4 examples)", "mine (40 examples)"} <= {*texts(drawn[0])}
    # Two runs, the same settings, other texts: a panel for each.
    other = changed_test(make_run("other"))
    lines = (other / "metrics/jsonlines/lm_eval.jsonl").read_text().replace('"ab"', '"cd"')
    (other / "metrics/jsonlines/lm_eval.jsonl").write_text(lines)
    scores_over_training([run, read_run(other)], tmp_path / "two.png")
    titles = [axes.get_title() for axes in drawn[1].axes if axes.get_title()]
    assert {"mine (4 examples), texts ab", "mine (4 examples), texts cd"} <= {*titles}
    assert len({title for title in titles if title.startswith("needle, 512")}) == 2


@pytest.mark.slow
def test_plot_run_and_the_page_show_scores_and_samples(
    make_run: MakeRun,  # noqa: F811
    plot_run,  # noqa: F811
    tmp_path: Path,
) -> None:
    run, bare = evaluated(make_run("run")), make_run("bare")
    for folder in (run, bare):
        describe(folder)
    assert run / "plots/evaluations.png" in plot_run.plot(plot_run.parse_args([str(run)]))
    assert bare / "plots/evaluations.png" not in plot_run.plot(plot_run.parse_args([str(bare)]))
    write_report([run, bare], [], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<h2>Evaluations during training</h2>" in page and "<h2>Samples</h2>" in page
    assert "45.0 ± 2.0" in page and "Once &lt;b&gt;" in page and "upon\n time 2" in page
    assert [tokens for tokens, _ in read_samples(read_run(run))] == list(STEPS)
    write_report([bare], [], tmp_path / "bare.html")
    assert "Evaluations during training" not in (tmp_path / "bare.html").read_text()


def test_an_evaluation_has_its_figure_while_the_run_is_trained(make_run: MakeRun, tmp_path: Path) -> None:  # noqa: F811
    run = evaluated(make_run("run"))
    describe(run)
    for kind, name in (("val", "loss_position"), ("needle", "evaluations"), ("lm_eval", "evaluations")):
        assert figures.of_evaluation(run, kind, tmp_path) == {name: tmp_path / f"{name}.png"}
        assert mpl.image.imread(tmp_path / f"{name}.png").shape[1] >= 1000
    assert figures.of_evaluation(run, "samples", tmp_path) == {}
    assert not (run / "plots").exists()
