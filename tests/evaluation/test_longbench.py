"""LongBench: its prompts, its truncation, its scores, and answers that are asked for once."""

import json
import zipfile

import pytest

pytest.importorskip("rouge", reason="the extra `eval` is not installed")

from forgetting_transformer.analysis.evaluations import LONGBENCH, read_evaluation
from forgetting_transformer.evaluation import generation, longbench
from forgetting_transformer.evaluation.models import EvaluationError
from tests.evaluation.conftest import ALONE, sentences


@pytest.fixture
def data(tmp_path):
    """Three examples of every set, in the benchmark's format."""
    folder = tmp_path / "longbench"
    folder.mkdir()
    for name in longbench.SETS:
        examples = [
            {
                "input": f"what is {n} ?",
                "context": sentences(n, 60),
                "answers": ["the cat sat", "red"],
                "length": 60,
                "dataset": name,
                "language": "en",
                "all_classes": ["cat", "dog"] if name == "trec" else None,
                "_id": str(n),
            }
            for n in range(3)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    return folder


def test_the_sets_are_the_papers_fourteen_with_the_benchmarks_lengths():
    assert tuple(longbench.SETS) == tuple(LONGBENCH) and len(longbench.SETS) == 14
    assert {name: entry.max_new_tokens for name, entry in longbench.SETS.items()} == {
        **dict.fromkeys(("narrativeqa", "qasper", "samsum"), 128),
        **dict.fromkeys(("multifieldqa_en", "trec", "lcc", "repobench-p"), 64),
        **dict.fromkeys(("hotpotqa", "2wikimqa", "musique", "triviaqa"), 32),
        **dict.fromkeys(("gov_report", "qmsum", "multi_news"), 512),
    }
    assert set(longbench.SETS) - set(longbench.choose_sets(None, even=True)) == {"narrativeqa", "musique", "qmsum"}
    assert longbench.choose_sets("lcc,trec") == ["lcc", "trec"]
    with pytest.raises(EvaluationError, match=r"--sets=qmsum: the sets of LongBench-E are qasper, "):
        longbench.choose_sets("qmsum", even=True)


def test_prompts_agree_with_lm_evals_copy_of_the_benchmark():
    lm_eval = pytest.importorskip("lm_eval")
    from pathlib import Path

    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: None)
    folder = Path(lm_eval.__file__).parent / "tasks" / "longbench"
    for name, entry in longbench.SETS.items():
        task = yaml.load((folder / f"{name}.yaml").read_text(encoding="utf-8"), Loader)
        theirs = task["doc_to_text"].replace("{{context}}", "{context}").replace("{{question}}", "{input}")
        # Theirs has fewer line breaks in places than the benchmark.
        assert entry.prompt.split() == theirs.split(), name


def test_scores_are_the_benchmarks():
    for prediction, answer, score in (
        ("The Cat, sat!", "cat sat", 1.0),
        ("the cat sat on a mat", "cat sat", 2 * (2 / 4) * 1 / (2 / 4 + 1)),
        ("cat cat cat", "cat", 0.5),
        ("", "cat", 0.0),
    ):
        assert longbench.f1(prediction, answer) == pytest.approx(score)
    assert longbench.rouge_l("the cat sat on the mat", "the cat sat on the mat") == pytest.approx(1.0, abs=1e-6)
    # The longest common subsequence of "the cat ran" and "the dog ran" has 2 of 3 words: P = R = F.
    assert longbench.rouge_l("the cat ran", "the dog ran") == pytest.approx(2 / 3, abs=1e-6)
    assert longbench.rouge_l("", "the dog ran") == longbench.rouge_l(" . ", "the dog ran") == 0.0
    classes = ["Food", "Sport", "entity", "Other entity"]  # "entity" is part of another's name
    for prediction, answer, score in (
        ("Food", "Food", 1.0),
        ("Food or Sport", "Food", 0.5),
        ("Sport", "Food", 0.0),
        ("Other entity", "Other entity", 1.0),
    ):
        assert longbench.classification(prediction, answer, classes) == score
    assert longbench.code_similarity("\n# a comment\n```python\nx = 1\ny = 2", "x = 1") == 1.0
    assert longbench.code_similarity("abcd", "abxd") == 0.75
    assert longbench.code_similarity("# nothing", "x") == 0.0
    assert longbench.code_line("\n\nx = 1\ny") == "x = 1" and longbench.code_line("x = 1  # one\n// y") is None


def test_the_first_line_of_an_answer_counts_and_the_best_reference():
    def score(name: str, prediction: str, *answers: str) -> float:
        return longbench.score_example(name, {"pred": prediction, "answers": answers})

    assert score("hotpotqa", "\nParis\nLondon is", "Paris") == 1.0
    whole = score("gov_report", "the cat sat.\nthe dog ran.", "the cat sat.")
    assert whole == pytest.approx(1.0, abs=1e-6), "of a summary too"
    assert score("hotpotqa", "red", "blue", "red", "green") == 1.0


def test_longbench_e_has_a_score_for_each_range_of_lengths():
    records = [{"pred": "red", "answers": ["red"], "length": n} for n in (10, 3999, 4000)]
    records.append({"pred": "blue", "answers": ["red"], "length": 7999})
    assert longbench.score_by_length("hotpotqa", records) == {"0-4k": 100.0, "4-8k": 50.0, "8k+": None}


def test_a_prompt_that_is_too_long_loses_its_middle(model):
    example = {"context": sentences(0, 200), "input": "what is best ?"}
    whole = longbench.build_prompt(model, "qasper", example, 10_000)
    assert whole[0] == 0
    # Half of the length counts the first token, and the halves become text once more.
    halves = (model.tokenizer.decode(half, skip_special_tokens=True) for half in (whole[:50], whole[-50:]))
    expected = [0, *model.tokenizer("".join(halves), add_special_tokens=False).input_ids]
    assert longbench.build_prompt(model, "qasper", example, 101).tolist() == expected
    # Braces in a text are text.
    braces = {"context": "{input} {0} {context.__class__}", "input": "{}"}
    assert longbench.build_prompt(model, "lcc", braces, 100).shape


def test_scores_have_errors(model, data, tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "continue_prompts", lambda *_: ["the cat sat\nand more"])
    options = {"data": data, "max_length": 40}
    longbench.answer_sets(model, tmp_path, ALONE, sets=["samsum"], **options)
    _, missing = longbench.score_sets(tmp_path)
    assert set(missing) == longbench.SETS.keys() - {"samsum"}
    (score,) = read_evaluation(tmp_path).numbers
    assert (score.task, score.value, score.standard_error, score.samples) == ("samsum", 100.0, 0.0, 3)
    with pytest.raises(EvaluationError, match=r"holds results with limit=None, this evaluation has 1"):
        longbench.answer_sets(model, tmp_path, ALONE, sets=["samsum", "lcc"], limit=1, **options)


def test_data_is_read_from_the_benchmarks_archive_and_what_is_missing_is_said(data, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(data / "trec.jsonl", "data/trec.jsonl")
    expected = longbench.read_examples("trec", data)
    assert longbench.read_examples("trec", tmp_path / "data.zip") == expected
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_args, **_options: str(tmp_path / "data.zip"))
    assert longbench.read_examples("trec", None) == expected
    with pytest.raises(EvaluationError, match=r"no item named 'data/lcc.jsonl' in the archive"):
        longbench.read_examples("lcc", tmp_path / "data.zip")

    def offline(*_arguments, **_options):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    advice = r"hf download --repo-type dataset THUDM/LongBench data.zip .* --data_dir"
    with pytest.raises(EvaluationError, match=rf"cannot be downloaded \(no network\): .*{advice}"):
        longbench.read_examples("trec", None)
    (data / "trec.jsonl").write_text('{"question": "other"}\n')
    with pytest.raises(EvaluationError, match=r"is not a set of LongBench \(KeyError: 'context'\)"):
        longbench.read_examples("trec", data)
