"""benchmarks/data.py: a table and a JSON file of how fast arrays are read and how much is decoded for it."""

import json

import pytest

from tests.benchmarks.conftest import load

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def benchmark():
    return load("data")


SMALL = ["--documents", "2048", "--doc_len", "2048", "--seq_len", "2048", "--workers", "0", "--repeats", "1"]


def test_kept_chunks_are_decoded_once_and_plain_zarr_decodes_them_for_every_batch(benchmark, tmp_path, capsys):
    out = tmp_path / "new" / "results.json"
    assert benchmark.main([*SMALL, "--plain_batches", "2", "--data_dir", str(tmp_path), "--out", str(out)]) == 0
    plain, kept = json.loads(out.read_text())["rows"]
    assert (plain["reader"], plain["decode_factor"]) == ("plain zarr", 64)
    assert (kept["reader"], kept["decode_factor"]) == ("kept chunks", 1)
    assert kept["kept_bytes"] == 2048 * 2048 * 2
    printed = capsys.readouterr().out.splitlines()
    assert printed[2].startswith("| plain zarr | 0 |") and printed[3].startswith("| kept chunks | 0 |")
    with pytest.raises(SystemExit, match="has another shape"):
        benchmark.main([*SMALL, "--documents", "4096", "--data_dir", str(tmp_path)])


def test_what_cannot_be_measured_is_refused(benchmark, capsys):
    with pytest.raises(SystemExit):
        benchmark.parse_args(["--world_size", "3"])
    assert "shared equally" in capsys.readouterr().err
