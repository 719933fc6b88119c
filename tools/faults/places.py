"""Disks that are full or may not be written, and one folder for two runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.faults.harness import Site, Start
from tools.faults.kills import wait_for_step
from tools.faults.outcomes import Outcome, acknowledged, curve, events, gist

NOBODY = ("--reuid=65534", "--regid=65534", "--clear-groups")
BACKENDS = {"single": "--deepspeed_config none", "deepspeed": ""}  # of one process
# Where nobody may not even run this Python: root, without the rights that make it root.
BARE = ("--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all")


@contextmanager
def small_disk(site: Site, mebibytes: int) -> Iterator[Path]:
    """A tmpfs of that size; an OSError where it cannot be mounted."""
    place = site.new_run("disk")
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(place)]
    mounted = subprocess.run(words, capture_output=True, text=True)
    if mounted.returncode:
        raise OSError(mounted.stderr.strip())
    try:
        yield place
    finally:
        site.close()  # nothing of ours may hold it
        subprocess.run(["umount", str(place)], check=True)


def reported_once(start: Start, code: str, *words: str) -> list[str]:
    """What is wrong with the report to the user: one line with that code and all the words."""
    lines = [line for line in start.stderr.splitlines() if "error[" in line]
    right = len(lines) == 1 and all(word in lines[0] for word in (f"error[{code}]", *words))
    if right and "Traceback" not in start.stderr:
        return []
    return [f"not reported by one {code} with {', '.join(words)}: {gist(start.stderr)}"]


def ended(start: Start, fault: str, status: int, site: Site, since: float) -> Outcome:
    """An outcome with the time since a moment, and wrong unless the status is right."""
    _, left = start.wait_gone(10 * site.clean_start + 60)
    outcome = Outcome(fault, start.process.returncode, time.monotonic() - since, left)
    if start.process.returncode != status:
        outcome.wrong.append(f"{start.process.returncode}, not {status}: {gist(start.stderr)}")
    return outcome


def full_disk(site: Site, free: int, fault: str) -> Iterator[Outcome]:
    """A disk that fills up along a run but for `free` bytes; then there is room again."""
    with small_disk(site, 16) as place:
        out_dir = place / "run"
        start = site.start(out_dir)
        wait_for_step(start, 7, site)
        room = os.statvfs(place)
        with open(place / "filler", "wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, max(1, room.f_bavail * room.f_frsize - free))
        since = time.monotonic()
        outcome = ended(start, fault, 5, site, since)
        outcome.wrong += reported_once(start, "E_STORAGE", str(out_dir))
        if outcome.seconds > site.patience:
            outcome.wrong.append(f"took {outcome.seconds:.0f} s to end")
        (place / "filler").unlink()
        site.go_on(out_dir, outcome)
        yield outcome


def full_of_lines(site: Site, backend: str, more: str) -> Iterator[Outcome]:
    """A disk that fills up while nothing but metrics is written; then there is room again."""
    flags = f"{BACKENDS[backend]} {more} --save_interval 1000"
    fault = f"a disk full of lines, {backend} {more}"
    with small_disk(site, 16) as place:
        out_dir = place / "run"
        start = site.start(out_dir, flags, NUM_PROCESSES="1")
        wait_for_step(start, 15, site)
        room = os.statvfs(place)
        with open(place / "filler", "wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, room.f_bavail * room.f_frsize)
        outcome = ended(start, fault, 5, site, time.monotonic())
        outcome.wrong += reported_once(start, "E_STORAGE", str(out_dir / "metrics.jsonl"))
        (place / "filler").unlink()
        again = site.finish(out_dir, flags, NUM_PROCESSES="1")
        if again.process.returncode != 0:
            outcome.wrong.append(f"then {again.process.returncode}: {gist(again.stderr)}")
        yield outcome


def no_room_from_the_start(site: Site) -> Iterator[Outcome]:
    """Room for less than a checkpoint: reported before the first step."""
    with small_disk(site, 1) as place:
        start = site.start(place / "run")
        outcome = ended(start, "a disk too small", 5, site, start.started)
        outcome.wrong += reported_once(start, "E_STORAGE", str(place / "run"))
        if steps := len(curve(start.recorded())):
            outcome.wrong.append(f"reported after {steps} steps, not before the first")
        yield outcome


def read_only(site: Site) -> Iterator[Outcome]:
    """A folder that an unprivileged user may not write to."""
    fault = "a folder without rights"
    if os.geteuid() or not shutil.which("setpriv"):
        yield Outcome(fault, "skipped: needs root and setpriv", 0.0)
        return
    place, scratch = site.new_run("locked"), site.root / "scratch"
    for folder, mode in ((site.root, 0o755), (place, 0o555), (scratch, 0o777)):
        folder.mkdir(exist_ok=True)
        folder.chmod(mode)
    prefix = ("setpriv", *NOBODY)
    probe = [*prefix, "sh", "-c", '"$0" -c ""', sys.executable]
    if subprocess.run(probe, capture_output=True).returncode:
        prefix = ("setpriv", *BARE)
    start = site.start(place / "run", prefix=prefix, TMPDIR=str(scratch), HOME=str(scratch))
    outcome = ended(start, fault, 5, site, start.started)
    outcome.wrong += reported_once(start, "E_STORAGE", str(place / "run"))
    if outcome.seconds > 1.5 * site.clean_start + 5:
        outcome.wrong.append(f"reported after {outcome.seconds:.0f} s")
    yield outcome


def two_runs(site: Site) -> Iterator[Outcome]:
    """A second run is sent away; the first is unharmed; killed, it leaves no lock."""
    out_dir = site.new_run("shared")
    first = site.start(out_dir)
    wait_for_step(first, 4, site)
    family = first.family()
    for pid in family:  # the second start takes longer than the first has to go
        os.kill(pid, signal.SIGSTOP)
    try:
        before = events(out_dir)
        second = site.start(out_dir)
        outcome = ended(second, "a second run in one out_dir", 8, site, second.started)
        outcome.wrong += reported_once(second, "E_LOCKED", "process ")
        if not any(str(pid) in second.stderr for pid in family):
            outcome.wrong.append(f"the holder is not named: {gist(second.stderr)}")
        if events(out_dir) != before:
            outcome.wrong.append("the second run wrote to metrics.jsonl")
        if outcome.seconds > 1.5 * site.clean_start + 5:
            outcome.wrong.append(f"reported after {outcome.seconds:.0f} s")
    finally:
        for pid in family:
            os.kill(pid, signal.SIGCONT)
    steps = len(curve(events(out_dir)))
    wait_for_step(first, steps + 3, site)
    yield outcome
    first.kill(first.family())
    seconds, left = first.wait_gone(site.patience)
    taken = Outcome("the lock of a killed run", first.process.returncode, seconds, left)
    site.go_on(out_dir, taken)
    assert acknowledged(events(out_dir)) == len(site.reference)
    yield taken


def places(site: Site) -> Iterator[Outcome]:
    """Everything that can be wrong with where a run writes."""
    try:
        yield from full_disk(site, 2**18, "a disk that fills up, 256 KiB free")
        yield from full_disk(site, 0, "a disk that fills up, nothing free")
        for backend in BACKENDS:
            for more in ("", "--profile", "--eval_interval 5"):
                yield from full_of_lines(site, backend, more)
        yield from no_room_from_the_start(site)
    except OSError as error:
        yield Outcome("a small disk", f"skipped: {error}", 0.0)
    yield from read_only(site)
    yield from two_runs(site)
