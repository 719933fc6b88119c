"""Requests that take long to be read: they end, and others are read meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest

from minimind.data.chat.template import DEFAULT_TEMPLATE, ChatTemplate
from minimind.errors import DataError, UsageError
from minimind.runtime.limited import Exceeded
from minimind.serve import readers
from minimind.serve.protocol import Refusal
from minimind.serve.readers import Lane, Readers
from minimind.serve.reading import CHAT, Reader
from tests.serve.bombs import BOMBS, chat_of, large_bodies, with_bombs
from tests.serve.conftest import POSITIONS, InProcess, readers_of


@pytest.fixture(scope="module")
def attacked(server: InProcess) -> Iterator[Readers]:
    """Readers of a template with bombs; a request may take a part of the usual time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "QUICK_SECONDS", 0.05)
        patch.setattr(readers, "MOST_SECONDS", 0.2)
        source = with_bombs(DEFAULT_TEMPLATE)
        with closing(readers_of(server.served.tokenizer.path, source)) as found:
            yield found


async def refused(found: Readers, body: bytes, client: str = "a") -> Refusal:
    with pytest.raises(Refusal) as raised:
        await found.read(client, CHAT, body)
    return raised.value


ENDED = {"too_slow", "invalid_value", "context_length_exceeded"}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends(attacked: Readers, name: str):
    refusal = asyncio.run(refused(attacked, chat_of(name)))
    assert (refusal.status, refusal.code in ENDED) == (400, True), refusal
    assert asyncio.run(attacked.read("a", CHAT, chat_of("a")))["prompts"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", large_bodies())
def test_a_large_body_is_refused_by_what_it_has(attacked: Readers, name: str):
    """Most of them before they are rendered, by numbers; some take too long to be looked at."""
    refusal = asyncio.run(refused(attacked, large_bodies()[name]))
    assert refusal.status == 400
    assert refusal.code in ("context_length_exceeded", "too_slow")
    if name in ("many turns", "many users", "one letter", "words"):
        assert f"the model {POSITIONS} positions; shorten it" in str(refusal)


def test_bombs_of_one_client_do_not_hold_up_another(attacked: Readers):
    """Nor of a client with the same address, once they have had their moment."""

    async def ask() -> list[str]:
        ended: list[str] = []

        async def one(name: str, client: str) -> None:
            body = chat_of("a" if name.startswith("other") else "find")
            try:
                await attacked.read(client, CHAT, body)
            finally:
                ended.append(name)

        bombs = [one(f"bomb {n}", "a") for n in range(4)]
        others = [one("other", "b"), one("other of the same", "a")]
        await asyncio.gather(*bombs, *others, return_exceptions=True)
        return ended

    ended = asyncio.run(ask())
    assert ended.index("other") == 0
    assert ended.index("other of the same") <= 3
    assert attacked.count == 0


class Played:
    """In place of a server and its worker: a request is how many seconds it takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.asked, self.begun, self.go = 0.0, [], Event(), Event()
        self.is_spent = False
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def worker(self, nice: int) -> Played:
        return self

    def close(self) -> None: ...

    def ask(self, request: bytes, seconds: float, most_bytes: int) -> bytes:
        self.asked.append(request.decode())
        self.begun.set()
        assert self.go.wait(30)
        self.now += float(request.split()[-1])
        if request.startswith(b"bomb"):
            raise Exceeded
        return request


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


@pytest.fixture
def lane(played: Played) -> Iterator[Lane]:
    found = Lane(played, 1, 6, 0)  # pyright: ignore[reportArgumentType] (a stand-in)
    yield found
    found.close()
    played.go.set()
    found.join()


def answers(found: list[Future[bytes]]) -> list[str]:
    return [type(one.exception(30) or one).__name__ for one in found]


def test_clients_share_the_time_of_a_lane(played: Played, lane: Lane):
    """The next is who has taken the least; one that comes anew is not behind for it."""
    asked = [lane.submit("a", b"bomb 5")]
    assert played.begun.wait(30)
    given = [("a", "a 5"), ("a", "a 1"), ("b", "b 2"), ("b", "b 1"), ("b", "b 9"), ("c", "c 1")]
    asked += [lane.submit(client, request.encode()) for client, request in given]
    assert lane.count == 7
    played.go.set()
    assert answers(asked) == ["Exceeded", *["Future"] * 6]
    assert played.asked == ["bomb 5", "b 2", "c 1", "b 1", "b 9", "a 5", "a 1"]


def test_a_full_lane_refuses_the_client_with_the_most(played: Played, lane: Lane):
    asked = [lane.submit("a", b"first 1")]
    assert played.begun.wait(30)
    asked += [lane.submit("a", b"a 1") for _ in range(6)]
    others = [lane.submit(client, b"other 1") for client in "bc"]
    assert asked[5].exception(30) is not None
    refused = asked[6].exception(30)
    assert isinstance(refused, Refusal)
    assert (refused.status, refused.headers) == (429, {"Retry-After": "1"})
    played.go.set()
    assert answers(others) == ["Future"] * 2
    assert answers(asked) == [*["Future"] * 5, "Refusal", "Refusal"]


def test_whose_client_has_gone_is_not_read(played: Played, lane: Lane):
    first = lane.submit("a", b"first 1")
    assert played.begun.wait(30)
    gone = [lane.submit("a", b"gone 1") for _ in range(5)]
    assert all(one.cancel() for one in gone)
    last = [lane.submit("a", b"last 1") for _ in range(6)]
    played.go.set()
    assert answers([first, *last]) == ["Future"] * 7
    assert "gone 1" not in played.asked


def test_only_what_cannot_fit_is_refused_unread(server: InProcess):
    """A template that leaves turns or text out is asked what it writes."""
    tokenizer = server.served.tokenizer
    last_turns = DEFAULT_TEMPLATE.replace("in messages", "in messages[-9:]")
    first_letters = DEFAULT_TEMPLATE.replace("message['content']", "message['content'][:9]")
    bounds = {
        "name": "tiny",
        "positions": 64,
        "most_tokens": 64,
        "usual_tokens": 64,
        "most_texts": 2,
    }
    many, long = chat_of(*["a"] * 65), chat_of("ab " * 9999)
    for source, fits_many, fits_long in (
        (DEFAULT_TEMPLATE, False, False),
        (last_turns, True, False),
        (first_letters, False, True),
    ):
        reader = Reader(tokenizer, ChatTemplate(source, tokenizer), **bounds)
        for body, fits in ((many, fits_many), (long, fits_long)):
            if fits:
                assert len(reader.chat(body)["prompts"][0][0]) < 64
                continue
            with pytest.raises(Refusal, match="and the model 64 positions; shorten it"):
                reader.chat(body)
    longest = max(tokenizer.piece_bytes())
    name, piece = max(enumerate(tokenizer.pieces()), key=lambda one: len(one[1].content))
    text = piece.content.decode() * 63
    assert tokenizer.encode(text) == [name] * 63
    assert len(text.encode()) == 63 * longest
    body = json.dumps({"prompt": text}).encode()
    assert reader.complete(body)["prompts"][0][0] == [name] * 63


def test_what_cannot_be_loaded_is_refused(
    server: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The server loads nothing that takes long in its own process first."""
    path = server.served.tokenizer.path
    with pytest.raises(UsageError, match="the template of a test is not a Jinja template"):
        readers_of(path, "{% if %}")
    values = json.loads(server.served.tokenizer.exported["tokenizer.json"])
    step = {"type": "Replace", "pattern": {"String": "qqq"}, "content": "q"}
    values["decoder"]["decoders"] += [step] * 30_000
    hostile = tmp_path / "tokenizer.json"
    hostile.write_text(json.dumps(values))
    monkeypatch.setattr(readers, "LOAD_SECONDS", 1.0)
    with pytest.raises(DataError, match=r"takes more than 1 s or 2,048 MiB to load; give another"):
        readers_of(hostile, DEFAULT_TEMPLATE)
