"""scripts/check_model.py: what an architecture of a user's own may break is found, and what it does not break is ok."""

import re
import shlex
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING,
)

from forgetting_transformer import plugins
from forgetting_transformer.model import registry
from forgetting_transformer.model.checks import CHECKS, check_architecture
from forgetting_transformer.model.config import SwiGLUDecoderConfig
from forgetting_transformer.model.decoder import model_classes
from forgetting_transformer.model.mixers.recurrent import RecurrentMixer, zero_padding
from tests.docs.commands import write_files
from tests.processes import ROOT, run_command, run_here

pytestmark = pytest.mark.slow


class Mean(RecurrentMixer):
    """The mean of what was read, with a bias that only an empty past gets; each fault below changes one line of it."""

    change = staticmethod(lambda out_BTE: out_BTE)

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(hidden_size, hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)

    def mix(self, hidden_BTE, padding_BT, states):
        x_BTE = zero_padding(self.in_proj(hidden_BTE), padding_BT)
        count_BTE = zero_padding(torch.ones_like(x_BTE), padding_BT)
        sum_BTE = x_BTE.cumsum(1) + states.get("sum", 0)
        number_BTE = count_BTE.cumsum(1) + states.get("number", 0)
        out_BTE = self.change(self.out_proj(sum_BTE / number_BTE.clamp(min=1)))
        return out_BTE, {"sum": sum_BTE[:, -1:], "number": number_BTE[:, -1:]}


class OverAllTokens(Mean):
    change = staticmethod(lambda out_BTE: out_BTE.mean(1, keepdim=True).expand_as(out_BTE))


class Unused(Mean):
    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.forgotten = nn.Linear(hidden_size, 1)


class LosesItsState(Mean):
    def mix(self, hidden_BTE, padding_BT, states):
        out_BTE, _ = super().mix(hidden_BTE, padding_BT, {})
        return out_BTE, {}


class ReadsPadding(Mean):
    def mix(self, hidden_BTE, padding_BT, states):
        return super().mix(hidden_BTE, None, states)


class NotANumber(Mean):
    change = staticmethod(torch.log)


class WritesWhatWasLoaded(Mean):
    """In place, and not through transformers.initialization."""

    def init_own_weights(self):
        with torch.no_grad():
            self.in_proj.bias.fill_(1.0)


class Raises(Mean):
    def mix(self, hidden_BTE, padding_BT, states):
        raise KeyError("k_conv")


@pytest.fixture
def register(monkeypatch) -> Callable[..., str]:
    """Registers a mixer as the architecture `throw_away` for the time of a test."""
    monkeypatch.setattr(registry, "MODELS", dict(registry.MODELS))
    monkeypatch.setattr(plugins.MODELS, "_components", dict(plugins.MODELS._components))
    for mapping in (CONFIG_MAPPING, MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        monkeypatch.setattr(mapping, "_extra_content", dict(mapping._extra_content))
    monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "throw_away-tests", "")

    def add(mixer: type[nn.Module], **methods) -> str:
        def build_mixer(self, layer_idx):
            return mixer(self.hidden_size)

        methods = {"mixer_flops_per_token": lambda self, layer_idx, seq_len: 4.0 * self.hidden_size**2} | methods
        body = {"model_type": "throw_away-tests", "build_mixer": build_mixer, "__module__": __name__, **methods}
        config_class = type("ThrowAwayConfig", (SwiGLUDecoderConfig,), body)
        registry.register("throw_away", config_class, *model_classes(config_class))
        return "throw_away"

    return add


def failures(name: str, **fields) -> dict[str, str]:
    """What fails, and what is said of it; always in one line."""
    results = check_architecture(name, fields)
    assert [result.name for result in results] in ([*CHECKS], ["build"])
    assert not any("\n" in result.detail for result in results)
    return {result.name: result.detail for result in results if not result.is_ok}


def test_built_in_architectures_pass():
    assert failures("hybrid", pattern=["mamba2", "path_fox", "samba", "hgrn2"]) == {}


def test_an_architecture_without_a_fault_passes_alone_and_in_a_hybrid(register):
    name = register(Mean)
    assert failures(name) == {}
    assert failures("hybrid", pattern=[name, "forgetting_transformer"]) == {}


#: Mixer -> the checks that must fail, with what is said. All others must be ok.
FAULTS = {
    OverAllTokens: {
        "causality": r"changing token 1 changes logits before it by [\d.]+, first at token 0 .*look for sums, means",
        "cache": "pieces of 68, 1, 1, 1, … tokens differ from those of all at once by",
        "padding": "11 tokens of left padding differ from those of it alone",
    },
    Unused: {"gradients": r"no gradient for .*layers.0.attn.forgotten.weight.* and|use it, remove it"},
    LosesItsState: {
        "cache": r"pieces of 68, 1, 1, 1, … .* by [\d.]+, first at token 68 \(tolerance 0.\d+\); the state "
        "must be the one after the last token",
    },
    ReadsPadding: {"padding": r"differ from those of it alone by [\d.]+, first at token 0 .*zero_padding"},
    WritesWhatWasLoaded: {
        "saving": "^model.layers.0.attn.in_proj.bias, model.layers.1.attn.in_proj.bias has other values after loading; "
        "init_own_weights must write through transformers.initialization"
    },
    Raises: {"build": "^KeyError: 'k_conv'$"},
    NotANumber: {"build": r"^[\d,]+ of 14,640 logits are not finite; look for logarithms"},
}


@pytest.mark.parametrize("mixer", FAULTS, ids=lambda mixer: mixer.__name__)
def test_a_fault_fails_its_checks_and_no_others(mixer, register):
    found, expected = failures(register(mixer)), FAULTS[mixer]
    assert found.keys() == expected.keys(), found
    for check, said in found.items():
        assert re.search(expected[check], said), said


def test_flops_of_a_configuration_must_be_a_number(register):
    found = failures(register(Mean, mixer_flops_per_token=lambda self, layer_idx, seq_len: 0))
    assert found.keys() == {"build"} and "is 0; it must be a positive number" in found["build"]


# The script.


@pytest.fixture
def script(capsys):
    """Runs it here, and returns its exit code and what it printed."""

    def run(*arguments: str) -> SimpleNamespace:
        code, captured = run_here("scripts/check_model.py", *arguments), capsys.readouterr()
        return SimpleNamespace(code=code, out=captured.out, err=captured.err)

    return run


def test_what_failed_is_named_and_the_code_is_1(script, register):
    done = script("--model", register(LosesItsState), "hidden_size=32")
    assert done.code == 1 and done.out.splitlines()[-1] == "1 of 6 checks failed: cache"
    assert "\nFAILED cache " in done.out and "Traceback" not in done.out


def test_wrong_arguments_are_one_line(script):
    for arguments, said in (
        (["--model", "kdaa"], r"^error: model.name='kdaa' is unknown; did you mean 'kda'\?"),
        (["--model", "kda", "num_heads=[1"], r"^error: 'num_heads=\[1': .*; give a value as YAML has it"),
    ):
        done = script(*arguments)
        assert done.code == 1 and re.search(said, done.err) and done.err.count("\n") == 1 and not done.out
    done = script("--model", "kda", "num_headz=2")
    assert done.code == 1 and "KDAConfig has no field 'num_headz'; did you mean 'num_heads'?" in done.out
    assert done.out.splitlines()[-1] == "1 of 1 checks failed: build"


def test_the_page_shows_what_it_prints(tmp_path):
    """docs/extend.md, with the package that it shows, in a folder that holds nothing else."""
    page = (ROOT / "docs/extend.md").read_text(encoding="utf-8")
    write_files(page, tmp_path)
    command, *shown = re.findall(r"^```text\n\$ (python scripts/check_model.*?)^```", page, re.M | re.S)[0].splitlines()
    _, script, *words = shlex.split(command)
    done = run_command(script, *words, folder=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr + done.stdout

    def words_of(lines: list[str]) -> list[str]:
        # Differences are rounding, which is not the same everywhere.
        return [re.sub(r"(by|tolerance) [\d.e-]+", r"\1 …", line) for line in lines]

    assert words_of(done.stdout.splitlines()) == words_of(shown)
