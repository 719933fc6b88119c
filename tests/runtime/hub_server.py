"""A server on a loopback port that speaks what huggingface_hub asks: files, LFS and commits."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_aTokenThatNoMessageMayShow0123456"
SIGNATURE = "X-Amz-Signature=5ecret"
USER, GROUP = "ana", "poets"
LARGE = 1000  # bytes from which a file is one of LFS

Files = Mapping[str, bytes]


def git_sha1(content: bytes) -> str:
    """The name of a blob in git."""
    return hashlib.sha1(b"blob %d\0%s" % (len(content), content)).hexdigest()


class Hub:
    """Repositories by kind and name, each a list of commits; the newest is `main`."""

    def __init__(self) -> None:
        self.commits: dict[tuple[str, str], list[tuple[str, Files]]] = {}
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.uploaded: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.role = "write"
        self.damages = 0  # answers of large files that have one wrong byte
        self.cuts = 0  # answers of large files that end in the middle
        self.lost_uploads = 0  # uploads whose connection ends without an answer
        self.answers: dict[str, int] = {}  # statuses of routes that this server lacks or refuses
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {}))
        self._server.hub = self  # pyright: ignore[reportAttributeAccessIssue] (for the handler)
        self.host, self.port = "127.0.0.1", self._server.server_port
        self.url = f"http://{self.host}:{self.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def clear(self) -> None:
        """Forget everything."""
        for held in (self.commits, self.private, self.gated, self.uploaded, self.requests):
            held.clear()
        self.answers.clear()
        self.role, self.damages, self.cuts, self.lost_uploads = "write", 0, 0, 0

    def commit(self, kind: str, name: str, files: Files) -> str:
        """Make a commit with exactly these files; return its hash."""
        commits = self.commits.setdefault((kind, name), [])
        content = json.dumps([len(commits), name, {n: git_sha1(c) for n, c in files.items()}])
        commits.append((hashlib.sha1(content.encode()).hexdigest(), dict(files)))
        return commits[-1][0]

    def files(self, name: str, kind: str = "model") -> Files:
        """The files of the newest commit."""
        return self.commits[kind, name][-1][1]

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    is_cut = False

    @property
    def hub(self) -> Hub:
        return self.server.hub  # pyright: ignore[reportAttributeAccessIssue] (Hub sets it)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._handle("GET")

    def do_HEAD(self) -> None:
        self._handle("HEAD")

    def do_POST(self) -> None:
        self._handle("POST")

    def do_PUT(self) -> None:
        self._handle("PUT")

    def _handle(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{method} {path}")
        for part, status in self.hub.answers.items():
            if part in path:
                self._send(status, b"<html>")
                return
        for pattern, answer in ROUTES:
            if match := re.fullmatch(pattern, f"{method} {path}"):
                answer(self, body, **match.groupdict())
                return
        self._error(404, "", f"no route for {method} {path}")

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, message: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": message})

    @property
    def _is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _files(self, kind: str, name: str, revision: str) -> tuple[str, Files] | None:
        """A commit and its files; None once an error was sent."""
        commits = self.hub.commits.get((kind, name))
        if commits is None or (name in self.hub.private and not self._is_known):
            self._error(401, "RepoNotFound", "Invalid username or password.")
            return None
        if name in self.hub.gated:
            self._error(403, "GatedRepo", "Access to this is restricted.")
            return None
        for sha, files in [("main", commits[-1][1]), *commits]:
            if sha == revision:
                return (commits[-1][0] if sha == "main" else sha), files
        self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return None

    def info(self, _: bytes, kind: str, name: str, revision: str | None = None) -> None:
        if found := self._files(kind, name, revision or "main"):
            siblings = [{"rfilename": path} for path in found[1]]
            facts = {"private": name in self.hub.private, "tags": []}
            self._json({"id": name, "sha": found[0], "siblings": siblings, **facts})

    def tree(self, _: bytes, kind: str, name: str, revision: str) -> None:
        if found := self._files(kind, name, revision):
            self._json([_entry(path, content) for path, content in found[1].items()])

    def resolve(self, _: bytes, name: str, revision: str, path: str, kind: str = "") -> None:
        found = self._files("dataset" if kind else "model", name, revision)
        if found is None:
            return
        if (content := found[1].get(path)) is None:
            self._error(404, "EntryNotFound", "Entry not found")
            return
        headers = {"X-Repo-Commit": found[0], "Accept-Ranges": "bytes"}
        if len(content) < LARGE:
            self._content(content, headers | {"ETag": f'"{git_sha1(content)}"'})
            return
        sha = hashlib.sha256(content).hexdigest()
        self.hub.uploaded[sha] = content
        # Another host than the Hub's, whose redirects the client follows itself.
        host = self.headers["Host"].replace("127.0.0.1", "localhost")
        place = f"http://{host}/cdn/{sha}?{SIGNATURE}"
        size = str(len(content))
        linked = {"Location": place, "X-Linked-Etag": f'"{sha}"', "X-Linked-Size": size}
        self._send(302, b"", headers | linked)

    def cdn(self, _: bytes, sha: str) -> None:
        content = self.hub.uploaded[sha]
        if self.hub.damages:
            self.hub.damages -= 1
            content = bytes([content[0] ^ 1]) + content[1:]
        self.is_cut = bool(self.hub.cuts) and self.command == "GET"
        self.hub.cuts -= self.is_cut
        self._content(content, {"ETag": f'"{sha}"'})

    def _content(self, content: bytes, headers: Mapping[str, str]) -> None:
        status = 200
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(asked[1]), min(int(asked[2] or len(content) - 1), len(content) - 1)
            span = {"Content-Range": f"bytes {start}-{end}/{len(content)}"}
            status, headers, content = 206, {**headers, **span}, content[start : end + 1]
        if self.is_cut:
            headers = {**headers, "Content-Length": str(len(content))}
            content, self.close_connection = content[: len(content) // 2], True
        self._send(status, content, headers)

    def whoami(self, _: bytes) -> None:
        if not self._is_known:
            self._error(401, "", "Invalid credentials in Authorization header")
            return
        token = {"displayName": "a token", "role": self.hub.role}
        groups = [{"name": GROUP, "type": "org"}]
        self._json({"name": USER, "type": "user", "orgs": groups, "auth": {"accessToken": token}})

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        if not self._is_known or self.hub.role == "read":
            self._error(403, "", "You don't have the rights to create a model")
        elif ("model", name) in self.hub.commits:
            place = {"url": f"{self.hub.url}/{name}"}
            self._send(409, json.dumps(place).encode(), {"X-Error-Message": "It is there."})
        else:
            self.hub.commit("model", name, {".gitattributes": b"*.safetensors filter=lfs\n"})
            if asked.get("visibility") == "private" or asked.get("private"):
                self.hub.private.add(name)
            self._json({"url": f"{self.hub.url}/{name}"})

    def preupload(self, body: bytes, name: str) -> None:
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["size"] >= LARGE else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in json.loads(body)["files"]
        ]
        self._json({"files": modes})

    def batch(self, body: bytes, name: str) -> None:
        place = f"http://{self.headers['Host']}/up"
        objects = [
            {**one, "actions": {"upload": {"href": f"{place}/{one['oid']}?{SIGNATURE}"}}}
            for one in json.loads(body)["objects"]
        ]
        self._json({"transfer": "basic", "objects": objects})

    def upload(self, body: bytes, sha: str) -> None:
        if self.hub.lost_uploads:
            self.hub.lost_uploads -= 1
            self.close_connection = True
            return
        if hashlib.sha256(body).hexdigest() != sha:
            self._error(400, "", "the content has another hash")
            return
        self.hub.uploaded[sha] = body
        self._send(200, b"")

    def receive(self, body: bytes, name: str) -> None:
        files = dict(self.hub.files(name))
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploaded[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        sha = self.hub.commit("model", name, files)
        place = f"{self.hub.url}/{name}/commit/{sha}"
        self._json({"success": True, "commitOid": sha, "commitUrl": place})

    def validate(self, _: bytes) -> None:
        self._json({"errors": [], "warnings": []})


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content)}
    if len(content) < LARGE:
        return {**entry, "oid": git_sha1(content)}
    sha = hashlib.sha256(content).hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize {len(content)}\n"
    lfs = {"oid": sha, "size": len(content), "pointerSize": len(pointer)}
    return {**entry, "oid": git_sha1(pointer.encode()), "lfs": lfs}


_REPOSITORY = "(?P<name>[^/]+/[^/]+)"
_KIND = "/api/(?P<kind>model|dataset)s"
ROUTES: tuple[tuple[str, Any], ...] = (
    (f"GET {_KIND}/{_REPOSITORY}(/revision/(?P<revision>.+))?", _Handler.info),
    (f"GET {_KIND}/{_REPOSITORY}/tree/(?P<revision>[^/]+)", _Handler.tree),
    (
        f"(GET|HEAD) /(?P<kind>datasets/)?{_REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<path>.+)",
        _Handler.resolve,
    ),
    ("(GET|HEAD) /cdn/(?P<sha>[0-9a-f]+)", _Handler.cdn),
    ("GET /api/whoami-v2", _Handler.whoami),
    ("POST /api/repos/create", _Handler.create),
    (f"POST /api/models/{_REPOSITORY}/preupload/main", _Handler.preupload),
    (f"POST /{_REPOSITORY}.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT /up/(?P<sha>[0-9a-f]+)", _Handler.upload),
    (f"POST /api/models/{_REPOSITORY}/commit/main", _Handler.receive),
    ("POST /api/validate-yaml", _Handler.validate),
)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A server until the end of the block."""
    hub = Hub()
    try:
        yield hub
    finally:
        hub.close()
