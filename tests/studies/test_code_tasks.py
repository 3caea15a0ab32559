"""A task made of held-out code: lm_eval can read it, and the questions are about the text."""

import json
from pathlib import Path

import numpy as np
import pytest

from studies import code_tasks
from tests.evaluation.scripts import index_few_tasks

pytestmark = [pytest.mark.slow, pytest.mark.rare("no contract: studies")]

TEXT = "".join(
    f"def function_{n}(value):\n    result = value + {n}\n    other = compute(result)\n    return other.name\n\n"
    for n in range(40)
)


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Three held-out texts, which the test may change."""
    texts = [TEXT.replace("function", f"function_{n}") for n in range(3)]

    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            return texts[ids[0]]

    class HeldOut:
        sequences = 3

        def groups(self):
            return np.array([7, 7, 3])

        def read(self, row):
            return np.array([[row, 0]])

    (tmp_path / "corpus/tokenizer").mkdir(parents=True)
    monkeypatch.setattr(code_tasks, "find_heldout", lambda path: tmp_path / "corpus")
    monkeypatch.setattr(code_tasks, "open_heldout", lambda folder: HeldOut())
    monkeypatch.setattr(code_tasks, "load_tokenizer", lambda folder: Tokenizer())
    return texts


def contents(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def test_a_question_has_the_true_line_and_the_group_of_its_text(corpus, tmp_path):
    assert code_tasks.make_tasks("corpus", tmp_path / "tasks", 10) == 10
    first = contents(tmp_path / "tasks")
    rows = [json.loads(line) for line in first["next_line.jsonl"].decode().splitlines()]
    assert len(rows) == 10
    for row in rows:
        assert len(row["code"]) <= code_tasks.MOST
        (number,) = (n for n, text in enumerate(corpus) if f"{row['code']}{row['choices'][row['label']]}\n" in text)
        assert row["heldout_group"] == [7, 7, 3][number], "that of the text"
    code_tasks.make_tasks("corpus", tmp_path / "tasks", 10)
    assert first == contents(tmp_path / "tasks")


def test_lm_eval_finds_the_questions_wherever_the_folder_is(corpus, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    import datasets

    from forgetting_transformer.evaluation import harness

    index_few_tasks(monkeypatch.setattr)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    code_tasks.make_tasks("corpus", tmp_path / "tasks", 10)
    (tmp_path / "tasks").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    task = harness.load_task("next_line", harness.task_manager(Path("moved")))["next_line"]
    rows = [json.loads(line) for line in (tmp_path / "moved/next_line.jsonl").read_text().splitlines()]
    assert list(task.test_docs()) == rows and len(rows) == 10
