"""Killed and resumed: bit for bit in one configuration, within rounding across ZeRO stages."""

from __future__ import annotations

from collections.abc import Iterator

from tools import elastic as pairs
from tools.elastic import WITHIN, name_of, shown
from tools.forking import free_port
from tools.gpu.findings import Finding, check
from tools.gpu.site import Site, launched
from tools.runs import end_with_children, kill_all, wait_for

LAST, LAST_ON_CPU = 200, 60  # steps: a fast GPU must still train when the kill arrives


def resume(site: Site) -> Iterator[Finding]:
    """ZeRO-2, bf16, --deterministic: SIGKILL after step 30, and the same command again."""
    last = LAST if site.device != "cpu" else LAST_ON_CPU
    flags = f"--device {site.device} {site.stage(2)} --deterministic"
    flags += f" --max_steps {last} --save_interval 20"
    whole = launched(site, site.folder / "whole", flags)
    out = site.folder / "killed"
    started = site.launcher.start(out, flags, processes=1)
    try:
        wait_for(started, out, '"step": 30,')
        kill_all(started)
    finally:
        end_with_children(started.pid)
    resumed = launched(site, out, flags)
    starts = [start["step"] for start in resumed.events("run_start")]
    is_resumed = len(starts) == 2 and 0 < starts[1] < last
    yield check("resumed from a checkpoint", is_resumed, f"starts at steps {starts}")
    expected = dict(zip(range(1, last + 1), whole.curve(), strict=True))
    found = resumed.curve()
    other = sum(line != expected[int(line[0])] for line in found)
    yield check("steps whose loss, norm or rows differ", other == 0, str(other), "0", other)
    missing = len({*expected} - {int(line[0]) for line in found})
    yield check("steps missing", missing == 0, str(missing), "0", missing)


def elastic(site: Site) -> Iterator[Finding]:
    """Saved under one ZeRO stage, resumed under another: losses of the unbroken run."""
    curves = {}
    for phase in ("sources", "targets"):  # so that a target runs in another process
        site.python("tools.elastic", str(site.folder), phase, site.device, **alone(site))
        curves |= pairs.curves_of(site.folder, phase, 1)
    for source, target in pairs.ON_DEVICE:
        for dtype, limit in WITHIN.items():
            key = f"{dtype}|{name_of(source)}"
            curve, unbroken = curves[f"{key} -> {name_of(target)}"], curves[key]
            text, is_right = shown(curve, unbroken, limit, is_same=source == target)
            what = f"ZeRO-{source.stage} to ZeRO-{target.stage}, {dtype}"
            yield check(what, is_right, text, "bit for bit" if source == target else f"{limit:g}")


def alone(site: Site) -> dict[str, str]:
    """The environment of the only rank of a group."""
    who = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return {**who, "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": site.device}
