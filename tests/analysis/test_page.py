"""The report: one file, everything in it, differences marked, and nothing but text from a run's texts."""

import base64
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml

from forgetting_transformer.analysis import AnalysisError, position_loss
from forgetting_transformer.analysis.longbench_sets import LONGBENCH
from forgetting_transformer.analysis.page import differing, write_report
from tests.evaluation.scripts import run_script

SCRIPT = "scripts/report.py"


class Page(HTMLParser):
    """Tags and attributes of a page, and the text of its table rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.rows, self.marked, self.in_cell = [], [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
            self.marked.append(dict(attrs).get("class") == "differs")
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag):
        self.in_cell = self.in_cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self.in_cell:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def runs(quickstart, tmp_path_factory):
    """The run, and a copy of it with another learning rate and a name that is no good for HTML. To be read only."""
    other = tmp_path_factory.mktemp("runs") / "<script>alert(1)"
    shutil.copytree(quickstart.run, other, ignore=shutil.ignore_patterns("checkpoints"))
    config = yaml.safe_load((other / "config.yaml").read_text())
    config["optimizer"]["lr"] = 0.5
    config["tag"] = "<img src=x onerror=alert(2)>"
    del config["model"]["config"]["qk_norm"]
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    return [quickstart.run, other]


@pytest.fixture(scope="module")
def page_of_runs(runs, tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("page") / "page.html"
    write_report(runs, [], file)
    return file.read_text()


def results(folder):
    """Results of each evaluation, as its script leaves them."""
    loss = {"val/loss_per_token": np.linspace(4, 3, 64)}
    slope = {
        "position": 32,
        "before": 3.9,
        "after": 3.4,
        "per_doubling": -0.5,
        "standard_error": 0.1,
        "per_token": -0.01,
    }
    for name, length in (("per_token_loss/fox", 64), ("short/fox", 32)):
        (folder / name).mkdir(parents=True)
        np.savez(folder / name / "results.npz", **{key: value[:length] for key, value in loss.items()})
        summary = {"model": "fox", "train_length": 32, "slope": [slope]}
        (folder / name / "results.json").write_text(json.dumps(summary))
    (folder / "niah").mkdir()
    record = {
        "length": 100,
        "depth": 0.5,
        "sample": 0,
        "prediction": "an answer\n<b>of</b> the model",
        "exact": 0.0,
        "words": 0.25,
    }
    grid = {"lengths": [100], "depths": [0.5], "train_length": 64, "records": [record]}
    (folder / "niah/scores.json").write_text(json.dumps({"model": "fox", "mode": "easy", **grid}))
    (folder / "lm/fox").mkdir(parents=True)
    (folder / "lm/fox/results.json").write_text(json.dumps({"piqa": {"acc,none": 0.625}}))
    (folder / "lb/fox").mkdir(parents=True)
    (folder / "lb/fox/results.json").write_text(json.dumps(dict.fromkeys(LONGBENCH, 12.5)))
    (folder / "gates").mkdir()
    head = {"layer": 0, "head": 1, "memory": 17.0, "memory_is_bound": True, "pruned": 0.4}
    (folder / "gates/heads.json").write_text(
        json.dumps({"model": "fox", "tokens": 128, "pruned": 0.4, "heads": [head]})
    )
    (folder / "gates/gates.png").write_bytes(b"a picture")
    return folder


@pytest.mark.slow
def test_one_page_holds_everything(runs, tmp_path):
    done = run_script(SCRIPT, *runs, "--results", results(tmp_path / "results"), "--out", tmp_path / "page")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "page/report.html").read_text()
    page = Page(text)
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings == [
        "Runs",
        "Loss against training tokens",
        "Learning rate, gradient norm, throughput and wall time",
        "Norms of weights and gradients",
        "Loss at every position, in training",
        "Loss at every position, evaluated",
        "Needle in a haystack",
        "Forget gates",
        "lm-evaluation-harness",
        "LongBench",
        "Configurations",
    ]
    pictures = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert len(pictures) == 10 and all(source.startswith("data:image/png;base64,") for source in pictures)
    assert f"data:image/png;base64,{base64.b64encode(b'a picture').decode()}" in pictures
    cells = {cell for row in page.rows for cell in row}
    assert {"62.50", "12.50", "-0.5000 ± 0.1000", "≥ 17", "40.0 %"} <= cells
    assert {"100 tokens, depth 50%", "an answer\n<b>of</b> the model"} <= cells
    val = json.loads((runs[0] / "metrics/jsonlines/val.jsonl").read_text().splitlines()[-1])["val/loss"]
    assert f"{val:.4f}" in cells


@pytest.mark.slow
def test_the_page_needs_nothing_from_outside_and_texts_stay_texts(page_of_runs):
    text, page = page_of_runs, Page(page_of_runs)
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "iframe", "object"})
    assert "onerror" not in {name for _, attributes in page.tags for name in attributes}
    assert not re.search(r"https?://", re.sub(r'base64,[^"]*', "", text))
    assert all(attributes["src"].startswith("data:") for tag, attributes in page.tags if tag == "img")
    assert any("<script>alert(1)" in cell for row in page.rows for cell in row)


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results/results.json").write_text('{"piqa": {"acc,none": 0.625}}')
    (tmp_path / "file").touch()
    for out in (tmp_path, tmp_path / "file/page.html", Path("/proc/no_such_folder/page.html")):
        with pytest.raises(AnalysisError, match=f"cannot write {out} .*; name another --out") as caught:
            write_report([], [tmp_path / "results"], out)
        assert "\n" not in str(caught.value)


def test_a_file_of_another_program_is_left_out_and_named(tmp_path):
    for name, content in (("list", "[1, 2]"), ("other", '{"accuracy": 0.5}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(content)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/evaluation.json").write_text('{"my": 1}')
    (tmp_path / "empty").mkdir()
    done = run_script(SCRIPT, "--results", tmp_path, "--out", tmp_path / "page")
    assert done.returncode == 1 and "error: nothing to report: " in done.stderr
    results(tmp_path / "ours")
    done = run_script(SCRIPT, "--results", tmp_path, tmp_path / "empty", "--out", tmp_path / "page")
    assert done.returncode == 0 and done.stderr.count("holds no results of lm_eval_harness or longbench") == 2
    assert f"{tmp_path}/mine/evaluation.json is no file of this project's evaluations" in done.stderr
    assert f"{tmp_path}/empty holds no results of evaluations" in done.stderr


@pytest.mark.slow
def test_differences_between_configurations_are_marked(page_of_runs):
    page = Page(page_of_runs)
    marked = {row[0]: row[1:] for row, is_marked in zip(page.rows, page.marked, strict=True) if is_marked}
    assert marked == {
        "optimizer.lr": ["0.01", "0.5"],
        "model.config.qk_norm": ["true", "– not there –"],
        "tag": [marked["tag"][0], '"<img src=x onerror=alert(2)>"'],
    }
    rows = {row[0]: row[1:] for row in page.rows}
    assert rows["seed"][0] == rows["seed"][1], "what agrees is there too"


def test_keys_that_differ():
    assert differing([{"a": 1, "b": None}, {"a": 1, "b": 2, "c": 3}]) == ["b", "c"]
    assert differing([{"a": None}, {}]) == ["a"], "null is not the same as not there"


@pytest.mark.slow
def test_a_run_that_has_not_logged_is_left_out_of_the_curves_and_named(runs, tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    shutil.copy(runs[0] / "config.yaml", new)
    done = run_script(SCRIPT, runs[0], new, "--out", tmp_path / "page")
    assert done.returncode == 0
    assert f"left out: {new} has no folder 'metrics'" in done.stderr
    assert ">new</t" in (tmp_path / "page/report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to report"),
        (["/nonexistent"], "is not a run's output_dir"),
        (["--results", "/nonexistent"], "no such"),
    ],
)
def test_what_cannot_be_reported_is_refused(arguments, message, tmp_path):
    done = run_script(SCRIPT, *arguments, "--out", tmp_path / "page")
    assert done.returncode == 1 and message in done.stderr
    assert not (tmp_path / "page/report.html").exists()


def test_out_is_a_folder_as_in_compare(tmp_path):
    done = run_script(SCRIPT, "--out", tmp_path / "page.html")
    assert done.returncode == 2 and f"--out={tmp_path}/page.html: give a folder, in which the page is" in done.stderr


def test_the_page_calls_a_model_by_its_label(runs, tmp_path):
    run = shutil.copytree(runs[1], tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["label"] = "FoX (Pro)"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    write_report([run], [], tmp_path / "page.html")
    assert ["Model", "FoX (Pro)"] in Page((tmp_path / "page.html").read_text()).rows


def test_only_a_page_is_replaced_by_a_page(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results/results.json").write_text('{"piqa": {"acc,none": 0.625}}')
    mine = tmp_path / "config.yaml"
    mine.write_text("a: 1\n")
    with pytest.raises(AnalysisError, match=r"config\.yaml exists and is not a page of this script"):
        write_report([], [tmp_path / "results"], mine)
    assert mine.read_text() == "a: 1\n"
    for _ in range(2):
        write_report([], [tmp_path / "results"], tmp_path / "page.html")


def test_results_that_are_called_the_same_by_chance_are_no_seeds(tmp_path):
    for folder, loss in (("a", 3.0), ("b", 4.0)):
        (tmp_path / folder / "fox").mkdir(parents=True)
        np.savez(tmp_path / folder / "fox/results.npz", **{"val/loss_per_token": np.full(8, loss)})
    paths = [str(tmp_path / folder / "fox") for folder in "ab"]
    by_chance = position_loss.told_apart([position_loss.read_named(path) for path in paths])
    assert {name: loss.shape for name, loss in position_loss.group_seeds(by_chance).items()} == {
        "a/fox": (8,),
        "b/fox": (8,),
    }
    seeds = position_loss.told_apart([position_loss.read_named(f"FoX={path}") for path in paths])
    assert {name: loss.shape for name, loss in position_loss.group_seeds(seeds).items()} == {"FoX": (2, 8)}
    once = position_loss.told_apart([position_loss.read_named(path) for path in [paths[0], paths[0]]])
    assert {result.name for result in once} == {"fox"}


def test_the_same_weights_twice_are_one_result(tmp_path):
    for folder, weights in (("a", "708e"), ("b", "708e"), ("c", "bc2d")):
        (tmp_path / folder / "fox").mkdir(parents=True)
        np.savez(tmp_path / folder / "fox/results.npz", **{"val/loss_per_token": np.full(8, 3.0)})
        summary = {"model": "fox", "weights": weights, "eval_len": 8, "eval_tokens": 16}
        (tmp_path / folder / "fox/results.json").write_text(json.dumps(summary))
    left_out = write_report([], [tmp_path / folder for folder in "abc"], tmp_path / "page.html")
    assert left_out == [f"{tmp_path}/b/fox has the results of {tmp_path}/a/fox again: same weights, same texts"]
    seeds = [position_loss.read_named(f"FoX={tmp_path / folder}/fox") for folder in "abc"]
    assert position_loss.group_seeds(position_loss.without_repeats(seeds)[0])["FoX"].shape == (2, 8)
