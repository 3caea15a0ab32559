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
from forgetting_transformer.training.start.initial_weights import _downloaded


@pytest.fixture
def hub_at(monkeypatch):
    """The process of a user who set nothing. Returns how to set the hub's address."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_connection.urllib.request, "getproxies", dict)
    monkeypatch.setattr(hub_connection, "_answered", set())
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


def test_a_data_set_in_a_folder_needs_no_hub(hub_at, closed_port, monkeypatch, caplog, tmp_path):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    hub_at(f"http://127.0.0.1:{closed_port}")
    (tmp_path / "texts.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n', encoding="utf-8")
    settings = CorpusSettings(dataset=str(tmp_path), tokenizer="train:512")
    assert list(_dataset_rows(settings)) == ["one", "two"]
    assert not caplog.records


def test_a_model_that_is_not_in_the_cache_is_one_line(hub_at, closed_port, asked_once, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    hub_at(f"http://127.0.0.1:{closed_port}")
    advice = "cannot load the model somebody/none: somebody/none is not in the local cache. It must be a folder or"
    with pytest.raises(EvaluationError, match=advice):
        _load_pretrained("somebody/none", None)
    with pytest.raises(ValueError, match=r"cannot be had \(somebody/none is not in the local cache\)"):
        _downloaded("somebody/none")


def test_a_hub_that_answers_is_asked_and_believed(hub_at, caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        hub_at(f"http://127.0.0.1:{server.getsockname()[1]}")
        assert not only_cached()
    assert not only_cached() and not caplog.records, "the server is gone, but it has answered once"


def test_a_name_that_is_not_resolved_in_time_is_not_waited_for(hub_at, monkeypatch, caplog):
    release = hub_connection.threading.Event()
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: release.wait() and socket.socket())
    monkeypatch.setattr(hub_connection, "TIMEOUT", 0.1)
    hub_at("https://somewhere.test")
    assert only_cached() and "somewhere.test cannot be reached (no answer in 0.1 s)" in caplog.text
    release.set()


@pytest.mark.parametrize("port, address", [(443, "https://h.test"), (80, "http://h.test"), (81, "http://h.test:81/x")])
def test_the_port_is_that_of_the_address(port, address, hub_at, monkeypatch):
    asked: list = []
    monkeypatch.setattr(hub_connection, "_why_unreachable", lambda *a: asked.append(a))
    hub_at(address)
    assert not only_cached() and asked == [("h.test", port)]


@pytest.mark.parametrize("what", ["http", "all"])
def test_what_a_proxy_reaches_is_for_the_client_to_find_out(what, hub_at, closed_port, monkeypatch):
    monkeypatch.setattr(hub_connection.urllib.request, "getproxies", lambda: {what: "http://proxy:3128"})
    hub_at(f"http://127.0.0.1:{closed_port}")
    assert not only_cached()


def test_who_is_offline_on_purpose_is_not_warned(hub_at, closed_port, monkeypatch, caplog):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for address in (f"http://127.0.0.1:{closed_port}", "no address, which nobody asks"):
        hub_at(address)
        assert not only_cached() and not caplog.records


def test_a_folder_needs_no_hub(hub_at, closed_port, tmp_path, caplog):
    hub_at(f"http://127.0.0.1:{closed_port}")
    with pytest.raises((OSError, ValueError)):
        load_tokenizer(tmp_path)
    assert not [record for record in caplog.records if record.name == hub_connection.__name__]


@pytest.mark.parametrize("address", ["huggingface.co", "localhost:8080", "", "ftp://x", "https://"])
def test_an_address_that_is_none_names_its_variable(address, hub_at):
    hub_at(address)
    with pytest.raises(ValueError, match=f"HF_ENDPOINT={address} is no address: give https://HOST, or unset it"):
        only_cached()


def test_a_model_of_a_wrong_address_is_no_reason_to_download_it(hub_at):
    hub_at("huggingface.co")
    with pytest.raises(EvaluationError) as error:
        _load_pretrained("somebody/some", None)
    wrong = "HF_ENDPOINT=huggingface.co is no address: give https://HOST, or unset it"
    assert str(error.value) == f"cannot load the model somebody/some: {wrong}"


def test_a_name_that_no_host_can_have_is_not_reached(hub_at, caplog):
    hub_at("https://.foo.test")
    assert only_cached() and ".foo.test cannot be reached" in caplog.text
