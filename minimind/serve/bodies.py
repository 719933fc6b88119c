"""The bodies of requests while they arrive: how large and how slow they may be."""

from __future__ import annotations

import asyncio
import re
from collections import Counter

from starlette.datastructures import Headers
from starlette.types import Receive

from minimind.serve.protocol import Refusal

JSON_KIND = "application/json"
# Content types of a body. `curl -d` sends the second one by default.
ACCEPTED = re.compile(
    rf"\s*({JSON_KIND}|application/x-www-form-urlencoded)\s*(;\s*charset=\"?utf-?8\"?\s*)?", re.I
)
BODY_ENDS = 10.0  # seconds from the head of a request to the last byte of its body


class Gone(Exception):
    """The client has gone."""


class Bodies:
    """The bodies that arrive, each of at most `most_bytes`, and together of as much as `most_full`.

    A client that sends slowly holds the place of no other: it takes none but for what it has sent,
    and where that is too much, the largest body of the client that has sent the most is ended.
    """

    def __init__(self, most_full: int, most_bytes: int, seconds: float) -> None:
        self._most_full, self._most_bytes, self._seconds = most_full, most_bytes, seconds
        # The client of each, and the bytes that are there.
        self._arriving: dict[asyncio.Timeout, tuple[str, int]] = {}

    @property
    def count(self) -> int:
        """Bodies that arrive now."""
        return len(self._arriving)

    async def read(self, client: str, receive: Receive, headers: Headers) -> bytes:
        """The body of a request; raise Refusal for one that is not accepted, Gone for half of one.

        `client` is the address that it comes from.
        """
        self._require_accepted(headers)
        late = asyncio.timeout(self._seconds)
        try:
            async with late:
                return await self._received(late, client, receive)
        except TimeoutError:
            reason = f"the body did not arrive within {self._seconds:g} s"
            if late not in self._arriving:
                reason = "the bodies that are arriving have too many bytes together"
            close = {"Connection": "close"}
            raise Refusal(408, f"{reason}; send it again", "timeout", headers=close) from None
        finally:
            self._arriving.pop(late, None)

    def _end_one(self) -> None:
        sizes = Counter[str]()
        for client, size in self._arriving.values():
            sizes[client] += size
        ((most, _),) = sizes.most_common(1)
        own = {late: size for late, (client, size) in self._arriving.items() if client == most}
        largest = max(own, key=own.__getitem__)
        del self._arriving[largest]
        largest.reschedule(asyncio.get_running_loop().time())

    def _require_accepted(self, headers: Headers) -> None:
        kind = headers.get("content-type", JSON_KIND)
        if (
            not ACCEPTED.fullmatch(kind)
            or headers.get("content-encoding", "identity") != "identity"
        ):
            reason = f"the body is not plain JSON by its headers; send Content-Type: {JSON_KIND}"
            raise Refusal(415, reason, "unsupported_media_type")
        size = headers.get("content-length", "")
        if size.isdecimal() and (len(size) > 18 or int(size) > self._most_bytes):
            raise self._too_large()

    async def _received(self, late: asyncio.Timeout, client: str, receive: Receive) -> bytes:
        parts, read, more = [], 0, True
        most_in_all = self._most_full * self._most_bytes
        self._arriving[late] = client, 0
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            parts.append(message.get("body", b""))
            read += len(parts[-1])
            more = message.get("more_body", False)
            if read > self._most_bytes:
                raise self._too_large()
            if late in self._arriving:  # it is not ended
                self._arriving[late] = client, read
            while sum(size for _, size in self._arriving.values()) > most_in_all:
                self._end_one()
        return b"".join(parts)

    def _too_large(self) -> Refusal:
        return Refusal(
            413,
            f"the body has more than {self._most_bytes:,} bytes, the limit here; send less, or"
            " start the server with a larger --max_body",
            "body_too_large",
        )
