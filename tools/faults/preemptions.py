"""TERM and USR1 to anybody at any moment: saved, status 75, not one step lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

from tools.faults.harness import Site, Start
from tools.faults.kills import Chain, wait_for_step
from tools.faults.outcomes import Outcome, acknowledged, curve, events, gist

SENT = (signal.SIGTERM, signal.SIGUSR1)
TO = ("script", "launcher", "worker")


def send(start: Start, role: str, number: signal.Signals, site: Site) -> bool:
    """Whether there was somebody to send it to; at one time in four it is sent twice."""
    there = start.alive(role)
    if not there:
        return False
    pid = site.draw.choice(there)
    for _ in range(site.draw.choice((1, 1, 1, 2))):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            break
        time.sleep(site.draw.uniform(0, 0.1))
    return True


def stop(site: Site, chain: Chain, role: str, number: signal.Signals, early: bool) -> Outcome:
    """Ask one start to stop: while it starts, or after 1 to 12 steps and a part of one."""
    start = chain.start()
    phase = "starting" if early else "training"
    outcome = Outcome(f"{number.name} to {role}, {phase}", 0, 0.0)
    if early:
        time.sleep(site.clean_start * site.draw.random())
        while not send(start, role, number, site) and start.process.poll() is None:
            time.sleep(0.01)  # not there yet
    else:
        wait_for_step(start, site.draw.randint(1, 12), site)
        time.sleep(site.draw.uniform(0, 0.06))
        send(start, role, number, site)
    outcome.seconds, outcome.left = start.wait_gone(2 * site.patience)
    outcome.status = start.process.returncode
    if outcome.left:
        outcome.wrong.append(f"{outcome.left} were left after {outcome.seconds:.0f} s")
    if outcome.status not in (75, 0):
        outcome.wrong.append(f"status {outcome.status}, not 75: {gist(start.stderr)}")
    if "Traceback" in start.stderr:
        outcome.wrong.append(f"a traceback: {gist(start.stderr)}")
    chain.settle(start, outcome)
    steps = curve(events(chain.out_dir))
    last = int(steps[-1][0]) if steps else 0
    if (kept := acknowledged(events(chain.out_dir))) != last:
        outcome.wrong.append(f"stopped at step {last}, saved at {kept}")
    if outcome.status == 0:
        chain.done(start, outcome)
    return outcome


def preemptions(site: Site, times: int) -> Iterator[Outcome]:
    """Each signal to each process `times` times along runs, and as often while they start."""
    chain = Chain(site)
    for _ in range(times):
        for early in (False, True):
            for role in TO:
                for number in SENT:
                    yield stop(site, chain, role, number, early)
    outcome = Outcome("stopped again and again, to the end", 0, 0.0)
    site.go_on(chain.out_dir, outcome)
    yield outcome
