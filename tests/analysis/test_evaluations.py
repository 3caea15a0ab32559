"""One schema of results: what is written is read back, and folders of earlier versions are read as the same."""

import json
from pathlib import Path

import numpy as np
import pytest

from forgetting_transformer.analysis import AnalysisError, evaluations, published, tables
from forgetting_transformer.analysis.evaluations import (
    Evaluation,
    Number,
    read_evaluation,
    read_evaluations,
    read_named,
    write_evaluation,
)
from forgetting_transformer.analysis.statistics import Estimate

SLOPE = {"position": 32, "before": 3.9, "after": 3.4, "per_doubling": -0.5, "standard_error": 0.1, "per_token": -0.02}
#: The files that version 0.1 (commit c2f0588) wrote, with the numbers of tiny evaluations.
OLD = {
    "per_token_loss/fox/results.json": {
        "eval_tokens": 256, "eval_len": 64, "model": "fox", "source": "runs/fox", "train_length": 32,
        "train_tokens": 4096, "weights": "0123", "data": "4567", "precision": "fp32", "val/loss_avg_len_64": 3.5,
        "val/perplexity_len_64": 33.1, "slope": [SLOPE],
    },
    "niah/fox/easy/scores.json": {
        "model": "fox", "mode": "easy", "lengths": [60, 100], "depths": [0.0], "train_length": 32,
        "records": [
            {"length": n, "depth": 0.0, "sample": k, "prediction": "a park", "exact": 0.0, "words": 0.25 * k}
            for n in (60, 100) for k in (0, 1)
        ],
    },
    "gates/heads.json": {
        "model": "runs/fox", "tokens": 128, "train_tokens": 4096, "pruned": 0.4,
        "heads": [{"layer": 0, "head": 1, "memory": 17.0, "memory_is_bound": True, "pruned": 0.4}],
    },
    "lm_eval/fox/results.json": {
        "piqa": {"alias": "piqa", "acc,none": 0.625, "acc_stderr,none": "N/A", "acc_norm,none": 0.5},
        "texts": {"word_perplexity,none": 30.0, "word_perplexity_stderr,none": "N/A"},
    },
    "longbench/fox/results.json": {"trec": 12.5, "lcc": 30.0},
    "pred_e/fox/result.json": {"trec": {"0-4k": 10.0, "4-8k": None, "8k+": 5.0}},
}  # fmt: skip


@pytest.fixture
def old(tmp_path: Path) -> Path:
    for name, content in OLD.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(json.dumps(content))
    arrays = {"val/loss_per_token": np.linspace(4, 3, 64), "val/loss_per_octave": np.ones((4, 4))}
    np.savez(tmp_path / "per_token_loss/fox/results.npz", **arrays)
    return tmp_path


def test_folders_of_an_earlier_version_are_read_as_the_same_schema(old):
    found, left_out = read_evaluations([old])
    assert not left_out
    by_kind = {(one.kind, one.folder.relative_to(old).parts[0]): one for one in found}
    loss, needle, gates, harness, longbench, longbench_e = (
        by_kind[key]
        for key in (
            ("per_token_loss", "per_token_loss"), ("niah", "niah"), ("forget_gates", "gates"),
            ("lm_eval_harness", "lm_eval"), ("longbench", "longbench"), ("longbench", "pred_e"),
        )
    )  # fmt: skip
    assert loss.find("loss", "loss_avg", context=64).value == 3.5 and loss.about["train_length"] == 32
    assert loss.find("slope", "change_per_doubling", position=32).standard_error == 0.1
    cell = needle.find("needle, easy", "words", length=100, depth=0.0)
    assert (cell.value, cell.samples) == (0.125, 2) and cell.standard_error == pytest.approx(0.125)
    assert len(needle.texts) == 4 and needle.texts[0]["text"] == "a park"
    assert gates.find("memory", "tokens", layer=0, head=1).at["at_least"] and gates.settings == {"tokens": 128}
    assert gates.find("pruning", "pruned").value == 0.4
    assert harness.model == "fox" and harness.find("piqa", "acc") == Number("piqa", "acc", 0.625)
    assert longbench.find("lcc", "score").value == 30.0
    assert [number.at["words"] for number in longbench_e.numbers] == ["0-4k", "8k+"]


def test_what_is_written_is_read_back_and_comes_before_older_files(old):
    folder = old / "lm_eval/fox"
    numbers = (Number("piqa", "acc", 0.75, 0.125, 12), Number("piqa", "acc", 0.5, at={"words": "0-4k"}))
    texts = [{"task": "piqa", "text": "§", "score": None}] * 50
    written = Evaluation("lm_eval_harness", "a model", numbers, {"source": "x"}, {"limit": 3}, texts)
    write_evaluation(written, folder, evaluations.number_table(written), lambda path: path.write_bytes(b"drawn"))
    read = read_evaluation(folder)
    assert (read.kind, read.model, read.numbers, read.about, read.settings) == (
        "lm_eval_harness", "a model", numbers, {"source": "x"}, {"limit": 3},
    )  # fmt: skip
    assert 0 < len(read.texts) < 50, "some texts are enough"
    table = (folder / "table.md").read_text()
    assert "0.75 ± 0.12" in table and "words 0-4k" in table and (folder / "figure.png").read_bytes() == b"drawn"
    assert [one.folder for one in read_evaluations([folder])[0]] == [folder], "once, though it has several files"


def test_ratings_that_came_later_are_read_too(old):
    folder = old / "niah/fox/easy"
    needle = read_evaluation(folder)
    write_evaluation(needle, folder, evaluations.number_table(needle), lambda path: None)
    scores = json.loads((folder / "scores.json").read_text())
    records = [{**record, "judge": 7} for record in scores["records"]]
    (folder / "judge.json").write_text(json.dumps({**scores, "judge": "a judge", "records": records}))
    found = read_evaluation(folder)
    assert found.find("needle, easy", "judge").value == 7 and found.settings["judge"] == "a judge"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": 99}', "is of a later version"),
        ('{"format": 1, "numbers": [{"task": "x"}], "kind": "niah", "model": "m"}', "is damaged"),
        ('{"format": 1}', "is damaged"),
        ('{"format": []}', "is damaged"),
        ('{"form', "not valid JSON"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, message):
    (tmp_path / "evaluation.json").write_text(content)
    with pytest.raises(AnalysisError, match=rf"evaluation\.json.* {message}"):
        read_evaluations([tmp_path])


def test_results_of_one_name_are_seeds_and_have_an_interval(old, tmp_path):
    for seed, accuracy in enumerate((0.5, 0.6, 0.7)):
        (tmp_path / f"seed{seed}").mkdir()
        (tmp_path / f"seed{seed}/results.json").write_text(json.dumps({"piqa": {"acc,none": accuracy}}))
    named = read_named([*(f"FoX={tmp_path}/seed{n}" for n in range(3)), str(old / "lm_eval/fox")])
    assert {name: len(several) for name, several in named.items()} == {"FoX": 3, "fox": 1}
    rows, columns = published.lm_eval_table(named)
    # Student's t of two degrees of freedom, 4.303, times 10 / √3.
    assert rows["FoX"]["piqa"] == pytest.approx(Estimate(60.0, 24.84), abs=0.01) and rows["fox"]["piqa"] == 62.5
    assert "| FoX | – | – | – | <u>60.00 ± 24.84</u> |" in tables.markdown(rows, columns)
    assert r"\underline{60.00 $\pm$ 24.84}" in tables.latex(rows, columns)
    with pytest.raises(AnalysisError, match="two results are called 'fox': give them names, NAME=FOLDER"):
        read_named([str(old / "lm_eval/fox"), str(old / "longbench/fox")])
