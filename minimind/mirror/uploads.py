"""The thread that uploads checkpoints; training never waits for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimind.checkpoint.directory import MANIFEST, step_directory, step_of
from minimind.checkpoint.retention import (
    STAYS,
    VALIDATION,
    Rules,
    Saved,
    kept,
    saved_in,
    saved_of,
    saved_with,
)
from minimind.errors import CheckpointError, LockedError
from minimind.mirror.owner import Owner
from minimind.mirror.remote_run import ABANDONED, CHECKPOINTS, RemoteRun, by_step, complete
from minimind.runtime.locks import ReadLock, lock_for_reading

RUN_FILES = ("config.yaml", "ds_config.resolved.json", "tokenizer/*")


@dataclass(frozen=True)
class Waiting:
    """A checkpoint to upload; pruning passes it over while its lock is held."""

    path: Path
    lock: ReadLock | None
    good: int | None  # the last step at which a check for corruption passed


class Uploads:
    """Uploads one checkpoint at a time: the newest, and in turn the oldest missing there.

    Missing are those of out_dir that a rule keeps, saved while others were uploaded or could not
    be. They are found at a start and after each upload, so that a failure forgets none.
    """

    def __init__(self, remote: RemoteRun, owner: Owner, out_dir: Path, rules: Rules) -> None:
        self.remote = remote
        self.events: deque[tuple[str, dict[str, Any]]] = deque()  # for the run to log
        self.owner, self._out_dir, self._rules = owner, out_dir, rules
        self._changed = threading.Condition()
        self._waiting: Waiting | None = None  # the newest
        self._missing: list[Path] = []  # oldest first
        self._until = -1  # the step of the last offer: later ones are not reported yet
        self._unfit: set[Path] = set()  # damaged or unreadable here
        self._must_look = False  # for missing ones, at a start
        self._good: int | None = None  # that of the missing
        self._is_turn_of_missing = False
        self._uploading: Waiting | None = None
        self._last: int | None = None  # the step gone back to: later ones there are abandoned
        self._must_set_aside = False
        self._stale: Waiting | None = None  # the upload of such a later one
        self._is_over = False
        self._validated: set[int] = set()  # steps whose validations are there as they are here
        self._doubted: set[int] = set()  # and those in doubt that were reported
        self._copied: set[Path] = set()  # of RUN_FILES
        threading.Thread(target=self._work, daemon=True, name="mirror").start()

    def offer(self, path: Path, good: int | None) -> None:
        """Upload a published checkpoint soon; one that still waits gives way to it."""
        job = _locked(path, good)
        with self._changed:
            if job and not self._is_over:
                self._waiting, self._until = job, step_of(path)
                self._unfit.discard(path)
                self._changed.notify_all()

    def look(self, step: int, good: int | None) -> None:
        """Look soon for missing ones up to a step, that of a start, and upload them."""
        with self._changed:
            if not self._is_over:
                self._must_look, self._until, self._good = True, step, good
                self._changed.notify_all()

    def go_back(self, step: int) -> None:
        """Set checkpoints of later steps aside soon, and again before uploads if that fails."""
        with self._changed:
            if self._is_over:
                return
            self._last = step if self._last is None else min(step, self._last)
            self._must_set_aside = True
            self._until = min(step, self._until)
            self._missing = [path for path in self._missing if step_of(path) <= step]
            if self._waiting and step_of(self._waiting.path) > step:
                self._waiting = None
            if self._uploading and step_of(self._uploading.path) > step:
                self._stale = self._uploading
            self._changed.notify_all()

    def pending(self) -> list[int]:
        """The steps that are to be uploaded, lowest first."""
        with self._changed:
            return sorted({*map(step_of, self._pending())})

    def _pending(self) -> list[Path]:
        return [one.path for one in (self._uploading, self._waiting) if one] + self._missing

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is to be uploaded, for a time; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._must_set_aside or self._must_look or self._pending()), seconds
            )

    def close(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._is_over, self._waiting, self._missing = True, None, []
            self._must_look = self._must_set_aside = False
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._is_over
                        or self._must_set_aside
                        or self._must_look
                        or self._waiting
                        or self._missing
                    )
                )
                if self._is_over:
                    return
                is_free = not (self._must_set_aside or self._must_look)
                job = self._uploading = self._take() if is_free else None
            if job:
                self._good = job.good
                self._mirror(job)
            elif self._must_set_aside:
                self._set_aside()
            elif self._must_look:
                self._look()
            with self._changed:
                if job and job.lock:
                    job.lock.close()
                self._uploading = None
                self._changed.notify_all()

    def _take(self) -> Waiting | None:
        """The next one to upload; None if it was deleted meanwhile."""
        job, is_turn = self._waiting, self._is_turn_of_missing
        self._is_turn_of_missing = not is_turn
        if job and not (is_turn and self._missing):
            self._waiting = None
            return job
        return _locked(self._missing.pop(0), self._good)

    def _mirror(self, job: Waiting) -> None:
        """Upload a checkpoint and apply the rules; report what became of it."""
        step, started, what = step_of(job.path), time.perf_counter(), ""
        try:
            self.owner.require()
            self._abandon_later()
            self._copy_run_files()
            size = self.remote.upload(job.path, lambda: self._require_current(job))
            seconds = time.perf_counter() - started
            url = f"{self.remote.shown}/{CHECKPOINTS}/{job.path.name}"
            fields = {"step": step, "url": url, "bytes": size, "seconds": seconds}
            self.events.append(("checkpoint_mirrored", fields))
            what = "older checkpoints could not be deleted: "
            self._prune(job.good)
        except Exception as error:  # whatever it is: the run goes on, its checkpoints are on disk
            if job is self._stale:
                return
            self._forget_missing(job.path if isinstance(error, CheckpointError) else None)
            self._report_failure(step, what, error)

    def _set_aside(self) -> None:
        """Set aside what the run has gone back from; report it if that fails."""
        step = self._last
        try:
            self.owner.require()
            self._abandon_later()
        except Exception as error:
            what = "checkpoints of later steps could not be set aside, and must not be used: "
            self._report_failure(step or 0, what, error)
        with self._changed:
            self._must_set_aside = self._last not in (None, step)  # gone further back meanwhile

    def _look(self) -> None:
        """Find missing ones; report it if that fails."""
        step = self._until
        try:
            self.owner.require()
            self._find_missing(self._saved_there(by_step(self.remote.files())), self._good)
        except Exception as error:
            self._report_failure(step, "missing checkpoints could not be looked for: ", error)
        with self._changed:
            self._must_look = False

    def _report_failure(self, step: int, what: str, error: Exception) -> None:
        reason = f"{what}{str(error) or type(error).__name__}"
        self.events.append(("mirror_failed", {"step": step, "reason": reason}))
        if isinstance(error, LockedError):
            self.close()

    def _require_current(self, job: Waiting) -> None:
        """Raise before the checkpoint is complete if it is another's turn or it is abandoned."""
        self.owner.require()
        if job is self._stale:
            raise CheckpointError(f"{job.path}: the run has gone back from it")

    def _abandon_later(self) -> None:
        with self._changed:
            last = self._last
        if last is not None:
            abandon_after(self.remote, last)
            with self._changed:
                self._last = None if self._last == last else self._last

    def _copy_run_files(self) -> None:
        """Upload what identifies the run to a reader, once."""
        found = {path for name in RUN_FILES for path in self._out_dir.glob(name)}
        for path in sorted(found - self._copied):
            self.remote.put(path, path.relative_to(self._out_dir).as_posix())
            self._copied.add(path)

    def _prune(self, good: int | None) -> None:
        """Delete the checkpoints that no rule keeps, and what interrupted uploads left."""
        self.owner.require()
        files = by_step(self.remote.files())
        there = self._saved_there(files)
        reasons = kept([*there.values()], self._rules, good)
        for step, names in files.items():
            if not reasons.get(step) and ABANDONED not in names:
                self.remote.remove(step, names)
        self._find_missing(there, good)

    def _saved_there(self, files: dict[int, list[str]]) -> dict[int, Saved]:
        """The complete checkpoints of a list of files, by step."""
        found = {
            step: self._saved(step, VALIDATION in names)
            for step, names in files.items()
            if MANIFEST in names
        }
        for one in found.values() if self._rules.keep_best else ():
            if one.doubt and one.step not in self._doubted:
                self._doubted.add(one.step)
                reason = f"{VALIDATION} {one.doubt}; {STAYS}"
                self.events.append(("mirror_kept", {"step": one.step, "reason": reason}))
        return found

    def _find_missing(self, there: dict[int, Saved], good: int | None) -> None:
        """Look for checkpoints that are only here, which the rules would keep there, too."""
        root = self._out_dir / CHECKPOINTS
        both = {one.step: one for one in saved_in(root)} | there
        reasons = kept([*both.values()], self._rules, good)
        steps = [step for step in sorted(reasons) if reasons[step] and step not in there]
        with self._changed:
            paths = [step_directory(root, step) for step in steps if step <= self._until]
            others = {self._waiting.path if self._waiting else None, *self._unfit}
            self._missing = [path for path in paths if path not in others]

    def _forget_missing(self, unfit: Path | None) -> None:
        """After a failure, wait for the next save; try a damaged one again only as the newest."""
        with self._changed:
            self._missing = [path for path in self._missing if unfit and path != unfit]
            self._unfit |= {unfit} if unfit else set()

    def _saved(self, step: int, is_validated: bool) -> Saved:
        """A checkpoint there with its validation loss, which may be recorded after its upload."""
        local = step_directory(self._out_dir / CHECKPOINTS, step)
        name, own = f"{CHECKPOINTS}/{local.name}/{VALIDATION}", saved_of(local)
        if not own.doubt and (local / VALIDATION).is_file():
            content = (local / VALIDATION).read_bytes()
            # That of a copy is looked at once, and is written again if it is damaged.
            is_new = step not in self._validated and self.remote.read(name) != content
            if is_new or not is_validated:
                self.remote.write(name, content)
            self._validated.add(step)
            return own
        return saved_with(step, self.remote.read(name) or b"") if is_validated else own


def _locked(path: Path, good: int | None) -> Waiting | None:
    """A checkpoint that stays while it waits; None if it is being deleted."""
    try:
        lock = lock_for_reading(path / MANIFEST)
    except FileNotFoundError:
        return None
    return Waiting(path, lock, good) if path.is_dir() else None


def abandon_after(remote: RemoteRun, step: int) -> None:
    """Set aside the checkpoints of later steps, from which the run does not go on."""
    for other in complete(remote.files()):
        if other > step:
            remote.abandon(other)
