"""Files of a corpus that lies elsewhere: on the Hugging Face hub, behind HTTP, in S3, GCS or whatever fsspec reads.

One small interface serves the downloader and training on remote arrays: what files there are (where the source can
say), how large, with which checksum, and their bytes, whole, or an error. A file that ends early, a connection that
breaks and a server that is busy are tried again; a file that is not there is not.

fsspec carries the bytes of object stores, and huggingface_hub lists the hub. Bytes behind HTTP come through httpx: of
these libraries one request per file, a bound on what is kept of an answer, and the server's wish to be left alone for a
while are not to be had.
"""

import hashlib
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, TypeVar

from forgetting_transformer.console import is_redacted, redact
from forgetting_transformer.data.errors import DataError
from forgetting_transformer.versions import how_to_install

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Seconds without a byte, or without an answer, after which a connection is given up and tried again.
SILENCE_SECONDS = 30.0
ATTEMPTS = 6
#: Seconds before the second attempt; each further one waits twice as long, up to LONGEST_WAIT.
FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0
#: Longest wait that a server may ask for; the hub counts requests over five minutes.
LONGEST_ASKED_WAIT = 330.0
#: Seconds of waiting for one file, all in all, after which it is given up.
LONGEST_WAITING = 1000.0
#: Questions under way at a time where a source has to be asked for each file.
PROBES = 64
#: HTTP answers that mean "later".
PASSING = {408, 425, 429, 500, 502, 503, 504}


class RemoteError(DataError):
    """The source could not be read, after all attempts."""


class TryAgain(Exception):
    """A failure that may pass; `after` is the wait in seconds that the server asked for."""

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


@dataclass(frozen=True)
class RemoteFile:
    """What the source states about a file; None where it does not say."""

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


class RemoteFolder:
    """A folder of files at a URL. Subclasses say how to reach it.

    Attributes:
        address: the URL as it was given, perhaps with a password.
        url: the same without, for messages and files.

    Objects may be used from several threads and handed to worker processes; connections are made in each process.
    """

    def __init__(self, url: str, attempts: int | None = None, first_wait: float | None = None) -> None:
        self.address, self.attempts = url.rstrip("/"), attempts or ATTEMPTS
        self.url = redact(self.address)
        self.first_wait = FIRST_WAIT if first_wait is None else first_wait
        self._connections: dict[int, Any] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_connections", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _connections={}, _lock=threading.Lock())

    def files(self, folder: str) -> dict[str, RemoteFile] | None:
        """All files below `folder` by their path in it; None where the source cannot list (plain HTTP).

        The names come from the source: look up in this dictionary what you expect, never build a path from them.
        """
        return self._persist(folder, lambda: self._files(folder))

    def find(self, folder: str, names: Iterable[str]) -> dict[str, RemoteFile]:
        """What the source states about those of the files `names` below `folder` that it has."""
        names = list(names)
        listed = self.files(folder)
        if listed is not None:
            return {name: listed[name] for name in names if name in listed}
        log.info("asking for each of %s files of %s, which cannot be listed", f"{len(names):,}", self.url)
        with ThreadPoolExecutor(PROBES) as pool:
            stated = pool.map(self._stat_again, (join(folder, name).lstrip("/") for name in names))
            return {name: file for name, file in zip(names, stated, strict=True) if file is not None}

    def _stat_again(self, name: str) -> RemoteFile | None:
        return self._persist(name, lambda: self._stat(name))

    def read(self, name: str, at_most: int, expected: RemoteFile | None = None) -> bytes | None:
        """The whole file, or None if there is no such file.

        Args:
            at_most: bytes after which it cannot be what is looked for, and is refused.
            expected: what the source stated; a file that differs is fetched again.

        Raises:
            RemoteError: it could not be had, or not as it should be.
        """

        def fetch() -> bytes | None:
            data = self._read(name, at_most)
            if expected is not None and data is not None and (problem := expected.mismatch(data)):
                raise TryAgain(problem)
            return data

        return self._persist(name, fetch)

    def connection(self) -> Any:
        """The client of this process: one inherited through fork shares sockets with the parent, which ends badly."""
        with self._lock:
            if os.getpid() not in self._connections:
                self._connections[os.getpid()] = self._connect()
            return self._connections[os.getpid()]

    def _persist(self, name: str, action: Callable[[], T]) -> T:
        waited, attempt = 0.0, 0
        while True:
            try:
                return action()
            except TryAgain as error:
                attempt += 1
                wait = min(LONGEST_WAIT, self.first_wait * 2 ** (attempt - 1) * random.uniform(0.75, 1.25))
                if error.after is not None:
                    wait = min(error.after, LONGEST_ASKED_WAIT)
                place = join(self.url, name)
                if attempt == self.attempts or waited + wait > LONGEST_WAITING:
                    after = f"{attempt} attempts" + (f" in {waited:.0f} s" if waited >= 1 else "")
                    raise RemoteError(
                        f"cannot read {place}: {error} ({after}). Check the network and start the same command again"
                    ) from error
                asked = f" (the server asks for {error.after:.0f} s)" if error.after is not None else ""
                log.warning(
                    "%s: %s; attempt %d of %d in %.0f s%s", place, error, attempt + 1, self.attempts, wait, asked
                )
            waited += wait
            time.sleep(wait)

    def _connect(self) -> Any:
        raise NotImplementedError

    def _files(self, folder: str) -> dict[str, RemoteFile] | None:
        raise NotImplementedError

    def _stat(self, name: str) -> RemoteFile | None:
        """What the source states about one file; None if there is no such file."""
        raise NotImplementedError

    def _read(self, name: str, at_most: int) -> bytes | None:
        raise NotImplementedError


class HttpFolder(RemoteFolder):
    """A prefix that a web server serves. It cannot be listed; each file can be asked for."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.base = self.address
        self.headers: dict[str, str] = {}

    def _connect(self) -> Any:
        import httpx

        logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line in the run's log for every file
        return httpx.Client(
            # Compressed transfer would hide the file's size, and chunks are compressed already.
            headers={"accept-encoding": "identity", **self.headers},
            timeout=SILENCE_SECONDS,
            follow_redirects=True,
            limits=httpx.Limits(max_connections=None),
        )

    def _files(self, folder: str) -> dict[str, RemoteFile] | None:
        return None

    def _stat(self, name: str) -> RemoteFile | None:
        with self._answer("HEAD", name) as response:
            length = response and response.headers.get("content-length")
            return None if response is None else RemoteFile(int(length) if length else None)

    def _read(self, name: str, at_most: int) -> bytes | None:
        with self._answer("GET", name) as response:
            if response is None:
                return None
            data = bytearray()
            for piece in response.iter_raw():
                data += piece
                if len(data) > at_most:
                    raise RemoteError(
                        f"{join(self.url, name)} is larger than {at_most:,} bytes, so it is not the file it should "
                        "be; check the URL"
                    )
            return bytes(data)

    @contextmanager
    def _answer(self, method: str, name: str) -> Iterator[Any]:
        """An open response of status 200, or None for 404; everything else is raised as what it means."""
        import httpx

        url = join(self.base, name)
        try:
            with self.connection().stream(method, url) as response:
                status = response.status_code
                if status in PASSING:
                    raise TryAgain(f"the server answered {status}", _asked_wait(response.headers))
                if status not in (200, 404):
                    hint = "; it needs a login (`hf auth login`, or HF_TOKEN)" if status in (401, 403) else ""
                    raise RemoteError(f"{url}: the server answered {status} {response.reason_phrase}{hint}")
                yield response if status == 200 else None
        except httpx.TransportError as error:
            raise TryAgain(f"{type(error).__name__}: {error}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:  # redirected in circles, or to nowhere
            raise RemoteError(f"{redact(url)}: {error} Check the URL") from error


def _asked_wait(headers: Any) -> float | None:
    """Seconds that the server wants to be left alone: `Retry-After: 30`, or the hub's `RateLimit: "…";r=0;t=30`."""
    asked = re.fullmatch(r"\d+", headers.get("retry-after", "")) or re.search(
        r"(?<=;t=)\d+", headers.get("ratelimit", "")
    )
    return float(asked[0]) if asked else None


class HubFolder(HttpFolder):
    """A data set repository on the Hugging Face hub: hf://datasets/OWNER/NAME[@REVISION][/FOLDER].

    Listed with sizes and SHA-256 sums. Without a revision it is whatever `main` is that day; with one it never changes.
    HF_ENDPOINT and HF_TOKEN mean what they mean to huggingface_hub.
    """

    FORM = re.compile(r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?:/(?P<folder>.*))?")

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers

        match = self.FORM.fullmatch(self.address)
        if match is None:
            raise DataError(f"{url} is not of the form hf://datasets/OWNER/NAME[@REVISION][/FOLDER]")
        self.repo, self.revision = match["repo"], match["revision"] or "main"
        self.folder, self.endpoint = match["folder"] or "", constants.ENDPOINT
        self.base = join(f"{self.endpoint}/datasets/{self.repo}/resolve/{self.revision}", self.folder)
        self.headers = build_hf_headers()

    def _files(self, folder: str) -> dict[str, RemoteFile]:
        from huggingface_hub import HfApi, errors
        from huggingface_hub.hf_api import RepoFile

        path = str(PurePosixPath(self.folder, folder))
        try:
            entries = HfApi(endpoint=self.endpoint).list_repo_tree(
                self.repo,
                path_in_repo=None if path == "." else path,
                repo_type="dataset",
                revision=self.revision,
                recursive=True,
            )
            prefix = 0 if path == "." else len(path) + 1
            # Large files are stored by their SHA-256; small ones are git blobs, whose id hashes more than the contents.
            return {
                entry.path[prefix:]: RemoteFile(entry.size, entry.lfs.sha256 if entry.lfs else None)
                for entry in entries
                if isinstance(entry, RepoFile)
            }
        except errors.EntryNotFoundError:
            return {}
        except errors.RepositoryNotFoundError as error:
            raise RemoteError(
                f"no data set {self.repo} (or it is private) at {self.endpoint}; check {self.url}"
            ) from error
        except errors.OfflineModeIsEnabled as error:
            raise RemoteError(f"cannot list {self.url}: HF_HUB_OFFLINE is set; unset it") from error
        except Exception as error:  # also of the HTTP library under huggingface_hub, which changes between versions
            status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
            if status is not None and status not in PASSING:
                raise RemoteError(f"cannot list {self.url}: {error}") from error
            raise TryAgain(f"the hub answered {status}" if status else f"{type(error).__name__}: {error}") from error


class FsspecFolder(RemoteFolder):
    """Anything else that fsspec reads: s3://, gs://, az://, memory://, …"""

    def _connect(self) -> tuple[Any, str]:
        import fsspec

        try:
            return fsspec.core.url_to_fs(self.address)
        except ImportError as error:
            cure = f"{how_to_install('remote')} brings S3 and GCS"
            raise DataError(f"{self.url} cannot be read: {error}. {cure}") from error
        except ValueError as error:
            raise DataError(
                f"{self.url} cannot be read: {error}; known are hf://, https://, s3://, gs://, …"
            ) from error

    def _files(self, folder: str) -> dict[str, RemoteFile]:
        system, root = self.connection()
        top = (join(root, folder) if root else folder).strip("/")
        found = _translated(lambda: system.find(top, detail=True)) or {}
        names = {path.strip("/")[len(top) :].lstrip("/"): details for path, details in found.items()}
        return {name: RemoteFile(details.get("size")) for name, details in names.items() if name}

    def _stat(self, name: str) -> RemoteFile | None:
        system, root = self.connection()
        details = _translated(lambda: system.info(join(root, name)))
        return None if details is None or details.get("type") == "directory" else RemoteFile(details.get("size"))

    def _read(self, name: str, at_most: int) -> bytes | None:
        system, root = self.connection()
        size = (self._stat(name) or RemoteFile()).size
        if size is not None and size > at_most:
            raise RemoteError(f"{join(self.url, name)} has {size:,} bytes, more than the {at_most:,} it can have")
        return _translated(lambda: system.cat_file(join(root, name)))


def _translated(action: Callable[[], T]) -> T | None:
    """None for a file that is not there; failures that may pass as such."""
    try:
        return action()
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise RemoteError(f"access denied: {error}. Check the credentials of this machine") from error
    except OSError as error:
        raise TryAgain(str(error) or type(error).__name__) from error


def open_remote(url: str, **options: Any) -> RemoteFolder:
    """The folder at `url`: hf://datasets/…, https://…, or anything that fsspec reads.

    Keyword Args:
        attempts: how often a file is tried.
        first_wait: seconds before the second attempt.

    Raises:
        DataError: a URL of the wrong form, or of a kind that needs a package that is not installed.
    """
    if is_redacted(url):
        raise DataError(f"{url} is a record of a URL, without its secret; give data_dir=… once more, with its password")
    if url.startswith("hf://"):
        return HubFolder(url, **options)
    if url.startswith(("http://", "https://")):
        return HttpFolder(url, **options)
    folder = FsspecFolder(url, **options)
    folder.connection()
    return folder
