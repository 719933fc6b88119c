"""Where a step's time went: every moment of it is charged to exactly one phase."""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median

import torch

PHASES = ("data", "forward", "backward", "optimizer")


class PhaseClock:
    """Marks between phases; what lies between two marks belongs to the phase named by the second.

    On a GPU the marks are CUDA events, so that no mark waits for the device: the times are read
    when they are reported, which is the only synchronisation. On a CPU they are a monotonic clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.passed = 0  # marks since the start: how far this rank is, for its peers
        self.phase = ""  # the one it is in
        self._marks: list[list[tuple[str, torch.cuda.Event | float]]] = []

    def begin(self) -> None:
        """Start a step: the moment the first micro-batch is asked for."""
        self._marks.append([("", self._now())])
        self._enter("data")

    def mark(self, phase: str) -> None:
        """Charge the time since the last mark to `phase`."""
        self._marks[-1].append((phase, self._now()))
        self._enter(PHASES[(PHASES.index(phase) + 1) % len(PHASES)])

    def _enter(self, phase: str) -> None:
        self.passed += 1
        self.phase = phase

    def take(self) -> list[dict[str, float]]:
        """Milliseconds by phase, and their sum as `step`, of each step since the last call."""
        marks, self._marks = self._marks, []
        if self._on_gpu:
            torch.cuda.synchronize()
        return [self._milliseconds(step) for step in marks]

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


def mean_ms(steps: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each phase over `steps`, as `PHASE_ms`."""
    names = (*PHASES, "step")
    return {f"{n}_ms": sum(s[n] for s in steps) / max(1, len(steps)) for n in names}


def profile_table(steps: list[dict[str, float]], pauses: dict[str, float]) -> str:
    """A table of min / median / max milliseconds by phase over `steps`.

    `pauses` are milliseconds spent between the steps over the same interval (evaluate, checkpoint);
    they are no part of a step and stand below the line.
    """
    whole = median(s["step"] for s in steps)
    lines = [f"  {'phase':<12}{'min ms':>10}{'median':>10}{'max':>10}{'share':>8}"]
    for name in (*PHASES, "step"):
        times = [s[name] for s in steps]
        share = f"{median(times) / whole:>8.1%}" if whole else ""
        lines.append(
            f"  {name:<12}{min(times):>10.1f}{median(times):>10.1f}{max(times):>10.1f}{share}"
        )
    for name, spent in pauses.items():
        lines.append(f"  {name:<12}{spent:>10.1f}  in all, between the {len(steps)} steps")
    return "\n".join(lines)
