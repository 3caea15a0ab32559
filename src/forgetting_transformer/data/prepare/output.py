"""The folder OUT of a corpus, and its replacement by a finished one.

All work happens beside it, in `.OUT.preparing`:

    settings.json    of the corpus that is being built; without it this folder is being deleted
    corpus/          future contents of OUT; complete once it has manifest.json, the last file
    replaced/        the corpus that was in OUT

A new corpus appears by one rename, corpus/ to OUT. Where it replaces one, the rename of OUT to replaced/ comes before
it. A kill leaves one of these states, and the next start does the rest.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forgetting_transformer.data import vocabulary
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.files import locked, write_json

MANIFEST = "manifest.json"
PARTS = ("tokenizer", "train.zarr", "heldout.zarr", "train.sha256", "heldout.sha256")  # beside manifest.json
_LOCK = "lock"


class OutputFolder:
    """OUT, and the folder beside it in which the corpus is built.

    Attributes:
        begun: the settings of the corpus that is being built.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.work = out.with_name(f".{out.name}.preparing")
        self.new, self.begun = self.work / "corpus", self.work / "settings.json"

    def finished(self, replaced: bool = False) -> dict[str, Any] | None:
        """The manifest of the corpus in OUT; None if OUT is empty or not there.

        Args:
            replaced: whether OUT is to be moved away, which must then hold nothing else.

        Raises:
            DataError: it does, or it holds no corpus, or a manifest that is damaged or of another program.
        """
        names = set(os.listdir(self.out)) if self.out.exists() else set()
        others, what = names, "and no corpus of this program"
        if MANIFEST in names:
            others, what = names.difference(PARTS, [MANIFEST]) if replaced else set(), "beside a corpus"
        if others:
            shown = ", ".join(sorted(others)[:8])
            raise DataError(f"{self.out} holds {shown}, {what}. Give another --out, or move it away.")
        if not names:
            return None
        found = vocabulary.read_manifest(self.out)
        if not {"format_version", "settings", "arrays"} <= found.keys():
            raise DataError(
                f"{self.out / MANIFEST} is not a file of this program. Give another --out, or move it away."
            )
        return found

    @contextmanager
    def only_run(self) -> Iterator[None]:
        """Two runs of one OUT would overwrite each other; the second is refused. A kill releases the lock.

        Raises:
            DataError: there is another run, or the folder beside OUT is not of this program.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        if not (self.work / _LOCK).exists() and any(self.work.iterdir()):
            raise DataError(f"{self.work} is not of this program. Give another --out, or move it away.")
        try:
            with locked(self.work / _LOCK, wait=False):
                try:
                    yield
                finally:
                    if os.listdir(self.work) == [_LOCK]:
                        shutil.rmtree(self.work)
        except BlockingIOError as error:
            raise DataError(f"another run is preparing {self.out}. Wait for it, or give another --out.") from error

    def publish(self, force: bool) -> bool:
        """Moves a complete corpus to OUT, and deletes work that no run can continue.

        Args:
            force: also in the place of another corpus.

        Returns:
            Whether there was one.

        Raises:
            DataError: files of others are in its place by now.
        """
        complete = (self.new / MANIFEST).exists() and (force or self.finished() is None)
        if complete:
            self.finished(replaced=True)
            if self.out.is_dir():
                os.rename(self.out, self.work / "replaced")
            os.rename(self.new, self.out)
        if not (self.begun.exists() and self.new.exists()):
            self._discard()
        return complete

    def begin(self, settings: dict[str, Any]) -> None:
        """Starts over, with these settings."""
        self._discard()
        self.new.mkdir()
        write_json(self.begun, settings)

    def _discard(self) -> None:
        """Deletes all work except the lock; half of it is never taken for work to continue."""
        self.begun.unlink(missing_ok=True)
        for entry in self.work.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != _LOCK:
                entry.unlink()
