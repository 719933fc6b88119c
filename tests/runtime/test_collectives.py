"""Errors of the process group, which on a GPU host are NCCL's: each has a status and a remedy."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from minimind.errors import PeerError, RendezvousError, which_memory
from minimind.runtime.collectives import lost_peers, rendezvous

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
