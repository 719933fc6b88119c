"""A small chat model of random weights, and servers of it in this process and behind a socket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from minimind.cli.model import ANSWER
from minimind.data.chat.template import DEFAULT_TEMPLATE
from minimind.inference.load_model import load_model
from minimind.inference.text import Sampling
from minimind.serve.answers import ServedModel
from minimind.serve.app import Limits, build_app, http_server
from minimind.serve.readers import Readers
from minimind.serve.scheduler import Scheduler
from tests.conftest import POSITIONS

LIMITS = Limits(bodies=80, max_body=2**16, timeout=60.0, hosts=frozenset({"localhost"}))


def readers_of(tokenizer: Path, source: str | None, **more: Any) -> Readers:
    """What reads requests of a model; `source`: of its template."""
    names = {"name": "tiny", "called": "the template of a test", "variables": {}}
    bounds = {"positions": POSITIONS, "most_tokens": POSITIONS, "most_texts": 64}
    bounds["usual_tokens"] = ANSWER["max_new_tokens"]
    given = {"tokenizer": str(tokenizer), "template": source, **names, **bounds}
    return Readers({**given, **more}, 80)


def served_model(model: Any, tokenizer: Any, template: Any, name: str = "tiny") -> ServedModel:
    """A model as `minimind serve` serves it by default; `template`: what its readers tell."""
    defaults = Sampling(**ANSWER), Sampling()
    return ServedModel(name, model, tokenizer, template, *defaults, POSITIONS)


@dataclass
class InProcess:
    """An application without a socket."""

    served: ServedModel
    scheduler: Scheduler
    readers: Readers
    limits: Limits

    @property
    def app(self) -> Any:
        return build_app(self.served, self.scheduler, self.readers, self.limits)

    def ask(self, method: str, path: str, app: Any = None, **options: Any) -> httpx.Response:
        app = app or self.app

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost", timeout=60
            ) as client:
                return await client.request(method, path, **options)

        return asyncio.run(ask())

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.ask("POST", path, json=body, **options)

    def chat(self, text: str, **fields: Any) -> Any:
        """The answer to a user's text."""
        body = {"messages": [{"role": "user", "content": text}], **fields}
        response = self.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, prompt: Any, **fields: Any) -> Any:
        response = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, body: Any) -> list[Any]:
        """What a stream sends, without its last [DONE]."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream"
        lines = response.text.removesuffix("\n\n").split("\n\n")
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def limited(self, **limits: Any) -> InProcess:
        return replace(self, limits=replace(self.limits, **limits))


@pytest.fixture(scope="session")
def server(chat_model: Path) -> Iterator[InProcess]:
    model, tokenizer, _ = load_model(None, str(chat_model))
    with (
        closing(Scheduler(model, 8, 64)) as scheduler,
        closing(readers_of(tokenizer.path, DEFAULT_TEMPLATE)) as readers,
    ):
        served = served_model(model, tokenizer, readers.template)
        yield InProcess(served, scheduler, readers, LIMITS)


@pytest.fixture(scope="session")
def base(server: InProcess) -> Iterator[InProcess]:
    """The same model without a chat template."""
    tokenizer = server.served.tokenizer
    with closing(readers_of(tokenizer.path, None, name="base")) as readers:
        served = served_model(server.scheduler._model, tokenizer, None, "base")
        yield replace(server, served=served, readers=readers)


@pytest.fixture
def listening() -> Iterator[Callable[[Any], int]]:
    """Start an application behind a socket of this machine; returns the port."""
    started: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(app: Any) -> int:
        place = socket.create_server(("127.0.0.1", 0))
        uvicorn_server = http_server(app, answers_end=1)
        thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [place]})
        thread.start()
        started.append((uvicorn_server, thread))
        return place.getsockname()[1]

    yield start
    for uvicorn_server, thread in started:
        uvicorn_server.should_exit = True
        thread.join()


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
