"""The live page: the report of runs that go on, over HTTP on this host.

A page holds one connection for server-sent events. New lines are rendered once for all pages, and
only while a page is open. The runs are not asked: their files are read. Needs the packages
starlette and uvicorn.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from minimind.errors import RendezvousError, StorageError
from minimind.report.history import Run, console_size, read_configuration, runs_of
from minimind.report.page import figures, fill_page, render_parts
from minimind.runtime import disk
from minimind.runtime.durable_files import printing
from minimind.runtime.terminal import phase

HOST = "127.0.0.1"
NAMES = [HOST, "localhost", "[::1]"]  # by which a browser may ask, also through a tunnel
INTERVAL, SHARE = 1.0, 0.1  # seconds between two reports; share of a core to render them with
STALE = 30.0  # seconds without an event, or three times the pace of a run
POLL, BEAT = 0.25, 5.0  # seconds; `live.js` knows the second
MAX_CONNECTIONS = 256  # open at the same time
ANSWERS_END = 1  # seconds that answers have to end after a signal
HEADERS = {
    # The policy for scripts has a nonce, and stands in the page.
    "Content-Security-Policy": "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


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
            consoles = [console_size(run.run_dir) for run in runs]
            state = [[run.outcomes(now)[-1:] for run in runs], consoles]
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
            facts["state"] = state_of(runs, now)
            name, data = "report", f'{json.dumps(facts)[:-1]},"charts":{figures(charts)}}}'
        self._state = state
        self.message = f"event: {name}\ndata: {data}\n\n".encode(errors="backslashreplace")
        self.version += 1


def state_of(runs: Sequence[Run], now: float) -> dict[str, Any]:
    """The state of the runs: a `kind` (waiting, running, failed or ended) and its sentence.

    `stale` is the number of seconds without a new event after which a running one is told so.
    """
    last = [(run.outcomes(now) or [("waiting", "")])[-1] for run in runs]
    kinds = [kind for kind, _ in last]
    if "running" in kinds:
        paces = [run.pace for run, kind in zip(runs, kinds, strict=True) if kind == "running"]
        number = f"{kinds.count('running')} of {len(runs)} runs are running."
        text = "Running." if len(runs) == 1 else number
        return {"kind": "running", "text": text, "stale": max(STALE, 3 * max(paces))}
    if "waiting" in kinds:
        run = runs[kinds.index("waiting")]
        text = f"Waiting for {run.run_dir}: no run has started there."
        return {"kind": "waiting", "text": text.encode(errors="backslashreplace").decode()}
    kind = "failed" if "failed" in kinds else "ended"
    if len(runs) > 1:
        failed = kinds.count("failed")
        return {"kind": kind, "text": f"All runs have ended{f', {failed} failed' * bool(failed)}."}
    text = last[0][1].rstrip(".")
    return {"kind": kind, "text": f"{'Failed' if kind == 'failed' else 'Ended'}: {text}."}


def server_of(report: LiveReport) -> uvicorn.Server:
    """A server of the page at / and of its events at /events."""

    async def page(request: Request) -> Response:
        _require_own_page(request)
        return HTMLResponse(await run_in_threadpool(report.page), headers=HEADERS)

    async def events(request: Request) -> Response:
        _require_own_page(request)
        return StreamingResponse(follow(), media_type="text/event-stream", headers=HEADERS)

    async def follow() -> AsyncIterator[bytes]:
        """Each new report, until the reader goes away or the server ends."""
        shown, told = 0, -math.inf
        while not server.should_exit:
            version, message = await run_in_threadpool(report.refresh)
            if version != shown or time.monotonic() - told >= BEAT:
                yield message if version != shown else b"event: beat\ndata: null\n\n"
                shown, told = version, time.monotonic()
            await asyncio.sleep(POLL)

    app = Starlette(
        routes=[Route("/", page), Route("/events", events)],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=NAMES)],
    )
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_level="critical",
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=ANSWERS_END,
    )
    server = uvicorn.Server(config)
    return server


def _require_own_page(request: Request) -> None:
    """Refuse pages of other origins, of which a browser tells the server."""
    if request.headers.get("origin") not in (None, f"http://{request.headers['host']}"):
        raise HTTPException(403, "Pages of other origins may not read this.")


def watch(run_dirs: Sequence[Path], port: int) -> None:
    """Serve the report of the runs until Ctrl-C. Raise RendezvousError, StorageError."""
    try:
        listening = socket.create_server((HOST, port))
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise RendezvousError(
            f"--port {port}: {reason}; give another one, or 0 for one that is free"
        ) from error
    with listening:
        report = LiveReport(run_dirs)
        with phase("reading the lines so far"):
            report.refresh()
        with printing():
            url = f"http://{HOST}:{listening.getsockname()[1]}/"
            print(f"{url} shows the report as it grows; Ctrl-C ends it", flush=True)
            for place in run_dirs:
                if not disk.is_file(place / "metrics.jsonl"):
                    print(f"{place} holds no metrics.jsonl yet; the page waits for it", flush=True)
        server_of(report).run(sockets=[listening])
