"""Tasks made of held-out code: both evaluations can read them, and the questions are about the text."""

import json

import numpy as np
import pytest
import yaml

from forgetting_transformer.analysis import AnalysisError
from forgetting_transformer.evaluation import code_tasks
from forgetting_transformer.evaluation.longbench import read_examples

TEXT = "".join(
    f"def function_{n}(value):\n    result = value + {n}\n    other = compute(result)\n    return other.name\n\n"
    for n in range(40)
)


def test_a_question_is_a_line_of_the_text_and_wrong_lines_are_not():
    questions = list(code_tasks.ask(TEXT, 20, np.random.default_rng(0)))
    assert len(questions) == 20 and len({question["before"] for question in questions}) == 20
    for question in questions:
        assert TEXT.startswith(f"{question['before']}{question['line']}\n") and question["before"].endswith("\n")
        assert len(question["before"]) >= code_tasks.FEWEST
        assert len({*question["wrong"], question["line"]}) == 4
        assert all(f"\n{line}\n" in TEXT for line in question["wrong"])
        indents = {len(line) - len(line.lstrip()) for line in [*question["wrong"], question["line"]]}
        assert len(indents) == 1
    assert {question["place"] for question in questions} == {0, 1, 2, 3}


def test_lines_that_no_score_could_tell_are_not_asked_for():
    asked = ["    result = value + 1", "for line in self.lines:"]
    assert all(code_tasks.is_code(line) for line in asked)
    left_out = [
        "",
        "    else:",
        "    # result = value",
        'x = """text"""',
        "url = 'http://a.b'",
        "a words only line",
        "x" * 200,
    ]
    assert not any(code_tasks.is_code(line) for line in left_out)
    assert list(code_tasks.ask("short = text()\n" * 5, 5, np.random.default_rng(0))) == []


def test_tasks_are_in_the_formats_of_both_evaluations(tmp_path, monkeypatch):
    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            return TEXT.replace("function", f"function_{ids[0]}")

    class HeldOut:
        sequences = 3

        def read(self, row):
            return np.array([[row, 0]])

    (tmp_path / "corpus/tokenizer").mkdir(parents=True)
    monkeypatch.setattr(code_tasks, "find_heldout", lambda path: tmp_path / "corpus")
    monkeypatch.setattr(code_tasks, "open_heldout", lambda folder: HeldOut())
    monkeypatch.setattr("forgetting_transformer.tokenizer.load_tokenizer", lambda folder: Tokenizer())
    (tmp_path / "longbench").mkdir()
    (tmp_path / "longbench/lcc.jsonl").write_text("LongBench's own")
    with pytest.raises(AnalysisError, match=r"longbench/lcc\.jsonl is not as scripts/code_tasks\.py has written it"):
        code_tasks.make_tasks("corpus", tmp_path / "longbench", 10)
    assert [file.read_text() for file in (tmp_path / "longbench").iterdir()] == ["LongBench's own"]
    assert code_tasks.make_tasks("corpus", tmp_path / "tasks", 10) == 10
    first = {file.name: file.read_bytes() for file in (tmp_path / "tasks").iterdir()}
    examples = read_examples("lcc", tmp_path / "tasks")
    assert len(examples) == 10 and {e["context"].split("(")[0] for e in examples} == {
        f"def function_{n}_0" for n in range(3)
    }
    task = yaml.safe_load(first["next_line.yaml"])
    assert task["dataset_kwargs"]["data_files"]["test"] == str(tmp_path / "tasks/next_line.jsonl")
    rows = [json.loads(line) for line in first["next_line.jsonl"].decode().splitlines()]
    for row, example in zip(rows, examples, strict=True):
        assert row["choices"][row["label"]] == example["answers"][0] and example["context"].endswith(row["code"])
        assert len(row["code"]) <= code_tasks.SHORT
    code_tasks.make_tasks("corpus", tmp_path / "tasks", 10)
    assert first == {file.name: file.read_bytes() for file in (tmp_path / "tasks").iterdir()}
