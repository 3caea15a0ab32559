"""Every chunk that is read is held to the list of checksums beside its array."""

import hashlib
import importlib.util
import logging
import shutil
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr

from forgetting_transformer.data import DataError, LongCrawl64DataModule, TokenArray
from forgetting_transformer.data.remote_cache import CacheSettings
from tests.data.corpus_helpers import package_tree, prepare, rows
from tests.data.mirror import CHUNK, DOC_LEN, serve, tokens_of_corpus, write_layout

SCRIPT = Path(__file__).parents[2] / "scripts" / "verify_data.py"
VOCAB = 50_257


@pytest.fixture(scope="module")
def verify():
    spec = importlib.util.spec_from_file_location("verify_data", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return lambda *arguments: script.main([str(a) for a in (*arguments, "--vocab_size", VOCAB)])


def write(kind: str, path: Path, tokens: np.ndarray | None = None) -> None:
    tokens = tokens_of_corpus() if tokens is None else tokens
    options = {
        "v2": {"chunks": CHUNK, "zarr_format": 2, "compressors": numcodecs.Blosc(cname="lz4")},
        "v3": {"chunks": CHUNK, "zarr_format": 3},
        "sharded": {"chunks": (4, 12), "shards": (8, 24), "zarr_format": 3},
    }[kind]
    with zarr.config.set({"array.write_empty_chunks": True}):
        zarr.create_array(path, data=tokens, overwrite=True, **options)


@pytest.fixture(params=["v2", "v3", "sharded"])
def corpus(request, tmp_path, verify):
    """A corpus with a list, and what a chunk's file is called."""
    for name in ("train", "heldout"):
        write(request.param, tmp_path / f"corpus/{name}.zarr")
    assert verify(tmp_path / "corpus") == 0
    return tmp_path / "corpus", (lambda key: key if request.param == "v2" else f"c/{key.replace('.', '/')}")


def other_tokens(path: Path) -> None:
    """Chunks of another corpus, in files that are as whole as those they replace."""
    with zarr.config.set({"array.write_empty_chunks": True}):
        zarr.open_array(path, mode="r+")[8:16, 24:48] = 77


@pytest.mark.slow
def test_contents_that_changed_are_refused_by_name(corpus):
    folder, key = corpus
    TokenArray(folder / "train.zarr", VOCAB).read(8, 16, 24, 48)
    other_tokens(folder / "train.zarr")
    with pytest.raises(DataError, match=rf"train\.zarr/{key('1.1')} is not the file that train\.sha256 lists"):
        TokenArray(folder / "train.zarr", VOCAB).read(8, 16, 24, 48)


def test_one_flipped_bit_is_refused_although_it_decodes(tmp_path, verify):
    tokens = tokens_of_corpus()
    zarr.create_array(tmp_path / "train.zarr", data=tokens, chunks=CHUNK, zarr_format=2, compressors=None)
    assert verify(tmp_path / "train.zarr") == 0
    array = TokenArray(tmp_path / "train.zarr", VOCAB)
    file = tmp_path / "train.zarr/2.1"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"2\.1 is not the file that train\.sha256 lists"):
        array.read(16, 24, 24, 48)


@pytest.mark.slow
def test_in_the_cache_of_a_remote_corpus_a_changed_file_is_fetched_again(corpus, tmp_path, monkeypatch):
    folder, key = corpus
    monkeypatch.setattr("forgetting_transformer.data.remote.FIRST_WAIT", 0.01)
    with serve(folder) as mirror:
        array = TokenArray(f"{mirror.url}/train.zarr", VOCAB, cache=CacheSettings(tmp_path / "cache", 10**9))
        array.read(8, 16, 24, 48)
        cached = array.files.folder / key("1.1")
        good = cached.read_bytes()
        shutil.copyfile(array.files.folder / key("0.0"), cached)  # whole, and of other documents
        again = TokenArray(f"{mirror.url}/train.zarr", VOCAB, cache=CacheSettings(tmp_path / "cache", 10**9))
        np.testing.assert_array_equal(again.read(8, 16, 24, 48), tokens_of_corpus()[8:16, 24:48])
        assert cached.read_bytes() == good
        other_tokens(folder / "train.zarr")
        cached.unlink()
        with pytest.raises(DataError, match=r"is not the file that train\.sha256 lists"):
            TokenArray(f"{mirror.url}/train.zarr", VOCAB, cache=CacheSettings(tmp_path / "cache", 10**9)).read(
                8, 16, 24, 48
            )


def test_a_file_that_is_not_listed_is_read_with_one_warning(corpus, caplog):
    folder, key = corpus
    sums = folder / "train.sha256"
    sums.write_text("".join(line for line in sums.read_text().splitlines(True) if key("1.") not in line))
    array = TokenArray(folder / "train.zarr", VOCAB)
    np.testing.assert_array_equal(array.read(8, 16, 0, DOC_LEN), tokens_of_corpus()[8:16])
    assert len([r for r in caplog.records if r.levelno == logging.WARNING and "not listed in" in r.message]) == 1


@pytest.mark.parametrize("line", ["nonsense", "0123  train.zarr/0.0", "g" * 64 + "  train.zarr/0.0", "\x00" * 80])
def test_a_damaged_list_is_named_with_the_fix(corpus, line):
    folder, _ = corpus
    sums = folder / "train.sha256"
    sums.write_text(f"{line}\n" + sums.read_text())
    with pytest.raises(DataError, match=r"train\.sha256, line 1, is not of the form .*verify_data\.py"):
        TokenArray(folder / "train.zarr", VOCAB)


@pytest.mark.slow
def test_what_identifies_a_list_is_its_contents_and_not_their_order(corpus):
    folder, _ = corpus
    before = TokenArray(folder / "train.zarr", VOCAB).checksums
    sums = folder / "train.sha256"
    sums.write_text("".join(reversed(sums.read_text().splitlines(True))))
    assert TokenArray(folder / "train.zarr", VOCAB).checksums == before and len(before) == 16
    sums.unlink()
    assert TokenArray(folder / "train.zarr", VOCAB).checksums is None


def test_a_list_does_not_change_the_fingerprint(tmp_path, verify):
    write_layout(tmp_path / "longcrawl64/train.zarr")
    before = TokenArray(tmp_path / "longcrawl64/train.zarr", VOCAB).fingerprint
    assert verify(tmp_path / "longcrawl64") == 0 and (tmp_path / "longcrawl64/train.sha256").is_file()
    assert TokenArray(tmp_path / "longcrawl64/train.zarr", VOCAB).fingerprint == before == "cb75879b89f03aa7"


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_prepared_corpus_comes_with_its_list(tmp_path, zarr_format):
    prepare(tmp_path / "out", package_tree(tmp_path / "in"), zarr_format=zarr_format)
    for name in ("train", "heldout"):
        listed = (tmp_path / f"out/{name}.sha256").read_text().splitlines()
        files = [f for f in (tmp_path / f"out/{name}.zarr").rglob("*") if f.is_file() and f.name[-1].isdigit()]
        assert {line.split("  ")[1] for line in listed} == {str(f.relative_to(tmp_path / "out")) for f in files}
        assert {line[:64] for line in listed} == {hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    data = LongCrawl64DataModule(
        str(tmp_path), dataset="out", train_batch_len=64, train_batch_size=2, eval_batch_len=64, eval_local_batch_size=2
    )
    assert data.train_info().checksums
    array = zarr.open_array(tmp_path / "out/train.zarr", mode="r+")
    array[0, 0] = (int(array[0, 0]) + 1) % 256
    with pytest.raises(DataError, match=r"is not the file that train\.sha256 lists"):
        rows(tmp_path / "out", "train")


def test_verifying_writes_a_list_only_for_what_is_sound_and_whole(tmp_path, verify, capsys):
    write("v2", tmp_path / "train.zarr")
    sums = tmp_path / "train.sha256"
    assert verify(tmp_path / "train.zarr", "--share", "0.5") == 0 and not sums.exists()
    (tmp_path / "train.zarr/2.1").rename(tmp_path / "2.1")
    assert verify(tmp_path / "train.zarr") == 1 and not sums.exists()
    assert verify(tmp_path / "train.zarr", "--missing_chunks", "skip") == 0
    assert len(sums.read_text().splitlines()) == 23 and "written to train.sha256, 23 files" in capsys.readouterr().out
    (tmp_path / "2.1").rename(tmp_path / "train.zarr/2.1")
    before = sums.read_text()
    assert verify(tmp_path / "train.zarr") == 0 and sums.read_text() == before, "a list that is there is not replaced"
    assert "23 files are as train.sha256 says, 1 not listed" in capsys.readouterr().out
