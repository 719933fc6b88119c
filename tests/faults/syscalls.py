"""kill -9 and I/O errors at every system call of a save, by strace's fault injection.

Runs are forked from a process that has imported everything (nursery.py), so that every call can
have its turn: alone without DeepSpeed, and as two ranks of bf16 ZeRO-2. Each begins from a copy of
one that was stopped with a checkpoint, takes two steps, saves and clears the older checkpoint away.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.conftest import PACE, ROOT, SHAPE
from tests.faults.harness import Outcome, Site, Start, acknowledged, curve, events, gist, unfinished

BRIEF = f"{SHAPE} {PACE} --max_steps 4 --save_interval 2 --keep_last 1"
KILLED_AT = ("mkdir", "fsync", "rename", "unlink", "unlinkat", "rmdir")
FAILING = (("fsync", "EIO"), ("rename", "EDQUOT"), ("write", "ENOSPC"))
SILENT = 180.0  # seconds after which a forked run counts as stuck


def no_strace() -> str:
    """Why strace cannot be used here; empty where it can."""
    if not shutil.which("strace"):
        return "strace is not installed"
    tried = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, text=True)
    return f"strace may not trace: {tried.stderr.strip()}" if tried.returncode else ""


class Nursery:
    """The process that runs are forked from."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.nursery"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **question: Any) -> int:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin
        assert stdout
        stdin.write(json.dumps(question) + "\n")
        stdin.flush()
        return int(stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass(frozen=True)
class Kind:
    """How a run is trained, and on how many ranks."""

    name: str
    world: int
    flags: str


ALONE = Kind("one process", 1, "--deepspeed_config none")
PAIR = Kind("2 x ZeRO-2", 2, f"--deepspeed_config {ROOT / 'configs/ds_config.json'}")


@dataclass
class Ended:
    """How the ranks of a forked run ended, and what they printed."""

    statuses: list[int]
    log: str
    seconds: float  # from the first rank's end to the last's
    traces: list[Path]


class Bench:
    """Forked runs of one kind, and what they have to repeat."""

    def __init__(self, site: Site, nursery: Nursery, kind: Kind) -> None:
        self.site = site
        self.nursery = nursery
        self.kind = kind

    @cached_property
    def reference(self) -> list[tuple[str, ...]]:
        out_dir = self.site.new_run("forked")
        ended = self.run(out_dir)
        assert set(ended.statuses) == {0}, ended.log
        return curve(events(out_dir))

    @cached_property
    def stopped(self) -> Path:
        """A run that was stopped at step 2, to be copied."""
        out_dir = self.site.new_run("stopped")
        ended = self.run(out_dir, "--stop_at_step 2")
        assert set(ended.statuses) == {75}, ended.log
        return out_dir

    def copy(self) -> Path:
        out_dir = self.site.new_run("injected")
        shutil.copytree(self.stopped, out_dir)
        return out_dir

    def run(
        self,
        out_dir: Path,
        flags: str = "",
        inject: str = "",
        ranks: tuple[int, ...] = (),
        since: str = "training",
    ) -> Ended:
        """Train to the end; the `ranks` named are traced `since` then, and suffer `inject`."""
        argv = [*self.site.places(out_dir), *f"{BRIEF} {self.kind.flags} {flags}".split()]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        log = out_dir.with_suffix(".log")
        pids = []
        for rank in range(self.kind.world):
            environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank)}
            environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.kind.world)}
            environ = {} if self.kind.world == 1 else environ
            stop = since if rank in ranks else ""
            pids.append(self.nursery.ask(argv=argv, environ=environ, log=str(log), stop=stop))
        prefix = out_dir.with_suffix(".trace")
        try:
            tracer = self._trace([pids[rank] for rank in ranks], inject, prefix) if ranks else None
            statuses, seconds = self._wait(pids)
        except BaseException:
            Start.kill(pids)
            raise
        if tracer:
            tracer.wait(SILENT)
        traces = sorted(prefix.parent.glob(f"{prefix.name}.*"))
        return Ended(statuses, log.read_text(errors="replace"), seconds, traces)

    @staticmethod
    def _trace(pids: list[int], inject: str, prefix: Path) -> subprocess.Popen[bytes]:
        wanted = f"write,{','.join(KILLED_AT)}"
        for pid in pids:  # one that is attached to before it stops would miss its SIGCONT
            _wait_for(lambda pid=pid: _state(pid) == "T", "has not stopped")
        command = ["strace", "-ff", "-y", "-ttt", "-T", "-s", "40", "-o", str(prefix)]
        command += ["-e", f"trace={wanted}", "-e", "signal=none"]
        command += ["-e", f"inject={inject}"] if inject else []
        for pid in pids:
            command += ["-p", str(pid)]
        tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        for pid in pids:
            status = Path(f"/proc/{pid}/status")
            _wait_for(lambda status=status: "TracerPid:\t0\n" not in status.read_text(), "is free")
            os.kill(pid, signal.SIGCONT)
        return tracer

    def _wait(self, pids: list[int]) -> tuple[list[int], float]:
        """Exit statuses, and seconds between the first end and the last.

        Like a launcher, tells the others to stop when one has failed.
        """
        statuses: dict[int, int] = {}
        began, first = time.monotonic(), 0.0
        while len(statuses) < len(pids):
            for pid in pids:
                if pid in statuses or not _is_over(pid):
                    continue
                statuses[pid] = self.nursery.ask(wait=pid)
                first = first or time.monotonic()
                for other in set(pids) - set(statuses) if statuses[pid] not in (0, 75) else ():
                    os.kill(other, signal.SIGTERM)
            if time.monotonic() - (first or began) > SILENT:
                raise TimeoutError(f"stuck; ended were {statuses} of {pids}")
            time.sleep(0.01)
        return [statuses[pid] for pid in pids], time.monotonic() - first

    def check(self, out_dir: Path, outcome: Outcome) -> None:
        """Start again without a fault: it must go on where it had promised, and repeat."""
        promised = acknowledged(events(out_dir))
        before = len(events(out_dir))
        ended = self.run(out_dir)
        if set(ended.statuses) != {0}:
            outcome.wrong.append(f"{out_dir.name}: next start {ended.statuses}: {gist(ended.log)}")
            return
        starts = [e["step"] for e in events(out_dir)[before:] if e["event"] == "run_start"]
        if starts[0] < promised:
            outcome.lost += 1
            outcome.wrong.append(f"{out_dir.name}: promised {promised}, found {starts[0]}")
        found = curve(events(out_dir))
        outcome.deviating = sum(line not in self.reference for line in found)
        if outcome.deviating or {line[0] for line in found} != {r[0] for r in self.reference}:
            outcome.wrong.append(f"{out_dir.name}: another curve: {found}")
        refused = [e for e in events(out_dir) if e["event"] == "checkpoint_rejected"]
        outcome.wrong += [f"{out_dir.name}: rejected {e}" for e in refused]
        if left := unfinished(out_dir):
            outcome.wrong.append(f"{out_dir.name}: left {left}")

    def clear(self, out_dir: Path) -> None:
        for path in [*out_dir.parent.glob(f"{out_dir.name}.*"), out_dir]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _state(pid: int) -> str:
    """The letter by which /proc tells what a process is doing."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _is_over(pid: int) -> bool:
    """Whether a process is dead; its parent, the nursery, has not asked for its status yet."""
    return _state(pid) in "ZX"


def _wait_for(reached: Callable[[], bool], told: str) -> None:
    deadline = time.monotonic() + SILENT
    while not reached():
        assert time.monotonic() < deadline, f"a process {told} after {SILENT:.0f} s"
        time.sleep(0.002)


def kill_at_each(bench: Bench, call: str, rank: int, since: str) -> Iterator[Outcome]:
    """SIGKILL at the first, second, ... `call` of a rank, until a run gets past all of them.

    strace counts for each thread alone: traced since it starts, the main thread's calls come first,
    and only those beyond their number are a save's; traced since training, all are a save's.
    """
    fault = f"SIGKILL at each {call} since {since}, {bench.kind.name}"
    fault += f", rank {rank}" if bench.kind.world > 1 else ""
    for number in range(1, 500):
        out_dir = bench.copy()
        inject = f"{call}:signal=SIGKILL:when={number}"
        ended = bench.run(out_dir, inject=inject, ranks=(rank,), since=since)
        hit = ended.statuses[rank] == -signal.SIGKILL
        # The others are told of a peer that is lost, or are ended as by a launcher.
        told = {status for other, status in enumerate(ended.statuses) if other != rank or not hit}
        outcome = Outcome(fault, " ".join(map(str, ended.statuses)), ended.seconds)
        if told - ({7, -signal.SIGTERM} if hit else {0}):
            outcome.wrong.append(f"{call} {number}: {ended.statuses}: {gist(ended.log)}")
        bench.check(out_dir, outcome)
        bench.clear(out_dir)
        if not hit:
            return
        yield outcome
    raise AssertionError(f"{call}: no end of it")


def fail_at_each(bench: Bench, call: str, error: str, since: str) -> Iterator[Outcome]:
    """The same with an error in place of the signal: status 5, the path named, nothing lost."""
    for number in range(1, 500):
        out_dir = bench.copy()
        inject = f"{call}:error={error}:when={number}"
        ended = bench.run(out_dir, inject=inject, ranks=(0,), since=since)
        lines = [line for trace in ended.traces for line in trace.read_text().splitlines()]
        hit = [line for line in lines if "(INJECTED)" in line]
        if not hit:
            bench.clear(out_dir)
            assert set(ended.statuses) == {0}, ended.log
            return
        if f"{out_dir}/" not in hit[0]:  # what is printed is no storage
            bench.clear(out_dir)
            continue
        fault = f"{error} of each {call} since {since}, {bench.kind.name}"
        outcome = Outcome(fault, ended.statuses[0], ended.seconds)
        told = [line for line in ended.log.splitlines() if "error[" in line]
        where = f"{call} {number} ({hit[0].split(' ', 1)[1]})"
        if "tmp-retired" in hit[0] or f"step_{2:08d}" in hit[0]:
            # The new checkpoint lasts, and only clearing away the old one failed: a warning.
            if set(ended.statuses) != {0} or "could not be deleted" not in ended.log:
                outcome.wrong.append(f"{where}: {ended.statuses}: {gist(ended.log)}")
        elif set(ended.statuses) != {5}:
            outcome.wrong.append(f"{where}: {ended.statuses}: {gist(ended.log)}")
        elif len(told) != 1 or str(out_dir) not in told[0] or "Traceback" in ended.log:
            outcome.wrong.append(f"{where}: not one line with a path: {gist(ended.log)}")
        bench.check(out_dir, outcome)
        bench.clear(out_dir)
        yield outcome


STAMPED = re.compile(r"(\d+\.\d+) (\w+)\((.*)\)\s+= (-?\d+).* <(\d+\.\d+)>$")


def in_order(bench: Bench) -> Outcome:
    """What a whole save did, by strace: all is on the disk before it has its name and is told."""
    out_dir = bench.copy()
    ended = bench.run(out_dir, ranks=tuple(range(bench.kind.world)))
    outcome = Outcome(f"order of a save, {bench.kind.name}", ended.statuses[0], 0.0)
    calls = []
    for trace in ended.traces:
        for line in trace.read_text().splitlines():
            if found := STAMPED.match(line):
                began, name, words, result, took = found.groups()
                if result != "-1":
                    calls.append((float(began), float(began) + float(took), name, words))
    calls.sort()
    final = next(out_dir.glob("checkpoints/step_00000004"))

    def only(name: str, words: str) -> tuple[float, float]:
        found = [c for c in calls if c[2] == name and words in c[3]]
        assert found, f"no {name} of {words}"
        return found[0][0], found[-1][1]

    published = only("rename", f'"{final}"')
    parent = only_after(calls, "fsync", f"{final.parent}>", published[1])
    told = only("write", '\\"checkpoint_saved\\"')
    retired = only("rename", "step_00000002.tmp-")
    for path in [*final.iterdir(), None]:
        name = f"{final}.tmp-[^/]*" + (f"/{re.escape(path.name)}" if path else "")
        synced = [c for c in calls if c[2] == "fsync" and re.search(f"<{name}>", c[3])]
        if not any(c[1] <= published[0] for c in synced):
            outcome.wrong.append(f"{path or 'its directory'} was not synced before the rename")
    if not parent <= told[0]:
        outcome.wrong.append("checkpoint_saved was told before the directory was synced")
    if not parent <= retired[0]:
        outcome.wrong.append("the older checkpoint was cleared before the new one was durable")
    bench.clear(out_dir)
    return outcome


def only_after(
    calls: list[tuple[float, float, str, str]], name: str, words: str, moment: float
) -> float:
    """When the first such call after `moment` had returned; infinity for never."""
    return min(
        (c[1] for c in calls if c[2] == name and words in c[3] and c[0] >= moment),
        default=float("inf"),
    )


def injected(site: Site, kinds: tuple[Kind, ...] = (ALONE, PAIR)) -> Iterator[Outcome]:
    """Every rename, fsync, unlink and mkdir of a start with one save, on every rank."""
    if reason := no_strace():
        yield Outcome("system calls", f"skipped: {reason}", 0.0)
        return
    nursery = Nursery()
    try:
        for kind in kinds:
            bench = Bench(site, nursery, kind)
            yield in_order(bench)
            for rank in range(kind.world):
                for call in KILLED_AT:
                    yield from kill_at_each(bench, call, rank, "training")
            for call in KILLED_AT if kind is ALONE else ():  # beside others a start runs compilers
                yield from kill_at_each(bench, call, 0, "start")
            for call, error in FAILING:
                for since in ("training", "start") if kind is ALONE else ("training",):
                    yield from fail_at_each(bench, call, error, since)
    finally:
        nursery.close()
