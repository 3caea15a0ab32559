"""benchmarks/authors.py: the authors' model is loaded beside our package of the same name and runs in each mode."""

import itertools
import json
import sys

import pytest

from forgetting_transformer.ops import forgetting_attention
from tests.benchmarks.conftest import load

SMALL = ["--device", "cpu", "--seq_len", "32", "--steps", "1", "--warmup_steps", "1"]
#: Stands in for their modules, with what the benchmark and their train.py use of them.
MODEL = """
from types import SimpleNamespace
import torch
from forgetting_transformer.ops.forgetting_attention import forgetting_attention
from .size import DIM

class ForgettingTransformerConfig:
    def __init__(self, vocab_size=32000, log_pruning_tolerance=None, fuse_norm=True):
        self.vocab_size, self.log_pruning_tolerance = vocab_size, log_pruning_tolerance

class ForgettingTransformerForCausalLM(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.checkpointing = config, None
        self.embeddings = torch.nn.Embedding(config.vocab_size, DIM)

    def gradient_checkpointing_enable(self, settings):
        self.checkpointing = settings

    def forward(self, input_ids, labels, return_dict):
        seen = (forgetting_attention(), self.config.log_pruning_tolerance, self.checkpointing, self.training)
        open("seen", "a").write(repr(seen) + "\\n")
        return SimpleNamespace(loss=self.embeddings(input_ids).sum(-1) - labels)
"""


@pytest.fixture
def benchmark():
    yield load("authors")
    for name in [name for name in sys.modules if name.startswith("authors_fox")]:
        del sys.modules[name]


@pytest.fixture
def checkout(benchmark, tmp_path):
    (tmp_path / benchmark.MODEL).mkdir(parents=True)
    (tmp_path / benchmark.OP).parent.mkdir()
    (tmp_path / benchmark.OP).write_text("def forgetting_attention():\n    return 'theirs'\n")
    (tmp_path / benchmark.MODEL / "__init__.py").write_text("raise RuntimeError('registers names that are taken')\n")
    (tmp_path / benchmark.MODEL / "size.py").write_text("DIM = 8\n")
    (tmp_path / benchmark.MODEL / "modeling_forgetting_transformer.py").write_text(MODEL)
    return tmp_path


@pytest.mark.slow
@pytest.mark.rare("no contract: benchmarks")
def test_their_model_runs_in_the_mode_of_the_row_and_ours_keeps_its_op(benchmark, checkout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = benchmark.parse_args([*SMALL, "--authors", str(checkout)])
    for pruned, checkpointing in ((True, False), (False, True)):
        case = {"experiment": "demo/fox_pro", "pruned": pruned, "checkpointing": checkpointing, "code": "authors"}
        row = benchmark.measure(args, case)
        assert row["tokens_per_step"] == 32 and row["parameters"] == 8 * 4096
        tolerance, checkpointed = (-10.0, None) if pruned else (None, {"use_reentrant": False})
        assert eval((tmp_path / "seen").read_text().splitlines()[-1]) == ("theirs", tolerance, checkpointed, True)
    assert sys.modules["forgetting_transformer.ops.forgetting_attention"] is forgetting_attention


def test_each_mode_of_theirs_is_followed_by_the_same_of_ours(benchmark, checkout, tmp_path, monkeypatch, capsys):
    def rows(command, cases, time_limit):
        assert command[-2:] == ["--worker", json.dumps(cases[0])]
        yield cases[0] | {"status": "out of memory"}

    monkeypatch.setattr(benchmark.training, "rows_of_process", rows)
    out = tmp_path / "authors.json"
    assert benchmark.main([*SMALL, "--authors", str(checkout), "--authors_commit", "883f260", "--out", str(out)]) == 0
    measured = json.loads(out.read_text())
    assert measured["settings"]["authors_commit"] == "883f260"
    modes = [(row["pruned"], row["checkpointing"], row["code"]) for row in measured["rows"]]
    assert modes == list(itertools.product((True, False), (False, True), ("authors", "ours")))
    assert "| no | yes | paper authors | out of memory |" in capsys.readouterr().out


def test_a_folder_without_their_code_is_refused_with_the_command_that_makes_it(benchmark, tmp_path, capsys):
    assert benchmark.main([*SMALL, "--authors", str(tmp_path)]) == 2
    assert f"git clone https://github.com/zhixuan-lin/forgetting-transformer {tmp_path}" in capsys.readouterr().err
