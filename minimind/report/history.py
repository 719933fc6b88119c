"""Read metrics.jsonl: the starts of a run, one table of their lines, and its configuration."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minimind.config.names import no_run
from minimind.config.run_record import NAME, record_fault
from minimind.errors import HALVED, PREEMPTED, UsageError
from minimind.report.formats import PAUSES, PHASES
from minimind.runtime import disk
from minimind.runtime.console import CONSOLE
from minimind.runtime.durable_files import storing
from minimind.runtime.event_log import EventLog
from minimind.runtime.secret_keys import without_secret
from minimind.runtime.urls import masked, masked_values

LIMIT = 1e100  # larger values, and smaller inverses, would overflow in later arithmetic
MAX_EXPERTS = 8  # shown one by one; of more, the first and the range over all
COLUMNS = (
    *("step", "time", "loss", "lr", "grad_norm", "skipped", "tokens", "tokens_per_second"),
    *("cpu_percent", "host_memory_gib", "gpu_percent", "gpu_memory_gib"),
    *("mfu", "memory_mib", "step_ms", "comm_ms", *(f"{name}_ms" for name in (*PHASES, *PAUSES))),
)
ENDS = ("exit", "rolled_back")  # they end a start; after a rollback another one follows
SILENCE = 120.0  # seconds without a line after which a run of quick steps counts as ended
LINE = re.compile(r"(?P<name>\w+): (?P<value>.*?)(?:  # (?P<source>[^#]*))?", re.DOTALL)
MAX_CHARACTERS, MAX_DEPTH = 300, 8  # limits of a value of the configuration
CONSOLE_LINES, CONSOLE_BYTES = 200, 1 << 17  # of console.log the last ones
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[^\t\x20-\x7e\xa0-\U0010ffff]")


def number(value: Any, default: float = math.nan) -> float:
    """A JSON value as a float; `default` if it is no number, not finite or beyond `LIMIT`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    if abs(value) < 1 / LIMIT:
        return 0.0
    return float(value) if abs(value) < LIMIT else default


def _floats(names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), float)


TASK = _floats("value chance stderr questions")
MIXTURE = {"sizes": [int], "weights": [int]}
STAGE = _floats("rows_per_step max_seq_len tokens") | {"steps": [float, float]}
# Kinds of the fields that are read, as of `typed`. All events have a `time`, and fields `..._ms`.
EVENTS: dict[str, dict[str, Any]] = {
    "run_start": {
        **dict.fromkeys(("world_size", "parameters", "rows_per_epoch"), int),
        **dict.fromkeys(("tokens_per_step", "total_steps"), int),
        **dict.fromkeys(("dtype", "device", "backend"), str),
        "versions": {"*": str},
        "order": {"rows_per_step": int, "row_tokens": int, "mixture": (MIXTURE,)},
        "stages": [{**STAGE, "name": str, "sources": [{"name": str, "epochs": float}]}],
    },
    "exit": {"status": int, "code": str, "reason": str},
    "rolled_back": {"to": float},
    "patience_ran_out": {"total_steps": int},
    "eval": _floats("val_loss val_ppl val_bpb val_loss_se tokens rows held_out"),
    "scores": {"tasks": {"*": TASK}, "average": float, "seconds": float},
    "sample": {"number": int, "prompt": str, "text": str},
    "profile": {
        **_floats("steps"),
        **{f"{name}_ms": float for name in PHASES},
        "ranks": {"*": [float]},
    },
    "verdict": {"text": str},
    "floors": {
        **{"bits": {"*": float}, **_floats("rows trained repeated seen chance word_order")},
        **_floats("word_pairs own_unigram bytes_per_token document_tokens"),
    },
    "checkpoint_rejected": {"path": str, "file": str, "reason": str},
    "mirror_failed": {"reason": str},
    "checkpoint_fetched": {"url": str},
    "run_changed": {"changes": [str]},
    **{"checkpoint_saved": {}, "checkpoint_resharded": {}, "checkpoint_mirrored": {}},
    HALVED: _floats("micro_batch_rows most_rows"),
    **{"step_skipped": {}, "spike": {}, "spike_skipped": {}, "corruption": {}},
}
KEPT_EVENTS = {*EVENTS} - {*ENDS, "run_start", "patience_ran_out"}


def typed(value: Any, kind: Any) -> Any:
    """A value of JSON as a kind; raise TypeError, ValueError or AttributeError for another one.

    `float` is a number, NaN for null; `int` a number as it is written, or None; `str` a text. A
    list or dict has the kinds of its parts (`[one]` and `{"*": one}` that of all); null is an empty
    one, and None where the kind is in a tuple.
    """
    if kind is int or kind is float:
        if value is not None and type(value) is not float and type(value) is not int:
            raise TypeError
        return number(value) if kind is float else None if math.isnan(number(value)) else value
    if isinstance(kind, tuple):
        return None if value is None else typed(value, kind[0])
    if value is None:
        return "" if kind is str else type(kind)()
    if type(value) is not (kind if kind is str else type(kind)):
        raise TypeError
    if isinstance(kind, dict):
        kinds = dict.fromkeys(value, kind["*"]) if "*" in kind else kind
        return {**value, **{name: typed(value.get(name), one) for name, one in kinds.items()}}
    if isinstance(kind, list):
        kinds = kind * len(value) if len(kind) == 1 else kind
        return [typed(*pair) for pair in zip(value, kinds, strict=True)]
    return value


def read_event(line: dict[str, Any]) -> dict[str, Any]:
    """A line with every field of its event, of a step with `columns`; raise as `typed` does."""
    if line["event"] == "step":  # most lines by far
        known = [one if type(one) is float else typed(one, float) for one in map(line.get, COLUMNS)]
        columns = dict(zip(COLUMNS, known, strict=True))
        if math.isnan(columns["step"]):
            raise ValueError
        columns["is_clipped"] = float(line.get("clipped") is True)
        if "expert_load" in line:
            load, ends = (typed(line.get(f"expert_load{end}"), [float]) for end in ("", "_range"))
            columns |= {f"expert_{n}": one * len(load) for n, one in enumerate(load[:MAX_EXPERTS])}
            columns |= zip(("expert_least", "expert_most"), ends, strict=False)
        return {"event": "step", "columns": columns, **{n: columns[n] for n in ("step", "time")}}
    kinds = EVENTS[line["event"]]
    some = {n: kinds.get(n.removeprefix("ema_"), float) for n in line if n.startswith("ema_")}
    times = {name: float for name in line if name.endswith("_ms")}
    return typed(line, {"time": float, **kinds, **some, **times})


@dataclass(eq=False)
class Start:
    """The lines from one run_start to its exit or rollback, or to the next start after a crash.

    Lines beyond `cutoff`, the step from which a later start resumed, are lost: they took time but
    have no part in the model.
    """

    first_line: int  # in the table of the run
    facts: dict[str, Any] = field(default_factory=dict)  # fields of run_start, as far as they hold
    is_implied: bool = True  # run_start is missing from the file
    lines: int = 0
    first_step: float = math.inf  # the step it resumed from; infinite where it is unknown
    last_step: float = -math.inf  # of the last line
    first_time: float = math.nan  # unix seconds
    last_time: float = math.nan
    cutoff: float = math.inf
    events: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None

    @property
    def seconds(self) -> float:
        """From the first line to the last."""
        return number(self.last_time - self.first_time, 0.0)

    @property
    def lost_steps(self) -> int:
        """Steps beyond the cutoff."""
        last = self.last_step
        return 0 if last <= self.cutoff else int(last - max(self.cutoff, self.first_step))


class Run:
    """All records of one out_dir, read on from where the last `read` ended."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.log, self.name = run_dir, EventLog(run_dir / "metrics.jsonl"), ""
        self._clear()

    def _clear(self) -> None:
        self.starts: list[Start] = []
        # A value for each line, as far as any has one.
        self._table: dict[str, array[float]] = defaultdict(lambda: array("d"))

    @property
    def unread_lines(self) -> int:
        return self.log.unread

    @property
    def warnings(self) -> list[str]:
        """What of the records is damaged, a sentence for each file."""
        fault = self.config_fault
        return [*filter(None, (self.log.warning(), fault and f"{self.run_dir / NAME} {fault}"))]

    @property
    def config_fault(self) -> str:
        """Why config.yaml is not as the run wrote it; empty if it is, or is missing."""
        config = self.run_dir / NAME
        return record_fault(config) if disk.exists(config) else ""

    def read(self) -> bool:
        """Add the lines that were appended; return whether there were any, or the file is another.

        Raise StorageError.
        """
        before = self.log.position
        with storing(str(self.log.path), "correct its permissions"):
            if self.log.begins_anew():
                self._clear()
            for line in self.log.new():
                if line["event"] == "step" or line["event"] in EVENTS:
                    try:
                        self._add(read_event(line))
                    except (TypeError, ValueError, AttributeError):
                        self.log.unread += 1
        cutoff = math.inf
        for start in reversed(self.starts):
            start.cutoff, cutoff = cutoff, min(cutoff, start.first_step)
        return before != self.log.position

    def _add(self, event: dict[str, Any]) -> None:
        name, step, last = event["event"], event.get("step"), self.starts[-1:]
        if name == "run_start":
            first = float(step or 0)
            self.starts.append(Start(len(self._table["step"]), event, False, first_step=first))
        elif (
            not last
            or last[0].end is not None
            or (name == "exit" and event.get("started") is False)
            or (name == "step" and step is not None and step <= last[0].last_step)
        ):
            self.starts.append(Start(len(self._table["step"])))
        start, time = self.starts[-1], number(event.get("time"))
        if not (time <= start.last_time or math.isnan(time)):  # last_time may be NaN
            start.first_time = time if math.isnan(start.first_time) else start.first_time
            start.last_time = time
        if name == "step":
            self._add_step(start, event)
        elif name in ENDS:
            start.end = event
        elif name == "patience_ran_out":  # the run ends earlier than its start said
            start.facts = {**start.facts, "total_steps": event.get("total_steps")}
        elif name in KEPT_EVENTS:
            start.events.append(event)

    def _add_step(self, start: Start, line: dict[str, Any]) -> None:
        step = line["step"]
        if start.is_implied and start.lines < 2:  # one log interval before, or one step
            gap = step - start.last_step if start.lines else 1.0
            start.first_step = (start.last_step if start.lines else step) - gap
        for name, value in line["columns"].items():
            column = self._table[name]
            if len(column) < start.first_line + start.lines:  # the lines before had no such value
                column.extend([math.nan] * (start.first_line + start.lines - len(column)))
            column.append(value)
        start.lines, start.last_step = start.lines + 1, step

    def lines(self, name: str) -> np.ndarray:
        """float64 (lines,) of all lines, also the lost ones; NaN where missing.

        `taken` has the steps since the line before, `begins` where these begin, `seconds` the time
        of all starts up to a line, without the time between them.
        """
        recorded = self._table.get(name, ())
        if name in ("taken", "begins"):
            steps = self.lines("step")
            before = np.r_[0.0, steps[:-1]][: len(steps)]
            for start in self.starts:
                before[start.first_line : start.first_line + min(1, start.lines)] = start.first_step
            recorded = np.where(steps > before, steps - before, 1.0)
            recorded = recorded if name == "taken" else steps - recorded
        elif name == "seconds":
            pairs = zip(self.starts, self.begins, strict=True)
            shifts = [begin - start.first_time for start, begin in pairs]
            recorded = self.lines("time") + self._of_lines(shifts)
        values = np.full(len(self._table["step"]), np.nan)
        values[: len(recorded)] = recorded
        values[~(np.abs(values) < LIMIT)] = np.nan
        values[np.abs(values) < 1 / LIMIT] = 0.0
        return values

    @property
    def begins(self) -> list[float]:
        """Seconds of the starts before each start."""
        return np.cumsum([0.0, *(start.seconds for start in self.starts)])[:-1].tolist()

    @property
    def is_kept(self) -> np.ndarray:
        """bool (lines,)."""
        return self.lines("step") <= self._of_lines([start.cutoff for start in self.starts])

    def _of_lines(self, of_starts: Sequence[float]) -> np.ndarray:
        """float64 (lines,): the value of the start of each line."""
        return np.repeat(np.array(of_starts, float), np.array([s.lines for s in self.starts], int))

    def column(self, name: str) -> np.ndarray:
        """float64 (kept lines,)."""
        return self.lines(name)[self.is_kept]

    def has(self, name: str) -> bool:
        """Whether any line has a value of that name."""
        return bool(np.isfinite(self.lines(name)).any())

    def lost_lines(self) -> list[np.ndarray]:
        """For each start with lost lines the numbers of these, and of the line before them."""
        lost, rows = ~self.is_kept, ((s.first_line, s.first_line + s.lines) for s in self.starts)
        found = [(first, first + np.flatnonzero(lost[first:last])) for first, last in rows]
        return [np.arange(max(first, i[0] - 1), i[-1] + 1) for first, i in found if len(i)]

    def spent(self, starts: Sequence[Start], is_lost: bool = False) -> dict[str, float]:
        """Milliseconds of starts by phase and pause, with the pauses that `exit` records.

        `is_lost`: only what later starts took again.
        """
        weights = self.lines("taken")
        if is_lost:  # a line may begin before the cutoff
            cutoffs = self._of_lines([start.cutoff for start in self.starts])
            since = np.maximum(self.lines("begins"), cutoffs)
            weights = np.maximum(self.lines("step") - since, 0.0)
        weights *= self._of_lines([one in starts for one in self.starts])
        ends = [s.end for s in starts if s.end and (s.lost_steps or not is_lost)]
        return {
            name: float(np.nansum(self.lines(f"{name}_ms") * weights))
            + sum(end.get(f"{name}_ms", 0.0) for end in ends)
            for name in (*PHASES, *PAUSES)
        }

    def events(self, name: str, is_lost: bool = False) -> list[dict[str, Any]]:
        """Kept or lost events of that name; events without a step are left out."""
        return [
            event
            for start in self.starts
            for event in start.events
            if event["event"] == name
            and event.get("step") is not None
            and (event["step"] > start.cutoff) == is_lost
        ]

    def steps_of(self, name: str) -> list[int]:
        """Steps of kept and lost events of that name, each once."""
        return sorted({e["step"] for lost in (False, True) for e in self.events(name, lost)})

    def fact(self, name: str) -> Any:
        """`name` in the last run_start that has it, or None."""
        values = (start.facts.get(name) for start in reversed(self.starts))
        return next((value for value in values if value is not None), None)

    @property
    def own_loss(self) -> str:
        """The loss of the user's own that it trains with; empty for the cross-entropy."""
        identity = self.fact("identity")
        model = identity.get("model") if isinstance(identity, dict) else None
        return str(model.get("loss", "")) if isinstance(model, dict) else ""

    def figure(self, name: str) -> float:
        """The number `name` in the last run_start that has it, or NaN."""
        return number(self.fact(name))

    def tokens_at(self, steps: np.ndarray) -> np.ndarray:
        """Tokens trained on up to each step."""
        known, tokens = self.column("step"), self.column("tokens")
        finite = np.isfinite(tokens)
        if not finite.any():
            return steps * (self.fact("tokens_per_step") or 1.0)
        return np.interp(steps, np.r_[0.0, known[finite]], np.r_[0.0, tokens[finite]])

    @property
    def last_step(self) -> float:
        """The step of the last kept line, or of the last run_start."""
        kept, starts = self.column("step"), [start.first_step for start in self.starts]
        return float(kept[-1]) if len(kept) else max(filter(math.isfinite, starts), default=0.0)

    @property
    def pace(self) -> float:
        """Seconds between the last two lines of the last start; 0 without them."""
        times = self.lines("time")[self.starts[-1].first_line :][-2:]
        return float(np.nan_to_num(times[1] - times[0])) if len(times) == 2 else 0.0

    def outcomes(self, now: float) -> list[tuple[str, str]]:
        """For each start a kind and a sentence.

        Kinds: done, stopped, failed, crashed, halved, rolled back, running, silent.
        """
        return [self._outcome(start, now) for start in self.starts]

    def _outcome(self, start: Start, now: float) -> tuple[str, str]:
        end, is_last = start.end, start is self.starts[-1]
        for event in start.events if not is_last else ():
            if event["event"] == HALVED:  # and then an exit if the launcher has started the next
                rows, most = event["micro_batch_rows"], event["most_rows"]
                return "halved", f"out of memory with {rows:,.0f} rows at once, then {most:,.0f}"
        if end is None and not is_last:
            return "crashed", "crashed: no end recorded"
        if end is None:
            is_recent = now - start.last_time < max(SILENCE, 3 * self.pace)
            return ("running", "still running") if is_recent else ("silent", "no end recorded")
        if end["event"] == "rolled_back":
            step = number(end.get("step"))
            return "rolled back", f"spikes up to step {step:,.0f}, rolled back to {end['to']:,.0f}"
        status, reason = end["status"], end["reason"]
        if status in (0, PREEMPTED):
            kind, text = ("stopped", "stopped and saved") if status else ("done", "done")
            return kind, reason or text
        return "failed", f"status {status}, {end['code']}: {reason}"

    def marks(self, now: float) -> list[tuple[float, float, str, str]]:
        """Step, `seconds`, kind and label of each resume and of each end other than done."""
        marks: list[tuple[float, float, str, str]] = []
        world, before = None, ""
        for n, (start, (kind, _)) in enumerate(zip(self.starts, self.outcomes(now), strict=True)):
            size, first = start.facts.get("world_size"), start.first_step
            last, begin = max(first, start.last_step), self.begins[n]
            end = begin + start.seconds
            if n and math.isfinite(first) and not start.is_implied:
                verb = "resumed" if start.facts.get("resume_from") else "started anew"
                verb = "rolled back" if before == "rolled back" else verb
                change = f", {world} → {size} processes" if world not in (None, size) else ""
                marks.append((first, begin, "resume", f"{verb} at {first:,.0f}{change}"))
            world, before = start.facts.get("world_size") or world, kind
            if start.end and kind == "failed":
                marks.append((last, end, kind, f"failed ({start.end['code']}) at {last:,.0f}"))
            elif kind in ("crashed", "halved", "stopped"):
                marks.append((last, end, kind, f"{kind} at {last:,.0f}"))
        return [mark for mark in marks if math.isfinite(mark[0])]


def runs_of(run_dirs: Sequence[Path]) -> list[Run]:
    """Runs named by the last parts of their paths, as many as differ; a single run by two."""
    runs = [*map(Run, run_dirs)]
    parts = [one.absolute().parts for one in run_dirs]
    depth = 2 if len(parts) == 1 else 1
    while len({path[-depth:] for path in parts}) < len(set(parts)):
        depth += 1
    for run, path in zip(runs, parts, strict=True):
        run.name = "/".join(path[-depth:]).removeprefix("//") or "/"
    return runs


def read_runs(run_dirs: Sequence[Path]) -> list[Run]:
    """All runs from their first line on. Raise UsageError for a folder that is no run."""
    runs = runs_of(run_dirs)
    for run in runs:
        if not disk.is_file(run.log.path):
            if fault := no_run(run.run_dir):
                raise UsageError(fault)
            problem = "holds no metrics.jsonl" if disk.is_dir(run.run_dir) else "is not a folder"
            raise UsageError(f"{run.run_dir}: {problem}; give the --out_dir of a run")
        run.read()
    return runs


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


def console_size(run_dir: Path) -> int:
    """Bytes of the file that `read_console` reads; 0 without it."""
    try:
        return disk.stat(run_dir / CONSOLE).st_size
    except OSError:  # also of a file that was just renamed
        return 0


def read_console(run_dir: Path) -> list[str]:
    """The last lines that a run printed, without colors; empty without their file."""
    path, size, lines = run_dir / CONSOLE, 0, list[str]()
    with storing(str(path), "correct its permissions"), suppress(FileNotFoundError):
        if disk.is_file(path):
            with open(path, "rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - CONSOLE_BYTES))
                lines = file.read(CONSOLE_BYTES).decode("utf-8", "replace").split("\n")
    lines = lines[size > CONSOLE_BYTES :]  # without the one that is cut
    # A progress bar writes its line again after each carriage return.
    shown = [CONTROL.sub("", line.rstrip("\r").rpartition("\r")[2]).rstrip() for line in lines]
    return [masked(line) for line in shown if line][-CONSOLE_LINES:]


def _flatten(content: dict[str, Any], prefix: str = "", depth: int = 0) -> dict[str, str]:
    values: dict[str, str] = {}
    for name, value in content.items():
        if isinstance(value, dict) and value and depth < MAX_DEPTH:
            values |= _flatten(value, f"{prefix}{name}.", depth + 1)
        else:
            values[f"{prefix}{name}"] = json.dumps(value)[:MAX_CHARACTERS]
    return values
