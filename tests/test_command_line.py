"""A value that cannot work is refused by its flag before a command begins: an empty path, a number out of range."""

import argparse
import ast
import contextlib
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forgetting_transformer import command_line
from tests.interrupting import code_when_interrupted

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


#: The types of numbers.
NUMBERS = {"int", "float", "at_least", "count", "large", "log_of_small", "number", "port", "positive", "seed", "step"}
#: Arguments that may be 0: none of something, the first of something, or all of it.
ZERO = {
    "--bos_token_id", "--device_id", "--document", "--eos_token_id", "--gate_bias", "--gpus", "--head_dims", "--heads",
    "--hf_load_step", "--kernels", "--layers", "--node-rank", "--seed", "--seeds", "--step", "--temperature",
    "--threshold", "--top", "--top_k", "average_checkpoints.py --steps", "data.py --workers",
}  # fmt: skip
#: Script and argument -> the number next to the least or the greatest that the command can use.
TOO_FAR = {
    ("eval/per_token_loss/run_per_token_loss.py", "--eval_len"): "1",
    ("eval/per_token_loss/run_per_token_loss.py", "--eval_tokens"): "0",
    ("eval/forget_gates/run_forget_gates.py", "--max_length"): "1",
    ("eval/forget_gates/run_forget_gates.py", "--pixels"): "7",
    ("eval/forget_gates/run_forget_gates.py", "--threshold"): "1.01",
    ("eval/longbench/run_longbench.py", "--max_length"): "3",
    ("scripts/generate.py", "--temperature"): "0.0009",
    ("scripts/generate.py", "--top_p"): "1.01",
    ("scripts/generate.py", "--seed"): str(2**64),
    ("scripts/serve.py", "--port"): "65536",
    ("scripts/prepare_data.py", "--max_bytes"): "0MB",
    ("scripts/prepare_data.py", "--dedup"): "0.49",
    ("scripts/verify_data.py", "--share"): "1.01",
    ("studies/ladder.py", "--shrink_tokens"): "0.9",
    ("benchmarks/interruptions.py", "--steps"): "11",
}


class Parsed(BaseException):
    """Ends a script where it reads its command line."""


def numbers_of(script: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[str], Any]]:
    """Flag of each argument of a script that is a number, or a list of them -> its type."""
    parsers, found = [], {}

    def stop(parser, *_, **__):
        parsers.append(parser)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
    monkeypatch.setattr(sys, "argv", [str(script), "x"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with contextlib.suppress(Parsed, SystemExit):
        runpy.run_path(str(script), run_name="__main__")
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            elif action.type is not None and action.choices is None:
                examples = [used(action.type, text) for text in ("1", "64", "0.7", "-10")]
                if any(isinstance(example, int | float | list) for example in examples):
                    found[action.option_strings[0]] = action.type
    return found


def used(kind: Callable[[str], Any], text: str) -> Any:
    """What argparse makes of a value; None where it refuses it."""
    try:
        return kind(text)
    except (argparse.ArgumentTypeError, TypeError, ValueError):
        return None


def arguments_of(script: Path) -> dict[str, str | None]:
    """Flag or name of each argument that a script declares -> its type, as it is written."""
    found = {}
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        declares = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("add_argument", "add")
        if declares and node.args and isinstance(node.args[0], ast.Constant):
            types = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "type"]
            found[str(node.args[0].value)] = types[0] if types else None
    return found


def test_scripts_are_found():
    assert len(SCRIPTS) > 25 and sum(len(PATHS & arguments_of(script).keys()) for script in SCRIPTS) > 50


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(ROOT)))
def test_every_path_on_a_command_line_has_a_type_that_refuses_the_empty_one(script):
    declared = arguments_of(script)
    assert "Path" not in declared.values(), "pathlib takes an empty path for the current folder: use command_line.path"
    wrong = [
        name for name in PATHS & declared.keys() if declared[name] not in ("command_line.path", "command_line.name")
    ]
    assert not wrong


COMMANDS = [script for script in SCRIPTS if arguments_of(script) and "__main__" in script.read_text(encoding="utf-8")]


@pytest.mark.parametrize("script", COMMANDS, ids=lambda script: str(script.relative_to(ROOT)))
def test_every_number_on_a_command_line_is_held_to_a_range(script, monkeypatch):
    types = {flag: str(kind).removeprefix("command_line.").split("(")[0] for flag, kind in arguments_of(script).items()}
    numbers = numbers_of(script, monkeypatch)
    assert numbers.keys() >= {flag for flag in types if types[flag] in NUMBERS}
    for flag, kind in numbers.items():
        for nonsense in ("nan", "inf", "-inf", "1e300", "-1e300", "9" * 50, f"-{'9' * 50}", "", "x"):
            assert used(kind, nonsense) is None, f"{flag} {nonsense}"
        assert (used(kind, "0") is not None) == bool({flag, f"{script.name} {flag}"} & ZERO), flag
    for (where, flag), text in TOO_FAR.items():
        if ROOT / where == script:
            assert used(numbers[flag], text) is None


@pytest.mark.parametrize("text", ["", " "])
@pytest.mark.parametrize("kind", [command_line.path, command_line.name])
def test_an_empty_one_is_refused(kind, text):
    with pytest.raises(argparse.ArgumentTypeError, match="is empty"):
        kind(text)
    assert str(kind("a/b")) == "a/b"


def test_whole_numbers_with_commas():
    assert command_line.whole_numbers("0,1, 2") == [0, 1, 2]
    for text in ("0,x", "", "0,", "1.5", "-1,2"):
        with pytest.raises(argparse.ArgumentTypeError) as refused:
            command_line.whole_numbers(text)
        assert str(refused.value) == f"{text!r}: give whole numbers from 0 on with commas between them, as in 0,1,2"


@pytest.mark.parametrize(
    ("script", "flags", "named"),
    [
        ("save_model.py", ["--hf_load_dir", "run", "--hf_save_dir", ""], "--hf_save_dir"),
        (
            "eval/per_token_loss/run_per_token_loss.py",
            ["--model_path", "m", "--data_path", "d", "--save_dir", ""], "--save_dir",
        ),
        ("scripts/prepare_data.py", ["texts", "--out", ""], "--out"),
        ("scripts/prepare_data.py", ["--out", "corpus", ""], "inputs"),
        ("scripts/download_longcrawl64.py", ["heldout", "--out", ""], "--out"),
    ],
)  # fmt: skip
def test_the_flag_is_named_and_nothing_is_written(script, flags, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *flags])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert end.value.code == 2 and f"argument {named}: '' is empty" in capsys.readouterr().err
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


@pytest.mark.parametrize("moment", ["importing", "working"])
@pytest.mark.parametrize("script", ["save_model.py", *(f"scripts/{name}.py" for name in (
    "generate", "report", "verify_data", "prepare_data", "download_longcrawl64"))])  # fmt: skip
def test_ctrl_c_ends_each_command_in_that_way(script, moment, monkeypatch, capsys):
    arguments = ["--hf_load_dir=run", "--hf_save_dir=hf"] if "save" in script else ["x"]
    monkeypatch.setattr(sys, "argv", [script, *arguments])

    def is_late(name: str) -> bool:
        return name.startswith("forgetting_transformer.") and not name.endswith((".command_line", ".ranges"))

    code = code_when_interrupted(ROOT / script, moment, is_late, monkeypatch)
    said = capsys.readouterr().err
    assert code == 130 and said.startswith("interrupted") and said.count("\n") == 1


@pytest.mark.parametrize(("encoding", "written"), [("ascii", r"\xe9 \udce9"), ("utf-8", r"é \udce9")])
def test_text_that_a_stream_cannot_encode_is_written_all_the_same(encoding, written, monkeypatch):
    stream = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stream, encoding))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding))
    assert command_line.run(lambda: print("é", os.fsdecode(b"\xe9"), end="")) is None
    assert stream.getvalue().decode() == written and sys.stdin.read() == "caf\ufffd"


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

    def other_pipe() -> None:
        raise BrokenPipeError

    with open(os.devnull, "w") as nowhere:
        monkeypatch.setattr(sys, "stdout", nowhere)
        with pytest.raises(BrokenPipeError):
            command_line.run(other_pipe)
    assert capsys.readouterr().err == ""
