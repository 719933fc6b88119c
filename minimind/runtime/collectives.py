"""The ranks of a run: how they agree on small facts, and what it means when one falls silent."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] (documented)

from minimind.errors import PeerError, RendezvousError, RunError, StorageError
from minimind.runtime.heartbeat import Peers

# What gloo and c10d say when the other end of a connection is gone or silent.
LOST = (
    *("Connection closed", "Connection reset", "Connection refused", "Broken pipe"),
    *("Timed out waiting", "timed out", "Read timeout", "remote process exited"),
)


@contextmanager
def lost_peers() -> Iterator[None]:
    """Turn the end of a peer, which the libraries tell as a RuntimeError, into a PeerError."""
    try:
        yield
    except RuntimeError as error:
        # A DistBackendError may be NCCL's complaint about how it was called: only by its words.
        is_lost = isinstance(error, dist.DistStoreError | dist.DistNetworkError)
        if is_lost or any(words in str(error) for words in LOST):
            reason = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0]).split(". ")[0]
            raise PeerError(
                f"another rank is gone or does not answer ({reason}); run the same command again"
            ) from error
        raise


@contextmanager
def rendezvous() -> Iterator[None]:
    """Tell a failure to meet as such: later, the same errors mean that a peer was lost."""
    try:
        yield
    except dist.DistError as error:
        raise RendezvousError(f"the ranks did not meet: {error}; check the launcher") from error


def carrier(device: str, dist_timeout: int) -> tuple[str, timedelta]:
    """`nccl` or `gloo`, which carries the collectives, and when it gives up.

    NCCL then aborts the process without a word of who was late: our own watch comes first.
    """
    if device == "cuda":
        return "nccl", timedelta(seconds=dist_timeout + 60)
    return "gloo", timedelta(seconds=dist_timeout)


class Ranks:
    """This rank among the others of the process group, which must stand."""

    def __init__(self, timeout: timedelta) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        # Small facts travel over gloo, so that agreeing on them never waits for the GPU.
        with lost_peers():
            self._control: Any = dist.new_group(backend="gloo", timeout=timeout)

    def sum_over_ranks(self, numbers: list[float]) -> list[float]:
        """Element by element, in float64, the same on every rank."""
        if self.world_size == 1:
            return [float(number) for number in numbers]
        total = torch.tensor(numbers, dtype=torch.float64)
        with lost_peers():
            dist.all_reduce(total, group=self._control)
        return total.tolist()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank, on every rank; anything that can be pickled."""
        values: list[Any] = [None] * self.world_size
        with lost_peers():
            dist.all_gather_object(values, value, group=self._control)
        return values

    def introduce(self, peers: Peers | None) -> None:
        """Let `peers` know the process of every rank, and speak with them beside collectives."""
        if peers is None or self.world_size == 1:
            return
        everyone = self.gather(peers.me)
        with lost_peers():  # a connection of its own: calls on one wait for each other
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = TCPStore(host, port, is_master=False, wait_for_workers=False)
            peers.meet(everyone, PrefixStore("peers", store))
        self.barrier()
        peers.begin()

    def another_group(self, seconds: float) -> Ranks:
        """The same ranks in a group of its own, for a thread that must not mix with the loop's."""
        return Ranks(timedelta(seconds=seconds))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        with lost_peers():
            dist.barrier(group=self._control)


class Gathers(Protocol):
    """Ranks, as far as agreeing on an outcome needs them."""

    rank: int

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank, on every rank."""
        ...


def together(ranks: Gathers, work: Callable[[], Any]) -> list[Any]:
    """What `work` returned on each rank; where it failed on one, all raise the same error."""
    outcome, problem, own = None, None, None
    try:
        outcome = work()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        told = f"{where}{error.strerror or error}; mend the path or its rights"
        problem = StorageError, told, ()
        own = error
    except RunError as error:
        problem, own = (type(error), str(error), error.table), error
    outcomes = ranks.gather((outcome, problem))
    for rank, (_, found) in enumerate(outcomes):
        if found:
            kind, told, table = found
            raise kind(told, cause_rank=rank, table=table) from own
    return [outcome for outcome, _ in outcomes]


def on_rank_0(ranks: Gathers, work: Callable[[], Any]) -> Any:
    """What `work` returned on rank 0, on every rank."""
    return together(ranks, lambda: work() if ranks.rank == 0 else None)[0]
