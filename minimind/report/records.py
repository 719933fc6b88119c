"""Read metrics.jsonl: the starts of a run, the step lines of each as columns.

The file may be left by a crash: torn lines, missing or malformed fields and unknown events are
skipped; lines that are no JSON object are counted.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minimind.errors import UsageError
from minimind.runtime.durable_files import storing

PHASES = ("data", "forward", "backward", "optimizer")
PAUSES = ("evaluate", "checkpoint", "sample", "verify", "trace", "gc")
LIMIT = 1e100  # larger values, and smaller inverses, would overflow in later arithmetic
MAX_EXPERTS = 8  # shown one by one; of more, the first and the range over all
COLUMNS = (
    *("step", "time", "loss", "lr", "grad_norm", "tokens", "tokens_per_second"),
    *("mfu", "memory_mib", "step_ms", "comm_ms", *(f"{name}_ms" for name in (*PHASES, *PAUSES))),
)
ENDS = ("exit", "rolled_back")  # of a start; after a rollback another one follows
KEPT_EVENTS = {
    *("eval", "checkpoint_saved", "checkpoint_rejected", "checkpoint_resharded"),
    *("run_changed", "step_skipped", "spike", "spike_skipped", "corruption"),
    *("sample", "profile", "verdict", "checkpoint_mirrored", "checkpoint_fetched"),
    "mirror_failed",
}


def number(value: Any, default: float = math.nan) -> float:
    """A JSON value as a float; `default` if it is no number, not finite or beyond `LIMIT`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    if abs(value) < 1 / LIMIT:
        return 0.0
    return float(value) if abs(value) < LIMIT else default


@dataclass
class Start:
    """The lines from one run_start to its exit or rollback, or to the next start after a crash.

    Lines beyond `cutoff`, the step from which a later start resumed, are lost: they took time but
    have no part in the model.
    """

    facts: dict[str, Any] = field(default_factory=dict)  # of run_start
    is_implied: bool = True  # run_start is missing from the file
    cutoff: float = math.inf
    events: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    last_time: float = math.nan
    _columns: dict[str, array[float]] = field(
        default_factory=lambda: defaultdict(lambda: array("d"))
    )

    def add_step(self, line: dict[str, Any]) -> None:
        """Append the values of a step line."""
        rows = len(self._columns["step"])
        for name in COLUMNS:
            self._append(name, line.get(name), rows)
        self._append("is_clipped", float(line.get("clipped") is True), rows)
        load, bounds = line.get("expert_load"), line.get("expert_load_range")
        for n, share in enumerate(load[:MAX_EXPERTS] if isinstance(load, list) else ()):
            self._append(f"expert_{n}", number(share) * len(line["expert_load"]), rows)
        if isinstance(bounds, list) and len(bounds) == 2:
            self._append("expert_least", bounds[0], rows)
            self._append("expert_most", bounds[1], rows)

    def _append(self, name: str, value: Any, rows: int) -> None:
        column = self._columns[name]
        if len(column) < rows:  # the lines before had no such value
            column.extend([math.nan] * (rows - len(column)))
        column.append(value if type(value) is float else number(value))

    def column(self, name: str) -> np.ndarray:
        """float64 (lines,), NaN where missing; `taken`: steps since the line before (`begins`)."""
        if name in ("taken", "begins"):
            steps = self.column("step")
            taken = np.diff(steps, prepend=min(self.first_step, LIMIT))
            taken = np.where(taken > 0, taken, 1.0)
            return taken if name == "taken" else steps - taken
        values = np.full(len(self._columns["step"]), np.nan)
        recorded = self._columns.get(name, array("d"))
        values[: len(recorded)] = recorded
        values[~(np.abs(values) < LIMIT)] = np.nan
        values[np.abs(values) < 1 / LIMIT] = 0.0
        return values

    @property
    def is_kept(self) -> np.ndarray:
        """bool (lines,)."""
        return self.column("step") <= self.cutoff

    @property
    def first_step(self) -> float:
        """The step it resumed from; infinite where it is unknown."""
        steps = self._columns["step"]
        if self.is_implied and steps:  # one log interval before the first line, or one step
            return steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1.0)
        return number(self.facts.get("step"), math.inf if self.is_implied else 0.0)

    @property
    def last_step(self) -> float:
        """The step of the last line; minus infinity without lines."""
        return self._columns["step"][-1] if self._columns["step"] else -math.inf

    @property
    def first_time(self) -> float:
        """Unix seconds of run_start, or of the first line there is."""
        times = self.column("time")
        return number(self.facts.get("time"), float(times[0]) if len(times) else self.last_time)

    @property
    def seconds(self) -> float:
        """From the first line to the last."""
        return max(0.0, number(self.last_time - self.first_time, 0.0))

    @property
    def lost_steps(self) -> int:
        """Steps beyond the cutoff."""
        last = self.last_step
        return 0 if last <= self.cutoff else int(last - max(self.cutoff, self.first_step))

    def milliseconds(self, only_lost: bool = False) -> dict[str, float]:
        """Time by phase and pause over all lines, with the pauses that `exit` records."""
        weight = self.column("taken") * (~self.is_kept if only_lost else 1.0)
        end = {} if only_lost and not self.lost_steps else self.end or {}
        return {
            name: float(np.nansum(self.column(f"{name}_ms") * weight))
            + max(0.0, number(end.get(f"{name}_ms"), 0.0))
            for name in (*PHASES, *PAUSES)
        }


def read_starts(run_dir: Path) -> tuple[list[Start], int]:
    """The starts in `run_dir`/metrics.jsonl, and the number of unreadable lines."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        problem = "holds no metrics.jsonl" if run_dir.is_dir() else "is no folder"
        raise UsageError(f"{run_dir} {problem}; give the --out_dir of a run")
    starts: list[Start] = []
    unread = 0
    with storing(str(path), "correct its permissions"), open(path, "rb") as file:
        for raw in file:
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError):
                line = None
            if isinstance(line, dict):
                _add_line(starts, line)
            elif raw.endswith(b"\n") and raw.strip():  # a partial last line may still be written
                unread += 1
    cutoff = math.inf
    for start in reversed(starts):
        start.cutoff, cutoff = cutoff, min(cutoff, start.first_step)
    return starts, unread


def _add_line(starts: list[Start], line: dict[str, Any]) -> None:
    name = line.get("event")
    if name == "run_start":
        starts.append(Start(line, is_implied=False))
    elif not isinstance(name, str) or name not in {"step", *ENDS, *KEPT_EVENTS}:
        return
    elif not starts or starts[-1].end is not None or _follows_missing_start(starts[-1], line):
        starts.append(Start())
    start = starts[-1]
    now = number(line.get("time"))
    if math.isfinite(now) and not now <= start.last_time:  # last_time may be NaN
        start.last_time = now
    if name == "step" and math.isfinite(number(line.get("step"))):
        start.add_step(line)
    elif name in ENDS:
        start.end = line
    elif name in KEPT_EVENTS:
        start.events.append(line)


def values_by_rank(ranks: Any, key: str) -> dict[str, float]:
    """Rank -> value, from a list of objects or an object of lists."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(ranks, dict) and isinstance(ranks.get(key), list):
        pairs = [*enumerate(ranks[key])]
    elif isinstance(ranks, list):
        pairs = [(r.get("rank", n), r.get(key)) for n, r in enumerate(ranks) if isinstance(r, dict)]
    return {str(rank): number(value) for rank, value in pairs if math.isfinite(number(value))}


def _follows_missing_start(start: Start, line: dict[str, Any]) -> bool:
    if line["event"] == "exit":
        return line.get("started") is False
    return line["event"] == "step" and number(line.get("step")) <= start.last_step
