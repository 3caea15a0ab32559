"""Files of a remote array on local disk, as many as a limit allows, shared by all processes of a machine.

Chunks are needed for a while and then not again until the next epoch, so those used longest ago make room.

    <cache_dir>/remote_files/<hash of the URL>/   0.0, c/0/0, …: chunks, metadata and tokenizers
    <cache_dir>/remote_files/.locks/              one process fetches a file, the others wait

`cache_dir` may be a folder with other things in it: only files in such folders count against the limit and are deleted.
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
from forgetting_transformer.data.storage.remote import RemoteFolder, join
from forgetting_transformer.files import TEMPORARY, explain, locked, replacing

#: Files fetched at a time by one process.
CONNECTIONS = 8
#: Lock files; two names that share one wait for each other, no more.
LOCKS = 64
#: A half-written file older than this was left by a kill.
ABANDONED_SECONDS = 3600.0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def default_folder() -> Path:
    """Default folder of remote chunks."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forgetting_transformer"


@dataclass(frozen=True)
class CacheSettings:
    """Where and how much.

    Attributes:
        folder: on a disk of this machine; runs and ranks may share it.
        limit_bytes: of all files in it that came from elsewhere, whichever array they are of.
    """

    folder: Path = field(default_factory=default_folder)
    limit_bytes: int = 20 * 10**9


class RemoteCache:
    """Files of one remote folder, fetched when first asked for.

    What a URL names is taken not to change: a corpus that was replaced at the same place needs another folder.
    """

    def __init__(self, remote: RemoteFolder, settings: CacheSettings) -> None:
        self.remote, self.settings = remote, settings
        self.root = settings.folder / "remote_files"
        # By the URL without its password, which may change and must not be kept.
        self.folder = self.root / hashlib.sha256(remote.url.encode()).hexdigest()[:16]
        self.locks = self.root / ".locks"
        try:
            for folder in (self.folder, self.locks):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"cannot keep remote chunks in {settings.folder}: {explain(error)}; set datamodule.cache_dir"
            ) from error

    def fetch(self, name: str, fresh: bool = False) -> Path | None:
        """The local copy of a file, fetched if it is not here, or None if the source has no such file.

        Args:
            fresh: fetch it anyway, because it may have changed (metadata) or is damaged.
        """
        path = self._path(name)
        if not fresh and self._touch(path):
            return path
        with locked(self.locks / str(hashlib.sha256(str(path).encode()).digest()[0] % LOCKS)):
            # Another process may have fetched it while this one waited.
            if fresh or not self._touch(path):
                data = self.remote.read(name)
                if data is None:
                    return None
                self._write(path, data)
        return path

    def fetch_all(self, names: list[str]) -> None:
        """Fetches several files at a time; those that the source does not have are an error where they are read."""
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

    def _write(self, path: Path, data: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path, durable=False) as stream:
                stream.write(data)
            with locked(self.locks / "room"):
                self._make_room(keep=path)
        except OSError as error:
            raise DataError(
                f"cannot keep {path.name} in {path.parent}: {explain(error)}. Make room there, lower "
                "datamodule.cache_gb, or choose another datamodule.cache_dir"
            ) from error

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


def fetch_tokenizer(url: str, settings: CacheSettings) -> Path:
    """A local folder with `tokenizer/` as it is below `url`, if it has one."""
    cache = RemoteCache(RemoteFolder(url), settings)
    listed = cache.remote.files("tokenizer")
    # A source that cannot be listed is asked for the files that scripts/prepare_data.py writes.
    for name in TOKENIZER_FILES if listed is None else listed:
        if re.fullmatch(r"\w[\w.-]*", name):  # plain names only: a listing comes from elsewhere
            cache.fetch(f"tokenizer/{name}", fresh=True)
    return cache.folder
