"""kill -9 at random: along a run, in the midst of a save, and in every phase of a start."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from tools.faults.harness import Site, Start
from tools.faults.outcomes import Outcome, acknowledged, curve, events, gist, unfinished

TARGETS = ("group", "worker", "launcher", "script")
# A killed worker is a peer lost; a killed launcher is reported by whoever is left.
ALLOWED = {"group": {-9}, "script": {-9}, "worker": {7}, "launcher": {7, 70}}


def victims(start: Start, target: str, site: Site) -> list[int]:
    """The pids to kill; all of them where the target is not there yet."""
    family = start.family()
    if target != "group":
        some = sorted(pid for pid, role in family.items() if role == target)
        if some:
            return [site.draw.choice(some)]
    everyone = list(family)
    site.draw.shuffle(everyone)
    return everyone


def strike(start: Start, target: str, pids: list[int], fault: str, site: Site) -> Outcome:
    """Kill, wait until all is gone, and hold the run against what was promised."""
    start.kill(pids)
    seconds, left = start.wait_gone(site.patience)
    status = start.process.returncode
    outcome = Outcome(fault, status, seconds, left)
    if left:
        outcome.wrong.append(f"{left} processes were left after {seconds:.0f} s")
    if status not in ALLOWED[target] | {0}:
        outcome.wrong.append(f"status {status} after killing {target}: {gist(start.stderr)}")
    return outcome


def wait_for_step(start: Start, steps: int, site: Site) -> bool:
    """Whether this start has taken `steps` steps; False where it ended before."""
    limit = 10 * site.clean_start + 60
    return start.wait_until(lambda: len(curve(start.recorded())) >= steps, limit, 0.005)


def wait_for_save(start: Start, nth: int, site: Site) -> bool:
    """Whether the `nth` save of this start has begun, seen by its folder within a millisecond."""
    seen: set[str] = set()
    root = start.out_dir / "checkpoints"

    def reached() -> bool:
        try:
            names = os.listdir(root)
        except FileNotFoundError:
            return False
        seen.update(n for n in names if ".tmp-" in n and not n.endswith("retired"))
        return len(seen) >= nth

    return start.wait_until(reached, 10 * site.clean_start + 60, 0.001)


def after_steps(start: Start, target: str, site: Site) -> list[int] | None:
    """Whom to kill after 1 to 12 steps and a part of one; None where the run ended before."""
    if not wait_for_step(start, site.draw.randint(1, 12), site):
        return None
    pids = victims(start, target, site)
    time.sleep(site.draw.uniform(0, 0.06))
    return pids


def in_a_save(start: Start, target: str, site: Site) -> list[int] | None:
    """Whom to kill 0 to 5, 20 or 150 ms after the first to fourth save began."""
    if not start.wait_until(start.has_begun, 10 * site.clean_start + 60):
        return None
    pids = victims(start, target, site)
    if not wait_for_save(start, site.draw.randint(1, 4), site):
        return None
    time.sleep(site.draw.choice((0.005, 0.02, 0.15)) * site.draw.random())
    return pids


class Chain:
    """One run, killed again and again until it ends; then begun anew in another folder."""

    def __init__(self, site: Site, flags: str = "") -> None:
        self.site = site
        self.flags = flags
        self.out_dir = site.new_run("killed")
        self.promised = 0
        self.checked = 0

    def start(self) -> Start:
        return self.site.start(self.out_dir, self.flags)

    def settle(self, start: Start, outcome: Outcome) -> None:
        """Hold what `start` recorded against the promises of the starts before it."""
        began = [e for e in start.recorded() if e["event"] == "run_start"]
        for event in began:
            if event["step"] < self.promised:
                outcome.lost += 1
                outcome.wrong.append(
                    f"{self.out_dir.name}: resumed at {event['step']}, promised {self.promised}"
                )
        refused = [e for e in start.recorded() if e["event"] == "checkpoint_rejected"]
        outcome.wrong += [f"{self.out_dir.name}: rejected {e}" for e in refused]
        outcome.deviating = self.site.deviating(start.recorded())
        if outcome.deviating:
            outcome.wrong.append(f"{self.out_dir.name}: {outcome.deviating} step lines deviate")
        self.promised = acknowledged(events(self.out_dir))
        if len(unfinished(self.out_dir)) > 1:
            outcome.wrong.append(f"{self.out_dir.name}: left {unfinished(self.out_dir)}")

    def done(self, start: Start, outcome: Outcome) -> None:
        """The run has come to its end: compare all of it, and begin another."""
        outcome.wrong += self.site.check_whole(self.out_dir, start)
        self.out_dir = self.site.new_run("killed")
        self.promised = 0


def random_kills(site: Site, kills: int, in_saves: int) -> Iterator[Outcome]:
    """`kills` kills along runs, `in_saves` of them in a save that is then found unfinished."""
    chain, done, torn = Chain(site), 0, 0
    while done < kills or torn < in_saves:
        target = TARGETS[done % len(TARGETS)]
        # Saves last milliseconds: more are aimed at than hit, and only a folder left counts.
        aimed = torn < in_saves and done % 3 != 2
        start = chain.start()
        before = set(unfinished(chain.out_dir))
        pids = (in_a_save if aimed else after_steps)(start, target, site)
        if pids is None:
            start.wait_gone(site.patience)
            outcome = Outcome("ended before it was killed", start.process.returncode or 0, 0.0)
            chain.settle(start, outcome)
            chain.done(start, outcome)
            yield outcome
            continue
        outcome = strike(start, target, pids, f"SIGKILL {target}", site)
        if set(unfinished(chain.out_dir)) - before:
            torn += 1
            outcome.fault += " in a save"
        done += 1
        chain.settle(start, outcome)
        if start.process.returncode == 0:
            chain.done(start, outcome)
        yield outcome
    last = chain.start()
    last.wait_gone(10 * site.clean_start + 60)
    outcome = Outcome("the same command once more", last.process.returncode, 0.0)
    chain.settle(last, outcome)
    outcome.wrong += site.check_whole(chain.out_dir, last)
    yield outcome


def killed_starts(site: Site, times: int) -> Iterator[Outcome]:
    """Kill everything at random moments of a start; with an empty cache at every second.

    Where DeepSpeed would keep what it compiles is empty too, as on a new machine.
    """
    for number in range(times):
        fresh = number % 2 == 0
        out_dir = site.new_run("start")
        kept = site.root / f"home-{number}" if fresh else site.root
        options = {"cache": kept / "cache", "TORCH_EXTENSIONS_DIR": str(kept / "extensions")}
        start = site.start(out_dir, **options)
        moment = site.clean_start * (number + site.draw.random()) / times
        time.sleep(moment)
        name = "SIGKILL a first start" if fresh else "SIGKILL a start"
        outcome = strike(start, "group", victims(start, "group", site), name, site)
        began = time.monotonic()
        again = site.go_on(out_dir, outcome, **options)
        took = time.monotonic() - began
        if took > 5 * site.clean_start + 60:
            outcome.wrong.append(f"killed after {moment:.1f} s, the next start took {took:.0f} s")
        outcome.wrong += [f"lock left: {p}" for p in locks(kept / "extensions")]
        assert again.process.poll() is not None
        yield outcome


def locks(folder: Path) -> list[Path]:
    """Locks of torch's compiler, which every later start would wait for."""
    return list(folder.rglob("lock"))
