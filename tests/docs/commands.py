"""Commands of the documentation: found in its Markdown, and checked without being run.

A command of train.py is composed and its config checked as at the start of a run; the options of every other script go
through the script's own parser. So a flag, key, experiment or file that does not exist, or does no longer, is an error
here.
"""

import argparse
import contextlib
import functools
import itertools
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click import ClickException
from hydra._internal.utils import get_args_parser as hydra_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from lightning.fabric.cli import _run as fabric_run
from omegaconf import MissingMandatoryValue

from forgetting_transformer.sweep import SweepError
from forgetting_transformer.sweep.composer import compose_config, machine, search_space
from forgetting_transformer.training.config import ConfigError
from forgetting_transformer.training.config.checks import check
from studies import SEARCH_PATH
from studies.engine.stages import Stages

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("eval/**/*.md")),
    *ROOT.glob("benchmarks/**/*.md"),
    *ROOT.glob("studies/**/*.md"),
]
#: Programs that are not this project's; what they are given is not looked at.
OTHERS = ("cd", "cp", "hf", "export", "git", "source", "pre-commit", "pytest")
#: What a reader puts in the place of a word in capital letters.
PLACEHOLDERS = {"NAME": "fox_pro", "RATE": "1e-3", "TOKENS": "4096", "N": "2"}
ANY_EXPERIMENT = "+experiment/demo=fox_pro"
#: Stands for arguments that are left out.
MORE = "<more>"


class CommandError(AssertionError):
    """A command of the documentation is wrong."""


# Finding.


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in a language."""
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", page, re.MULTILINE | re.DOTALL)


def section(page: str, title: str) -> str:
    """The section of a page under a heading of the second level."""
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def write_files(page: str, folder: Path) -> None:
    """Writes the plug-in that docs/extend.md shows: names before blocks, and lines to add to `my_lab/__init__.py`."""
    found = re.findall(r"^`(my_lab/[\w./]+)`:\n\n```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"Add\s+`(from my_lab import \w+)`\s+to\s+`my_lab/__init__.py`", page)
    assert len(found) == 9 and len(lines) == 3
    for name, text in found:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with (folder / "my_lab/__init__.py").open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def shell_commands(page: str) -> Iterator[list[str]]:
    """The words of each command in a page, from bash blocks and from `code` with a script or pip (MORE added)."""
    for block in blocks(page, "bash"):
        # Variables that a block sets hold in the blocks below it.
        lines = iter(block.splitlines())
        for line in lines:
            while line.endswith("\\") or not _is_whole(line):
                line = line.removesuffix("\\") + ("" if line.endswith("\\") else "\n") + next(lines)
            yield from _split(line)
    text = re.sub(r"^ *```.*?^ *```", "", page, flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(
        r"`((?:python|fabric run|torchrun|bash) \S*/?\S+\.(?:py|sh)\b[^`]*|scripts/\S+\.py [^`]*|pip install [^`]*)`",
        text,
    ):
        whole = re.sub(r"\[[^]]*…]", "", code.replace("\n", " "))
        yield from _split(f"{whole} {MORE}")


def _is_whole(line: str) -> bool:
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return False
    return True


def _split(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    for is_end, words in itertools.groupby(lexer, lambda word: set(word) <= set("&|;")):
        if not is_end:
            yield [*words]


class Shell:
    """Checks the commands of a page in order; remembers the variables that they set and the folder that they enter."""

    def __init__(self) -> None:
        self.variables: dict[str, str] = {}
        self.folder = "."

    def check(self, words: Sequence[str]) -> None:
        """
        Raises:
            CommandError: the command would be refused.
        """
        words = self.expand(words)
        if not words:
            return
        # "…" is what is left out, unless it is the value of an option.
        omitted = [i for i, word in enumerate(words) if word == MORE or (word == "…" and words[i - 1][:2] != "--")]
        words = [self._fill_in(word) for i, word in enumerate(words) if i not in omitted]
        if words[0] == "cd":
            self.folder = words[1]
        elif words[0] == "python" and (ROOT / self.folder / words[1]).is_file():
            words[1] = str(Path(self.folder) / words[1])
        try:
            check_command(words, bool(omitted))
        except CommandError as error:
            raise CommandError(f"{shlex.join(words)}\n{error}") from None

    def expand(self, words: Sequence[str]) -> list[str]:
        """The words behind assignments, which are remembered, with the values of variables."""
        words = list(words)
        while words and (assigned := re.fullmatch(r"(\w+)=(.*)", words[0])):
            self.variables[assigned[1]] = self._value(assigned[2])
            words = words[1:]
        return [self._value(word) for word in words]

    def _value(self, word: str) -> str:
        return re.sub(r"\$(\w+)", lambda name: self.variables.get(name[1], name[0]), word)

    @staticmethod
    def _fill_in(word: str) -> str:
        if word.startswith("+experiment/…"):
            return ANY_EXPERIMENT
        head, equals, value = word.rpartition("=")
        return (head + equals + PLACEHOLDERS.get(value, value)).replace("…", "x")


# Checking.


def check_command(words: Sequence[str], partial: bool = False) -> None:
    """
    Args:
        words: program and arguments.
        partial: some arguments are left out.

    Raises:
        CommandError: the command would be refused.
    """
    if any("my_lab" in word for word in words):
        return  # what a reader's own package offers is not known here; tests/docs/test_extend.py runs these commands
    program, *rest = words
    if program in OTHERS or rest[:1] == ["-c"] or rest[:2] == ["-m", "pytest"]:
        return
    if program == "python" and rest[:2] == ["-m", "forgetting_transformer.train"]:
        check_train(rest[2:], 1, partial)
    elif program == "python" and rest[0] == "-m" and rest[1].startswith("studies."):
        check_script(f"{rest[1].replace('.', '/')}.py", rest[2:], partial)
    elif program == "python":
        check_script(rest[0], rest[1:], partial)
    elif program == "bash":
        _existing(rest[0])
    elif program == "fabric":
        check_fabric(rest, partial)
    elif program == "torchrun":
        script = next(number for number, word in enumerate(rest) if word.endswith(".py"))
        check_script(rest[script], rest[script + 1 :], partial)
    elif program == "pip":
        check_pip(rest)
    elif program == "sbatch":
        rest = list(itertools.dropwhile(lambda word: re.match(r"--(nodes|gpus-per-node)=\d", word), rest))
        _existing(rest[0])
        check_train([f"output_dir={rest[1]}", *rest[2:]], 1, partial)
    elif program.startswith(("scripts/", "eval/", "benchmarks/")):
        if not _existing(program).read_bytes().startswith(b"#!"):
            raise CommandError(f"{program} does not begin with #!, so that it cannot be started without python")
        check_script(program, rest, partial)
    else:
        raise CommandError(
            f"{program} is not a program that the documentation may name; tests/docs/commands.py has those"
        )


def check_script(script: str, arguments: Sequence[str], partial: bool) -> None:
    """A script of this repository and its arguments."""
    path = _existing(script)
    if script == "train.py":
        check_train(arguments, 1, partial)
    elif script == "scripts/launch.py":
        check_fabric(["run", "train.py", *arguments], partial)
    elif (options := parsed(path, tuple(arguments), partial)) is not None:
        check_overrides(script, options)


class _Parsed(BaseException):
    """Carries what a parser found out of a script."""

    def __init__(self, found: argparse.Namespace | None) -> None:
        self.found = found


@functools.cache
def parsed(path: Path, arguments: tuple[str, ...], partial: bool) -> argparse.Namespace | None:
    """What the script's own parser makes of the arguments; None if only arguments that were left out are missing."""
    parse, refuse = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.error

    def parse_and_stop(*args, **kwargs):
        raise _Parsed(parse(*args, **kwargs))

    def error(parser, message):
        if partial and "the following arguments are required" in message:
            raise _Parsed(None)
        refuse(parser, message)

    with _refusals(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *arguments])
        patch.setattr(argparse.ArgumentParser, "error", error)
        module = runpy.run_path(str(path), run_name="script")
        parse_args = module.get("parse_args") or module.get("parse_arguments")
        try:
            if parse_args is not None:
                return parse_args(*[list(arguments)][: parse_args.__code__.co_argcount])
            patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
            module["main"]()
        except _Parsed as done:
            return done.found
        except SystemExit as end:
            if end.code == 0:  # --help
                return None
            raise
    raise CommandError(f"{path} has looked at no arguments")


def check_overrides(script: str, options: argparse.Namespace) -> None:
    """Overrides of train.py among the options of another script."""
    if script.startswith("scripts/sweep_"):
        with _refusals(SweepError):
            fixed, ranges, _ = search_space(options.overrides)
        some = [f"{key}={d.choices[0] if hasattr(d, 'choices') else d.low}" for key, d in ranges.items()]
        compose(*fixed, *some)
    elif script == "studies/run.py":
        stages = Stages(options.study, options.plan, options.folder, options.overrides)
        for model in options.plan.models:
            compose(SEARCH_PATH, f"+experiment/{options.plan.group}={model}", "output_dir=x", *stages.overrides)


def check_fabric(arguments: Sequence[str], partial: bool) -> None:
    """`fabric run SCRIPT …`: its own options, and what it passes on."""
    with _refusals(ClickException):
        options = fabric_run.make_context("run", list(arguments[1:])).params
    script, processes = options["script"], int(options["devices"]) * options["num_nodes"]
    if Path(script).name == "train.py":
        check_train(options["script_args"], processes, partial)
    else:
        check_script(script, options["script_args"], partial)


def check_pip(arguments: Sequence[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for chosen in re.findall(r"\[(.*?)\]", " ".join(arguments)):
        if unknown := set(chosen.split(",")) - set(extras):
            raise CommandError(f"pyproject.toml has no extra {', '.join(unknown)}")


def check_train(arguments: Sequence[str], processes: int, partial: bool) -> None:
    """What train.py does with its arguments before it builds anything."""
    with _refusals():
        found = hydra_parser().parse_args(list(arguments))
    overrides = list(found.overrides)
    if found.config_dir == "studies/configs":
        overrides.append(SEARCH_PATH)
    elif found.config_dir:
        # What the reader's own folder offers is not known here.
        overrides = [ANY_EXPERIMENT if override.startswith("+experiment=") else override for override in overrides]
        overrides = [override for override in overrides if not override.startswith("model=")]
    if partial and not any(override.startswith("+experiment/") for override in overrides):
        overrides.append(ANY_EXPERIMENT)
    if partial:
        given = {override.partition("=")[0] for override in overrides}
        overrides += [f"{key}=x" for key in ("output_dir", "data_dir") if key not in given]
    if found.multirun:
        overrides = first_job(overrides)
    compose(*overrides, processes=processes, check_machine=found.multirun)


def first_job(overrides: Sequence[str]) -> list[str]:
    """What `train.py -m` starts its first job with."""
    with _refusals(HydraException):
        parsed_overrides = OverridesParser.create().parse_overrides(list(overrides))
    values = (next(iter(o.sweep_string_iterator())) if o.is_sweep_override() else None for o in parsed_overrides)
    return [o if v is None else f"{o.partition('=')[0]}={v}" for o, v in zip(overrides, values, strict=True)]


@functools.cache
def compose(*overrides: str, processes: int = 1, check_machine: bool = False) -> None:
    """The config that these overrides make is one that train.py takes, on so many processes."""
    with _refusals(SweepError, ConfigError, MissingMandatoryValue):
        config = compose_config(overrides)
        check(config, processes)
        if check_machine:
            machine(overrides)


def _existing(path: str) -> Path:
    if not (ROOT / path).exists():
        raise CommandError(f"there is no {path}")
    return ROOT / path


@contextlib.contextmanager
def _refusals(*kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds, and exits, are the command's."""
    try:
        yield
    except (*kinds, SystemExit) as error:
        text = error.format_message() if isinstance(error, ClickException) else error
        raise CommandError(f"it would end with {type(error).__name__}: {text}") from None
