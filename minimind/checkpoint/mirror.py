"""The copy of a run at a URL of object storage: uploaded beside training, resumed from.

`changes` compares what is here with what is there. `mirror.json` there says which run it is of, and
which start of it writes. A thread applies the changes; training waits for it at the end only.
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from minimind.checkpoint.directory import (
    MANIFEST,
    OWNER,
    AllDamaged,
    Rejected,
    differences,
    newest_valid,
    publish,
    published_checkpoints,
    step_directory,
    step_of,
)
from minimind.checkpoint.remote_run import ABANDONED, CHECKPOINTS, RemoteRun, folder_of
from minimind.checkpoint.resume import Resumed, verify_on_all_ranks
from minimind.checkpoint.retention import (
    STAYS,
    VALIDATION,
    Rules,
    Saved,
    kept,
    saved_in,
    saved_with,
    unknown,
)
from minimind.config.flags import MIRROR_WAIT_S
from minimind.config.run_config import RunConfig
from minimind.errors import CheckpointError, LockedError, StorageError, UsageError
from minimind.report.formats import skipped
from minimind.report.run_logger import RunLogger
from minimind.runtime import disk
from minimind.runtime.checked_json import (
    CheckedJson,
    Unreadable,
    parse_object,
    read_object,
    validate,
)
from minimind.runtime.collectives import Ranks, on_rank_0
from minimind.runtime.drafts import draft_of, remove_left
from minimind.runtime.durable_files import (
    canonical_json,
    mebibytes,
    require_regular,
    storing,
    write_whole,
)
from minimind.runtime.locks import lock_for_reading
from minimind.runtime.terminal import phase, shorten_line

RUN_FILES = ("config.yaml", "ds_config.resolved.json", "tokenizer/*")
MOST_UPLOADS = 2  # between two comparisons: saves that come faster do not hold up older ones


@dataclass(frozen=True)
class Change:
    """What a mirror lacks, or has too much, of the checkpoint of a step."""

    what: Literal["look", "abandon", "record", "delete", "upload"]
    step: int


FAILED = {  # what a failure of a change means
    "abandon": "checkpoints of later steps could not be set aside, and must not be used: ",
    "record": f"{VALIDATION} could not be copied: ",
    "delete": "older checkpoints could not be deleted: ",
}


def both_know(here: Mapping[int, Saved], there: Mapping[int, Saved | None]) -> dict[int, Saved]:
    """The complete checkpoints there, with the values that either side knows."""
    found = {step: saved for step, saved in there.items() if saved}
    for step, own in here.items():
        if (other := found.get(step)) and (own.value is not None or other == Saved(step)):
            found[step] = own
    return found


def changes(
    here: Mapping[int, Saved],
    there: Mapping[int, Saved | None],
    rules: Rules,
    good: int | None,
    last: int,
) -> list[Change]:
    """What makes the mirror have what the rules keep of the run's steps up to `last`, in order.

    In `there`, None stands for a checkpoint that is not complete. Uploads come last: first that of
    the step `last`, then the others from the oldest on.
    """
    here = {step: saved for step, saved in here.items() if step <= last}
    complete = both_know(here, there)
    later = [step for step in complete if step > last]
    known = {step: saved for step, saved in complete.items() if step <= last}
    wanted = kept((here | known).values(), rules, good)
    missing = [step for step in wanted if wanted[step] and step not in known]
    stays = kept(known.values(), rules, good)
    # What stays here since its value is unknown stays there, too.
    needed = {*missing, *later, *unknown(here.values(), rules)}
    gone = [step for step in there if step not in needed and not stays.get(step)]
    values = {step: saved for step, saved in here.items() if saved.value is not None}
    fresh = [step for step in known if step in values and values[step] != there[step]]
    return [
        *(Change("abandon", step) for step in sorted(later)),
        *(Change("record", step) for step in sorted(fresh)),
        *(Change("delete", step) for step in sorted(gone)),
        *(Change("upload", step) for step in sorted(missing, key=lambda s: (s != last, s))),
    ]


class Uploads:
    """A thread that has the mirror follow out_dir; what fails waits for the next save."""

    def __init__(self, remote: RemoteRun, claimed: bytes, out_dir: Path, rules: Rules) -> None:
        self.remote = remote
        self.events: deque[tuple[str, dict[str, Any]]] = deque()  # events for the run to log
        self._claimed, self._out_dir, self._rules = claimed, out_dir, rules
        self._root = out_dir / CHECKPOINTS
        self._changed = threading.Condition()
        self._begun = -1  # the step of this start; later ones that are gone here, the rules deleted
        self._last = -1  # the newest step that is reported
        self._back: int | None = None  # the step gone back to, until the mirror has followed
        self._good: int | None = None  # the last step at which a check for corruption passed
        self._has_saved = False  # a start that saves nothing deletes nothing
        self._is_dirty = self._is_over = False
        self._todo: list[Change] | None = None  # what the thread does, if it works
        self._tried: set[Change] = set()  # since the thread was last woken
        self._unfit: set[int] = set()  # damaged or unreadable here
        self._records: dict[int, bytes] = {}  # texts of VALIDATION there, once read
        self._has_files = False  # whether RUN_FILES are there
        threading.Thread(target=self._work, daemon=True, name="mirror").start()

    def begin(self, step: int) -> None:
        """Set aside there what a start at `step` does not go on from."""
        require_owner(self.remote, self._claimed)  # another start may have come since
        self._begun = self._last = step
        here, there = self._listings()
        for change in changes(here, there, self._rules, None, step):
            if change.what == "abandon":
                self.remote.abandon(change.step)
        own = [saved for saved in both_know(here, there).values() if saved.step <= step]
        for other, why in unknown(own, self._rules).items():
            reason = f"{VALIDATION} {why}; {STAYS}"
            self.events.append(("mirror_kept", {"step": other, "reason": reason}))

    def look(self, good: int | None = None) -> None:
        """Upload soon what the mirror lacks."""
        with self._changed:
            self._good = self._good if good is None else good
            self._wake()

    def offer(self, step: int, good: int | None) -> None:
        """Upload a published checkpoint soon, and delete there what no rule keeps."""
        with self._changed:
            self._last, self._good, self._has_saved = step, good, True
            self._unfit.discard(step)
            self._wake()

    def go_back(self, step: int) -> None:
        """Set checkpoints of later steps aside soon, before anything else is done."""
        with self._changed:
            self._last, self._begun = step, min(step, self._begun)
            self._back = step if self._back is None else min(step, self._back)
            self._wake()

    def _wake(self) -> None:
        self._is_dirty = not self._is_over
        self._changed.notify_all()

    def pending(self) -> list[Change]:
        """What is to be done, as far as that is known; "look" if that is not."""
        with self._changed:
            if self._back is not None:
                return [Change("abandon", self._back)]
            todo = [*(self._todo or [])]
            if self._is_dirty:  # it looks again, at what is there then
                todo = [one for one in todo if one.what != "look"] + [Change("look", self._last)]
            return todo

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is to be done, for a time; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._is_dirty and self._todo is None, seconds
            )

    def close(self) -> None:
        """Start no further upload."""
        with self._changed:
            self._is_over = True
            self._wake()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._todo = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_dirty or self._is_over)
                if self._is_over:
                    return
                self._todo = []
            try:
                while self._follow():
                    pass
            except Exception as error:  # the checkpoints are on disk: no error of a copy ends a run
                self._report_failure(self._todo[0], error)

    def _follow(self) -> bool:
        """Make the changes that are due; return whether to compare again.

        Each change is tried once, though a listing may not show it yet; the next save tries again.
        """
        with self._changed:
            if self._is_dirty:
                self._tried.clear()
            self._is_dirty, good, back = False, self._good, self._back
            last = self._last if back is None else back
            self._todo = todo = [Change("look" if back is None else "abandon", last)]
        require_owner(self.remote, self._claimed)
        found = changes(*self._listings(), self._rules, good, last)
        if back is not None:
            found = [change for change in found if change.what == "abandon"]
        elif not self._has_saved:
            found = [change for change in found if change.what != "delete"]
        tried = self._tried | {Change("upload", step) for step in self._unfit}
        todo[:] = [change for change in found if change not in tried]
        uploads = 0
        while todo and uploads < MOST_UPLOADS and self._back == back and not self._is_over:
            change = todo[0]
            self._tried.add(change)
            try:
                uploads += self._apply(change)
                done = [change]
            except Exception as error:  # of any storage; no error of these two holds up an upload
                if change.what not in ("record", "delete"):
                    raise
                self._report_failure(change, error)
                done = [other for other in todo if other.what == change.what]
                self._tried.update(done)
            todo[:] = [other for other in todo if other not in done]
        with self._changed:
            self._back = None if self._back == back else self._back
        return (back is not None or uploads > 0) and not self._is_over

    def _apply(self, change: Change) -> bool:
        """Make a change; return whether it was an upload."""
        step = change.step
        self._records.pop(step, None)
        if change.what == "upload":
            return self._upload(step)
        if change.what == "abandon":
            self.remote.abandon(step)
        elif change.what == "delete":
            self.remote.delete(step)
        else:
            with suppress(FileNotFoundError):  # the rules have deleted it here meanwhile
                content = (step_directory(self._root, step) / VALIDATION).read_bytes()
                self.remote.write(f"{folder_of(step)}/{VALIDATION}", content)
        return False

    def _upload(self, step: int) -> bool:
        """Upload a checkpoint and report it; return False if it is deleted here."""
        path, started = step_directory(self._root, step), time.perf_counter()
        try:
            lock = lock_for_reading(path / MANIFEST)  # pruning passes it over
        except FileNotFoundError:
            return False
        if not disk.is_dir(path):
            return False
        try:
            self._copy_run_files()
            size = self.remote.upload(path, lambda: self._require_current(step))
            url, seconds = f"{self.remote.shown}/{folder_of(step)}", time.perf_counter() - started
            fields = {"step": step, "url": url, "bytes": size, "seconds": seconds}
            self.events.append(("checkpoint_mirrored", fields))
        except Exception as error:  # raised again, unless the checkpoint alone is at fault
            is_of_disk = isinstance(error, CheckpointError)
            is_gone = is_of_disk and not disk.is_dir(path)  # `go_back` follows
            if not is_gone and not self._is_left_behind(step):
                if not is_of_disk:
                    raise
                self._unfit.add(step)
                self._report_failure(Change("upload", step), error)
        finally:
            if lock:
                lock.close()
        return True

    def _is_left_behind(self, step: int) -> bool:
        with self._changed:
            return self._back is not None and step > self._back

    def _require_current(self, step: int) -> None:
        """Raise before the checkpoint is complete if it is another's turn or it is abandoned."""
        require_owner(self.remote, self._claimed)
        if self._is_left_behind(step):
            raise CheckpointError(f"step {step}: the run has gone back from it")

    def _report_failure(self, change: Change, error: Exception) -> None:
        reason = FAILED.get(change.what, "") + (str(error) or type(error).__name__)
        self.events.append(("mirror_failed", {"step": max(change.step, 0), "reason": reason}))
        if isinstance(error, LockedError):
            self.close()

    def _copy_run_files(self) -> None:
        """Upload what identifies the run to a reader, once."""
        if not self._has_files:
            for path in (path for name in RUN_FILES for path in disk.matching(self._out_dir, name)):
                self.remote.put(path, path.relative_to(self._out_dir).as_posix())
            self._has_files = True

    def _listings(self) -> tuple[dict[int, Saved], dict[int, Saved | None]]:
        """The checkpoints here, and those there: None if not complete."""
        here = {saved.step: saved for saved in saved_in(self._root)}
        there: dict[int, Saved | None] = {}
        for step, names in self.remote.steps().items():
            is_aside = MANIFEST not in names and ABANDONED in names
            # A listing may lag behind, and what it shows as interrupted would be deleted.
            if not is_aside and (
                MANIFEST in names or self.remote.read(f"{folder_of(step)}/{MANIFEST}")
            ):
                if VALIDATION in names and step not in self._records:
                    text = self.remote.read(f"{folder_of(step)}/{VALIDATION}")
                    self._records[step] = text or b""
                saved = saved_with(step, self._records[step] if VALIDATION in names else None)
                if saved == Saved(step) and here and step not in here and step > self._begun:
                    # The rules have deleted it here: it is not among the best.
                    saved = Saved(step, math.inf, self._rules.keep_best_by)
                there[step] = saved
            elif not is_aside:
                there[step] = None
        return here, there


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
            f"--out_dir {out_dir} is the --mirror of a run; to continue that run, give an empty"
            f" --out_dir and --mirror file://{disk.resolve(out_dir)}, otherwise another --out_dir"
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
            f"--mirror {remote.shown} is inside --out_dir {out_dir}, so both can be lost together;"
            " give another folder"
        )
    try:
        _claims(remote, out_dir, resume)
        if remote.folder:
            for folder in (remote.folder, *published_checkpoints(remote.folder / CHECKPOINTS)):
                remove_left(folder)
        remote.write(probe, token.encode())
        remote.remove(probe)
    except StorageError as error:  # show the URL as it was given
        raise StorageError(f"--mirror {str(error).replace(f'/{probe}', '')}") from error


def claim(
    remote: RemoteRun, out_dir: Path, resume: str, identity: dict[str, Any], allowed: Set[str]
) -> bytes:
    """Make this start the one that writes to the mirror; raise LockedError if it is another run's.

    An out_dir that is new, with `--resume auto`, takes over the run of the mirror if all that
    identifies a run (but the `allowed` groups) is the same. Return what `require_owner` compares.
    """
    url, (ours, there) = remote.shown, _claims(remote, out_dir, resume)
    if there and there["run"] != ours:
        changed = differences(there["identity"], identity)
        if refused := [str(change) for change in changed if change.group not in allowed]:
            text = shorten_line("; ".join(refused[:3]))
            raise LockedError(f"--mirror {url} belongs to another run ({text}); {REMEDY}")
    run = ours or (there["run"] if there else secrets.token_hex(8))
    with storing(str(out_dir / OWNER), "correct the path of --out_dir"):
        write_whole(out_dir / OWNER, json.dumps({"run": run}).encode())
    facts = {"run": run, "start": secrets.token_hex(8), "identity": identity}
    content = json.dumps(facts, indent=1).encode()
    remote.write(OWNER, content)
    return content


def require_owner(remote: RemoteRun, claimed: bytes) -> None:
    """Raise LockedError if another start has taken the mirror over, or trains in it."""
    _require_no_out_dir(remote)
    if remote.read(OWNER) != claimed:
        raise LockedError(f"{remote.shown}: another start of the run writes there now; {REMEDY}")


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
                f"--mirror {url} belongs to another run than {out_dir}; to continue that run, give"
                " --resume auto and an empty --out_dir, otherwise another --mirror"
            )
    return ours, there


def _require_no_out_dir(remote: RemoteRun) -> None:
    """Raise LockedError if a run trains, or has trained, in the folder of a file:// URL.

    Raise StorageError if it cannot be looked at.
    """
    if remote.folder is None:
        return
    shown, paths = f"--mirror {remote.shown}", [remote.folder / name for name in OF_AN_OUT_DIR]
    with storing(remote.shown, "give another --mirror"):
        try:
            lock = lock_for_reading(paths[0])
        except FileNotFoundError:  # locked
            raise LockedError(f"{shown} is in use by a run as its --out_dir; {REMEDY}") from None
        if lock:
            lock.close()
        if all(disk.exists(path) for path in paths):
            raise LockedError(f"{shown} is the --out_dir of a run; {REMEDY}")


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
            raise LockedError(f"{where} belongs to an --out_dir; {REMEDY}")
        validate(Claim, found)
        canonical_json(found)
    except (CheckpointError, UnicodeEncodeError) as error:
        raise LockedError(
            f"{where} was not written by a run ({error}); give an empty place"
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
        self._restored: list[tuple[str, dict[str, Any]]] = []  # events to log after run_start

    @phase("looking for a checkpoint at --mirror")
    def restore(self, identity: dict[str, Any]) -> Path | None:
        """Claim the URL, and fetch its newest checkpoint if none here is as new (collective).

        Return the newest checkpoint here whose files were verified for that.
        """
        run, ranks = self.run, self.ranks

        def begin() -> tuple[list[Path], list[int]]:
            remote = RemoteRun(self._url)
            claimed = claim(remote, self._out_dir, run.resume, identity, run.allowed_changes())
            self._uploads = Uploads(remote, claimed, self._out_dir, Rules.of(vars(run)))
            return published_checkpoints(self._root), remote.published()

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
            there = self._uploads.remote.published()
            return [step for step in there if step in steps and step > newest]

        self._fetch(on_rank_0(self.ranks, later), damaged, is_needed=False)
        self.report()

    def _newest_here(self, local: list[Path]) -> tuple[int, dict[int, Rejected]] | None:
        """Step of the newest valid checkpoint, else -1, and the damaged ones after it (collective).

        None if one cannot be read: it may be intact, and `resume` says so.
        """
        try:
            valid, damaged = newest_valid(local, partial(verify_on_all_ranks, self.ranks))
        except Unreadable:
            return None
        except AllDamaged as error:
            valid, damaged = None, error.rejected
        return step_of(valid) if valid else -1, {step_of(bad.path): bad for bad in damaged}

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
            manifest = remote.read(f"{folder_of(step)}/{MANIFEST}")
            abandoned = disk.matching(self._root, f"abandoned-{final.name}*/{MANIFEST}")
            if any(path.read_bytes() == manifest for path in abandoned):
                continue  # the run has gone back from it
            tmp = final.with_name(f"{final.name}.tmp-{secrets.token_hex(4)}")
            url = f"{remote.shown}/{folder_of(step)}"
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
            if self._uploads:
                path = resumed.path
                is_own = path and disk.resolve(path).parent == disk.resolve(self._root)
                self._uploads.begin(resumed.state.step if is_own else -1)

        on_rank_0(self.ranks, begin)

    def start(self, good: int | None) -> None:
        """Upload what is missing there; out_dir has its other files by now."""
        if self._uploads:
            self._uploads.look(good)

    def offer(self, path: str, good: int | None) -> None:
        """Upload a saved checkpoint in the background."""
        if self._uploads:
            self._uploads.offer(step_of(Path(path)), good)

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
        if not uploads.wait(0.0):
            pending = uploads.pending()
            steps = {max(one.step, 0) for one in pending if one.what in ("look", "upload")}
            many = f"{len(steps)} checkpoints" if len(steps) > 1 else "its checkpoint"
            what = f"the upload of {many}" if steps else "the last changes to --mirror"
            step = max(steps, default=max((one.step for one in pending), default=0))
            self.logger.print(f"step {step}: waiting up to {MIRROR_WAIT_S} s for {what}")
        uploads.look()  # the last value may have been recorded after the last upload
        if not uploads.wait(MIRROR_WAIT_S):
            late = f"within {MIRROR_WAIT_S} s after the last step"
            # One event for a step to upload, and one for all other changes of a kind.
            late_ones = {FAILED.get(one.what) or one.step: one for one in uploads.pending()}
            for one in late_ones.values():
                prefix = FAILED.get(one.what)
                reason = f"{prefix}not done {late}" if prefix else f"not uploaded {late}"
                fields = {"step": max(one.step, 0), "reason": reason}
                uploads.events.append(("mirror_failed", fields))
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
        return skipped(fields["path"], fields["file"], fields["reason"])
    if name == "mirror_kept":
        return f"step {fields['step']}: --mirror keeps the checkpoint: {fields['reason']}"
    if name == "mirror_failed":
        return f"step {fields['step']}: --mirror failed: {fields['reason']}"
    verb, size = name.removeprefix("checkpoint_"), mebibytes(fields["bytes"])
    size_and_time = f"{size}, {fields['seconds']:.1f} s"
    return f"step {fields['step']}: checkpoint {verb} ({size_and_time}) {fields['url']}"
