"""Leftovers of launchers in the environment end a start in one line, before torch is imported."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from minimind.config.launcher_env import read_launch, set_rendezvous_defaults
from minimind.errors import RendezvousError, RunError, StorageError
from minimind.runtime import environment
from minimind.runtime.environment import RANGES, allow_connections, rank_of, require_environment
from tests.conftest import ROOT

TWO = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("value", ["", " ", "abc", "-1", "1.5", "1e3", "\u0661", str(2**31)])
def test_a_number_that_is_none_is_reported_by_name_and_value(name: str, value: str):
    with pytest.raises(RendezvousError) as caught:
        require_environment({name: value})
    assert f"{name} is {value!r} in the environment" in str(caught.value)
    assert "; unset it" in str(caught.value)
    assert rank_of({name: value}) == 0


@pytest.mark.parametrize(
    ("environ", "report"),
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'.*from 1 to"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is '0'.*from 1 to 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is '65536'"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is empty"),
        ({"RANK": "5"}, "RANK is 5 in the environment and WORLD_SIZE is not set.*; unset RANK"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK is 1 .* WORLD_SIZE is not set"),
        ({**TWO, "RANK": "2"}, "RANK is 2 .* WORLD_SIZE is 2"),
        ({**TWO, "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK is 1 .* LOCAL_WORLD_SIZE is 1"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE is 2 .*more than the 1 processes"),
        ({**TWO, "LOCAL_RANK": "2"}, "LOCAL_RANK is 2 .* LOCAL_WORLD_SIZE is 2"),
        ({"GLOO_SOCKET_IFNAME": "nope0"}, "GLOO_SOCKET_IFNAME is 'nope0' .*name one of these"),
        ({"GLOO_SOCKET_IFNAME": "lo,nope0"}, "GLOO_SOCKET_IFNAME is 'lo,nope0'"),
        ({"NCCL_SOCKET_IFNAME": "=l"}, "NCCL_SOCKET_IFNAME is '=l'"),
        ({"NCCL_SOCKET_IFNAME": "nope,more"}, "NCCL_SOCKET_IFNAME is 'nope,more'"),
        ({"TORCH_DISTRIBUTED_DEBUG": "bogus"}, "TORCH_DISTRIBUTED_DEBUG is 'bogus' .* OFF, INFO"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_SIZE is '2' .*not started by MPI; unset it"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is '2'"),
        ({"RANK": "9" * 5000}, "RANK is '9"),
        ({"TMPDIR": ""}, "TMPDIR is ''"),
        ({"TMPDIR": "/nonexistent"}, "TMPDIR is '/nonexistent' .*not a folder"),
        ({"TMPDIR": __file__}, "not a folder that can be written to"),
    ],
)
def test_what_is_out_of_range_or_contradicts_another_is_reported(
    environ: dict[str, str], report: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(environment, "GPU_DRIVERS", (Path("/dev/null"),))
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    kind = StorageError if "TMPDIR" in environ else RendezvousError
    with pytest.raises(RunError, match=report) as caught:
        require_environment(environ)
    assert type(caught.value) is kind
    with pytest.raises(kind):
        read_launch(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**TWO, **MEETING},
        {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_SIZE": "4", **MEETING},
        {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""},
        {"GLOO_SOCKET_IFNAME": "eth0,lo", "NCCL_SOCKET_IFNAME": "nope,et"},
        {"NCCL_SOCKET_IFNAME": "^nope"},
        {"NCCL_SOCKET_IFNAME": "=eth0"},
        {"TMPDIR": "/tmp"},
    ],
)
def test_what_launchers_and_libraries_take_passes(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(environment, "GPU_DRIVERS", (Path("/dev/null"),))
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    require_environment(environ)


def test_an_interface_for_nccl_is_no_matter_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "GPU_DRIVERS", (Path("/nowhere"),))
    require_environment({"NCCL_SOCKET_IFNAME": "ib0"})


def test_a_port_without_an_address_is_that_of_this_host():
    environ = {"MASTER_PORT": "29500"}
    set_rendezvous_defaults(environ)
    assert environ["MASTER_ADDR"] == "127.0.0.1"
    assert environ["MASTER_PORT"] == "29500"


@pytest.mark.parametrize(
    ("environ", "status", "output"),
    [
        ({"RANK": ""}, 9, "error[E_RENDEZVOUS] rank=0 step=0: RANK is '' in the environment"),
        ({"MINIMIND_SCRIPT_PID": "abc"}, 9, "MINIMIND_SCRIPT_PID is 'abc'"),
        ({"TMPDIR": "/nonexistent"}, 5, "error[E_STORAGE] rank=0 step=0: TMPDIR is"),
    ],
)
def test_the_script_ends_in_one_line_before_it_imports_torch(
    environ: dict[str, str], status: int, output: str
):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / "train_pretrain.py"), "--dry_run"],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert (done.returncode, done.stdout, len(lines)) == (status, "", 1)
    assert output in lines[0]
    assert "| torch\n" not in done.stderr


def test_the_launch_script_without_a_place_for_its_files_ends_with_5():
    done = subprocess.run(
        ["bash", str(ROOT / "run_accelerate.sh"), "--dry_run"],
        env={**os.environ, "PYTHON": sys.executable, "TMPDIR": "/nonexistent"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == (
        "run_accelerate.sh: error[E_STORAGE] rank=0 step=0: no folder can be made in /nonexistent"
        " (TMPDIR); free some space, or name another there\n"
    )


@pytest.mark.parametrize(
    ("limits", "processes", "raised"),
    [
        ((1024, 524_288), 8, None),
        ((1024, 524_288), 1024, (8704, 524_288)),
        ((1024, 4096), 1024, (4096, 4096)),  # of GPUs, whose collectives are not gloo's
        ((256, resource.RLIM_INFINITY), 2, (528, resource.RLIM_INFINITY)),  # macOS
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1024, None),
    ],
)
def test_ranks_may_open_the_files_that_their_connections_take(
    limits: tuple[int, int],
    processes: int,
    raised: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
):
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, values: calls.append(values))
    allow_connections(processes)
    assert calls == ([raised] if raised else [])


def test_a_hard_limit_of_open_files_that_is_too_low_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    with pytest.raises(RendezvousError, match=r"1,024 processes .* the hard limit .* is 1,024"):
        allow_connections(1024)
