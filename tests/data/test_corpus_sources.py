"""Reading: which texts are found, in which order, what is left out and why, and every way an input can be wrong."""

import gzip
import json
import os
import sys
import types
from pathlib import Path

import pytest

from forgetting_transformer.data.prepare import CorpusError, CorpusSettings, sources
from forgetting_transformer.data.prepare.sources import Tally, read_pieces
from tests.data.corpus_helpers import write_tree


def read(*inputs: Path, **settings: object) -> tuple[list[str], Tally]:
    """All texts and what was counted."""
    tally, texts, parts = Tally(), [], []
    settings = CorpusSettings(inputs=tuple(map(str, inputs)), **settings)
    for piece in read_pieces(settings, Path("/nowhere"), tally):
        parts.append(piece.text)
        if piece.ends_text:
            texts.append("".join(parts))
            parts = []
    assert not parts
    return texts, tally


def test_folders_are_read_in_path_order_and_inputs_in_the_order_given(tmp_path: Path) -> None:
    write_tree(tmp_path / "b", {"z.txt": "1", "m/y.txt": "2", "m/a.txt": "3", "a.txt": "4"})
    write_tree(tmp_path / "a", {"x.txt": "5"})
    assert read(tmp_path / "b", tmp_path / "a")[0] == ["4", "3", "2", "1", "5"]


def test_texts_are_kept_to_the_byte(tmp_path: Path) -> None:
    text = "\ufeffone\r\ntwo\rthree \u2028 é 例 \n\n"
    write_tree(tmp_path, {"a.txt": text})
    assert read(tmp_path)[0] == [text]


def test_what_is_left_out_is_counted_with_the_reason(tmp_path: Path) -> None:
    write_tree(tmp_path, {
        "keep.py": "keep", "same.py": "keep", "empty.py": "", "blank.py": " \n", "notes.md": "x",
        ".hidden.py": "x", ".git/a.py": "x", "pkg/__pycache__/a.py": "x", "tests/a.py": "x", "tests/b.py": "x",
    })  # fmt: skip
    (tmp_path / "binary.py").write_bytes(b"x\0y")
    (tmp_path / "latin.py").write_bytes(b"caf\xe9")
    (tmp_path / "cut.py").write_bytes("é".encode()[:1])
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "broken.py").symlink_to(tmp_path / "nothing")
    texts, tally = read(tmp_path, include=("*.py",), exclude=("tests",))
    assert texts == ["keep"]
    assert tally.dropped == {
        "duplicate of an earlier text": 1,
        "empty text": 2,
        "does not match --glob": 1,
        "hidden file or folder": 2,
        "excluded file or folder": 2,
        "binary file": 1,
        "not UTF-8": 2,
        "symbolic link to a folder": 1,
        "broken link or special file": 1,
    }


def test_patterns_with_a_slash_match_the_path_below_the_input(tmp_path: Path) -> None:
    write_tree(tmp_path, {"src/a.py": "1", "docs/a.py": "2", "src/old/b.py": "3"})
    assert read(tmp_path, include=("src/*.py",))[0] == ["1", "3"]
    assert read(tmp_path, exclude=("src/old",))[0] == ["2", "1"]


def test_duplicates_are_kept_on_demand(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a": "x", "b": "x"})
    assert read(tmp_path)[0] == ["x"]
    assert read(tmp_path, keep_duplicates=True)[0] == ["x", "x"]


def test_an_input_inside_another_is_read_once_and_in_its_turn(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a.txt": "1", "lib/site/b.txt": "2", "lib/c.txt": "3"})
    site = tmp_path / "lib" / "site"
    assert read(tmp_path, site, keep_duplicates=True)[0] == ["1", "3", "2"]
    assert read(site, tmp_path, site, keep_duplicates=True)[0] == ["2", "1", "3"]


def test_the_output_folder_is_not_an_input(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a.txt": "1", "out/tokenizer/tokenizer.json": "{}"})
    pieces = read_pieces(CorpusSettings(inputs=(str(tmp_path),)), tmp_path / "out", Tally())
    assert [piece.text for piece in pieces] == ["1"]


def test_hidden_and_unmatched_files_are_read_when_named(tmp_path: Path) -> None:
    write_tree(tmp_path, {".notes": "1"})
    assert read(tmp_path / ".notes", include=("*.py",))[0] == ["1"]


def test_max_bytes_stops_after_the_text_that_reaches_it(tmp_path: Path) -> None:
    write_tree(tmp_path, {f"{i}.txt": f"{i}" * 10 for i in range(9)})
    texts, tally = read(tmp_path, max_bytes=25)
    assert [text[0] for text in texts] == ["0", "1", "2"]
    assert tally.stopped_early
    assert not read(tmp_path, max_bytes=91)[1].stopped_early


# Long texts ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_CHARS", 50)
    monkeypatch.setattr(sources, "WHOLE_FILE_BYTES", 64)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("unit", ["a line of text\n", "é", "例\n\n", " ", "x\n"])
def test_a_long_text_is_cut_and_nothing_is_lost(tmp_path: Path, unit: str) -> None:
    text = "begin" + unit * 100 + "end"
    write_tree(tmp_path, {"file.txt": text, "rows.jsonl": json.dumps({"text": text})})
    assert read(tmp_path, keep_duplicates=True)[0] == [text, text]
    assert read(tmp_path)[1].dropped == {"duplicate of an earlier text": 1}  # file and record hash alike


@pytest.mark.usefixtures("small_pieces")
def test_cuts_depend_on_the_text_and_not_on_how_it_is_read(tmp_path: Path) -> None:
    text = "".join(f"line {i} of the text\n" + "\n" * (i % 3) for i in range(60))
    write_tree(tmp_path, {"file.txt": text, "rows.jsonl": json.dumps({"text": text})})
    cuts = []
    for name in ("file.txt", "rows.jsonl"):
        settings = CorpusSettings(inputs=(str(tmp_path / name),))
        cuts.append([piece.text for piece in read_pieces(settings, Path("/nowhere"), Tally())])
    assert cuts[0] == cuts[1]
    assert all(len(piece) <= 50 for piece in cuts[0])


@pytest.mark.usefixtures("small_pieces")
def test_a_long_file_that_is_not_utf8_near_its_end_is_dropped_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n" * 100 + b"\xe9")
    texts, tally = read(tmp_path)
    assert (texts, tally.dropped) == ([], {"not UTF-8": 1})


@pytest.mark.usefixtures("small_pieces")
def test_max_bytes_cuts_a_long_text(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a.txt": "a line\n" * 100})
    texts, tally = read(tmp_path, max_bytes=120)
    assert 120 <= len(texts[0]) < 170
    assert tally.stopped_early


# Records ------------------------------------------------------------------------------------------------------


def test_records_without_text_are_dropped(tmp_path: Path) -> None:
    lines = ['{"text": "a"}', '{"text": null}', '{"text": " "}', "", '{"text": "\\ud800"}', '{"text": "b"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    texts, tally = read(tmp_path)
    assert texts == ["a", "b"]
    assert tally.dropped == {"empty text": 2, "not valid Unicode": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x", "id": 1}', r"a\.jsonl, line 2: no text under 'text'; its keys are body, id.*--text_field"),
        ('{"text": 7}', r"a\.jsonl, line 2: 'text' holds int, not text.*--text_field"),
        ("[1]", r"a\.jsonl, line 2: .*it is not a JSON object"),
        ('{"text": "x"', r"a\.jsonl, line 3, column 1: not valid JSON: Expecting ',' delimiter"),
        ("\udce9", r"a\.jsonl, line 2, column 1: the byte 0xe9 is not UTF-8"),
    ],
)
def test_wrong_json_lines_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' + line + "\n", errors="surrogateescape")
    with pytest.raises(CorpusError, match=message):
        read(tmp_path)


def test_damaged_gzip_is_an_error(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"text": "x"}\n' * 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:-20])
    with pytest.raises(CorpusError, match=r"a\.jsonl\.gz"):
        read(tmp_path)
    (tmp_path / "a.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(CorpusError, match=r"cannot read .*a\.jsonl\.gz"):
        read(tmp_path)


def test_wrong_parquet_names_columns_and_file(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match=r"a\.parquet: no column 'text'; its columns are body, n\."):
        read(tmp_path)
    with pytest.raises(CorpusError, match=r"a\.parquet: column 'n' holds int64, not text"):
        read(tmp_path, text_field="n")
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    with pytest.raises(CorpusError, match=r"a\.parquet"):
        read(tmp_path)


def test_missing_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CorpusError, match=r'needs pyarrow: pip install -e "\.\[data\]"'):
        read(tmp_path)


def fake_datasets(monkeypatch: pytest.MonkeyPatch, load_dataset: object) -> None:
    config = types.SimpleNamespace(HF_HUB_OFFLINE=True)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset, config=config))


def test_a_data_set_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, config: str | None, split: str, streaming: bool) -> list[dict]:
        assert (name, config, split, streaming) == ("org/set", "small", "validation", True)
        return [{"text": "a"}, {"text": "b"}, {"text": "a"}]

    fake_datasets(monkeypatch, load_dataset)
    texts, tally = read(dataset="org/set", dataset_config="small", dataset_split="validation")
    assert texts == ["a", "b"]
    assert tally.per_input["org/set"] == {"files": 0, "texts": 2, "bytes": 2}


def test_data_set_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CorpusError, match=r"--dataset needs the datasets library: pip install"):
        read(dataset="org/set")

    def unreachable(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route to host")

    fake_datasets(monkeypatch, unreachable)
    with pytest.raises(CorpusError, match="cannot read data set org/set, split train: ConnectionError: no route"):
        read(dataset="org/set")
    fake_datasets(monkeypatch, lambda *args, **kwargs: [{"content": "x"}])
    with pytest.raises(CorpusError, match=r"row 0: no text under 'text'; its keys are content"):
        read(dataset="org/set")


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path, {"a.txt": "x"})
    open_file = Path.open

    def refuse(path: Path, *args: object, **kwargs: object) -> object:
        if path.name == "a.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CorpusError, match=r"cannot read .*a\.txt: Permission denied.*--exclude"):
        read(tmp_path)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    write_tree(tmp_path, {"closed/a.txt": "x"})
    (tmp_path / "closed").chmod(0)
    with pytest.raises(CorpusError, match=r"cannot read .*closed"):
        read(tmp_path)


# Settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inputs": ()}, "either files and folders to read, or --dataset"),
        ({"dataset": "org/set"}, "either files and folders to read, or --dataset"),
        ({"heldout_docs": 1, "heldout_fraction": 0.1}, "--heldout_docs or --heldout_fraction, not both"),
        ({"heldout_fraction": 1.0}, "--heldout_fraction must lie between 0 and 1"),
        ({"doc_len": 100, "chunk_tokens": 101}, "--chunk_tokens 101 is longer than a row"),
        ({"tokenizer": "train1024"}, r"--tokenizer train1024: did you mean train:1024\?"),
        ({"tokenizer": "train:256"}, r"N in train:N must be a number from 257 .* to 1,048,576"),
        ({"tokenizer": "train:1_048_577"}, "for example train:32768"),
        ({"tokenizer": "train:many"}, "for example train:32768"),
    ],
)
def test_wrong_settings_name_the_flag(settings: dict, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        CorpusSettings(**{"inputs": ("a",), **settings})


def test_a_folder_that_is_not_there_is_no_name_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_datasets(monkeypatch, None)
    missing = str(tmp_path / "none")
    with pytest.raises(CorpusError, match=f"--dataset {missing}: there is no such folder"):
        list(sources._dataset_rows(CorpusSettings(dataset=missing, tokenizer="bytes")))
