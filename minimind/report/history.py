"""Read metrics.jsonl: the starts of a run, one history of them, and its configuration."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minimind.config.run_record import NAME, record_fault
from minimind.errors import PREEMPTED, UsageError
from minimind.runtime import disk
from minimind.runtime.durable_files import storing
from minimind.runtime.event_log import EventLog, left_out
from minimind.runtime.secret_keys import without_secret
from minimind.runtime.urls import masked, masked_values

PHASES = ("data", "forward", "backward", "optimizer")
PAUSES: tuple[str, ...] = ("evaluate", "checkpoint", "sample", "score", "verify", "trace", "gc")
LIMIT = 1e100  # larger values, and smaller inverses, would overflow in later arithmetic
MAX_EXPERTS = 8  # shown one by one; of more, the first and the range over all
COLUMNS = (
    *("step", "time", "loss", "lr", "grad_norm", "skipped", "tokens", "tokens_per_second"),
    *("mfu", "memory_mib", "step_ms", "comm_ms", *(f"{name}_ms" for name in (*PHASES, *PAUSES))),
)
ENDS = ("exit", "rolled_back")  # they end a start; after a rollback another one follows
KEPT_EVENTS = {
    *("eval", "checkpoint_saved", "checkpoint_rejected", "checkpoint_resharded"),
    *("run_changed", "step_skipped", "spike", "spike_skipped", "corruption"),
    *("sample", "scores", "profile", "verdict", "checkpoint_mirrored", "checkpoint_fetched"),
    *("mirror_failed", "floors"),
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

    facts: dict[str, Any] = field(default_factory=dict)  # fields of run_start
    is_implied: bool = True  # run_start is missing from the file
    cutoff: float = math.inf
    events: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    last_time: float = math.nan
    _columns: dict[str, array[float]] = field(
        default_factory=lambda: defaultdict(lambda: array("d"))
    )

    def add_step(self, line: dict[str, Any]) -> None:
        rows = len(self._columns["step"])
        for name in COLUMNS:
            self._append(name, line.get(name, math.nan), rows)
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

    def kept(self, name: str) -> np.ndarray:
        """float64 (kept lines,)."""
        values = self.column(name)
        return values if self.last_step <= self.cutoff else values[self.is_kept]

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


class History:
    """The starts in `run_dir`/metrics.jsonl, read on from where the last `read` ended."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.log = run_dir, EventLog(run_dir / "metrics.jsonl")
        self.starts: list[Start] = []

    @property
    def unread_lines(self) -> int:
        return self.log.unread

    @property
    def exists(self) -> bool:
        return disk.is_file(self.log.path)

    def read(self) -> bool:
        """Add the lines that were appended; return whether there were any, or the file is another.

        Raise StorageError.
        """
        before = self.log.position
        with storing(str(self.log.path), "correct its permissions"):
            if self.log.begins_anew():
                self.starts = []
            for event in self.log.new():
                _add_line(self.starts, event)
        cutoff = math.inf
        for start in reversed(self.starts):
            start.cutoff, cutoff = cutoff, min(cutoff, start.first_step)
        return before != self.log.position


def _add_line(starts: list[Start], line: dict[str, Any]) -> None:
    name = line["event"]
    if name == "run_start":
        starts.append(Start(line, is_implied=False))
    elif name not in {"step", *ENDS, *KEPT_EVENTS}:
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


SILENCE = 120.0  # seconds without a line after which a run of quick steps counts as ended
LINE = re.compile(r"(?P<name>\w+): (?P<value>.*?)(?:  # (?P<source>[^#]*))?", re.DOTALL)
MAX_CHARACTERS, MAX_DEPTH = 300, 8  # limits of a value of the configuration


@dataclass(frozen=True)
class Run:
    """All records of one out_dir."""

    name: str
    run_dir: Path
    starts: list[Start]
    unread_lines: int

    @property
    def warnings(self) -> list[str]:
        """What of the records is damaged, a sentence for each file."""
        lines = left_out(self.unread_lines, self.run_dir / "metrics.jsonl")
        fault = self.config_fault
        return [*filter(None, (lines, fault and f"{self.run_dir / NAME} {fault}"))]

    @property
    def config_fault(self) -> str:
        """Why config.yaml is not as the run wrote it; empty if it is, or is missing."""
        config = self.run_dir / NAME
        return record_fault(config) if disk.exists(config) else ""

    def column(self, name: str) -> np.ndarray:
        """float64 (kept lines,)."""
        parts = [start.kept(name) for start in self.starts]
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
        events = [*self.events(name), *self.events(name, is_lost=True)]
        return sorted({number(event["step"]) for event in events})

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


def as_runs(histories: Sequence[History]) -> list[Run]:
    """Runs named by the last parts of their paths, as many as differ; a single run by two."""
    parts = [one.run_dir.absolute().parts for one in histories]
    depth = 2 if len(parts) == 1 else 1
    while len({path[-depth:] for path in parts}) < len(set(parts)):
        depth += 1
    names = ["/".join(path[-depth:]).removeprefix("//") or "/" for path in parts]
    return [
        Run(name, one.run_dir, one.starts, one.unread_lines)
        for name, one in zip(names, histories, strict=True)
    ]


def read_runs(run_dirs: Sequence[Path]) -> list[Run]:
    """All runs from their first line on. Raise UsageError for a folder that is no run."""
    histories = [*map(History, run_dirs)]
    for one in histories:
        if not one.exists:
            problem = "holds no metrics.jsonl" if disk.is_dir(one.run_dir) else "is no folder"
            raise UsageError(f"{one.run_dir} {problem}; give the --out_dir of a run")
        one.read()
    return as_runs(histories)


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
    for path in (run_dir / NAME, run_dir / "ds_config.resolved.json"):
        with storing(str(path), "correct its permissions"):
            texts.append(path.read_text("utf-8", "replace") if disk.is_file(path) else "")
    lines = re.sub(r"\n +", " ", texts[0]).splitlines()  # long values are wrapped
    flags = {}
    for match in filter(None, map(LINE.fullmatch, lines)):
        value = match["value"].strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1].replace("''", "'")
        value = masked(str(without_secret(match["name"], value)))
        flags[match["name"]] = (value[:MAX_CHARACTERS], (match["source"] or "").strip())
    try:
        content = json.loads(texts[1])
    except (ValueError, RecursionError):
        content = None
    is_object = isinstance(content, dict)
    return Configuration(flags, _flatten(masked_values(content)) if is_object else {})


def _flatten(content: dict[str, Any], prefix: str = "", depth: int = 0) -> dict[str, str]:
    values: dict[str, str] = {}
    for name, value in content.items():
        if isinstance(value, dict) and value and depth < MAX_DEPTH:
            values |= _flatten(value, f"{prefix}{name}.", depth + 1)
        else:
            values[f"{prefix}{name}"] = json.dumps(value)[:MAX_CHARACTERS]
    return values
