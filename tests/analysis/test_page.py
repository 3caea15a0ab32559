"""The report: one file, everything in it, differences marked, and nothing but text from a run's texts."""

import base64
import html
import json
import re
from pathlib import Path

import numpy as np
import pytest

from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.analysis.evaluations import (
    LONGBENCH,
    Evaluation,
    Number,
    from_needle,
    from_position_loss,
    write_evaluation,
)
from forgetting_transformer.analysis.page import write_report
from tests.analysis.conftest import MakeRun, add_callbacks
from tests.evaluation.scripts import run_script

SCRIPT = "scripts/report.py"


def rows_of(page: str, which: str = "") -> list[list[str]]:
    """The texts of the rows of all tables; `which` chooses those with these attributes."""
    rows = re.findall(rf"<tr{which}>(.*?)</tr>", page, re.DOTALL)
    cells = (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows)
    return [[html.unescape(re.sub("<.*?>", "", cell)) for cell in row] for row in cells]


@pytest.fixture
def runs(make_run: MakeRun) -> list[Path]:
    """A run with callbacks, and one with other settings and a name that is no good for HTML."""
    fox, other = add_callbacks(make_run("fox")), make_run("<script>alert(1)", seed=1)
    config = json.loads((other / "config.yaml").read_text())
    config["tag"] = "<img src=x onerror=alert(2)>"
    del config["datamodule"]["dataset"]
    config["output_dir"] = None
    (other / "config.yaml").write_text(json.dumps(config))
    return [fox, other]


def results(folder: Path) -> Path:
    """Results of each evaluation, as its script leaves them."""
    slope = {"position": 32, "before": 3.9, "after": 3.4, "per_doubling": -0.5, "standard_error": 0.1}
    summary = {"model": "fox", "train_length": 32, "eval_len": 64, "eval_tokens": 128}
    summary["slope"] = [slope | {"per_token": -0.01}]
    record = {"length": 100, "depth": 0.5, "words": 0.25}
    memory = Number("memory", "tokens", 17.0, at={"layer": 0, "head": 1, "at_least": True})

    for name, evaluation in {
        "per_token_loss/fox": from_position_loss(summary),
        "niah": from_needle({"model": "fox", "mode": "easy", "train_length": 64, "records": [record]}),
        "gates": Evaluation("forget_gates", "fox", [memory]),
    }.items():
        write_evaluation(evaluation, folder / name)
    np.savez(folder / "per_token_loss/fox/results.npz", **{"val/loss_per_token": np.linspace(4, 3, 64)})
    (folder / "per_token_loss/fox/results.json").write_text(json.dumps(summary))
    (folder / "gates/gates.png").write_bytes(b"a picture")
    for name, content in {"lm/fox": {"piqa": {"acc,none": 0.625}}, "lb/fox": dict.fromkeys(LONGBENCH, 12.5)}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "results.json").write_text(json.dumps(content))
    return folder


@pytest.mark.slow
def test_one_page_holds_everything_and_nothing_but_text_from_texts(runs, tmp_path):
    write_report(runs, [results(tmp_path / "results")], tmp_path / "page")
    text = (tmp_path / "page/report.html").read_text()
    assert re.findall(r"<h2>(.*?)</h2>", text) == [
        "Runs",
        "Loss against training tokens",
        "Wall time, learning rate, gradient norm, throughput",
        "Evaluations during training",
        "Loss at every position, in training",
        "Loss at every position, evaluated",
        "Needle in a haystack",
        "Forget gates",
        "lm-evaluation-harness",
        "LongBench",
        "Configurations",
    ]
    pictures = re.findall(r'<img [^>]*src="(.*?)"', text)
    assert len(pictures) == 5 and all(source.startswith("data:image/png;base64,") for source in pictures)
    assert f"data:image/png;base64,{base64.b64encode(b'a picture').decode()}" in pictures
    cells = {cell for row in rows_of(text) for cell in row}
    assert {"62.50", "12.50", "-0.5 ± 0.1", "layer 0, head 1, at_least True", "4.2000"} <= cells
    assert ["Model", "fox_pro", "fox_pro"] in rows_of(text)
    # Names are as in the figures, and have the model in them.
    assert any("<script>alert(1) (fox_pro)" in cell for cell in cells)
    assert not re.search("<(script|link|iframe|object)|<[^>]*onerror", text)
    assert not re.search(r"https?://", re.sub(r'base64,[^"]*', "", text))
    assert rows_of(text, ' class="differs"') == [
        ["seed", "0", "1"],
        ["datamodule.dataset", '"code"', "– not there –"],
        ["tag", "– not there –", '"<img src=x onerror=alert(2)>"'],
        ["output_dir", "– not there –", "null"],
    ]
    assert ["optimizer.lr", "0.003", "0.003"] in rows_of(text), "what agrees is there too"


def test_what_cannot_be_reported_is_refused(tmp_path):
    for runs, results, said in (
        ([], [], "nothing to report"),
        ([tmp_path / "none"], [], "is not a run's output_dir"),
        ([], [tmp_path], "there are no results of evaluations in it"),
    ):
        with pytest.raises(AnalysisError, match=said):
            write_report(runs, results, tmp_path / "page")
    done = run_script(SCRIPT, tmp_path, "--out", "page.html")
    assert done.returncode == 2 and "--out=page.html: give a folder, in which the page is" in done.stderr
