"""Trackers such as wandb and TensorBoard: told what metrics.jsonl is told, and never waited for.

Each is opened and spoken to by a thread of its own, so that neither a network nor a library can
hold up a step; and one that fails is left alone after one warning.
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
from minimind.runtime.durable_files import write_whole

FILE = "trackers.json"  # in out_dir: what a resumed run goes on under
KINDS = {"step": "train", "eval": "eval", "sample": "sample"}  # events, and what theirs are called
MOST_WAITING = 10_000  # lines that a tracker may be behind
FINISH = 30.0  # seconds that a tracker gets in the end
START = 30.0  # and in the beginning
LIBRARIES = {"tensorboard": "torch.utils.tensorboard"}  # that is not called as its tracker is


class Tracker:
    """One tracker, behind its thread."""

    def __init__(self, name: str, begin: Callable[[], Any]) -> None:
        self.name = name
        self._begin = begin
        self._lines: queue.Queue[tuple[dict[str, Any], int] | None] = queue.Queue(MOST_WAITING)
        self._is_lost = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, values: dict[str, Any], step: int) -> None:
        """Hand on one line."""
        if self._is_lost:
            return
        try:
            self._lines.put_nowait((values, step))
        except queue.Full:
            self._lose(f"is {MOST_WAITING:,} lines behind")

    def close(self, seconds: float) -> None:
        """Let it finish, so many seconds at most."""
        if not self._is_lost:
            self._lines.put(None)
            self._thread.join(seconds)
            if self._thread.is_alive():
                self._lose(f"did not finish in {seconds:g} s")

    def _work(self) -> None:
        try:
            tracker = self._begin()
            while (line := self._lines.get()) is not None and not self._is_lost:
                values, step = line
                tracker.log(values, step=step)
            tracker.finish()
        except (Exception, SystemExit) as error:  # of somebody else's library: training goes on
            self._lose(" ".join(str(error).split()) or type(error).__name__)

    def _lose(self, why: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            print(
                f"warning: tracker {self.name}: {why}; training goes on without it, and"
                " metrics.jsonl has everything",
                file=sys.stderr,
                flush=True,
            )


class Trackers:
    """All that --report_to names; none on other ranks than the first."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = tuple(trackers)

    def event(self, name: str, facts: Mapping[str, Any]) -> None:
        """Hand on an event of metrics.jsonl, if it is one with figures."""
        if self._trackers and name in KINDS:
            values = figures(KINDS[name], facts)
            for tracker in self._trackers:
                tracker.log(values, facts["step"])

    def close(self, seconds: float) -> None:
        """Let all finish, so many seconds at most each."""
        for tracker in self._trackers:
            tracker.close(seconds)
        self._trackers = ()


def figures(kind: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """`{"train/loss": 3.2, "eval/poems/val_loss": 3.1, ...}`: what is nested, by its path.

    `step` is the x axis, and `rows` a place in the data: neither is a curve. Null is left out.
    """
    if kind == "sample":
        return {f"sample/{facts['number']}": f"{facts['prompt']}{facts['text']}"}
    found: dict[str, Any] = {}

    def add(path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for name, inner in value.items():
                add(path if name == "by_source" else f"{path}/{name}", inner)
        elif isinstance(value, list | tuple):
            for number, inner in enumerate(value):
                add(f"{path}/{number}", inner)
        elif value is not None:
            found[path] = int(value) if isinstance(value, bool) else value

    add(kind, {name: value for name, value in facts.items() if name not in ("step", "rows")})
    return found


def open_trackers(run: RunConfig, step: int, config: Mapping[str, Any]) -> Trackers:
    """The trackers of a run that begins, or goes on, at `step`; on its first rank."""
    out_dir = Path(run.out_dir)
    names = run.trackers()
    own_id = _run_id(out_dir / FILE, is_new=step == 0) if "wandb" in names else ""
    return Trackers([Tracker(name, _beginner(name, run, step, own_id, config)) for name in names])


def _run_id(path: Path, is_new: bool) -> str:
    """What wandb calls the run; kept, so that a resumed run goes on as itself."""
    kept, own_id = None, secrets.token_hex(4)
    try:
        if path.exists() and not is_new:
            with suppress(ValueError):  # torn, or not ours: then it is another run there
                kept = json.loads(path.read_bytes())
        if isinstance(kept, dict) and isinstance(kept.get("wandb"), str):
            return kept["wandb"]
        write_whole(path, json.dumps({"wandb": own_id}).encode() + b"\n")
    except OSError as error:
        told = f"warning: {path}: {error.strerror}; a resumed run will be another one in wandb"
        print(told, file=sys.stderr, flush=True)
    return own_id


def _beginner(
    name: str, run: RunConfig, step: int, own_id: str, config: Mapping[str, Any]
) -> Callable[[], Any]:
    """Opens a tracker, when its thread is ready to wait for it."""
    out_dir = Path(run.out_dir)
    run_name = run.wandb_run_name or out_dir.resolve().name
    failed = _import_failure(name)

    def begin() -> Any:
        if failed:
            raise failed
        if name == "tensorboard":
            purge = {"purge_step": step + 1} if step else {}
            opened = open_tracker(name, "tensorboard", str(out_dir), purge)
            opened.writer.add_text("configuration", _markdown(config), step)
            return opened
        if name != "wandb":
            return open_tracker(name, run.wandb_project, str(out_dir), {})
        _require_key()
        settings = {"console": "off", "silent": True}
        settings |= {"init_timeout": START, "finish_timeout": FINISH}
        options = {"id": own_id, "resume": "allow", "name": run_name, "dir": str(out_dir)}
        options |= {"config": dict(config), "settings": settings}
        return open_tracker(name, run.wandb_project, str(out_dir), options)

    return begin


def _markdown(config: Mapping[str, Any]) -> str:
    """The configuration as a table of TensorBoard's text page."""
    rows = (f"| {name} | `{value}` |" for name, value in config.items() if value is not None)
    return "\n".join(["| flag | value |", "|---|---|", *rows])


def _import_failure(name: str) -> BaseException | None:
    """What is wrong with a library, which is imported here and not by several threads at once.

    CPython 3.11 counts how deep it parses for all threads together, and raises where two disagree.
    """
    try:
        importlib.import_module(LIBRARIES.get(name, name))
    except (Exception, SystemExit) as error:  # of somebody else's library, as in `Tracker`
        return error
    return None


def _require_key() -> None:
    """Nothing, or an error where wandb would ask a terminal for an API key."""
    import wandb

    is_online = wandb.setup().settings.mode in ("online", "shared")
    if is_online and not os.environ.get("WANDB_API_KEY") and not wandb.login(prompt=False):
        raise ConnectionError("has no API key (run `wandb login`, or set WANDB_MODE=offline)")
