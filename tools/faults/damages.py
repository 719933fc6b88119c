"""Damage done to real checkpoints between two starts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from minimind.runtime.durable_files import sha256_of
from tools.faults.harness import Site
from tools.faults.outcomes import Outcome, curve, events, gist
from tools.faults.places import reported_once

KEPT = "--keep_last 3"


def flip(path: Path, site: Site) -> None:
    content = bytearray(path.read_bytes())
    content[site.draw.randrange(len(content))] ^= 1 << site.draw.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, site: Site) -> None:
    path.write_bytes(path.read_bytes()[: site.draw.randrange(path.stat().st_size)])


def remove(path: Path, site: Site) -> None:
    path.unlink()


DAMAGES = (flip, truncate, remove)


def stopped_run(site: Site) -> Path:
    """A run stopped at step 9, with checkpoints of steps 3, 6 and 9."""
    out_dir = site.new_run("stopped")
    start = site.finish(out_dir, f"{KEPT} --stop_at_step 9")
    assert start.process.returncode == 75, start.stderr
    return out_dir


def checkpoint(out_dir: Path, step: int) -> Path:
    return out_dir / "checkpoints" / f"step_{step:08d}"


def contents(folder: Path) -> dict[str, str]:
    """The hash of every file under a folder."""
    found = [p for p in folder.rglob("*") if p.is_file()]
    return {str(p.relative_to(folder)): sha256_of(p) for p in found}


def damaged(site: Site, whole: Path, number: int) -> Outcome:
    """The newest checkpoint damaged in one file: the one before is taken, and it is said why."""
    out_dir = site.new_run("damaged")
    shutil.copytree(whole, out_dir)
    files = sorted(checkpoint(out_dir, 9).iterdir())
    victim = files[number % len(files)]
    damage = DAMAGES[number % len(DAMAGES)]
    damage(victim, site)
    before = len(events(out_dir))
    again = site.finish(out_dir, KEPT)
    outcome = Outcome(f"{damage.__name__} a file", again.process.returncode, 0.0)
    where = f"{damage.__name__} {victim.name}"
    starts = [e["step"] for e in events(out_dir)[before:] if e["event"] == "run_start"]
    if starts != [6]:
        outcome.wrong.append(f"{where}: resumed at {starts}, not at 6: {gist(again.stderr)}")
    refused = [e for e in events(out_dir)[before:] if e["event"] == "checkpoint_rejected"]
    named = [(Path(e["path"]).name, e["file"]) for e in refused]
    if named != [("step_00000009", victim.name)]:
        outcome.wrong.append(f"{where}: checkpoint_rejected holds {refused}")
    text = [line for line in again.stdout.splitlines() if "skipped checkpoint" in line]
    if len(text) != 1 or victim.name not in text[0]:
        outcome.wrong.append(f"{where}: the terminal says {text}")
    outcome.deviating = site.deviating(again.recorded())
    outcome.wrong += site.check_whole(out_dir, again)
    return outcome


def nothing_usable(site: Site, whole: Path) -> Iterator[Outcome]:
    """All checkpoints damaged, or gone: status 4, and nothing is written over."""
    out_dir = site.new_run("all-damaged")
    shutil.copytree(whole, out_dir)
    for step in (3, 6, 9):
        flip(checkpoint(out_dir, step) / "shard-0-of-2.safetensors", site)
    yield refused(site, out_dir, "all checkpoints damaged", "step_00000003", "step_00000009")
    shutil.rmtree(out_dir / "checkpoints")
    (out_dir / "checkpoints").mkdir()
    outcome = refused(site, out_dir, "all checkpoints gone", "9")
    yield outcome
    afresh = site.finish(out_dir, "--resume none")
    again = Outcome("gone, and --resume none", afresh.process.returncode, 0.0)
    again.deviating = site.deviating(afresh.recorded())
    if afresh.process.returncode or len(curve(afresh.recorded())) != len(site.reference):
        again.wrong.append(f"does not begin anew: {gist(afresh.stderr)}")
    yield again


def refused(site: Site, out_dir: Path, fault: str, *words: str) -> Outcome:
    """A start that must end with status 4 and leave every checkpoint as it was."""
    before = contents(out_dir / "checkpoints")
    start = site.finish(out_dir, KEPT)
    outcome = Outcome(fault, start.process.returncode, 0.0)
    if start.process.returncode != 4:
        outcome.wrong.append(f"status {start.process.returncode}, not 4")
    outcome.wrong += reported_once(start, "E_CHECKPOINT", *words)
    if contents(out_dir / "checkpoints") != before:
        outcome.wrong.append("something was written over")
    if curve(start.recorded()):
        outcome.wrong.append("trained all the same")
    return outcome


def damages(site: Site, times: int) -> Iterator[Outcome]:
    """`times` damages to files in turn, each kind in turn; then to all checkpoints."""
    whole = stopped_run(site)
    for number in range(times):
        yield damaged(site, whole, number)
    yield from nothing_usable(site, whole)
