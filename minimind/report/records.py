"""metrics.jsonl -> the starts of a run: what each of them recorded, its steps in columns.

Read as whoever finds the file after a crash has to: torn lines, fields that are null, missing or
of another kind, and events that are not known are passed over; what was passed over is counted.
"""

from __future__ import annotations

import json
import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minimind.errors import UsageError
from minimind.runtime.durable_files import storing

PHASES = ("data", "forward", "backward", "optimizer")
PAUSES = ("evaluate", "checkpoint", "sample", "trace", "gc")
BEYOND = 1e100  # no figure of a run; such, and their inverse, would overflow
SHOWN_EXPERTS = 8  # more of them are shown by their range alone
NAMES = (
    *("step", "time", "loss", "lr", "grad_norm", "tokens", "tokens_per_second"),
    *("mfu", "memory_mib", "step_ms", "comm_ms"),
    *(f"{name}_ms" for name in (*PHASES, *PAUSES)),
)
KEPT = {
    *("eval", "checkpoint_saved", "checkpoint_rejected", "checkpoint_resharded"),
    *("run_changed", "step_skipped", "sample", "profile"),
}
READ = KEPT | {"step", "exit"}  # beside run_start


@dataclass
class Start:
    """What one process group recorded, from its run_start to its exit, if it came so far."""

    facts: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    last_time: float = math.nan
    is_implied: bool = True  # without a run_start: torn, or ended before it got there
    _columns: dict[str, array[float]] = field(default_factory=dict)

    @property
    def first_step(self) -> float:
        """The step it began after; infinite where it has taken none and does not say."""
        steps = self.column("step")
        if self.is_implied and len(steps):  # the interval of its lines, or 1
            return float(steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1.0))
        return number(self.facts.get("step"), math.inf if self.is_implied else 0.0)

    @property
    def first_time(self) -> float:
        """Unix seconds of run_start, or of the first line there is."""
        times = self.column("time")
        began = number(self.facts.get("time"))
        return began if math.isfinite(began) else float(times[0]) if len(times) else self.last_time

    @property
    def last_step(self) -> float:
        """The step of its last line; before any, none is below."""
        steps = self._columns.get("step")
        return steps[-1] if steps else -math.inf

    def add_step(self, line: dict[str, Any]) -> None:
        """Append the figures of a step line."""
        rows = len(self._columns.get("step", ()))
        for name in NAMES:
            self._append(name, line.get(name), rows)
        self._append("is_clipped", float(line.get("clipped") is True), rows)
        for name, value in _routing(line).items():
            self._append(name, value, rows)

    def _append(self, name: str, value: Any, rows: int) -> None:
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = array("d")
        if len(column) < rows:  # of experts, which some lines may be without
            column.extend([math.nan] * (rows - len(column)))
        column.append(value if type(value) is float else number(value))  # most are: 10^7 calls

    def column(self, name: str) -> np.ndarray:
        """float64 (step lines,); NaN where there is no figure."""
        found = np.full(len(self._columns.get("step", ())), np.nan)
        told = self._columns.get(name, array("d"))
        found[: len(told)] = told
        found[~(np.abs(found) < BEYOND)] = np.nan
        found[np.abs(found) < 1 / BEYOND] = 0.0
        return found


@dataclass(frozen=True)
class Records:
    """The starts of a run in the order they were written, and how many lines were not read."""

    place: Path
    starts: list[Start]
    unread_lines: int


def number(value: Any, otherwise: float = math.nan) -> float:
    """A JSON value as a float; `otherwise` for what is none, not finite, or absurd."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return otherwise
    if abs(value) < 1 / BEYOND:
        return 0.0
    return float(value) if abs(value) < BEYOND else otherwise


def read_records(place: Path) -> Records:
    """What a run recorded in `place`; a UsageError where that is no run's folder."""
    path = place / "metrics.jsonl"
    if not path.is_file():
        told = "holds no metrics.jsonl" if place.is_dir() else "is no folder"
        raise UsageError(f"{place} {told}; give the --out_dir of a run")
    starts: list[Start] = []
    unread = 0
    with storing(str(path), "mend its rights"), open(path, "rb") as file:
        for raw in file:
            line = _object(raw)
            if line is not None:
                _take(starts, line)
            elif raw.endswith(b"\n") and raw.strip():  # a torn last one may be on its way
                unread += 1
    return Records(place, starts, unread)


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _take(starts: list[Start], line: dict[str, Any]) -> None:
    name = line.get("event")
    if name == "run_start":
        starts.append(Start(facts=line, is_implied=False))
    elif not isinstance(name, str) or name not in READ:
        return
    elif not starts or starts[-1].end is not None or _is_of_another(starts[-1], line):
        starts.append(Start())
    start = starts[-1]
    now = number(line.get("time"))
    if math.isfinite(now) and not now <= start.last_time:  # which is NaN at first
        start.last_time = now
    if name == "step" and math.isfinite(number(line.get("step"))):
        start.add_step(line)
    elif name == "exit":
        start.end = line
    elif name in KEPT:
        start.events.append(line)


def _is_of_another(start: Start, line: dict[str, Any]) -> bool:
    """Whether a line belongs to another start: its run_start was torn, or it never came so far."""
    if line["event"] == "exit":
        return line.get("started") is False
    return line["event"] == "step" and number(line.get("step")) <= start.last_step


def _routing(line: dict[str, Any]) -> dict[str, float]:
    """Of a mixture of experts: the load of each as a multiple of an even one, and its range."""
    load, bounds = line.get("expert_load"), line.get("expert_load_range")
    found: dict[str, float] = {}
    if isinstance(load, list):
        shares = enumerate(load[:SHOWN_EXPERTS])
        found = {f"expert_{n}": number(share) * len(load) for n, share in shares}
    if isinstance(bounds, list) and len(bounds) == 2:
        found |= {"expert_least": number(bounds[0]), "expert_most": number(bounds[1])}
    return found
