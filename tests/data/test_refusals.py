"""Damaged or hostile files of a corpus are refused in one line; nothing about them waits for ever."""

import json
import logging

import httpx
import pytest

from forgetting_transformer.data import DataError, LongCrawl64DataModule, TokenArray, remote
from forgetting_transformer.data.remote import RemoteError, RemoteFolder, TryAgain, open_remote
from forgetting_transformer.data.tools.verify import verify
from tests.data.mirror import DOC_LEN, write_layout


@pytest.fixture
def array(tmp_path):
    folder = tmp_path / "corpus/train.zarr"
    write_layout(folder)
    return folder


def one_line(error: pytest.ExceptionInfo, *parts: str) -> None:
    said = str(error.value)
    assert "\n" not in said and all(part in said for part in parts), said


def restate(folder, **changes) -> None:
    metadata = json.loads((folder / ".zarray").read_text())
    (folder / ".zarray").write_text(json.dumps(metadata | changes))


@pytest.mark.parametrize("missing_chunks", ["error", "skip"])
@pytest.mark.parametrize("shape", [[10**18, DOC_LEN], [44, 10**18], [44, 0]])
def test_a_shape_of_more_than_any_corpus_is_damage(array, shape, missing_chunks):
    """Files, divisors of a length: each was gone through one by one."""
    restate(array, shape=shape)
    with pytest.raises(DataError) as error:
        TokenArray(array, 60_000, missing_chunks)
    one_line(error, "train.zarr states shape", f"{shape[1]}")
    assert verify(array, vocab_size=60_000).problems


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[]", r"it holds \[\], not an object"),
        ("null", "it holds None"),
        ("[" * 100_000, "line 1: not valid JSON"),
        ('{"vocab_size": "64"}', "vocab_size='64' must be a whole number from 1"),
        ('{"vocab_size": 0}', "vocab_size=0 must be"),
        ('{"bos_token_id": null}', "bos_token_id=None must be"),
        ('{"eos_token_id": -1}', "eos_token_id=-1 must be"),
        ('{"doc_len": 0}', "doc_len=0 must be"),
        ('{"unigram_entropy_nats": "much"}', "unigram_entropy_nats='much' must be"),
        ('{"arrays": []}', r"arrays=\[\] must be"),
        ('{"arrays": {"train": 5}}', "arrays="),
        ('{"arrays": {"train": {"content_hash": 5}}}', "arrays.train.content_hash=5 must be text"),
    ],
)
def test_a_damaged_manifest_is_refused_by_what_is_wrong(array, text, named):
    (array.parent / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=f"manifest.json.*{named}") as error:
        LongCrawl64DataModule(
            str(array.parent.parent), dataset="corpus",
            train_batch_len=48, train_batch_size=4, eval_batch_len=48, eval_local_batch_size=2,
        )  # fmt: skip
    one_line(error)


class Busy(RemoteFolder):
    """A server that is never ready, and asks for `after` seconds of peace."""

    def __init__(self, after: float | None) -> None:
        super().__init__("https://example.org/corpus")
        self.after = after

    def _read(self, name: str, at_most: int) -> bytes | None:
        raise TryAgain("the server answered 429", self.after)


@pytest.mark.parametrize(("after", "waits"), [(999_999.0, [330.0] * 3), (None, 5)])
def test_every_wait_for_a_server_is_a_line_and_there_is_an_end(monkeypatch, caplog, after, waits):
    slept: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", slept.append)
    with caplog.at_level(logging.WARNING), pytest.raises(RemoteError) as error:
        Busy(after).read("train.zarr/0.0", 10)
    one_line(error, "https://example.org/corpus/train.zarr/0.0", "the server answered 429", "attempts")
    assert (slept if after else len(slept)) == waits
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(slept)
    assert all("https://example.org/corpus/train.zarr/0.0: the server answered 429; attempt" in line for line in lines)
    assert not after or "in 330 s (the server asks for 999999 s)" in lines[0]


def test_a_redirect_in_circles_is_one_line(monkeypatch):
    folder = open_remote("https://example.org/corpus")
    circle = httpx.MockTransport(lambda request: httpx.Response(302, headers={"location": str(request.url)}))
    monkeypatch.setattr(folder, "_connect", lambda: httpx.Client(transport=circle, follow_redirects=True))
    with pytest.raises(RemoteError) as error:
        folder.read("train.zarr/0.0", 10)
    one_line(error, "https://example.org/corpus/train.zarr/0.0", "redirects", "Check the URL")
