"""The folder OUT: what in it is ours, and how a finished corpus takes its place there, also that of an older one.

All work happens in `OUT/.work`, and one file in it says how far that is; its name changes by a rename, so a kill
never leaves two states, and a full disk does not hinder it:

    settings.json     the corpus is being built, or is complete and waits; what is in OUT has not been touched
    publishing.json   the parts of the complete corpus are being moved into OUT, or the rest is being deleted
    discarded.json    unfinished work is being deleted

Publishing is renames alone. The old `manifest.json` leaves OUT first and the new one enters it last, so that no
manifest ever lies beside the arrays of another corpus. Whatever was renamed stays so; the next start does the rest.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from forgetting_transformer.data.array_files import LARGEST_METADATA
from forgetting_transformer.data.prepare.errors import CorpusError
from forgetting_transformer.files import TEMPORARY

MANIFEST = "manifest.json"
PARTS = ("tokenizer", "train.zarr", "heldout.zarr", "train.sha256", "heldout.sha256")  # in OUT beside manifest.json
WORK = ".work"
LOCK = ".prepare_data.lock"
BUILDING, PUBLISHING, DISCARDED = STATES = ("settings.json", "publishing.json", "discarded.json")
REPLACED = "replaced"  # in .work: the corpus that was in OUT


# Whose is it --------------------------------------------------------------------------------------------------


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file that this program wrote.

    Raises:
        CorpusError: there is something else in the file.
    """
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _not_ours(path)
    return found


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a corpus.

    Raises:
        CorpusError: this program did not write the file. Other programs, and people, write manifests too.
    """
    found = read_object(path)
    if "format_version" not in found or not all(isinstance(found.get(key), dict) for key in ("settings", "arrays")):
        raise _not_ours(path)
    return found


def _not_ours(path: Path) -> CorpusError:
    return CorpusError(
        f"{path} is not a file of this program, or it is damaged. Give another --out, or move it away if it is damaged."
    )


def holds_corpus(folder: Path) -> bool:
    """Whether a manifest says that the parts in this folder are ours."""
    # The manifest of a corpus that is being published lies in .work. It is looked for there first: it moves one way.
    for path in (folder / WORK / MANIFEST, folder / MANIFEST):
        try:
            if path.is_file() and path.stat().st_size <= LARGEST_METADATA:
                read_manifest(path)
                return True
        except (OSError, CorpusError):
            continue
    return False


def refuse_work_of_others(out: Path) -> None:
    """
    Raises:
        CorpusError: `out` holds a .work of something else.
    """
    work = out / WORK
    if work.is_symlink():
        raise CorpusError(f"{work} is a link, which this program did not make. Give another --out, or move it away.")
    if work.exists() and _state(work) is None and not all(map(_left_by_a_kill, os.listdir(work))):
        raise CorpusError(f"{out} holds a folder .work, which this program did not make. Give another --out.")


def _left_by_a_kill(name: str) -> bool:
    return name == "settings.json.tmp" or TEMPORARY.fullmatch(name) is not None  # the first: of earlier versions


def refuse_unvouched_parts(out: Path) -> None:
    """
    Raises:
        CorpusError: a part of the corpus is in the way of something in `out`, and no manifest says that this is ours.
    """
    _refuse_parts(out, [name for name in PARTS if os.path.lexists(out / name)])


def _refuse_parts(out: Path, names: list[str]) -> None:
    if names:
        raise CorpusError(
            f"{out} holds {', '.join(names)} without a manifest.json, so something else wrote it. "
            "Give another --out, or move it away."
        )


# From .work into OUT ------------------------------------------------------------------------------------------


def _state(work: Path) -> str | None:
    return next((name for name in STATES if (work / name).exists()), None)


def _change_state(work: Path, state: str) -> None:
    before = _state(work)
    if before not in (None, state):
        os.rename(work / str(before), work / state)


def finish_what_a_kill_left(out: Path) -> bool:
    """Complete the publishing or deleting that a kill interrupted, and say whether it was publishing.

    Raises:
        CorpusError: as `publish`.
    """
    work = out / WORK
    state = _state(work)
    # The second: earlier versions noted no state. Without a manifest in OUT, nothing but publishing is left to do.
    waits = state == BUILDING and (work / MANIFEST).exists() and not os.path.lexists(out / MANIFEST)
    if state == PUBLISHING or waits:
        publish(out)
        return True
    if state == DISCARDED:
        discard(work)
    return False


def publish(out: Path) -> None:
    """Move the complete corpus from .work into `out`, in the place of the corpus there, and delete .work.

    Raises:
        CorpusError: what is in its place is not ours, or nobody asked to replace it. Nothing was moved.
    """
    work = out / WORK
    if (work / MANIFEST).exists():  # else all of it is in its place
        _refuse_to_replace(out, work)
        _change_state(work, PUBLISHING)
        _swap(work, out)
    discard(work)


def _refuse_to_replace(out: Path, work: Path) -> None:
    """What is in OUT may have changed since the build began, hours ago."""
    for path in (work, *(out / name for name in PARTS)):
        if os.path.ismount(path):
            raise CorpusError(f"{path} is a mount point, which cannot be renamed. Unmount it, or give another --out.")
    replaced = work / REPLACED
    vouched = (replaced / MANIFEST).exists()
    if os.path.lexists(out / MANIFEST):
        read_manifest(out / MANIFEST)
        vouched = bool(read_object(work / str(_state(work))).get("force"))
        if not vouched:
            raise CorpusError(f"{out} holds another corpus by now. Give another --out, or --force to replace it.")
    in_the_way = [name for name in PARTS if os.path.lexists(work / name) and os.path.lexists(out / name)]
    _refuse_parts(out, [name for name in in_the_way if not vouched or os.path.lexists(replaced / name)])


def _swap(work: Path, out: Path) -> None:
    replaced = work / REPLACED
    replaced.mkdir(exist_ok=True)
    if os.path.lexists(out / MANIFEST):
        os.rename(out / MANIFEST, replaced / MANIFEST)
    for name in PARTS:
        if os.path.lexists(work / name):  # else a start that was killed here has moved it
            if os.path.lexists(out / name):
                os.rename(out / name, replaced / name)
            os.rename(work / name, out / name)
    os.rename(work / MANIFEST, out / MANIFEST)


def discard(work: Path) -> None:
    """Delete .work. What cannot be deleted now, as a file that a reader has open on NFS, is left to the next start."""
    if not work.exists():
        return
    if _state(work) != PUBLISHING:  # which says more: that the corpus in OUT is the one that was asked for
        _change_state(work, DISCARDED)
    for entry in work.iterdir():
        if entry.name in (PUBLISHING, DISCARDED):
            continue  # last: it says whose the rest is
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink()
    if set(os.listdir(work)) <= {PUBLISHING, DISCARDED}:
        for name in (PUBLISHING, DISCARDED):
            (work / name).unlink(missing_ok=True)
        work.rmdir()
    else:
        _change_state(work, DISCARDED)
