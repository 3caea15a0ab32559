"""A hub that does not answer: found out at once, with one line, and without asking again."""

import socket

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http

from forgetting_transformer.data.model_tokenizer import load_tokenizer
from forgetting_transformer.data.storage import hub
from forgetting_transformer.data.storage.hub import only_cached
from tests.waiting import HANG


@pytest.fixture
def hub_at(monkeypatch):
    """The process of a user who set nothing. Returns how to set the hub's address."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "TIMEOUT", HANG)
    monkeypatch.setattr(hub.urllib.request, "getproxies", dict)
    hub._answers.cache_clear()
    return lambda address: monkeypatch.setattr(constants, "ENDPOINT", address)


@pytest.fixture
def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


def test_a_hub_that_does_not_answer_is_not_asked_for_files(hub_at, closed_port, monkeypatch, caplog):
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: pytest.fail("the client waits and asks again"))
    hub_at(f"http://127.0.0.1:{closed_port}")
    with pytest.raises((OSError, ValueError), match="connect"):
        load_tokenizer("somebody/who-has-no-such-tokenizer")
    (said,) = [record.message for record in caplog.records if record.name == hub.__name__]
    assert said.startswith(f"127.0.0.1:{closed_port} cannot be reached (") and "in the local cache" in said
    assert not constants.HF_HUB_OFFLINE, "the user did not set it"


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
    monkeypatch.setattr(hub.urllib.request, "getproxies", lambda: {"http": "http://proxy:3128"})
    assert not only_cached() and not caplog.records
