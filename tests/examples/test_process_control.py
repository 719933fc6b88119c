"""examples/process_control.py: who prints what, on one host and on two."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES, Start, by_every_launcher, environment, promised, shape

pytestmark = [pytest.mark.long, pytest.mark.launch]
NAME = "process_control.py"


def who(report: str) -> dict[str, list[str]]:
    """The processes that said each thing."""
    found: dict[str, list[str]] = {}
    for line in report.splitlines():
        what, _, rank = line.partition(": process ")
        if rank:
            found.setdefault(what, []).append(rank)
    return {what: sorted(ranks) for what, ranks in found.items()}


@by_every_launcher
def test_each_thing_is_done_by_the_processes_it_names(start: Start, launcher: str, processes: int):
    report = start(NAME, "", launcher, processes)
    everybody = [str(rank) for rank in range(processes)]
    shares = {1: ["a b c"], 2: ["a b", "c"]}[processes]
    expected = {
        "main_process_first": everybody,
        "is_main_process": ["0"],
        "is_local_main_process": ["0"],
        "on_main_process": ["0"],
        "on_local_main_process": ["0"],
        "on_process the last": [everybody[-1]],
        "on_local_process 0": ["0"],
    }
    found = who(report)
    split = [line for line in report.splitlines() if "split_between_processes" in line]
    assert sorted(split) == [
        f"split_between_processes: process {rank} has {share}" for rank, share in enumerate(shares)
    ]
    assert {name: found[name] for name in expected} == expected
    assert report.splitlines()[0] == "main_process_first: process 0"
    assert report.count(f"print: once for all {processes}") == 1
    if processes == 2:
        assert Counter(shape(report)) == Counter(promised(NAME))


def test_on_two_hosts_each_has_a_local_main_process(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    line = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    line += ["--master_addr", "127.0.0.1", "--master_port", port]
    options = {"stdout": subprocess.PIPE, "text": True, "env": environment(tmp_path)}
    hosts = [
        subprocess.Popen([*line, "--node_rank", str(rank), str(EXAMPLES / NAME)], **options)
        for rank in range(2)
    ]
    output = [host.communicate(timeout=300)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0]
    first, second = map(who, output)
    for local in ("is_local_main_process", "on_local_main_process", "on_local_process 0"):
        assert (first[local], second[local]) == (["0"], ["1"])
    for once in ("is_main_process", "on_main_process"):
        assert first[once] == ["0"]
        assert once not in second
    assert second["on_process the last"] == ["1"]
