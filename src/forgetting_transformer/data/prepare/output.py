"""The folder OUT of a corpus, and how a finished corpus gets there, also in the place of an older one.

All work happens beside it, in `.OUT.preparing`:

    settings.json    of the corpus that is being built; without it all this is being deleted
    corpus/          what OUT is to hold; its manifest.json, the last file, says that it is complete
    replaced/        the corpus that was in OUT

A new corpus appears by one rename, corpus/ to OUT. Where it replaces one, the rename of OUT to replaced/ comes before
it. A kill leaves one of these states, and the next start does the rest.
"""

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgetting_transformer.data import vocabulary
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.files import locked, write_json

MANIFEST = "manifest.json"
PARTS = ("tokenizer", "train.zarr", "heldout.zarr", "train.sha256", "heldout.sha256")  # beside manifest.json
_LOCK = "lock"


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a corpus.

    Raises:
        DataError: it is damaged, or of another program.
    """
    found = vocabulary.read_manifest(path.parent)
    if not {"format_version", "settings", "arrays"} <= found.keys():
        raise DataError(f"{path} is not a file of this program. Give another --out, or move it away.")
    return found


@dataclass(frozen=True)
class OutputFolder:
    """OUT and the folder beside it in which its corpus is built."""

    out: Path

    @property
    def work(self) -> Path:
        return self.out.with_name(f".{self.out.name}.preparing")

    @property
    def new(self) -> Path:
        return self.work / "corpus"

    @property
    def begun(self) -> Path:
        """The settings of the corpus that is being built."""
        return self.work / "settings.json"

    def finished(self) -> dict[str, Any] | None:
        """The manifest of the corpus in OUT; None if OUT is empty or not there.

        Raises:
            DataError: there is something else.
        """
        names = os.listdir(self.out) if self.out.exists() else []
        if MANIFEST in names:
            return read_manifest(self.out / MANIFEST)
        self._refuse(names, "and no corpus of this program")
        return None

    def check_movable(self) -> None:
        """
        Raises:
            DataError: what is in OUT cannot be moved away without files of others.
        """
        if self.finished() is not None:
            self._refuse(set(os.listdir(self.out)).difference(PARTS, [MANIFEST]), "beside a corpus")

    def _refuse(self, names: Collection[str], what: str) -> None:
        if names:
            shown = ", ".join(sorted(names)[:8]) + (", …" if len(names) > 8 else "")
            raise DataError(f"{self.out} holds {shown}, {what}. Give another --out, or move it away.")

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
        """Puts a complete corpus in its place, and deletes what no run can continue.

        Args:
            force: also in the place of another corpus.

        Returns:
            Whether there was one.

        Raises:
            DataError: files of others are in its place by now.
        """
        complete = (self.new / MANIFEST).exists() and (force or self.finished() is None)
        if complete:
            self.check_movable()
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
