"""What one client of `minimind serve` waits for while others attack it, and the memory that takes.

    python -m benchmarks.serve_attacked [--seconds 20] [--senders 8] [--slow 300]
        [--roots . OTHER_CHECKOUT] [--out FILE.json]

The client asks for one token, five times a second, from the same address as the others. These send
chats that a stranger's template reads for ever (bombs), bodies of a mebibyte (large), or a byte of
a body a second (slow). The model is tiny and random: its own time is of no interest here. Each
attack has a server of its own, for each checkout in turn.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from benchmarks.record import arguments, record
from minimind.data.chat.template import DEFAULT_TEMPLATE, SPECIAL_TOKENS
from minimind.data.tokenizer.add_special import with_special_tokens
from minimind.data.tokenizer.load import load_tokenizer
from minimind.data.tokenizer.sentencepiece import train_tokenizer
from tests.cli.test_lm_eval import write_llama
from tests.serve.bombs import BOMBS, chat_of, large_bodies, with_bombs
from tools.runs import sentences

CHAT = "/v1/chat/completions"
POSITIONS = 1024
PATIENCE = 20.0  # seconds that the client waits for an answer
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n".encode()


def model(place: Path) -> Path:
    """An export of random weights, whose template has bombs."""
    learnt = place / "learnt.model"
    train_tokenizer(sentences(1, 400), 600, learnt)
    extended = with_special_tokens(load_tokenizer(learnt), SPECIAL_TOKENS, place / "extended")
    served = place / "served"
    served.mkdir()
    write_llama(served, extended, POSITIONS)
    (served / "chat_template.jinja").write_text(with_bombs(DEFAULT_TEMPLATE))
    return served


@contextmanager
def started(root: Path, place: Path) -> Iterator[tuple[psutil.Process, str]]:
    """The server of a checkout, and its URL; it may be too busy for a signal."""
    line = [sys.executable, "-m", "minimind", "serve", "--model", str(place), "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*line, "--port", "0"], stdout=subprocess.PIPE, text=True, env=environment, cwd=place
    ) as process:
        assert process.stdout is not None
        yield psutil.Process(process.pid), process.stdout.readline().split()[0]
        process.kill()


def memory(server: psutil.Process) -> dict[str, int]:
    """MiB of the server and of the processes that it has started."""
    found = {"server": server.memory_info().rss // 2**20, "others": 0}
    for child in server.children(recursive=True):
        with suppress(psutil.Error):
            found["others"] += child.memory_info().rss // 2**20
    return found


async def send_all(url: str, bodies: list[bytes], senders: int) -> None:
    """Send bodies one after another, again and again, from each of the senders."""

    async def send(first: int) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=600) as client:
            for number in count(first):
                with suppress(httpx.HTTPError):
                    await client.post(CHAT, content=bodies[number % len(bodies)])

    await asyncio.gather(*map(send, range(senders)))


async def trickle(url: str, connections: int) -> None:
    """Keep as many connections on which a byte of a body comes every second."""
    host, port = url.removeprefix("http://").split(":")

    async def one() -> None:
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(HEAD)
                while not writer.is_closing():
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.sleep(1)
            await asyncio.sleep(0.1)

    await asyncio.gather(*(one() for _ in range(connections)))


async def waits(url: str, server: psutil.Process, seconds: float) -> dict[str, Any]:
    """What the client waits for, what it is told, and the most memory meanwhile."""
    found: list[float] = []
    statuses: Counter[str] = Counter()
    most = {"server": 0, "others": 0}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begun = time.monotonic()
        try:
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
                response = await client.post(CHAT, content=chat_of("春眠"))
            statuses[str(response.status_code)] += 1
        except httpx.HTTPError:
            statuses["none"] += 1
        found.append(time.monotonic() - begun)
        most = {name: max(size, most[name]) for name, size in memory(server).items()}
        await asyncio.sleep(0.2)
    worst = max(found)
    return {
        "statuses": statuses,
        "median_seconds": round(median(found), 4),
        "most_seconds": round(worst, 4),
        "most_mib": most,
    }


async def under(attack: Awaitable[None] | None, measured: Awaitable[Any]) -> Any:
    """What is measured while the attack, if any, goes on."""
    if attack is None:
        return await measured
    attacking = asyncio.ensure_future(attack)
    await asyncio.sleep(2)
    try:
        return await measured
    finally:
        attacking.cancel()
        await asyncio.gather(attacking, return_exceptions=True)


def main() -> None:
    """Print what was found, and record it."""
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--senders", type=int, default=8)
    parser.add_argument("--slow", type=int, default=300)
    parser.add_argument("--roots", type=Path, nargs="+", default=[Path()])
    args = parser.parse_args()
    for root in args.roots:  # else the server would be that of the installed package
        if not (root / "minimind" / "serve").is_dir():
            parser.error(f"--roots {root} is no checkout: it has no minimind/serve")
    load_before = os.getloadavg()
    bombs, large = [*map(chat_of, BOMBS)], [*large_bodies().values()]
    attacks: dict[str, Callable[[str], Awaitable[None]] | None] = {
        "none": None,
        "bombs": lambda url: send_all(url, bombs, args.senders),
        "large": lambda url: send_all(url, large, args.senders),
        "slow": lambda url: trickle(url, args.slow),
    }
    found: dict[str, list[Any]] = {name: [] for name in attacks}
    with TemporaryDirectory() as folder:
        place = model(Path(folder))
        for name, attack in attacks.items():
            for root in args.roots:
                with started(root.resolve(), place) as (server, url):
                    measured = waits(url, server, args.seconds)
                    one = asyncio.run(under(attack and attack(url), measured))
                found[name].append(one)
                print(name, root.resolve().name, json.dumps(one), flush=True)
    record(args.out, "serve_attacked", load_before, **found)


if __name__ == "__main__":
    main()
