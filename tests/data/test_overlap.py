"""scripts/verify_data.py --overlap: which held-out pieces occur in train."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.tools import overlap
from tests.data.corpus_helpers import package_tree, prepare, rows

SCRIPT = Path(__file__).parents[2] / "scripts" / "verify_data.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("verify_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def brute_force(train: np.ndarray, heldout: np.ndarray, length: int) -> np.ndarray:
    width = train.shape[1] - length + 1
    seen = {tuple(row[i : i + length]) for row in train.tolist() for i in range(width)}
    starts = range(0, heldout.shape[1] - length + 1, length)
    return np.array([[tuple(row[i : i + length]) in seen for i in starts] for row in heldout.tolist()])


@pytest.mark.parametrize("length", [1, 7, 32, 300])
def test_pieces_are_found_wherever_they_are_in_train(
    tmp_path: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "_BLOCK", 2048)
    tree = package_tree(tmp_path / "in", n_packages=20, n_lines=30)
    # Every other package is a copy of the one before, in parts and a few bytes further on.
    for package in range(0, 20, 2):
        for file in range(4):
            copied = (tree / f"package{package}" / f"part{file}" / "file.txt").read_text()
            (tree / f"package{package + 1}" / f"part{file}" / "file.txt").write_text(f"# copy {package}\n{copied}")
    prepare(tmp_path / "out", tree, heldout_docs=20)
    found = overlap.measure_overlap(tmp_path / "out", length)
    expected = brute_force(rows(tmp_path / "out", "train"), rows(tmp_path / "out", "heldout"), length)
    assert (found.found_ND == expected).all()
    assert found.share > 0 and (length == 1 or found.share < 1)


def test_ids_over_16_bits_differ_in_their_upper_bits() -> None:
    codes = np.random.default_rng(0).integers(0, 1 << 64, 1 << 16, dtype=np.uint64)
    ids = np.array([[5, 5 + (1 << 16)]], dtype=np.uint32)
    assert len(np.unique(overlap.hash_windows(ids, 1, codes))) == 2


def test_the_command_says_it_after_its_checks(script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(tmp_path / "out", package_tree(tmp_path / "in"), heldout_docs=4)
    assert script.main([str(tmp_path / "out"), "--overlap", "32"]) == 0
    assert "held-out pieces of 32 tokens" in capsys.readouterr().out
    assert script.main([str(tmp_path / "out" / "train.zarr"), "--overlap", "32"]) == 1
    assert "give their folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script.main([str(tmp_path / "out"), "--overlap", "a"])
    assert "argument --overlap: 'a' is not a whole number from 1" in capsys.readouterr().err


def test_arrays_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no array at .*train\.zarr"):
        overlap.measure_overlap(tmp_path, 32)
    prepare(tmp_path / "out", package_tree(tmp_path / "in"), heldout_docs=4)
    with pytest.raises(DataError, match=r"--overlap 600: .* 512 tokens; choose at most that"):
        overlap.measure_overlap(tmp_path / "out", 600)
