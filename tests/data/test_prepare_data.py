"""scripts/prepare_data.py as a whole: files in, arrays out, whatever the number of workers and kills."""

import errno
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from forgetting_transformer.data.prepare import CorpusError, CorpusSettings, pool, prepare_corpus, stream, writing
from forgetting_transformer.data.prepare import pipeline as prepare_module
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
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"


@pytest.fixture(autouse=True)
def many_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SHARD_BYTES", 4_000)


# What the arrays hold -----------------------------------------------------------------------------------------


def test_rows_are_the_texts_in_path_order_joined_by_end_of_text(tmp_path: Path) -> None:
    tree = package_tree(tmp_path / "in")
    prepare(tmp_path / "out", tree, heldout_docs=3)
    in_train = set().union(*(numbers_in(byte_text(row)) for row in rows(tmp_path / "out", "train")))
    stream_of_train = "".join(f"{numbered_text(number, 12)}\f" for number in sorted(in_train)).encode()
    expected = [stream_of_train[i : i + 512] for i in range(0, len(stream_of_train) - 511, 512)]
    actual = [bytes(np.where(row == 256, 12, row).astype(np.uint8)) for row in rows(tmp_path / "out", "train")]
    assert Counter(actual) == Counter(expected)
    assert actual != expected  # permuted


def test_no_text_is_in_both_arrays_and_whole_folders_are_held_out(tmp_path: Path) -> None:
    tree = package_tree(tmp_path / "in", n_packages=40, n_files=3, n_lines=4)
    prepare(tmp_path / "out", tree, heldout_fraction=0.3)
    train, heldout = (
        set().union(*(numbers_in(byte_text(row)) for row in rows(tmp_path / "out", name)))
        for name in ("train", "heldout")
    )
    assert not train & heldout
    assert len(heldout) > 10
    assert not {number // 3 for number in train} & {number // 3 for number in heldout}, "a package is on both sides"


def test_a_text_longer_than_a_row_spans_several(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "in", {"long.txt": numbered_text(1, 100), "other.txt": numbered_text(2, 30)})
    manifest = prepare(tmp_path / "out", tree, heldout_docs=1)
    full = sum(numbers_in(byte_text(row)) == {1} for row in rows(tmp_path / "out", "train"))
    assert full >= 5
    assert not manifest["split"]["a_text_is_on_both_sides"]


def test_a_single_text_is_cut_and_the_summary_warns(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "in", {"only.txt": numbered_text(1, 400)})
    said: list[str] = []
    settings = CorpusSettings(inputs=(str(tree),), tokenizer="bytes", doc_len=512, heldout_docs=2)
    manifest = prepare_corpus(settings, tmp_path / "out", say=said.append)
    assert manifest["split"]["a_text_is_on_both_sides"]
    assert any("WARNING" in line and "on" in line for line in said)
    end = (numbered_text(1, 400).encode() + b"\f")[-1024:]
    held = sorted(bytes(np.where(r == 256, 12, r).astype(np.uint8)) for r in rows(tmp_path / "out", "heldout"))
    assert held == sorted([end[:512], end[512:]])


def test_files_jsonl_and_parquet_of_the_same_texts_give_the_same_rows(tmp_path: Path) -> None:
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [numbered_text(number, 10) for number in range(100, 140)]
    write_tree(tmp_path / "files", {f"{i}.txt": text for i, text in enumerate(texts, start=100)})
    lines = "".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(texts))
    (tmp_path / "texts.jsonl").write_text(lines)
    with gzip.open(tmp_path / "texts.jsonl.gz", "wt") as file:
        file.write(lines)
    pq.write_table(pa.table({"body": texts}), tmp_path / "texts.parquet")
    inputs = ("files", "texts.jsonl", "texts.jsonl.gz", "texts.parquet")
    for name in inputs:
        prepare(tmp_path / f"out-{name}", tmp_path / name, text_field="body", heldout_docs=2)
    first, *others = (all_files(tmp_path / f"out-{name}") for name in inputs)
    assert all(other == first for other in others)


def test_seed_changes_the_order_of_rows(tmp_path: Path) -> None:
    tree = package_tree(tmp_path / "in")
    hashes = {prepare(tmp_path / str(s), tree, seed=s)["arrays"]["train"]["content_hash"] for s in range(3)}
    assert len(hashes) == 3


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_arrays_have_the_format_asked_for_and_every_chunk_is_a_file(tmp_path: Path, zarr_format: int) -> None:
    # NUL is token 0, the fill value: Zarr would leave out chunks of it.
    (tmp_path / "zeros.jsonl").write_text(json.dumps({"text": "\0" * 40_000}) + "\n" + json.dumps({"text": "x" * 999}))
    form = {"zarr_format": zarr_format, "chunk_docs": 4, "chunk_tokens": 100}
    prepare(tmp_path / "out", tmp_path / "zeros.jsonl", heldout_docs=1, **form)
    array = array_of(tmp_path / "out" / "train.zarr")
    assert array.metadata.zarr_format == zarr_format
    assert (array.dtype, array.shape[1], array.chunks) == (np.uint16, 512, (4, 100))
    chunks = [p for p in (tmp_path / "out" / "train.zarr").rglob("*") if p.is_file() and p.name[0] not in ".z"]
    assert len(chunks) == math.ceil(array.shape[0] / 4) * 6
    assert (array[:] == 0).all(axis=1).any()


def test_chunk_rows_grow_with_the_corpus_up_to_the_paper() -> None:
    chosen = [writing.choose_chunk_docs(n) for n in (1, 1_000, 10_000, 100_000, 6_609_334)]
    assert chosen == [16, 16, 256, 2048, 2048]


# The manifest -------------------------------------------------------------------------------------------------


def test_manifest_states_what_is_on_disk(tmp_path: Path) -> None:
    import hashlib

    tree = package_tree(tmp_path / "in")
    manifest = prepare(tmp_path / "out", tree, heldout_docs=3, chunk_docs=5)
    assert manifest == json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["format_version"] == 1
    assert (manifest["doc_len"], manifest["vocab_size"]) == (512, 257)
    assert manifest["bos_token_id"] == manifest["eos_token_id"] == 256
    for name in ("train", "heldout"):
        stored, stated = rows(tmp_path / "out", name), manifest["arrays"][name]
        digest = hashlib.blake2b(stored.astype("<u2").tobytes(), digest_size=16).hexdigest()
        assert stated["content_hash"] == f"blake2b:{digest}"
        assert (stated["documents"], stated["tokens"]) == (len(stored), stored.size)
        assert stated["max_token_id"] == stored.max()
    assert manifest["arrays"]["heldout"]["documents"] == 3
    n_bytes = sum(len(path.read_bytes()) for path in tree.rglob("*.txt"))
    assert (manifest["texts"], manifest["bytes"]) == (48, n_bytes)
    assert manifest["bytes_per_token"] == n_bytes / (n_bytes + 48)
    assert manifest["sources"] == {str(tree): {"files": 48, "texts": 48, "bytes": n_bytes}}
    n_tokens = sum(array["tokens"] for array in manifest["arrays"].values())
    assert n_tokens + sum(manifest["dropped_tokens"].values()) == n_bytes + 48


def test_unigram_entropy_of_two_equally_frequent_letters(tmp_path: Path) -> None:
    # Three texts of 511 letters and an end each fill one row each; one row is held out.
    texts = [("ab" * 256)[:511], ("ba" * 256)[:511], ("ab" * 255) + "b"]
    write_tree(tmp_path / "in", {f"{i}.txt": text for i, text in enumerate(texts)})
    manifest = prepare(tmp_path / "out", tmp_path / "in", heldout_docs=1)
    counts = Counter(rows(tmp_path / "out", "train").reshape(-1).tolist())
    by_hand = -sum(n / 1024 * math.log(n / 1024) for n in counts.values())
    assert counts[256] == 2 and sum(counts.values()) == 1024
    assert manifest["unigram_entropy_nats"] == pytest.approx(by_hand, rel=1e-12)
    assert manifest["unigram_entropy_nats"] == pytest.approx(math.log(2), abs=0.02)


# The same result in any number of processes and runs ----------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["bytes", "train:300"])
def test_result_is_byte_identical_for_any_number_of_workers(tmp_path: Path, tokenizer: str) -> None:
    tree = package_tree(tmp_path / "in")
    for workers in (1, 3):
        settings = {"tokenizer": tokenizer, "doc_len": 128, "chunk_docs": 4}
        prepare(tmp_path / f"out{workers}", tree, workers=workers, **settings)
    assert all_files(tmp_path / "out1") == all_files(tmp_path / "out3")


KILLS = {
    "before a shard's tokens": (stream, "_append", 7, "before"),
    "in the middle of a shard's tokens": (stream, "_append", 7, "half"),
    "between tokens and lengths": (stream, "_append", 7, "after"),
    "in the middle of a log line": (stream, "_append", 9, "half"),
    "after a log line": (stream, "_append", 9, "after"),
    "before the stream is complete": (prepare_module, "_write_json", 3, "before"),
    "after the stream is complete": (prepare_module, "_write_json", 3, "after"),
    "before a block of rows": (writing, "write_block", 2, "before"),
    "after a block of rows": (writing, "write_block", 3, "after"),
    "before the manifest": (prepare_module, "_write_json", 4, "before"),
    "between two renames": (os, "rename", 2, "before"),
    "before the last rename": (prepare_module.shutil, "rmtree", -1, "before"),
}


def test_names_that_are_not_utf_8_are_like_any_others(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    write_tree(tmp_path / name / "in", {name: "text " * 200, "b": "other " * 200})
    prepare(tmp_path / name / "out", tmp_path / name / "in", heldout_docs=1)
    assert len(rows(tmp_path / name / "out", "train")) > 0


@pytest.mark.parametrize("name", [".work/thesis.tex", ".lock"])
def test_hidden_files_of_others_in_the_folder_are_left_alone(tmp_path, name):
    (tmp_path / "out" / name).parent.mkdir(parents=True)
    (tmp_path / "out" / name).write_text("years of work")
    if name == ".lock":
        prepare(tmp_path / "out", package_tree(tmp_path / "in"))
    else:
        with pytest.raises(CorpusError, match=r"\.work, which this program did not make.* another --out"):
            prepare(tmp_path / "out", package_tree(tmp_path / "in"), force=True)
    assert (tmp_path / "out" / name).read_text() == "years of work"


def _prepare_and_die(out: Path, tree: Path, kill: str) -> None:
    """In a child process: prepare, and die by SIGKILL at the n-th call of a function."""
    module, name, nth, when = KILLS[kill]
    stream.SHARD_BYTES = 4_000
    original = getattr(module, name)
    calls = 0

    def dying(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        last = nth == -1 and (out / "manifest.json").exists()
        if calls != nth and not last:
            return original(*args, **kwargs)
        if when == "half":
            original(args[0], args[1][: len(args[1]) // 2])
        if when == "after":
            original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(module, name, dying)
    prepare(out, tree, tokenizer="train:300", doc_len=128, chunk_docs=4)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus that was never interrupted, at `in` and `out` of the folder."""
    folder = tmp_path_factory.mktemp("straight")
    prepare(folder / "out", package_tree(folder / "in"), tokenizer="train:300", doc_len=128, chunk_docs=4)
    return folder


@pytest.mark.parametrize("kill", KILLS)
def test_killed_run_continues_to_the_same_result(straight: Path, tmp_path: Path, kill: str) -> None:
    child = server.Process(target=_prepare_and_die, args=(tmp_path / "out", straight / "in", kill))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert (tmp_path / "out" / "manifest.json").exists() == (kill == "before the last rename")
    prepare(tmp_path / "out", straight / "in", tokenizer="train:300", doc_len=128, chunk_docs=4)
    assert all_files(tmp_path / "out") == all_files(straight / "out")
    parts = ["heldout.sha256", "heldout.zarr", "manifest.json", "tokenizer", "train.sha256", "train.zarr"]
    assert sorted(os.listdir(tmp_path / "out")) == parts


#: The script, which stops for ever when it has recorded its second shard.
STOPS_IN_THE_MIDDLE = f"""
import runpy, sys, time
from forgetting_transformer.data.prepare import stream
stream.SHARD_BYTES, append, appended = 4000, stream._append, []
def append_and_stop(file, content):
    append(file, content)
    appended.append(file)
    while len(appended) == 6:
        time.sleep(0.1)
stream._append = append_and_stop
sys.argv[0] = {str(SCRIPT)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_killing_the_script_ends_its_workers_and_the_same_command_continues(tmp_path: Path) -> None:
    write_tree(tmp_path / "in", {f"{i:04}.txt": numbered_text(i, 40) for i in range(40)})
    options = [str(tmp_path / "in"), "--tokenizer", "train:1000", "--doc_len", "1024", "--workers", "2"]
    command = [sys.executable, "-c", STOPS_IN_THE_MIDDLE, *options]
    running = subprocess.Popen([*command, "--out", str(tmp_path / "out")])
    log = tmp_path / "out" / ".work" / "stream" / "shards.jsonl"
    wait_until(lambda: log.exists() and log.read_text().count("\n") == 2, lambda: running.poll() is None)
    workers = _descendants(running.pid)
    running.kill()
    running.wait()
    assert workers
    assert not (tmp_path / "out" / "manifest.json").exists()
    wait_until(lambda: not any(map(_is_running, workers)), said="workers live on")
    for out in ("out", "again"):
        prepare(tmp_path / out, tmp_path / "in", tokenizer="train:1000", doc_len=1024)
    assert all_files(tmp_path / "out") == all_files(tmp_path / "again")


def _descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(child) for child in children.read_text().split()] if children.exists() else []
    return found + [grandchild for child in found for grandchild in _descendants(child)]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_text_that_changed_since_the_kill_is_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = package_tree(tmp_path / "in")
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_split", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path / "out", tree)
    (tmp_path / "out" / ".work" / "stream.json").unlink()
    (tree / "package3" / "part2" / "file.txt").write_text(numbered_text(999, 5))
    shutil.rmtree(tree / "package5")
    prepare(tmp_path / "out", tree)
    prepare(tmp_path / "fresh", tree)
    assert all_files(tmp_path / "out") == all_files(tmp_path / "fresh")


def _interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def test_committed_tokens_that_got_lost_are_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = package_tree(tmp_path / "in")
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_split", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path / "out", tree)
    (tmp_path / "out" / ".work" / "stream.json").unlink()
    os.truncate(tmp_path / "out" / ".work" / "stream" / "tokens.bin", 11_111)
    prepare(tmp_path / "out", tree)
    prepare(tmp_path / "fresh", tree)
    assert all_files(tmp_path / "out") == all_files(tmp_path / "fresh")


def test_input_that_changed_after_the_tokenizer_was_trained_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = package_tree(tmp_path / "in")
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_make_stream", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path / "out", tree, tokenizer="train:300")
    (tree / "package3" / "part2" / "file.txt").write_text(numbered_text(999, 5))
    with pytest.raises(CorpusError, match=r"the input changed after the tokenizer was trained.*--force"):
        prepare(tmp_path / "out", tree, tokenizer="train:300")
    prepare(tmp_path / "out", tree, tokenizer="train:300", force=True)


def test_unfinished_corpus_keeps_its_tokens_when_the_layout_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = package_tree(tmp_path / "in")
    with pytest.raises(CorpusError, match="too few for a row of --doc_len 65,536"):
        prepare(tmp_path / "out", tree, doc_len=65536)
    prepare(tmp_path / "fresh", tree, doc_len=256)
    monkeypatch.setattr(stream, "encode_shard", _interrupt)
    prepare(tmp_path / "out", tree, doc_len=256)
    assert all_files(tmp_path / "out") == all_files(tmp_path / "fresh")


def test_a_first_try_that_failed_early_does_not_stand_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": numbered_text(i, 9)}) + "\n" for i in range(9)))
    with pytest.raises(CorpusError, match="--text_field"):
        prepare(tmp_path / "out", tmp_path / "a.jsonl")
    assert prepare(tmp_path / "out", tmp_path / "a.jsonl", text_field="body")["texts"] == 9


def test_an_unfinished_corpus_of_other_texts_is_refused(tmp_path: Path) -> None:
    tree = package_tree(tmp_path / "in")
    with pytest.raises(CorpusError, match="too few"):
        prepare(tmp_path / "out", tree, doc_len=65536)
    with pytest.raises(CorpusError, match=r"(?s)exclude: \[\] there, \['package1'\] here.*--force"):
        prepare(tmp_path / "out", tree, exclude=("package1",))


def test_full_disk_names_the_file_and_the_same_command_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, append, calls = package_tree(tmp_path / "in"), stream._append, []

    def full(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) == 8:
            append(path, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        append(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(stream, "_append", full)
        with pytest.raises(CorpusError, match=r"cannot write .*bin: the disk is full\. Free some space and run"):
            prepare(tmp_path / "out", tree)
    prepare(tmp_path / "out", tree)
    prepare(tmp_path / "fresh", tree)
    assert all_files(tmp_path / "out") == all_files(tmp_path / "fresh")


def test_limits_of_the_system_are_no_files_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def many(path: Path, data: bytes) -> None:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(stream, "_append", many)
    with pytest.raises(CorpusError, match=r"^Too many open files: this process may have .* \(`ulimit -n`\); raise it"):
        prepare(tmp_path / "out", package_tree(tmp_path / "in"))

    def full(*_: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # of a semaphore

    monkeypatch.setattr(pool, "ProcessPoolExecutor", full)
    with pytest.raises(CorpusError, match=r"^/dev/shm \(.*`--shm-size`, or use --workers 1\.$"):
        prepare(tmp_path / "out", tmp_path / "in", workers=2)


# Folders that hold something already --------------------------------------------------------------------------


def test_finished_corpus_is_left_alone_and_other_settings_are_refused(tmp_path: Path) -> None:
    tree, said = package_tree(tmp_path / "in"), []
    first = prepare(tmp_path / "out", tree)
    shutil.rmtree(tree)  # nothing is read again
    settings = CorpusSettings(inputs=(str(tree),), tokenizer="bytes", doc_len=512)
    assert prepare_corpus(settings, tmp_path / "out", workers=2, say=said.append) == first
    assert "already holds this corpus" in said[0]
    with pytest.raises(CorpusError, match=r"(?s)seed: 0 there, 1 here.*--force"):
        prepare(tmp_path / "out", tree, seed=1)
    package_tree(tree)
    assert prepare(tmp_path / "out", tree, seed=1, force=True)["settings"]["seed"] == 1


def test_arrays_of_someone_else_are_not_overwritten(tmp_path: Path) -> None:
    tree = package_tree(tmp_path / "in")
    (tmp_path / "out" / "train.zarr").mkdir(parents=True)
    with pytest.raises(CorpusError, match=r"holds train\.zarr without a manifest\.json"):
        prepare(tmp_path / "out", tree)


def test_manifest_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text("{}")
    with pytest.raises(CorpusError, match=r"manifest\.json is not a file of this program, or it is damaged"):
        prepare(tmp_path / "out", package_tree(tmp_path / "in"))


def test_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    tree = package_tree(tmp_path / "in")
    with (
        prepare_module._only_run(_made(tmp_path / "out")),
        pytest.raises(CorpusError, match="another run is preparing"),
    ):
        prepare(tmp_path / "out", tree)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


# The command --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("prepare_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_command_prepares_and_sums_up(script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = package_tree(tmp_path / "in")
    (tree / "notes.md").write_text("left out")
    (tree / "package1" / "empty.txt").touch()
    arguments = f"{tree} --glob *.txt --exclude package5 --tokenizer bytes --doc_len 256 --heldout_docs 2 --workers 1"
    assert script.main([*arguments.split(), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    for expected in ("40 texts", "2 documents × 256", "unigram entropy", "1 × empty text", "does not match --glob"):
        assert expected in printed.out
    for stage in ("tokenising: ", "writing arrays: ", "reading arrays back: "):
        assert stage in printed.err


def test_command_reports_errors_without_a_traceback(script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == f"error: input {tmp_path / 'nowhere'} does not exist.\n"


def test_help_shows_examples_and_what_happens(script, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--help"])
    printed = capsys.readouterr().out
    assert "examples:" in printed and "what happens to the texts:" in printed


@pytest.mark.parametrize(("text", "number"), [("500", 500), ("30MB", 30_000_000), ("1.5g", 1_500_000_000)])
def test_amounts_of_bytes(script, text: str, number: int) -> None:
    assert script.number_of_bytes(text) == number
