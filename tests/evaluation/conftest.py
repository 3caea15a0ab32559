"""A small quickstart: a corpus of words with its tokenizer, a run trained on it for a few steps, and its export."""

import functools
import random
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import zarr
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerFast

from forgetting_transformer import training
from forgetting_transformer.evaluation.models import EvaluatedModel, load_model
from forgetting_transformer.evaluation.workers import Workers
from forgetting_transformer.training.export import export
from tests.training.conftest import STEP, changed, tiny_config, train

_WORDS = "the a cat dog sat ran on under mat house red small and then . , answer question : what is best thing to do in"
WORDS = f"{_WORDS} city eat sandwich park sunny day".split()
VOCABULARY = ["<eos>", "<unk>", *WORDS]
DOC_LEN, DOCUMENTS, TRAIN_LENGTH = 256, 24, 32
ALONE = Workers(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class Quickstart:
    """Folders: `data` holds words/{train,heldout}.zarr, `run` is a run's output_dir, `hf` its export."""

    data: Path
    run: Path
    hf: Path


def sentences(seed: int, words: int) -> str:
    chooser = random.Random(seed)
    return " ".join(chooser.choice(WORDS) for _ in range(words))


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<eos>", eos_token="<eos>", unk_token="<unk>")


@pytest.fixture(scope="session")
def quickstart(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Quickstart:
    return _quickstart(tmp_path_factory.getbasetemp() / "quickstart", request.config.getoption("--fast"))


@pytest.fixture(scope="session")
def model(quickstart: Quickstart) -> EvaluatedModel:
    """The export."""
    return load_model(str(quickstart.hf))


@functools.cache  # a module that imports the fixture has one of its own
def _quickstart(folder: Path, in_this_process: bool) -> Quickstart:
    corpus = folder / "data" / "words"
    tokenizer = _tokenizer()
    for split, seed in (("train", 0), ("heldout", 1000)):
        tokens = np.array(
            [tokenizer(sentences(seed + n, DOC_LEN)).input_ids for n in range(DOCUMENTS)], dtype=np.uint16
        )
        zarr.create_array(corpus / f"{split}.zarr", shape=tokens.shape, dtype="uint16", chunks=(8, 64))[:] = tokens
    tokenizer.save_pretrained(corpus / "tokenizer")
    (corpus / "manifest.json").write_text(
        f'{{"format_version": 1, "vocab_size": {len(VOCABULARY)}, "bos_token_id": 0, "eos_token_id": 0}}'
    )
    config = changed(
        tiny_config(folder / "run", folder / "data"),
        train_eval_interval=4 * STEP,
        eval_interval=8 * STEP,
        checkpoint_keep_interval=4 * STEP,
        train={"max_tokens": 8 * STEP, "grad_acc_tokens": STEP},
        schedule={"name": "warmup_cosine", "warmup_tokens": 2 * STEP, "total_tokens": 8 * STEP},
        datamodule__dataset="words",
        datamodule__eval_tokens=4 * DOC_LEN,
        datamodule__vocab_size=None,  # both are in the manifest
        datamodule__bos_token_id=None,
        model__config__log_pruning_tolerance=-10.0,
    )
    assert config["datamodule"]["train_batch_len"] == TRAIN_LENGTH
    if in_this_process:
        training.run(training.parse(OmegaConf.create(config)))
    else:
        train(config)
    export(folder / "run", folder / "hf")
    return Quickstart(folder / "data", folder / "run", folder / "hf")


class Endpoint:
    """An endpoint that answers from a list of (status, content); notes what it was asked: address, key and body."""

    url = "http://judge.test/v1"

    def __init__(self) -> None:
        self.requests: list[tuple[str, str | None, dict]] = []
        self.replies: list[tuple[int, str]] = []

    def post(self, url: str, json: dict, headers: dict, timeout: float) -> httpx.Response:
        if not url.startswith(self.url):
            raise httpx.ConnectError("nobody listens")
        self.requests.append((url, headers.get("Authorization"), json))
        status, content = self.replies.pop(0) if self.replies else (200, "Fine. [[7]]")
        message = {"choices": [{"message": {"content": content}}]}
        return httpx.Response(status, json=message, request=httpx.Request("POST", url))


@pytest.fixture
def endpoint(monkeypatch):
    found = Endpoint()
    monkeypatch.setattr(httpx, "post", found.post)
    return found
