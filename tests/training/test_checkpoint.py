"""A checkpoint is whole or absent, whenever its writer dies, and no code runs when it is read."""

import enum
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from forgetting_transformer.training.checkpoint import Checkpointer
from forgetting_transformer.training.checkpoint.folder import CheckpointError, newest_valid
from forgetting_transformer.training.checkpoint.host_copy import HostCopy, own_pages
from forgetting_transformer.training.checkpoint.safe_reader import UnsafeCheckpointError, read_tensors
from forgetting_transformer.training.checkpoint.state import share
from tests.training.conftest import STEP, changed, refused, train
from tests.waiting import HANG

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import checkpoints


def trained(steps: int) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def save(folder: Path, steps: int, background: bool = False) -> dict[str, torch.Tensor]:
    folder.mkdir(parents=True, exist_ok=True)
    model, optimizer = trained(steps)
    checkpointer = Checkpointer(folder, 1, 0, 1, background=background)
    windows = {"position_loss": torch.full((3,), float(steps))}
    checkpointer.save(steps, model, optimizer, {"token_count": steps}, windows, permanent=False)
    with torch.no_grad():
        model.weight.fill_(7.0)  # training goes on
    saved = checkpointer.finished(wait=True)
    assert saved is not None and saved.error is None, saved
    checkpointer.close()
    return {f"model.{name}": tensor for name, tensor in trained(steps)[0].state_dict().items()}


def assert_holds(path: Path, expected: dict[str, torch.Tensor]) -> None:
    tensors = read_tensors(path / "state")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


#: What changes a file system, as Python's audit events.
_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "shutil.rmtree")


def _save_and_die(folder: Path, moment: int, background: bool) -> None:
    """Saves step 2 and is killed just before its change number `moment` of the folder."""
    count = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        changes = event in _CHANGES
        if event == "open":
            _, mode, flags = arguments
            changes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) if isinstance(flags, int) else "w" in mode
        if changes and str(folder) in str(arguments[0]):
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)  # threads that the parent started are not there after a fork, and would be waited for
    sys.addaudithook(hook)
    save(folder, 2, background)


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_death_between_any_two_writes_leaves_a_whole_checkpoint(tmp_path, background):
    """Every change to the folder in turn: folders, shards, manifest, renames, deletions."""
    context = multiprocessing.get_context("fork")
    before = save(tmp_path / "first", 1)
    after = None
    for moment in range(1, 60):
        folder = tmp_path / f"killed-{moment}"
        shutil.copytree(tmp_path / "first", folder)
        process = context.Process(target=_save_and_die, args=(folder, moment, background))
        process.start()
        process.join(HANG)
        found = newest_valid(folder)
        assert found is not None, f"nothing left after a death at change {moment}"
        if found.step == 1:
            assert_holds(found.path, before)
        else:
            after = after or save(tmp_path / "second", 2)
            assert_holds(found.path, after)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        Checkpointer(folder, 1, 0, 1).clean()
        save(folder, 2)  # and the next life saves the same step again
        assert newest_valid(folder).step == 2
        assert [path.name for path in folder.iterdir()] == [f"step-{2:015d}"], "wreckage is cleared away"
    assert process.exitcode == 0 and moment > 12, "a save is at least a dozen changes, and all were tried"


def test_what_training_changes_meanwhile_is_not_saved(tmp_path):
    expected = save(tmp_path, 3, background=True)
    assert_holds(newest_valid(tmp_path).path, expected)


def test_one_save_is_in_flight_at_a_time_and_its_error_is_told_once(tmp_path, monkeypatch):
    model, optimizer = trained(1)
    checkpointer = Checkpointer(tmp_path, 1, 0, 1, background=True)
    hold = threading.Event()

    def write(*_: object) -> None:
        hold.wait(HANG)
        raise CheckpointError("no room")

    monkeypatch.setattr(checkpointer._writer, "write", write)
    checkpointer.save(1, model, optimizer, {}, {}, permanent=False)
    assert checkpointer.finished() is None
    with pytest.raises(RuntimeError, match="one is in flight at a time"):
        checkpointer.save(2, model, optimizer, {}, {}, permanent=False)
    hold.set()
    saved = checkpointer.finished(wait=True)
    assert saved.step == 1 and str(saved.error) == "no room"
    assert checkpointer.finished(wait=True) is None


def test_the_copy_is_reused():
    copy, tensors = HostCopy(), {"a": torch.arange(6.0), "b": torch.ones(2, 3)}
    copy.reserve(tensors)
    first, _ = copy.take(tensors)
    tensors["a"].zero_()
    assert first["a"].tolist() == list(range(6))
    second, _ = copy.take(tensors)
    assert second["a"].data_ptr() == first["a"].data_ptr() and not second["a"].any()


def test_memory_to_lock_has_pages_of_its_own_and_no_more_bytes_than_it_holds():
    """What lets it be locked tensor by tensor, and written without another copy."""
    import mmap

    for like in (torch.zeros(()), torch.zeros(3, 5), torch.zeros(5000, dtype=torch.float64)):
        copy = own_pages(like)
        assert copy.shape == like.shape and copy.dtype == like.dtype and copy.data_ptr() % mmap.PAGESIZE == 0
        assert copy.untyped_storage().nbytes() == like.nbytes
        assert torch.equal(copy.copy_(like + 1), like + 1)


def test_ranks_share_the_writing_of_what_all_of_them_hold():
    tensors = {f"t{n}": torch.zeros(10 * (n + 1)) for n in range(7)}
    shares = [share(tensors, rank, 3) for rank in range(3)]
    assert sorted(name for part in shares for name in part) == sorted(tensors)
    sizes = [sum(t.nbytes for t in part.values()) for part in shares]
    assert max(sizes) < 1.6 * min(sizes)


class _Attack:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def _forge(path: Path, change) -> None:
    """A stranger changes the metadata, and the manifest so that it fits."""
    from forgetting_transformer.training.checkpoint.folder import MANIFEST, checksum

    file = path / "state/.metadata"
    metadata = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(change(metadata)))
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"]["state/.metadata"] = checksum(file)
    (path / MANIFEST).write_text(json.dumps(manifest))


class _OldPickler(pickle.Pickler):
    """Pickles enumerations as Python 3.11.2 does, which Debian 12 has."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_a_checkpoint_that_an_older_python_wrote_is_read(tmp_path):
    save(tmp_path / "run", 1)
    state = newest_valid(tmp_path / "run").path / "state"
    before = read_tensors(state)
    metadata = pickle.loads((state / ".metadata").read_bytes())
    with (state / ".metadata").open("wb") as file:
        _OldPickler(file).dump(metadata)
    assert b"getattr" in (state / ".metadata").read_bytes()
    after = read_tensors(state)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    # Of anything else, no attribute.
    member = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    for owner, name in ((member, b"__class__"), (b"ctorch\nSize\n", b"numel")):
        (state / ".metadata").write_bytes(b"cbuiltins\ngetattr\n(" + owner + b"S'" + name + b"'\ntR.")
        with pytest.raises(UnsafeCheckpointError, match="asks for an attribute"):
            read_tensors(state)


def test_a_strangers_checkpoint_runs_no_code(tmp_path):
    marker = tmp_path / "code was run"
    save(tmp_path / "run", 1)
    path = newest_valid(tmp_path / "run").path
    shutil.copytree(path, tmp_path / "copy")

    _forge(path, lambda metadata: _Attack(marker))
    model, optimizer = trained(0)
    with pytest.raises(CheckpointError, match=r"refers to (posix|os).mkdir"):
        Checkpointer(tmp_path / "run", 1, 0, 1).load(newest_valid(tmp_path / "run"), model, optimizer)

    def escape(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = "../../secret"
        return metadata

    shutil.rmtree(path)
    shutil.copytree(tmp_path / "copy", path)
    _forge(path, escape)
    with pytest.raises(UnsafeCheckpointError, match=r"'../../secret', outside its folder"):
        read_tensors(path / "state")

    def pretend(metadata):
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata

        for name in metadata.state_dict_metadata:
            metadata.state_dict_metadata[name] = BytesStorageMetadata()
        return metadata

    shutil.rmtree(path)
    shutil.copytree(tmp_path / "copy", path)
    _forge(path, pretend)
    with pytest.raises(CheckpointError):
        Checkpointer(tmp_path / "run", 1, 0, 1).load(newest_valid(tmp_path / "run"), model, optimizer)
    assert not marker.exists()


def test_a_manifest_may_not_name_files_outside_its_folder(tmp_path, caplog):
    save(tmp_path, 1)
    manifest = next(tmp_path.glob("step-*/manifest.json"))
    text = json.loads(manifest.read_text())
    text["files"]["../../secret"] = text["files"]["trainer.json"]
    manifest.write_text(json.dumps(text))
    assert newest_valid(tmp_path) is None and "a file outside its folder" in caplog.text


@pytest.mark.slow
def test_the_command_line_lists_verifies_compares_and_prunes(tiny, tmp_path, capsys):
    train(changed(tiny, checkpoint_keep_last=3))
    run = tiny["output_dir"]
    assert checkpoints.main(["ls", run]) == 0
    listed = capsys.readouterr().out
    assert listed.count("tokens") == 4 and listed.count("kept permanently") == 2
    assert checkpoints.main(["verify", run]) == 0
    assert capsys.readouterr().out.count("whole") == 4
    assert checkpoints.main(["diff", run, "newest", run, str(20 * STEP)]) == 0
    assert "0 differ" in capsys.readouterr().out
    assert checkpoints.main(["diff", run, str(16 * STEP), run, "newest", "--top", "1"]) == 1
    compared = capsys.readouterr().out
    assert f"token_count: {16 * STEP} -> {20 * STEP}" in compared and "of its norm" in compared
    assert checkpoints.main(["prune", run, "--keep", "1", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("would be deleted") == 1
    shard = next(Path(run).glob(f"checkpoints/step-{20 * STEP:015d}/state/*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert checkpoints.main(["verify", run]) == 1
    assert "damaged: state/" in capsys.readouterr().out
    assert checkpoints.main(["prune", run, "--keep", "1", "--permanent"]) == 0
    left = sorted(int(path.name[5:]) // STEP for path in Path(run).glob("checkpoints/step-*"))
    assert left == [16, 20], "the newest whole one stays, and the damaged one, which somebody may repair"
    train(tiny)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "{tmp}"], "holds no checkpoints; RUN is the output_dir of a run"),
        (["verify", "{run}", "--step", "3"], "no checkpoint at step 3"),
        (["diff", "{run}", "abc", "{run}", "newest"], "'abc' is not a number of tokens"),
        (["diff", "{run}", "3", "{run}", "newest"], "no valid checkpoint 3 in"),
    ],
)
def test_the_command_line_says_what_is_wrong(tmp_path, capsys, arguments, message):
    save(tmp_path / "run/checkpoints", 1)
    filled = [a.format(tmp=tmp_path, run=tmp_path / "run") for a in arguments]
    assert checkpoints.main(filled) == 1
    assert message in capsys.readouterr().err


def test_pruning_everything_or_under_a_running_run_is_refused(tmp_path, capsys):
    from forgetting_transformer.training.records.run_directory import RunDirectory

    with pytest.raises(SystemExit):
        checkpoints.main(["prune", str(tmp_path), "--keep", "0"])
    save(tmp_path / "run/checkpoints", 1)
    directory = RunDirectory(tmp_path / "run")
    directory.acquire()
    try:
        assert checkpoints.main(["prune", str(tmp_path / "run")]) == 1
        assert "another run is writing" in capsys.readouterr().err
    finally:
        directory.release()


@pytest.mark.slow
def test_fork_of_a_strangers_run_is_checked_too(tiny, tmp_path):
    train(changed(tiny, output_dir=str(tmp_path / "source"), train__max_tokens=8 * STEP))
    path = newest_valid(tmp_path / "source/checkpoints").path
    _forge(path, lambda metadata: _Attack(tmp_path / "code was run"))
    assert "which no checkpoint of tensors needs" in refused(
        changed(tiny, fork_dir=str(tmp_path / "source"), fork_step=8 * STEP)
    )
    assert not (tmp_path / "code was run").exists()
