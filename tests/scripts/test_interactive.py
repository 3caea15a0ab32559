"""scripts/generate.py --interactive: prompts and commands line by line, and Ctrl-C stops a text and not the program."""

import io
import runpy
import sys

import pytest
from transformers import TextStreamer

from tests.evaluation.conftest import VOCABULARY, _tokenizer
from tests.model.small_models import PRO, small_model
from tests.processes import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    small_model(vocab_size=len(VOCABULARY), initializer_range=0.02, **PRO).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def talk(folder, monkeypatch, capsys):
    """Types lines into the loop and returns what is printed."""

    def run(*lines: str, flags: tuple[str, ...] = ("--max_new_tokens", "6")) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        monkeypatch.setattr(sys, "argv", ["generate.py", str(folder), "--interactive", "--device", "cpu", *flags])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "scripts/generate.py"), run_name="__main__")
        assert not end.value.code, end.value.code
        return capsys.readouterr().out

    return run


def test_each_line_begins_a_new_text_and_more_goes_on_with_the_last(talk):
    word = VOCABULARY[5] if isinstance(VOCABULARY, list) else list(VOCABULARY)[5]
    once, twice = talk(word), talk(word, word)
    answer = once.split("> ")[1]
    assert answer.strip() and twice.split("> ")[1:3] == [answer, answer], "greedy, and nothing is remembered"
    assert talk(word, "/more").split("> ")[2].strip() not in ("", answer.strip())
    assert "there is no text to continue yet" in talk("/more")


def test_options_are_set_and_wrong_ones_are_refused_and_change_nothing(talk):
    said = talk(
        "/top_p 0.5", "/temperature 0.8", "/top_p 2", "/top_k x", "/options", "/nothing", "/help", "/quit", "/options"
    )
    assert "top_p 0.5, without effect at temperature 0" in said and "temperature 0.8\n" in said
    assert "top_p: '2' is not a number more than 0 and at most 1" in said and "top_k: 'x' is not a whole number" in said
    assert said.count("temperature 0.8, top_p 0.5, top_k 0, max_new_tokens 6, seed 0") == 1, "quit ends"
    assert "/nothing is no command" in said and "Ctrl-C stops a text" in said


def test_ctrl_c_stops_a_text_and_at_the_prompt_the_program(talk, monkeypatch):
    put, count = TextStreamer.put, [0]

    def interrupted(self, value):
        put(self, value)
        count[0] += 1
        if count[0] == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(TextStreamer, "put", interrupted)
    said = talk("w", "/options", flags=("--max_new_tokens", "50"))
    assert count[0] == 4 and "max_new_tokens 50" in said, "the loop goes on after the text was stopped"

    def at_the_prompt(_=""):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", at_the_prompt)
    assert "Ctrl-D ends" in talk()


@pytest.mark.parametrize("flags", [("--prompt", "x"), ("--samples", "2", "--temperature", "1")])
def test_what_does_not_go_with_a_loop_is_refused(folder, monkeypatch, capsys, flags):
    monkeypatch.setattr(sys, "argv", ["generate.py", str(folder), "--interactive", *flags])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "scripts/generate.py"), run_name="__main__")
    assert f"{flags[0]} does not go with --interactive" in capsys.readouterr().err
