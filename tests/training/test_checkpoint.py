"""A checkpoint is whole or absent, whenever its writer dies, and no code runs when it is read."""

import enum
import errno
import functools
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from forgetting_transformer import command_line
from forgetting_transformer.training import checkpoint
from forgetting_transformer.training.checkpoint import Checkpointer
from forgetting_transformer.training.checkpoint import folder as folder_module
from forgetting_transformer.training.checkpoint.folder import (
    Checkpoint,
    CheckpointError,
    inspect,
    newest_valid,
    read_manifest,
    read_newest,
    remove,
)
from forgetting_transformer.training.checkpoint.reading import load_tensors
from forgetting_transformer.training.checkpoint.writing import remove_leftovers
from forgetting_transformer.training.records.run_directory import RunDirectory
from tests.training.conftest import STEP, Job, changed, dies, lines, refused, train
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
    checkpointer = Checkpointer(folder, 1, background=background)
    windows = {"position_loss": torch.full((3,), float(steps))}
    checkpointer.save(steps, model, optimizer, {"token_count": steps}, windows, permanent=False)
    with torch.no_grad():
        model.weight.fill_(7.0)  # training goes on
    saved = checkpointer.take_result(wait=True)
    assert saved is not None and saved.error is None, saved
    return {f"model.{name}": tensor for name, tensor in trained(steps)[0].state_dict().items()}


def test_kept_copies_follow_a_parameter_that_gets_its_first_gradient_later(tmp_path, monkeypatch):
    """On a GPU copies stay in pinned memory from save to save. Here the memory is not pinned."""
    create = staging._create_cpu_state_dict
    monkeypatch.setattr(staging, "_create_cpu_state_dict", lambda tensors, pin_memory=False: create(tensors))
    monkeypatch.setattr(checkpoint, "_on_gpu", lambda tensors: True)
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer, checkpointer = torch.optim.AdamW(model.parameters()), Checkpointer(tmp_path, 2, background=True)
    for step, used in ((1, model[:1]), (2, model), (3, model)):
        for layer in used:
            layer(torch.ones(2)).sum().backward()
        optimizer.step()
        checkpointer.save(step, model, optimizer, {}, {}, permanent=False)
        assert checkpointer.take_result(wait=True).error is None
        held = load_tensors(newest_valid(tmp_path))
        assert torch.equal(held["model.1.weight"], model[1].weight.detach())
        assert ("optimizer.state.1.weight.exp_avg" in held) == (step > 1)


def assert_holds(path: Path, expected: dict[str, torch.Tensor]) -> None:
    tensors = load_tensors(Checkpoint(path, 0, False))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


#: What changes a file system, as Python's audit events.
_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "shutil.rmtree")


def _save_and_die(folder: Path, moment: int) -> None:
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
    save(folder, 2, background=True)


@pytest.mark.slow
def test_death_between_any_two_writes_leaves_a_whole_checkpoint(tmp_path):
    """Every change to the folder in turn: folders, shards, manifest, renames, deletions."""
    context = multiprocessing.get_context("fork")
    before = save(tmp_path / "first", 1)
    after = None
    for moment in range(1, 60):
        folder = tmp_path / f"killed-{moment}"
        shutil.copytree(tmp_path / "first", folder)
        process = context.Process(target=_save_and_die, args=(folder, moment))
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
        remove_leftovers(folder)
        save(folder, 2)  # and the next life saves the same step again
        assert newest_valid(folder).step == 2
        assert [path.name for path in folder.iterdir()] == [f"step-{2:015d}"], "wreckage is cleared away"
    assert process.exitcode == 0 and moment > 12, "a save is at least a dozen changes, and all were tried"


def test_what_goes_before_the_manifest_is_done_before_a_checkpoint_counts(tmp_path):
    """Lines of metrics, say: a run that is continued cuts those behind its checkpoint, and must have those before."""
    model, optimizer = trained(1)
    found: list[object] = []
    Checkpointer(tmp_path, 1).save(
        1, model, optimizer, {"token_count": 1}, {}, False, before_manifest=lambda: found.append(newest_valid(tmp_path))
    )
    assert found == [None] and newest_valid(tmp_path).step == 1


def test_a_newer_checkpoint_that_is_damaged_pushes_out_no_good_one(tmp_path):
    save(tmp_path, 1)
    shutil.copytree(tmp_path / f"step-{1:015d}", tmp_path / f"step-{9:015d}")
    next((tmp_path / f"step-{9:015d}/state").glob("*.distcp")).write_bytes(b"")
    save(tmp_path, 2)
    assert newest_valid(tmp_path).step == 2


def test_another_optimizer_is_refused(tmp_path):
    """As of a fork, which may have other settings."""
    save(tmp_path, 3)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    with pytest.raises(CheckpointError, match=r"with another optimizer: it has no .*max_exp_avg_sq"):
        Checkpointer(tmp_path, 1).load(newest_valid(tmp_path), model, optimizer)


class _Attack:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def _forge(path: Path, change) -> None:
    """A stranger changes the metadata, and the manifest so that it fits."""
    file = path / "state/.metadata"
    metadata = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(change(metadata)))
    manifest = read_manifest(path)
    manifest["files"]["state/.metadata"] = folder_module.checksum(file)
    (path / "manifest.json").write_text(json.dumps(manifest))


class _OldPickler(pickle.Pickler):
    """Pickles enumerations as Python 3.11.2 does, which Debian 12 has."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_a_checkpoint_that_an_older_python_wrote_is_read(tmp_path):
    save(tmp_path / "run", 1)
    checkpoint = newest_valid(tmp_path / "run")
    state, before = checkpoint.path / "state", load_tensors(checkpoint)
    metadata = pickle.loads((state / ".metadata").read_bytes())
    with (state / ".metadata").open("wb") as file:
        _OldPickler(file).dump(metadata)
    assert b"getattr" in (state / ".metadata").read_bytes()
    after = load_tensors(checkpoint)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    # Of anything else, no attribute.
    member = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    for owner, name in ((member, b"__class__"), (b"ctorch\nSize\n", b"numel")):
        (state / ".metadata").write_bytes(b"cbuiltins\ngetattr\n(" + owner + b"S'" + name + b"'\ntR.")
        with pytest.raises(CheckpointError, match="asks for an attribute"):
            load_tensors(checkpoint)


def test_a_strangers_checkpoint_runs_no_code(tmp_path):
    marker = tmp_path / "code was run"
    save(tmp_path / "run", 1)
    path = newest_valid(tmp_path / "run").path
    shutil.copytree(path, tmp_path / "copy")

    def escape(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = "../../secret"
        return metadata

    def pretend(metadata):
        for name in metadata.state_dict_metadata:
            metadata.state_dict_metadata[name] = BytesStorageMetadata()
        return metadata

    attacks = {
        r"refers to (posix|os).mkdir": lambda metadata: _Attack(marker),
        r"'../../secret', outside its folder": escape,
        "belongs to another model": pretend,
    }
    for said, attack in attacks.items():
        shutil.rmtree(path)
        shutil.copytree(tmp_path / "copy", path)
        _forge(path, attack)
        with pytest.raises(CheckpointError, match=said):
            Checkpointer(tmp_path / "run", 1).load(newest_valid(tmp_path / "run"), *trained(0))
    assert not marker.exists()


@pytest.mark.slow
def test_the_command_line_lists_verifies_compares_and_prunes(tiny, tmp_path, capsys):
    train(changed(tiny, checkpoint_keep_last=3))
    run = tiny["output_dir"]
    assert checkpoints.main(["ls", run]) == 0
    listed = capsys.readouterr().out
    assert listed.count("tokens") == 4 and listed.count(" MB ") == 4 and listed.count("kept permanently") == 2
    assert checkpoints.main(["verify", run]) == 0
    assert capsys.readouterr().out.count("whole") == 4
    assert checkpoints.main(["diff", run, "newest", run, str(20 * STEP)]) == 0
    assert "0 differ" in capsys.readouterr().out
    assert checkpoints.main(["diff", run, str(16 * STEP), run, "newest"]) == 1
    compared = capsys.readouterr().out
    assert f"token_count: {16 * STEP} -> {20 * STEP}" in compared
    assert len(re.findall(r"\n  \S+: by \d\S* times its norm", compared)) == 10
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


def test_the_command_line_says_what_is_wrong_and_prunes_no_running_run(tmp_path, capsys):
    run = str(tmp_path / "run")
    save(tmp_path / "run/checkpoints", 1)
    with pytest.raises(SystemExit):
        checkpoints.main(["prune", run, "--keep", "0"])
    directory = RunDirectory(run)
    directory.acquire()
    for arguments, message in (
        (["ls", str(tmp_path)], "holds no checkpoints; RUN is the output_dir of a run"),
        (["diff", run, "abc", run, "newest"], "'abc' is not a number of tokens"),
        (["prune", run], "another run is writing"),
    ):
        assert command_line.run(functools.partial(checkpoints.main, arguments)) == 1
        assert message in capsys.readouterr().err
    directory.release()


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_only_names_that_a_run_writes_are_cleared_away(tmp_path):
    save(tmp_path, 1)
    for name in ("step-abc", "step-5", ".tmp-step-mine", "notes", f"step-{9:015d}", f".deleted-{5}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("years of work")
    before = snapshot(tmp_path)
    for name in (f".tmp-step-{7:015d}", f".deleted-step-{3:015d}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer.json").write_text("{}")
    remove_leftovers(tmp_path)
    assert snapshot(tmp_path) == before
    assert not list(tmp_path.glob(".tmp-step-0*")) and not list(tmp_path.glob(".deleted-step-0*"))


#: Fault -> what it does to a checkpoint, and what is said of it.
DAMAGES = {
    "cut": (lambda path, shard: shard.write_bytes(shard.read_bytes()[:-1]), "state/{shard} has"),
    "gone": (lambda path, shard: shard.unlink(), "state/{shard} is missing"),
    "outside": (
        lambda path, shard: (path / "manifest.json").write_text(
            (path / "manifest.json").read_text().replace("trainer.json", "../../secret")
        ),
        "its manifest names ../../secret, a file outside its folder",
    ),
    "half-written": (lambda path, shard: (path / "manifest.json").unlink(), "it has no manifest.json, so part of it"),
    **{
        text: (lambda path, shard, text=text: (path / "manifest.json").write_text(text), "its manifest.json is damaged")
        for text in ("", "[[]]", '{"format": 2, "files": [], "permanent": false}')
    },
}


def test_too_many_open_files_are_no_damage(tmp_path, monkeypatch):
    """An older checkpoint would be taken, or none."""
    save(tmp_path, 1)

    def refuse(file: Path) -> None:
        raise OSError(errno.EMFILE, "Too many open files", str(file))

    monkeypatch.setattr(folder_module, "checksum", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        newest_valid(tmp_path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(tmp_path, caplog, damage):
    run, expected = tmp_path / "run", save(tmp_path / "run", 1)
    save(tmp_path / "later", 2)
    newest = (tmp_path / f"later/step-{2:015d}").rename(run / f"step-{2:015d}")
    shard = next((newest / "state").glob("*.distcp"))
    act, reason = DAMAGES[damage]
    act(newest, shard)
    reason = reason.format(shard=shard.name)
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        inspect(newest)
    (run / f"step-{3:015d}").symlink_to(tmp_path / "nowhere")
    found = newest_valid(run)
    assert found.step == 1 and f"passing over checkpoint {newest}: {reason}" in caplog.text
    assert_holds(found.path, expected)
    if "manifest.json" in reason:
        assert read_manifest(newest) is None  # for listings


@pytest.mark.slow
def test_a_run_goes_on_only_from_what_it_saved(tiny):
    """Killed before its first save, a run starts at 0; without its checkpoints, or their manifests, it is refused."""
    root = Path(tiny["output_dir"])
    assert Job(tiny, patch=dies(3)).wait() == [9]
    assert not (root / "metrics/jsonlines/checkpoint.jsonl").exists()
    train(changed(tiny, train__max_tokens=8 * STEP))
    logged = lines(tiny["output_dir"], "train")
    assert len(logged) == 8
    (root / "checkpoints").rename(root.parent / "elsewhere")
    message = refused(tiny)
    assert "checkpoint.jsonl says that a checkpoint was finished" in message and "Bring the folder back" in message
    # A copy that left out *.json must not be taken for saves that never ended.
    ignored = shutil.ignore_patterns("*.json")
    shutil.copytree(root.parent / "elsewhere", root / "checkpoints", ignore=ignored, dirs_exist_ok=True)
    before = snapshot(root / "checkpoints")
    assert "none of the checkpoints in" in refused(tiny)
    assert snapshot(root / "checkpoints") == before and lines(tiny["output_dir"], "train") == logged
    shutil.rmtree(root / "checkpoints")
    (root.parent / "elsewhere").rename(root / "checkpoints")
    train(tiny)
    assert len(lines(tiny["output_dir"], "train")) == 20


@pytest.mark.parametrize("moment", ["checked", "read"])
def test_a_checkpoint_that_its_run_deletes_while_it_is_read_makes_room_for_the_next(tmp_path, monkeypatch, moment):
    folder, moments = tmp_path / "run", ["checked", "read"]
    save(folder, 1)
    save(tmp_path / "later", 2)

    def rotate(now: str) -> None:
        if moments and now == moment:
            moments.clear()
            shutil.copytree(tmp_path / "later", folder, dirs_exist_ok=True)
            remove(folder / f"step-{1:015d}")

    checksum = folder_module.checksum
    monkeypatch.setattr(folder_module, "checksum", lambda file: (rotate("checked"), checksum(file))[1])
    found = read_newest(folder, lambda checkpoint: (rotate("read"), checkpoint.step, load_tensors(checkpoint)))
    assert found[1] == 2 and {"model.weight", "model.bias"} <= set(found[2])
