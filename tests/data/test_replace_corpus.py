"""scripts/prepare_data.py --force, and what else lies in OUT: nothing is lost before the new corpus is complete."""

import importlib.util
import json
import os
import re
import shutil
import signal
from pathlib import Path
from types import ModuleType

import pytest

from forgetting_transformer.data.prepare import CorpusError, CorpusSettings, output, prepare_corpus, sources
from forgetting_transformer.data.prepare import pipeline as prepare_module
from tests.data.corpus_helpers import all_files, numbered_text, package_tree, prepare, rows, write_tree
from tests.processes import server

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"
FINISHED = sorted((*output.PARTS, "manifest.json"))


pytestmark = pytest.mark.slow


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return package_tree(tmp_path / "in", n_packages=3, n_files=3, n_lines=8)


@pytest.fixture
def out(tmp_path: Path, tree: Path) -> Path:
    """A finished corpus."""
    prepare(tmp_path / "out", tree, doc_len=64)
    return tmp_path / "out"


def everything(folder: Path) -> dict[str, bytes]:
    """Every file, the manifest too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def visible(folder: Path) -> dict[str, bytes]:
    """What a reader of a corpus sees: all but .work."""
    return {name: content for name, content in everything(folder).items() if not name.startswith(".")}


# A build that fails or is killed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"include": ("*.nothing",)}, "found no text"),
        ({"tokenizer": "no-such-organisation/no-such-tokenizer"}, "cannot load the tokenizer"),
        ({"doc_len": 1 << 20}, "too few for a row of --doc_len"),
    ],
)
def test_a_mistake_with_force_leaves_the_old_corpus_whole(
    tree: Path, out: Path, changes: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = everything(out)
    with pytest.raises(CorpusError, match=message):
        prepare(out, tree, force=True, **{"doc_len": 64, **changes})
    assert visible(out) == before
    # The same command without the mistake does what was meant.
    assert prepare(out, tree, doc_len=32, force=True)["doc_len"] == 32
    assert sorted(os.listdir(out)) == FINISHED


def test_a_typo_in_the_input_with_force_leaves_the_old_corpus_whole(tree: Path, out: Path) -> None:
    before = everything(out)
    with pytest.raises(CorpusError, match=r"input .*im does not exist"):
        prepare(out, tree.with_name("im"), doc_len=64, force=True)
    assert everything(out) == before


@pytest.mark.parametrize(
    "changes", [{"include": ("*.nothing",)}, {"tokenizer": "no-such-organisation/no-such-tokenizer"}]
)
def test_a_mistake_with_force_leaves_unfinished_work_too(
    tree: Path, tmp_path: Path, changes: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CorpusError, match="too few"):
        prepare(tmp_path / "out", tree, doc_len=1 << 20)
    before = everything(tmp_path / "out")
    with pytest.raises(CorpusError):
        prepare(tmp_path / "out", tree, force=True, **changes)
    assert everything(tmp_path / "out") == before


def test_a_corpus_is_rebuilt_with_its_own_tokenizer(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(out, tree, doc_len=64, tokenizer="train:280")
    before = (out / "tokenizer" / "tokenizer.json").read_bytes()
    again = prepare(out, tree, doc_len=32, tokenizer=str(out / "tokenizer"), force=True)
    assert (again["doc_len"], again["tokenizer"]["kind"]) == (32, "loaded")
    assert json.loads((out / "tokenizer" / "tokenizer.json").read_bytes())["model"] == json.loads(before)["model"]


def test_a_rebuild_in_the_same_process_uses_its_own_tokenizer(tree: Path, tmp_path: Path) -> None:
    prepare(tmp_path / "out", tree, doc_len=64, tokenizer="train:280")
    texts = {f"{i}.txt": numbered_text(i, 9).upper() for i in range(9)}
    other = write_tree(tmp_path / "other", texts)  # as many ids, but others
    prepare(tmp_path / "out", other, doc_len=64, tokenizer="train:280", force=True)
    prepare(tmp_path / "fresh", other, doc_len=64, tokenizer="train:280")
    assert all_files(tmp_path / "out") == all_files(tmp_path / "fresh")


def test_a_corpus_is_rebuilt_from_texts_inside_it(tree: Path, tmp_path: Path) -> None:
    texts = package_tree(tmp_path / "out" / "texts", n_packages=3, n_files=3, n_lines=8)
    first = prepare(tmp_path / "out", texts, doc_len=64)
    again = prepare(tmp_path / "out", texts, doc_len=64, force=True)
    assert again["arrays"] == first["arrays"]
    assert all_files(texts) == all_files(tree)


def test_what_lies_in_the_working_folder_is_no_input(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="too few"):
        prepare(tmp_path / "out", tree, doc_len=1 << 20)
    inside = tmp_path / "out" / ".work" / "tokenizer"
    before = everything(tmp_path / "out")
    with pytest.raises(CorpusError, match=r"--tokenizer .*\.work/tokenizer lies in .*\.work, which"):
        prepare(tmp_path / "out", tree, doc_len=64, tokenizer=str(inside), force=True)
    with pytest.raises(CorpusError, match=r"input .*\.work/tokenizer lies in .*\.work, which"):
        prepare(tmp_path / "out", inside, doc_len=64, force=True)
    assert everything(tmp_path / "out") == before


def _die_at_rename(out: Path, tree: Path, nth: int) -> None:
    """In a child process: replace the corpus, and die by SIGKILL before the n-th rename."""
    rename, calls = os.rename, 0

    def dying(*names: object) -> None:
        nonlocal calls
        calls += 1
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*names)

    os.rename = dying
    prepare(out, tree, doc_len=32, force=True)


#: The build is called complete, the old manifest moves, ten times an old or a new part, and the new manifest.
RENAMES = 1 + 1 + 2 * len(output.PARTS) + 1


@pytest.mark.parametrize("nth", range(1, RENAMES + 1))
def test_killed_at_any_rename_the_next_start_finishes(
    tree: Path, out: Path, tmp_path: Path, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path / "fresh", tree, doc_len=32)
    before, after = all_files(out), all_files(tmp_path / "fresh")
    child = server.Process(target=_die_at_rename, args=(out, tree, nth))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    if (out / "manifest.json").exists():  # then all that is beside it is its own
        doc_len = json.loads((out / "manifest.json").read_text())["doc_len"]
        assert doc_len == (64 if nth <= 2 else 32)
        assert {name: content for name, content in visible(out).items() if name != "manifest.json"} == (
            before if doc_len == 64 else after
        )
    monkeypatch.setattr(prepare_module, "_build", _never)  # the build was complete
    assert prepare(out, tree, doc_len=32, force=True)["doc_len"] == 32
    assert all_files(out) == after
    assert sorted(os.listdir(out)) == FINISHED


def _never(*arguments: object) -> None:
    raise AssertionError("it was built again")


def test_no_more_renames_than_the_test_above_kills_at(tree: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, calls = os.rename, []
    monkeypatch.setattr(os, "rename", lambda *names: (calls.append(names), rename(*names)))
    prepare(out, tree, doc_len=32, force=True)
    assert len(calls) == RENAMES


def test_killed_while_it_deletes_the_old_corpus_it_is_not_built_again(
    tree: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmtree = shutil.rmtree

    def dies(folder: Path, **keywords: object) -> None:
        if folder.name == output.REPLACED:
            rmtree(folder / "train.zarr")
            raise KeyboardInterrupt
        rmtree(folder, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", dies)
        with pytest.raises(KeyboardInterrupt):
            prepare(out, tree, doc_len=32, force=True)
    after = visible(out)
    monkeypatch.setattr(prepare_module, "_build", _never)
    prepare(out, tree, doc_len=32, force=True)
    assert everything(out) == after
    with pytest.raises(AssertionError, match="it was built again"):  # from now on
        prepare(out, tree, doc_len=32, force=True)


def test_what_cannot_be_deleted_is_left_to_a_later_start(
    tree: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS keeps a file that a reader of the old corpus has open."""
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda folder, **keywords: None)
        assert prepare(out, tree, doc_len=32, force=True)["doc_len"] == 32
        with pytest.raises(CorpusError, match=r"\.work cannot be deleted: a program may still read the corpus that"):
            prepare(out, tree, doc_len=16, force=True)
    assert os.listdir(out / ".work")
    prepare(out, tree, doc_len=32)
    assert sorted(os.listdir(out)) == FINISHED


def test_a_part_that_cannot_be_renamed_is_found_before_the_swap(
    tree: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = everything(out)
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "ismount", lambda path: path == out / "train.zarr")
        with pytest.raises(CorpusError, match=r"train\.zarr is a mount point, which cannot be renamed\. Unmount it"):
            prepare(out, tree, doc_len=32, force=True)
    assert visible(out) == before
    assert prepare(out, tree, doc_len=32, force=True)["doc_len"] == 32


def test_a_link_in_the_place_of_work_is_refused(tree: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (out / ".work").symlink_to(tmp_path / "scratch")
    before = everything(out)
    with pytest.raises(CorpusError, match=r"\.work is a link, which this program did not make"):
        prepare(out, tree, doc_len=32, force=True)
    assert everything(out) == before


@pytest.mark.parametrize("nth", [3, 5, RENAMES])
def test_killed_in_the_swap_any_start_finishes_it_first(tree: Path, out: Path, nth: int) -> None:
    child = server.Process(target=_die_at_rename, args=(out, tree, nth))
    child.start()
    child.join()
    with pytest.raises(CorpusError, match="does not exist"):
        prepare(out, tree.with_name("im"), doc_len=16, force=True)
    assert json.loads((out / "manifest.json").read_text())["doc_len"] == 32
    assert rows(out, "train").shape[1] == 32
    assert sorted(os.listdir(out)) == FINISHED


def test_killed_in_the_swap_a_rebuild_with_its_own_tokenizer_finishes(
    tree: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--tokenizer out/tokenizer` names no folder at that moment."""
    monkeypatch.chdir(out.parent)
    settings = {"doc_len": 32, "tokenizer": "out/tokenizer", "force": True}
    with monkeypatch.context() as patch:
        rename = os.rename
        patch.setattr(
            os, "rename", lambda one, two: _interrupt() if one.name == two.name == "tokenizer" else rename(one, two)
        )
        with pytest.raises(KeyboardInterrupt):
            prepare(out, tree, **settings)
    os.rename(out / "tokenizer", out / ".work" / "replaced" / "tokenizer")  # what came next
    monkeypatch.setattr(prepare_module, "_build", _never)
    assert prepare(out, tree, **settings)["doc_len"] == 32


def interrupt_at(stage: str, monkeypatch: pytest.MonkeyPatch, out: Path, tree: Path, **settings: object) -> None:
    """Prepares a corpus until a function of pipeline.py is called."""
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, stage, _interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(out, tree, **settings)


def _interrupt(*arguments: object, **keywords: object) -> None:
    raise KeyboardInterrupt


def test_a_killed_rebuild_goes_on_with_force_again(tree: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = everything(out)
    interrupt_at("_split", monkeypatch, out, tree, seed=3, force=True)
    assert visible(out) == before
    monkeypatch.setattr(prepare_module.stream, "encode_shard", _never)
    said: list[str] = []
    settings = CorpusSettings(inputs=(str(tree),), tokenizer="bytes", doc_len=32, seed=3)
    assert prepare_corpus(settings, out, force=True, say=said.append)["doc_len"] == 32
    assert "continuing the unfinished corpus" in said[0] and "Its texts are not read again; delete " in said[1]


def test_a_killed_rebuild_is_kept_by_a_start_without_force(
    tree: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at("_split", monkeypatch, out, tree, doc_len=64, force=True)
    before = everything(out)
    said: list[str] = []
    settings = CorpusSettings(inputs=(str(tree),), tokenizer="bytes", doc_len=64)
    prepare_corpus(settings, out, say=said.append)
    assert "--force goes on with it" in said[1]
    assert everything(out) == before


def test_force_starts_an_unfinished_corpus_over(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at("_split", monkeypatch, tmp_path / "out", tree, doc_len=64)
    write_tree(tree, {"package0/part0/file.txt": numbered_text(99, 20)})
    prepare(tmp_path / "out", tree, doc_len=64, force=True)
    prepare(tmp_path / "fresh", tree, doc_len=64)
    assert all_files(tmp_path / "out") == all_files(tmp_path / "fresh")


def test_a_rebuild_whose_input_changed_is_started_over_by_force(
    tree: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = everything(out)
    interrupt_at("_make_stream", monkeypatch, out, tree, doc_len=64, tokenizer="train:280", force=True)
    write_tree(tree, {"package0/part0/file.txt": numbered_text(99, 20)})
    with pytest.raises(CorpusError, match=r"input changed after the tokenizer was trained.*--force"):
        prepare(out, tree, doc_len=64, tokenizer="train:280", force=True)
    assert visible(out) == before
    assert prepare(out, tree, doc_len=64, tokenizer="train:280", force=True)["vocab_size"] == 280


def test_killed_while_it_deletes_its_work_the_next_start_goes_on_deleting(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what was to go must not be taken for work to continue."""
    with pytest.raises(CorpusError, match="too few"):
        prepare(tmp_path / "out", tree, doc_len=1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path / "out", tree, doc_len=64, force=True)
    prepare(tmp_path / "out", tree, doc_len=64)
    prepare(tmp_path / "fresh", tree, doc_len=64)
    assert all_files(tmp_path / "out") == all_files(tmp_path / "fresh")
    assert sorted(os.listdir(tmp_path / "out")) == FINISHED


def test_a_corpus_that_an_earlier_version_was_publishing_is_finished(tree: Path, out: Path) -> None:
    """It had only settings.json, and moved the parts without a note of it."""
    before = everything(out)
    work = out / ".work"
    work.mkdir()
    settings = json.loads((out / "manifest.json").read_text())["settings"]
    (work / "settings.json").write_text(json.dumps(settings))
    for name in ("train.zarr", "heldout.sha256", "manifest.json"):
        os.rename(out / name, work / name)
    prepare(out, tree, doc_len=64)
    assert everything(out) == before


# Files of others ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "manifest", [{"mine": 1}, {"settings": {}}, {"vocab_size": 50257, "bos_token_id": 50256}, [], "no JSON"]
)
def test_a_manifest_of_something_else_is_refused_with_force_too(tree: Path, out: Path, manifest: object) -> None:
    (out / "manifest.json").write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))
    before = everything(out)
    for force in (False, True):
        with pytest.raises(CorpusError, match=r"manifest\.json is not a file of this program, or it is damaged"):
            prepare(out, tree, doc_len=64, force=force)
    assert everything(out) == before


@pytest.mark.parametrize("force", [False, True])
def test_arrays_without_a_manifest_are_refused_with_force_too(tree: Path, tmp_path: Path, force: bool) -> None:
    write_tree(tmp_path / "out", {"train.zarr/mine": "x"})
    with pytest.raises(CorpusError, match=r"holds train\.zarr without a manifest\.json"):
        prepare(tmp_path / "out", tree, doc_len=64, force=force)
    assert everything(tmp_path / "out") == {"train.zarr/mine": b"x"}


@pytest.mark.parametrize(
    ("name", "replaces"),
    [("train.sha256", False), ("tokenizer/mine.txt", False), ("manifest.json", False), ("manifest.json", True)],
)
def test_what_others_put_there_during_the_build_is_left_alone(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, replaces: bool
) -> None:
    out, build = tmp_path / "out", prepare_module._build
    if replaces:
        prepare(out, tree, doc_len=64)

    def builds(*arguments: object) -> dict:
        manifest = build(*arguments)
        write_tree(out, {name: "mine"})
        return manifest

    monkeypatch.setattr(prepare_module, "_build", builds)
    with pytest.raises(CorpusError, match=r"something else wrote it|not a file of this program"):
        prepare(out, tree, doc_len=32, force=replaces)
    assert (out / name).read_text() == "mine"
    (out / name).unlink()
    if name.startswith("tokenizer"):
        (out / "tokenizer").rmdir()
    if not replaces:  # else nothing says any more whose the parts are
        prepare(out, tree, doc_len=32)
        assert sorted(os.listdir(out)) == FINISHED


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize("place", ["run", "run/tokenizer", "run/checkpoints/mine"])
def test_the_folder_of_a_run_is_refused(
    script: ModuleType, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, force: list[str]
) -> None:
    run = write_tree(tmp_path / "run", {"starts.jsonl": "{}\n", "tokenizer/tokenizer.json": "{}"})
    before = everything(run)
    arguments = ["--tokenizer", "bytes", "--doc_len", "64", "--out", str(tmp_path / place), "--workers", "1", *force]
    assert script.main([str(tree), *arguments]) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(r"error: --out=.* is .*training run.*: choose another --out\.\n", said)
    assert everything(run) == before and not (run / "checkpoints").exists()


@pytest.mark.parametrize("force", [False, True])
def test_the_tokenizer_of_a_run_is_never_replaced(tree: Path, tmp_path: Path, force: bool) -> None:
    run = write_tree(tmp_path / "run", {"starts.jsonl": "{}\n", "tokenizer/tokenizer.json": "{}"})
    before = everything(run)
    with pytest.raises(CorpusError, match=r"holds tokenizer without a manifest\.json"):
        prepare(run, tree, doc_len=64, force=force)
    assert everything(run) == before


def test_a_run_around_a_corpus_is_no_hindrance(script: ModuleType, tree: Path, tmp_path: Path) -> None:
    write_tree(tmp_path / "run", {"starts.jsonl": "{}\n"})
    arguments = [str(tree), "--tokenizer", "bytes", "--out", str(tmp_path / "run" / "data"), "--workers", "1"]
    assert script.main([*arguments, "--doc_len", "64"]) == 0
    assert script.main([*arguments, "--doc_len", "32", "--force"]) == 0


# A corpus inside an input -------------------------------------------------------------------------------------


def test_a_corpus_inside_an_input_is_not_read(tree: Path, tmp_path: Path) -> None:
    first = prepare(tree / "data" / "one", tree, doc_len=64)
    write_tree(tree / "data" / "one", {"notes.txt": numbered_text(77, 3)})
    second = prepare(tree / "data" / "two", tree, doc_len=64)
    assert first["dropped"] == {}
    assert second["texts"] == first["texts"] + 1  # the user's notes are nobody's corpus
    assert second["dropped"] == {sources.MADE_HERE: len(FINISHED)}
    assert prepare(tmp_path / "out", tree, doc_len=64)["dropped"] == {sources.MADE_HERE: 2 * len(FINISHED)}


def test_a_corpus_that_is_being_published_is_not_read(tree: Path, tmp_path: Path) -> None:
    prepare(tree / "one", tree, doc_len=64)
    (tree / "one" / ".work").mkdir()
    os.rename(tree / "one" / "manifest.json", tree / "one" / ".work" / "manifest.json")
    assert prepare(tmp_path / "out", tree, doc_len=64)["texts"] == 9


def test_another_manifest_is_read_as_text(tree: Path, tmp_path: Path) -> None:
    write_tree(tree, {"app/manifest.json": '{"name": "app"}', "app/tokenizer/a.py": "import this\n"})
    assert prepare(tmp_path / "out", tree, doc_len=64)["texts"] == 11


def test_texts_and_corpus_in_one_folder(tree: Path, tmp_path: Path) -> None:
    prepare(tmp_path / "fresh", tree, doc_len=64)
    first = prepare(tree, tree, doc_len=64)
    assert first["texts"] == 9
    again = prepare(tree, tree, doc_len=64, force=True)
    for of in (first, again):
        del of["seconds"]
    assert again == first  # the parts that are there by now changed nothing
    found = {name: content for name, content in all_files(tree).items() if not name.startswith("package")}
    assert found == all_files(tmp_path / "fresh")


def test_near_duplicates_are_not_looked_for_in_a_corpus(tree: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasketch", reason="needs the data extra")
    prepare(tree / "one", tree, doc_len=64)
    assert prepare(tmp_path / "out", tree, doc_len=64, dedup=0.9)["dropped"] == {sources.MADE_HERE: 6}
