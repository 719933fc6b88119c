"""The HTTP side: who may ask, how much is read, how long it takes, and when a request is over."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import re
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib import resources
from ipaddress import IPv6Address
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from minimind.errors import RunError, known_error
from minimind.inference.text import Text
from minimind.runtime.terminal import print_traceback
from minimind.serve.answers import Answer, ServedModel
from minimind.serve.bodies import BODY_ENDS, JSON_KIND, Bodies, Gone
from minimind.serve.protocol import RETRY, Refusal, busy, no_such_model
from minimind.serve.readers import Readers
from minimind.serve.reading import CHAT as CHAT_KIND
from minimind.serve.reading import TEXT as TEXT_KIND
from minimind.serve.scheduler import QueueFull, Scheduler

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PLAIN = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
LAST_WORD = 1.0  # seconds to tell a client that does not read of an error
ANSWERS_END = 3  # seconds that answers have to end after a signal
HEAD_ENDS = 30.0  # seconds that a connection has to send the head of a request
# Seconds that a connection is kept after an answer: longer than by clients (5 s by httpx and
# OpenAI's, 15 s by aiohttp), so that no request comes to one that has just been closed.
KEEP_ALIVE = 30
MOST_CONNECTIONS = 1000  # open at once; files of a process are often limited to 1024


@dataclass(frozen=True)
class Limits:
    """Bounds of requests, and who may ask.

    `bodies`: as many of `max_body` bytes may arrive at once. `hosts`: names by which the server may
    be reached, None for any. `origins`: of pages, besides its own, that may ask; "*" for all.
    """

    bodies: int
    max_body: int
    timeout: float
    api_key: str | None = None
    hosts: frozenset[str] | None = None
    origins: frozenset[str] = frozenset()


def build_app(
    served: ServedModel, scheduler: Scheduler, readers: Readers, limits: Limits
) -> ASGIApp:
    """The application; the caller closes the scheduler and the readers."""
    endpoints = _Endpoints(served, scheduler, readers, limits)
    routes = [
        Route("/", endpoints.page),
        Route("/health", endpoints.health),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name}", endpoints.model),
        Route(CHAT, endpoints.chat, methods=["POST"]),
        Route(TEXT, endpoints.complete, methods=["POST"]),
    ]
    handlers: Any = {HTTPException: _http_error, Refusal: _refused, Exception: _bug}
    guards = [Middleware(Guard, limits)]
    if limits.hosts is not None:
        hosts = [*limits.hosts]
        guards.insert(0, Middleware(TrustedHostMiddleware, hosts, www_redirect=False))
    if limits.origins:
        methods, origins = ("GET", "POST"), [*limits.origins]
        guards.append(Middleware(CORSMiddleware, origins, methods, allow_headers=("*",)))
    return Starlette(routes=routes, exception_handlers=handlers, middleware=guards)


def http_server(app: ASGIApp, answers_end: int = ANSWERS_END) -> uvicorn.Server:
    """A server of the application, with bounds for connections on which nobody asks."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_level="critical",  # errors are answered, and bugs printed, by the application
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=answers_end,
    )
    return uvicorn.Server(config)


class Connection(H11Protocol):
    """Ends where the head of a request takes too long, or for a new one where too many are open.

    Uvicorn bounds neither: its own time for idle connections begins with the first response.
    """

    _late: asyncio.TimerHandle | None = None
    _made = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] (uvicorn narrows the type of asyncio too)
        super().connection_made(transport)
        self._made = self.loop.time()
        if len(self.connections) > MOST_CONNECTIONS:
            self._end_one()
        self._await_head()

    def _end_one(self) -> None:
        """End the oldest connection, of the client with the most of them, that only waits."""
        own: Any = self.connections
        waiting: list[Connection] = [one for one in own if one is not self and one.only_waits]
        many = Counter(_address(one.client) for one in waiting)
        oldest = max(waiting or [self], key=lambda one: (many[_address(one.client)], -one._made))
        oldest.transport.abort()

    @property
    def only_waits(self) -> bool:
        """Whether nothing is answered on it: it is idle, or its head or body arrives."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._late:
            self._late.cancel()

    def _await_head(self) -> None:
        """Bound the time up to the next request, unless one is being answered."""
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self._late is None:
            self._late = self.loop.call_later(HEAD_ENDS, self.transport.abort)
        elif self._late and not is_idle:
            self._late.cancel()
            self._late = None


def refusal_response(refusal: Refusal) -> Response:
    """The response to a request that is refused."""
    headers = {**PLAIN, **refusal.headers}
    return JSONResponse(refusal.body(), refusal.status, headers)


async def _http_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers, reason = dict(error.headers or {}), error.detail
    if error.status_code == 404:
        reason = f"nothing is served at this path; ask {CHAT}, {TEXT} or /v1/models"
    elif error.status_code == 405:
        reason = f"this path has other methods; use {headers.get('Allow', 'another')}"
    return refusal_response(Refusal(error.status_code, reason, headers=headers))


async def _refused(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return refusal_response(error)


async def _bug(_: HttpRequest, error: Exception) -> Response:
    return refusal_response(_told(error))


def _told(error: Exception) -> Refusal:
    """What a client is told of an error that is not its own; a bug is printed here alone."""
    if (known := known_error(error)) is None:
        print_traceback(error)
        return Refusal(500, "the server has a bug; its log says where", "internal_error")
    if known.status == RunError.status:
        return Refusal(500, str(known), "internal_error")
    return Refusal(503, str(known), "unavailable", headers=RETRY)


class Guard:
    """Refuses other pages and wrong keys before anything is read.

    A page of another site can send requests to a server on localhost, and Starlette's CORS only
    keeps it from reading the answer. The browser says in Origin which page it is.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._origins = limits.origins
        self._key = limits.api_key.encode() if limits.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        is_preflight = "access-control-request-method" in headers and scope["method"] == "OPTIONS"
        try:
            self._require_origin(headers)
            if scope["path"].startswith("/v1") and not is_preflight:
                self._require_key(headers)
        except Refusal as refusal:
            return await refusal_response(refusal)(scope, receive, send)
        await self._app(scope, receive, send)

    def _require_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        is_own = origin is None or origin.partition("://")[2] == headers.get("host")
        if not (is_own or {"*", origin} & self._origins):
            reason = (
                "pages of this origin may not use this server; start the server with --allow_origin"
            )
            raise Refusal(403, reason, "origin_not_allowed")

    def _require_key(self, headers: Headers) -> None:
        if self._key is None:
            return
        given = headers.getlist("authorization")
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        is_right = hmac.compare_digest(key.strip().encode("latin-1", "replace"), self._key)
        if scheme.lower() != "bearer" or not is_right:
            raise Refusal(
                401,
                "the key is missing or wrong; send Authorization: Bearer KEY",
                "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


class _Endpoints:
    def __init__(
        self, served: ServedModel, scheduler: Scheduler, readers: Readers, limits: Limits
    ) -> None:
        self._served, self._scheduler, self._limits = served, scheduler, limits
        self._readers = readers
        self._page, self._page_headers = load_page()
        self._bodies = Bodies(limits.bodies, limits.max_body, min(BODY_ENDS, limits.timeout))

    async def page(self, _: HttpRequest) -> Response:
        return HTMLResponse(self._page, headers=self._page_headers)

    async def health(self, _: HttpRequest) -> Response:
        running, waiting = self._scheduler.counts
        return JSONResponse(
            {
                "status": "ok",
                "arriving": self._bodies.count,
                "reading": self._readers.count,
                "running": running,
                "waiting": waiting,
            },
            headers=PLAIN,
        )

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]}, headers=PLAIN)

    async def model(self, request: HttpRequest) -> Response:
        if (name := request.path_params["name"]) != self._served.name:
            raise no_such_model(name, self._served.name)
        return JSONResponse(self._model(), headers=PLAIN)

    def _model(self) -> dict[str, Any]:
        served = self._served
        return {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "minimind",
            # Not of OpenAI's interface; the first is vLLM's.
            "max_model_len": served.positions,
            "max_completion_tokens": served.most_tokens,
            "architecture": served.architecture,
            "parameters": served.parameters,
            "has_chat_template": bool(served.template),
        }

    async def chat(self, _: HttpRequest) -> ASGIApp:
        return partial(self._answer, CHAT_KIND)

    async def complete(self, _: HttpRequest) -> ASGIApp:
        return partial(self._answer, TEXT_KIND)

    async def _answer(self, kind: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request within its time, unless its client goes; raise Refusal."""
        client, work = _address(scope.get("client")), _Work(self._scheduler, send)
        with suppress(Gone):
            body = await self._bodies.read(client, receive, Headers(scope=scope))

            async def read_and_run() -> None:
                read = await self._readers.read(client, kind, body)
                await work.run(Answer(self._served, read, kind == CHAT_KIND))

            try:
                async with asyncio.timeout(self._limits.timeout):
                    await _unless_gone(read_and_run(), receive)
            except TimeoutError:
                reason = f"no answer within the {self._limits.timeout:g} s of --timeout"
                await work.refuse(Refusal(503, f"{reason}; ask later", "timeout", headers=RETRY))
            except asyncio.CancelledError:  # the server waits no longer
                await work.refuse(Refusal(503, "the server ends; ask later", "unavailable"))
                raise
            finally:
                self._scheduler.cut(work.texts)


def _address(client: tuple[str, int] | None) -> str:
    """Who asks: an address, or the network of one of IPv6, as a host has all of its own.

    Of a proxy on this machine it is what X-Forwarded-For says, which may be no address.
    """
    host = client[0] if client else ""
    try:
        address = IPv6Address(host)
    except ValueError:
        return host
    return str(address.ipv4_mapped or int(address) >> 64)


async def _unless_gone(work: Awaitable[None], receive: Receive) -> None:
    """Wait for the work; cancel it, and raise Gone, when the client goes."""

    async def goes() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(goes())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise Gone
        tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Work:
    """The texts of one answer on their way from the scheduler's thread to the client."""

    _answer: Answer

    def __init__(self, scheduler: Scheduler, send: Send) -> None:
        self._scheduler, self._send = scheduler, send
        self.texts: list[Text] = []
        self._loop = asyncio.get_running_loop()
        # Number of a text, what it goes on with, and how many likelihoods it has; None: its end.
        self._events: asyncio.Queue[tuple[int, tuple[str, int] | None]] = asyncio.Queue()
        self._has_begun = False

    def _connect(self, number: int, text: Text, is_stream: bool) -> None:
        def put(event: tuple[str, int] | None) -> None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._events.put_nowait, (number, event))

        def go_on(more: str) -> None:
            put((more, len(text.likelihoods)))

        def end() -> None:
            put(None)

        text.on_end = end
        text.on_text = go_on if is_stream else None

    async def run(self, answer: Answer) -> None:
        """Wait for the texts, and send them whole or as they come; raise Refusal."""
        self._answer, self.texts = answer, answer.texts()
        for number, text in enumerate(self.texts):
            self._connect(number, text, answer.settings.stream)
        try:
            self._scheduler.submit(self.texts)
        except QueueFull:
            raise busy() from None
        if answer.settings.stream:
            return await self._stream()
        for _ in self.texts:
            number, _ = await self._events.get()
            self._require_no_error(self.texts[number])
        await self._start(JSON_KIND)
        await self._put(json.dumps(answer.whole(self.texts)).encode(), is_last=True)

    def _require_no_error(self, text: Text) -> None:
        if text.error is not None:
            raise _told(text.error)

    async def _stream(self) -> None:
        answer, has_usage = self._answer, self._answer.settings.has_usage
        more: dict[str, Any] = {"usage": None} if has_usage else {}
        streams = [answer.choice(number, text) for number, text in enumerate(self.texts)]
        left = len(streams)
        while left:
            number, event = await self._events.get()
            try:
                self._require_no_error(self.texts[number])
            except Refusal as refusal:
                return await self.refuse(refusal)
            if not self._has_begun:
                await self._start("text/event-stream")
                for stream in streams:
                    await self._put_events(answer.chunk(one, **more) for one in stream.begin())
            stream = streams[number]
            choices = stream.end() if event is None else stream.go_on(*event)
            await self._put_events(answer.chunk(one, **more) for one in choices)
            left -= event is None
        if has_usage:
            await self._put_events([answer.chunk(usage=answer.usage(self.texts))])
        await self._put(b"data: [DONE]\n\n", is_last=True)

    async def refuse(self, refusal: Refusal) -> None:
        """Tell of an error, also in a stream that has begun."""
        if not self._has_begun:
            raise refusal
        with suppress(TimeoutError):  # nobody reads the stream
            async with asyncio.timeout(LAST_WORD):
                await self._put_events([refusal.body()])
                await self._put(b"", is_last=True)

    async def _start(self, kind: str) -> None:
        self._has_begun = True
        pairs = {**PLAIN, "Content-Type": kind, "X-Accel-Buffering": "no"}
        headers = [(key.lower().encode(), value.encode()) for key, value in pairs.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _put_events(self, chunks: Any) -> None:
        events = (f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks)
        if content := b"".join(events):
            await self._put(content)

    async def _put(self, content: bytes, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": not is_last})


def load_page() -> tuple[str, dict[str, str]]:
    """The chat page and its headers: it runs its own script and styles, and asks this server."""
    page = resources.files("minimind.serve").joinpath("page.html").read_text(encoding="utf-8")
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(sha256(one.encode()).digest()).decode() for one in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:;"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {**PLAIN, "Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}
    return page, headers
