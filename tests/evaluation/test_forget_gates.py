"""Forget gates: matrices are those of attention, memory lengths are distances, the pruned share is the kernel's."""

import math
import re

import numpy as np
import pytest
import torch

from forgetting_transformer.analysis.evaluations import read_evaluation
from forgetting_transformer.evaluation import forget_gates
from forgetting_transformer.evaluation.models import EvaluationError
from forgetting_transformer.model import attention
from tests.analysis.conftest import drawn, title_and_note  # noqa: F401 (a fixture)
from tests.evaluation.conftest import sentences
from tests.evaluation.scripts import run_script
from tests.model.small_models import PRO, WINDOWS, small, small_model

SCRIPT = "eval/forget_gates/run_forget_gates.py"


def recorded(model, ids: torch.Tensor) -> list[forget_gates.AttentionInputs]:
    found: list[forget_gates.AttentionInputs] = []
    with torch.no_grad(), forget_gates.watching(forget_gates.attention_layers(model), found.append):
        model(ids[None])
    return found


def dense(inputs: forget_gates.AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """F and A of all heads, (H, T, T), by their definitions."""
    c_HT = inputs.log_fgate_HT.cumsum(-1)
    causal = torch.ones(c_HT.shape[1], c_HT.shape[1], dtype=torch.bool).tril()
    log_decay = (c_HT[:, :, None] - c_HT[:, None]).masked_fill(~causal, -torch.inf)
    scores = inputs.scale * inputs.q_HTD @ inputs.k_HTD.transpose(1, 2) + log_decay.float()
    return log_decay.exp().float(), scores.softmax(-1)


def pooled(matrix: torch.Tensor, pixels: int) -> torch.Tensor:
    """The largest entry of every cell of a `pixels` × `pixels` grid."""
    edges = np.linspace(0, len(matrix), pixels + 1).round().astype(int)
    cells = [[matrix[a:b, c:d].max() for c, d in zip(edges, edges[1:])] for a, b in zip(edges, edges[1:])]  # noqa: B905, RUF007
    return torch.tensor(cells)


@pytest.mark.parametrize(
    "fields",
    [
        {**PRO, "qk_norm_share_param_across_head": True},
        {"use_rope": True, "fgate_type": "bias_only"},
        {**PRO, "num_kv_heads": 1},
    ],
)
def test_what_is_recorded_is_what_attention_gets(fields, monkeypatch):
    model = small_model(**fields, log_pruning_tolerance=-7.0)
    for parameter in model.parameters():  # norm weights of 1 would hide whose they are
        parameter.data *= 1 + 0.3 * torch.rand_like(parameter)
    calls = []
    op = attention.forgetting_attention

    def spy(q, k, v, log_fgate, **options):
        calls.append((q, k, log_fgate, options))
        return op(q, k, v, log_fgate, **options)

    monkeypatch.setattr(attention, "forgetting_attention", spy)
    ids = torch.randint(61, (50,))
    found = recorded(model, ids)
    assert [inputs.layer for inputs in found] == [0, 1]
    for inputs, (q, k, log_fgate, options) in zip(found, calls, strict=True):
        torch.testing.assert_close(inputs.q_HTD, q[0])
        torch.testing.assert_close(inputs.k_HTD, k[0].expand(2, -1, -1))
        torch.testing.assert_close(inputs.log_fgate_HT, log_fgate[0].double())
        if inputs.score_bound_H is None:
            assert (options["adaptive_threshold"], options["log_tolerance"]) == ("auto", -7.0)
            continue
        expected = inputs.tolerance - (2 * inputs.score_bound_H + math.log(50))
        torch.testing.assert_close(expected, options["adaptive_threshold"].flatten().expand(2), check_dtype=False)
        scores = inputs.scale * inputs.q_HTD @ inputs.k_HTD.transpose(1, 2)
        assert (scores.abs().amax((1, 2)) <= inputs.score_bound_H + 1e-5).all()


@pytest.mark.parametrize(("length", "pixels"), [(50, 200), (129, 16)])
def test_pictures_are_the_largest_entries_of_the_matrices(length, pixels, monkeypatch):
    monkeypatch.setattr(forget_gates, "_STRIP_ENTRIES", 3 * length)
    torch.manual_seed(0)
    inputs = recorded(small_model(**PRO), torch.randint(61, (length,)))[1]
    decay, attention = dense(inputs)
    for head in range(2):
        size = min(pixels, length)
        gates = forget_gates.gate_matrix(inputs.log_fgate_HT[head], pixels)
        torch.testing.assert_close(gates, pooled(decay[head], size))
        weights = forget_gates.attention_map(inputs, head, pixels)
        torch.testing.assert_close(weights, pooled(attention[head], size))


def test_memory_lengths_of_known_gates():
    log_fgate = torch.zeros(3, 1001, dtype=torch.float64)
    log_fgate[0, ::100] = -50.0
    log_fgate[2] = -1 / 7.5
    memory, is_bound = forget_gates.memory_lengths(log_fgate)
    assert is_bound.tolist() == [False, True, False]
    assert abs(memory[0].item() - 49.5) <= 1  # tokens since the reset: 0 to 99
    assert abs(memory[1].item() - 750) <= 1  # what the middle query of the second half could see
    assert memory[2].item() == 7  # the decay time of a constant gate


def test_the_pruned_share_follows_the_models_rule():
    """By the weights of QK-norm a head that forgets half at each token skips all but neighbouring tiles.
    Larger norms skip less."""
    q, k = torch.zeros(2, 1024, 16), torch.zeros(2, 1024, 16)
    q[1], k[1] = 20.0, torch.randn(1024, 16).sign() * 20.0
    gates = torch.full((2, 1024), -0.2, dtype=torch.float64)
    by_weights = forget_gates.AttentionInputs(0, q, k, gates, torch.tensor([4.0, 1000.0]), -10.0)
    by_vectors = forget_gates.AttentionInputs(0, q, k, gates, None, -10.0)
    for inputs in (by_weights, by_vectors):
        assert forget_gates.pruned_share(inputs).tolist() == [21 / 36, 0.0]  # 7 · 6 / 2 of 8 · 9 / 2 tiles


def test_models_without_forgetting_attention_are_refused():
    for model in (small("hgrn2"), small_model(window_size=4)):
        with pytest.raises(EvaluationError, match="has no forgetting-attention layer that sees all keys"):
            forget_gates.attention_layers(model)
    assert list(forget_gates.attention_layers(small("hybrid", **WINDOWS))) == [2]
    # Transformer (Pro) is the same class without gates: its maps are ordinary attention.
    (inputs, _) = recorded(small_model(**PRO, fgate_type="none", use_rope=True), torch.arange(9))
    assert (inputs.log_fgate_HT == 0).all()


def test_the_figures_of_a_model_are_of_one_model_and_impossible_requests_name_the_flag(
    quickstart,
    drawn,  # noqa: F811
    tmp_path,
):
    (tmp_path / "text.txt").write_text(sentences(5, 200))
    text, out = ["--text", tmp_path / "text.txt", "--layers", 1], tmp_path / "out"
    done = run_script(SCRIPT, "--model_path", quickstart.hf, *text, "--heads", "0,1", "--out", out)
    assert done.returncode == 0, done.stderr
    for name in ("gates", "attention", "memory"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    evaluation = read_evaluation(out)
    assert evaluation.settings == {"tokens": 201}
    memory, pruned = ([n for n in evaluation.numbers if n.task == task and n.at] for task in ("memory", "pruning"))
    assert [(n.at["layer"], n.at["head"]) for n in memory] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(n.value >= 0 for n in memory) and all(0 <= n.value <= 1 for n in pruned)
    done = run_script(SCRIPT, "--model_path", quickstart.run, *text, "--out", out)
    assert done.returncode == 1 and "choose another --model name, --exp or folder" in done.stderr, (
        "results of another model stay"
    )
    document = ["--model_path", quickstart.hf, "--data_path", quickstart.data / "words", "--out", tmp_path / "other"]
    done = run_script(SCRIPT, *document, "--document", 1, "--max_length", 16)
    assert done.returncode == 0, done.stderr
    budget, source = title_and_note(drawn[-1])[1].split(" · ")[:2]
    assert re.fullmatch(r"after [\d.]{1,4}K training tokens", budget)
    assert source == "on one text of 16 tokens, held-out document 1 of words"
    for arguments, message in (
        (["--layers", "9"], "--layers=9: the model's forgetting-attention layers are 0, 1"),
        (["--heads", "2"], "--heads=2: the model's heads are 0 to 1"),
        (["--document", "99"], "--document=99: .* has documents 0 to 23"),
    ):
        done = run_script(SCRIPT, *document, *arguments)
        assert done.returncode == 1 and re.search(message, done.stderr), done.stderr
