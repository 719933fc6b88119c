"""Two ranks: the losses of one, communication under computation, a rank that dies or hangs."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator

from minimind.config.run_config import ParallelLayout
from tools import matrix
from tools.gpu.findings import Finding, PartError, at_most, check, figure, skipped
from tools.gpu.losses import DISTANCE, difference
from tools.gpu.site import Site, launched
from tools.gpu.trace import overlap, read
from tools.runs import ENDLESS, SHAPE, end_with_children, left_over, wait_for, workers

TWO = 2
STAGES = (None, 1, 2, 3)
FLAT_STAGES = (1, 2)  # updated by flat partitions
# What the first error line says of rank 1; seconds after which a silent rank counts as lost.
FAULTS = {
    signal.SIGKILL: ("died: killed by SIGKILL", 120),
    signal.SIGSTOP: ("is stopped (SIGSTOP)", 8),
}
ENDS_WITHIN = 90.0  # seconds


def ranks(site: Site) -> Iterator[Finding]:
    """DDP and ZeRO 1 to 3 on two ranks, overlap, SIGKILL and SIGSTOP of a rank."""
    if site.device != "cpu" and site.gpus < TWO:
        yield skipped("two ranks", f"{site.gpus} GPU here, {TWO} are needed")
        return
    yield from losses_of_two(site)
    yield overlapped(site)
    for number, (words, timeout) in FAULTS.items():
        yield lost(site, number, words, timeout)


def losses_of_two(site: Site) -> Iterator[Finding]:
    """Against one rank without DeepSpeed, in fp32; the same rows a step."""
    root = site.folder / "matrix"
    root.mkdir()
    shutil.copy(site.launcher.corpus, root / "text.jsonl")
    of = ("float32", 2)
    curves = {}
    for stage, world in ((None, 1), *((stage, TWO) for stage in STAGES)):
        try:
            steps = matrix.train(root, stage, *of, ParallelLayout(world), site.device)
        except SystemExit as ended:
            raise PartError(str(ended).splitlines()[0], str(ended)) from ended
        curves[stage, world] = [step["loss"] for step in steps]
    for stage in STAGES:
        name = "DDP" if stage is None else f"ZeRO-{stage}"
        found = difference(curves[stage, TWO], curves[None, 1])
        yield at_most(f"{TWO} x {name}, float32", found, DISTANCE["float32"])
    for stage in FLAT_STAGES:  # the sum of two does not depend on the order
        flags = f"{SHAPE} --zero_update deepspeed"
        steps = matrix.train(root, stage, *of, ParallelLayout(TWO), site.device, flags)
        found = difference([step["loss"] for step in steps], curves[stage, TWO])
        yield at_most(f"{TWO} x ZeRO-{stage}, by DeepSpeed's own update", found, 0.0)


def overlapped(site: Site) -> Finding:
    """How much of the communication of ZeRO-2 other kernels hide."""
    what = "ZeRO-2, communication under other kernels"
    if site.device == "cpu":
        return skipped(what, "a trace has no kernels of gloo")
    out = site.folder / "traced"
    shape = "--dim 1024 --n_layers 8 --n_heads 16 --n_kv_heads 4 --batch_size 16"
    flags = f"--device {site.device} {site.stage(2)} {shape} --trace_steps 8:11"
    launched(site, out, flags, processes=TWO)
    hidden = overlap(read(next((out / "traces").glob("*rank_0.json.gz"))))
    if hidden is None:
        return check(what, False, "no kernels of NCCL in the trace", "some")
    return figure(what, hidden, f"{hidden:.0%}")


def lost(site: Site, number: signal.Signals, words: str, timeout: int) -> Finding:
    """A run whose rank 1 gets a signal: status 7, and the rank is named."""
    out = site.folder / number.name
    flags = f"--device {site.device} {site.stage(2)} {ENDLESS} --dist_timeout {timeout}"
    started = site.launcher.start(out, flags, processes=TWO)
    try:
        wait_for(started, out, '"step": 3,')
        workers(started.pid)[1].send_signal(number)
        _, report = started.communicate(timeout=ENDS_WITHIN)
    except subprocess.TimeoutExpired:
        return check(number.name, False, f"did not end within {ENDS_WITHIN:.0f} s", "status 7")
    finally:
        end_with_children(started.pid)
    first = next((line for line in report.splitlines() if "error[" in line), "no error line")
    left = left_over(out)
    is_right = started.returncode == 7 and words in first and "rank 1" in first and not left
    text = f"status {started.returncode}, {len(left)} processes left: {first}"
    return check(f"{number.name} of rank 1", is_right, text, f"status 7, {words}")
