"""studies/count_answers.py: what models write for the next line of code, counted."""

import json
import runpy

import pytest

from tests.sweep.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.rare("no contract: studies")]


def test_answers_are_counted_by_run_and_no_file_of_others_is_replaced(tmp_path, capsys):
    count = runpy.run_path(str(ROOT / "studies" / "count_answers.py"))["main"]
    out = tmp_path / "answers.json"
    study = {"environment": {"commit": "c"}, "started": "s", "corpus": {"fingerprint": "f"}}
    call = [str(tmp_path / "study"), "--out", str(out)]
    with pytest.raises(SystemExit):
        count(call)
    assert "run the stages downstream and collect" in capsys.readouterr().err
    (tmp_path / "study" / "report").mkdir(parents=True)
    (tmp_path / "study" / "report" / "study.json").write_text(json.dumps(study))
    # Two ranks of one run, and another run.
    predictions = {"fox_seed0/pred/lcc.0": ["\n  x = 1\ny", "# no\n// code"], "fox_seed0/pred/lcc.1": ["x = 2"]}
    for name, preds in (predictions | {"mamba2_seed0/pred/lcc.0": ["```"]}).items():
        file = tmp_path / "study" / "downstream" / "next_line" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps({"pred": pred, "answers": ["x = 1"]}) + "\n" for pred in preds))
    for _ in range(2):
        count(call)
    found = json.loads(out.read_text())
    assert found["corpus"] == "f" and found["runs"] == {
        "fox_seed0": {"answers": 3, "no_code": 1, "right": 1}, "mamba2_seed0": {"answers": 1, "no_code": 1, "right": 0},
    }  # fmt: skip
    out.write_text("{}")
    with pytest.raises(SystemExit):
        count(call)
    assert out.read_text() == "{}" and "not of this script" in capsys.readouterr().err
