"""A value that cannot work is refused by its flag before a command begins: an empty path, a number out of range."""

import argparse
import ast
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from forgetting_transformer import command_line

ROOT = Path(__file__).resolve().parents[1]
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


def test_scripts_are_found():
    assert len(SCRIPTS) > 25 and sum(len(PATHS & arguments_of(script).keys()) for script in SCRIPTS) > 50


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(ROOT)))
def test_every_path_refuses_the_empty_one_and_every_number_has_a_range(script):
    declared = arguments_of(script)
    assert "Path" not in declared.values(), "pathlib takes an empty path for the current folder: use command_line.path"
    assert not {"int", "float"} & {*declared.values()}, "they take nan and -1: use a range of command_line"
    wrong = [
        name for name in PATHS & declared.keys() if declared[name] not in ("command_line.path", "command_line.name")
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "is empty"), (" ", "is empty"), (os.fsdecode(b"caf\xe9"), r"'caf\\udce9' is not UTF-8.*ln -s")],
)
@pytest.mark.parametrize("kind", [command_line.path, command_line.name])
def test_an_empty_one_and_one_that_libraries_cannot_open_are_refused(kind, text, said):
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        kind(text)
    assert str(kind("a/é")) == "a/é"


def test_a_path_in_a_folder_that_libraries_cannot_open_is_refused(tmp_path, monkeypatch):
    (folder := tmp_path / os.fsdecode(b"caf\xe9")).mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not UTF-8.*ln -s"):
        command_line.path("run")


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "0", "1e300", "1.5", "", "x"])
def test_a_number_out_of_its_range_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number from 1 to"):
        command_line.count(text)
    assert command_line.count("1") == 1


def test_whole_numbers_with_commas():
    assert command_line.whole_numbers("0,1, 2") == [0, 1, 2]
    for text in ("0,x", "", "0,", "1.5", "-1,2"):
        with pytest.raises(argparse.ArgumentTypeError) as refused:
            command_line.whole_numbers(text)
        assert str(refused.value) == f"{text!r}: give whole numbers from 0 on with commas between them, as in 0,1,2"


@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        ("save_model.py", ["--hf_load_dir", "run", "--hf_save_dir", ""], "--hf_save_dir: '' is empty"),
        ("scripts/prepare_data.py", ["--out", "corpus", ""], "inputs: '' is empty"),
        ("eval/per_token_loss/run_per_token_loss.py", ["--eval_len", "1"], "--eval_len: '1' is not a whole number"),
    ],
)  # fmt: skip
def test_the_flag_is_named_and_nothing_is_written(script, flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *flags])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert end.value.code == 2 and f"argument {said}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_shell_scripts_refuse_an_empty_folder(tmp_path):
    """A folder that is empty would be the root of the file system: mkdir /logs, rm /status.json."""
    log = tmp_path / "calls"
    for tool in ("mkdir", "rm", "scontrol", "srun", "python"):
        (tmp_path / tool).write_text(f'#!/bin/sh\necho "{tool} $*" >> {log}\nexit 1\n')
        (tmp_path / tool).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "PYTHON": str(tmp_path / "python"),
    }
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/slurm/train.sbatch"), "", "data_dir=data"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "is empty" in done.stderr
    assert not log.exists()


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


@pytest.mark.parametrize("words", [1, 10_000])
def test_a_reader_that_has_left_is_no_error(monkeypatch, capsys, words):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert command_line.run(lambda: print("text " * words)) == 141
    assert capsys.readouterr().err == ""
