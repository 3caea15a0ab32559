"""Arrays elsewhere: the same tokens as from a local copy, fetched once, kept within a limit."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import pytest

from forgetting_transformer.data import DataError, LongCrawl64DataModule
from forgetting_transformer.data.storage import remote
from forgetting_transformer.data.storage.remote import RemoteFolder
from forgetting_transformer.data.storage.remote_cache import CacheSettings, Folder
from tests.data import corpus_helpers
from tests.data.corpus_helpers import labels, package_tree, prepare
from tests.data.mirror import REPOSITORY, REVISION, serve, write_layout

HOLES = ("1.0", "3.3")


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    from huggingface_hub import constants

    write_layout(tmp_path / "mirror/longcrawl64/train.zarr")
    write_layout(tmp_path / "mirror/longcrawl64/heldout.zarr")
    write_layout(tmp_path / "mirror/sparse/train.zarr", HOLES)
    with serve(tmp_path / "mirror") as mirror:
        monkeypatch.setattr(constants, "ENDPOINT", mirror.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("forgetting_transformer.data.storage.remote.FIRST_WAIT", 0.01)
        yield mirror


@pytest.fixture(params=["http", "hub", "memory"])
def data_dir(request, mirror):
    if request.param == "http":
        yield mirror.url
    elif request.param == "hub":
        yield f"hf://datasets/{REPOSITORY}@{REVISION}"
    else:
        memory = fsspec.filesystem("memory")
        memory.put(str(mirror.root), "/bucket", recursive=True)
        yield "memory://bucket"
        memory.rm("/bucket", recursive=True)


def module(data_dir, cache, **changes) -> LongCrawl64DataModule:
    return corpus_helpers.module(data_dir, cache_dir=str(cache), **changes)


def test_the_same_tokens_and_the_same_fingerprint_as_from_a_local_copy(data_dir, mirror, tmp_path):
    local, remote = module(mirror.root, tmp_path / "unused"), module(data_dir, tmp_path / "cache")
    assert remote.train_info().fingerprint == local.train_info().fingerprint
    assert remote.train_info().path.startswith(data_dir)
    np.testing.assert_array_equal(labels(remote, 0, 22), labels(local, 0, 22))
    assert sum(batch["weight"].sum() for batch in remote.eval_loader(0, 1)) == 88
    sparse = module(data_dir, tmp_path / "cache", dataset="sparse")
    with pytest.raises(DataError, match=r"missing chunk .*sparse/train\.zarr/1\.0"):
        sparse.train_info()
    skipping = module(data_dir, tmp_path / "cache", dataset="sparse", missing_chunks="skip")
    if data_dir == mirror.url:
        with pytest.raises(DataError, match=r"cannot be listed, .*missing_chunks=error"):
            skipping.train_info()
        return
    local = module(mirror.root, tmp_path / "unused", dataset="sparse", missing_chunks="skip")
    assert skipping.train_info().fingerprint == local.train_info().fingerprint
    np.testing.assert_array_equal(labels(skipping, 0, 7), labels(local, 0, 7))
    assert not (tmp_path / "unused").exists()


#: Files of other people in a folder that was given as datamodule.cache_dir. Some have names like the cache's own.
OTHERS = ("thesis/chapter1.tex", "0.0", "c/0/1", "0123456789abcdef/0.0", "remote_files/mine/0.0", ".locks/3")


def test_the_cache_stays_within_its_limit_and_files_of_others_neither_count_nor_go(mirror, tmp_path):
    size = max(f.stat().st_size for f in (mirror.root / "longcrawl64/train.zarr").iterdir())
    settings = CacheSettings(tmp_path / "cache", 3 * size)
    others = [settings.folder / name for name in OTHERS]
    for file in others:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"years of work" * 1000)
        os.utime(file, (0, 0))
    cache = Folder(f"{mirror.url}/longcrawl64/train.zarr", settings)
    for number, key in enumerate(("0.0", "0.1", "0.2"), start=1):
        os.utime(cache.fetch(key), (number, number))
    cache.fetch("0.0")  # used again, so 0.1 is now the oldest
    left_by_a_kill = cache.folder / ".0.7.123-456"
    left_by_a_kill.write_bytes(b"half")
    os.utime(left_by_a_kill, (0, 0))
    cache.fetch("0.3")
    assert sorted(os.listdir(cache.folder)) == ["0.0", "0.2", "0.3"]
    assert all(file.read_bytes() == b"years of work" * 1000 for file in others)


@pytest.mark.slow
def test_each_chunk_that_is_needed_is_fetched_once_by_all_ranks_and_threads(mirror, tmp_path, monkeypatch):
    monkeypatch.setattr("forgetting_transformer.data.token_array.SAMPLED_TOKENS", 24)  # of rows looked at on opening
    mirror.faults = {"longcrawl64/train.zarr/0.0": ["slow"]}
    for rank in range(2):
        labels(module(mirror.url, tmp_path / "cache", train_batch_len=24, train_num_workers=1), 0, 11, rank, 2)
    chunks = {name.rpartition("/")[2]: n for name, n in mirror.fetched().items() if "train.zarr/" in name}
    assert {name: n for name, n in chunks.items() if name[0].isdigit()} == {f"{row}.0": 1 for row in range(6)}
    cache = Folder(f"{mirror.url}/longcrawl64/heldout.zarr", CacheSettings(tmp_path / "cache"))
    with ThreadPoolExecutor(6) as pool:
        assert len({str(path) for path in pool.map(lambda _: cache.fetch("0.0"), range(6))}) == 1
    assert mirror.requests["GET", "longcrawl64/heldout.zarr/0.0"] == 1


def test_a_cache_too_small_is_known_before_anything_is_read(mirror, tmp_path):
    for asked in ("train", "eval"):
        with pytest.raises(DataError, match=r"cache_gb=1e-06 is less than .* needs of .*\.zarr; raise it"):
            getattr(module(mirror.url, tmp_path / "cache", cache_gb=1e-6), f"{asked}_info")()
        getattr(module(mirror.url, tmp_path / "cache"), f"{asked}_info")()


def test_a_server_that_goes_silent_is_given_up_and_asked_again(mirror, monkeypatch):
    monkeypatch.setattr("forgetting_transformer.data.storage.remote.SILENCE_SECONDS", 1.0)
    mirror.faults = {"longcrawl64/train.zarr/0.0": ["silent"]}
    remote = RemoteFolder(mirror.url)
    expected = (mirror.root / "longcrawl64/train.zarr/0.0").read_bytes()
    assert remote.read("longcrawl64/train.zarr/0.0") == expected
    # The second answer may come too late as well, on a busy machine.
    assert mirror.requests["GET", "longcrawl64/train.zarr/0.0"] >= 2


@pytest.mark.parametrize(
    ("headers", "waits"),
    [
        ({"Retry-After": "999999"}, [330.0] * 3),  # no longer than a limit, and not for ever
        ({"RateLimit": '"resolvers";r=0;t=42'}, [42.0] * 5),
        ({"Retry-After": "soon"}, None),
    ],
)
def test_a_busy_server_is_heeded_in_a_line_each_time_and_there_is_an_end(mirror, monkeypatch, caplog, headers, waits):
    slept: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", slept.append)
    mirror.faults, mirror.headers = {"0.0": [429] * 9}, headers
    with caplog.at_level(logging.WARNING), pytest.raises(DataError, match=r"/0\.0: the server answered 429 \(\d att"):
        RemoteFolder(mirror.url).read("0.0")
    assert slept == waits if waits else len(slept) == 5
    lines = [line for line in caplog.messages if "/0.0: the server answered 429; attempt" in line]
    assert len(lines) == len(slept)


@pytest.mark.parametrize(
    ("fault", "said"), [("circle", "TooManyRedirects.* Check the URL"), (403, "403. Check the URL")]
)
def test_what_will_not_pass_is_not_asked_again(mirror, fault, said):
    mirror.faults = {"0.0": [fault] * 99}
    with pytest.raises(DataError, match=said) as error:
        RemoteFolder(mirror.url).read("0.0")
    assert "\n" not in str(error.value) and mirror.requests["GET", "0.0"] <= 11


def test_names_cannot_lead_out_of_the_cache(mirror, tmp_path):
    cache = Folder(mirror.url, CacheSettings(tmp_path / "cache", 10**9))
    for name in ("../escaped", "/etc/escaped", "train.zarr/../../../escaped"):
        for read in (cache.fetch, RemoteFolder(mirror.url).read):
            with pytest.raises(DataError, match="does not lie inside"):
                read(name)


@pytest.mark.slow
def test_a_prepared_corpus_comes_with_its_manifest_and_tokenizer(mirror, tmp_path):
    prepare(mirror.root / "bytes", package_tree(tmp_path / "in"))
    for data_dir in (mirror.url, f"hf://datasets/{REPOSITORY}@{REVISION}"):
        changes = {"dataset": "bytes", "train_batch_len": 64, "eval_batch_len": 64}
        changes |= {"vocab_size": None, "bos_token_id": None}
        remote = module(data_dir, tmp_path / "cache", **changes)
        local = module(mirror.root, tmp_path / "unused", **changes)
        assert (remote.vocabulary.size, remote.vocabulary.bos_token_id) == (257, 256)
        assert remote.train_info().fingerprint == local.train_info().fingerprint
        names = {file.name for file in (mirror.root / "bytes/tokenizer").iterdir()}
        assert {file.name for file in (remote.folder / "tokenizer").iterdir()} == names


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("hf://someone/longcrawl64", "not of the form hf://datasets/OWNER/NAME"),
        ("nonsense://bucket", "cannot be read: .*known are hf://, https://, s3://"),
    ],
)
def test_urls_that_cannot_be_read_say_what_is_missing(url, message):
    with pytest.raises(DataError, match=message):
        RemoteFolder(url)
