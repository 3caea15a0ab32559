"""Every chunk that is read is held to the list of checksums beside its array."""

import logging
import shutil

import numcodecs
import numpy as np
import pytest

from forgetting_transformer.data import DataError, TokenArray
from forgetting_transformer.data.storage.checksums import write_list
from forgetting_transformer.data.storage.remote_cache import CacheSettings
from tests.data.corpus_helpers import rewrite, write_array
from tests.data.mirror import CHUNK, DOC_LEN, serve, tokens_of_corpus, write_layout

VOCAB = 50_257


@pytest.fixture
def corpus(tmp_path):
    """A folder with an array and its list."""
    write_array(
        tmp_path / "train.zarr", tokens_of_corpus(), chunks=CHUNK, zarr_format=2, compressors=numcodecs.Blosc("lz4")
    )
    write_list(tmp_path / "train.zarr", [file.name for file in (tmp_path / "train.zarr").glob("[0-9]*")])
    return tmp_path


def test_in_the_cache_of_a_remote_corpus_a_changed_file_is_fetched_again(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("forgetting_transformer.data.storage.remote.FIRST_WAIT", 0.01)
    with serve(corpus) as mirror:

        def opened() -> TokenArray:
            return TokenArray(f"{mirror.url}/train.zarr", VOCAB, cache=CacheSettings(tmp_path / "cache", 10**9))

        array = opened()
        array.read(8, 16, 24, 48)
        cached = array.files.folder / "1.1"
        good = cached.read_bytes()
        shutil.copyfile(array.files.folder / "0.0", cached)  # whole, and of other documents
        np.testing.assert_array_equal(opened().read(8, 16, 24, 48), tokens_of_corpus()[8:16, 24:48])
        assert cached.read_bytes() == good
        rewrite(corpus / "train.zarr", slice(8, 16), slice(24, 48), 77)
        cached.unlink()
        with pytest.raises(DataError, match=r"is not the file that train\.sha256 lists"):
            opened().read(8, 16, 24, 48)


def test_a_file_that_is_not_listed_is_read_with_one_warning(corpus, caplog):
    sums = corpus / "train.sha256"
    sums.write_text("".join(line for line in sums.read_text().splitlines(True) if "/1." not in line))
    array = TokenArray(corpus / "train.zarr", VOCAB)
    np.testing.assert_array_equal(array.read(8, 16, 0, DOC_LEN), tokens_of_corpus()[8:16])
    assert len([r for r in caplog.records if r.levelno == logging.WARNING and "not listed in" in r.message]) == 1


def test_a_list_is_known_by_its_lines_and_a_damaged_one_is_named(tmp_path):
    write_layout(tmp_path / "train.zarr")
    plain = TokenArray(tmp_path / "train.zarr", VOCAB)
    assert plain.checksums is None
    sums = write_list(tmp_path / "train.zarr", ["0.0", "0.1", "0.2"])
    listed = TokenArray(tmp_path / "train.zarr", VOCAB)
    assert listed.fingerprint == plain.fingerprint == "cb75879b89f03aa7" and len(listed.checksums) == 16
    sums.write_text("".join(reversed(sums.read_text().splitlines(True))))
    assert TokenArray(tmp_path / "train.zarr", VOCAB).checksums == listed.checksums
    for line in ("nonsense", "0123  train.zarr/0.0", "g" * 64 + "  train.zarr/0.0", "\x00" * 80):
        sums.write_text(f"{line}\n")
        with pytest.raises(DataError, match=r"train\.sha256, line 1, is not of the form .*verify_data\.py"):
            TokenArray(tmp_path / "train.zarr", VOCAB)
