"""One schema of results: what is written is read back, with the files of the paper's repository as the same."""

import json

import pytest

from forgetting_transformer.analysis import AnalysisError, known_models, published, tables
from forgetting_transformer.analysis.evaluations import (
    Evaluation,
    Number,
    from_needle,
    from_position_loss,
    read_evaluations,
    read_named,
    write_evaluation,
)
from forgetting_transformer.analysis.statistics import Estimate

RECORDS = [
    {"length": n, "depth": 0.0, "sample": k, "exact": 0.0, "words": 0.25 * k}
    for n in (60, 100) for k in (0, 1)
]  # fmt: skip
NEEDLES = {"model": "fox", "mode": "easy", "train_length": 32, "records": RECORDS}


def test_the_numbers_of_every_evaluation_have_one_form():
    slope = {"position": 32, "per_doubling": -0.5, "standard_error": 0.1}
    summary = {"eval_tokens": 256, "eval_len": 64, "model": "fox", "train_length": 32, "slope": [slope]}
    loss = from_position_loss({**summary, "val/loss_avg_len_64": 3.5, "val/perplexity_len_64": 33.1})
    assert loss.find("loss", "loss_avg", context=64).value == 3.5 and loss.about["train_length"] == 32
    assert loss.find("slope", "change_per_doubling", position=32).standard_error == 0.1
    needle = from_needle(NEEDLES)
    cell = needle.find("needle, easy", "words", length=100, depth=0.0)
    assert (cell.value, cell.samples) == (0.125, 2) and cell.standard_error == pytest.approx(0.125)


def test_what_is_written_is_read_back(tmp_path):
    numbers = (Number("piqa", "acc", 0.75, 0.125, 12), Number("piqa", "acc", 0.5, at={"words": "0-4k"}))
    written = Evaluation("lm_eval_harness", "a model", numbers, {"source": "x"}, {"limit": 3})
    write_evaluation(written, tmp_path, lambda new: (new / "more").touch())
    (tmp_path / "results.json").write_text(json.dumps({"piqa": {"acc,none": 0.625}}))
    (read,) = read_evaluations([tmp_path])
    assert (read.kind, read.model, read.numbers, read.about, read.settings, read.folder) == (
        "lm_eval_harness", "a model", numbers, {"source": "x"}, {"limit": 3}, tmp_path,
    )  # fmt: skip
    table = (tmp_path / "table.md").read_text()
    assert "0.75 ± 0.12" in table and "words 0-4k" in table and (tmp_path / "more").is_file()


def test_files_of_the_papers_repository_are_read_as_the_same(tmp_path):
    for name, content in {
        "lm_eval/fox/results.json": {"piqa": {"alias": "piqa", "acc,none": 0.625, "acc_stderr,none": "N/A"}},
        "pred_e/fox/result.json": {"trec": {"0-4k": 10.0, "4-8k": None, "8k+": 5.0}},
        "other/results.json": {"accuracy": 0.5},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(json.dumps(content))
    harness, longbench = read_evaluations([tmp_path])
    assert harness.model == "fox" and harness.find("piqa", "acc") == Number("piqa", "acc", 0.625)
    assert [number.at["words"] for number in longbench.numbers] == ["0-4k", "8k+"]
    with pytest.raises(AnalysisError, match=r"there are no results in .*other: run the evaluation"):
        read_named([str(tmp_path / "other")])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": 99}', "is not in format 1"),
        ('{"format": 1, "numbers": [{"task": "x"}], "kind": "niah", "model": "m"}', "is damaged"),
        ("[]", "is damaged"),
        ('{"form', "not valid JSON"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, message):
    (tmp_path / "evaluation.json").write_text(content)
    with pytest.raises(AnalysisError, match=rf"evaluation\.json.* {message}"):
        read_evaluations([tmp_path])


def test_results_of_one_name_are_seeds_and_have_an_interval(tmp_path):
    for name, accuracy in (("seed0", 0.5), ("seed1", 0.6), ("seed2", 0.7), ("fox", 0.625), ("again/fox", 0.5)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "results.json").write_text(json.dumps({"piqa": {"acc,none": accuracy}}))
    named = read_named([*(f"FoX={tmp_path}/seed{n}" for n in range(3)), str(tmp_path / "fox")])
    assert {name: len(several) for name, several in named.items()} == {"FoX": 3, "fox": 1}
    rows, columns = published.lm_eval_table(named)
    # Student's t of two degrees of freedom, 4.303, times 10 / √3.
    assert rows["FoX"]["piqa/acc"] == pytest.approx(Estimate(60.0, 24.84), abs=0.01)
    assert rows["fox"]["piqa/acc"].value == 62.5
    table = " ".join(tables.score_table(rows, columns).markdown().split())
    assert "| FoX | – | – | – | <u>60.00 ± 24.84</u> |" in table and "| fox | – | – | – | **62.50** |" in table
    assert r"\underline{60.00 $\pm$ 24.84}" in tables.latex(rows, columns)
    with pytest.raises(AnalysisError, match="two results are called 'fox': give them names, NAME=FOLDER"):
        read_named([str(tmp_path / "fox"), str(tmp_path / "again/fox")])


def test_released_models_are_called_as_in_the_paper(tmp_path):
    for model in ("mine", "mamba2-760m-longcrawl64-48b", "fox-pro-760m-longcrawl64-48b"):
        (tmp_path / model).mkdir()
        (tmp_path / model / "results.json").touch()
    assert known_models.results_in(tmp_path, "results.json") == [
        f"FoX (Pro)={tmp_path}/fox-pro-760m-longcrawl64-48b",
        f"Mamba-2={tmp_path}/mamba2-760m-longcrawl64-48b",
        f"mine={tmp_path}/mine",
    ]
