"""A value that cannot work is refused by its flag before a command begins: an empty path, a number out of range."""

import argparse
import ast
import io
import os
import sys
from pathlib import Path

import pytest

from forgetting_transformer import command_line
from tests.processes import ROOT, run_here

SCRIPTS = [
    ROOT / "save_model.py",
    *sorted(f for folder in ("scripts", "eval", "benchmarks", "studies") for f in (ROOT / folder).rglob("*.py")),
]
#: Arguments that name a file, a folder, a repository on a hub, or a folder's name.
PATHS = {
    "--tokenizer", "--model_path", "--model", "--data_path", "--data_dir", "--dataset", "--source", "--out", "--folder",
    "--save_dir", "--hf_load_dir", "--hf_save_dir", "--haystack_dir", "--include_path", "--text", "--results",
    "--speed", "folder",
    "--position_loss", "run", "runs", "run_dirs", "study", "report", "page", "paths", "inputs", "model", "results",
}  # fmt: skip


def arguments_of(script: Path) -> dict[str, str | None]:
    """Flag or name of each argument that a script declares -> its type, as it is written."""
    found = {}
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        declares = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("add_argument", "add")
        is_switch = declares and any(keyword.arg == "action" for keyword in node.keywords)
        if declares and not is_switch and node.args and isinstance(node.args[0], ast.Constant):
            types = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "type"]
            found[str(node.args[0].value)] = types[0] if types else None
    return found


def test_every_path_refuses_the_empty_one_and_every_number_has_a_range():
    assert len(SCRIPTS) > 25 and sum(len(PATHS & arguments_of(script).keys()) for script in SCRIPTS) > 50
    for script in SCRIPTS:
        declared = arguments_of(script)
        # pathlib takes an empty path for the current folder; int and float take nan and -1.
        assert not {"Path", "int", "float"} & {*declared.values()}, f"{script}: use a type of command_line"
        paths = {declared[name] for name in PATHS & declared.keys()}
        assert paths <= {"command_line.path", "command_line.name"}, script


def test_a_path_that_libraries_cannot_open_and_a_number_out_of_its_range_are_refused(tmp_path, monkeypatch):
    latin, no_utf_8 = os.fsdecode(b"caf\xe9"), r"is not UTF-8.*ln -s"
    for kind, texts, said in (
        (command_line.path, ("", " "), "is empty"),
        (command_line.name, ("", " "), "is empty"),
        (command_line.path, (latin,), no_utf_8),
        (command_line.name, (latin,), no_utf_8),
        (command_line.count, ("nan", "-1", "0", "1e300", "1.5", "", "x"), "is not a whole number from 1 to"),
        (command_line.whole_numbers, ("0,x", "", "0,", "-1,2"), "give whole numbers from 0 on with commas between"),
    ):
        for text in texts:
            with pytest.raises(argparse.ArgumentTypeError, match=said):
                kind(text)
    assert str(command_line.path("a/é")) == "a/é" and command_line.count("1") == 1
    assert command_line.whole_numbers("0,1, 2") == [0, 1, 2]
    (tmp_path / latin).mkdir()
    monkeypatch.chdir(tmp_path / latin)
    with pytest.raises(argparse.ArgumentTypeError, match=no_utf_8):
        command_line.path("run")


@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        ("save_model.py", ["--hf_load_dir", "run", "--hf_save_dir", ""], "--hf_save_dir: '' is empty"),
        ("scripts/prepare_data.py", ["--out", "corpus", ""], "inputs: '' is empty"),
        ("eval/per_token_loss/run_per_token_loss.py", ["--eval_len", "1"], "--eval_len: '1' is not a whole number"),
        ("scripts/generate.py", ["model", "--temperature", "1e-40"], "--temperature: below 0.001 takes the likeliest"),
    ],
)  # fmt: skip
def test_the_flag_is_named_and_nothing_is_written(script, flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_here(script, *flags) == 2 and f"argument {said}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_ctrl_c_is_one_line_and_130(capsys):
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert command_line.run(interrupted, "interrupted: again") == 130
    assert capsys.readouterr().err == "interrupted: again\n"
    assert command_line.run(lambda: 3) == 3 and command_line.run(lambda: None) is None


def test_text_that_a_stream_cannot_encode_is_written_all_the_same(monkeypatch):
    stream = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stream, "ascii"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "ascii"))
    assert command_line.run(lambda: print("é", end="")) is None
    assert stream.getvalue().decode() == r"\xe9" and sys.stdin.read() == "caf\ufffd"


def test_a_folder_below_a_file_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")

    def main():
        (tmp_path / "file/out").mkdir()

    assert command_line.run(main) == 1
    assert capsys.readouterr().err == f"error: {tmp_path}/file/out: Not a directory; give another path\n"


def test_a_reader_that_has_left_is_no_error(monkeypatch, capsys):
    for words in (1, 10_000):
        reading, writing = os.pipe()
        os.close(reading)
        with open(writing, "w") as pipe, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", pipe)
            assert command_line.run(lambda words=words: print("text " * words)) == 141
    assert capsys.readouterr().err == ""
