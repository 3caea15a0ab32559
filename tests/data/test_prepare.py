"""scripts/prepare_data.py: texts in, arrays out, the same whatever the number of workers and kills."""

import errno
import gzip
import hashlib
import importlib
import json
import os
import shutil
import signal
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from forgetting_transformer.data import DataError
from forgetting_transformer.data.prepare import CorpusSettings, output, pipeline, shards, sources
from forgetting_transformer.data.prepare.sources import MADE_HERE, InputPass
from tests.data.corpus_helpers import (
    all_files,
    array_of,
    byte_text,
    numbered_text,
    numbers_in,
    package_tree,
    prepare,
    rows,
    write_tree,
)
from tests.processes import server

FINISHED = ["heldout.sha256", "heldout.zarr", "manifest.json", "tokenizer", "train.sha256", "train.zarr"]


@pytest.fixture(autouse=True)
def many_shards(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 4_000)


@pytest.fixture
def tree(tmp_path):
    return package_tree(tmp_path / "in")


@pytest.fixture
def place(tmp_path):
    return output.OutputFolder(tmp_path / "out")


# What the arrays hold -----------------------------------------------------------------------------------------


def test_rows_are_the_texts_in_path_order_and_whole_folders_are_held_out(tmp_path):
    tree = package_tree(tmp_path / "in", n_packages=40, n_files=3, n_lines=4)
    prepare(tmp_path / "out", tree, heldout_fraction=0.3)
    train, heldout = (
        set().union(*(numbers_in(byte_text(row)) for row in rows(tmp_path / "out", name)))
        for name in ("train", "heldout")
    )
    assert len(heldout) > 10

    def path_of(number):
        return f"package{number // 3}", number % 3

    assert not {number // 3 for number in train} & {number // 3 for number in heldout}, "a package is on both sides"
    stream = "".join(f"{numbered_text(number, 4)}\f" for number in sorted(train, key=path_of)).encode()
    expected = [stream[i : i + 512] for i in range(0, len(stream) - 511, 512)]
    actual = [bytes(np.where(row == 256, 12, row).astype(np.uint8)) for row in rows(tmp_path / "out", "train")]
    assert Counter(actual) == Counter(expected) and actual != expected, "permuted"
    again = prepare(tmp_path / "again", tree, heldout_fraction=0.3, seed=1)
    assert again["arrays"]["train"]["content_hash"] != _manifest(tmp_path / "out")["arrays"]["train"]["content_hash"]


def _manifest(out):
    return json.loads((out / "manifest.json").read_text())


def test_every_chunk_is_a_file_and_the_manifest_states_what_is_there(tmp_path):
    # NUL is token 0, the fill value: Zarr would leave out chunks of it.
    (tmp_path / "zeros.jsonl").write_text(json.dumps({"text": "\0" * 40_000}) + "\n" + json.dumps({"text": "x" * 999}))
    form = {"chunk_docs": 4, "chunk_tokens": 100}
    manifest = prepare(tmp_path / "out", tmp_path / "zeros.jsonl", heldout_docs=1, **form)
    array = array_of(tmp_path / "out" / "train.zarr")
    assert (array.metadata.zarr_format, array.dtype, array.chunks) == (2, np.uint16, (4, 100))
    chunks = [p for p in (tmp_path / "out" / "train.zarr").rglob("*") if p.is_file() and p.name[0] not in ".z"]
    assert len(chunks) == -(-array.shape[0] // 4) * 6
    assert (array[:] == 0).all(axis=1).any()
    assert manifest == _manifest(tmp_path / "out")
    assert (manifest["vocab_size"], manifest["bos_token_id"], manifest["eos_token_id"]) == (257, 256, 256)
    assert (manifest["texts"], manifest["bytes"]) == (2, 40_999)
    for name, stated in manifest["arrays"].items():
        stored = array_of(tmp_path / "out" / f"{name}.zarr")[:]
        digest = hashlib.blake2b(stored.astype("<u2").tobytes(), digest_size=16).hexdigest()
        assert stated["content_hash"] == f"blake2b:{digest}"
        assert (stated["documents"], stated["tokens"]) == (len(stored), stored.size)
    count = np.bincount(array[:].ravel())
    share = count[count > 0] / count.sum()
    assert manifest["unigram_entropy_nats"] == pytest.approx(-(share * np.log(share)).sum(), rel=1e-12)


def test_the_result_does_not_depend_on_workers_or_the_form_of_the_input(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [numbered_text(number, 10) for number in range(100, 140)]
    write_tree(tmp_path / "files", {f"{i}.txt": text for i, text in enumerate(texts, start=100)})
    lines = "".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(texts))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.table({"body": texts}), tmp_path / "a.parquet")
    inputs = ("files", "a.jsonl", "a.jsonl.gz", "a.parquet")
    for name in inputs:
        settings = {"tokenizer": "train:300", "doc_len": 128, "chunk_docs": 4, "heldout_docs": 2, "text_field": "body"}
        prepare(tmp_path / f"out-{name}", tmp_path / name, workers=3 if name == "files" else 1, **settings)
    first, *others = (all_files(tmp_path / f"out-{name}") for name in inputs)
    assert all(other == first for other in others)


# Which texts are read -----------------------------------------------------------------------------------------


def read(*inputs, **settings) -> tuple[list[str], InputPass]:
    """All texts and what was counted."""
    texts, parts = [], []
    tally = InputPass(CorpusSettings(inputs=tuple(map(str, inputs)), **settings), Path("/nowhere/out"))
    for piece in tally.pieces():
        parts.append(piece.text)
        if piece.ends_text:
            texts.append("".join(parts))
            parts = []
    assert not parts
    return texts, tally


def test_texts_come_in_path_order_and_what_is_left_out_is_counted(tmp_path):
    odd = "\ufeffone\r\ntwo\rthree \u2028 é 例 \n\n"
    write_tree(tmp_path / "b", {
        "z.py": "1", "m/y.py": "2", "m/a.py": odd, "a.py": "4", "same.py": "4", "blank.py": " \n", "notes.md": "x",
        ".hidden.py": "x", ".git/a.py": "x", "pkg/__pycache__/a.py": "x", "tests/a.py": "x", "old/b.py": "x",
    })  # fmt: skip
    write_tree(tmp_path / "a", {"x.py": "5"})
    (tmp_path / "b/binary.py").write_bytes(b"x\0y")
    (tmp_path / "b/latin.py").write_bytes(b"caf\xe9")
    (tmp_path / "b/utf16.py").write_bytes(b"\xff\xfe1\0")
    (tmp_path / "b/latin1.py").write_bytes(b"\xe9t\xe9")
    (tmp_path / "b/loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "b/broken.py").symlink_to(tmp_path / "nothing")
    texts, tally = read(tmp_path / "b", tmp_path / "a", tmp_path / "b/m", include=("*.py",), exclude=("tests", "old/*"))
    assert texts == ["4", "1", "5", odd, "2"], "an input inside another one has its own turn"
    assert tally.dropped == {
        "duplicate of an earlier text": 1,
        "empty text": 1,
        "does not match --glob": 1,
        "hidden file or folder": 2,
        "excluded file or folder": 3,
        "binary file": 2,
        "not UTF-8": 2,
        "symbolic link to a folder": 1,
        "broken link or special file": 1,
    }
    assert (
        read(tmp_path / "b", keep_duplicates=True, include=("a.py", "same.py"), exclude=("m", "tests"))[0] == ["4"] * 2
    )
    texts, tally = read(tmp_path / "b", max_bytes=1, include=("*.py",))
    assert texts == ["4"] and tally.stopped_early


@pytest.mark.parametrize("unit", ["a line of text\n", "例\n\n"])
def test_a_long_text_is_cut_alike_however_it_is_read_and_nothing_is_lost(tmp_path, monkeypatch, unit):
    monkeypatch.setattr("forgetting_transformer.data.prepare.sources.PIECE_CHARS", 50)
    monkeypatch.setattr("forgetting_transformer.data.prepare.sources.WHOLE_FILE", 64)
    text = "begin" + unit * 100 + "end"
    write_tree(tmp_path, {"file.txt": text, "rows.jsonl": json.dumps({"text": text})})
    cuts = []
    for name in ("file.txt", "rows.jsonl"):
        settings = CorpusSettings(inputs=(str(tmp_path / name),))
        cuts.append([piece.text for piece in InputPass(settings, Path("/nowhere/out")).pieces()])
    assert cuts[0] == cuts[1] and "".join(cuts[0]) == text
    assert all(len(piece) <= 50 for piece in cuts[0])
    assert read(tmp_path)[1].dropped == {"duplicate of an earlier text": 1}, "file and record hash alike"
    (tmp_path / "file.txt").write_bytes(text.encode() + b"\xe9")
    assert read(tmp_path / "file.txt")[1].dropped == {"not UTF-8": 1}, "dropped whole, for its end"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"body": "x", "id": 1}', r"line 2: no text under 'text'; its keys are body, id"),
        ("a.jsonl", b'{"text": 7}', r"line 1: 'text' holds int, not text.*--text_field"),
        ("a.jsonl", b"\xe9", r"line 1, column 1: the byte 0xe9 is not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text":\n', r"a\.jsonl, line 2, column 9: not valid JSON"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "x"}\n' * 1000, mtime=0)[:-20],
            r"cannot read .*a\.jsonl\.gz: Compressed file ended",
        ),
        ("a.parquet", b"not parquet", r"cannot read .*a\.parquet: Parquet magic bytes"),
    ],
)
def test_an_input_that_cannot_be_read_is_an_error_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_records_without_text_are_dropped_and_a_data_set_is_streamed(tmp_path, monkeypatch):
    lines = ['{"text": "a"}', '{"text": null}', '{"text": " "}', "", '{"text": "\\ud800"}', '{"text": "b"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    texts, tally = read(tmp_path)
    assert texts == ["a", "b"] and tally.dropped == {"empty text": 2, "not valid Unicode": 1}

    def load_dataset(name, config, split, streaming):
        assert (name, config, split, streaming) == ("org/set", "small", "validation", True)
        return [{"text": "a"}, {"text": "b"}, {"body": "a"}]

    config = types.SimpleNamespace(HF_HUB_OFFLINE=True)
    library = types.SimpleNamespace(load_dataset=load_dataset, config=config)
    monkeypatch.setitem(__import__("sys").modules, "datasets", library)
    settings = {"dataset": "org/set", "dataset_config": "small", "dataset_split": "validation"}
    assert read(**settings, max_bytes=2)[0] == ["a", "b"]
    with pytest.raises(DataError, match=r"row 2: no text under 'text'; its keys are body"):
        read(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inputs": ()}, "either files and folders to read, or --dataset"),
        ({"heldout_docs": 1, "heldout_fraction": 0.1}, "--heldout_docs or --heldout_fraction, not both"),
        ({"doc_len": 100, "chunk_tokens": 101}, "--chunk_tokens 101 is longer than a row"),
        ({"tokenizer": "train:256"}, r"N in train:N must be a number from 257 .* to 1,048,576"),
        ({"dedup": 80.0}, r"--dedup must be a similarity from 0.5 to below 1, such as 0.8; got 80.0"),
        ({"dedup": 0.8, "keep_duplicates": True}, "--keep_duplicates keeps them: give one of them"),
    ],
)
def test_wrong_settings_name_the_flag(settings, message):
    with pytest.raises(DataError, match=message):
        CorpusSettings(**{"inputs": ("a",), **settings})


# Kills --------------------------------------------------------------------------------------------------------

#: Function, number of the call, and whether the process dies before it, after it or in the middle of writing.
KILLS = {
    "in the middle of a shard's tokens": ("forgetting_transformer.data.prepare.shards", "_append", 7, "half"),
    "after a block of rows": ("forgetting_transformer.data.prepare.writing", "write_block", 3, "after"),
    "before the corpus appears": ("os", "rename", 1, "before"),
    "after the corpus has appeared": ("os", "rename", 1, "after"),
}
OPTIONS = {"tokenizer": "train:300", "doc_len": 128, "chunk_docs": 4}


def _prepare_and_die(out: Path, tree: Path, kill: tuple, options: dict) -> None:
    """In a child process: prepare, and die by SIGKILL at the n-th call of a function."""
    module, name, nth, when = importlib.import_module(kill[0]), *kill[1:]
    shards.SHARD_BYTES, original, calls = 4_000, getattr(module, name), []

    def dying(*args: object, **kwargs: object) -> object:
        if name == "rename" and not str(args[0]).startswith(str(out.parent)):
            return original(*args, **kwargs)
        calls.append(args)
        if len(calls) != nth:
            return original(*args, **kwargs)
        if when == "half":
            original(args[0], args[1][: len(args[1]) // 2])
        if when == "after":
            original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(module, name, dying)
    prepare(out, tree, **options)


def die(out: Path, tree: Path, kill: tuple, **options: object) -> None:
    child = server.Process(target=_prepare_and_die, args=(out, tree, kill, options))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A corpus that was never interrupted, at `in` and `out` of the folder."""
    folder = tmp_path_factory.mktemp("straight")
    prepare(folder / "out", package_tree(folder / "in"), **OPTIONS)
    return folder


@pytest.mark.parametrize("kill", KILLS)
def test_a_killed_run_continues_to_the_same_result(straight, tmp_path, kill):
    die(tmp_path / "out", straight / "in", KILLS[kill], **OPTIONS)
    assert (tmp_path / "out").exists() == (kill == "after the corpus has appeared")
    prepare(tmp_path / "out", straight / "in", **OPTIONS)
    assert all_files(tmp_path / "out") == all_files(straight / "out")
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("nth", [1, 2])
def test_a_corpus_is_whole_or_not_there_while_it_is_replaced(tree, place, monkeypatch, nth):
    """Killed before each of the two renames: the old one away, the new one in its place."""
    prepare(place.out, tree, seed=1)
    before = all_files(place.out)
    die(place.out, tree, ("os", "rename", nth, "before"), seed=2, force=True)
    assert place.out.exists() == (nth != 2)
    assert nth != 1 or all_files(place.out) == before
    monkeypatch.setattr(pipeline._Building, "manifest", _never)  # the build was complete
    assert prepare(place.out, tree, seed=2, force=True)["settings"]["seed"] == 2
    assert sorted(os.listdir(place.out)) == FINISHED and sorted(os.listdir(place.out.parent)) == ["in", "out"]


def _never(*arguments, **keywords):
    raise AssertionError("it was done again")


def interrupt_at(stage, monkeypatch, out, tree, **settings) -> None:
    """Prepares a corpus until a stage begins."""

    def interrupt(*arguments, **keywords):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline._Building, stage, interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(out, tree, **settings)


def test_text_that_changed_since_the_kill_is_encoded_again(tree, place, tmp_path, monkeypatch):
    interrupt_at("arrays", monkeypatch, place.out, tree)
    (place.work / "stream.json").unlink()
    (tree / "package3" / "part2" / "file.txt").write_text(numbered_text(999, 5))
    shutil.rmtree(tree / "package5")
    prepare(place.out, tree)
    prepare(tmp_path / "fresh", tree)
    assert all_files(place.out) == all_files(tmp_path / "fresh")


def test_an_unfinished_corpus_is_not_lost_to_other_settings_or_a_second_run(tree, place):
    with pytest.raises(DataError, match=r"too few for rows of --doc_len 65,536, .* shorten --doc_len .*needs --force"):
        prepare(place.out, tree, doc_len=65536)
    with pytest.raises(DataError, match=r"or hold out fewer \(--heldout_docs [\d,]+ at most\)"):
        prepare(place.out.with_name("other"), tree, heldout_docs=100_000, heldout_fraction=None)
    with place.only_run(), pytest.raises(DataError, match="another run is preparing"):
        prepare(place.out, tree)
    with pytest.raises(DataError, match=r"(?s)doc_len: 65536 there, 256 here.*--force"):
        prepare(place.out, tree, doc_len=256)
    assert prepare(place.out, tree, doc_len=256, force=True)["doc_len"] == 256


def test_a_full_disk_names_the_file_and_the_same_command_continues(tree, place, tmp_path, monkeypatch):
    append, calls = shards._append, []

    def full(path, data):
        calls.append(path)
        if len(calls) == 8:
            append(path, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        append(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "_append", full)
        with pytest.raises(DataError, match=r"cannot write .*bin: the disk is full\. Free some space and run"):
            prepare(place.out, tree)
    prepare(place.out, tree)
    prepare(tmp_path / "fresh", tree)
    assert all_files(place.out) == all_files(tmp_path / "fresh")


def test_too_many_open_files_are_put_down_to_the_limit_and_to_no_file(tree, place, monkeypatch):
    def refuse(folder):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    # The fault is in opening a folder. pytest opens other files.
    monkeypatch.setattr(sources, "os", types.SimpleNamespace(**vars(os) | {"scandir": refuse}))
    with pytest.raises(DataError, match=r"^Too many open files: .* fewer --workers"):
        prepare(place.out, tree)


# Folders that hold something already --------------------------------------------------------------------------


def test_a_finished_corpus_is_left_alone_and_force_replaces_it(tree, place, monkeypatch):
    first = prepare(place.out, tree)
    monkeypatch.setattr(pipeline._Building, "manifest", _never)
    write_tree(place.out, {"notes.txt": "mine"})
    assert prepare(place.out, tree) == first
    with pytest.raises(DataError, match=r"out holds notes\.txt, beside a corpus\. Give another --out, or move it away"):
        prepare(place.out, tree, force=True)
    (place.out / "notes.txt").unlink()
    with pytest.raises(DataError, match=r"(?s)seed: 0 there, 1 here.*--force"):
        prepare(place.out, tree, seed=1)
    monkeypatch.undo()
    before = all_files(place.out)
    interrupt_at("arrays", monkeypatch, place.out, tree, seed=1, force=True)
    assert all_files(place.out) == before, "until the new one is complete"
    monkeypatch.setattr("forgetting_transformer.data.prepare.stream.encode_shard", _never)
    assert prepare(place.out, tree, seed=1, force=True)["settings"]["seed"] == 1, "the rebuild goes on"
    monkeypatch.undo()
    own = {"tokenizer": str(place.out / "tokenizer"), "force": True}
    assert prepare(place.out, tree, **own)["settings"]["tokenizer"] == own["tokenizer"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"out/starts.jsonl": "{}", "out/tokenizer/a": "x"}, r"out holds starts\.jsonl, tokenizer, and no corpus"),
        ({"out/manifest.json": '{"settings": {}}'}, r"manifest\.json is not a file of this program"),
        ({".out.preparing/thesis.tex": "x"}, r"\.out\.preparing is not of this program"),
    ],
)
def test_files_of_others_are_refused_with_force_too(tree, tmp_path, files, message):
    write_tree(tmp_path, files)
    for force in (False, True):
        with pytest.raises(DataError, match=message):
            prepare(tmp_path / "out", tree, force=force)
    assert all((tmp_path / name).read_text() == text for name, text in files.items())


def test_a_corpus_inside_an_input_is_not_read(tree, tmp_path):
    first = prepare(tree / "data" / "one", tree)
    second = prepare(tree / "data" / "two", tree)
    assert first["dropped"] == {} and second["texts"] == first["texts"]
    assert second["dropped"] == {MADE_HERE: 1}
