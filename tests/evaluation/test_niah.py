"""Needle in a haystack: prompts of the stated length and depth, scores of known answers, no rating lost."""

import json

import numpy as np
import pytest
import torch

from forgetting_transformer.analysis.evaluations import from_needle
from forgetting_transformer.evaluation import generation
from forgetting_transformer.evaluation import needle as niah
from forgetting_transformer.evaluation.models import EvaluationError
from forgetting_transformer.evaluation.needle import Judge
from forgetting_transformer.evaluation.workers import Workers
from forgetting_transformer.files import UnreadableError
from tests.evaluation.conftest import ALONE, VOCABULARY, sentences
from tests.evaluation.scripts import ROOT, run_script

SCRIPT = "eval/niah/run_niah.py"
NEEDLE = niah.Needle("what is best ?", "the best thing is", "eat a sandwich in the park")
#: Of words that the tokenizer knows.
HIDDEN = "\nthe best thing is eat a sandwich in the park .\n"
STOP = VOCABULARY.index(".")


@pytest.fixture
def essays(tmp_path):
    """Of 600 words each; read in the order of their names."""
    folder = tmp_path / "essays"
    for n, name in enumerate(("b.txt", "a.txt", "c.txt")):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(sentences(n, 600) + " ")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


def haystack(model, count: int = 1000, every: int = 5) -> niah.Haystack:
    """Tokens 20, 21, …, 33 again and again; every fifth ends a sentence."""
    position = np.arange(count)
    return niah.Haystack(model, np.where(position % every == every - 1, STOP, 20 + position % 14))


def ids_of(model, text: str) -> list[int]:
    return model.tokenizer(text, add_special_tokens=False).input_ids


def split(text: list[int], needle: list[int]) -> tuple[int, list[int]]:
    """Where the only needle is, and the text without it."""
    (place,) = (n for n in range(len(text)) if text[n : n + len(needle)] == needle)
    return place, text[:place] + text[place + len(needle) :]


@pytest.mark.parametrize(("mode", "depth"), [("easy", 0.0), ("standard", 0.3), ("easy", 1.0)])
def test_a_prompt_has_its_length_and_the_needle_lies_at_its_depth(model, mode, depth):
    hay = haystack(model)
    prompt = hay.prompt(NEEDLE, mode, niah.Cell(200, depth, 0))
    needle, query = (ids_of(model, text) for text in (NEEDLE.text(mode), NEEDLE.query))
    assert prompt.shape == (200,) and prompt.dtype == np.int64
    assert prompt[0] == 0, "the beginning-of-sequence token"
    assert prompt[-len(query) :].tolist() == query
    place, without = split(prompt[1 : -len(query)].tolist(), needle)
    room = len(without)
    assert without == hay.tokens[:room].tolist()
    assert depth * room - 0.05 * room - 1 <= place <= depth * room + 0.5
    if 0 < depth < 1:
        assert without[place - 1] == STOP, "after the end of a sentence"


def test_samples_use_other_parts_of_a_text_that_goes_round(model):
    hay = haystack(model, 300, every=1000)
    one, two = (hay.prompt(NEEDLE, "easy", niah.Cell(201, 0.5, n)) for n in (0, 1))
    assert one[1] == 20 and two[1] == hay.tokens[201]
    needle, query = ids_of(model, NEEDLE.text("easy")), ids_of(model, NEEDLE.query)
    place, without = split(one[1 : -len(query)].tolist(), needle)
    assert place == round(len(without) / 2), "at its depth exactly where no sentence ends nearby"
    with pytest.raises(
        EvaluationError, match=r"a prompt of 20 tokens has no room for text: needle and query alone have"
    ):
        hay.prompt(NEEDLE, "easy", niah.Cell(20, 0.5, 0))


def test_haystacks_are_folders_and_held_out_documents(model, essays, quickstart, tmp_path):
    hay = niah.find_haystack(model, "easy", essays, tmp_path, None, 0)
    names = ("a.txt", "b.txt", "c.txt")
    assert hay.tokens.tolist() == ids_of(model, " ".join((essays / name).read_text() for name in names))
    found = niah.find_haystack(model, "easy", None, tmp_path, str(quickstart.data), 300)
    assert len(found.tokens) == 512, "two documents of 256"
    assert found.is_end.tolist() == (found.tokens == STOP).tolist()
    (tmp_path / "none").mkdir()
    with pytest.raises(EvaluationError, match=r"there is no text in .*none: give a folder with \.txt files"):
        niah.read_texts(tmp_path / "none", "")


@pytest.mark.parametrize(
    ("prediction", "exact", "words"),
    [
        (" Eat a sandwich,  in the Park. And then", 1.0, 1.0),
        ("I would eat a big sandwich in the park", 0.0, 1.0),
        ("park the in sandwich a eat", 0.0, 1 / 6),
        # "eat a" and "in the park" are five words in order, though "sandwich in the park" is the longest run.
        ("a sandwich eat a in the park sandwich", 0.0, 5 / 6),
        ("", 0.0, 0.0),
        ("nothing " * 12 + "eat a sandwich in the park", 0.0, 0.0),
    ],
)
def test_scores_of_known_answers(prediction, exact, words):
    assert niah.exact_match(prediction, NEEDLE.answer) == exact
    assert niah.word_match(prediction, NEEDLE.answer) == pytest.approx(words)


# The paper's prompts
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [30, 100])
def test_the_paper_takes_the_needle_and_a_buffer_from_the_length(model, essays, tmp_path, capsys, depth):
    text = niah.find_essays(essays, tmp_path)
    assert text == "".join((essays / f"{name}.txt").read_text() for name in "abc")
    hay, needle = niah.Essays(model.tokenizer, text, 0), ids_of(model, HIDDEN)
    found = ids_of(model, hay.context(HIDDEN, 1000, depth))
    assert len(found) == 1000 - 200
    place, without = split(found, needle)
    assert without == ids_of(model, text)[: len(without)]
    wanted = int(len(without) * depth / 100)
    after_stop = max([n + 1 for n in range(wanted) if without[n] == STOP], default=0)
    assert place == (wanted if depth == 100 else after_stop)
    whole = hay.prompt_text(NEEDLE.text("easy"), NEEDLE.asked, 400, 50)
    assert whole.endswith(
        "\n\nThere is an important piece of information hidden inside the above document. Now that you've read the "
        "document, I will quiz you about it. Answer the following question: what is best ? Answer: the best thing is"
    )
    assert hay.prompt(NEEDLE, "paper_easy", niah.Cell(400, 0.5, 0)).tolist() == [0, *ids_of(model, whole)]
    with pytest.raises(EvaluationError, match=r"205 tokens has no room for text: the needle has 11, and 200"):
        hay.context(HIDDEN, 205, 50)
    again = niah.Essays(model.tokenizer, "the cat sat . ", 0).context("red", 260, 100)
    assert ids_of(model, again) == (ids_of(model, "the cat sat .") * 20)[:59] + ids_of(model, "red"), (
        "from the beginning"
    )
    assert len(niah.find_essays(None, tmp_path / niah.ESSAYS)) > 100_000, "Python's documentation"
    assert "scores are not the paper's. github.com/zhixuan-lin" in capsys.readouterr().err


# Evaluations
# -------------------------------------------------------------------------------------------------------------


def test_finished_prompts_are_not_asked_again_whatever_the_number_of_processes(model, tmp_path, monkeypatch):
    asked = []

    def answer(_model, prompts, *_arguments):
        asked.extend(prompts.tolist())
        return ["eat a sandwich in the park" if len(prompt) < 150 else "no" for prompt in prompts]

    monkeypatch.setattr(generation, "continue_prompts", answer)
    monkeypatch.setattr(Workers, "wait", lambda self: None)
    monkeypatch.setattr(Workers, "broadcast", lambda self, value: value)
    options = {"lengths": [100, 200], "depths": [0.0, 0.5, 1.0], "samples": 2, "needle": NEEDLE, "max_new_tokens": 9}
    second_of_two = Workers(1, 2, torch.device("cpu"))
    with pytest.raises(EvaluationError, match=r"answers: 6 answers are missing, as that to .*; start again"):
        niah.evaluate(model, haystack(model), tmp_path, second_of_two, mode="easy", **options)  # the other never ran
    assert len(asked) == 6
    with (tmp_path / "answers.1.jsonl").open("a") as file:
        file.write('{"key": "Cell(length=100, depth=0.0, sa')  # killed while it wrote
    records = niah.evaluate(model, haystack(model), tmp_path, ALONE, mode="easy", batch_size=4, **options)
    assert len(asked) == 12 == len({tuple(prompt) for prompt in asked})
    found = from_needle(
        {"model": "m", "mode": "easy", "records": [*records, {"length": 300, "depth": 0.0, "words": 1}]}
    )
    cells = {(n.at["length"], n.at["depth"]): n.value for n in found.numbers if n.metric == "exact"}
    assert cells == {(length, depth): value for length, value in ((100, 1), (200, 0)) for depth in (0.0, 0.5, 1.0)}
    with pytest.raises(EvaluationError, match=r"holds results with mode='easy', this evaluation has 'standard'"):
        niah.evaluate(model, haystack(model), tmp_path, ALONE, mode="standard", **options)


@pytest.mark.parametrize(("mode", "tokens"), [("standard", 50), ("paper", 1024)])
def test_the_command_in_both_modes(quickstart, essays, tmp_path, monkeypatch, mode, tokens):
    asked = []

    def answer(_model, prompts, max_new_tokens, *_arguments):
        asked.append(max_new_tokens)
        return ["eat a sandwich and sit in Dolores Park on a sunny day. And"] * len(prompts)

    monkeypatch.setattr(generation, "continue_prompts", answer)
    arguments = ["--model_path", quickstart.hf, "--haystack_dir", essays, "--save_dir", tmp_path, "--mode", mode]
    grid = ["--num_lengths", 2, "--num_depths", 3, "--local_batch_size", 3]
    done = run_script(SCRIPT, *arguments, "--min_length", 30, "--max_length", 40, *grid, "--max_new_tokens", 5)
    assert done.returncode == 1 and "a prompt of 30 tokens has no room for text" in done.stderr
    done = run_script(SCRIPT, *arguments, "--min_length", 300, "--max_length", 400, *grid)
    assert done.returncode == 0, "settings of a start that failed stand in nobody's way"
    assert set(asked) == {tokens}
    assert done.stdout.startswith("6 prompts: 100.0 % of the answer's words found, 100.0 % answered")
    results = json.loads((tmp_path / f"hf/{mode}/scores.json").read_text())
    assert (results["lengths"], results["depths"], results["train_length"]) == ([300, 400], [0.0, 0.5, 1.0], 32)
    for name in ("words", "exact"):
        assert (tmp_path / f"hf/{mode}/{name}.png").read_bytes().startswith(b"\x89PNG")


# The paper's steps
# -------------------------------------------------------------------------------------------------------------


def test_the_configs_are_the_papers_and_a_wrong_one_names_the_key(tmp_path):
    for mode in ("easy", "standard"):
        config = niah.ConfigFile(ROOT / f"eval/niah/config-prompt-{mode}.yaml")
        assert niah.numbers_of(config, "context", "min_len", "max_len") == [1000 + 3100 * n for n in range(11)]
        depths = niah.numbers_of(config, "document_depth", "min_percent", "max_percent")
        assert depths == list(range(0, 101, 10))
        assert config["prompt.needle"] == niah.Needle().text(mode)
        assert config["prompt.retrieval_question"] == niah.Needle().asked
    for text, message in (
        ("prompt: [", r"line 1, column 10: not valid YAML"),
        ("prompt: {needle: x}\nsave_dir: y", r"lacks the key prompt.retrieval_question"),
        ("tokenizer: {tokenizer_type: OpenAI}", r"tokenizer.tokenizer_type='OpenAI'; only Huggingface"),
    ):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises((EvaluationError, UnreadableError), match=message):
            niah.write_prompts(tmp_path / "config.yaml", "one")


@pytest.fixture
def judge(endpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(niah.time, "sleep", lambda seconds: None)

    def rate(answer: str, api_key: str | None = None) -> int | None:
        return Judge(endpoint.url, "grader", tmp_path / "cache.jsonl", api_key).rate("q?", "a", answer)

    return rate


def test_ratings_are_asked_for_once_and_failures_again(endpoint, tmp_path, judge):
    endpoint.replies = [(200, "Half of it, not [[9]] but [[4]]")]
    assert judge("b", api_key="secret") == 4
    assert judge("b") == 4, "from the cache, in another process too"
    assert judge("c") == 7
    (path, key, body), (_, no_key, _) = endpoint.requests
    assert (path, key, no_key) == (f"{endpoint.url}/chat/completions", "Bearer secret", None)
    assert body["model"] == "grader" and body["temperature"] == 0
    endpoint.replies = [(500, ""), (429, ""), (200, "no brackets"), (200, "too much: [[11]]"), (200, "[[3]]")]
    assert judge("tried again") == 3
    endpoint.replies = [(500, "")] * 5
    assert judge("other") is None
    kept = [json.loads(line) for line in (tmp_path / "cache.jsonl").read_text().splitlines()]
    assert [record["rating"] for record in kept] == [4, 7, 3]
    assert "secret" not in (tmp_path / "cache.jsonl").read_text()
    assert judge("other") == judge("other") == 7
    assert len(endpoint.requests) == 13


def test_an_endpoint_that_refuses_is_given_up(endpoint, judge):
    endpoint.replies = [(401, "")]
    with pytest.raises(EvaluationError, match=r"answers 401 for the model 'grader': check --judge_url"):
        judge("b")
    assert len(endpoint.requests) == 1
