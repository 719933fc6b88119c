"""What grows with the number of ranks: heartbeats, small collectives, the files of a resume.

    python -m benchmarks.many_ranks [--ranks 8 64 512 1024] [--forked 8 32] [--sums 8 16 32]
        [--seconds 6] [--out FILE.json]

Heartbeats: threads of one process, each with its own connection to a TCPStore of torch, per
interval. Collectives: forked ranks over gloo, with the manifest of a checkpoint of 1,024 shards,
with nothing, and with one entry of a manifest from every rank. Sums: those of a step, in pairs and
by gloo's all-reduce in turns, on forked ranks.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed import distributed_c10d as c10d

from benchmarks.record import arguments, record
from minimind.checkpoint.validation import shard_name
from minimind.runtime.collectives import Ranks, on_rank_0, run_on_all_ranks
from minimind.runtime.heartbeat import HEARTBEAT_INTERVAL, Peers, Worker, this_worker
from minimind.runtime.process import Progress

PER_HOST = 8
SHARDS = 1024
SUMMED, TURNS = [1.0] * 4, 41


class CountingStore:
    """Counts the keys and bytes that one rank writes and reads."""

    def __init__(self, store: Any, counts: Counter[str]) -> None:
        self._store, self._counts = store, counts

    def set(self, key: str, value: str) -> None:
        self._counts.update(writes=1, bytes=len(value))
        self._store.set(key, value)

    def multi_get(self, keys: list[str]) -> Sequence[bytes]:
        values = self._store.multi_get(keys)
        self._counts.update(rounds=1, reads=len(keys), bytes=sum(map(len, values)))
        return values

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        self._counts.update(writes=1)
        return self._store.compare_set(key, expected_value, desired_value)


def heartbeats(world_size: int, seconds: float) -> dict[str, float]:
    """Store operations of all ranks per interval, and what a check costs."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    counts = [Counter[str]() for _ in range(world_size)]
    me = this_worker(0)
    everyone = [
        Worker(rank, f"host-{rank // PER_HOST}", me.pid, me.started) for rank in range(world_size)
    ]
    ranks = []
    with ThreadPoolExecutor(128) as pool:  # connecting takes 0.2 s
        connect = partial(TCPStore, is_master=False, wait_for_workers=False)
        stores = list(pool.map(lambda rank: connect("127.0.0.1", server.port), range(world_size)))
    for rank, (count, store) in enumerate(zip(counts, stores, strict=True)):
        peers = Peers(Progress(rank=rank))
        peers.set_peers(everyone, CountingStore(PrefixStore("peers", store), count))  # pyright: ignore[reportArgumentType]
        ranks.append(peers)
    for (
        peers
    ) in ranks:  # spread over an interval: the threads of one process get in each other's way
        peers.start()
        time.sleep(HEARTBEAT_INTERVAL / world_size)
    for count in counts:
        count.clear()
    began, cpu = time.monotonic(), time.process_time()
    time.sleep(seconds)
    total = sum(counts, Counter[str]())
    busiest = max(count["reads"] / max(1, count["rounds"]) for count in counts)
    elapsed, used = time.monotonic() - began, time.process_time() - cpu
    rounds = total["rounds"] / world_size
    found = {
        "writes": total["writes"] / rounds,
        "reads": total["reads"] / rounds,
        "reads_of_the_busiest_rank": busiest,
        "mebibytes": total["bytes"] / rounds / 2**20,
        "interval_seconds": elapsed / rounds,
        "cpu_seconds": used / rounds,
        "check_ms": milliseconds(lambda: ranks[-1].check(1.0)),
        "check_ms_rank_0": milliseconds(lambda: ranks[0].check(1.0)),
    }
    for peers in ranks:  # not `close`, which joins: the threads are those of one process here
        peers._closed.set()
        peers._wake.set()
    time.sleep(1.0)
    return found


def milliseconds(work: Callable[[], Any]) -> float:
    """CPU time of this thread for one call, the least of three."""
    times = []
    for _ in range(3):
        began = time.thread_time()
        work()
        times.append((time.thread_time() - began) * 1e3)
    return min(times)


@contextmanager
def received(rank: int, world_size: int) -> Iterator[Counter[str]]:
    """Count the bytes that collectives of torch fill on this rank, and gloo's messages to it."""
    counts: Counter[str] = Counter()
    messages = {"all_gather": world_size - 1, "broadcast": int(rank > 0), "recv": 1}  # ring, tree
    originals = {name: getattr(c10d, name) for name in messages}

    def counting(name: str) -> Callable[..., Any]:
        def call(filled: Any, *given: Any, **options: Any) -> Any:
            tensors = filled if isinstance(filled, list) else [filled]
            counts.update(messages=messages[name], bytes=sum(t.nbytes for t in tensors))
            return originals[name](filled, *given, **options)

        return call

    for name in messages:
        setattr(c10d, name, counting(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(c10d, name, original)


def manifest() -> dict[str, Any]:
    """The list of files of a checkpoint of SHARDS ranks."""
    files = [
        {"name": shard_name(rank, SHARDS), "bytes": 10**8 + rank, "sha256": os.urandom(32).hex()}
        for rank in range(SHARDS)
    ]
    return {"files": files}


def _decisions(ranks: Ranks) -> dict[str, dict[str, float]]:
    """What this rank receives in one call of each kind, and how long it takes."""
    value = manifest() if ranks.rank == 0 else None
    entry = manifest()["files"][0]
    works: dict[str, Callable[[], Any]] = {
        "on_rank_0, a manifest": lambda: on_rank_0(ranks, lambda: value),
        "on_rank_0, nothing": lambda: on_rank_0(ranks, lambda: None),
        "run_on_all_ranks, an entry": lambda: run_on_all_ranks(ranks, lambda: [entry]),
    }
    found = {}
    for name, work in works.items():
        work()
        ranks.barrier()
        with received(ranks.rank, ranks.world_size) as counts:
            began = time.monotonic()
            work()
            found[name] = {"seconds": time.monotonic() - began, **counts}
        ranks.barrier()
    return found


def _timed_sums(ranks: Ranks) -> dict[str, list[tuple[float, float]]]:
    """Seconds, and CPU seconds of this rank, of each turn."""
    ways: dict[str, Callable[[], Any]] = {
        "ring": lambda: dist.all_reduce(torch.tensor(SUMMED, dtype=torch.float64)),
        "pairs": lambda: ranks.sum_over_ranks(SUMMED),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, work in ways.items():
            ranks.barrier()
            began, cpu = time.monotonic(), time.process_time()
            work()
            found[name].append((time.monotonic() - began, time.process_time() - cpu))
    return found


def _play(work: Callable[[Ranks], Any], rank: int, size: int, port: int, results: Any) -> None:
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    ranks = Ranks(timedelta(seconds=300))
    results.put((rank, work(ranks)))
    ranks.barrier()
    dist.destroy_process_group()


def forked(work: Callable[[Ranks], Any], world_size: int) -> list[Any]:
    """What `work` returns on each of the forked ranks."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:  # no store in this process: forks must not inherit its threads
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results: Any = context.Queue()
    started = [
        context.Process(target=_play, args=(work, rank, world_size, port, results))
        for rank in range(world_size)
    ]
    for process in started:
        process.start()
    by_rank = dict(results.get() for _ in started)
    for process in started:
        process.join()
    return [by_rank[rank] for rank in range(world_size)]


def collectives(world_size: int) -> dict[str, dict[str, float]]:
    """What ranks receive in one call, and how long it takes."""
    by_rank = forked(_decisions, world_size)
    return {
        name: {
            "seconds": max(found[name]["seconds"] for found in by_rank),
            "messages": sum(found[name].get("messages", 0) for found in by_rank),
            "mebibytes": sum(found[name].get("bytes", 0) for found in by_rank) / 2**20,
            "mebibytes_of_the_last": by_rank[-1][name].get("bytes", 0) / 2**20,
        }
        for name in by_rank[0]
    }


def sums(world_size: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a sum, of the slowest rank, and of CPU, of all ranks: median and least."""
    by_rank = forked(_timed_sums, world_size)
    found = {}
    for name in by_rank[0]:
        turns = list(zip(*(timed[name] for timed in by_rank), strict=True))
        slowest = [1e3 * max(elapsed for elapsed, _ in turn) for turn in turns]
        used = [1e3 * sum(cpu for _, cpu in turn) for turn in turns]
        found[name] = {
            "ms": median(slowest),
            "ms_least": min(slowest),
            "cpu_ms": median(used),
            "cpu_ms_least": min(used),
        }
    return found


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 512, 1024])
    parser.add_argument("--forked", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--sums", type=int, nargs="*", default=[8, 16, 32])
    parser.add_argument("--seconds", type=float, default=6.0)
    args = parser.parse_args()
    load = os.getloadavg()
    found: dict[str, Any] = {"heartbeats": {}, "collectives": {}, "sums": {}}
    for world_size in args.forked:
        found["collectives"][world_size] = collectives(world_size)
        print(world_size, found["collectives"][world_size], flush=True)
    for world_size in args.sums:
        found["sums"][world_size] = sums(world_size)
        print(world_size, found["sums"][world_size], flush=True)
    for world_size in args.ranks:
        found["heartbeats"][world_size] = heartbeats(world_size, args.seconds)
        print(world_size, found["heartbeats"][world_size], flush=True)
    record(args.out, "many_ranks", load, **found)
