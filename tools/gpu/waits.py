"""How often a step waits for the device, and the tests that are marked `gpu`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from tools.gpu.findings import Finding, check, figure, skipped
from tools.gpu.resume import alone
from tools.gpu.site import Site
from tools.runs import ROOT

WAITS = " (waits)"
ALLOWED = {"stage 0, float32": 1}  # where DeepSpeed does not look at the norm, we do


def waits(site: Site) -> Iterator[Finding]:
    """Reads of the host and waits for the device in a step, by whose code they are in."""
    out = site.folder / "reads.json"
    site.python("tools.host_reads", str(out), site.device, **alone(site))
    for case, reads in json.loads(out.read_text()).items():
        ours, deepspeeds = by_owner(reads)
        limit = ALLOWED.get(case, 0)
        text = f"{sum(deepspeeds.values()):g} of DeepSpeed, {sum(ours.values()):g} of ours"
        is_right = sum(ours.values()) <= limit
        yield check(f"{case}, a step", is_right, text, f"{limit} of ours", reads)
        for place, count in ours.items():
            yield figure(f"{case}: {place}", count, f"{count:g}")


def by_owner(reads: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """(those of ours and of Accelerate, those of DeepSpeed) by place.

    On a GPU, CUDA reports a read that waits once more.
    """
    found: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for name, count in reads.items():
        place = name.removesuffix(WAITS)
        owned = found[place.startswith("deepspeed")]
        owned[place] = max(owned.get(place, 0), count)
    return found


def marked(site: Site) -> Iterator[Finding]:
    """The tests of the suite that are marked `gpu`."""
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    output = site.python("pytest", "-m", "gpu", "-p", "no:cacheprovider", *files)
    counts = dict(re.findall(r"(\d+) (passed|skipped)", output))
    passed = sum(int(number) for number, what in counts.items() if what == "passed")
    if site.device == "cpu" and not passed:
        yield skipped("pytest -m gpu", f"needs a GPU ({', '.join(files)})")
        return
    yield check("pytest -m gpu", passed > 0, output.strip().splitlines()[-1], "all pass", passed)
