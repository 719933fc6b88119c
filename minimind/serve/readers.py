"""The processes that read requests (`serve/reading.py`), and who waits for them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from threading import Condition, Thread
from typing import Any

from minimind import errors
from minimind.errors import DataError
from minimind.runtime.limited import Exceeded, LimitedServer
from minimind.serve import reading
from minimind.serve.protocol import Refusal, busy

LOAD_SECONDS, LOAD_BYTES = 30.0, 2**31  # for a tokenizer and a template
MOST_BYTES = 2**30  # for a request
# CPU time. An ordinary request takes milliseconds; a longer one is read again in the second lane.
QUICK_SECONDS, MOST_SECONDS = 0.1, 3.0
MOST_SLOW = 16  # requests that wait to be read anew
NICE = 10  # of their process


class Readers:
    """Reads requests in two processes: for a moment in the one, and if need be in the other.

    `given` is for `reading.load`; `template` is what it tells of one, None without. Raise its
    RunError, or DataError where it takes too long. At most `most_waiting` requests wait.
    """

    def __init__(self, given: Mapping[str, Any], most_waiting: int) -> None:
        try:
            self._server = LimitedServer(reading.__file__, given, LOAD_SECONDS, LOAD_BYTES)
        except Exceeded:
            raise DataError(
                f"{given['tokenizer']}: with its chat template, takes more than {LOAD_SECONDS:g} s"
                f" or {LOAD_BYTES / 2**20:,.0f} MiB to load; give another tokenizer"
            ) from None
        if "error" in self._server.loaded:
            self._server.close()
            name, message = self._server.loaded["error"]
            raise getattr(errors, name)(message)
        self.template: dict[str, Any] | None = self._server.loaded["template"]
        self._lanes = (
            Lane(self._server, QUICK_SECONDS, most_waiting, 0),
            Lane(self._server, MOST_SECONDS, MOST_SLOW, NICE),
        )

    @property
    def count(self) -> int:
        """Requests that are read, or wait for it."""
        return sum(lane.count for lane in self._lanes)

    async def read(self, client: str, kind: bytes, body: bytes) -> dict[str, Any]:
        """What a body asks for; raise Refusal. `kind` is CHAT or TEXT, `client` an address."""
        for lane in self._lanes:
            with suppress(Exceeded):
                found = json.loads(await asyncio.wrap_future(lane.submit(client, kind + body)))
                if "refusal" in found:
                    raise Refusal(**found["refusal"])
                return found
        raise Refusal(
            400,
            f"the request takes more than {MOST_SECONDS:g} s or {MOST_BYTES / 2**20:,.0f} MiB to be"
            " read by the chat template and the tokenizer; send less, or another text",
            "too_slow",
        )

    def close(self) -> None:
        """End the processes, and what they read."""
        for lane in self._lanes:
            lane.close()
        self._server.close()
        for lane in self._lanes:
            lane.join()


class Lane:
    """Requests that one process reads, one after another, each within `seconds`.

    The next is that of the client for whom the least time was taken: its share is the same however
    many requests others send, and however long theirs take. One that has waited for nothing since
    counts as one that comes anew. Where more than `most_waiting` wait, the last one of the client
    with the most of them is refused.
    """

    def __init__(self, server: LimitedServer, seconds: float, most_waiting: int, nice: int) -> None:
        self._server, self._seconds, self._nice = server, seconds, nice
        self._most_waiting = most_waiting
        self._waiting: dict[str, deque[tuple[Future[bytes], bytes]]] = {}
        self._now = 0.0  # seconds that were taken for the client whose turn it is
        self._taken: dict[str, float] = {}  # by client, where it is more
        self._is_reading = self._is_closed = False
        self._condition = Condition()
        self._worker = server.worker(nice)
        self._thread = Thread(target=self._run, name="read", daemon=True)
        self._thread.start()

    @property
    def count(self) -> int:
        """Requests that are read, or wait for it."""
        with self._condition:
            return self._is_reading + sum(map(len, self._waiting.values()))

    def submit(self, client: str, request: bytes) -> Future[bytes]:
        """The answer to a request, Exceeded, or the Refusal of one for which there is no place."""
        found: Future[bytes] = Future()
        with self._condition:
            for other, jobs in [*self._waiting.items()]:  # whose clients have gone
                self._keep(other, deque(job for job in jobs if not job[0].cancelled()))
            self._waiting.setdefault(client, deque()).append((found, request))
            if self._is_closed or sum(map(len, self._waiting.values())) > self._most_waiting:
                most = max(self._waiting, key=lambda one: len(self._waiting[one]))
                refused, _ = self._waiting[most].pop()
                self._keep(most, self._waiting[most])
                if refused.set_running_or_notify_cancel():
                    refused.set_exception(busy())
            self._condition.notify()
        return found

    def close(self) -> None:
        """Read nothing more; `join` waits for the end."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()

    def join(self) -> None:
        self._thread.join()
        self._worker.close()

    def _keep(self, client: str, jobs: deque[tuple[Future[bytes], bytes]]) -> None:
        if jobs:
            self._waiting[client] = jobs
        else:
            self._waiting.pop(client, None)

    def _next(self) -> tuple[str, Future[bytes], bytes] | None:
        """The request whose turn it is, once there is one; None at the end."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_closed or self._waiting)
            if self._is_closed:
                return None
            client = min(self._waiting, key=lambda one: self._taken.get(one, self._now))
            self._now = self._taken.get(client, self._now)
            jobs = self._waiting[client]
            found, request = jobs.popleft()
            self._keep(client, jobs)
            self._is_reading = True
            return client, found, request

    def _run(self) -> None:
        while (job := self._next()) is not None:
            client, found, request = job
            begun, content, error = time.monotonic(), b"", None
            if is_awaited := found.set_running_or_notify_cancel():
                try:
                    content = self._answer(request)
                except Exception as caught:  # whoever waits for the answer raises it
                    error = caught
            with self._condition:  # before the answer is set: `count` leaves it out from then on
                self._is_reading = False
                self._taken[client] = self._now + time.monotonic() - begun
                self._taken = {one: n for one, n in self._taken.items() if n > self._now}
            if error is not None:
                found.set_exception(error)
            elif is_awaited:
                found.set_result(content)

    def _answer(self, request: bytes) -> bytes:
        try:
            return self._worker.ask(request, self._seconds, MOST_BYTES)
        except ConnectionError:  # something has killed it while nothing was asked
            self._renew()
            return self._worker.ask(request, self._seconds, MOST_BYTES)
        finally:
            if self._worker.is_spent and not self._is_closed:
                self._renew()

    def _renew(self) -> None:
        self._worker.close()
        self._worker = self._server.worker(self._nice)
