"""Forked runs, traced by strace: one system call of them can be made to kill or to fail.

They come from a process that has imported everything (nursery.py), so that every call can have its
turn: alone without DeepSpeed, and as two ranks of bf16 ZeRO-2. Each begins from a copy of one that
was stopped with a checkpoint, takes two steps, saves and clears the older checkpoint away.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tools.faults.harness import Site, Start
from tools.faults.outcomes import Outcome, acknowledged, curve, events, gist, unfinished
from tools.forking import SILENT, Nursery, state_of
from tools.runs import PACE, ROOT, SHAPE

BRIEF = f"{SHAPE} {PACE} --max_steps 4 --save_interval 2 --keep_last 1"
TRACED = ("write", "mkdir", "fsync", "rename", "unlink", "unlinkat", "rmdir")


def no_strace() -> str:
    """Why strace cannot be used here; empty where it can."""
    if not shutil.which("strace"):
        return "strace is not installed"
    tried = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, text=True)
    return f"strace may not trace: {tried.stderr.strip()}" if tried.returncode else ""


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
        log = out_dir.with_suffix(".log")
        stops = [since if rank in ranks else "" for rank in range(self.kind.world)]
        pids = self.nursery.fork("train_pretrain", argv, stops, log, log)
        prefix = out_dir.with_suffix(".trace")
        try:
            tracer = self._trace([pids[rank] for rank in ranks], inject, prefix) if ranks else None
            statuses, seconds = self.nursery.wait(pids)
        except BaseException:
            Start.kill(pids)
            raise
        if tracer:
            tracer.wait(SILENT)
        traces = sorted(prefix.parent.glob(f"{prefix.name}.*"))
        return Ended(statuses, log.read_text(errors="replace"), seconds, traces)

    @staticmethod
    def _trace(pids: list[int], inject: str, prefix: Path) -> subprocess.Popen[bytes]:
        for pid in pids:  # one that is attached to before it stops would miss its SIGCONT
            _wait_for(lambda pid=pid: state_of(pid) == "T", "has not stopped")
        command = ["strace", "-ff", "-y", "-ttt", "-T", "-s", "40", "-o", str(prefix)]
        command += ["-e", f"trace={','.join(TRACED)}", "-e", "signal=none"]
        command += ["-e", f"inject={inject}"] if inject else []
        for pid in pids:
            command += ["-p", str(pid)]
        tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        for pid in pids:
            status = Path(f"/proc/{pid}/status")
            _wait_for(lambda status=status: "TracerPid:\t0\n" not in status.read_text(), "is free")
            os.kill(pid, signal.SIGCONT)
        return tracer

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


def _wait_for(reached: Callable[[], bool], report: str) -> None:
    deadline = time.monotonic() + SILENT
    while not reached():
        assert time.monotonic() < deadline, f"a process {report} after {SILENT:.0f} s"
        time.sleep(0.002)
