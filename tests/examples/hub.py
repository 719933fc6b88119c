"""A stand-in for the Hugging Face hub on the loopback interface: what it is sent is kept."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    """Takes repositories and commits; `created` and `commits` say which."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.created: list[str] = []
        self.commits: list[dict[str, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    """As much of the hub's interface as push_to_hub asks."""

    server: Hub  # type: ignore[assignment] (narrower than the base class's)

    def answer(self, status: int, body: Any = None, **headers: str) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_GET(self) -> None:
        self.answer(404, X_Error_Code="EntryNotFound")  # a repository without any file

    do_HEAD = do_GET

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            requested = json.loads(content)
            name = f"{requested['organization']}/{requested['name']}"
            self.server.created.append(name)
            self.answer(200, {"url": f"{self.server.url}/{name}", "name": name})
        elif path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = [file["path"] for file in json.loads(content)["files"]]
            taken = {"uploadMode": "regular", "shouldIgnore": False}
            self.answer(200, {"files": [{"path": file, **taken} for file in files]})
        else:
            assert "/commit/" in path, path
            lines = [json.loads(line) for line in content.splitlines()]
            sent = [line["value"] for line in lines if line["key"] == "file"]
            self.server.commits.append({f["path"]: base64.b64decode(f["content"]) for f in sent})
            number = f"{len(self.server.commits):040x}"
            name = path.split("/api/models/")[1].split("/commit/")[0]
            url = f"{self.server.url}/{name}/commit/{number}"
            self.answer(200, {"commitUrl": url, "commitOid": number})

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: pytest's output is not for that."""


@contextmanager
def open_hub() -> Iterator[Hub]:
    """A Hub that answers until the block ends."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
