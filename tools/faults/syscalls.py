"""kill -9 and I/O errors at every system call of a save, by strace's fault injection."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minimind.checkpoint.retention import VALIDATION
from tools.faults.forked import ALONE, PAIR, TRACED, Bench, Kind, no_strace
from tools.faults.harness import Site
from tools.faults.outcomes import Outcome, events, gist
from tools.forking import Nursery

KILLED_AT = tuple(call for call in TRACED if call != "write")
FAILING = (("fsync", "EIO"), ("rename", "EDQUOT"), ("write", "ENOSPC"))


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
        # The others end with the status of a lost peer, or are ended as by a launcher.
        others = {status for other, status in enumerate(ended.statuses) if other != rank or not hit}
        outcome = Outcome(fault, " ".join(map(str, ended.statuses)), ended.seconds)
        if others - ({7, -signal.SIGTERM} if hit else {0}):
            outcome.wrong.append(f"{call} {number}: {ended.statuses}: {gist(ended.log)}")
        bench.check(out_dir, outcome)
        bench.clear(out_dir)
        if hit or outcome.wrong:
            yield outcome
        if not hit:
            return
    raise AssertionError(f"{call}: no end of it")


def fail_at_each(bench: Bench, call: str, error: str, since: str) -> Iterator[Outcome]:
    """The same with an error in place of the signal: status 5, the path named, nothing lost."""
    for number in range(1, 500):
        out_dir = bench.copy()
        before = len(events(out_dir))
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
        where = f"{call} {number} ({hit[0].split(' ', 1)[1]})"
        recorded = events(out_dir)[before:]
        outcome.wrong += _wrong_ending(ended, hit, out_dir, where)
        if call != "write" and ended.statuses[0] == 5:
            is_reported = any(e["event"] == "checkpoint_saved" for e in recorded)
            # Only validation.json is written into a published checkpoint, which lasts without it.
            lasts = re.search(r"/step_\d{8}[/>]", hit[0]) is not None
            if is_reported and not lasts:
                outcome.wrong.append(f"{where}: a checkpoint was acknowledged that may not last")
            if lasts and not is_reported:
                outcome.wrong.append(f"{where}: a checkpoint that lasts was not reported")
        bench.check(out_dir, outcome)
        bench.clear(out_dir)
        yield outcome


def _wrong_ending(ended: Any, hit: list[str], out_dir: Path, where: str) -> list[str]:
    """What is wrong with how a start ended after the injected errors `hit`."""
    wrong = [f"{where}: {ended.statuses}: {gist(ended.log)}"]
    if "tmp-retired" in hit[0] or f"step_{2:08d}" in hit[0]:
        # The new checkpoint lasts, and only clearing away the old one failed: the end of the run
        # tries again, and warns if it is still there.
        is_left = (out_dir / "checkpoints" / f"step_{2:08d}").exists()
        is_told = not is_left or "could not be deleted" in ended.log
        return wrong if {*ended.statuses} != {0} or not is_told else []
    if "/report.html" in hit[0]:
        # Training is done and saved; one line names the report that is missing.
        no_report = f"no report: {out_dir}"
        return wrong if {*ended.statuses} != {0} or no_report not in ended.log else []
    # strace counts per thread, so that a thread that serves the other ranks may have been hit too;
    # they then do not receive rank 0's error.
    deaf = {7} if any("<socket:" in line for line in hit) else set()
    if ended.statuses[0] != 5 or {*ended.statuses[1:]} - {5} - deaf:
        return wrong
    errors = [line for line in ended.log.splitlines() if "error[" in line]
    errors = [line for line in errors if not (deaf and "error[E_PEER] rank=1" in line)]
    if len(errors) != 1 or str(out_dir) not in errors[0] or "Traceback" in ended.log:
        return [f"{where}: not one line with a path: {gist(ended.log)}"]
    return []


STAMPED = re.compile(r"(\d+\.\d+) (\w+)\((.*)\)\s+= (-?\d+).* <(\d+\.\d+)>$")


def in_order(bench: Bench) -> Outcome:
    """A whole save by strace: all is on the disk before it has its name and is acknowledged."""
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

    def span(name: str, words: str) -> tuple[float, float]:
        found = [c for c in calls if c[2] == name and words in c[3]]
        assert found, f"no {name} of {words}"
        return found[0][0], found[-1][1]

    published = span("rename", f'"{final}"')
    parent = after(calls, "fsync", f"{final.parent}>", published[1])
    acknowledged = span("write", '\\"checkpoint_saved\\"')
    retired = span("rename", "step_00000002.tmp-")
    saved = [path for path in final.iterdir() if path.name != VALIDATION]  # written later
    for path in [*saved, None]:
        name = f"{final}.tmp-[^/]*" + (f"/{re.escape(path.name)}" if path else "")
        synced = [c for c in calls if c[2] == "fsync" and re.search(f"<{name}>", c[3])]
        if not any(c[1] <= published[0] for c in synced):
            outcome.wrong.append(f"{path or 'its directory'} was not synced before the rename")
    if not parent <= acknowledged[0]:
        outcome.wrong.append("checkpoint_saved was written before the directory was synced")
    if not parent <= retired[0]:
        outcome.wrong.append("the older checkpoint was cleared before the new one was durable")
    bench.clear(out_dir)
    return outcome


def after(
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
