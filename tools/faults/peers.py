"""Ranks and launchers that die or hang: who is named, how soon, and that no process is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

from tools.faults.harness import Site, Start
from tools.faults.kills import wait_for_step
from tools.faults.outcomes import Outcome, gist

TIMEOUT = 10  # --dist_timeout of these runs


def worker_of(start: Start, rank: int) -> int:
    """The pid of a rank."""
    word = f"\0RANK={rank}\0".encode()
    for pid in start.alive("worker"):
        if word in b"\0" + Path(f"/proc/{pid}/environ").read_bytes() + b"\0":
            return pid
    raise AssertionError(f"no rank {rank} among {start.family()}")


def lost_rank(site: Site, number: signal.Signals, rank: int) -> Iterator[Outcome]:
    """A rank that is killed or stopped: status 7, its rank named in the first line, all gone."""
    out_dir = site.new_run("peer")
    start = site.start(out_dir, f"--dist_timeout {TIMEOUT}")
    wait_for_step(start, 5, site)
    os.kill(worker_of(start, rank), number)
    limit = site.patience + (TIMEOUT if number == signal.SIGSTOP else 0)
    seconds, left = start.wait_gone(limit + 15)
    outcome = Outcome(f"{number.name} rank {rank}", start.process.returncode, seconds, left)
    if seconds > limit:
        outcome.wrong.append(f"took {seconds:.0f} s to end, not {limit:.0f}")
    if left:
        outcome.wrong.append(f"{left} processes were left")
    if start.process.returncode != 7:
        outcome.wrong.append(f"status {start.process.returncode}, not 7")
    lines = [line for line in start.stderr.splitlines() if not line.endswith(" ...")]
    first = next(filter(str.strip, lines), "")
    if "error[E_PEER]" not in first or f"rank {rank}" not in first:
        outcome.wrong.append(f"rank {rank} is not named first: {gist(start.stderr)}")
    site.go_on(out_dir, outcome)
    yield outcome


def lost_launcher(site: Site, role: str) -> Iterator[Outcome]:
    """A launcher or a script that is killed: no worker is left, and whoever is left reports it."""
    out_dir = site.new_run("launcher")
    start = site.start(out_dir)
    wait_for_step(start, 5, site)
    start.kill(start.alive(role))
    seconds, left = start.wait_gone(site.patience)
    outcome = Outcome(f"SIGKILL {role}", start.process.returncode, seconds, left)
    if left:
        outcome.wrong.append(f"{left} processes were left after {seconds:.0f} s")
    output = start.stderr
    if role == "launcher" and ("again" not in output or "line " in output or "Traceback" in output):
        outcome.wrong.append(f"the message to the user: {gist(start.stderr)}")
    site.go_on(out_dir, outcome)
    yield outcome


def peers(site: Site) -> Iterator[Outcome]:
    """Each rank killed and stopped, the launcher and the script killed."""
    for rank in (0, 1):
        for number in (signal.SIGKILL, signal.SIGSTOP):
            yield from lost_rank(site, number, rank)
    for role in ("launcher", "script"):
        yield from lost_launcher(site, role)
