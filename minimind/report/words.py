"""A run in a few lines of text."""

from __future__ import annotations

import math

import numpy as np

from minimind.report.figures import WORDS, Figures, smoothed_loss
from minimind.report.numbers import count, duration, exact, mebibytes, percent
from minimind.report.ranks import in_brief
from minimind.report.records import number
from minimind.report.runs import Run

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN = "_.-=+*#@"  # where the terminal has no blocks
WIDTH = 60


def what_it_is(run: Run) -> str:
    """`2,361,024 parameters, bfloat16, DeepSpeed ZeRO-2 on 2 processes (cpu)`."""
    parameters, world = number(run.fact("parameters")), number(run.fact("world_size"))
    told = [f"{parameters:,.0f} parameters"] if math.isfinite(parameters) else []
    told += [str(run.fact("dtype"))] if run.fact("dtype") else []
    backend = backend_of(run.fact("backend"), run.fact("zero_stage"))
    processes = f"on {count(int(world), 'process', 'processes')}" if math.isfinite(world) else ""
    device = f"({run.fact('device')})" if run.fact("device") else ""
    told += [" ".join(part for part in (backend, processes, device) if part)]
    return ", ".join(part for part in told if part)


def backend_of(backend: object, stage: object) -> str:
    """`DeepSpeed ZeRO-2`, `DDP`, `single`."""
    if backend == "deepspeed":
        return f"DeepSpeed ZeRO-{stage}"
    return "DDP" if backend == "ddp" else str(backend or "")


def course(figures: Figures) -> str:
    """`step 160 of 160 after 2 min 5 s: done`."""
    of = f" of {figures.total_steps:,}" if figures.total_steps is not None else ""
    return f"step {figures.step:,}{of} after {duration(figures.seconds)}: {figures.ending}"


def results(figures: Figures) -> str:
    """`smoothed loss 5.39, best validation 5.38; 4,698 tokens/s, 64% of the time in backward`."""
    told = [f"smoothed loss {figures.mean_loss:.2f}"] if math.isfinite(figures.mean_loss) else []
    told += [f"best validation {figures.best.loss:.2f}"] if figures.best else []
    text = ", ".join(told)
    if math.isfinite(figures.tokens_per_second):
        text += f"; {exact(figures.tokens_per_second)} tokens/s"
    if text and figures.shares:
        most = max(figures.shares, key=lambda name: figures.shares[name])
        text += f", {percent(figures.shares[most])} of the time in {WORDS.get(most, most)}"
    return text


def setbacks(figures: Figures) -> str:
    """`1 resume, 1 crash, 16 steps lost (7.1 s)`; nothing where there were none."""
    told = [count(figures.resumes, "resume")] if figures.resumes else []
    told += [count(figures.crashes, "crash", "crashes")] if figures.crashes else []
    if figures.lost_steps:
        lost = duration(figures.lost_seconds)
        told.append(f"{count(figures.lost_steps, 'step')} lost ({lost})")
    told += [f"{count(figures.skipped, 'step')} skipped"] if figures.skipped else []
    return ", ".join(told)


def spent(figures: Figures) -> str:
    """`forward 32 %, backward 66 %, ...`: what takes a share that can be seen."""
    shown = [(n, s) for n, s in figures.shares.items() if s >= 0.0005]
    return ", ".join(f"{WORDS.get(name, name)} {percent(share)}" for name, share in shown)


def as_text(run: Run, figures: Figures, blocks: bool = True) -> str:
    """The run for a terminal, 6 to 11 lines; without `blocks` in ASCII alone."""
    lines = [
        str(run.place),
        f"  run         {what_it_is(run) or 'nothing is known of it'}",
        f"  course      {course(figures)}",
    ]
    lines += [f"  setbacks    {setbacks(figures)}"] if setbacks(figures) else []
    if math.isfinite(figures.loss):
        mean = f", {figures.mean_loss:.4f} smoothed"
        lines.append(f"  loss        {figures.loss:.4f} at step {figures.loss_step:,}{mean}")
    if best := figures.best:
        told = ((", perplexity", best.perplexity), (", bits per byte", best.bits_per_byte))
        beside = "".join(f"{name} {value:.4g}" for name, value in told if math.isfinite(value))
        lines.append(f"  validation  {best.loss:.4f} at step {best.step:,}, the best{beside}")
    if math.isfinite(figures.tokens):
        speed = f", {exact(figures.tokens_per_second)} tokens/s"
        speed += f", MFU {percent(figures.mfu)}" if math.isfinite(figures.mfu) else ""
        lines.append(f"  tokens      {figures.tokens:,.0f}{speed}")
    if figures.shares:
        lines.append(f"  time        {spent(figures)}")
    if math.isfinite(figures.memory_mib):
        lines.append(f"  memory      {mebibytes(figures.memory_mib)} at most, of one process")
    lines += [f"  ranks       {told}"] if (told := in_brief(run)) else []
    if unread := run.records.unread_lines:
        lines.append(f"  unread      {count(unread, 'line')} of metrics.jsonl")
    drawn = sparkline(smoothed_loss(run), BLOCKS if blocks else PLAIN)
    text = "\n".join([*lines, f"  {drawn}"] if drawn else lines)
    return text if blocks else text.encode("ascii", "replace").decode()


def sparkline(values: np.ndarray, marks: str) -> str:
    """The curve from the first value to the last, at most WIDTH marks wide."""
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return ""
    parts = np.array_split(values, min(WIDTH, len(values)))
    means = np.array([part.mean() for part in parts])
    span = float(means.max() - means.min()) or 1.0
    heights = ((means - means.min()) / span * (len(marks) - 1)).round().astype(int)
    return "".join(marks[n] for n in heights) + f"  {values[0]:.2f} to {values[-1]:.2f}"
