"""scripts/verify_data.py: what is wrong with an array is named, and the exit code says whether to train on it."""

import pytest
import zarr

from forgetting_transformer import command_line
from forgetting_transformer.data import DataError
from tests.data.corpus_helpers import package_tree, prepare, rewrite, rows, script
from tests.data.mirror import write_layout


@pytest.fixture
def array(tmp_path):
    write_layout(tmp_path / "corpus" / "train.zarr")
    return tmp_path / "corpus" / "train.zarr"


@pytest.fixture
def verify(capsys):
    def run(*arguments):
        code = command_line.run(lambda: script("verify_data").main(list(map(str, arguments))))
        said = capsys.readouterr()
        return code, said.err + said.out

    return run


def test_a_sound_array_gets_a_list_which_is_not_replaced(verify, array):
    code, said = verify(array, "--share", "0.5")
    assert code == 0 and not array.with_name("train.sha256").exists()
    code, said = verify(array.parent)
    assert code == 0 and said.splitlines()[-1] == "sound"
    for line in (
        "metadata         44 documents x 96 tokens, uint16, chunks of 8 x 24",
        "presence         24 of 24 chunks; 6 of 6 row-chunks whole",
        "whole documents  44 of 44 (4,224 tokens)",
        "contents         24 chunks decode to ids below 50,257",
        "checksums        written to train.sha256, 24 chunks: readers compare each with it",
    ):
        assert f"  {line}" in said.splitlines()
    sums = array.with_name("train.sha256")
    sums.write_text(sums.read_text().partition("\n")[2])
    assert "23 chunks compared with train.sha256, 1 not listed" in verify(array)[1]
    assert len(sums.read_text().splitlines()) == 23


def test_missing_chunks_are_named_unless_the_array_is_sparse_on_purpose(verify, array):
    for key in ("1.0", "2.3", "4.0"):
        (array / key).unlink()
    code, said = verify(array)
    assert code == 1 and "! missing chunks: " in said and f"{array}/2.3" in said
    assert "21 of 24 chunks; 3 of 6 row-chunks whole" in said
    code, said = verify(array, "--missing_chunks", "skip")
    assert code == 0 and "whole documents  20 of 44" in said
    for row in range(6):
        (array / f"{row}.1").unlink()
    code, said = verify(array, "--missing_chunks", "skip")
    assert code == 1 and "no row of chunks is whole" in said


def test_what_cannot_be_decoded_or_is_not_of_the_vocabulary_or_is_zero_is_named(verify, array):
    # numcodecs decodes most of a file that was cut short, and silently fills the rest with what it finds in memory.
    (array / "3.1").write_bytes((array / "3.1").read_bytes()[:-4])
    (array / "5.0").write_bytes(b"")
    rewrite(array, 9, 50, 60_000)
    rewrite(array, slice(18, 21), slice(24, 48), 0)
    code, said = verify(array)
    assert code == 1 and "contents         FAILED: 4" in said
    assert f"{array}/3.1 cannot be decoded" in said and f"{array}/5.0 cannot be decoded" in said
    assert "token id 60000 in document 9 at position 50 is not below vocab_size=50257" in said
    assert "document 18 is all zeros from position 24" in said
    assert "contents         FAILED: 3" in verify(array, "--vocab_size", "60001")[1]


def test_a_prepared_corpus_is_held_to_its_content_hash(verify, tmp_path):
    prepare(tmp_path / "out", package_tree(tmp_path / "in"))
    code, said = verify(tmp_path / "out")
    assert code == 0 and said.count("content hash     as manifest.json says") == 2
    array = zarr.open_array(tmp_path / "out/train.zarr", mode="r+")
    array[0, 0] = (int(array[0, 0]) + 1) % 256
    with pytest.raises(DataError, match=r"is not the file that train\.sha256 lists"):
        rows(tmp_path / "out", "train")
    code, said = verify(tmp_path / "out")
    assert code == 1 and "is not the file that train.sha256 lists" in said
    (tmp_path / "out/train.sha256").unlink()
    code, said = verify(tmp_path / "out")
    assert code == 1 and "manifest.json says" in said.split("! content hash: ")[1]


def test_what_is_no_array_of_tokens_is_refused(verify, tmp_path):
    code, said = verify(tmp_path)
    assert code == 1 and f"no arrays (NAME.zarr) in {tmp_path}" in said
    assert "no token array at" in verify(tmp_path / "absent.zarr")[1]
