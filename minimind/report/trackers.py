"""Experiment trackers such as wandb and TensorBoard.

Each runs in its own thread, so that neither the network nor a library can delay a step; one that
fails is disabled with one warning.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from minimind.config.run_config import RunConfig
from minimind.engine.build import open_tracker
from minimind.report.formats import score_values
from minimind.runtime import disk
from minimind.runtime.durable_files import write_whole
from minimind.runtime.urls import masked, masked_text

FILE = "trackers.json"  # in out_dir: a resumed run continues under this run id
NOT_PLOTTED = ("step", "rows", "stage")  # of an event
KINDS = {
    "step": "train",
    "eval": "eval",
    "sample": "sample",
    "scores": "scores",
}  # event: prefix of its values
MAX_QUEUED = 10_000  # lines that a tracker may be behind
FINISH = 30.0  # seconds that a tracker gets to finish
START = 30.0  # seconds that it gets to start
LIBRARIES = {"tensorboard": "torch.utils.tensorboard"}  # where the name is not the module


class Tracker:
    """One tracker and its thread."""

    def __init__(self, name: str, opener: Callable[[int], Any], step: int) -> None:
        """`opener` is called in the thread with the step at which the run resumes."""
        self.name = name
        self._open = opener
        self._lines: queue.Queue[tuple[dict[str, Any] | None, int] | None]
        self._lines = queue.Queue(MAX_QUEUED)
        self._is_disabled = False
        work = {"target": self._work, "args": (step,), "name": f"tracker-{name}"}
        self._thread = threading.Thread(**work, daemon=True)
        self._thread.start()

    def log(self, values: dict[str, Any] | None, step: int) -> None:
        """Queue one line of values; None: the run goes back to `step`."""
        if self._is_disabled:
            return
        try:
            self._lines.put_nowait((values, step))
        except queue.Full:
            self._disable(f"is {MAX_QUEUED:,} lines behind")

    def close(self, seconds: float) -> None:
        """Wait for it to finish, at most `seconds`."""
        if not self._is_disabled:
            self._lines.put(None)
            self._thread.join(seconds)
            if self._thread.is_alive():
                self._disable(f"did not finish in {seconds:g} s")

    def _work(self, step: int) -> None:
        try:
            tracker = self._open(step)
            while (line := self._lines.get()) is not None and not self._is_disabled:
                values, step = line
                if values is None:
                    tracker.finish()
                    tracker = self._open(step)
                else:
                    tracker.log(values, step=step)
            tracker.finish()
        except (Exception, SystemExit) as error:  # a library may raise anything
            self._disable(masked_text(" ".join(str(error).split())) or type(error).__name__)

    def _disable(self, why: str) -> None:
        if not self._is_disabled:
            self._is_disabled = True
            print(
                f"warning: tracker {self.name}: {why}; training continues without it, and"
                " metrics.jsonl has everything",
                file=sys.stderr,
                flush=True,
            )


class Trackers:
    """All trackers of --report_to, on rank 0."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Log an event of metrics.jsonl if its kind is in KINDS."""
        if name in KINDS:
            values = tracker_values(KINDS[name], fields)
            for tracker in self._trackers:
                tracker.log(values, fields["step"])

    def go_back(self, step: int) -> None:
        """Go on from an earlier step, as a run does that resumes there."""
        for tracker in self._trackers:
            if tracker.name != "wandb":  # one run can go on, see `_Wandb`
                tracker.log(None, step)

    def close(self, seconds: float) -> None:
        """Wait for all to finish, at most `seconds` each, and no longer than FINISH."""
        for tracker in self._trackers:
            tracker.close(min(FINISH, seconds))
        self._trackers = ()


def tracker_values(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten an event: `{"train/loss": 3.2, "eval/poems/val_loss": 3.1, ...}`.

    `step` is the x axis, `rows` a position in the data and `stage` a name, so none is logged. Nulls
    are dropped.
    """
    if kind == "sample":
        return {f"sample/{fields['number']}": f"{fields['prompt']}{fields['text']}"}
    if kind == "scores":
        found = {f"scores/{name}": value for name, value, *_ in score_values(fields)}
        return {**found, "scores/seconds": fields["seconds"]}
    values: dict[str, Any] = {}

    def add(path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for name, inner in value.items():
                add(path if name == "by_source" else f"{path}/{name}", inner)
        elif isinstance(value, list | tuple):
            for number, inner in enumerate(value):
                add(f"{path}/{number}", inner)
        elif value is not None:
            values[path] = int(value) if isinstance(value, bool) else value

    add(kind, {name: value for name, value in fields.items() if name not in NOT_PLOTTED})
    return values


def open_trackers(run: RunConfig, step: int, config: Mapping[str, Any]) -> Trackers:
    """Open the trackers of a run that starts or resumes at `step` (rank 0 only)."""
    out_dir = Path(run.out_dir)
    names = run.trackers()
    # wandb and others store the command line; this program has parsed it already.
    sys.argv[1:] = map(masked, sys.argv[1:])
    run_id = _run_id(out_dir / FILE, is_new=step == 0) if "wandb" in names else ""
    openers = {name: _opener(name, run, run_id, config) for name in names}
    return Trackers([Tracker(name, opener, step) for name, opener in openers.items()])


def _run_id(path: Path, is_new: bool) -> str:
    """Return the wandb run id, stored in out_dir so that a resumed run continues it."""
    stored, run_id = None, secrets.token_hex(4)
    try:
        if disk.exists(path) and not is_new:
            with suppress(ValueError):  # damaged: the run starts as a new one in wandb
                stored = json.loads(path.read_bytes())
        if isinstance(stored, dict) and isinstance(stored.get("wandb"), str):
            return stored["wandb"]
        write_whole(path, json.dumps({"wandb": run_id}).encode() + b"\n")
    except OSError as error:
        message = f"warning: {path}: {error.strerror}; a resumed run will be a new one in wandb"
        print(message, file=sys.stderr, flush=True)
    return run_id


class _Wandb:
    """Steps are a metric of their own: wandb ignores values below its own last step."""

    def __init__(self, tracker: Any, step: int) -> None:
        self._tracker, self.finish = tracker, tracker.finish
        tracker.run.define_metric("*", step_metric="step")
        # A run that resumed from an older checkpoint has logged more.
        self._last, self._ahead = step, max(0, tracker.run.starting_step - step - 1)

    def log(self, values: dict[str, Any], step: int) -> None:
        if step < self._last:  # the run has gone back
            self._ahead += self._last - step + 1
        self._last = step
        self._tracker.log({**values, "step": step}, step=step + self._ahead)


def _opener(
    name: str, run: RunConfig, run_id: str, config: Mapping[str, Any]
) -> Callable[[int], Any]:
    """Return a function that opens the tracker from a step on, called in the tracker's thread."""
    out_dir = Path(run.out_dir)
    run_name = run.wandb_run_name or disk.resolve(out_dir).name
    import_error = _import_error(name)

    def open_it(step: int) -> Any:
        if import_error:
            raise import_error
        if name == "tensorboard":
            purge = step + 1 if step else 0  # also what another run in this folder wrote
            opened = open_tracker(name, "tensorboard", str(out_dir), {"purge_step": purge})
            opened.writer.add_text("configuration", _markdown(config), step)
            return opened
        if name != "wandb":  # only dvclive and wandb can resume a run
            kept = {"resume": step > 0} if name == "dvclive" else {}
            return open_tracker(name, run.wandb_project, str(out_dir), kept)
        _require_key()
        settings = {"console": "off", "silent": True}
        settings |= {"init_timeout": START, "finish_timeout": FINISH}
        options = {"id": run_id, "resume": "allow", "name": run_name, "dir": str(out_dir)}
        options |= {"config": dict(config), "settings": settings}
        return _Wandb(open_tracker(name, run.wandb_project, str(out_dir), options), step)

    return open_it


def _markdown(config: Mapping[str, Any]) -> str:
    """The configuration as a Markdown table, for TensorBoard's text page."""
    rows = (f"| {name} | `{value}` |" for name, value in config.items() if value is not None)
    return "\n".join(["| flag | value |", "|---|---|", *rows])


def _import_error(name: str) -> BaseException | None:
    """Import the tracker's library; return the exception if that fails.

    Imported here and not in the threads: CPython 3.11 counts the parser's recursion depth for all
    threads together and raises if two of them disagree.
    """
    try:
        importlib.import_module(LIBRARIES.get(name, name))
    except (Exception, SystemExit) as error:  # a foreign library raises anything, as in `Tracker`
        return error
    return None


def _require_key() -> None:
    """Raise ConnectionError where wandb would prompt for an API key."""
    import wandb

    is_online = wandb.setup().settings.mode in ("online", "shared")
    if is_online and not os.environ.get("WANDB_API_KEY") and not wandb.login(prompt=False):
        raise ConnectionError("has no API key (run `wandb login`, or set WANDB_MODE=offline)")
