"""The live page: the report of runs that go on, over HTTP on this host.

A page holds one connection for server-sent events. A new report is rendered where lines came, at
most once for all pages, and only while a page is open. The runs know nothing of it.
"""

from __future__ import annotations

import json
import math
import re
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from select import select
from typing import Any

from minimind.errors import RendezvousError, StorageError
from minimind.report.history import read_configuration, runs_of
from minimind.report.page import figures, fill_page, render_parts
from minimind.runtime import disk
from minimind.runtime.durable_files import printing
from minimind.runtime.terminal import phase

HOST = "127.0.0.1"
NAMES = (HOST, "localhost", "::1")  # by which a browser may ask, also through a tunnel
HOST_HEADER = re.compile(r"(\[[0-9a-f:]+\]|[a-z0-9.]+)(:[0-9]{1,5})?", re.IGNORECASE)
INTERVAL, SHARE = 1.0, 0.1  # seconds between two reports; share of a core to render them with
POLL, BEAT = 0.25, 5.0  # seconds; `live.js` knows the second
TIMEOUT = 30.0  # seconds for a client to send its request, or to take a part of the answer
MAX_PAGES, MAX_CONNECTIONS = 200, 256  # open at the same time


class LiveReport:
    """The newest report of runs, for several threads."""

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        self._runs = runs_of(run_dirs)
        self._lock = threading.Lock()
        self._due = -math.inf
        self._state: Any = None  # what the newest message tells of
        self.version, self.message = 0, b""

    def refresh(self) -> tuple[int, bytes]:
        """Number and event of the newest report, rendered again if that is due."""
        with self._lock:
            if time.monotonic() >= self._due:
                began, is_first = time.thread_time(), not self.version
                self._read_on()
                # The first one has read all lines, which no later one does.
                spent = 0.0 if is_first else time.thread_time() - began
                self._due = time.monotonic() + max(INTERVAL, spent / SHARE - spent)
            return self.version, self.message

    def page(self) -> bytes:
        """The whole page as of the newest report."""
        self.refresh()
        page = fill_page(*self._parts, is_linked=True, is_live=True)
        return page.encode(errors="backslashreplace")

    def _read_on(self) -> None:
        try:
            grown = [run.read() for run in self._runs]
            runs, now = self._runs, time.time()
            state = [run.outcomes(now)[-1:] for run in runs]
            if not any(grown) and state == self._state:
                return
            self._parts = render_parts(runs, [read_configuration(r.run_dir) for r in runs], now)
        except StorageError as error:
            if not self.version:  # at the start
                raise
            state = str(error)
            if state == self._state:
                return
            name, data = "problem", json.dumps(state)
        else:
            title, body, charts = self._parts
            last = max((r.starts[-1].last_time for r in runs if r.starts), default=math.nan)
            facts: dict[str, Any] = {"title": title, "body": body}
            facts["line_age"] = max(0.0, now - last) if math.isfinite(last) else None
            facts["is_running"] = any(kind == "running" for (kind, _), *_ in filter(None, state))
            name, data = "report", f'{json.dumps(facts)[:-1]},"charts":{figures(charts)}}}'
        self._state = state
        self.message = f"event: {name}\ndata: {data}\n\n".encode(errors="backslashreplace")
        self.version += 1


class Server(ThreadingHTTPServer):
    """Serves a live report on this host, a thread for each connection."""

    request_queue_size = 64

    def __init__(self, report: LiveReport, port: int) -> None:
        self.report = report
        self.pages = threading.BoundedSemaphore(MAX_PAGES)
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self.asking: dict[
            socket.socket, float
        ] = {}  # connections without a request, and since when
        self.is_closed = False
        super().__init__((HOST, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def server_bind(self) -> None:
        """Without the name of the host that HTTPServer asks a resolver for."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own; among too many, instead of the one that is slowest to ask."""
        if not self._connections.acquire(blocking=False):
            if self.asking:
                self._end(min(self.asking, key=self.asking.__getitem__))
            if not self._connections.acquire(timeout=POLL if self.asking else 0):
                return self.shutdown_request(request)
        self.asking[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.asking.pop(request, None)
            self._connections.release()

    def service_actions(self) -> None:
        """End connections on which no request comes; each byte would begin the timeout anew."""
        for connection, since in [*self.asking.items()]:
            if time.monotonic() - since > TIMEOUT:
                self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        with suppress(OSError):  # it is closed
            connection.shutdown(socket.SHUT_RDWR)

    def server_close(self) -> None:
        self.is_closed = True
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Readers come and go; anything else is a bug."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    # The base class declares any server; its handlers are made by ours alone.
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = TIMEOUT

    def parse_request(self) -> bool:
        is_request = super().parse_request()
        self.server.asking.pop(self.connection, None)
        return is_request

    def do_GET(self) -> None:
        hosts, origin = self.headers.get_all("Host", []), self.headers.get("Origin")
        # A name bound to this host, with at most one port: a URL's parser takes more.
        host = HOST_HEADER.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if host is None or host[1].strip("[]").lower() not in NAMES:
            self._refuse(403, f"Ask for {self.server.url}; this server has no other name.")
        elif origin not in (None, f"http://{hosts[0]}"):
            self._refuse(403, "Pages of other origins may not read this.")
        elif self.path == "/":
            self._answer(200, "text/html", self.server.report.page())
        elif self.path != "/events":
            self._refuse(404, f"There is nothing but {self.server.url} here.")
        elif not self.server.pages.acquire(blocking=False):
            self._refuse(503, f"{MAX_PAGES} pages are open; close some.")
        else:
            try:
                self._follow()
            finally:
                self.server.pages.release()

    def __getattr__(self, name: str) -> Any:
        """Refuse each other method."""
        if name.startswith("do_"):
            return lambda: self._refuse(405, "This server is only read; use GET.")
        raise AttributeError(name)

    def _follow(self) -> None:
        """Send each new report until the reader goes away."""
        self._begin(200, "text/event-stream")
        shown, told = 0, time.monotonic()
        while not self.server.is_closed:
            version, message = self.server.report.refresh()
            if version == shown and time.monotonic() - told >= BEAT:
                message = b"event: beat\ndata: null\n\n"
            if version != shown or time.monotonic() - told >= BEAT:
                self.wfile.write(message)
                shown, told = version, time.monotonic()
            if select([self.connection], [], [], POLL)[0]:  # closed, or speaks out of turn
                return

    def _refuse(self, status: int, sentence: str) -> None:
        self._answer(status, "text/plain", f"{sentence}\n".encode())

    def _answer(self, status: int, kind: str, content: bytes) -> None:
        self._begin(status, kind, len(content))
        self.wfile.write(content)

    def _begin(self, status: int, kind: str, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if length is not None:
            self.send_header("Content-Length", str(length))
        if status == 405:
            self.send_header("Allow", "GET")
        # The policy for scripts has a nonce, and stands in the page.
        policy = "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
        self.send_header("Content-Security-Policy", policy)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Not in the terminal."""


def watch(run_dirs: Sequence[Path], port: int) -> None:
    """Serve the report of the runs until Ctrl-C. Raise RendezvousError, StorageError."""
    try:
        server = Server(LiveReport(run_dirs), port)
    except OSError as error:
        raise RendezvousError(
            f"--port {port}: {error.strerror}; give another one, or 0 for one that is free"
        ) from error
    with server:
        with phase("reading the lines so far"):
            server.report.refresh()
        with printing():
            print(f"{server.url} shows the report as it grows; Ctrl-C ends it", flush=True)
            for place in run_dirs:
                if not disk.is_file(place / "metrics.jsonl"):
                    print(f"{place} holds no metrics.jsonl yet; the page waits for it", flush=True)
        server.serve_forever()
