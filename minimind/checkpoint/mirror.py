"""The copy of a run at a URL of object storage: uploaded beside training, resumed from.

`mirror.json` there says which run it is of, and which start of it writes. A thread uploads, and
deletes what no rule keeps; training waits for it at the end of a run only.
"""

from __future__ import annotations

import json
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from minimind.checkpoint.directory import (
    MANIFEST,
    OWNER,
    Rejected,
    differences,
    first_damage,
    publish,
    published_checkpoints,
    step_directory,
    step_of,
    verify,
)
from minimind.checkpoint.remote_run import ABANDONED, CHECKPOINTS, RemoteRun, by_step, complete
from minimind.checkpoint.resume import Resumed
from minimind.checkpoint.retention import (
    STAYS,
    VALIDATION,
    Rules,
    Saved,
    kept,
    saved_in,
    saved_of,
    saved_with,
    with_doubts,
)
from minimind.config.flags import MIRROR_WAIT_S
from minimind.config.run_config import RunConfig
from minimind.errors import CheckpointError, LockedError, StorageError, UsageError
from minimind.report.run_logger import RunLogger
from minimind.runtime import disk
from minimind.runtime.checked_json import (
    CheckedJson,
    Unreadable,
    parse_object,
    read_object,
    validate,
)
from minimind.runtime.collectives import Ranks, on_rank_0, run_on_all_ranks
from minimind.runtime.drafts import draft_of, remove_left
from minimind.runtime.durable_files import (
    canonical_json,
    mebibytes,
    require_regular,
    storing,
    write_whole,
)
from minimind.runtime.locks import ReadLock, lock_for_reading
from minimind.runtime.terminal import phase, shorten_line

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
        self.events: deque[tuple[str, dict[str, Any]]] = deque()  # events for the run to log
        self.owner, self._out_dir, self._rules = owner, out_dir, rules
        self._changed = threading.Condition()
        self._waiting: Waiting | None = None  # the newest
        self._missing: list[Path] = []  # oldest first
        self._until = -1  # the step of the last offer: later ones are not reported yet
        self._unfit: set[Path] = set()  # damaged or unreadable here
        self._must_look = False  # whether to look for missing ones, at a start
        self._good: int | None = None  # `good` of the missing ones
        self._is_turn_of_missing = False
        self._uploading: Waiting | None = None
        self._last: int | None = None  # the step gone back to: later ones there are abandoned
        self._must_set_aside = False
        self._stale: Waiting | None = None  # the upload of such a later one
        self._is_over = False
        self._own: set[int] = set()  # steps that were uploaded by this process
        self._validated: set[int] = set()  # steps whose validations are there as they are here
        self._doubted: set[int] = set()  # steps in doubt that were reported
        self._copied: set[Path] = set()  # copied files of RUN_FILES
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
        """Look soon for missing checkpoints up to a step, at which the run starts; upload them."""
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
        return [job.path for job in (self._uploading, self._waiting) if job] + self._missing

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is to be uploaded, for a time; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._must_set_aside or self._must_look or self._pending()), seconds
            )

    def close(self) -> None:
        """Start no further upload."""
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
        step, started, prefix = step_of(job.path), time.perf_counter(), ""
        try:
            self.owner.require()
            self._abandon_later()
            self._copy_run_files()
            size = self.remote.upload(job.path, lambda: self._require_current(job))
            seconds = time.perf_counter() - started
            self._own.add(step)
            url = f"{self.remote.shown}/{CHECKPOINTS}/{job.path.name}"
            fields = {"step": step, "url": url, "bytes": size, "seconds": seconds}
            self.events.append(("checkpoint_mirrored", fields))
            prefix = "older checkpoints could not be deleted: "
            self._prune(job.good)
        except Exception as error:  # the checkpoints are on disk: no error of a copy ends a run
            if job is self._stale:
                return
            self._forget_missing(job.path if isinstance(error, CheckpointError) else None)
            self._report_failure(step, prefix, error)

    def _set_aside(self) -> None:
        """Set aside what the run has gone back from; report it if that fails."""
        step = self._last
        try:
            self.owner.require()
            self._abandon_later()
        except Exception as error:  # no error of a copy ends a run
            prefix = "checkpoints of later steps could not be set aside, and must not be used: "
            self._report_failure(step or 0, prefix, error)
        with self._changed:
            self._must_set_aside = self._last not in (None, step)  # gone further back meanwhile

    def _look(self) -> None:
        """Find missing ones; report it if that fails."""
        step = self._until
        try:
            self.owner.require()
            self._find_missing(self._saved_there(by_step(self.remote.files())), self._good)
        except Exception as error:  # no error of a copy ends a run
            self._report_failure(step, "missing checkpoints could not be looked for: ", error)
        with self._changed:
            self._must_look = False

    def _report_failure(self, step: int, prefix: str, error: Exception) -> None:
        reason = f"{prefix}{str(error) or type(error).__name__}"
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
        paths = {path for name in RUN_FILES for path in disk.matching(self._out_dir, name)}
        for path in sorted(paths - self._copied):
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
        # The file here of one of our own may be gone, with what the rules have deleted here.
        for saved in with_doubts([*found.values()], self._rules):
            if saved.step not in self._own:
                found[saved.step] = saved
        for saved in found.values() if self._rules.keep_best else ():
            if saved.doubt and saved.step not in self._doubted:
                self._doubted.add(saved.step)
                reason = f"{VALIDATION} {saved.doubt}; {STAYS}"
                self.events.append(("mirror_kept", {"step": saved.step, "reason": reason}))
        return found

    def _find_missing(self, there: dict[int, Saved], good: int | None) -> None:
        """Look for checkpoints that are only here, which the rules would keep there, too."""
        root = self._out_dir / CHECKPOINTS
        here = with_doubts(saved_in(root), self._rules)
        both = {saved.step: saved for saved in here} | there
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
        name, saved = f"{CHECKPOINTS}/{local.name}/{VALIDATION}", saved_of(local)
        if not saved.doubt and disk.is_file(local / VALIDATION):
            content = (local / VALIDATION).read_bytes()
            # The file of a copy is read once, and is written again if it is damaged.
            is_new = step not in self._validated and self.remote.read(name) != content
            if is_new or not is_validated:
                self.remote.write(name, content)
            self._validated.add(step)
            return saved
        return saved_with(step, self.remote.read(name) or b"") if is_validated else saved


def _locked(path: Path, good: int | None) -> Waiting | None:
    """A checkpoint that stays while it waits; None if it is being deleted."""
    try:
        lock = lock_for_reading(path / MANIFEST)
    except FileNotFoundError:
        return None
    return Waiting(path, lock, good) if disk.is_dir(path) else None


def abandon_after(remote: RemoteRun, step: int) -> None:
    """Set aside the checkpoints of later steps, from which the run does not go on."""
    for other in complete(remote.files()):
        if other > step:
            remote.abandon(other)


OF_AN_OUT_DIR = (".lock", "metrics.jsonl")  # both, since people copy one of them to a mirror
REMEDY = "give each run a --mirror of its own"


class Own(CheckedJson):
    """`mirror.json` in an out_dir."""

    run: Annotated[str, Field(min_length=1)]


class Claim(Own):
    """`mirror.json` at a URL."""

    identity: dict[str, dict[str, Any]]


def require_no_mirror(out_dir: Path, url: str | None) -> None:
    """Raise LockedError if out_dir is the mirror of a run, which would then be refused there.

    A copy of the mirror at `url`, the --mirror of this start, is none.
    """
    try:
        claim, _ = read_object(out_dir / OWNER)
    except CheckpointError:  # reported where it is used
        return
    if "identity" not in claim:
        return
    remote = RemoteRun(url) if url else None
    content = remote.read(OWNER) if remote else None
    if not remote or content is None or _parsed(remote, content)["run"] != claim.get("run"):
        raise LockedError(
            f"--out_dir {out_dir} is the --mirror of a run; go on with that run by an empty"
            f" --out_dir and --mirror file://{disk.resolve(out_dir)}, or give another --out_dir"
        )


def require_mirror(url: str, out_dir: Path, resume: str) -> None:
    """Raise StorageError unless a small file can be written, read and deleted at the URL.

    Raise UsageError if the URL is out_dir or in it, and LockedError, before anything is written,
    if it is neither empty nor a mirror that may be this run's.
    """
    remote, token = RemoteRun(url), secrets.token_hex(8)
    probe = draft_of(Path(".probe")).name
    if remote.folder and remote.folder.is_relative_to(disk.resolve(out_dir)):
        raise UsageError(
            f"--mirror {remote.shown} is in --out_dir {out_dir}, whose loss it is for; give another"
            " folder"
        )
    try:
        _claims(remote, out_dir, resume)
        if remote.folder:
            for folder in (remote.folder, *published_checkpoints(remote.folder / CHECKPOINTS)):
                remove_left(folder)
        remote.write(probe, token.encode())
        remote.delete(probe)
    except StorageError as error:  # show the URL as it was given
        raise StorageError(f"--mirror {str(error).replace(f'/{probe}', '')}") from error


class Owner:
    """The right of this start to write to a mirror."""

    def __init__(self, remote: RemoteRun, content: bytes) -> None:
        self._remote, self._content = remote, content

    def require(self) -> None:
        """Raise LockedError if another start has taken the mirror over, or trains in it."""
        _require_no_out_dir(self._remote)
        if self._remote.read(OWNER) != self._content:
            raise LockedError(f"{self._remote.shown}: another start writes there now; {REMEDY}")


def claim(
    remote: RemoteRun, out_dir: Path, resume: str, identity: dict[str, Any], allowed: Set[str]
) -> Owner:
    """Make this start the one that writes to the mirror; raise LockedError if it is another run's.

    An out_dir that is new, with `--resume auto`, takes over the run of the mirror if all that
    identifies a run (but the `allowed` groups) is the same.
    """
    url, (ours, there) = remote.shown, _claims(remote, out_dir, resume)
    if there and there["run"] != ours:
        changed = differences(there["identity"], identity)
        if refused := [str(change) for change in changed if change.group not in allowed]:
            text = shorten_line("; ".join(refused[:3]))
            raise LockedError(f"--mirror {url} is that of another run ({text}); {REMEDY}")
    run = ours or (there["run"] if there else secrets.token_hex(8))
    with storing(str(out_dir / OWNER), "correct the path of --out_dir"):
        write_whole(out_dir / OWNER, json.dumps({"run": run}).encode())
    facts = {"run": run, "start": secrets.token_hex(8), "identity": identity}
    content = json.dumps(facts, indent=1).encode()
    remote.write(OWNER, content)
    return Owner(remote, content)


def _claims(
    remote: RemoteRun, out_dir: Path, resume: str
) -> tuple[str | None, dict[str, Any] | None]:
    """The id of the run in out_dir, if it has one, and `mirror.json` at the URL, if that is empty.

    Raise LockedError if the URL has something else, or the mirror of another run than out_dir's.
    """
    url, ours = remote.shown, _read_own(out_dir / OWNER)
    _require_no_out_dir(remote)
    names, content = remote.names(), remote.read(OWNER)
    if content is None:
        if names:
            raise LockedError(
                f"--mirror {url} holds {names[0]!r} and is not the mirror of this run; give an"
                " empty place"
            )
        return ours, None
    there = _parsed(remote, content)
    if there["run"] != ours:
        if ours or resume != "auto" or published_checkpoints(out_dir / "checkpoints"):
            raise LockedError(
                f"--mirror {url} is that of another run than {out_dir}; go on with that one by"
                " --resume auto and an empty --out_dir, or give another --mirror"
            )
    return ours, there


def _require_no_out_dir(remote: RemoteRun) -> None:
    """Raise LockedError if a run trains, or has trained, in the folder of a file:// URL.

    Raise StorageError if it cannot be looked at.
    """
    if remote.folder is None:
        return
    with storing(remote.shown, "give another --mirror"):
        _require_none_in(remote.folder, remote.shown)


def _require_none_in(folder: Path, shown: str) -> None:
    paths = [folder / name for name in OF_AN_OUT_DIR]
    try:
        lock = lock_for_reading(paths[0])
    except FileNotFoundError:  # locked
        raise LockedError(
            f"--mirror {shown} is in use by a run as its --out_dir; {REMEDY}"
        ) from None
    if lock:
        lock.close()
    if all(disk.exists(path) for path in paths):
        raise LockedError(f"--mirror {shown} is the --out_dir of a run; {REMEDY}")


def _read_own(path: Path) -> str | None:
    """The id of the run in out_dir; None if it has none, or the file is damaged."""
    with storing(str(path), "move it away"):
        require_regular(path)
    try:
        found, _ = read_object(path)
        validate(Own, found)
    except Unreadable as error:
        raise StorageError(f"{path}: {error}; correct its permissions") from error
    except CheckpointError:
        return None
    return found["run"]


def _parsed(remote: RemoteRun, content: bytes) -> dict[str, Any]:
    """The content of `mirror.json` at a URL; raise LockedError if no mirror wrote it."""
    where = f"--mirror {remote.shown}: {OWNER} there"
    try:
        found = parse_object(content)
        validate(Own, found)
        if "identity" not in found:
            raise LockedError(f"{where} is that of an --out_dir; {REMEDY}")
        validate(Claim, found)
        canonical_json(found)
    except (CheckpointError, UnicodeEncodeError) as error:
        raise LockedError(
            f"{where} is not what a run writes ({error}); give an empty place"
        ) from error
    return found


class Mirror:
    """The uploads of rank 0 and their events; on other ranks, nothing."""

    def __init__(self, run: RunConfig, url: str, ranks: Ranks, logger: RunLogger) -> None:
        self.run, self.ranks, self.logger = run, ranks, logger
        self._url = url
        self._out_dir = Path(run.out_dir)
        self._root = self._out_dir / CHECKPOINTS
        self._uploads: Uploads | None = None
        self._resumed: Path | None = None  # the checkpoint of out_dir that was loaded
        self._is_only_here = False
        self._restored: list[tuple[str, dict[str, Any]]] = []  # events to log after run_start

    @phase("looking for a checkpoint at --mirror")
    def restore(self, identity: dict[str, Any]) -> Path | None:
        """Claim the URL, and fetch its newest checkpoint if none here is as new (collective).

        Return the newest checkpoint here whose files were verified for that.
        """
        url, run, ranks = self._url, self.run, self.ranks

        def begin() -> tuple[list[Path], list[int]]:
            remote = RemoteRun(url)
            owner = claim(remote, self._out_dir, run.resume, identity, run.allowed_changes())
            self._uploads = Uploads(remote, owner, self._out_dir, Rules.of(vars(run)))
            return published_checkpoints(self._root), complete(remote.files())

        local, steps = on_rank_0(ranks, begin)
        if run.resume != "auto" or not steps or not (valid := self._newest_here(local)):
            return None
        newest, damaged = valid
        later = [step for step in steps if step > newest]
        self._fetch(later, damaged, is_needed=newest < 0)
        return step_directory(self._root, newest) if newest >= 0 else None

    def fetch(self, steps: range) -> None:
        """Fetch the newest checkpoint of some steps, unless one here is as new (collective).

        After a start on an empty disk, those before that of the start are at the URL only.
        """
        local = on_rank_0(self.ranks, lambda: published_checkpoints(self._root))
        valid = self._newest_here([path for path in local if step_of(path) in steps])
        if valid is None or (valid[0] >= 0 and not valid[1]):
            return
        newest, damaged = valid

        def later() -> list[int]:
            assert self._uploads is not None  # this is rank 0
            there = complete(self._uploads.remote.files())
            return [step for step in there if step in steps and step > newest]

        self._fetch(on_rank_0(self.ranks, later), damaged, is_needed=False)
        self.report()

    def _newest_here(self, local: list[Path]) -> tuple[int, dict[int, Rejected]] | None:
        """Step of the newest valid checkpoint, else -1, and the damaged ones after it (collective).

        None if one cannot be read: it may be intact, and `resume` says so.
        """
        damaged: dict[int, Rejected] = {}
        for path in local:
            share = partial(verify, path, self.ranks.rank, self.ranks.world_size)
            bad = run_on_all_ranks(self.ranks, share, first_damage)
            if bad and bad.is_unreadable:
                return None
            if bad is None:
                return step_of(path), damaged
            damaged[step_of(path)] = bad
        return -1, damaged

    def _fetch(self, steps: list[int], damaged: dict[int, Rejected], is_needed: bool) -> None:
        """Publish the first of `steps` here that is not damaged there (collective)."""
        self._restored = on_rank_0(self.ranks, lambda: self._fetch_first(steps, damaged, is_needed))
        for name, fields in self._restored:
            self.logger.print(line_of(name, fields))

    def _fetch_first(
        self, steps: list[int], damaged: dict[int, Rejected], is_needed: bool
    ) -> list[tuple[str, dict[str, Any]]]:
        """Publish here the first of `steps` that is not damaged there; return the events.

        `damaged` are the damaged ones here, of which one of the same step is set aside. Raise
        CheckpointError if one is needed, and all are damaged.
        """
        assert self._uploads is not None  # this is rank 0
        remote = self._uploads.remote
        events: list[tuple[str, dict[str, Any]]] = []
        for step in steps:
            started, final = time.perf_counter(), step_directory(self._root, step)
            manifest = remote.read(f"{CHECKPOINTS}/{final.name}/{MANIFEST}")
            abandoned = disk.matching(self._root, f"abandoned-{final.name}*/{MANIFEST}")
            if any(path.read_bytes() == manifest for path in abandoned):
                continue  # the run has gone back from it
            tmp = final.with_name(f"{final.name}.tmp-{secrets.token_hex(4)}")
            url = f"{remote.shown}/{CHECKPOINTS}/{final.name}"
            with storing(str(tmp), "give another --out_dir"):
                bad = remote.fetch(step, tmp)
                if bad is None:
                    if own := damaged.get(step):
                        events.append(_rejection(str(final), own))
                    size = sum(disk.stat(path).st_size for path in disk.entries(tmp))
                    publish(tmp, final)
                    seconds = time.perf_counter() - started
                    fields = {"step": step, "url": url, "bytes": size, "seconds": seconds}
                    return [*events, ("checkpoint_fetched", fields)]
                shutil.rmtree(tmp)
            events.append(_rejection(url, bad))
        if events and is_needed:
            here = (_rejection(str(step_directory(self._root, n)), damaged[n]) for n in damaged)
            for name, fields in (*here, *events):
                self.logger.event(name, **fields)
            reasons = "; ".join(f"{e['path']}: {e['file']} {e['reason']}" for _, e in events)
            raise CheckpointError(
                f"no checkpoint can be used ({reasons}), and {self._root} has none; restore one, or"
                " start afresh in another folder with another --mirror"
            )
        return events

    def begin(self, resumed: Resumed) -> None:
        """Set aside at the URL what the run does not go on from (collective)."""

        def begin() -> None:
            if self._uploads is None:
                return
            self._uploads.owner.require()  # another start may have come since `restore`
            remote, step, path = self._uploads.remote, resumed.state.step, resumed.path
            is_own = path is not None and disk.resolve(path).parent == disk.resolve(self._root)
            abandon_after(remote, step if is_own else -1)
            if is_own:
                self._resumed, self._is_only_here = path, step not in complete(remote.files())

        on_rank_0(self.ranks, begin)

    def start(self, good: int | None) -> None:
        """Upload what is missing there, the resumed first; out_dir has its other files by now."""
        if self._uploads and self._resumed:
            if self._is_only_here:
                self._uploads.offer(self._resumed, good)
            else:
                self._uploads.look(step_of(self._resumed), good)

    def offer(self, path: str, good: int | None) -> None:
        """Upload a saved checkpoint in the background; call before it can be pruned."""
        if self._uploads:
            self._uploads.offer(Path(path), good)

    def go_back(self, step: int) -> None:
        """Set aside, in the background, checkpoints of later steps."""
        if self._uploads:
            self._uploads.go_back(step)

    def end_at(self, step: int) -> None:
        """Set aside checkpoints of later steps, and wait for that as `finish` does (collective)."""
        self.go_back(step)
        self.finish()

    def report(self) -> None:
        """Log what was fetched and uploaded, or was not; call after run_start is logged."""
        while self._restored:
            name, fields = self._restored.pop(0)
            self.logger.event(name, **fields)
        while self._uploads and self._uploads.events:
            name, fields = self._uploads.events.popleft()
            self.logger.event(name, **fields)
            self.logger.print(line_of(name, fields))

    def finish(self) -> None:
        """Wait for the uploads, up to MIRROR_WAIT_S (collective: other ranks wait here, too)."""
        on_rank_0(self.ranks, self._finish)
        self.report()

    def _finish(self) -> None:
        uploads = self._uploads
        if uploads is None:
            return
        if steps := uploads.pending():
            many = f"{len(steps)} checkpoints" if len(steps) > 1 else "its checkpoint"
            self.logger.print(
                f"step {steps[-1]}: waiting up to {MIRROR_WAIT_S} s for the upload of {many}"
            )
        elif not uploads.wait(0.0):
            self.logger.print(f"waiting up to {MIRROR_WAIT_S} s to upload what --mirror lacks")
        if not uploads.wait(MIRROR_WAIT_S):
            reason = f"not uploaded within {MIRROR_WAIT_S} s after the last step"
            for step in uploads.pending():
                uploads.events.append(("mirror_failed", {"step": step, "reason": reason}))
        uploads.close()

    def close(self) -> None:
        if self._uploads:
            self._uploads.close()


def _rejection(place: str, bad: Rejected) -> tuple[str, dict[str, Any]]:
    fields = {"path": place, "file": bad.file, "reason": bad.reason}
    return "checkpoint_rejected", fields


def line_of(name: str, fields: dict[str, Any]) -> str:
    """An event as a line for people."""
    if name == "checkpoint_rejected":
        return f"skipped checkpoint {fields['path']}: {fields['file']} {fields['reason']}"
    if name == "mirror_kept":
        return f"step {fields['step']}: --mirror keeps the checkpoint: {fields['reason']}"
    if name == "mirror_failed":
        return f"step {fields['step']}: checkpoint not mirrored: {fields['reason']}"
    verb, size = name.removeprefix("checkpoint_"), mebibytes(fields["bytes"])
    size_and_time = f"{size}, {fields['seconds']:.1f} s"
    return f"step {fields['step']}: checkpoint {verb} ({size_and_time}) {fields['url']}"
