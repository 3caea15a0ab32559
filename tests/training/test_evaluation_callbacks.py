"""The callbacks lm_eval, needle and gate_statistics give the numbers of evaluations, and change no weight."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from forgetting_transformer import training
from forgetting_transformer.data import LongCrawl64DataModule
from forgetting_transformer.evaluation import forget_gates
from forgetting_transformer.evaluation.models import load_model
from forgetting_transformer.evaluation.workers import Workers
from forgetting_transformer.plugins import CORPORA
from forgetting_transformer.training.config import ConfigError
from tests.evaluation.scripts import index_few_tasks
from tests.training.conftest import (
    HEARD,
    STEP,
    STOP,
    assert_same_run,
    before,
    changed,
    lines,
    rank_log,
    status,
    train,
)

pytestmark = pytest.mark.slow

TASK = """
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
EXAMPLES = [{"question": f"w{n} w{n + 1}", "choices": ["w5", "w6 w7", "w8"], "label": n % 3} for n in range(10, 17)]
ANSWER = "w7 w9 w11"
ASKED = "What is the best thing to do in San Francisco? Answer: The best thing to do in San Francisco is"


def parsed(config: dict) -> training.Config:
    return training.parse(OmegaConf.create(config))


def run(config: dict) -> None:
    """Trains in this process, with one thread as all other runs have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        training.run(parsed(config))
    finally:
        torch.set_num_threads(threads)


def with_needle(config: dict, tokenizer: str | None, **keys) -> dict:
    keys = {"interval": 10 * STEP, "lengths": [96, 128], "depths": [1, 0], "samples": 1, "batch_size": 1} | keys
    return changed(config, callbacks__needle={"tokenizer": tokenizer, "answer": ANSWER} | keys)


def test_two_processes_find_the_numbers_of_the_finished_model_and_change_no_weight(tiny, finished, tokenizer):
    # Gates that are open, so that heads see more than a token.
    gates = {"fgate_type": "bias_only", "fgate_bias_init": True, "decay_time_min": 2, "decay_time_max": 16}
    tiny = changed(tiny, train__max_tokens=12 * STEP)
    tiny = changed(tiny, strategy__name="fsdp", **{f"model__config__{key}": value for key, value in gates.items()})
    straight = finished(tiny, 2)
    train(changed(with_needle(tiny, tokenizer), callbacks__gate_statistics={"interval": 10 * STEP}), 2)
    assert_same_run(straight, tiny["output_dir"])
    last = {}
    for kind in ("needle", "gates"):
        found = lines(tiny["output_dir"], kind)
        assert [entry["step"] for entry in found] == [10 * STEP, 12 * STEP]
        last |= found[-1]
    model, config = load_model(tiny["output_dir"], tokenizer=tokenizer), parsed(tiny)
    data = CORPORA.get(config.datamodule.name).build(config.data_dir, config.datamodule)
    check_gates(last, model, data)
    check_needle(last, model, data)


def check_gates(last: dict, model, data: LongCrawl64DataModule) -> None:
    texts = [text for rank in range(2) for text in next(iter(data.eval_loader(rank, 2)))["input_ids"]]
    reports: list[list[forget_gates.HeadReport]] = [[] for _ in texts]
    layers = forget_gates.attention_layers(model.model)
    for text, report in zip(texts, reports, strict=True):
        with torch.no_grad(), forget_gates.watching(layers, lambda one: report.extend(forget_gates.report_heads(one))):  # noqa: B023
            model.model(text[None])
    for index, head in enumerate(reports[0]):
        mean = sum(report[index].memory for report in reports) / len(texts)
        assert last[f"gates/layer_{head.layer}/head_{head.head}"] == pytest.approx(mean)
    heads = [value for key, value in last.items() if "/head_" in key]
    assert len(heads) == 4 and last["gates/longest"] == max(heads) > 1
    assert last["gates/shortest"] == min(heads) <= last["gates/median"]
    assert "gates/pruned" not in last, "this model does not prune"


def check_needle(last: dict, model, data: LongCrawl64DataModule) -> None:
    text = torch.cat([batch["labels"][batch["weight"] > 0].flatten() for batch in data.eval_loader(0, 1)]).tolist()
    query, needle, answer = (
        model.encode(each).tolist()
        for each in (f"Answer the following question: {ASKED}", f"{ASKED} {ANSWER}.", ANSWER)
    )

    def loss_of(before: list[int]) -> float:
        prompt = [0, *before, *query]
        assert len(prompt) + len(answer) == length
        with torch.no_grad():
            logits = model.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        return torch.nn.functional.cross_entropy(logits, torch.tensor(answer)).item()

    for length in (96, 128):
        room, at = length - 1 - len(needle) - len(query) - len(answer), f"needle/length_{length}"
        hidden = np.array([loss_of(needle + text[:room]), loss_of(text[:room] + needle)])
        assert last[f"{at}/loss"] == pytest.approx(hidden.mean(), rel=1e-4)
        assert last[f"{at}/loss_stderr"] == pytest.approx(hidden.std(ddof=1) / 2**0.5, rel=1e-2, abs=1e-5)
        assert last[f"{at}/loss_without"] == pytest.approx(loss_of(text[: room + len(needle)]), rel=1e-4)
        assert 0 <= last[f"{at}/accuracy"] <= 1
    assert [last[f"needle/{key}"] for key in ("mode", "depths", "samples")] == ["easy", "0 100", 1]


@pytest.fixture
def lm_eval(tmp_path, monkeypatch, tokenizer) -> dict:
    """Keys of the callback for a task of seven questions, whose data set is cached in a folder of the test."""
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(example) + "\n" for example in EXAMPLES))
    (tmp_path / "words.yaml").write_text(TASK.format(file=tmp_path / "words.jsonl"))
    index_few_tasks(monkeypatch.setattr)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return {"tasks": ["words"], "interval": 10 * STEP, "include_path": str(tmp_path), "tokenizer": tokenizer}


def test_lm_eval_gives_the_scores_of_the_finished_run_and_changes_no_weight(tiny, finished, lm_eval, tokenizer):
    from forgetting_transformer.evaluation import harness

    straight = finished(tiny)
    run(changed(tiny, callbacks__lm_eval=lm_eval))
    assert_same_run(straight, tiny["output_dir"])
    found = lines(tiny["output_dir"], "lm_eval")
    assert [entry["step"] for entry in found] == [10 * STEP, 20 * STEP]
    model, alone = load_model(tiny["output_dir"], tokenizer=tokenizer), Workers(0, 1, torch.device("cpu"))
    folder = Path(tiny["output_dir"]) / "results"
    options = {"tasks": ["words"], "max_length": 32, "include_path": Path(lm_eval["include_path"])}
    scores = harness.evaluate(model, folder, alone, **options)
    assert found[-1]["lm_eval/words/acc"] == scores["words"]["acc,none"]
    assert found[-1]["lm_eval/words/acc_stderr"] == scores["words"]["acc_stderr,none"] > 0
    assert found[-1]["lm_eval/words/chance"] == pytest.approx(1 / 3)
    assert (found[-1]["lm_eval/words/examples"], found[-1]["lm_eval/max_length"]) == (7, 32)


def test_a_signal_breaks_the_needle_test_off_and_the_next_start_does_it_again(tiny, finished, tokenizer):
    """On one rank of two."""
    stop = (STOP + HEARD).replace("self", "trainer").replace("SIGTERM", "SIGUSR1")
    patch = before("evaluation.needle", "beat", stop, "trainer.fabric.global_rank == 1", "trainer")
    tiny = changed(tiny, train__max_tokens=12 * STEP)
    straight, config = finished(tiny, 2), with_needle(tiny, tokenizer)
    train(config, 2, patch=patch)
    assert status(tiny)["status"] == "preempted" and status(tiny)["step"] == 10 * STEP
    assert "needle after 1,280 tokens was broken off" in rank_log(tiny, 0)
    train(config, 2)
    assert [entry["step"] for entry in lines(tiny["output_dir"], "needle")] == [10 * STEP, 12 * STEP]
    assert_same_run(straight, tiny["output_dir"])


def test_what_an_evaluation_lacks_is_missed_before_the_first_step(tiny, tokenizer, lm_eval, monkeypatch):
    def refused(config: dict, message: str) -> None:
        with pytest.raises(ConfigError) as refusal:
            run(config)
        assert message in str(refusal.value)

    for keys, message in (
        ({"lengths": [40, 128]}, "callbacks.needle.lengths=[40, 128] has prompts of 40 tokens, and needle, "),
        ({"lengths": None}, "callbacks.needle.lengths=null has prompts of 32 tokens, and needle, "),
        ({"depths": [0, 50]}, "callbacks.needle.depths.1=50 must be less than or equal to 1"),
    ):
        refused(with_needle(tiny, tokenizer, **keys), message)
    refused(with_needle(tiny, None), "callbacks.needle.tokenizer=None: ")
    for keys, message in (
        ({"tasks": ["wordz"]}, "tasks=wordz: lm_eval does not know it; did you mean 'words'? `lm_eval ls"),
        ({"include_path": "/absent"}, "include_path=/absent: there is no such folder; give one with task files"),
        ({"tasks": []}, "callbacks.lm_eval.tasks=[] is empty; give at least one value"),
    ):
        refused(changed(tiny, callbacks__lm_eval=lm_eval | keys), message)
    model = {"name": "hgrn2", "config": {"hidden_size": 32, "num_hidden_layers": 2, "expand_ratio": 16}}
    without_gates = changed(tiny, model=model, callbacks__gate_statistics={"interval": 5 * STEP})
    refused(without_gates, "callbacks=[gate_statistics]: HGRN2ForCausalLM has no forgetting-attention layer")
    find = importlib.util.find_spec
    absent = {"lm_eval": None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: absent.get(name, find(name, *rest)))
    install = "callbacks=[lm_eval] needs lm-evaluation-harness: pip install 'lm_eval>=0.4.13,<0.5'"
    refused(changed(tiny, callbacks__lm_eval=lm_eval), install)
    assert not (Path(tiny["output_dir"]) / "metrics/jsonlines/train.jsonl").exists()
