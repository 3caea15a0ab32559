"""Code named in a folder is never run: not that of a tokenizer, not that of a model, whatever standard input says."""

import ast
import builtins
import json

import pytest

from forgetting_transformer.data import DataError
from forgetting_transformer.data.prepare.tokenizers import byte_tokenizer, save_built, save_loaded
from forgetting_transformer.evaluation.models import EvaluationError, load_model
from forgetting_transformer.training.export import tokenizer_of_run
from forgetting_transformer.training.records.run_directory import RunDirectory
from tests.processes import ROOT, run_here

PYTHON = sorted(
    file
    for place in ("src", "scripts", "eval", "benchmarks", "*.py")
    for found in ROOT.glob(place)
    for file in ([found] if found.is_file() else found.rglob("*.py"))
)


def unsafe(source: str) -> list[int]:
    """Lines of calls that load a tokenizer, a model or a config of Transformers without trust_remote_code=False."""
    lines = []
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        given = {word.arg: getattr(word.value, "value", None) for word in call.keywords}
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        whose = ast.unparse(call.func)  # a method that hands on to super() hands on what its caller has chosen
        loads = (name in ("from_pretrained", "pipeline") and not whose.startswith("super().")) or (
            name == "from_config" and whose.startswith("Auto")
        )
        if given.get("trust_remote_code", False) is not False or (loads and "trust_remote_code" not in given):
            lines.append(call.lineno)
    return lines


def test_no_file_loads_a_tokenizer_or_model_that_may_bring_its_own_code():
    assert {"train.py", "save_model.py", "generate.py", "run_niah.py", "decode.py"} <= {file.name for file in PYTHON}
    found = {file.relative_to(ROOT).as_posix(): unsafe(file.read_text(encoding="utf-8")) for file in PYTHON}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A tokenizer whose folder asks for its own code, and a `y` for whatever asks on standard input."""
    folder = tmp_path / "run" / "tokenizer"
    save_built(byte_tokenizer(), folder)
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w').close()\nfrom transformers import GPT2Tokenizer as Planted\n"
    (folder / "planted.py").write_text(code)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Planted", "auto_map": {"AutoTokenizer": ["planted.Planted", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    yield folder
    assert not ran.exists(), "planted code was run"


def test_a_planted_tokenizer_of_a_run_is_refused_in_one_line(planted):
    directory, config = RunDirectory(planted.parent), {"config": {"datamodule": {"dataset": "corpus"}}}
    for load in (
        lambda: tokenizer_of_run(directory, config),
        lambda: tokenizer_of_run(directory, config, str(planted)),
    ):
        with pytest.raises(ValueError, match=r"tokenizer asks for its own code .*auto_map.* is never run") as caught:
            load()
        assert "\n" not in str(caught.value)


def test_a_planted_tokenizer_of_a_corpus_is_refused(planted, tmp_path):
    with pytest.raises(DataError, match="is never run"):
        save_loaded(str(planted), tmp_path / "out")


def test_a_planted_model_is_refused(planted):
    code = {"AutoConfig": "planted.Planted", "AutoModelForCausalLM": "planted.Planted"}
    (planted / "config.json").write_text(json.dumps({"model_type": "planted", "auto_map": code}))
    with pytest.raises(EvaluationError, match="custom code"):
        load_model(str(planted))
    said = run_here("scripts/generate.py", str(planted))
    assert said.startswith("error: cannot load ") and "custom code" in said
