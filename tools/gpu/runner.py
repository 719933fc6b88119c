"""Runs the parts one after another, each within its time, and writes the results after each."""

from __future__ import annotations

import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from minimind.config.flags import ALONE
from tools.gpu import report
from tools.gpu.findings import Finding, PartError, Result, skipped
from tools.gpu.site import Site

NO_TIME = "not run: no time left"
# Of all the time: what the parts after a part keep of it, however long that one takes.
KEPT = 0.5


@dataclass(frozen=True)
class Part:
    """What is run, and the weight by which it has a share of the time that is kept."""

    find: Callable[[Site], Iterator[Finding]]
    weight: float
    not_alone: str = ""  # why a device without DeepSpeed and other ranks has nothing to show
    is_for_cuda: bool = False  # and for a CPU, which tries it

    def nothing_on(self, device: str) -> str:
        """Why it has nothing to show on a type of device; empty if it has."""
        if self.is_for_cuda and device not in ("cuda", "cpu"):
            return "it is for CUDA"
        return self.not_alone if device in ALONE else ""

    @property
    def about(self) -> str:
        """One line for the page."""
        return (self.find.__doc__ or "").splitlines()[0]


@dataclass(frozen=True)
class Plan:
    """What the command was asked for."""

    parts: Mapping[str, Part]
    device: str
    out: Path
    minutes: float
    gpus: int = 0


def run_parts(plan: Plan) -> list[Result]:
    """How every part ended; printed and written as they end."""
    started = time.monotonic()
    over = started + 60 * plan.minutes
    plan.out.mkdir(parents=True, exist_ok=True)
    runs = Path(tempfile.mkdtemp(prefix="runs-", dir=plan.out))
    shared = runs / "shared"
    shared.mkdir()
    machine = report.machine(plan.device)
    results: list[Result] = []
    later = total = sum(part.weight for part in plan.parts.values())
    for name, part in plan.parts.items():
        now = time.monotonic()
        later -= part.weight
        seconds = over - now - KEPT * 60 * plan.minutes * later / total
        result = Result(name, part.about)
        results.append(result)
        if reason := part.nothing_on(plan.device):
            result.status, result.findings = "passed", [skipped(name, reason)]
        elif seconds <= 0:
            result.status, result.error = "not run", NO_TIME
        else:
            print(f"{name}: {part.about} Up to {seconds:.0f} s.", flush=True)
            site = Site(plan.device, runs / name, shared, now + seconds, plan.gpus)
            site.folder.mkdir()
            run_part(part, site, result)
            if result.has_passed:
                shutil.rmtree(site.folder, ignore_errors=True)
            result.seconds = time.monotonic() - now
        print(report.block(result), flush=True)
        report.write(plan.out, [*plan.parts], machine, results, time.monotonic() - started)
    if all(result.has_passed for result in results):
        shutil.rmtree(runs, ignore_errors=True)
    else:
        print(f"the runs and logs of what failed are in {runs}")
    return results


def run_part(part: Part, site: Site, result: Result) -> None:
    """Let a part find what it finds; whatever it raises is its own failure alone."""
    try:
        for finding in part.find(site):
            result.findings.append(finding)
    except (Exception, SystemExit) as error:  # the one place: reported, and the next part begins
        result.error = f"{type(error).__name__}: {error}"
        result.log = error.log if isinstance(error, PartError) else traceback.format_exc()
    wrong = [finding for finding in result.findings if finding.is_right is False]
    if not result.findings and not result.error:
        result.error = "found nothing"
    result.status = "failed" if wrong or result.error else "passed"
