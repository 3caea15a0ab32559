"""lm-evaluation-harness: the adapter's log-likelihoods are the model's, and the paper's eleven tasks run through it."""

import json

import datasets
import pytest

lm_eval = pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")

from lm_eval.api.instance import Instance  # noqa: E402

from forgetting_transformer.analysis import published  # noqa: E402
from forgetting_transformer.analysis.evaluations import read_evaluation  # noqa: E402
from forgetting_transformer.evaluation import harness  # noqa: E402
from forgetting_transformer.evaluation.models import EvaluationError  # noqa: E402
from tests.evaluation.conftest import ALONE  # noqa: E402
from tests.evaluation.scripts import index_few_tasks, run_script  # noqa: E402

SCRIPT = "eval/lm_eval_harness/run_lm_eval.py"
FEW_TASKS = "from tests.evaluation.scripts import index_few_tasks\nindex_few_tasks()"
QUESTION = {"choices": {"text": ["cat", "red house", "the dog ran"], "label": ["A", "B", "C"]}, "answerKey": "B"}

#: Two examples in the format of each dataset on the hub, by (path, configuration).
DATA = {
    ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1"): {"page": " = cat = \n the cat sat on the mat . "},
    ("EleutherAI/lambada_openai", "default"): {"text": "the cat sat on the mat"},
    ("baber/piqa", None): {"goal": "eat", "sol1": "sandwich", "sol2": "the house", "label": 0},
    ("Rowan/hellaswag", None): {
        "ind": 1,
        "activity_label": "park",
        "ctx_a": "the dog ran .",
        "ctx_b": "then the cat",
        "ctx": "the dog ran . then the cat",
        "endings": ["sat on the mat", "red", "ran", "eat"],
        "source_id": "x",
        "split": "val",
        "split_type": "indomain",
        "label": "2",
    },
    ("allenai/winogrande", "winogrande_xl"): {
        "sentence": "the cat ran and _ sat",
        "option1": "dog",
        "option2": "cat",
        "answer": "2",
    },
    ("allenai/ai2_arc", "ARC-Easy"): {"id": "1", "question": "what is small ?", **QUESTION},
    ("allenai/ai2_arc", "ARC-Challenge"): {"id": "2", "question": "what is red ?", **QUESTION},
    ("aps/super_glue", "copa"): {
        "premise": "the cat sat.",
        "choice1": "The dog ran.",
        "choice2": "The mat is red.",
        "question": "effect",
        "idx": 0,
        "label": 1,
    },
    ("allenai/openbookqa", "main"): {"id": "3", "question_stem": "the house is", **QUESTION},
    ("allenai/sciq", None): {
        "question": "what sat ?",
        "distractor1": "dog",
        "distractor2": "mat",
        "distractor3": "house",
        "correct_answer": "cat",
        "support": "the cat sat",
    },
    ("aps/super_glue", "boolq"): {"question": "is the cat red", "passage": "the cat is small", "idx": 0, "label": 0},
}


@pytest.fixture
def adapter(model):
    return harness.HarnessModel(model, 32, 3, "fp32", ALONE)


@pytest.fixture(autouse=True)
def few_tasks(monkeypatch):
    index_few_tasks(monkeypatch.setattr)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """datasets.load_dataset reads the examples above from local files, and fails for all else as without a network."""
    load = datasets.load_dataset

    def from_files(path, name=None, **_options):
        if (path, name) not in DATA:
            raise ConnectionError(f"Couldn't reach {path!r} on the Hub")
        file = tmp_path / "hub" / f"{path.replace('/', '--')}-{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{json.dumps(DATA[path, name])}\n" * 2)
        return load("json", data_files={split: str(file) for split in ("train", "validation", "test")})

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets, "load_dataset", from_files)


def instance(kind: str, *arguments: object) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def test_scores_and_texts_are_those_of_lm_evals_own_backend(quickstart, model, adapter):
    """The same requests of each type through lm_eval's model of transformers, where the tokenizer adds BOS too."""
    from lm_eval.models.huggingface import HFLM

    def backend(add_bos_token: bool) -> HFLM:
        options = {"device": "cpu", "dtype": "float32", "batch_size": 1, "max_length": 32}
        return HFLM(pretrained=str(quickstart.hf), add_bos_token=add_bos_token, **options)

    # Whole texts begin with BOS there anyway; add_bos_token would put it twice.
    theirs = dict.fromkeys(("loglikelihood", "generate_until"), backend(True)) | {
        "loglikelihood_rolling": backend(False)
    }
    pairs = [("the cat", " sat on"), ("a", " house is red and small"), ("the cat " * 20, " dog"), ("", " dog")]
    text = "the cat sat on the red mat . " * 10
    asked = [
        {"until": ["."], key: 5} for key in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    ]
    requests = {
        "loglikelihood": pairs,
        "loglikelihood_rolling": [(text,), ("the cat",)],
        "generate_until": [("the cat", options) for options in asked]
        + [("the dog " * 20, {"until": [], "max_gen_toks": 9})],
    }
    for kind, arguments in requests.items():
        instances = [instance(kind, *each) for each in arguments]
        ours = getattr(adapter, kind)(instances, disable_tqdm=True)
        for mine, their in zip(ours, getattr(theirs[kind], kind)(instances, disable_tqdm=True), strict=True):
            if kind == "generate_until":
                assert mine.split() == their.split()
            else:
                assert mine == pytest.approx(their, rel=1e-4)


def test_a_key_that_is_null_in_a_task_counts_as_left_out(adapter):
    null = dict.fromkeys(("until", "temperature", "num_beams", "do_sample"))
    asked = [instance("generate_until", "the cat", {"max_gen_toks": 5} | each) for each in (null, {"until": []})]
    texts = [adapter.generate_until([one], disable_tqdm=True) for one in asked]
    assert texts[0] == texts[1] and texts[0][0]


def test_what_the_adapter_does_not_do_is_refused_by_name(adapter):
    for options, message in (
        ({"max_new_tokens": None}, "max_gen_toks=256 tokens, and its prompt needs room too in --max_len=32"),
        ({"max_gen_toks": 5, "temperature": 0.8}, "asks for do_sample=True"),
        ({"max_gen_toks": 5, "num_beams": 4}, "asks for num_beams=4"),
    ):
        with pytest.raises(EvaluationError, match=message):
            adapter.generate_until([instance("generate_until", "the cat", options)], disable_tqdm=True)
    message = r"a continuation of 33 tokens, ' dog dog .*…, does not fit --max_len=32"
    with pytest.raises(EvaluationError, match=message):
        adapter.loglikelihood([instance("loglikelihood", "the cat", " dog" * 33)], disable_tqdm=True)


@pytest.mark.slow
def test_the_papers_eleven_tasks_fill_its_table(quickstart, hub, tmp_path, monkeypatch):
    command = (SCRIPT, "--model_path", quickstart.hf, "--save_dir", tmp_path, "--batch_size", 4)
    with monkeypatch.context() as patch:
        patch.delitem(DATA, ("baber/piqa", None))
        done = run_script(*command)
    assert done.returncode == 1
    assert "the data of task piqa cannot be loaded" in done.stderr and "TaskManager().load(['piqa'])" in done.stderr
    assert "~/.cache/huggingface/datasets" in done.stderr and "HF_DATASETS_CACHE" in done.stderr
    finished = list(json.loads((tmp_path / "hf/results.json").read_text()))
    assert finished == ["wikitext", "lambada_openai"], "what was finished is kept"
    done = run_script(*command)
    assert done.returncode == 0 and not any(f"{task} …" in done.stderr for task in finished), done.stderr
    results = json.loads((tmp_path / "hf/results.json").read_text())
    assert list(results) == published.TASKS and len(results) == 11
    evaluation = read_evaluation(tmp_path / "hf")
    row = {key: score.value for key, score in published.lm_eval_row(evaluation).items()}
    accuracies = [row[key] for key in published.LM_EVAL if "perplexity" not in key]
    assert len(accuracies) == 10 and all(0 <= value <= 100 for value in accuracies)
    assert evaluation.find("piqa", "acc").standard_error == results["piqa"]["acc_stderr,none"]
    assert row["average"] == pytest.approx(sum(accuracies) / 10)
    assert done.stdout.count("|") > 2 * 14
    other = run_script(*command, "--limit", 1)
    assert other.returncode == 1 and "holds results with limit=None, this evaluation has 1" in other.stderr


@pytest.mark.slow
def test_scores_are_the_same_whatever_the_number_of_processes(quickstart, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tasks = ["--include_path", "eval/lm_eval_harness/example", "--tasks", "code_choice", "--device", "cpu"]
    for processes in (1, 2):
        arguments = ["--model_path", quickstart.hf, "--save_dir", tmp_path / f"{processes}"]
        done = run_script(SCRIPT, *arguments, *tasks, processes=processes, before=FEW_TASKS)
        assert done.returncode == 0, done.stderr
    alone, shared = (json.loads((tmp_path / f"{processes}/hf/results.json").read_text()) for processes in (1, 2))
    assert alone == shared and alone["code_choice"]["sample_len"] == 6
    (tmp_path / "taken/hf").mkdir(parents=True)
    (tmp_path / "taken/hf/evaluation.json").write_text("somebody's own")
    done = run_script(SCRIPT, "--model_path", quickstart.hf, "--save_dir", tmp_path / "taken", *tasks)
    assert done.returncode == 1 and "evaluation.json is not as lm_eval_harness has written it" in done.stderr
