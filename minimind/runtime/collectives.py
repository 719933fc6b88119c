"""The ranks of a run: small collectives over gloo, and errors when a peer is lost."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] (documented)

from minimind.errors import PeerError, RendezvousError, RunError, StorageError, which_memory
from minimind.runtime.heartbeat import Peers

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # set by torchrun: workers share its own store
# Error messages of gloo and c10d when the peer of a connection is gone or silent.
LOST = (
    *("Connection closed", "Connection reset", "Connection refused", "Broken pipe"),
    *("Timed out waiting", "timed out", "Read timeout", "remote process exited"),
)
# Words of NCCL's last error, and the remedy.
NCCL_REMEDIES = {
    "/dev/shm": "enlarge /dev/shm (docker run --ipc=host, or --shm-size=8g)",
    "Duplicate GPU": "give every process a GPU of its own, and no two of them slices (MIG) of one",
    "socket interface": "name an interface that the hosts share in NCCL_SOCKET_IFNAME",
}
LAST_ERROR = re.compile(r"Last error:\n([^\n]+)")
NCCL_OTHERWISE = "run it again with NCCL_DEBUG=INFO, which prints the cause"


@contextmanager
def lost_peers() -> Iterator[None]:
    """Convert the RuntimeError of a lost connection into PeerError, NCCL's into RendezvousError."""
    try:
        yield
    except RuntimeError as error:
        # DistBackendError may also be a misuse of NCCL, so it is recognized by its message only.
        is_lost = isinstance(error, dist.DistStoreError | dist.DistNetworkError)
        if is_lost or any(words in str(error) for words in LOST):
            reason = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0]).split(". ")[0]
            raise PeerError(
                f"another rank is gone or does not answer ({reason}); run the same command again"
            ) from error
        if message := nccl_fault(error):
            raise RendezvousError(message) from error
        raise


def nccl_fault(error: Exception) -> str:
    """Return one sentence about an error of NCCL: what it calls its last error, and the remedy.

    Empty for other errors, and if NCCL is out of memory, which has its own message.
    """
    text = str(error)
    if not isinstance(error, dist.DistBackendError) or "NCCL" not in text or which_memory(error):
        return ""
    last = LAST_ERROR.search(text)  # may be empty, before a stack of C++
    reason = (last[1] if last else text.splitlines()[0]).strip().removesuffix(".")
    remedies = (remedy for words, remedy in NCCL_REMEDIES.items() if words in text)
    return f"NCCL failed: {reason}; {next(remedies, NCCL_OTHERWISE)}"


@contextmanager
def rendezvous() -> Iterator[None]:
    """Convert distributed errors of the start into RendezvousError."""
    try:
        yield
    except dist.DistError as error:
        if which_memory(error):
            raise
        message = nccl_fault(error) or f"the ranks did not meet: {error}; check the launcher"
        raise RendezvousError(message) from error


def own_store(environ: MutableMapping[str, str], timeout: timedelta) -> None:
    """Choose a port for a store of this start, if torchrun may start the processes again.

    torchrun keeps one store for all starts, and in it the addresses of processes that are gone.
    There, rank 0 offers a port, and another rank takes it once rank 0 has confirmed that it reads
    its answer: an offer of an earlier start is never confirmed.
    """
    rank, world_size = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
    restarts = int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    if world_size == 1 or restarts == 0 or environ.get(AGENT_STORE) != "True":
        return
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    shared = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    store = PrefixStore("start", shared)
    if rank == 0:
        environ["MASTER_PORT"] = _offer_port(store, world_size)
    else:
        environ["MASTER_PORT"] = _confirmed_port(store, rank, timeout)
    environ[AGENT_STORE] = "False"


def _offer_port(store: PrefixStore, world_size: int) -> str:
    """Offer a free port of this host, and confirm it to every other rank."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    offer = f"{port} {os.urandom(8).hex()}"
    store.set("offer", offer)
    for rank in range(1, world_size):
        try:
            answer = store.get(f"{offer} to {rank}").decode()  # waits
        except dist.DistError as error:
            raise RendezvousError(f"rank {rank} did not start; check the launcher") from error
        store.set(f"{answer} confirmed", "")
    return port


def _confirmed_port(store: PrefixStore, rank: int, timeout: timedelta) -> str:
    """Answer offers until one is confirmed."""
    answer = os.urandom(8).hex()
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        offer = store.get("offer").decode()  # waits
        store.set(f"{offer} to {rank}", answer)
        time.sleep(0.1)
        if store.check([f"{answer} confirmed"]):
            return offer.split()[0]
    raise RendezvousError("not all ranks started in time; check the launcher")


def meeting_store(environ: MutableMapping[str, str], timeout: timedelta) -> PrefixStore:
    """A store of all ranks of the environment, before they have a process group.

    Rank 0 holds it where no launcher does, and must keep it until the group is there: another rank
    that connects to that of the group takes the same port.
    """
    own_store(environ, timeout)
    store = TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=environ["RANK"] == "0" and environ.get(AGENT_STORE) != "True",
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,  # that of the group is on the same port
    )
    return PrefixStore("meeting", store)


def collective_backend(device: str, dist_timeout: int) -> tuple[str, timedelta]:
    """Return the backend of a device, `nccl` or `gloo` for one, and its timeout.

    NCCL aborts the process on a timeout without naming a rank, so its timeout is longer than ours.
    """
    backend = dist.get_default_backend_for_device(device)
    return backend, timedelta(seconds=dist_timeout + (0 if backend == "gloo" else 60))


class Ranks:
    """The ranks of the initialized process group."""

    def __init__(self, timeout: timedelta) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        # gloo, so that small values never wait for the GPU.
        with lost_peers():
            self._control: Any = dist.new_group(backend="gloo", timeout=timeout)

    def sum_over_ranks(self, numbers: list[float]) -> list[float]:
        """Sum element-wise over ranks, in float64, equal on every rank."""
        if self.world_size == 1:
            return [float(number) for number in numbers]
        total = torch.tensor(numbers, dtype=torch.float64)
        with lost_peers():
            self._add_those_of_others(total)
        return total.tolist()

    def _add_those_of_others(self, total: torch.Tensor) -> None:
        """Sum in place over all ranks, in log2 W exchanges: gloo's own sums go round a ring, W - 1
        ranks twice, which a step would wait for.

        Both of a pair add the same two numbers, so that all have the same bits.
        """
        paired = 1 << (self.world_size.bit_length() - 1)  # ranks; the others have one of these each
        partner = self.rank - paired if self.rank >= paired else self.rank + paired
        if self.rank >= paired:
            dist.send(total, partner, group=self._control)
            dist.recv(total, partner, group=self._control)
            return
        received = torch.empty_like(total)
        if partner < self.world_size:
            dist.recv(received, partner, group=self._control)
            total += received
        for bit in range(paired.bit_length() - 1):
            other = self.rank ^ (1 << bit)
            sending: Any = dist.isend(total, other, group=self._control)
            dist.recv(received, other, group=self._control)
            sending.wait()
            total += received
        if partner < self.world_size:
            dist.send(total, partner, group=self._control)

    def gather(self, value: Any) -> list[Any]:
        """Return the picklable values of all ranks, on every rank."""
        return self.decide(value, lambda values: values)

    def from_rank_0(self, value: Any) -> Any:
        """Return the picklable value of rank 0 on every rank, by way of a tree."""
        values = [value]
        if self.world_size > 1:
            with lost_peers():
                dist.broadcast_object_list(values, src=0, group=self._control)
        return values[0]

    def decide(self, value: Any, choose: Callable[[list[Any]], Any]) -> Any:
        """Return on every rank what `choose` makes of all picklable values on rank 0.

        As many messages as ranks, to rank 0 and back. An all_gather sends as many from every rank,
        and pads each value to the largest.
        """
        values = [value]
        with lost_peers():
            if self.rank:
                dist.send_object_list(values, dst=0, group=self._control)
            for rank in range(1, self.world_size) if self.rank == 0 else ():
                received = [None]
                dist.recv_object_list(received, src=rank, group=self._control)
                values += received
        return self.from_rank_0(choose(values) if self.rank == 0 else None)

    def introduce(self, peers: Peers | None) -> None:
        """Give `peers` the process of every rank and a store for heartbeats, and start them."""
        if peers is None or self.world_size == 1:
            return
        everyone = self.gather(peers.me)
        with lost_peers():  # a separate connection: calls on one are serialized
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = TCPStore(host, port, is_master=False, wait_for_workers=False)
            peers.set_peers(everyone, PrefixStore("peers", store))
        self.barrier()
        peers.start()

    def another_group(self, seconds: float) -> Ranks:
        """A separate group of the same ranks: for another thread, or with another timeout."""
        return Ranks(timedelta(seconds=seconds))

    def barrier(self) -> None:
        with lost_peers():
            dist.barrier(group=self._control)


class Deciding(Protocol):
    """The part of Ranks that `run_on_all_ranks` and `on_rank_0` need."""

    rank: int

    def from_rank_0(self, value: Any) -> Any: ...

    def decide(self, value: Any, choose: Callable[[list[Any]], Any]) -> Any: ...


Failure = tuple[type[RunError], str, Sequence[str]]  # class, message and table


@dataclass(frozen=True)
class _Attempt:
    """What some work returned, or how it failed, in a form that can be pickled."""

    result: Any = None
    failure: Failure | None = None
    error: Exception | None = None

    @classmethod
    def of(cls, work: Callable[[], Any]) -> _Attempt:
        try:
            return cls(work())
        except OSError as error:
            path = f"{error.filename}: " if error.filename else ""
            message = f"{path}{error.strerror or error}; correct the path or its permissions"
            return cls(failure=(StorageError, message, ()), error=error)
        except RunError as error:
            return cls(failure=(type(error), str(error), error.table), error=error)


def run_on_all_ranks(
    ranks: Deciding, work: Callable[[], Any], then: Callable[[list[Any]], Any] | None = None
) -> Any:
    """Run `work` on all ranks, and return its result; if it fails on one, all raise the same error.

    With `then`: return on every rank what it makes of the results of all, on rank 0.
    """
    own = _Attempt.of(work)

    def judge(parts: list[tuple[Any, Failure | None]]) -> tuple[Any, tuple[int, Failure] | None]:
        for rank, (_, failure) in enumerate(parts):
            if failure:
                return None, (rank, failure)
        last = _Attempt.of(lambda: then and then([result for result, _ in parts]))
        return last.result, last.failure and (0, last.failure)

    found, failed = ranks.decide((own.result if then else None, own.failure), judge)
    if failed:
        raise _error(*failed) from own.error
    return found if then else own.result


def on_rank_0(ranks: Deciding, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0; return its result on every rank, or raise its error there."""
    own = _Attempt.of(work) if ranks.rank == 0 else _Attempt()
    result, failure = ranks.from_rank_0((own.result, own.failure))
    if failure:
        raise _error(0, failure) from own.error
    return result


def _error(rank: int, failure: Failure) -> RunError:
    error_class, message, table = failure
    return error_class(message, cause_rank=rank, table=table)
