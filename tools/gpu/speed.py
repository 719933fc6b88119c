"""Tokens/s and MFU beside two other loops, and where the time of a step goes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu import NAMES, ROWS
from minimind.config.flags import ALONE
from tools.gpu.findings import Finding, PartError, check, figure
from tools.gpu.memory import FEW_STEPS, trained_on_much_text
from tools.gpu.site import Site
from tools.gpu.trace import overlap, read, shares

TINY = ["--models", "tiny", "--rows", "2", "--max_seq_len", "64", "--steps", "2", "--rounds", "3"]
ALONE_MODELS = ("tiny", "26m")
LEFT = 0.9  # of this part's time, for the rounds


def speed(site: Site) -> Iterator[Finding]:
    """Interleaved: ours under ZeRO-2 and without, a bare compiled loop, transformers' Llama.

    On a device that trains without DeepSpeed and compilation: ours on it, and on the CPU.
    """
    if site.device in ALONE:
        yield from beside_cpu(site)
        return
    out = site.folder / "gpu.json"
    words = ["--device", site.device, "--out", str(out)]
    words += ["--minutes", f"{max(0.1, site.seconds_left * LEFT / 60):.2f}"]
    words += TINY if site.device == "cpu" else []
    failure: PartError | None = None
    try:
        site.python("benchmarks.gpu", *words)
    except PartError as error:  # the models before have their figures
        failure = error
    result = json.loads(out.read_text()) if out.exists() else {"found": {}}
    for model, found in result["found"].items():
        yield from rows_of(model, found, site.device)
    missing = [model for model in models_of(site) if model not in result["found"]]
    text = ", ".join(missing) or "none"
    yield check("models without figures", not missing, text, "none", missing)
    if failure:
        raise failure


def beside_cpu(site: Site) -> Iterator[Finding]:
    """Tokens per second of the same run on the device and on the CPU."""
    base = f"{site.stage(None)} --accumulation_steps 1 --max_steps 12 --log_interval 3"
    base += " --eval_rows 0 --save_interval 100000 --save_minutes 0"
    runs = {model: f"--model {model} --batch_size 8 --max_seq_len 256" for model in ALONE_MODELS}
    speeds: dict[str, dict[str, float]] = {model: {} for model in runs}
    for device in (site.device, "cpu"):
        for model, run in trained_on_much_text(site, runs, base, device=device).items():
            _, *after = (step["tokens_per_second"] for step in run.events("step"))
            speeds[model][device] = speed = statistics.median(after)
            yield figure(f"{model}, {device}", speed, f"{speed:,.0f} tokens/s")
    for model, found in speeds.items():
        times = found[site.device] / found["cpu"]
        yield figure(f"{model}, times as fast as the CPU", times, f"{times:.2f}")


def models_of(site: Site) -> list[str]:
    """Those that are raced."""
    return ["tiny"] if site.device == "cpu" else [*ROWS]


def rows_of(model: str, found: dict[str, Any], device: str) -> Iterator[Finding]:
    """One row of each contender; on a CPU, whose peak depends on the dtype, without MFU."""
    for name in NAMES:
        row = found["table"][name]
        mfu = ", ".join(
            f"{share:.1%} of the {whose} peak"
            for whose, share in row["mfu"].items()
            if share and device == "cuda"
        )
        text = (
            f"{row['seconds'] * 1e3:.1f} ms, {row['tokens_per_second']:,.0f} tokens/s,"
            f"{f' MFU {mfu},' if mfu else ''} {row['speed_against_bare']:.2f} x bare,"
            f" {row['peak_mib']:,.0f} MiB"
        )
        yield figure(f"{model}, {found['rows']} rows, {name}", row, text)


def profile(site: Site) -> Iterator[Finding]:
    """A trace of four steps, compiled on a GPU: shares of the time by kind of work."""
    flags = f"{site.stage(None)} --max_steps 12 --trace_steps 8:11"
    if site.device == "cpu":
        runs = site.train({"tiny": flags})
    else:
        sizes = {model: f"--model {model} --batch_size {rows}" for model, rows in ROWS.items()}
        base = f"{FEW_STEPS} --accumulation_steps 1 --max_seq_len 1024 --log_interval 12"
        flags_of = {model: f"{size} {flags}" for model, size in sizes.items()}
        runs = trained_on_much_text(site, flags_of, base)
    for model, run in runs.items():
        yield from trace_findings(model, run.out_dir, run.events("exit")[-1]["status"])


def trace_findings(model: str, out_dir: Path, status: int) -> Iterator[Finding]:
    """The rows of one trace."""
    (path,) = (out_dir / "traces").glob("*.json.gz")
    events = read(path)
    found = shares(events)
    text = ", ".join(f"{kind} {share:.0%}" for kind, share in found.items())
    yield check(f"{model}: trace", status == 0 and len(found) > 1, text, "has work", found)
    hidden = overlap(events)
    if hidden is not None:
        yield figure(f"{model}: communication under other kernels", hidden, f"{hidden:.0%}")
