"""A hub that does not answer: found out at once, with one line, and without asking again."""

import socket

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http

from forgetting_transformer import hub_connection
from forgetting_transformer.model_tokenizer import load_tokenizer


@pytest.fixture
def online(monkeypatch):
    """A process that has not asked yet, of a user who set nothing. Returns how to set the hub's address."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_connection.urllib.request, "getproxies", dict)
    hub_connection.offline_if_unreachable.cache_clear()
    yield lambda address: monkeypatch.setattr(constants, "ENDPOINT", address)
    hub_connection.offline_if_unreachable.cache_clear()


@pytest.fixture
def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


def test_a_hub_that_does_not_answer_is_not_asked_for_files(online, closed_port, monkeypatch, caplog):
    def again(seconds):
        raise AssertionError("the client waits and asks again")

    monkeypatch.setattr(_http.time, "sleep", again)
    online(f"http://127.0.0.1:{closed_port}")
    for _ in range(2):
        with pytest.raises((OSError, ValueError)):
            load_tokenizer("somebody/who-has-no-such-tokenizer")
    assert constants.HF_HUB_OFFLINE
    (said,) = [record.message for record in caplog.records if record.name == hub_connection.__name__]
    assert said.startswith(f"127.0.0.1:{closed_port} cannot be reached (") and "in the local cache" in said


def test_a_hub_that_answers_is_asked(online, caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        online(f"http://127.0.0.1:{server.getsockname()[1]}")
        hub_connection.offline_if_unreachable()
    assert not constants.HF_HUB_OFFLINE and not caplog.records


@pytest.mark.parametrize("what", ["http", "all"])
def test_what_a_proxy_reaches_is_for_the_client_to_find_out(what, online, closed_port, monkeypatch):
    monkeypatch.setattr(hub_connection.urllib.request, "getproxies", lambda: {what: "http://proxy:3128"})
    online(f"http://127.0.0.1:{closed_port}")
    hub_connection.offline_if_unreachable()
    assert not constants.HF_HUB_OFFLINE


def test_a_folder_needs_no_hub(online, closed_port, tmp_path, caplog):
    online(f"http://127.0.0.1:{closed_port}")
    with pytest.raises((OSError, ValueError)):
        load_tokenizer(tmp_path)
    assert not constants.HF_HUB_OFFLINE and not caplog.records
