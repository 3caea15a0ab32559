"""Prompts of the paper's needle in a haystack: lengths as it counts them, the needle where it puts it."""

import dataclasses
import re

import pytest
import torch

from forgetting_transformer.evaluation import niah, niah_files, niah_paper
from forgetting_transformer.evaluation.models import EvaluationError, load_model
from forgetting_transformer.evaluation.workers import Workers
from tests.evaluation.conftest import sentences
from tests.evaluation.scripts import ROOT, run_script

NEEDLE = niah.Needle("what is best ?", "the best thing is", "eat a sandwich in the park")
# Of words that the tokenizer knows.
HIDDEN = "\nthe best thing is eat a sandwich in the park .\n"


@pytest.fixture(scope="module")
def model(quickstart):
    return load_model(str(quickstart.hf))


@pytest.fixture
def essays(tmp_path):
    """Of 600 words each; read in the order of their names."""
    folder = tmp_path / "essays"
    folder.mkdir()
    for n, name in enumerate(("b", "a", "c")):
        (folder / f"{name}.txt").write_text(sentences(n, 600) + " ")
    (folder / "d.md").write_text("what")
    return folder


def words(model, text: str) -> list[int]:
    return model.tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("depth", [0, 30, 100])
def test_the_needle_and_a_buffer_are_taken_from_the_length(model, essays, depth):
    haystack = niah_paper.Essays(model.tokenizer, niah_paper.read_essays(essays))
    needle = words(model, HIDDEN)
    found = words(model, haystack.context(HIDDEN, 1000, depth))
    assert len(found) == 1000 - 200
    places = [n for n in range(len(found)) if found[n : n + len(needle)] == needle]
    assert len(places) == 1
    text = found[: places[0]] + found[places[0] + len(needle) :]
    expected = "".join((essays / f"{name}.txt").read_text() for name in "abc")
    assert text == words(model, expected)[: len(text)]
    stop = words(model, ".")[0]
    wanted = int(len(text) * depth / 100)
    assert places[0] == (wanted if depth == 100 else max([n + 1 for n in range(wanted) if text[n] == stop], default=0))


def test_essays_begin_again_where_they_end(model):
    haystack = niah_paper.Essays(model.tokenizer, "the cat sat . ")
    found = words(model, haystack.context("red", 260, 100))
    assert found == (words(model, "the cat sat .") * 20)[:59] + words(model, "red")


def test_a_prompt_ends_with_the_quiz_and_the_beginning_of_the_answer(model, essays):
    haystack = niah_paper.Essays(model.tokenizer, niah_paper.read_essays(essays))
    text = haystack.prompt_text(NEEDLE.text("easy"), niah_paper.question(NEEDLE), 400, 50)
    assert text.endswith(
        "\n\nThere is an important piece of information hidden inside the above document. Now that you've read the "
        "document, I will quiz you about it. Answer the following question: what is best ? Answer: the best thing is"
    )
    prompt = haystack.prompt(model, NEEDLE, "paper_easy", niah.Cell(400, 0.5, 0))
    assert prompt.tolist() == [0, *words(model, text)]


def test_the_grid_and_the_answers_are_the_papers():
    for name, needle in (("easy", niah.Needle().text("easy")), ("standard", niah.Needle().text("standard"))):
        config = niah_files.read_prompt_config(ROOT / f"eval/niah/config-prompt-{name}.yaml")
        assert list(config.lengths) == list(niah_paper.LENGTHS) == [1000 + 3100 * n for n in range(11)]
        assert list(config.depths) == list(niah_paper.DEPTHS) == list(range(0, 101, 10))
        assert (config.needle, config.question) == (needle, niah_paper.question(niah.Needle()))


def test_what_cannot_be_made_into_prompts_is_said(model, essays, tmp_path):
    haystack = niah_paper.Essays(model.tokenizer, niah_paper.read_essays(essays))
    with pytest.raises(
        EvaluationError, match=r"a prompt of 205 tokens has no room for text: the needle has 11, and 200"
    ):
        haystack.context(HIDDEN, 205, 50)
    with pytest.raises(EvaluationError, match=r"there is no folder .*esays: give a folder"):
        niah_paper.read_essays(tmp_path / "esays")
    (tmp_path / "empty").mkdir()
    with pytest.raises(EvaluationError, match=r"empty holds no text: put .txt files there"):
        niah_paper.read_essays(tmp_path / "empty")


def test_without_essays_pythons_documentation_is_the_haystack_and_that_is_said(essays, tmp_path, capsys):
    assert len(niah_paper.find_text(None, tmp_path / niah_paper.ESSAYS)) > 100_000
    assert "scores are not the paper's. github.com/zhixuan-lin" in capsys.readouterr().err
    here = niah_paper.read_essays(essays)
    assert niah_paper.find_text(None, essays) == niah_paper.find_text(essays, tmp_path) == here
    assert capsys.readouterr().err == ""


def test_settings_of_a_start_that_had_no_room_stand_in_nobodys_way(quickstart, essays, tmp_path):
    arguments = ["--model_path", quickstart.hf, "--haystack_dir", essays, "--save_dir", tmp_path, "--mode", "paper"]
    for tokens in (5, 6):  # other settings
        grid = ["--min_length", 30, "--max_length", 40, "--num_depths", 1, "--max_new_tokens", tokens]
        done = run_script("eval/niah/run_niah.py", *arguments, *grid)
        assert done.returncode == 1 and "a prompt of 30 tokens has no room for text" in done.stderr


def test_the_command_in_the_papers_mode(quickstart, essays, tmp_path, monkeypatch):
    asked = []

    def answer(_model, prompts, max_new_tokens, *_arguments):
        asked.append((prompts.shape, max_new_tokens))
        return ["eat a sandwich and sit in Dolores Park on a sunny day. And"] * len(prompts)

    monkeypatch.setattr(niah, "continue_greedily", answer)
    arguments = ["--model_path", quickstart.hf, "--haystack_dir", essays, "--save_dir", tmp_path, "--mode", "paper"]
    grid = ["--min_length", 300, "--max_length", 400, "--num_lengths", 2, "--num_depths", 3, "--local_batch_size", 3]
    done = run_script("eval/niah/run_niah.py", *arguments, *grid)
    assert done.returncode == 0, done.stderr
    assert sum(shape[0] for shape, _ in asked) == 6 and {tokens for _, tokens in asked} == {1024}
    assert done.stdout.startswith("6 prompts: 100.0 % of the answer's words found, 100.0 % answered")
    assert (tmp_path / "hf/paper/words.png").is_file()
    done = run_script("eval/niah/run_niah.py", *arguments, "--samples", 2)
    assert done.returncode == 2 and "leave --data_path and --samples out" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt: [", r"line 1, column 10: not valid YAML"),
        ("prompt", r"is not a YAML mapping"),
        ("prompt: {needle: x}\nsave_dir: y", r"lacks the key prompt.haystack_dir"),
        ("tokenizer: {tokenizer_type: OpenAI}", r"tokenizer_type='OpenAI'; only Huggingface"),
        ("document_depth: {interval_type: sigmoid}", r"interval_type='sigmoid'; only linear"),
    ],
)
def test_a_wrong_config_names_the_key(tmp_path, text, message):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(EvaluationError, match=message):
        niah_files.read_prompt_config(tmp_path / "config.yaml")


def test_answers_of_another_model_or_to_other_prompts_are_not_mixed(model, essays, tmp_path, monkeypatch):
    monkeypatch.setattr(niah_files, "continue_greedily", lambda *_arguments: [" red. \n"])
    config = niah_files.PromptConfig("\nred .\n", "what ?", essays, [300], [0, 50], "", str(tmp_path / "prompts"))
    prompts = niah_files.write_prompts(config, "one", model.tokenizer, None)
    alone, folder = Workers(0, 1, torch.device("cpu")), tmp_path / "pred/one/hf"
    assert niah_files.answer_prompts(model, prompts, folder, alone) == 2
    assert (folder / "Huggingface_len_300_depth_5000.txt").read_text() == "red."
    changed = next(prompts.glob("*_prompts.json"))
    changed.write_text(changed.read_text().replace("what ?", "who ?"))
    with pytest.raises(EvaluationError, match=r"holds results with prompts=.*choose another --model name or --exp"):
        niah_files.answer_prompts(model, prompts, folder, alone)
    with pytest.raises(EvaluationError, match=re.escape("(--exp; made so far: one); run prompt.py first")):
        niah_files.answer_prompts(model, prompts.with_name("on"), folder, alone)
    with pytest.raises(EvaluationError, match=r"--exp='../one' names a folder"):
        niah_files.write_prompts(config, "../one", model.tokenizer, None)


def test_prompts_of_two_kinds_are_not_mixed(model, essays, tmp_path):
    config = niah_files.PromptConfig("\nred .\n", "what ?", essays, [300], [0, 50], "", str(tmp_path))
    prompts = niah_files.write_prompts(config, "one", model.tokenizer, None)
    assert niah_files.write_prompts(config, "one", model.tokenizer, None) == prompts  # the same again
    other = dataclasses.replace(config, depths=[25])
    with pytest.raises(EvaluationError, match=r"holds results with depths=\[0, 50\].*choose another --exp"):
        niah_files.write_prompts(other, "one", model.tokenizer, None)
    (prompts / "settings.json").unlink()
    with pytest.raises(EvaluationError, match=r"holds prompts that do not say how they were made"):
        niah_files.write_prompts(config, "one", model.tokenizer, None)
