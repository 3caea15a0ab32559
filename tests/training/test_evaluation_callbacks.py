"""The callbacks lm_eval, needle, samples and gate_statistics give the numbers of evaluations, and change no weight."""

import importlib.util
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from forgetting_transformer.data import LongCrawl64DataModule
from forgetting_transformer.evaluation import forget_gates, harness
from forgetting_transformer.evaluation.generation import continue_greedily
from forgetting_transformer.evaluation.models import load_model
from forgetting_transformer.evaluation.workers import Workers
from forgetting_transformer.training import parse
from tests.tiny import tiny_config
from tests.training.conftest import STEP, Job, changed, rank_log, refused, status
from tests.training.test_export import word_tokenizer
from tests.training.test_resume import assert_same_run, lines

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


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A folder with a task of seven questions and a tokenizer of the tiny corpus."""
    folder = tmp_path_factory.mktemp("task")
    word_tokenizer(folder / "tokenizer")
    (folder / "words.jsonl").write_text("".join(json.dumps(example) + "\n" for example in EXAMPLES))
    (folder / "words.yaml").write_text(TASK.format(file=folder / "words.jsonl"))
    return folder


def open_gates(config: dict) -> dict:
    """Sharded, and with heads that see more than a token."""
    gates = {"fgate_type": "bias_only", "fgate_bias_init": True, "decay_time_min": 2, "decay_time_max": 16}
    config = changed(config, **{f"model__config__{key}": value for key, value in gates.items()})
    return changed(config, strategy__name="fsdp")


def with_lm_eval(config: dict, task: Path, **keys) -> dict:
    keys = {"tasks": ["words"], "interval": 10 * STEP, "include_path": str(task), "batch_size": 4} | keys
    return changed(config, callbacks__lm_eval={"tokenizer": str(task / "tokenizer")} | keys)


def with_needle(config: dict, task: Path, **keys) -> dict:
    keys = {"interval": 10 * STEP, "lengths": [96, 128], "depths": [0, 1], "samples": 1, "batch_size": 2} | keys
    return changed(config, callbacks__needle={"tokenizer": str(task / "tokenizer"), "answer": ANSWER} | keys)


def offline(task: Path) -> str:
    """Caches of data sets belong to the test."""
    return f"import os; os.environ['HF_DATASETS_CACHE'] = {str(task / 'cache')!r}\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus, task) -> str:
    """A run of two processes with all of the callbacks."""
    config = open_gates(with_needle(tiny_config(tmp_path_factory.mktemp("observed") / "run", corpus), task))
    keys = {"interval": 10 * STEP, "max_new_tokens": 6, "tokenizer": str(task / "tokenizer"), "temperature": 0.0}
    config = changed(config, callbacks__samples=keys | {"prompts": ["w3 w4", "w5"]})
    config = changed(config, callbacks__gate_statistics={"interval": 5 * STEP})
    config = with_lm_eval(config, task) if importlib.util.find_spec("lm_eval") else config
    job = Job(config, 2, patch=offline(task))
    assert job.wait() == [0, 0], job.errors()
    return config["output_dir"]


@pytest.fixture
def model(run, task):
    return load_model(run, tokenizer=str(task / "tokenizer"))


def held_out(config: dict) -> LongCrawl64DataModule:
    shape = vars(parse(config).datamodule)
    return LongCrawl64DataModule(config["data_dir"], **{key: value for key, value in shape.items() if key != "name"})


def test_they_change_no_weight(tiny, finished, run):
    assert_same_run(finished(open_gates(tiny), 2), run)


def test_lm_eval_gives_the_scores_of_the_finished_run(run, task, model, monkeypatch):
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    found = lines(run, "lm_eval")
    assert [entry["step"] for entry in found] == [10 * STEP, 20 * STEP]
    monkeypatch.setenv("HF_DATASETS_CACHE", str(task / "cache"))
    alone = Workers(0, 1, torch.device("cpu"))
    options = {"tasks": ["words"], "max_length": 32, "include_path": task}
    scores = harness.evaluate(model, task / "results", alone, **options)
    assert found[-1]["lm_eval/words/acc"] == scores["words"]["acc,none"]
    assert found[-1]["lm_eval/words/acc_stderr"] == scores["words"]["acc_stderr,none"] > 0
    assert found[-1]["lm_eval/words/chance"] == pytest.approx(1 / 3)


def test_gate_statistics_are_the_memory_lengths_of_the_finished_model(tiny, run, model):
    found = lines(run, "gates")
    assert [entry["step"] for entry in found] == [5 * STEP, 10 * STEP, 15 * STEP, 20 * STEP]
    texts = [text for rank in range(2) for text in next(iter(held_out(tiny).eval_loader(rank, 2)))["input_ids"]]
    reports: list[list] = [[] for _ in texts]
    with torch.no_grad():
        layers = list(forget_gates.attention_layers(model.model))
        for text, report in zip(texts, reports, strict=True):
            look = partial(lambda report, inputs: report.extend(forget_gates.report_heads(inputs, -20.0)), report)
            forget_gates.visit(model.model, text, layers, look)
    for index, head in enumerate(reports[0]):
        mean = sum(report[index].memory for report in reports) / len(texts)
        assert found[-1][f"gates/layer_{head.layer}/head_{head.head}"] == pytest.approx(mean)
    heads = [value for key, value in found[-1].items() if "/head_" in key]
    assert len(heads) == 4 and found[-1]["gates/longest"] == max(heads) > 1
    assert found[-1]["gates/shortest"] == min(heads) <= found[-1]["gates/median"]
    assert not any("gates/pruned" in entry for entry in found), "this model does not prune"


def test_the_needle_test_gives_the_losses_of_the_finished_model(tiny, run, model):
    found = lines(run, "needle")
    assert [entry["step"] for entry in found] == [10 * STEP, 20 * STEP]
    last = found[-1]
    batches = [batch["labels"][batch["weight"] > 0].flatten() for batch in held_out(tiny).eval_loader(0, 1)]
    text, encode = torch.cat(batches).tolist(), lambda text: model.tokenizer.encode(text, add_special_tokens=False)
    asked = "What is the best thing to do in San Francisco? Answer: The best thing to do in San Francisco is"
    needle, answer = encode(f"{asked} {ANSWER}."), encode(ANSWER)
    for length in (96, 128):
        room = length - 1 - len(needle) - len(encode(f"Answer the following question: {asked}")) - len(answer)
        losses = {}
        for depth, inside in (
            ("depth_0/loss", needle + text[:room]),
            ("depth_100/loss", text[:room] + needle),
            ("loss_without", text[: room + len(needle)]),
        ):
            prompt = [0, *inside, *encode(f"Answer the following question: {asked}")]
            assert len(prompt) + len(answer) == length
            with torch.no_grad():
                logits = model.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            losses[depth] = torch.nn.functional.cross_entropy(logits, torch.tensor(answer)).item()
            assert last[f"needle/length_{length}/{depth}"] == pytest.approx(losses[depth], rel=1e-4), depth
        of_both = torch.tensor([losses["depth_0/loss"], losses["depth_100/loss"]])
        assert last[f"needle/length_{length}/loss"] == pytest.approx(of_both.mean().item(), rel=1e-4)
        error = of_both.std().item() / 2**0.5
        assert last[f"needle/length_{length}/loss_stderr"] == pytest.approx(error, rel=1e-2, abs=1e-5)
        assert 0 <= last[f"needle/length_{length}/accuracy"] <= last[f"needle/length_{length}/tokens_right"] <= 1


def test_samples_are_what_the_finished_model_writes(run, model):
    first, last = lines(run, "samples")
    assert (first["step"], last["step"]) == (10 * STEP, 20 * STEP) and last["samples/0/prompt"] == "w3 w4"
    for number, ids in enumerate(([0, 3, 4], [0, 5])):
        (text,) = continue_greedily(model, np.array([ids]), 6, "fp32")
        assert last[f"samples/{number}/text"] == text and text


def test_what_lm_eval_needs_is_missed_before_the_first_step(tiny, task):
    absent = "import importlib.util\nfind = importlib.util.find_spec\n"
    absent += "importlib.util.find_spec = lambda name, *rest: None if name == 'lm_eval' else find(name, *rest)"
    job = Job(with_lm_eval(tiny, task), patch=absent)
    assert job.wait() == [1]
    assert "callbacks=[lm_eval] needs lm-evaluation-harness: pip install 'lm_eval>=0.4.13,<0.5'" in job.errors()
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    job = Job(with_lm_eval(tiny, task, tasks=["wordz"]), patch=offline(task))
    assert job.wait() == [1]
    assert "tasks=wordz: lm_eval does not know them; for wordz did you mean 'words'? `lm_eval ls" in job.errors()
    assert not (Path(tiny["output_dir"]) / "metrics/jsonlines/train.jsonl").exists()


def test_what_cannot_be_evaluated_is_refused_before_the_first_step(tiny, task):
    said = refused(with_needle(tiny, task, lengths=[40, 128]))
    assert "callbacks.needle.lengths=[40, 128] has prompts of 40 tokens, and needle, " in said
    model = {"name": "hgrn2", "config": {"hidden_size": 32, "num_hidden_layers": 2, "expand_ratio": 16}}
    said = refused(changed(tiny, model=model, callbacks__gate_statistics={"interval": 5 * STEP}))
    assert "callbacks=[gate_statistics]: HGRN2ForCausalLM has no forgetting-attention layer" in said


def test_a_signal_breaks_the_needle_test_off_and_the_next_start_does_it_again(tiny, finished, task):
    patch = """
import os, signal, time
from forgetting_transformer.evaluation import needle
original, on_interval = needle.NeedleTest._batches, needle.NeedleTest.on_interval
def remember(self, trainer, kind):
    self.heard = lambda: trainer.sentinel.request is not None
    on_interval(self, trainer, kind)
def batches(self):
    if self._workers.rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        while not self.heard():
            time.sleep(0.001)
    return original(self)
needle.NeedleTest._batches, needle.NeedleTest.on_interval = batches, remember
"""
    straight, config = finished(tiny, 2), with_needle(tiny, task, batch_size=1)
    job = Job(config, 2, patch=patch)
    assert job.wait() == [0, 0], job.errors()
    assert status(tiny)["status"] == "preempted" and status(tiny)["step"] == 10 * STEP
    assert "needle after 1,280 tokens was broken off" in rank_log(tiny, 0)
    job = Job(config, 2)
    assert job.wait() == [0, 0], job.errors()
    assert [entry["step"] for entry in lines(tiny["output_dir"], "needle")] == [10 * STEP, 20 * STEP]
    assert_same_run(straight, tiny["output_dir"])


def test_what_the_needle_test_cannot_do_is_refused_before_the_first_step(tiny, task):
    for keys, message in (
        (
            {"lengths": [40, 128]},
            "callbacks.needle.lengths=[40, 128] has prompts of 40 tokens, and needle, ",
        ),
        ({"depths": [0, 50]}, "callbacks.needle.depths.1=50 must be less than or equal to 1"),
        ({"mode": "eazy"}, "callbacks.needle.mode=eazy must be 'easy' or 'standard'"),
        ({"tokenizer": None}, "callbacks.needle.tokenizer=None: "),
        ({"haystack": str(task / "nowhere")}, f"callbacks.needle.haystack={task / 'nowhere'}: there is no folder"),
    ):
        assert message in refused(with_needle(tiny, task, **keys)), keys
    assert not (Path(tiny["output_dir"]) / "metrics/jsonlines/train.jsonl").exists()
