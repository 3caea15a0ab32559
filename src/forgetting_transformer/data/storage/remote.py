"""Files of a remote corpus: on the Hugging Face hub, behind HTTP, in S3, GCS or wherever fsspec reads.

fsspec fetches the bytes, and huggingface_hub lists the hub. This module adds: retries where a connection breaks or goes
silent and where a server is busy, as late as it asks, but not for missing files; and checks of size and SHA-256 against
those that the source states.
"""

import functools
import hashlib
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from forgetting_transformer.console import how_to_install, is_redacted, redact
from forgetting_transformer.data.errors import DataError

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Seconds without a byte, or without an answer, after which a connection is given up and tried again.
SILENCE_SECONDS = 30.0
ATTEMPTS = 6
#: Seconds before the second attempt; each further one waits twice as long.
FIRST_WAIT = 1.0
#: Longest wait that a server may ask for; the hub counts requests over five minutes.
LONGEST_ASKED_WAIT = 330.0
#: Total seconds of waiting for one file, after which it is given up.
LONGEST_WAITING = 1000.0
#: HTTP answers that mean "later".
PASSING = {408, 425, 429, 500, 502, 503, 504}
_CONNECTING = threading.Lock()
_HUB = re.compile(r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?:/(?P<folder>.*))?")


@dataclass(frozen=True)
class RemoteFile:
    """Size and SHA-256 of a file as the source states them; None where it does not."""

    size: int | None = None
    sha256: str | None = None

    def mismatch(self, data: bytes) -> str | None:
        """Why `data` is not this file, or None if it may be."""
        if self.size is not None and len(data) != self.size:
            return f"{len(data):,} bytes came of {self.size:,}"
        if self.sha256 is not None and (found := hashlib.sha256(data).hexdigest()) != self.sha256:
            return f"its SHA-256 is {found}, the source states {self.sha256}"
        return None


def is_url(location: object) -> bool:
    """Whether a data_dir names a remote place such as s3://bucket/folder, rather than a folder."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", str(location)) is not None


def join(url: str, *parts: str) -> str:
    """`url` with parts appended; "" and "." add nothing."""
    for part in parts:
        for name in PurePosixPath(part).parts:
            if name in ("..", "/"):
                raise DataError(f"{part!r} does not lie inside {url}; give a path without '..' that is not absolute")
            url = f"{url.rstrip('/')}/{name}"
    return url


def read_file(folder: str | Path, name: str) -> bytes | None:
    """A file in a folder or below a URL; None if there is no such file."""
    if is_url(folder):
        return RemoteFolder(str(folder)).read(name)
    file = Path(folder, name)
    return file.read_bytes() if file.is_file() else None


class RemoteFolder:
    """A folder of files at a URL: hf://datasets/OWNER/NAME[@REVISION][/FOLDER], https://… or another that fsspec reads.

    HF_ENDPOINT and HF_TOKEN mean what they mean to huggingface_hub. Objects may be used from several threads and handed
    to worker processes.

    Attributes:
        address: the URL as it was given, perhaps with a password.
        url: the same without, for messages and files.

    Raises:
        DataError: a URL of the wrong form, or of a kind that needs a package that is not installed.
    """

    def __init__(self, url: str) -> None:
        if is_redacted(url):
            raise DataError(
                f"{url} is a record of a URL, without its secret; give data_dir=… once more, with its password"
            )
        self.address = url.rstrip("/")
        self.url = redact(self.address)
        self._repository: tuple[str, str, str] | None = None
        if self.address.startswith("hf://"):
            match = _HUB.fullmatch(self.address)
            if match is None:
                raise DataError(f"{url} is not of the form hf://datasets/OWNER/NAME[@REVISION][/FOLDER]")
            self._repository = match["repo"], match["revision"] or "main", match["folder"] or ""
        self._connection()

    def files(self) -> dict[str, RemoteFile] | None:
        """All files below the folder by their path in it; None where the source cannot list (plain HTTP).

        The names come from the source: look up in this dictionary what you expect, never build a path from them.
        """
        if self._repository is not None:
            return self._persist("", self._list_hub) or {}
        if self.address.startswith(("http://", "https://")):
            return None
        system, root = self._connection()
        found, top = self._persist("", lambda: system.find(root, detail=True)) or {}, root.strip("/")
        return {path.strip("/")[len(top) :].lstrip("/"): RemoteFile(of.get("size")) for path, of in found.items()}

    def read(self, name: str, expected: RemoteFile | None = None) -> bytes | None:
        """The whole file, or None if there is no such file.

        Args:
            expected: as the source stated; a file that differs is fetched again.

        Raises:
            DataError: it could not be fetched, or differs.
        """

        def fetch() -> bytes:
            system, root = self._connection()
            data = system.cat_file(join(root, name))
            if expected is not None and (problem := expected.mismatch(data)):
                raise OSError(problem)
            return data

        return self._persist(name, fetch)

    def _list_hub(self) -> dict[str, RemoteFile]:
        from huggingface_hub import HfApi, constants
        from huggingface_hub.hf_api import RepoFolder

        assert self._repository is not None
        repository, revision, path = self._repository
        entries = HfApi(endpoint=constants.ENDPOINT).list_repo_tree(
            repository, path or None, repo_type="dataset", revision=revision, recursive=True
        )
        # Large files are stored by their SHA-256; small ones are git blobs, whose id hashes more than the contents.
        return {
            entry.path.removeprefix(f"{path}/"): RemoteFile(entry.size, entry.lfs.sha256 if entry.lfs else None)
            for entry in entries
            if not isinstance(entry, RepoFolder)
        }

    def _connection(self) -> tuple[Any, str]:
        """File system and folder in it."""
        base, headers = self.address, {"accept-encoding": "identity"}  # chunks are compressed already
        if self._repository is not None:
            from huggingface_hub import constants
            from huggingface_hub.utils import build_hf_headers

            repository, revision, folder = self._repository
            base = join(f"{constants.ENDPOINT}/datasets/{repository}/resolve/{revision}", folder)
            headers |= build_hf_headers()
        try:
            with _CONNECTING:
                return _connect(os.getpid(), base, SILENCE_SECONDS, tuple(headers.items()))
        except (ImportError, ValueError) as error:
            raise DataError(
                f"{self.url} cannot be read: {error}; known are hf://, https://, s3://, gs://, … "
                f"({how_to_install('remote')} brings S3 and GCS)"
            ) from error

    def _persist(self, name: str, action: Callable[[], T]) -> T | None:
        """Runs `action`, with retries, and returns its result; None if there is no such file.

        Raises:
            DataError: it fails, and would again, or has too often.
        """
        place, waited, attempt = join(self.url, name), 0.0, 0
        while True:
            try:
                return action()
            except DataError:
                raise
            except Exception as error:  # each file system has its own
                answer = getattr(error, "response", None) or error
                status = getattr(answer, "status_code", None) or getattr(answer, "status", None)
                if isinstance(error, FileNotFoundError) or status == 404:
                    return None
                kind = "" if type(error) is OSError else f"{type(error).__name__}: "
                said = f"the server answered {status}" if status else f"{kind}{error}"
                if isinstance(error, PermissionError | ValueError) or status not in (None, *PASSING):
                    login = "; a data set of the hub may need `hf auth login`, or HF_TOKEN" if self._repository else ""
                    raise DataError(f"cannot read {place}: {said}. Check the URL and the login{login}") from error
                attempt += 1
                asked = _asked_wait(getattr(answer, "headers", None) or {})
                usual = FIRST_WAIT * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)
                wait = usual if asked is None else min(asked, LONGEST_ASKED_WAIT)
                if attempt == ATTEMPTS or waited + wait > LONGEST_WAITING:
                    raise DataError(
                        f"cannot read {place}: {said} ({attempt} attempts in {waited:.0f} s). Check the network and "
                        "start the same command again"
                    ) from error
                line = "%s: %s; attempt %d of %d in %.0f s"
                log.warning(line, place, redact(said), attempt + 1, ATTEMPTS, wait)
            waited += wait
            time.sleep(wait)


# File systems are made once for each process: one inherited through fork shares sockets. They are never let go: where
# a forked process collects its parent's, closing waits a second.
@functools.cache
def _connect(pid: int, base: str, silence: float, headers: tuple[tuple[str, str], ...]) -> tuple[Any, str]:
    import fsspec

    if not base.startswith(("http://", "https://")):
        return fsspec.core.url_to_fs(base)
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=silence, sock_read=silence)
    client = {"timeout": timeout, "trust_env": True}
    return fsspec.filesystem("http", client_kwargs=client, headers=dict(headers), skip_instance_cache=True), base


def _asked_wait(headers: Any) -> float | None:
    """Seconds until the server accepts the next request: `Retry-After: 30`, or the hub's `RateLimit: "…";r=0;t=30`."""
    asked = re.fullmatch(r"\d+", headers.get("retry-after", "")) or re.search(
        r"(?<=;t=)\d+", headers.get("ratelimit", "")
    )
    return float(asked[0]) if asked else None
