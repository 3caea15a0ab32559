"""scripts/verify_data.py: what is wrong with an array is named, and the exit code says whether to train on it."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import zarr

from tests.data.corpus_helpers import package_tree, prepare
from tests.data.mirror import tokens_of_corpus, write_layout

SCRIPT = Path(__file__).parents[2] / "scripts" / "verify_data.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("verify_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def array(tmp_path):
    write_layout(tmp_path / "corpus" / "train.zarr")
    return tmp_path / "corpus" / "train.zarr"


@pytest.fixture
def verify(script, capsys):
    def run(*arguments):
        code = script.main(list(map(str, arguments)))
        said = capsys.readouterr()
        return code, said.err + said.out

    return run


def rewrite(array, rows, columns, value):
    with zarr.config.set({"array.write_empty_chunks": True}):
        zarr.open_array(array, mode="r+")[rows, columns] = value


def test_a_whole_array_is_sound(verify, array):
    code, said = verify(array.parent)
    assert code == 0 and said.splitlines()[-1] == "sound"
    for line in (
        "metadata         Zarr v2, 44 documents x 96 tokens, uint16, chunks of 8 x 24",
        "presence         24 of 24 files; 6 of 6 row-chunks whole",
        "whole documents  44 of 44 (4,224 tokens)",
        "decodable        yes, 24 files",
        f"token range      0 to {tokens_of_corpus().max():,} of 50,257",
        "all-zero rows    none",
    ):
        assert f"  {line}" in said.splitlines()


def test_missing_chunks_are_named_unless_the_array_is_sparse_on_purpose(verify, array):
    for key in ("1.0", "2.3", "4.0"):
        (array / key).unlink()
    code, said = verify(array)
    assert code == 1 and "! missing files: " in said and f"{array}/2.3" in said
    assert "21 of 24 files; 3 of 6 row-chunks whole" in said and "row-chunks not whole  1-2, 4" in said
    code, said = verify(array, "--missing_chunks", "skip")
    assert code == 0 and "whole documents       20 of 44" in said
    for row in range(6):
        (array / f"{row}.1").unlink()
    code, said = verify(array, "--missing_chunks", "skip")
    assert code == 1 and "no row of chunks is whole" in said


@pytest.mark.slow
def test_what_cannot_be_decoded_is_named(verify, array):
    # numcodecs decodes most of a file that was cut short, and silently fills the rest with what it finds in memory.
    (array / "3.1").write_bytes((array / "3.1").read_bytes()[:-4])
    (array / "5.0").write_bytes(b"")
    code, said = verify(array)
    assert code == 1 and f"! decodable: {array}/3.1: " in said and f"! decodable: {array}/5.0: " in said


def test_ids_that_the_vocabulary_does_not_have_are_named(verify, array):
    rewrite(array, 9, 50, 60_000)
    code, said = verify(array)
    assert code == 1 and f"{array}/1.2 holds id 60000, not below vocab_size=50257" in said
    assert verify(array, "--vocab_size", "60001")[0] == 0


def test_rows_of_zeros_are_named_with_their_document(verify, array):
    rewrite(array, slice(18, 21), slice(24, 48), 0)
    code, said = verify(array)
    assert code == 1
    assert f"{array}/2.1: 3 documents are all zeros in tokens 24 and on, the first is document 18" in said


def test_a_prepared_corpus_is_held_to_its_content_hash(verify, tmp_path):
    prepare(tmp_path / "out", package_tree(tmp_path / "in"))
    code, said = verify(tmp_path / "out")
    assert code == 0 and said.count("content hash     as manifest.json says") == 2
    array = zarr.open_array(tmp_path / "out/train.zarr", mode="r+")
    array[0, 0] = (int(array[0, 0]) + 1) % 256
    code, said = verify(tmp_path / "out")
    assert code == 1 and "is not the file that was downloaded or made" in said.split("! checksums: ")[1]
    (tmp_path / "out/train.sha256").unlink()
    code, said = verify(tmp_path / "out")
    assert code == 1 and "manifest.json says" in said.split("! content hash: ")[1]


def test_what_is_no_array_of_tokens_is_refused(verify, array, tmp_path):
    code, said = verify(tmp_path)
    assert code == 1 and f"no arrays (NAME.zarr) in {tmp_path}" in said
    assert "no array at" in verify(tmp_path / "absent.zarr")[1]
    zarr.create_array(tmp_path / "wide.zarr", data=np.ones((4, 4), dtype=np.int64))
    assert "dtype int64; expected (documents, doc_len) of uint16 or uint32" in verify(tmp_path / "wide.zarr")[1]
    metadata = json.loads((array / ".zarray").read_text())
    (array / ".zarray").write_text(json.dumps({**metadata, "compressor": {"id": "base64"}}))
    assert "codec base64; accepted are" in verify(array)[1]
