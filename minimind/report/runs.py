"""A run as one history of its starts, and its configuration."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minimind.report.records import Start, number, read_starts
from minimind.runtime.durable_files import storing

PREEMPTED = 75
SILENCE = 120.0  # seconds without a line after which a run of quick steps counts as ended
LINE = re.compile(r"(?P<name>\w+): (?P<value>.*?)(?:  # (?P<source>[^#]*))?", re.DOTALL)
MAX_CHARACTERS, MAX_DEPTH = 300, 8  # of a value of the configuration


@dataclass(frozen=True)
class Run:
    """All records of one out_dir."""

    name: str
    run_dir: Path
    starts: list[Start]
    unread_lines: int

    def column(self, name: str) -> np.ndarray:
        """float64 (kept lines,)."""
        parts = [start.column(name)[start.is_kept] for start in self.starts]
        return np.concatenate(parts) if parts else np.empty(0)

    def has(self, name: str) -> bool:
        """Whether any line has a value of that name."""
        return any(np.isfinite(start.column(name)).any() for start in self.starts)

    def lost_lines(self) -> list[tuple[Start, np.ndarray]]:
        """Starts with lost lines, and the indices of these and of the line before them."""
        lost = [(start, np.flatnonzero(~start.is_kept)) for start in self.starts]
        return [(start, np.r_[i[0] - 1, i] if i[0] else i) for start, i in lost if len(i)]

    def events(self, name: str, is_lost: bool = False) -> list[dict[str, Any]]:
        """Kept or lost events of that name; events without a step are left out."""
        return [
            event
            for start in self.starts
            for event in start.events
            if event["event"] == name
            and math.isfinite(step := number(event.get("step")))
            and (step > start.cutoff) == is_lost
        ]

    def steps_of(self, name: str) -> list[float]:
        """Steps of kept and lost events of that name, each once."""
        found = [*self.events(name), *self.events(name, is_lost=True)]
        return sorted({number(event["step"]) for event in found})

    def fact(self, name: str) -> Any:
        """`name` in the last run_start that has it, or None."""
        values = [start.facts.get(name) for start in reversed(self.starts)]
        return next((value for value in values if value is not None), None)

    def tokens_at(self, steps: np.ndarray) -> np.ndarray:
        """Tokens trained on up to each step."""
        known, tokens = self.column("step"), self.column("tokens")
        finite = np.isfinite(tokens)
        if not finite.any():
            return steps * number(self.fact("tokens_per_step"), 1.0)
        return np.interp(steps, np.r_[0.0, known[finite]], np.r_[0.0, tokens[finite]])

    @property
    def last_step(self) -> float:
        """The step of the last kept line, or of the last run_start."""
        kept, starts = self.column("step"), [start.first_step for start in self.starts]
        return kept[-1] if len(kept) else max(filter(math.isfinite, starts), default=0.0)

    def outcomes(self, now: float) -> list[tuple[str, str]]:
        """For each start a kind and a sentence.

        Kinds: done, stopped, failed, crashed, rolled back, running, silent.
        """
        return [_outcome(start, start is self.starts[-1], now) for start in self.starts]

    def marks(self, now: float) -> list[tuple[float, str, str]]:
        """Step, kind and label of each resume and of each end other than done."""
        marks: list[tuple[float, str, str]] = []
        world, before = None, ""
        for n, (start, (kind, _)) in enumerate(zip(self.starts, self.outcomes(now), strict=True)):
            size, first = start.facts.get("world_size"), start.first_step
            last = max(first, start.last_step)
            if n and math.isfinite(first) and not start.is_implied:
                verb = "resumed" if start.facts.get("resume_from") else "started anew"
                verb = "rolled back" if before == "rolled back" else verb
                change = f", {world} → {size} processes" if world not in (None, size) else ""
                marks.append((first, "resume", f"{verb} at {first:,.0f}{change}"))
            world, before = start.facts.get("world_size", world), kind
            if kind in ("crashed", "failed", "stopped") and math.isfinite(last):
                word = f"failed ({(start.end or {}).get('code')})" if kind == "failed" else kind
                marks.append((last, kind, f"{word} at {last:,.0f}"))
        return marks


def read_runs(run_dirs: Sequence[Path]) -> list[Run]:
    """Runs named by the last parts of their paths, as many as differ; a single run by two."""
    parts = [run_dir.absolute().parts for run_dir in run_dirs]
    depth = 2 if len(run_dirs) == 1 else 1
    while len({path[-depth:] for path in parts}) < len(set(parts)):
        depth += 1
    names = ["/".join(path[-depth:]).removeprefix("//") or "/" for path in parts]
    return [Run(name, one, *read_starts(one)) for name, one in zip(names, run_dirs, strict=True)]


def _outcome(start: Start, is_last: bool, now: float) -> tuple[str, str]:
    if start.end is None:
        if not is_last:
            return "crashed", "crashed: no end recorded"
        times = start.column("time")[-2:]
        pace = float(times[1] - times[0]) if np.isfinite(times).sum() == 2 else 0.0
        is_recent = now - start.last_time < max(SILENCE, 3 * pace)
        return ("running", "still running") if is_recent else ("silent", "no end recorded")
    if start.end.get("event") == "rolled_back":
        step, to = (f"{number(start.end.get(name)):,.0f}" for name in ("step", "to"))
        return "rolled back", f"spikes up to step {step}, rolled back to {to}"
    status, reason = start.end.get("status"), str(start.end.get("reason") or "")
    if status in (0, PREEMPTED):
        return ("stopped", reason or "stopped and saved") if status else ("done", "done")
    return "failed", f"status {status}, {start.end.get('code')}: {reason}"


@dataclass(frozen=True)
class Configuration:
    """`config.yaml` as name -> (value, source), `ds_config.resolved.json` as key path -> value."""

    flags: dict[str, tuple[str, str]]
    deepspeed: dict[str, str]

    @property
    def grad_clip(self) -> float:
        """The value of --grad_clip; NaN where it is unknown."""
        try:
            return float(self.flags["grad_clip"][0])
        except (KeyError, ValueError):
            return math.nan


def read_configuration(run_dir: Path) -> Configuration:
    """Read both files; a missing or malformed one is empty."""
    texts = []
    for path in (run_dir / "config.yaml", run_dir / "ds_config.resolved.json"):
        with storing(str(path), "correct its permissions"):
            texts.append(path.read_text("utf-8", "replace") if path.is_file() else "")
    lines = re.sub(r"\n +", " ", texts[0]).splitlines()  # long values are wrapped
    flags = {}
    for match in filter(None, map(LINE.fullmatch, lines)):
        value = match["value"].strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1].replace("''", "'")
        flags[match["name"]] = (value[:MAX_CHARACTERS], (match["source"] or "").strip())
    try:
        content = json.loads(texts[1])
    except (ValueError, RecursionError):
        content = None
    return Configuration(flags, _flatten(content) if isinstance(content, dict) else {})


def _flatten(content: dict[str, Any], prefix: str = "", depth: int = 0) -> dict[str, str]:
    values: dict[str, str] = {}
    for name, value in content.items():
        if isinstance(value, dict) and value and depth < MAX_DEPTH:
            values |= _flatten(value, f"{prefix}{name}.", depth + 1)
        else:
            values[f"{prefix}{name}"] = json.dumps(value)[:MAX_CHARACTERS]
    return values
