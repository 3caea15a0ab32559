"""Files of an array or a corpus; remote ones are cached on disk up to a limit, for all processes of a machine.

Chunks are needed for a while and then not again until the next epoch, so those used longest ago make room.

    <cache_dir>/remote_files/<hash of the URL>/   0.0, c/0/0, …: chunks, metadata and tokenizers
    <cache_dir>/remote_files/.locks/              one process fetches a file, the others wait

`cache_dir` may contain other files: only files in these folders count against the limit and are deleted.
"""

import hashlib
import os
import re
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.storage.remote import RemoteFile, RemoteFolder, is_url, join
from forgetting_transformer.files import TEMPORARY, explain, locked, write_atomically

#: Files fetched at a time by one process.
CONNECTIONS = 8
#: A half-written file older than this was left by a kill.
ABANDONED_SECONDS = 3600.0


@dataclass(frozen=True)
class CacheSettings:
    """Place and size of the cache.

    Attributes:
        folder: on a disk of this machine; runs and ranks may share it.
        limit_bytes: of all remote files in it, of any array.
    """

    folder: Path = field(
        default_factory=lambda: Path(
            os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "forgetting_transformer"
        )
    )
    limit_bytes: int = 20 * 10**9


class Folder:
    """Files of a folder on this machine; or of a remote one, fetched at first use and kept.

    The contents of a URL must not change: a corpus that was replaced at the same place needs another cache.

    Attributes:
        address: the folder or URL.
        path: the same; of a URL as it may be shown, without a password.
        remote: the folder at the URL, or None.
        folder: place of the files on this machine.
    """

    def __init__(self, address: str | Path, settings: CacheSettings) -> None:
        self.address, self.settings = str(address).rstrip("/"), settings
        self.remote = RemoteFolder(self.address) if is_url(address) else None
        self.root = settings.folder / "remote_files"
        self.locks = self.root / ".locks"
        self.path: str | Path = Path(address)
        self.folder = Path(address)
        if self.remote is not None:
            self.path = self.remote.url
            # By the URL without its password, which may change and must not be kept.
            self.folder = self.root / hashlib.sha256(self.remote.url.encode()).hexdigest()[:16]

    def place(self, name: str) -> str:
        """Place of a file, for an error message."""
        return str(self.path / name) if isinstance(self.path, Path) else join(self.path, name)

    def names(self) -> set[str]:
        """Paths of all files in the folder.

        Raises:
            DataError: the source cannot be listed.
        """
        if self.remote is None:
            return {file.relative_to(self.folder).as_posix() for file in self.folder.rglob("*")}
        listed = self.remote.files()
        if listed is None:
            raise DataError(
                f"{self.path} cannot be listed, so its chunks are unknown; set "
                "datamodule.missing_chunks=error, or use hf://, s3://, gs:// or a local copy"
            )
        return set(listed)

    def fetch(self, name: str, fresh: bool = False, expected: RemoteFile | None = None) -> Path | None:
        """The local copy of a file, fetched if it is not here, or None if the source has no such file.

        Args:
            fresh: fetch it anyway, because it may have changed (metadata) or is damaged.
            expected: as of RemoteFolder.read.

        Raises:
            DataError: it could not be fetched or stored.
        """
        path = self._path(name)
        if self.remote is None:
            return path if path.exists() else None
        if not fresh and self._touch(path):
            return path
        try:
            for folder in (path.parent, self.locks):
                folder.mkdir(parents=True, exist_ok=True)
            # One of 256 locks: two files that share one wait for each other, no more.
            with locked(self.locks / str(hashlib.sha256(str(path).encode()).digest()[0])):
                # Another process may have fetched it while this one waited.
                if fresh or not self._touch(path):
                    data = self.remote.read(name, expected)
                    if data is None:
                        return None
                    write_atomically(path, data, durable=False)
                    with locked(self.locks / "room"):
                        self._make_room(keep=path)
        except OSError as error:
            raise DataError(
                f"cannot keep {path.name} in {path.parent}: {explain(error)}. Make room there, lower "
                "datamodule.cache_gb, or choose another datamodule.cache_dir"
            ) from error
        return path

    def fetch_all(self, names: list[str]) -> None:
        """Fetches several files at a time; those that the source does not have are an error where they are read."""
        if self.remote is not None:
            missing = [name for name in names if not self._touch(self._path(name))]
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                list(pool.map(self.fetch, missing))

    def _path(self, name: str) -> Path:
        return self.folder / join("", name).lstrip("/")  # join refuses names that lead out of the folder

    @staticmethod
    def _touch(path: Path) -> bool:
        """Marks a file as used now; False if it is not there."""
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def _make_room(self, keep: Path) -> None:
        """Deletes the files used longest ago until the rest is within the limit."""
        files = []
        for folder in self.root.iterdir():
            for file in folder.rglob("*") if re.fullmatch("[0-9a-f]{16}", folder.name) else ():
                with suppress(FileNotFoundError):  # another process of this machine may have replaced it
                    status = file.stat()
                    under_way = TEMPORARY.fullmatch(file.name) and time.time() - status.st_mtime < ABANDONED_SECONDS
                    if stat.S_ISREG(status.st_mode) and not under_way:
                        files.append((status.st_mtime, status.st_size, file))
        excess = sum(size for _, size, _ in files) - self.settings.limit_bytes
        for _, size, file in sorted(files):
            if excess <= 0:
                break
            if file != keep:
                file.unlink(missing_ok=True)
                excess -= size
