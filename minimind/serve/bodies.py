"""The bodies of requests while they arrive: how large, how slow, and how many they may be."""

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
    """The bodies that arrive, at most `most_at_once` of at most `most_bytes` each.

    A client that sends slowly holds the place of no other: where there is none left, the body that
    arrives for the longest, of the client that sends the most of them, is ended for a new one.
    """

    def __init__(self, most_at_once: int, most_bytes: int, seconds: float) -> None:
        self._most_at_once, self._most_bytes, self._seconds = most_at_once, most_bytes, seconds
        self._arriving: dict[asyncio.Timeout, str] = {}  # the client of each, the oldest first

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
                self._arriving[late] = client
                if len(self._arriving) > self._most_at_once:
                    self._end_one()
                return await self._received(receive)
        except TimeoutError:
            reason = f"the body did not arrive within {self._seconds:g} s"
            if late not in self._arriving:
                reason = f"the body arrived slowly, and {self._most_at_once} others arrive"
            close = {"Connection": "close"}
            raise Refusal(408, f"{reason}; send it again", "timeout", headers=close) from None
        finally:
            self._arriving.pop(late, None)

    def _end_one(self) -> None:
        ((client, _),) = Counter(self._arriving.values()).most_common(1)
        oldest = next(late for late, own in self._arriving.items() if own == client)
        del self._arriving[oldest]
        oldest.reschedule(asyncio.get_running_loop().time())

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

    async def _received(self, receive: Receive) -> bytes:
        parts, read, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            parts.append(message.get("body", b""))
            read += len(parts[-1])
            more = message.get("more_body", False)
            if read > self._most_bytes:
                raise self._too_large()
        return b"".join(parts)

    def _too_large(self) -> Refusal:
        return Refusal(
            413,
            f"the body has more than {self._most_bytes:,} bytes, the limit here; send less, or"
            " start the server with a larger --max_body",
            "body_too_large",
            headers={"Connection": "close"},
        )
