"""Where a step's time went: every moment of it is charged to exactly one phase."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from minimind.engine.collective_clock import CommunicationClock

PHASES = ("data", "forward", "backward", "optimizer")
SHOWN = {"comm": "of it comm.", "memory_mib": "memory MiB"}


class PhaseClock:
    """Marks between phases; what lies between two marks belongs to the phase named by the second.

    On a GPU the marks are CUDA events, so that no mark waits for the device: the times are read
    when they are reported, which is the only synchronisation. On a CPU they are a monotonic clock.
    """

    def __init__(
        self, device: torch.device, communication: CommunicationClock | None = None
    ) -> None:
        self._on_gpu = device.type == "cuda"
        self._communication = communication
        self._range: Any = None  # of a trace, by the name of the phase
        self.is_traced = False
        self.passed = 0  # marks since the start: how far this rank is, for its peers
        self.phase = ""  # the one it is in
        self._marks: list[list[tuple[str, torch.cuda.Event | float]]] = []

    def begin(self) -> None:
        """Start a step: the moment the first micro-batch is asked for."""
        self._marks.append([("", self._now())])
        self._enter("data")
        self._annotate("data")

    def mark(self, phase: str, is_last: bool = False) -> None:
        """Charge the time since the last mark to `phase`; the last one of a step ends it."""
        self._marks[-1].append((phase, self._now()))
        following = PHASES[(PHASES.index(phase) + 1) % len(PHASES)]
        self._enter(following)
        self._annotate("" if is_last else following)

    def _enter(self, phase: str) -> None:
        self.passed += 1
        self.phase = phase

    def _annotate(self, phase: str) -> None:
        """Show the phase in a trace, where one is recorded."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self.is_traced and phase:
            self._range = torch.profiler.record_function(phase)
            self._range.__enter__()

    def take(self) -> list[dict[str, float]]:
        """Milliseconds by phase, and their sum as `step`, of each step since the last call.

        Communication, where it is watched, is shared out evenly over them as `comm`.
        """
        marks, self._marks = self._marks, []
        if self._on_gpu:
            torch.cuda.synchronize()
        steps = [self._milliseconds(step) for step in marks]
        if self._communication:
            spent = self._communication.take() / max(1, len(steps))
            steps = [{**step, "comm": spent} for step in steps]
        return steps

    def _now(self) -> torch.cuda.Event | float:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _milliseconds(self, marks: list[tuple[str, torch.cuda.Event | float]]) -> dict[str, float]:
        spent: dict[str, float] = {phase: 0.0 for phase in PHASES}
        for (_, start), (phase, end) in pairwise(marks):
            if isinstance(start, float) and isinstance(end, float):
                spent[phase] += (end - start) * 1e3
            elif isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
                spent[phase] += start.elapsed_time(end)
        return {**spent, "step": sum(spent.values())}


def mean_ms(steps: list[dict[str, float]]) -> dict[str, float | None]:
    """The mean of each phase over `steps`, as `PHASE_ms`; comm_ms is None unless watched."""
    means = {f"{n}_ms": sum(s[n] for s in steps) / max(1, len(steps)) for n in (*PHASES, "step")}
    is_watched = bool(steps) and "comm" in steps[0]
    return {**means, "comm_ms": sum(s["comm"] for s in steps) / len(steps) if is_watched else None}


def median_ms(steps: list[dict[str, float]]) -> dict[str, float]:
    """The median of everything that `steps` have: what one rank tells the others."""
    return {f"{name}_ms": median(step[name] for step in steps) for name in steps[0]}


def ranks_table(ranks: Sequence[Mapping[str, float]]) -> str:
    """A table of min / median / max over ranks of what each tells, and whose the largest is.

    Ranks wait for each other in the backward pass: who is late is seen by its forward pass, or by
    how little time it spends communicating.
    """
    lines = [f"  {'over ranks':<12}{'min':>10}{'median':>10}{'max':>10}  largest"]
    for name in ranks[0]:
        found = [rank[name] for rank in ranks]
        largest, short = found.index(max(found)), name.removesuffix("_ms")
        shown = SHOWN.get(short, short)
        lines.append(
            f"  {shown:<12}{min(found):>10.1f}{median(found):>10.1f}{max(found):>10.1f}"
            f"  rank {largest}"
        )
    return "\n".join(lines)


def profile_table(steps: list[dict[str, float]], pauses: dict[str, float]) -> str:
    """A table of min / median / max milliseconds by phase over `steps`.

    `pauses` are milliseconds spent between the steps over the same interval (evaluate, checkpoint);
    they are no part of a step and stand below the line. Shares are of sums, so those of the phases
    add up to 100 %.
    """
    whole = sum(s["step"] for s in steps)
    lines = [f"  {'phase':<12}{'min ms':>10}{'median':>10}{'max':>10}{'share':>8}"]
    for name in (*PHASES, "step", "comm"):
        times = [s[name] for s in steps if name in s]
        if not times:
            continue
        share = f"{sum(times) / whole:>8.1%}" if whole else ""
        lines.append(
            f"  {SHOWN.get(name, name):<12}{min(times):>10.1f}{median(times):>10.1f}"
            f"{max(times):>10.1f}{share}"
        )
    for name, spent in pauses.items():
        lines.append(f"  {name:<12}{spent:>10.1f}  in all, between the {len(steps)} steps")
    return "\n".join(lines)
