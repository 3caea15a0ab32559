"""Files of a remote array on local disk, as many as a limit allows, shared by all processes of a machine.

Chunks are needed for a while and then not again until the next epoch, so those used longest ago make room.

    <cache_dir>/.forgetting_transformer.lock      held while room is made
    <cache_dir>/<hash of the URL>/CACHEDIR.TAG    the mark: the folder of this name is the cache's (bford.info/cachedir)
                                  url.txt         of what it holds files
                                  0.0, c/0/0, …   chunks; metadata and tokenizers beside them
                                  .parts, .locks  files under way

`cache_dir` may be a folder with other things in it. Only chunks in folders with the mark count against the limit and
are deleted. A copy of such a folder has another name than its mark says, and is left alone.
"""

import hashlib
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from forgetting_transformer.data.errors import DataError
from forgetting_transformer.data.remote import RemoteFolder, join, open_remote
from forgetting_transformer.files import TEMPORARY, explain, locked, replacing

#: Files fetched at a time by one process.
CONNECTIONS = 8
#: Lock files; two names that share one wait for each other, no more.
LOCKS = 64
#: What marks a folder as the cache's own. Backups leave folders with such a file out; other programs write one too, so
#: the other lines count.
MARK = "CACHEDIR.TAG"
_MARK_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# Files of forgetting_transformer, fetched from the address in url.txt. It deletes those used longest ago.\n"
    "# The name of this folder: "
)
#: Files of chunks: 0.0, 0/0, c/0/0.
_CHUNK = re.compile(r"(c[./])?\d+([./]\d+)*")
#: A half-written file older than this was left by a kill.
ABANDONED_SECONDS = 3600.0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
LARGEST_TOKENIZER_FILE = 64 << 20


def default_folder() -> Path:
    """Where remote chunks are kept unless told otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forgetting_transformer"


@dataclass(frozen=True)
class CacheSettings:
    """Where and how much.

    Attributes:
        folder: on a disk of this machine; runs and ranks may share it.
        limit_bytes: of all chunks in it, whichever array they are of. Files of others in `folder` do not count.
    """

    folder: Path = field(default_factory=default_folder)
    limit_bytes: int = 20 * 10**9


class RemoteCache:
    """Files of one remote folder, fetched when first asked for.

    What a URL names is taken not to change: a corpus that was replaced at the same place needs another folder.
    """

    def __init__(self, remote: RemoteFolder, settings: CacheSettings) -> None:
        self.remote, self.settings = remote, settings
        # By the URL without its password, which may change and must not be kept.
        self.folder = settings.folder / hashlib.sha256(remote.url.encode()).hexdigest()[:16]
        self.locks, self.parts = self.folder / ".locks", self.folder / ".parts"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Looked at in this order: another process may just be marking it.
            if any(self.folder.iterdir()) and not _is_ours(self.folder):
                raise DataError(f"{self.folder} holds files that this cache did not write; set datamodule.cache_dir")
            # Whole or not at all, so that no other process takes a file without contents for somebody else's.
            with replacing(self.folder / MARK, durable=False, beside=settings.folder) as stream:
                stream.write(f"{_MARK_TEXT}{self.folder.name}\n".encode())
            for folder in (self.locks, self.parts):
                folder.mkdir(exist_ok=True)
            (self.folder / "url.txt").write_text(remote.url)
            for part in self.parts.iterdir():
                with suppress(FileNotFoundError):  # another process may have finished it
                    if TEMPORARY.fullmatch(part.name) and time.time() - part.stat().st_mtime > ABANDONED_SECONDS:
                        part.unlink()
        except OSError as error:
            raise DataError(
                f"cannot keep remote chunks in {settings.folder}: {explain(error)}; set datamodule.cache_dir"
            ) from error

    def fetch(self, name: str, at_most: int, fresh: bool = False) -> Path | None:
        """The local copy of a file, fetched if it is not here, or None if the source has no such file.

        Args:
            at_most: bytes it may have.
            fresh: fetch it anyway, because it may have changed (metadata) or is damaged.
        """
        path = self._path(name)
        if not fresh and self._touch(path):
            return path
        with locked(self.locks / str(hashlib.sha256(str(path).encode()).digest()[0] % LOCKS)):
            # Another process may have fetched it while this one waited.
            if fresh or not self._touch(path):
                data = self.remote.read(name, at_most)
                if data is None:
                    return None
                self._write(path, data)
        return path

    def fetch_all(self, names: list[str], at_most: int) -> None:
        """Fetches several files at a time; those that the source does not have are an error where they are read."""
        missing = [name for name in names if not self._path(name).exists()]
        if len(missing) > 1:
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                list(pool.map(lambda name: self.fetch(name, at_most), missing))

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
            with replacing(path, durable=False, beside=self.parts) as stream:
                stream.write(data)
            with locked(self.settings.folder / ".forgetting_transformer.lock"):
                self._make_room(keep=path)
        except OSError as error:
            raise DataError(
                f"cannot keep {path.name} in {path.parent}: {explain(error)}. Make room there, lower "
                "datamodule.cache_gb, or choose another datamodule.cache_dir"
            ) from error

    def _make_room(self, keep: Path) -> None:
        """Deletes the chunks used longest ago until the rest is within the limit."""
        files = []
        for folder in filter(_is_ours, self.settings.folder.iterdir()):
            for file in folder.rglob("*"):
                with suppress(FileNotFoundError):  # another process of this machine may have replaced it
                    if _CHUNK.fullmatch(file.relative_to(folder).as_posix()) and file.is_file():
                        status = file.stat()
                        files.append((status.st_mtime, status.st_size, file))
        excess = sum(size for _, size, _ in files) - self.settings.limit_bytes
        for _, size, file in sorted(files):
            if excess <= 0:
                break
            if file != keep:
                file.unlink(missing_ok=True)
                excess -= size


def _is_ours(folder: Path) -> bool:
    """Whether a folder is named as its mark says. A copy that somebody made under another name is not."""
    try:
        return (folder / MARK).read_text(encoding="utf-8") == f"{_MARK_TEXT}{folder.name}\n"
    except (OSError, ValueError):
        return False


def fetch_tokenizer(url: str, settings: CacheSettings) -> Path:
    """A local folder with `tokenizer/` as it is below `url`, if it has one."""
    cache = RemoteCache(open_remote(url), settings)
    listed = cache.remote.files("tokenizer")
    # A source that cannot be listed is asked for the files that scripts/prepare_data.py writes.
    names = TOKENIZER_FILES if listed is None else listed
    for name in names:
        if re.fullmatch(r"\w[\w.-]*", name):  # plain names only: a listing comes from elsewhere
            cache.fetch(f"tokenizer/{name}", LARGEST_TOKENIZER_FILE, fresh=True)
    return cache.folder
