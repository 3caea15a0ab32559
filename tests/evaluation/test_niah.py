"""Needle in a haystack: prompts of the stated length and depth, scores of known answers, no rating lost."""

import json

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from forgetting_transformer.analysis import needles
from forgetting_transformer.analysis.evaluations import from_needle
from forgetting_transformer.evaluation import niah
from forgetting_transformer.evaluation.judge import Judge
from forgetting_transformer.evaluation.models import EvaluationError, load_model
from forgetting_transformer.evaluation.workers import Workers
from tests.evaluation.conftest import sentences
from tests.evaluation.scripts import run_script

SCRIPT, JUDGE = "eval/niah/run_niah.py", "eval/niah/judge_niah.py"
ALONE = Workers(0, 1, torch.device("cpu"))
NEEDLE = niah.Needle("what is best ?", "the best thing is", "eat a sandwich in the park")


@pytest.fixture(scope="module")
def model(quickstart):
    return load_model(str(quickstart.hf))


@pytest.fixture
def essays(tmp_path):
    folder = tmp_path / "essays"
    for n, name in enumerate(("b/two.txt", "a/one.md", "c.txt")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(sentences(n, 150))
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


def haystack(count: int = 1000, every: int = 5) -> niah.Haystack:
    """Tokens 10, 11, …, 33 again and again; every fifth ends a sentence."""
    position = np.arange(count)
    return niah.Haystack(10 + position % 24, position % every == every - 1)


def encode(model, text: str) -> list[int]:
    return model.tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("mode", niah.MODES)
@pytest.mark.parametrize("depth", [0.0, 0.3, 0.5, 1.0])
def test_a_prompt_has_its_length_and_the_needle_lies_at_its_depth(model, mode, depth):
    cell = niah.Cell(200, depth, 0)
    prompt = niah.build_prompt(model, haystack(), NEEDLE, mode, cell)
    needle, query = (encode(model, text) for text in (NEEDLE.text(mode), NEEDLE.query))
    assert prompt.shape == (200,) and prompt.dtype == np.int64
    assert prompt[0] == 0, "the beginning-of-sequence token"
    assert prompt[-len(query) :].tolist() == query
    text = prompt[1 : len(prompt) - len(query)].tolist()
    places = [n for n in range(len(text)) if text[n : n + len(needle)] == needle]
    assert len(places) == 1
    room = len(text) - len(needle)
    assert depth * room - 0.05 * room - 1 <= places[0] <= depth * room + 0.5
    # Without needle and query the text is the haystack, whole.
    without = text[: places[0]] + text[places[0] + len(needle) :]
    assert without == haystack().tokens[:room].tolist()
    if 0 < depth < 1:
        assert haystack().is_end[places[0] - 1], "after the end of a sentence"


def test_only_the_easy_needle_holds_the_question():
    assert NEEDLE.text("easy") == "\nwhat is best ? Answer: the best thing is eat a sandwich in the park.\n"
    assert NEEDLE.text("standard") == "\nthe best thing is eat a sandwich in the park.\n"
    assert NEEDLE.query.endswith("what is best ? Answer: the best thing is")
    with pytest.raises(EvaluationError, match="--mode='hard'; it must be one of standard, easy"):
        NEEDLE.text("hard")


def test_without_the_end_of_a_sentence_nearby_the_needle_is_put_at_its_depth_exactly(model):
    text = niah.Haystack(np.full(1000, 12), np.zeros(1000, dtype=bool))
    prompt = niah.build_prompt(model, text, NEEDLE, "standard", niah.Cell(101, 0.5, 0))
    needle = encode(model, NEEDLE.text("standard"))
    room = 101 - 1 - len(needle) - len(encode(model, NEEDLE.query))
    assert prompt[1 + round(room / 2) :][: len(needle)].tolist() == needle


def test_samples_use_other_parts_of_a_text_that_goes_round(model):
    one, two = (niah.build_prompt(model, haystack(300), NEEDLE, "easy", niah.Cell(200, 0.5, n)) for n in (0, 1))
    assert one[1] == 10 and two[1] == 10 + 200 % 24
    with pytest.raises(
        EvaluationError, match=r"a prompt of 20 tokens has no room for text: needle and query alone have"
    ):
        niah.build_prompt(model, haystack(), NEEDLE, "easy", niah.Cell(20, 0.5, 0))


def test_a_folders_texts_are_read_in_the_order_of_their_paths(model, essays, tmp_path):
    tokens = niah.Haystack.from_folder(model, essays).tokens
    expected = " ".join((essays / name).read_text() for name in ("a/one.md", "b/two.txt", "c.txt"))
    assert tokens.tolist() == encode(model, expected)
    (tmp_path / "none").mkdir()
    with pytest.raises(EvaluationError, match=r"holds no text: put files there that end in \.txt"):
        niah.Haystack.from_folder(model, tmp_path / "none")


def test_a_corpus_of_held_out_documents_is_a_haystack(model, quickstart):
    found = niah.Haystack.from_heldout(model, str(quickstart.data), "words", 300)
    assert len(found.tokens) == 512, "two documents of 256"
    assert found.is_end.tolist() == [token == model.tokenizer.convert_tokens_to_ids(".") for token in found.tokens]


@pytest.mark.parametrize(
    ("prediction", "exact", "words"),
    [
        (" Eat a sandwich,  in the Park. And then", 1.0, 1.0),
        ("eat a sandwich", 0.0, 0.5),
        ("I would eat a big sandwich in the park", 0.0, 1.0),
        ("park the in sandwich a eat", 0.0, 1 / 6),
        # "eat a" and "in the park" are five words in order, though "sandwich in the park" is the longest run.
        ("sandwich eat a in the park", 0.0, 5 / 6),
        ("a sandwich eat a in the park sandwich", 0.0, 5 / 6),
        ("", 0.0, 0.0),
        ("nothing " * 12 + "eat a sandwich in the park", 0.0, 0.0),
    ],
)
def test_scores_of_known_answers(prediction, exact, words):
    assert niah.exact_match(prediction, NEEDLE.answer) == exact
    assert niah.word_match(prediction, NEEDLE.answer) == pytest.approx(words)


def test_finished_prompts_are_not_asked_again_whatever_the_number_of_processes(model, tmp_path, monkeypatch):
    asked = []

    def answer(_model, prompts, *_arguments):
        asked.extend(prompts.tolist())
        return ["eat a sandwich in the park" if len(prompt) < 150 else "no" for prompt in prompts]

    monkeypatch.setattr(niah, "continue_greedily", answer)
    monkeypatch.setattr(Workers, "wait", lambda self: None)
    monkeypatch.setattr(Workers, "broadcast", lambda self, value: value)
    cells = niah.grid([100, 200], [0.0, 0.5, 1.0], 2)
    options = {"needle": NEEDLE, "mode": "easy"}
    second_of_two = Workers(1, 2, torch.device("cpu"))
    with pytest.raises(EvaluationError, match=r"predictions/length_100_depth_0.0_sample_0.json: run the evaluation"):
        niah.evaluate(model, haystack(), cells, tmp_path, second_of_two, **options)  # the other one never ran
    assert len(asked) == 6
    records = niah.evaluate(model, haystack(), cells, tmp_path, ALONE, **options, batch_size=4)
    assert len(asked) == 12 == len({tuple(prompt) for prompt in asked})
    evaluation = from_needle(
        {"model": "m", "mode": "easy", "records": [*records, {"length": 300, "depth": 0.0, "words": 1}]}
    )
    lengths, depths, matrix = needles.score_matrix(evaluation, "exact")
    assert (lengths, depths) == ([100, 200, 300], [0.0, 0.5, 1.0])
    np.testing.assert_array_equal(matrix, [[1, 0, np.nan]] * 3)
    with pytest.raises(EvaluationError, match=r"holds results with mode='easy', this evaluation has 'standard'"):
        niah.evaluate(model, haystack(), cells, tmp_path, ALONE, needle=NEEDLE, mode="standard")


def test_the_command_on_an_exported_model(quickstart, essays, tmp_path):
    arguments = ["--model_path", quickstart.hf, "--haystack_dir", essays, "--save_dir", tmp_path, "--mode", "standard"]
    arguments += ["--question", "what is best ?", "--statement", "best is", "--answer", "sunny park"]
    grid = ["--min_length", 60, "--max_length", 100, "--num_lengths", 3, "--num_depths", 2, "--local_batch_size", 2]
    done = run_script(SCRIPT, *arguments, *grid, "--max_new_tokens", 4)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("6 prompts: ")
    results = json.loads((tmp_path / "hf/standard/scores.json").read_text())
    assert (results["lengths"], results["depths"], results["train_length"]) == ([60, 80, 100], [0.0, 1.0], 32)
    assert {(r["length"], r["depth"]) for r in results["records"]} == {
        (n, d) for n in (60, 80, 100) for d in (0.0, 1.0)
    }
    for name in ("words", "exact"):
        assert (tmp_path / f"hf/standard/{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_small_grid_has_room_for_its_title_and_says_what_it_shows(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    records = [{"length": n, "depth": d, "words": d / 2} for n in (300, 400) for d in (0.0, 1.0)]
    scores = {"model": "fox-pro-760m-longcrawl64-48b", "mode": "paper", "train_length": 300, "records": records}
    needles.draw(from_needle(scores), "words", tmp_path / "x.png")
    (figure,) = drawn
    FigureCanvasAgg(figure).draw()
    title, note = (text for text in figure.texts)
    box = title.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height
    assert not any(box.overlaps(axes.get_tightbbox()) for axes in figure.axes), "the colour bar is one of them"
    text = note.get_text().replace("\n", " ")
    assert "1 prompt a cell" in text and "mean 0.250 ± 0.144 (standard error over 4 prompts)" in text
    assert "training length, 300 tokens" in text and "chance is above 0" in text
    assert [cell.get_text() for cell in figure.axes[0].texts] == ["0", "0", "0.5", "0.5"]


def judge(endpoint, tmp_path, **options) -> Judge:
    return Judge(endpoint.url, "grader", tmp_path / "cache.jsonl", wait=lambda seconds: None, **options)


def test_ratings_are_asked_for_once(endpoint, tmp_path):
    endpoint.replies = [(200, "Half of it, not [[9]] but [[4]]")]
    assert judge(endpoint, tmp_path, api_key="secret").rate("q?", "a", "b") == 4
    assert judge(endpoint, tmp_path).rate("q?", "a", "b") == 4, "from the cache, in another process too"
    assert judge(endpoint, tmp_path).rate("q?", "a", "c") == 7
    (path, key, body), (_, no_key, _) = endpoint.requests
    assert (path, key, no_key) == ("/v1/chat/completions", "Bearer secret", None)
    assert body["model"] == "grader" and body["temperature"] == 0
    assert "secret" not in (tmp_path / "cache.jsonl").read_text()


def test_failures_are_tried_again_then_kept_and_asked_for_next_time(endpoint, tmp_path):
    endpoint.replies = [(500, ""), (429, ""), (200, "no brackets"), (200, "too much: [[11]]"), (200, "[[3]]")]
    assert judge(endpoint, tmp_path, tries=5).rate("q?", "a", "b") == 3
    endpoint.replies = [(500, "")] * 2
    assert judge(endpoint, tmp_path, tries=2).rate("q?", "a", "other") is None
    kept = [json.loads(line) for line in (tmp_path / "cache.jsonl").read_text().splitlines()]
    assert [record["rating"] for record in kept] == [3, None] and "500" in kept[1]["error"]
    assert judge(endpoint, tmp_path).rate("q?", "a", "other") == 7
    with (tmp_path / "cache.jsonl").open("a") as file:
        file.write('{"key": "cut sho')  # killed while it wrote
    assert judge(endpoint, tmp_path).rate("q?", "a", "third") == 7
    assert judge(endpoint, tmp_path).rate("q?", "a", "third") == 7
    assert len(endpoint.requests) == 9


def test_an_endpoint_that_refuses_the_key_is_not_asked_again(endpoint, tmp_path):
    endpoint.replies = [(401, "")]
    with pytest.raises(EvaluationError, match=r"answers 401 for the model 'grader': check --judge_url"):
        judge(endpoint, tmp_path).rate("q?", "a", "b")
    assert len(endpoint.requests) == 1


def test_an_address_where_nothing_answers_is_given_up_after_one_rating(endpoint, tmp_path):
    endpoint.url = "http://127.0.0.1:9/v1"  # the port `discard`, where nothing listens
    with pytest.raises(EvaluationError, match=r"127\.0\.0\.1:9/v1 cannot be reached \(ConnectError.*check --judge_url"):
        judge(endpoint, tmp_path, tries=2).rate("q?", "a", "b")
    assert json.loads((tmp_path / "cache.jsonl").read_text())["rating"] is None


def test_the_judges_command_keeps_what_it_has_when_some_fail(endpoint, tmp_path):
    records = [
        {"length": 60, "depth": depth, "sample": 0, "prediction": f"answer {depth}"} for depth in (0.0, 0.5, 1.0)
    ]
    grid = {"lengths": [60], "depths": [0.0, 0.5, 1.0], "train_length": None}
    (tmp_path / "scores.json").write_text(json.dumps({"model": "m", "mode": "easy", **grid, "records": records}))
    (tmp_path / "settings.json").write_text(json.dumps(vars(NEEDLE)))
    endpoint.replies = [(200, "[[10]]"), (500, ""), (200, "[[2]]")]
    arguments = [tmp_path, "--judge_url", endpoint.url, "--judge_model", "grader", "--tries", 1]
    done = run_script(JUDGE, *arguments)
    assert done.returncode == 1 and "1 answers have no rating" in done.stderr
    ratings = [record["judge"] for record in json.loads((tmp_path / "judge.json").read_text())["records"]]
    assert ratings == [10, None, 2] and "mean rating 6.00" in done.stdout
    done = run_script(JUDGE, *arguments)
    assert done.returncode == 0, done.stderr
    assert len(endpoint.requests) == 4, "only the failed one was asked for again"
    assert (tmp_path / "judge.png").is_file()


def test_the_judge_replaces_no_file_of_others_and_asks_nothing_before(endpoint, tmp_path):
    record = {"length": 60, "depth": 0.5, "sample": 0, "prediction": "a"}
    scores = {"model": "m", "mode": "easy", "lengths": [60], "depths": [0.5], "train_length": None, "records": [record]}
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    (tmp_path / "settings.json").write_text(json.dumps(vars(NEEDLE)))
    arguments = [tmp_path, "--judge_url", endpoint.url, "--judge_model", "grader", "--tries", 1]
    for name in ("judge.json", "judge.png"):
        (tmp_path / name).write_text("{}")
        done = run_script(JUDGE, *arguments)
        assert done.returncode == 1 and f"{name} is not as eval/niah/judge_niah.py has written it" in done.stderr
        assert (tmp_path / name).read_text() == "{}" and not endpoint.requests
        (tmp_path / name).unlink()
    # What an earlier version wrote, which kept no list, is replaced.
    (tmp_path / "judge.json").write_text(json.dumps({**scores, "judge": "grader"}))
    (tmp_path / "judge.png").write_text("a picture")
    endpoint.replies = [(200, "[[7]]")]
    assert run_script(JUDGE, *arguments).returncode == 0
    assert json.loads((tmp_path / "judge.json").read_text())["records"][0]["judge"] == 7


def test_the_judge_says_when_nothing_is_there_to_rate_and_when_nothing_was_rated(endpoint, tmp_path):
    common = ["--judge_url", endpoint.url, "--judge_model", "grader", "--tries", 1]
    done = run_script(JUDGE, tmp_path, *common)
    assert done.returncode == 1 and "scores.json: run the evaluation that writes it first" in done.stderr
    record = {"length": 60, "depth": 0.5, "sample": 0, "prediction": "a"}
    scores = {"model": "m", "mode": "easy", "lengths": [60], "depths": [0.5], "train_length": None, "records": [record]}
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    (tmp_path / "settings.json").write_text(json.dumps(vars(NEEDLE)))
    endpoint.replies = [(500, "")]
    done = run_script(JUDGE, tmp_path, *common)
    assert done.returncode == 1 and "no answer was rated" in done.stdout and "nan" not in done.stdout
