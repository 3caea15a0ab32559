"""The tests that need a GPU are compared with the code on every machine.

Otherwise nothing would show on a machine without a GPU that the arguments of a function have changed, or that a fault
is injected into a method that no longer exists.
"""

import ast
import importlib
import inspect
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from forgetting_transformer.model import registry
from forgetting_transformer.training import setup
from forgetting_transformer.training.config.parsing import parse
from tests.training.keys import known_keys

FILES = sorted((Path(__file__).parent / "gpu").glob("test_*.py"))
MISSING = object()


def found(tree: ast.expr, names: dict[str, Any]) -> Any:
    """What `a.b.c` is; MISSING for anything else, and for names that only a running test has.

    Raises:
        AttributeError: a module or class has no such attribute.
    """
    if isinstance(tree, ast.Name):
        return names.get(tree.id, MISSING)
    if isinstance(tree, ast.Attribute):
        owner = found(tree.value, names)
        if isinstance(owner, types.ModuleType | type):
            return getattr(owner, tree.attr)
    return MISSING


def imported(tree: ast.AST) -> dict[str, Any]:
    """The names that the import statements anywhere in `tree` bring.

    Raises:
        ImportError: one cannot be imported.
    """
    names: dict[str, Any] = {}
    exec("\n".join(ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)), names)
    return names


def accepts(function: Any, call: ast.Call) -> bool:
    """Whether the call's arguments can be bound; what is unpacked may be anything."""
    unpacked = any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)
    signature = inspect.signature(function)
    try:
        bind = signature.bind_partial if unpacked else signature.bind
        bind(*(a for a in call.args if not isinstance(a, ast.Starred)), **{k.arg: k for k in call.keywords if k.arg})
    except TypeError:
        return False
    return True


def faults(tree: ast.AST) -> Iterator[ast.Module]:
    """Programs that a test hands to its training processes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\nimport " in f"\n{node.value}":
            yield ast.parse(textwrap.dedent(node.value.replace("{folder!r}", "''")))


def problems(source: str, names: dict[str, Any]) -> list[str]:
    """What in a test file does not fit the code: calls, attributes, keys of the configuration.

    Args:
        names: globals of the module.
    """
    tree, wrong = ast.parse(source), []
    # What an argument of a function is called, a fixture say, only a running test knows.
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    outside = {name: value for name, value in (names | imported(tree)).items() if name not in arguments}
    for part, known in [(tree, outside), *((fault, imported(fault)) for fault in faults(tree))]:
        for node in ast.walk(part):
            try:
                value = found(node, known) if isinstance(node, ast.Attribute) else MISSING
                value = found(node.func, known) if isinstance(node, ast.Call) else value
            except AttributeError as error:
                wrong.append(str(error))
                continue
            if not isinstance(node, ast.Call):
                continue
            ours = getattr(value, "__module__", None) or ""
            if ours.startswith(("tests.", "forgetting_transformer.")) and not accepts(value, node):
                takes = f"{value.__name__} takes {inspect.signature(value)}"
                wrong.append(f"line {node.lineno}: {ast.unparse(node)[:100]}: {takes}")
            keys = (k.arg.replace("__", ".") for k in node.keywords if k.arg)
            if getattr(node.func, "id", None) in ("changed", "on_gpus"):
                wrong += [f"line {node.lineno}: no key {key}" for key in keys if not known_key(key)]
    return wrong


def known_key(key: str) -> bool:
    return any(known == key or known.startswith(f"{key}.") or key.startswith("model.config.") for known in known_keys())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_gpu_test_calls_is_there_and_takes_its_arguments(file):
    module = importlib.import_module(f"tests.gpu.{file.stem}")
    assert problems(file.read_text(encoding="utf-8"), vars(module)) == []


@pytest.mark.parametrize("name", registry.model_names())
def test_gpu_tests_of_compiling_know_the_fields_of_every_architecture(name, tmp_path):
    from tests.gpu.test_compile_cuda import large_config

    setup.build_model(
        parse(OmegaConf.create(large_config(tmp_path, tmp_path, name))),
        SimpleNamespace(vocab_size=64, bos_token_id=0, eos_token_id=0),
        initialise=False,
    )


FAULT = "import os\\nfrom forgetting_transformer.training import trainer\\ntrainer.Trainer."


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("changed({}, train__max_token=3)", "no key train.max_token"),
        ("changed({}, train__max_tokens=3, strategy={}, model__config__hidden_size=3)", None),
        ("Job({}, 2, accelerators='cuda')", "Job takes"),
        ("Job({}, 2, accelerator='cuda').wait()", None),
        ("conftest.Jobs({})", "no attribute 'Jobs'"),
        (f"Job({{}}, patch='{FAULT}stepp')", "stepp"),
        (f"Job({{}}, patch='{FAULT}step')", None),
    ],
)
def test_rot_is_found(line, says):
    wrong = problems(
        f"from tests.training import conftest\nfrom tests.training.conftest import Job, changed\n{line}", {}
    )
    assert says in wrong[0] if says else wrong == []
