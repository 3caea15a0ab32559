"""A hub that does not answer: found out at once, with one line, and without asking again."""

import socket

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http

from forgetting_transformer import hub_connection
from forgetting_transformer.data import DataError
from forgetting_transformer.data.prepare import CorpusSettings
from forgetting_transformer.data.prepare.sources import _dataset_rows
from forgetting_transformer.evaluation.models import EvaluationError, _load_pretrained
from forgetting_transformer.hub_connection import only_cached
from forgetting_transformer.model_tokenizer import load_tokenizer
from tests.waiting import HANG


@pytest.fixture
def hub_at(monkeypatch):
    """The process of a user who set nothing. Returns how to set the hub's address."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_connection, "TIMEOUT", HANG)
    monkeypatch.setattr(hub_connection.urllib.request, "getproxies", dict)
    hub_connection._answers.cache_clear()
    return lambda address: monkeypatch.setattr(constants, "ENDPOINT", address)


@pytest.fixture
def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


@pytest.fixture
def asked_once(monkeypatch):
    """A client that fails where it would wait to ask again."""

    def again(seconds):
        raise AssertionError("the client waits and asks again")

    monkeypatch.setattr(_http.time, "sleep", again)


def test_a_hub_that_does_not_answer_is_not_asked_for_files(hub_at, closed_port, asked_once, caplog):
    hub_at(f"http://127.0.0.1:{closed_port}")
    with pytest.raises((OSError, ValueError), match="connect"):
        load_tokenizer("somebody/who-has-no-such-tokenizer")
    (said,) = [record.message for record in caplog.records if record.name == hub_connection.__name__]
    assert said.startswith(f"127.0.0.1:{closed_port} cannot be reached (") and "in the local cache" in said
    assert not constants.HF_HUB_OFFLINE, "the user did not set it"


def test_data_sets_are_looked_for_in_the_cache_alone(hub_at, closed_port, asked_once, monkeypatch, caplog, tmp_path):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    hub_at(f"http://127.0.0.1:{closed_port}")
    settings = CorpusSettings(dataset="somebody/none", tokenizer="train:512")
    with pytest.raises(DataError, match=r"somebody/none, split train: ConnectionError: Couldn't reach"):
        list(_dataset_rows(settings))
    assert [record.message for record in caplog.records if "cannot be reached" in record.message]
    assert not constants.HF_HUB_OFFLINE, "only the datasets library is told"


def test_a_model_that_is_not_in_the_cache_is_one_line(hub_at, closed_port, asked_once, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    hub_at(f"http://127.0.0.1:{closed_port}")
    advice = "cannot load the model somebody/none: .* run `hf download somebody/none .*It must be a run"
    with pytest.raises(EvaluationError, match=advice):
        _load_pretrained("somebody/none", None)


def test_a_hub_that_answers_is_asked_and_believed(hub_at, caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        hub_at(f"http://127.0.0.1:{server.getsockname()[1]}")
        assert not only_cached()
    assert not only_cached() and not caplog.records, "the server is gone, but it has answered once"


def test_who_is_offline_on_purpose_or_has_a_proxy_is_not_warned(hub_at, closed_port, monkeypatch, caplog):
    hub_at(f"http://127.0.0.1:{closed_port}")
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        assert not only_cached() and not caplog.records
    monkeypatch.setattr(hub_connection.urllib.request, "getproxies", lambda: {"http": "http://proxy:3128"})
    assert not only_cached() and not caplog.records
