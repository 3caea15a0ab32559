"""A model hub on this machine, as far as huggingface_hub needs one to make a repository, look into it and commit.

Its protocol is that of huggingface.co: small files travel in the commit itself, large ones through git LFS before.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_stand_in"


class Hub:
    """`repos`: id -> branch -> name of a file -> its content. `created`: what was asked when a repository was made.
    `private`: ids of private repositories.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.created: list[dict] = []
        self.private: set[str] = set()
        self.commits: list[str] = []
        self.large: dict[str, bytes] = {}
        self.url = ""

    def answer(self, method: str, path: str, body: bytes, token: str | None) -> tuple[int, object, dict[str, str]]:
        """Status, content (bytes or JSON) and headers."""
        if path.startswith("/lfs/"):
            self.large[path.removeprefix("/lfs/")] = body
            return 200, {}, {}
        if token != TOKEN:
            return 401, {"error": "Invalid username or password."}, {}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
            status = 409 if name in self.repos else 200
            if status == 200:
                self.repos[name] = {"main": {}}
                self.created.append(asked)
                self.private |= {name} if asked.get("visibility") == "private" else set()
            return status, {"url": f"{self.url}/{name}", "name": name}, {}
        if path == "/api/validate-yaml":  # of a card
            if "license: wrong" in json.loads(body)["content"]:
                return 400, {"errors": [{"message": '"license" must be one of a list'}], "warnings": []}, {}
            return 200, {"errors": [], "warnings": []}, {}
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts[0] == "api":
            name, what, rest = "/".join(parts[2:4]), parts[4] if parts[4:] else "revision", parts[5:] or ["main"]
        elif parts[-3:] == ["lfs", "objects", "batch"]:
            objects = json.loads(body)["objects"]
            for entry in objects:
                entry["actions"] = {"upload": {"href": f"{self.url}/lfs/{entry['oid']}"}}
            return 200, {"transfer": "basic", "objects": objects}, {}
        else:
            name, what, rest = "/".join(parts[:2]), parts[2], parts[3:]
        if name not in self.repos:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        branches = self.repos[name]
        branch = rest[0]
        if what == "branch":
            status = 409 if branch in branches else 200
            branches.setdefault(branch, dict(branches["main"]))
            return status, {}, {}
        files = branches[branch]
        if what == "preupload":
            asked = json.loads(body)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in asked
            ]
            return 200, {"files": modes}, {}
        if what == "tree":
            return 200, [{"type": "file", "path": p, "size": len(c), "oid": _oid(c)} for p, c in files.items()], {}
        if what == "revision":
            siblings = [{"rfilename": path} for path in files]
            private = name in self.private
            return 200, {"id": name, "sha": "0" * 40, "private": private, "siblings": siblings}, {}
        if what == "resolve":
            content = files.get("/".join(rest[1:]))
            if content is None:
                return 404, {}, {"X-Error-Code": "EntryNotFound"}
            return 200, content, {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": "0" * 40}
        if what == "commit":
            for line in body.splitlines():
                entry = json.loads(line)
                key, value = entry["key"], entry["value"]
                if key == "header":
                    self.commits.append(value["summary"])
                elif key == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif key == "lfsFile":
                    files[value["path"]] = self.large[value["oid"]]
                elif key == "deletedFile":
                    del files[value["path"]]
            done = {"commitUrl": f"{self.url}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40, "hookOutput": ""}
            return 200, {"success": True, **done}, {}
        raise AssertionError(f"the stand-in does not know {method} {path}")


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def stand_in() -> Iterator[Hub]:
    """A hub that answers at `hub.url` until the end of the block."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b"".join(self.chunks())
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            status, content, headers = hub.answer(self.command, urlsplit(self.path).path, body, token)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for key, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def chunks(self) -> Iterator[bytes]:
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()

        do_GET = do_HEAD = do_POST = do_PUT = handle_any

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
