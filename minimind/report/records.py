"""Read the files of a run: the starts in metrics.jsonl, the flags in config.yaml.

metrics.jsonl may be left by a crash: torn lines, null, missing or malformed fields and unknown events
are skipped; lines that are no JSON object are counted.
"""

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

from minimind.errors import UsageError
from minimind.runtime.durable_files import storing

PHASES = ("data", "forward", "backward", "optimizer")
PAUSES = ("evaluate", "checkpoint", "sample", "trace", "gc")
LIMIT = 1e100  # larger values, and smaller inverses, would overflow in later arithmetic
MAX_EXPERTS = 8  # shown one by one; beyond, only the range over all of them
NAMES = (
    *("step", "time", "loss", "lr", "grad_norm", "tokens", "tokens_per_second"),
    *("mfu", "memory_mib", "step_ms", "comm_ms"),
    *(f"{name}_ms" for name in (*PHASES, *PAUSES)),
)
LINE = re.compile(r"(?P<name>\w+): (?P<value>.*?)(?:  # (?P<source>[^#]*))?", re.DOTALL)
MAX_CHARACTERS = 300  # of a value of the configuration
MAX_DEPTH = 8  # of objects in the DeepSpeed file
KEPT_EVENTS = {
    *("eval", "checkpoint_saved", "checkpoint_rejected", "checkpoint_resharded"),
    *("run_changed", "step_skipped", "sample", "profile"),
}


@dataclass
class Start:
    """The lines from one run_start to its exit, or to the next start after a crash."""

    facts: dict[str, Any] = field(default_factory=dict)  # of run_start
    is_implied: bool = True  # its run_start is missing: torn, or never written
    events: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    last_time: float = math.nan
    _columns: dict[str, array[float]] = field(
        default_factory=lambda: defaultdict(lambda: array("d"))
    )

    @property
    def first_step(self) -> float:
        """The step it resumed from; infinite where it is unknown."""
        steps = self.column("step")
        if self.is_implied and len(steps):  # one log interval before the first line, or one step
            return float(steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1.0))
        return number(self.facts.get("step"), math.inf if self.is_implied else 0.0)

    @property
    def last_step(self) -> float:
        """The step of the last line; minus infinity without lines."""
        steps = self._columns["step"]
        return steps[-1] if steps else -math.inf

    @property
    def first_time(self) -> float:
        """Unix seconds of run_start, or of the first line there is."""
        times = self.column("time")
        started = number(self.facts.get("time"))
        if math.isfinite(started):
            return started
        return float(times[0]) if len(times) else self.last_time

    def add_step(self, line: dict[str, Any]) -> None:
        """Append the values of a step line."""
        rows = len(self._columns["step"])
        for name in NAMES:
            self._append(name, line.get(name), rows)
        self._append("is_clipped", float(line.get("clipped") is True), rows)
        for name, value in _expert_load(line).items():
            self._append(name, value, rows)

    def _append(self, name: str, value: Any, rows: int) -> None:
        column = self._columns[name]
        if len(column) < rows:  # the lines before had no such value
            column.extend([math.nan] * (rows - len(column)))
        column.append(value if type(value) is float else number(value))

    def column(self, name: str) -> np.ndarray:
        """float64 (step lines,), NaN where a value is missing."""
        values = np.full(len(self._columns["step"]), np.nan)
        recorded = self._columns.get(name, array("d"))
        values[: len(recorded)] = recorded
        values[~(np.abs(values) < LIMIT)] = np.nan
        values[np.abs(values) < 1 / LIMIT] = 0.0
        return values


@dataclass(frozen=True)
class Records:
    """The starts of a run in file order, and the number of unreadable lines."""

    run_dir: Path
    starts: list[Start]
    unread_lines: int


def number(value: Any, default: float = math.nan) -> float:
    """A JSON value as a float; `default` if it is no number, not finite or beyond `LIMIT`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    if abs(value) < 1 / LIMIT:
        return 0.0
    return float(value) if abs(value) < LIMIT else default


def read_records(run_dir: Path) -> Records:
    """Read `run_dir`/metrics.jsonl line by line. Raise UsageError if there is none."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        problem = "holds no metrics.jsonl" if run_dir.is_dir() else "is no folder"
        raise UsageError(f"{run_dir} {problem}; give the --out_dir of a run")
    starts: list[Start] = []
    unread = 0
    with storing(str(path), "mend its rights"), open(path, "rb") as file:
        for raw in file:
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError):
                line = None
            if isinstance(line, dict):
                _add_line(starts, line)
            elif raw.endswith(b"\n") and raw.strip():  # a partial last line may still be written
                unread += 1
    return Records(run_dir, starts, unread)


def _add_line(starts: list[Start], line: dict[str, Any]) -> None:
    name = line.get("event")
    if name == "run_start":
        starts.append(Start(line, is_implied=False))
    elif not isinstance(name, str) or name not in {"step", "exit", *KEPT_EVENTS}:
        return
    elif not starts or starts[-1].end is not None or _begins_another(starts[-1], line):
        starts.append(Start())
    start = starts[-1]
    now = number(line.get("time"))
    if math.isfinite(now) and not now <= start.last_time:  # last_time may be NaN
        start.last_time = now
    if name == "step" and math.isfinite(number(line.get("step"))):
        start.add_step(line)
    elif name == "exit":
        start.end = line
    elif name in KEPT_EVENTS:
        start.events.append(line)


def _begins_another(start: Start, line: dict[str, Any]) -> bool:
    """Whether `line` follows a run_start that is missing from the file."""
    if line["event"] == "exit":
        return line.get("started") is False
    return line["event"] == "step" and number(line.get("step")) <= start.last_step


def _expert_load(line: dict[str, Any]) -> dict[str, float]:
    """Load of each expert and their range, as multiples of an even share."""
    load, bounds = line.get("expert_load"), line.get("expert_load_range")
    values: dict[str, float] = {}
    if isinstance(load, list):
        shares = enumerate(load[:MAX_EXPERTS])
        values = {f"expert_{n}": number(share) * len(load) for n, share in shares}
    if isinstance(bounds, list) and len(bounds) == 2:
        values |= {"expert_least": number(bounds[0]), "expert_most": number(bounds[1])}
    return values


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
    joined = re.sub(r"\n +", " ", _read_text(run_dir / "config.yaml"))  # long values are wrapped
    lines = [match for line in joined.splitlines() if (match := LINE.fullmatch(line))]
    flags = {
        m["name"]: (_unquote(m["value"].strip())[:MAX_CHARACTERS], (m["source"] or "").strip())
        for m in lines
    }
    try:
        content = json.loads(_read_text(run_dir / "ds_config.resolved.json"))
    except (ValueError, RecursionError):
        content = None
    return Configuration(flags, _flatten(content) if isinstance(content, dict) else {})


def flag_differences(configurations: Sequence[Configuration]) -> list[tuple[str, list[str]]]:
    """Flags whose values differ between runs, with the value in each; out_dir excepted."""
    names = dict.fromkeys(name for one in configurations for name in one.flags)
    rows = [(name, [one.flags.get(name, ("",))[0] for one in configurations]) for name in names]
    return [(name, values) for name, values in rows if name != "out_dir" and len({*values}) > 1]


def _read_text(path: Path) -> str:
    if not path.is_file():
        return ""
    with storing(str(path), "mend its rights"):
        return path.read_text(encoding="utf-8", errors="replace")


def _unquote(value: str) -> str:
    """A YAML scalar without its quotes: `'off'` is off."""
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1].replace("''", "'") if is_quoted else value


def _flatten(content: dict[str, Any], prefix: str = "", depth: int = 0) -> dict[str, str]:
    values: dict[str, str] = {}
    for name, value in content.items():
        if isinstance(value, dict) and value and depth < MAX_DEPTH:
            values |= _flatten(value, f"{prefix}{name}.", depth + 1)
        else:
            values[f"{prefix}{name}"] = json.dumps(value)[:MAX_CHARACTERS]
    return values
