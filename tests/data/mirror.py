"""A local web server that holds a folder, as plain HTTP and as a data set of a model hub, and fails on demand."""

import base64
import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numcodecs
import numpy as np
import zarr

REPOSITORY, REVISION = "someone/longcrawl64", "0123abcd"


class Mirror:
    """Serves `root` at `url`, and as hf://datasets/<repository>@<revision> at the endpoint `url`.

    Attributes:
        faults: file name -> what its next requests get, first to last: "cut" (half the bytes, then the connection
            breaks), "flip" (one byte differs), "slow" (0.2 s), "silent" (until the end), "hang up", "circle" (a
            redirection to itself), or a status code.
        headers: of the answers with such a status code.
        requests: how often each (method, path below root) was asked for.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.faults: dict[str, list[str | int]] = {}
        self.headers: dict[str, str] = {}
        self.requests: Counter[tuple[str, str]] = Counter()
        self.lock = threading.Lock()
        self.ended = threading.Event()

    def next_fault(self, name: str) -> str | int | None:
        with self.lock:
            waiting = self.faults.get(name)
            return waiting.pop(0) if waiting else None

    def fetched(self) -> dict[str, int]:
        """Requests for the contents of chunks, by name."""
        chunks = re.compile(r".*/[\d.]+")
        return {name: n for (method, name), n in self.requests.items() if method == "GET" and chunks.fullmatch(name)}


@contextmanager
def serve(
    root: Path, password: str | None = None, repository: str = REPOSITORY, revision: str = REVISION
) -> Iterator[Mirror]:
    """`password`: of the user "reader", without which the answer is 401."""
    mirror = Mirror(root)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            known = "Basic " + base64.b64encode(f"reader:{password}".encode()).decode()
            if password is not None and self.headers.get("Authorization") != known:
                return self.send(401, b"")
            path = unquote(urlsplit(self.path).path).strip("/")
            tree = f"api/datasets/{repository}/tree/{revision}"
            if path == tree or path.startswith(f"{tree}/"):
                return self.send(200, tree_of(mirror.root, path.removeprefix(tree).strip("/")))
            name = path.removeprefix(f"datasets/{repository}/resolve/{revision}/")
            with mirror.lock:
                mirror.requests[self.command, name] += 1
            fault = mirror.next_fault(name)
            file = mirror.root / name
            if isinstance(fault, int):
                return self.send(fault, b"", **mirror.headers)
            if fault == "circle":
                return self.send(302, b"", Location=self.path)
            if fault == "hang up":
                self.close_connection = True
                return self.connection.close()
            if fault == "slow":
                time.sleep(0.2)
            if fault == "silent":
                mirror.ended.wait()
            if not file.is_file():
                return self.send(404, b"")
            data = file.read_bytes()
            if fault == "flip":
                data = bytes([data[0] ^ 1]) + data[1:]
            self.send(200, data, cut=fault == "cut")

        def send(self, status: int, data: bytes, cut: bool = False, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if cut else data)
            if cut:
                self.close_connection = True

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # the default, 5, makes the others wait a second

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    mirror.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield mirror
    finally:
        mirror.ended.set()
        server.shutdown()
        server.server_close()


def tree_of(root: Path, below: str) -> bytes:
    """The hub's listing: large files with the SHA-256 under which they are stored, small ones without."""
    entries = []
    for file in sorted((root / below).rglob("*")):
        if file.is_file():
            data = file.read_bytes()
            entry = {"type": "file", "oid": "0" * 40, "size": len(data), "path": str(file.relative_to(root))}
            if file.name[0].isdigit():
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            entries.append(entry)
    return json.dumps(entries).encode()


DOCUMENTS, DOC_LEN, CHUNK = 44, 96, (8, 24)


def tokens_of_corpus() -> np.ndarray:
    """Every token says where it stands."""
    return (np.arange(DOCUMENTS * DOC_LEN).reshape(DOCUMENTS, DOC_LEN) % 50_000 + 1).astype(np.uint16)


def write_layout(folder: Path, missing: tuple[str, ...] = ()) -> np.ndarray:
    """A small array in LongCrawl64's layout (Zarr v2, Blosc lz4, keys row.column, a ragged last row), with holes."""
    tokens = tokens_of_corpus()
    with zarr.config.set({"array.write_empty_chunks": True}):
        array = zarr.create_array(
            folder,
            shape=tokens.shape,
            chunks=CHUNK,
            dtype="<u2",
            fill_value=0,
            compressors=numcodecs.Blosc(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE),
            chunk_key_encoding={"name": "v2", "separator": "."},
            zarr_format=2,
        )
        array[:] = tokens
    for key in missing:
        (folder / key).unlink()
    return tokens
