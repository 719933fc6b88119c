"""Updates under ZeRO by flat partitions against DeepSpeed's own: the same losses, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tools.gpu.findings import Finding, at_most, check
from tools.gpu.losses import difference
from tools.gpu.site import Site
from tools.runs import PACE, SHAPE

FLAT = "by flat partitions"
STEPS = 40
# Without atomic sums, whose order differs between two runs.
BASE = f"{SHAPE} {PACE} --max_steps {STEPS} --deterministic --compile off"
CASES = {
    "ZeRO-1, float32": (1, "--dtype float32"),
    "ZeRO-2, float32": (2, "--dtype float32"),
    "ZeRO-1, bfloat16": (1, "--dtype bfloat16"),
    "ZeRO-2, bfloat16": (2, "--dtype bfloat16"),
    "ZeRO-2, bfloat16, compiled": (2, "--dtype bfloat16 --compile on"),
    "ZeRO-2, bfloat16, spike guard": (2, "--dtype bfloat16 --spike_guard"),
}


def updates(site: Site) -> Iterator[Finding]:
    """Both values of --zero_update, 40 steps; the vectors passed the check of the first two."""
    flags = {
        f"{name}, {update}": f"{site.stage(stage)} {more} --zero_update {update}"
        for name, (stage, more) in CASES.items()
        for update in ("deepspeed", "auto")
    }
    runs = site.train(flags, base=BASE)
    for name in CASES:
        run = runs[f"{name}, auto"]
        curves = [
            [step["loss"] for step in runs[f"{name}, {update}"].events("step")]
            for update in ("auto", "deepspeed")
        ]
        found = difference(*curves) if len(curves[0]) == STEPS else math.inf
        yield at_most(name, found, 0.0)
        (start,) = run.events("run_start")
        changes = [event["zero_update"] for event in run.events("zero_update_changed")]
        who = ", then ".join([start["zero_update"], *changes])
        yield check(f"{name}: update", who == FLAT, who, FLAT)
