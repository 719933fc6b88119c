"""Load and hostile requests on `minimind serve`, with a small model that was fine-tuned before.

    python -m benchmarks.serve_load [--requests 1000] [--clients 64] [--malformed 10000] [--cut 200]
        [--out FILE.json]

Each answer under load is compared with the answer to the same request alone. The model has the
shape of the preset tiny with rows of 64 tokens, so that it is trained within minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from benchmarks.record import arguments, record
from minimind.config.parse import parse_flags
from tests.examples.conftest import fine_tuned
from tests.serve.fuzz import malformed
from tools.runs import sentences

CHAT = "/v1/chat/completions"
BATCH, QUEUE, BODY = 16, 64, 2**20
KEY = "k" * 20
TINY = parse_flags(["--model", "tiny"])
SHAPE = {name: getattr(TINY, name) for name in ("dim", "n_layers", "n_heads", "n_kv_heads")}
LONG = {"max_tokens": 48, "temperature": 50}  # texts that do not end early
DIFFERENT = 200  # requests that differ


@contextmanager
def started(place: Path) -> Iterator[tuple[psutil.Process, str]]:
    """The server's process and its URL; it ends with 0 on a signal."""
    line = [sys.executable, "-m", "minimind", "serve", "--checkpoint", str(place)]
    line += ["--device", "cpu"]
    line += ["--port", "0", "--max_batch", str(BATCH), "--max_queue", str(QUEUE)]
    line += ["--max_body", str(BODY), "--timeout", "120"]
    environment = {**os.environ, "MINIMIND_API_KEY": KEY}
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        yield psutil.Process(process.pid), process.stdout.readline().split()[0]
        process.terminate()
        assert process.wait(60) == 0


def questions() -> list[dict[str, Any]]:
    """Requests whose prompts, lengths, seeds and temperatures differ."""
    draw = random.Random(0)
    words = "what is the sea sky of stone bread wind a river".split()
    return [
        {
            "messages": [{"role": "user", "content": " ".join(draw.choices(words, k=1 + n % 9))}],
            "max_tokens": draw.randint(4, 32),
            "seed": n,
            "temperature": draw.choice([0, 0.7, 1, 1.3]),
        }
        for n in range(DIFFERENT)
    ]


async def load(client: httpx.AsyncClient, server: psutil.Process, args: Any) -> dict[str, Any]:
    """The requests of many clients, each with the answer that it has alone."""
    asked = questions()
    alone = [(await client.post(CHAT, json=one)).json()["choices"] for one in asked]
    numbers = iter(range(args.requests))
    statuses: Counter[int] = Counter()
    different, memory, waits = [], [], []

    async def one_client() -> None:
        for number in numbers:
            begun = time.perf_counter()
            response = await client.post(CHAT, json=asked[number % DIFFERENT])
            waits.append(time.perf_counter() - begun)
            statuses[response.status_code] += 1
            if response.json().get("choices") != alone[number % DIFFERENT]:
                different.append(number)
            if number % max(1, args.requests // 10) == 0:
                memory.append(server.memory_info().rss // 2**20)

    begun = time.perf_counter()
    await asyncio.gather(*(one_client() for _ in range(args.clients)))
    seconds = time.perf_counter() - begun
    return {
        "requests": args.requests,
        "clients": args.clients,
        "statuses": statuses,
        "different_answers": len(different),
        "requests_per_second": args.requests / seconds,
        "median_seconds": sorted(waits)[len(waits) // 2],
        "memory_mib": memory,
    }


async def until_idle(client: httpx.AsyncClient) -> float:
    """Wait until nothing is computed; return the seconds."""
    begun = time.perf_counter()
    while True:
        health = (await client.get("/health")).json()
        if health["running"] == health["waiting"] == 0:
            return time.perf_counter() - begun
        await asyncio.sleep(0.01)


async def flood(client: httpx.AsyncClient) -> dict[str, Any]:
    """Three times as many requests as there is place for, at once."""
    body = {**questions()[1], **LONG}
    most, is_over = 0, False

    async def watch() -> None:
        nonlocal most
        while not is_over:
            most = max(most, (await client.get("/health")).json()["waiting"])
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    posts = (client.post(CHAT, json=body) for _ in range(3 * (BATCH + QUEUE)))
    found = await asyncio.gather(*posts)
    is_over = True
    await watching
    return {"statuses": Counter(one.status_code for one in found), "most_waiting": most}


async def cut(client: httpx.AsyncClient, count: int) -> dict[str, Any]:
    """Streams that are left after their first bytes, forty at a time."""
    body = {**questions()[1], **LONG, "stream": True}
    turn, statuses = asyncio.Semaphore(40), Counter[int]()

    async def leave() -> None:
        async with turn, client.stream("POST", CHAT, json=body) as response:
            statuses[response.status_code] += 1
            async for _ in response.aiter_raw():
                break

    await asyncio.gather(*(leave() for _ in range(count)))
    return {"statuses": statuses, "seconds_until_idle": await until_idle(client)}


async def fuzz(client: httpx.AsyncClient, count: int) -> dict[str, Any]:
    """Malformed requests from sixteen clients."""
    draw, statuses = random.Random(1), Counter[int]()
    bodies = iter([malformed(draw) for _ in range(count)])

    async def one_client() -> None:
        for path, body in bodies:
            statuses[(await client.post(path, content=body)).status_code] += 1

    await asyncio.gather(*(one_client() for _ in range(16)))
    return {"requests": count, "statuses": statuses}


async def huge(url: str, server: psutil.Process) -> dict[str, Any]:
    """Bodies of 100 MB, with their length told and in chunks."""
    before, statuses = server.memory_info().rss, Counter[str]()
    host, port = url.removeprefix("http://").split(":")
    for told in ("Content-Length: 100000000", "Transfer-Encoding: chunked"):
        for _ in range(10):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{told}\r\n"
            writer.write(f"{head}Authorization: Bearer {KEY}\r\n\r\n".encode())
            chunk = b" " * 100_000
            part = chunk if "Length" in told else b"186a0\r\n" + chunk + b"\r\n"
            reading = asyncio.create_task(reader.readline())
            with suppress(ConnectionError):  # the server closes the connection
                for _ in range(1000):
                    writer.write(part)
                    await writer.drain()
            try:
                line = await reading
            except ConnectionError:
                line = b""
            statuses[line.decode().split(" ")[1] if line else "closed"] += 1
            writer.close()
    grown = (server.memory_info().rss - before) / 2**20
    return {"statuses": statuses, "memory_grown_mib": grown}


async def strangers(url: str) -> dict[str, Any]:
    """Wrong keys, other origins and other hosts."""
    found: dict[str, Any] = {}
    right = {"Authorization": f"Bearer {KEY}"}
    cases = {
        "wrong_key": {"Authorization": "Bearer x"},
        "other_origin": {**right, "Origin": "https://example.org"},
        "other_host": {**right, "Host": "example.org"},
    }
    async with httpx.AsyncClient(base_url=url) as client:
        for name, headers in cases.items():
            posts = [
                await client.post(CHAT, json=questions()[0], headers=headers) for _ in "a" * 50
            ]
            found[name] = Counter(one.status_code for one in posts)
    return found


async def measure(url: str, server: psutil.Process, args: Any) -> dict[str, Any]:
    """Every figure."""
    headers = {"Authorization": f"Bearer {KEY}"}
    limits = httpx.Limits(max_connections=512, max_keepalive_connections=64)
    found: dict[str, Any] = {}
    async with httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=120
    ) as client:
        found["answers"] = await load(client, server, args)
        found["flood"] = await flood(client)
        found["cut"] = await cut(client, args.cut)
        found["malformed"] = await fuzz(client, args.malformed)
        found["huge"] = await huge(url, server)
        found["strangers"] = await strangers(url)
        found["memory_mib_at_the_end"] = server.memory_info().rss // 2**20
    return found


def main() -> None:
    """Print what was found, and record it."""
    parser = arguments(__doc__)
    for name, default in (("requests", 1000), ("clients", 64), ("malformed", 10_000), ("cut", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    load_before = os.getloadavg()
    with TemporaryDirectory() as folder:
        text = Path(folder) / "text.jsonl"
        text.write_text("".join(json.dumps({"text": one}) + "\n" for one in sentences(1, 400)))
        with started(fine_tuned(Path(folder), text, **SHAPE)) as (server, url):
            found = asyncio.run(measure(url, server, args))
    for name, value in found.items():
        print(name, value, flush=True)
    record(args.out, "serve_load", load_before, batch=BATCH, queue=QUEUE, **found)


if __name__ == "__main__":
    main()
