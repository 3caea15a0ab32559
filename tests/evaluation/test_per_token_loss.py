"""Loss at every position: right, resumable with another number of processes, and its slope."""

import argparse
import dataclasses
import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
import torch
from pydantic import Field
from transformers import GPT2Config, GPT2LMHeadModel

from forgetting_transformer.analysis import position_loss
from forgetting_transformer.analysis.evaluations import read_evaluation
from forgetting_transformer.data import DataError, LongCrawl64DataModule
from forgetting_transformer.evaluation import held_out, per_token_loss
from forgetting_transformer.evaluation.models import EvaluationError, fingerprint, load_model
from forgetting_transformer.plugins import CORPORA, Component
from forgetting_transformer.training.config.corpora import LongCrawl64Config
from tests.evaluation.conftest import ALONE, DOC_LEN, DOCUMENTS, TRAIN_LENGTH
from tests.evaluation.scripts import ROOT, run_script

SCRIPT = "eval/per_token_loss/run_per_token_loss.py"


def heldout(quickstart, **options) -> held_out.HeldOut:
    return held_out.open_heldout(held_out.find_heldout(quickstart.data), **options)


def expected_losses(model, data: held_out.HeldOut) -> np.ndarray:
    labels = torch.from_numpy(np.concatenate([data.read(n) for n in range(data.sequences)]).astype(np.int64))
    inputs = labels.roll(1, 1)
    inputs[:, 0] = 0
    with torch.no_grad():
        logits = model.model(input_ids=inputs).logits
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").double().numpy()


def test_results_are_the_mean_losses_of_all_held_out_sequences(quickstart, model, tmp_path):
    """plot_per_token_loss.py of the paper's repository takes the only .npz of a model's folder."""
    data = heldout(quickstart)
    results = per_token_loss.evaluate(model, data, tmp_path, ALONE, batch_size=5)
    losses = expected_losses(model, data)
    assert losses.shape == (DOCUMENTS, DOC_LEN)
    (file,) = sorted(tmp_path.glob("*.npz"))
    with np.load(file, allow_pickle=False) as arrays:
        np.testing.assert_allclose(arrays["val/loss_per_token"], losses.mean(0), rtol=1e-5)
        assert arrays["eval_len"] == DOC_LEN and arrays["eval_tokens"] == DOCUMENTS * DOC_LEN
        scalars = {key for key in results if key.startswith("val/")}
        assert len(scalars) == 2 and all(arrays[key] == results[key] for key in scalars)
    assert results == json.loads((tmp_path / "results.json").read_text())
    assert results["eval_tokens"] == DOCUMENTS * DOC_LEN
    assert results[f"val/loss_avg_len_{DOC_LEN}"] == pytest.approx(losses.mean(), rel=1e-6)
    assert results[f"val/perplexity_len_{DOC_LEN}"] == pytest.approx(np.exp(losses.mean()), rel=1e-6)


def test_the_runs_own_validation_is_reproduced_from_its_output_dir(quickstart, tmp_path):
    """train.py's val/loss, on the same tokens at the same length."""
    logged = json.loads((quickstart.run / "metrics/jsonlines/val.jsonl").read_text().splitlines()[-1])
    arguments = ["--model_path", quickstart.run, "--data_path", quickstart.data / "words"]
    arguments += ["--eval_len", TRAIN_LENGTH, "--eval_tokens", 4 * DOC_LEN, "--save_dir", tmp_path]
    done = run_script(SCRIPT, *arguments, "--local_batch_size", 3)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results[f"val/loss_avg_len_{TRAIN_LENGTH}"] == pytest.approx(logged["val/loss"], abs=1e-6)
    assert results["train_tokens"] == logged["step"]


class Stopped(Exception):
    pass


def stopped_after(monkeypatch, batches: int) -> None:
    """The process dies in its n-th forward pass."""
    calls = iter(range(batches))

    def losses(*arguments):
        if next(calls, None) is None:
            raise Stopped
        return token_losses(*arguments)

    token_losses = per_token_loss.token_losses
    monkeypatch.setattr(per_token_loss, "token_losses", losses)


@pytest.mark.slow
def test_a_stopped_evaluation_continues_with_two_processes(quickstart, model, tmp_path, monkeypatch):
    data = heldout(quickstart, length=64)
    straight = per_token_loss.evaluate(model, data, tmp_path / "straight", ALONE, batch_size=8)
    with monkeypatch.context() as patch:
        stopped_after(patch, 17)
        with pytest.raises(Stopped):
            per_token_loss.evaluate(model, data, tmp_path / "hf", ALONE, batch_size=3, save_interval=4)
    with np.load(tmp_path / "hf/state/sums.npz", allow_pickle=False) as state:
        assert len(state["octaves_NO"]) == 16 * 3
    arguments = ["--model_path", quickstart.hf, "--data_path", quickstart.data / "words", "--save_dir", tmp_path]
    arguments += ["--eval_len", 64, "--local_batch_size", 5, "--device", "cpu"]
    done = run_script(SCRIPT, *arguments, "--save_interval", 5, processes=2)
    assert done.returncode == 0, done.stderr
    resumed = json.loads((tmp_path / "hf/results.json").read_text())
    assert resumed["eval_tokens"] == straight["eval_tokens"] == DOCUMENTS * DOC_LEN
    one, two = (np.load(tmp_path / name / "results.npz") for name in ("straight", "hf"))
    np.testing.assert_allclose(one["val/loss_per_token"], two["val/loss_per_token"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(one["val/loss_per_octave"], two["val/loss_per_octave"], rtol=0, atol=1e-5)


def test_the_state_of_another_evaluation_is_refused(quickstart, model, tmp_path):
    data = heldout(quickstart, length=64, tokens=4 * DOC_LEN)
    per_token_loss.evaluate(model, data, tmp_path, ALONE, batch_size=8)
    early = load_model(str(quickstart.run), step=4 * 4 * TRAIN_LENGTH)
    with pytest.raises(EvaluationError, match=r"sums.npz belongs to an evaluation with weights=.*--no-resume"):
        per_token_loss.evaluate(early, data, tmp_path, ALONE)
    results = per_token_loss.evaluate(early, data, tmp_path, ALONE, batch_size=8, resume=False)
    assert results["weights"] == fingerprint(early.model)


def test_more_tokens_than_before_are_added_to_what_is_there(quickstart, model, tmp_path, monkeypatch):
    per_token_loss.evaluate(model, heldout(quickstart, tokens=10 * DOC_LEN), tmp_path, ALONE, batch_size=5)
    stopped_after(monkeypatch, DOCUMENTS - 10)  # any more forward passes are an error
    results = per_token_loss.evaluate(model, heldout(quickstart), tmp_path, ALONE)
    assert results["eval_tokens"] == DOCUMENTS * DOC_LEN
    with pytest.raises(EvaluationError, match=r"already covers 6,144 tokens, more than --eval_tokens=256"):
        per_token_loss.evaluate(model, heldout(quickstart, tokens=DOC_LEN), tmp_path, ALONE)


def test_losses_that_are_not_finite_stop_the_evaluation(quickstart, tmp_path):
    broken = load_model(str(quickstart.hf))
    broken.model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(EvaluationError, match=r"a loss among sequences 0 to 24 is not finite"):
        per_token_loss.evaluate(broken, heldout(quickstart), tmp_path, ALONE)
    assert not (tmp_path / "results.json").exists()


def test_the_number_of_tokens_is_the_papers_unless_told_and_an_impossible_one_names_the_flag(quickstart, tmp_path):
    assert per_token_loss.PAPER_TOKENS == 2**31
    assert heldout(quickstart, at_most=2**31).sequences == DOCUMENTS
    assert heldout(quickstart, at_most=5 * DOC_LEN).sequences == 5 < heldout(quickstart).sequences
    parse = runpy.run_path(str(ROOT / SCRIPT))["token_count"]
    assert (parse("all"), parse("2147483648")) == ("all", 2**31)
    with pytest.raises(argparse.ArgumentTypeError, match="'alll' is not a whole number"):
        parse("alll")
    with pytest.raises(DataError, match=r"--eval_len=60 must divide the documents' length, 256"):
        heldout(quickstart, length=60)
    with pytest.raises(DataError, match=r"--eval_tokens=100 must be between one sequence \(256 tokens\) and all 6,144"):
        heldout(quickstart, tokens=100)
    with pytest.raises(DataError, match=r"no heldout.zarr in .*--data_path"):
        held_out.find_heldout(tmp_path)


@dataclasses.dataclass
class HalfConfig(LongCrawl64Config):
    half: Annotated[int, Field(ge=0, le=1)]


@pytest.fixture
def plug_in(quickstart, tmp_path, monkeypatch) -> Path:
    """A corpus that a plug-in has: the documents of `words` in a folder without arrays."""

    def build(data_dir, config):
        options = {key: value for key, value in vars(config).items() if key not in ("name", "half", "dataset")}
        assert Path(data_dir) / config.dataset == tmp_path / "mine"
        return LongCrawl64DataModule(str(quickstart.data), dataset="words", packed=config.half == 0, **options)

    monkeypatch.setitem(CORPORA._components, "half", Component("half", build, HalfConfig))
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"


def test_a_corpus_of_a_plug_in_has_the_losses_of_its_held_out_sequences(quickstart, model, plug_in, tmp_path):
    corpus = ["half", "half=1"]
    data = held_out.open_data(model, str(plug_in), corpus, length=64, tokens=9 * 64)
    rows = [batch["labels"][0].tolist() for batch in data.source.eval_loader(0, 1)]
    results = per_token_loss.evaluate(model, data, tmp_path / "out", ALONE, batch_size=4)
    assert (results["eval_tokens"], results["corpus"], data.sequences) == (9 * 64, "words", 9)
    labels = torch.tensor(rows[:9])
    inputs = labels.roll(1, 1)
    inputs[:, 0] = 0
    with torch.no_grad():
        expected = model.model(input_ids=inputs, labels=labels).loss.mean().item()
    assert results["val/loss_avg_len_64"] == pytest.approx(expected, rel=1e-5)
    # Of another process, or after a stop: not from the first sequence on, and maybe without work in the last round.
    batches = [*data.read_batches([range(2, 4), range(7, 9), range(9, 9)])]
    assert [batches[n]["labels"].tolist() for n in range(2)] == [rows[2:4], rows[7:9]] and batches[2] is None
    assert held_out.open_data(model, str(plug_in), corpus).length == TRAIN_LENGTH


@pytest.mark.parametrize(
    ("keys", "length", "message"),
    [
        (["halff=1"], 64, r"unknown config key 'datamodule\.halff'.*did you mean 'datamodule\.half'"),
        (["half=1"], 63, r"datamodule\.\w+_batch_len=63 must divide"),
        (["half=0"], 64, r"^--corpus half: its rows hold several texts that are kept apart"),
    ],
)
def test_what_a_corpus_of_a_plug_in_cannot_do_is_one_line(model, plug_in, keys, length, message):
    with pytest.raises(DataError, match=message) as refusal:
        held_out.open_corpus("half", plug_in, keys, model, length=length)
    assert "\n" not in str(refusal.value)


def test_a_corpus_of_another_tokenizer_is_refused(quickstart, model, tmp_path):
    def check(vocab_size: int, bos_token_id: int | None) -> None:
        config = GPT2Config(vocab_size=vocab_size, n_embd=8, n_layer=1, n_head=1, bos_token_id=bos_token_id)
        other = dataclasses.replace(model, model=GPT2LMHeadModel(config), tokenizer=None)
        held_out.check_vocabulary(other, heldout(quickstart))

    for accepted in ((36, 0), (34, None), (34, 50256)):  # padded; unknown; GPT2Config's default
        check(*accepted)
    message = "was made with another tokenizer than .* reads:"
    with pytest.raises(EvaluationError, match=f"{message} its vocabulary has 34 ids, and the model .* with 11"):
        check(11, 0)
    # As many ids, and the same BOS token, and two ids are other tokens.
    shutil.copytree(quickstart.data, tmp_path / "data")
    data, file = held_out.open_heldout(tmp_path / "data/words"), tmp_path / "data/words/tokenizer/tokenizer.json"
    held_out.check_vocabulary(model, data)
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    with pytest.raises(EvaluationError, match=f"{message} id .* is {re.escape(repr(second))} there and"):
        per_token_loss.evaluate(model, data, tmp_path, ALONE)


def test_results_say_how_certain_they_are_and_what_they_were_made_with(quickstart, model, tmp_path):
    data = heldout(quickstart)
    results = per_token_loss.evaluate(model, data, tmp_path, ALONE, batch_size=8)
    losses = expected_losses(model, data)
    error = losses.mean(1).std(ddof=1) / np.sqrt(DOCUMENTS)
    change = losses[:, 64:128].mean(1) - losses[:, 32:64].mean(1)
    slope = next(entry for entry in results["slope"] if entry["position"] == 64)
    assert slope["per_doubling"] == pytest.approx(change.mean(), rel=1e-4)
    assert slope["standard_error"] == pytest.approx(change.std(ddof=1) / np.sqrt(DOCUMENTS), rel=1e-4)
    found = read_evaluation(tmp_path)
    loss, perplexity = (found.find("loss", metric, context=DOC_LEN) for metric in ("loss_avg", "perplexity"))
    assert loss.standard_error == pytest.approx(error, rel=1e-4) and loss.samples == DOCUMENTS
    assert perplexity.standard_error == pytest.approx(perplexity.value * error, rel=1e-4)
    assert found.settings["corpus"] == "words" and found.about["seed"] == model.seed is not None
    table = (tmp_path / "table.md").read_text()
    assert "loss_avg" in table and "perplexity" in table and "change_per_doubling" in table
    assert f"after {model.train_tokens:,} training tokens" in position_loss.made_with([results])


def test_an_export_knows_its_training_until_its_weights_change(quickstart, tmp_path):
    run, exported = load_model(str(quickstart.run)), load_model(str(quickstart.hf))
    assert (exported.train_tokens, exported.seed) == (run.train_tokens, run.seed) != (None, None)
    shutil.copytree(quickstart.hf, tmp_path / "tuned")
    next(exported.model.parameters()).data += 1e-3
    exported.model.save_pretrained(tmp_path / "tuned")
    tuned = load_model(str(tmp_path / "tuned"))
    assert (tuned.train_tokens, tuned.seed) == (None, None)
