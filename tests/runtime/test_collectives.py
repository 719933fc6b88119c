"""Errors of the process group, which on a GPU host are NCCL's: each has a status and a remedy."""

from __future__ import annotations

import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from minimind.errors import PeerError, RendezvousError, which_memory
from minimind.runtime.collectives import AGENT_STORE, Ranks, lost_peers, own_store, rendezvous

SYSTEM = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error"
    " (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclSystemError: System call"
    " (e.g. socket, malloc) or external library call failed or device error.\nLast error:\n"
)
SHARED = "Error while creating shared memory segment /dev/shm/nccl-LeXlEJ (size 9637888)"
TWICE = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10"
STACK = "\nException raised from getNCCLComm at ProcessGroupNCCL.cpp:1287 (most recent call first):"


@pytest.mark.parametrize("part", [lost_peers, rendezvous])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SYSTEM + SHARED, f"NCCL failed: {SHARED}; enlarge /dev/shm (docker run --ipc=host"),
        (SYSTEM + TWICE + STACK, f"NCCL failed: {TWICE}; give every process a GPU of its own"),
        (SYSTEM + "Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME"),
        (SYSTEM + "Cuda failure 'invalid argument'", "invalid argument'; run it again with"),
        (SYSTEM, "NCCL failed: NCCL error in: /pytorch"),  # without a last error
        (SYSTEM + STACK, "NCCL failed: NCCL error in: /pytorch"),
        ("NCCL timeout in: NCCLUtils.cpp:89", "NCCL failed: NCCL timeout in: NCCLUtils.cpp:89; "),
    ],
)
def test_an_error_of_nccl_is_one_sentence_with_its_remedy(part, error: str, message: str):
    with pytest.raises(RendezvousError) as caught, part():
        raise dist.DistBackendError(error)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", [lost_peers, rendezvous])
def test_nccl_out_of_memory_keeps_its_own_message(part):
    with pytest.raises(dist.DistBackendError) as caught, part():
        raise dist.DistBackendError(SYSTEM + "Cuda failure 2 'out of memory'")
    assert which_memory(caught.value) == "device"


def test_a_peer_that_nccl_lost_is_a_lost_peer():
    with pytest.raises(PeerError, match="another rank is gone"), lost_peers():
        raise dist.DistBackendError(f"{SYSTEM}socketProgress: Connection closed by remote peer")


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match=r"^CUDA error: an illegal memory access$"), lost_peers():
        raise RuntimeError("CUDA error: an illegal memory access")
    with pytest.raises(RendezvousError, match="the ranks did not meet: refused; check the"):
        with rendezvous():
            raise dist.DistBackendError("refused")


def of_rank(rank: int, port: int) -> dict[str, str]:
    """What torchrun with --max-restarts 1 gives to one of three workers."""
    found = {"RANK": str(rank), "WORLD_SIZE": "3", "TORCHELASTIC_MAX_RESTARTS": "1"}
    return found | {AGENT_STORE: "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_each_start_of_torchrun_agrees_on_a_store_of_its_own():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports = set()
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):  # offers of the earlier starts are still there
        ranks = [of_rank(rank, server.port) for rank in order]
        with ThreadPoolExecutor(3) as pool:
            for done in [
                pool.submit(own_store, environ, timedelta(seconds=30)) for environ in ranks
            ]:
                done.result()
        (port,) = {environ["MASTER_PORT"] for environ in ranks}
        assert {environ[AGENT_STORE] for environ in ranks} == {"False"}
        ports.add(port)
    assert len(ports) == 3
    assert str(server.port) not in ports


def test_an_offer_of_an_earlier_start_is_not_taken():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = PrefixStore("start", server)
    store.set("offer", "1234 of a rank 0 that is gone")
    with pytest.raises(RendezvousError, match="rank 1 did not start; check the launcher"):
        own_store(of_rank(0, server.port), timedelta(seconds=1))
    with pytest.raises(RendezvousError, match="not all ranks started in time; check the launcher"):
        own_store(of_rank(1, server.port), timedelta(seconds=1))


@pytest.mark.parametrize(
    "other", [{"WORLD_SIZE": "1"}, {"TORCHELASTIC_MAX_RESTARTS": "0"}, {AGENT_STORE: "False"}]
)
def test_a_store_without_earlier_starts_is_kept(other: dict[str, str]):
    environ = of_rank(0, 1) | other
    before = dict(environ)
    own_store(environ, timedelta(seconds=1))
    assert environ == before


@pytest.mark.parametrize(
    ("ranks", "messages"), [(2, 2), (3, 4), (4, 8), (5, 10), (7, 14), (8, 24), (100, 456)]
)
def test_a_sum_over_ranks_takes_few_messages_and_has_the_same_bits_on_all(
    ranks: int, messages: int, monkeypatch: pytest.MonkeyPatch
):
    """Threads are the ranks. A ring would take 2 W (W - 1) messages, one after the other."""
    boxes: dict[tuple[int, int], Queue[torch.Tensor]] = {}
    sent: list[int] = []
    me = threading.local()

    def box(sender: int, receiver: int) -> Queue[torch.Tensor]:
        return boxes.setdefault((sender, receiver), Queue())  # one for both, whoever is first

    def send(values: torch.Tensor, to: int, group: Any) -> Any:
        sent.append(to)
        box(me.rank, to).put(values.clone())
        return SimpleNamespace(wait=lambda: None)

    def recv(values: torch.Tensor, source: int, group: Any) -> None:
        values.copy_(box(source, me.rank).get(timeout=60))

    for name, call in (("send", send), ("isend", send), ("recv", recv)):
        monkeypatch.setattr(dist, name, call)
    numbers = [[random.Random(rank).random() * 10**rank, 1.0] for rank in range(ranks)]

    def sum_on(rank: int) -> list[float]:
        me.rank = rank
        one = Ranks.__new__(Ranks)  # without a process group
        one.rank, one.world_size, one._control = rank, ranks, None
        return one.sum_over_ranks(numbers[rank])

    with ThreadPoolExecutor(ranks) as pool:
        sums = [*pool.map(sum_on, range(ranks))]
    assert all(found == sums[0] for found in sums)
    assert sums[0] == pytest.approx([math.fsum(first for first, _ in numbers), ranks], rel=1e-12)
    assert len(sent) == messages
