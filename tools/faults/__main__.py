"""Break runs in every way a machine can, and print what came of it: make faults.

Real processes and real signals, about an hour on two cores. Status 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.faults.damages import damages
from tools.faults.folders import folders
from tools.faults.harness import Site
from tools.faults.kills import killed_starts, random_kills
from tools.faults.mirrors import mirrors
from tools.faults.outcomes import Outcome, report
from tools.faults.peers import peers
from tools.faults.places import places
from tools.faults.preemptions import preemptions
from tools.faults.reads import live_reads
from tools.faults.syscalls import injected
from tools.faults.templates import templates

Part = Callable[[Site, argparse.Namespace], Iterator[Outcome]]
PARTS: dict[str, Part] = {
    "kills": lambda site, args: random_kills(site, args.kills, args.kills * 3 // 10),
    "starts": lambda site, args: killed_starts(site, args.starts),
    "calls": lambda site, args: injected(site),
    "places": lambda site, args: places(site),
    "peers": lambda site, args: peers(site),
    "damages": lambda site, args: damages(site, args.damages),
    "reads": lambda site, args: live_reads(site, args.reads),
    "templates": lambda site, args: templates(site),
    "signals": lambda site, args: preemptions(site, args.signals),
    "mirror": lambda site, args: mirrors(site.root / "mirror"),
    "folders": lambda site, args: folders(site.root / "folders"),
}


WITHOUT_RUNS = {"mirror", "folders"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all of them by default")
    parser.add_argument("--kills", type=int, default=100, help="SIGKILLs along runs")
    parser.add_argument("--starts", type=int, default=10, help="SIGKILLs during starts")
    parser.add_argument("--damages", type=int, default=10, help="checkpoints damaged")
    parser.add_argument("--signals", type=int, default=2, help="times each signal to each process")
    parser.add_argument("--reads", type=int, default=200, help="readings of a run that goes on")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # with the table so far
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="minimind-faults-") as name:
        site = Site(Path(name), args.seed)
        try:
            if not args.parts or not {*args.parts} <= WITHOUT_RUNS:
                site.measure()
                print(f"a clean start takes {site.clean_start:.1f} s; seed {args.seed}", flush=True)
            for part in args.parts or PARTS:
                for outcome in PARTS[part](site, args):
                    outcomes.append(outcome)
                    reported = "; ".join(outcome.wrong) or "as it should"
                    print(f"{time.strftime('%T')} {outcome.fault}: {reported}", flush=True)
        finally:
            site.close()
            wrong = report(outcomes)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
