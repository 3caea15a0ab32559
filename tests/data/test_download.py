"""Downloading from a partial mirror: complete row-chunks only, every file verified, nothing fetched twice."""

import shutil
import subprocess

import numpy as np
import pytest

from forgetting_transformer import command_line
from forgetting_transformer.data import DataError, TokenArray
from forgetting_transformer.data.sparse import SparseTokenArray
from forgetting_transformer.data.tools.download import download
from forgetting_transformer.files import locked
from tests.data.corpus_helpers import script
from tests.data.mirror import REPOSITORY, REVISION, serve, tokens_of_corpus, write_layout

HUB = f"hf://datasets/{REPOSITORY}@{REVISION}"
#: Row-chunk 1 lacks all its chunks, row-chunk 3 the last one; 0, 2, 4 and the ragged 5 are whole.
HOLES = ("1.0", "1.1", "1.2", "1.3", "3.3")


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    write_layout(tmp_path / "mirror" / "train.zarr", HOLES)
    write_layout(tmp_path / "mirror" / "heldout.zarr")
    from huggingface_hub import constants

    with serve(tmp_path / "mirror") as mirror:
        monkeypatch.setattr(constants, "ENDPOINT", mirror.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("forgetting_transformer.data.storage.remote.FIRST_WAIT", 0.01)
        yield mirror


def fetch(out, source=HUB, split="train", **options):
    return download(source, split, out, **options)


def chunks(folder):
    return sorted(path.name for path in folder.iterdir() if path.name[0].isdigit())


@pytest.mark.parametrize(
    ("selection", "rows"),
    [
        ({}, [0, 2, 4, 5]),  # only row-chunks that have every chunk
        ({"documents": 9}, [0, 2]),  # rounded up to whole row-chunks
        ({"documents": 0.5}, [0, 2]),
        ({"tokens": 72}, [0, 2, 3, 4, 5]),  # of fewer chunks more rows have all
    ],
)
def test_a_part_is_whole_row_chunks_and_reads_back_right(mirror, tmp_path, selection, rows):
    assert fetch(tmp_path / "out", **selection) == rows
    tokens = selection.get("tokens", 96)
    assert chunks(tmp_path / "out/train.zarr") == [f"{row}.{column}" for row in rows for column in range(tokens // 24)]
    array = SparseTokenArray(tmp_path / "out/train.zarr", 50_257)
    expected = np.concatenate([tokens_of_corpus()[8 * row : 8 * row + 8, :tokens] for row in rows])
    np.testing.assert_array_equal(array.read(0, array.documents, 0, tokens), expected)


def test_a_source_that_cannot_be_listed_is_taken_to_have_all(mirror, tmp_path):
    assert fetch(tmp_path / "out", mirror.url, "heldout") == list(range(6))
    assert TokenArray(tmp_path / "out/heldout.zarr", 50_257).documents == 44
    with pytest.raises(DataError, match=r"/train\.zarr/1\.\d is not there"):
        fetch(tmp_path / "out", mirror.url)


def test_failures_that_pass_are_tried_again_and_a_flipped_bit_is_seen_by_the_stated_checksum(mirror, tmp_path):
    mirror.faults = {
        "train.zarr/0.2": ["flip", "flip"],
        "train.zarr/0.0": [503, "cut", 429],
        "train.zarr/0.1": ["hang up"],
        "train.zarr/2.0": ["cut", "cut"],
        "train.zarr/.zarray": [500],
    }
    fetch(tmp_path / "out")
    assert mirror.requests["GET", "train.zarr/0.2"] == 3
    array = SparseTokenArray(tmp_path / "out/train.zarr", 50_257)
    np.testing.assert_array_equal(array.read(0, 16, 0, 96), tokens_of_corpus()[[*range(8), *range(16, 24)]])


@pytest.mark.parametrize("fault", ["cut", "flip"])
def test_what_fails_for_good_is_named_and_the_rest_is_kept(mirror, tmp_path, fault):
    mirror.faults = {"train.zarr/2.1": [fault] * 99}
    with pytest.raises(DataError, match=r"/2\.1: .*\(6 attempts in 0 s\)"):
        fetch(tmp_path / "out")
    kept = [f"train.zarr/{name}" for name in chunks(tmp_path / "out/train.zarr")]
    assert {f"train.zarr/0.{column}" for column in range(4)} < {*kept} and "train.zarr/2.1" not in kept
    with pytest.raises(DataError, match="no token array at"):
        TokenArray(tmp_path / "out/train.zarr", 50_257)  # unfinished: there is no metadata yet
    mirror.faults = {}
    before = mirror.fetched()
    fetch(tmp_path / "out")
    again = {name for name, n in mirror.fetched().items() if n != before.get(name)}
    assert "train.zarr/2.1" in again and not again.intersection(kept)
    assert len(chunks(tmp_path / "out/train.zarr")) == 16


def test_what_is_not_right_is_fetched_again_and_what_stays_wrong_is_refused(mirror, tmp_path):
    fetch(tmp_path / "out", documents=8)
    sums = tmp_path / "out/train.sha256"
    sums.write_text(sums.read_text()[:-20])  # a line that a kill cut short
    (tmp_path / "out/train.zarr/0.0").write_bytes(b"")
    first = mirror.fetched()
    fetch(tmp_path / "out", documents=8)
    assert {name for name, n in mirror.fetched().items() if n != first[name]} == {"train.zarr/0.0", "train.zarr/0.3"}
    done = subprocess.run(["sha256sum", "-c", sums.name], cwd=sums.parent, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(": OK") == 4
    (mirror.root / "train.zarr/2.0").write_bytes(b"<html>not found</html>")
    with pytest.raises(DataError, match=r"2\.0 cannot be decoded"):
        fetch(tmp_path / "out", documents=16)
    assert not (tmp_path / "out/train.zarr/2.0").exists()


def test_a_finished_copy_fetches_nothing_and_more_documents_only_the_new_ones(mirror, tmp_path):
    fetch(tmp_path / "out", documents=8)
    first = mirror.fetched()
    fetch(tmp_path / "out", documents=8)
    assert mirror.fetched() == first
    fetch(tmp_path / "out", documents=16)
    assert set(mirror.fetched()) - set(first) == {f"train.zarr/2.{column}" for column in range(4)}
    assert set(mirror.fetched().values()) == {1}
    with pytest.raises(DataError, match=r"is a folder of this machine; give a URL, as in file://"):
        fetch(tmp_path / "copy", source=str(tmp_path / "out"))
    with pytest.raises(DataError, match=r"^--source absent is a folder of this machine; give a URL"):
        fetch(tmp_path / "copy", source="absent")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"documents": 29}, r"has 28 documents of train\.zarr with all chunks .* fewer than the 29 asked for"),
        ({"tokens": 30}, "--tokens=30 must be a multiple of 24"),
        ({}, r"GB are to be fetched and .* has 0\.27 GB free; make room"),
    ],
)
def test_what_cannot_be_had_or_kept_is_refused_with_the_fix(mirror, tmp_path, monkeypatch, options, message):
    usage = shutil._ntuple_diskusage(10**12, 10**12, 2**28)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DataError, match=message):
        fetch(tmp_path / "out", **options)
    assert mirror.fetched() == {}


def test_sources_and_lengths_do_not_mix_in_one_folder(mirror, tmp_path):
    fetch(tmp_path / "out", documents=8)
    with locked(tmp_path / "out/.download.lock"), pytest.raises(DataError, match="another run is downloading into"):
        fetch(tmp_path / "out", documents=8)
    with pytest.raises(DataError, match=r"was begun with source hf://.*choose another --out"):
        fetch(tmp_path / "out", mirror.url, documents=8)
    with pytest.raises(DataError, match="was begun with tokens 96, not 72"):
        fetch(tmp_path / "out", documents=8, tokens=72)
    (tmp_path / "mine/train.zarr").mkdir(parents=True)
    with pytest.raises(DataError, match=r"mine/train\.zarr was not made by this program"):
        fetch(tmp_path / "mine", documents=8)


def test_a_dry_run_fetches_nothing_but_metadata_and_says_what_there_is(mirror, tmp_path, capsys):
    download(HUB, "train", tmp_path / "out", dry_run=True)
    assert mirror.fetched() == {} and not (tmp_path / "out/train.zarr").exists()
    assert (
        "the source has: 28 documents of 96 tokens, 0.00 billion tokens (4 of 6 row-chunks)\n"
        in capsys.readouterr().out
    )
    download(HUB, "train", tmp_path / "out", documents=9, dry_run=True)
    assert "asked for: 16 documents of 96 tokens" in capsys.readouterr().out


def test_the_command_says_what_was_wrong_and_exits_with_1(mirror, tmp_path, capsys):
    main, out = script("download_longcrawl64").main, ["--out", str(tmp_path / "out")]
    assert command_line.run(lambda: main(["heldout", "--source", f"{mirror.url}/nothing", *out])) == 1
    assert "error: no token array at" in capsys.readouterr().err
    main(["heldout", "train", "--source", HUB, "--documents", "50%", *out])
    assert "train.zarr is complete and verified; it is sparse" in capsys.readouterr().out
    assert SparseTokenArray(tmp_path / "out/heldout.zarr", 50_257).documents == 24
