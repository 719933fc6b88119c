"""A real S3 server (moto's) on a loopback port, and a TCP proxy before it that damages traffic."""

from __future__ import annotations

import random
import re
import select
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tests.runtime.hub_server import Hub

KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "not-a-secret-of-anyone",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
BUCKET = "bucket"
REQUEST = re.compile(rb"(GET|PUT|HEAD|POST|DELETE) /")
LENGTH = re.compile(rb"(\r\nContent-Length: )(\d+)\r\n", re.IGNORECASE)


class ObjectStore:
    """A server of S3 with one bucket; `url` of the server, `put` and `client` behind the proxy."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.host, self.port = self._server.get_host_and_port()
        self.url = f"http://{self.host}:{self.port}"
        self.client.create_bucket(Bucket=BUCKET)

    @cached_property
    def client(self) -> Any:
        """A boto3 client of the server itself."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
            region_name=KEYS["AWS_DEFAULT_REGION"],
        )

    def put(self, key: str, content: bytes) -> str:
        """Store an object; return its URL."""
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)
        return f"s3://{BUCKET}/{key}"

    def keys(self, prefix: str = "") -> list[str]:
        """The keys of the bucket, sorted."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return sorted(one["Key"] for page in pages for one in page.get("Contents", ()))

    def clear(self) -> None:
        """Delete every object."""
        for key in self.keys():
            self.client.delete_object(Bucket=BUCKET, Key=key)

    def require_credentials(self, is_required: bool) -> None:
        """Whether requests need the keys of a user, of which there is none."""
        allowed = b"0" if is_required else b"Infinity"
        url, kind = f"{self.url}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        request = urllib.request.Request(url, allowed, kind, method="POST")
        with urllib.request.urlopen(request, timeout=10):
            pass

    def close(self) -> None:
        """Stop the server."""
        self._server.stop()


@dataclass
class Faults:
    """What happens to requests: fractions of them, and at most `most` faults in all."""

    cut: float = 0.0  # reset within the first 20,000 bytes
    truncate: float = 0.0  # half of the body, of which the header says that it is the whole
    corrupt: float = 0.0  # one byte of the body is another
    delay: float = 0.0
    delay_s: float = 0.0
    most: int | None = None


class FaultyProxy:
    """Passes TCP connections on to a server, with `faults` that may be changed at any time."""

    def __init__(self, host: str, port: int, seed: int = 0) -> None:
        self.faults = Faults()
        self.injected = 0
        self.requests = 0
        self._target = (host, port)
        self._draw = random.Random(seed)
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.is_down = False  # new connections are reset
        self._is_closed = False
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def set(self, **faults: Any) -> None:
        """Replace the faults; count the injected ones from 0."""
        with self._lock:
            self.faults, self.injected, self.requests = Faults(**faults), 0, 0

    def close(self) -> None:
        """Stop accepting."""
        self._is_closed = True
        socket.create_connection(("127.0.0.1", self.port)).close()  # which ends the wait for one
        self._accepting.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self._is_closed:
                return client.close()
            if self.is_down:
                _reset(client)
            else:
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _fate(self, request: bytes) -> str:
        # A HEAD has no body, a list has no checksum.
        is_object = request.startswith(b"GET") and b"?list-type" not in request
        with self._lock:
            self.requests += 1
            faults, place = self.faults, self._draw.random()
            if faults.most is not None and self.injected >= faults.most:
                return ""
            for name in ("cut", "truncate", "corrupt", "delay"):
                place -= getattr(faults, name)
                if place < 0 and not is_object and name in ("truncate", "corrupt"):
                    return ""
                if place < 0:
                    self.injected += name != "cut"  # which counts when it happens
                    return name
        return ""

    def _serve(self, client: socket.socket) -> None:
        fate, left, is_head = "", 0, False
        with client, socket.create_connection(self._target) as server, suppress(OSError):
            while True:
                ready, _, _ = select.select([client, server], [], [], 60)
                if self.is_down or not ready:
                    return _reset(client)
                source = ready[0]
                if not (content := source.recv(65536)):
                    return
                if source is client and REQUEST.match(content):
                    fate, is_head = self._fate(content), True
                    left = int(10 ** self._draw.uniform(1, 4.3))
                    if fate == "delay":
                        time.sleep(self.faults.delay_s)
                if fate == "cut":
                    if left <= len(content):
                        (server if source is client else client).sendall(content[:left])
                        self.injected += 1
                        return _reset(client)
                    left -= len(content)
                if source is server and fate in ("truncate", "corrupt") and is_head:
                    if fate == "truncate":
                        return _truncate(server, client, content)
                    content, is_head = _corrupt(server, content), False
                (server if source is client else client).sendall(content)


def _reset(connection: socket.socket) -> None:
    """Close with a reset instead of an orderly end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _with_body(server: socket.socket, content: bytes) -> tuple[bytes, bytes]:
    """Head and body of an answer whose first bytes are `content`."""
    while b"\r\n\r\n" not in content:
        content += server.recv(65536)
    head, _, body = content.partition(b"\r\n\r\n")
    found = LENGTH.search(head + b"\r\n")
    while found and len(body) < int(found[2]) and (more := server.recv(65536)):
        body += more
    return head + b"\r\n\r\n", body


def _truncate(server: socket.socket, client: socket.socket, content: bytes) -> None:
    head, body = _with_body(server, content)
    body = body[: len(body) // 2]
    client.sendall(LENGTH.sub(rb"\g<1>%d\r\n" % len(body), head) + body)


def _corrupt(server: socket.socket, content: bytes) -> bytes:
    head, body = _with_body(server, content)
    if not body:
        return head
    middle = len(body) // 2
    return head + body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]


@contextmanager
def running_store() -> Iterator[ObjectStore]:
    """A server for the time of the block."""
    store = ObjectStore()
    try:
        yield store
    finally:
        store.close()


@contextmanager
def faulty_proxy(store: ObjectStore | Hub, seed: int = 0) -> Iterator[FaultyProxy]:
    """A proxy before the server for the time of the block."""
    proxy = FaultyProxy(store.host, store.port, seed)
    try:
        yield proxy
    finally:
        proxy.close()
