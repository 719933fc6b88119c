"""The mirror of a run, as the run uses it: at its start, after each save, at its end."""

from __future__ import annotations

import secrets
import shutil
import time
from pathlib import Path
from typing import Any

from minimind.checkpoint.directory import (
    MANIFEST,
    Rejected,
    publish,
    published_checkpoints,
    step_directory,
    step_of,
    verify,
)
from minimind.checkpoint.resume import Resumed
from minimind.checkpoint.retention import Rules
from minimind.config.run_config import RunConfig
from minimind.config.training_flags import MIRROR_WAIT_S
from minimind.errors import CheckpointError
from minimind.mirror.owner import claim
from minimind.mirror.remote_run import CHECKPOINTS, RemoteRun, complete
from minimind.mirror.uploads import Uploads, abandon_after
from minimind.runtime.collectives import Ranks, on_rank_0, run_on_all_ranks
from minimind.runtime.durable_files import mebibytes, storing
from minimind.runtime.terminal import phase
from minimind.telemetry.progress import RunLogger


class Mirror:
    """The uploads of rank 0 and their events; without --mirror and on other ranks, nothing."""

    def __init__(self, run: RunConfig, ranks: Ranks, logger: RunLogger) -> None:
        self.run, self.ranks, self.logger = run, ranks, logger
        self._url = run.mirror
        self._out_dir = Path(run.out_dir)
        self._root = self._out_dir / CHECKPOINTS
        self._uploads: Uploads | None = None
        self._resumed: Path | None = None  # the checkpoint of out_dir that the run goes on from
        self._is_only_here = False
        self._restored: list[tuple[str, dict[str, Any]]] = []  # to be logged after run_start

    @phase("looking for a checkpoint at --mirror")
    def restore(self, identity: dict[str, Any]) -> None:
        """Claim the URL, and fetch its newest checkpoint if none here is as new (collective)."""
        if self._url is None:
            return
        url, run, ranks = self._url, self.run, self.ranks

        def begin() -> tuple[list[Path], list[int]]:
            remote = RemoteRun(url)
            owner = claim(remote, self._out_dir, run.resume, identity, run.allowed_changes())
            self._uploads = Uploads(remote, owner, self._out_dir, Rules.of(vars(run)))
            return published_checkpoints(self._root), complete(remote.files())

        local, steps = on_rank_0(ranks, begin)
        if run.resume != "auto" or not steps:
            return
        if valid := self._newest_here(local):
            newest, damaged = valid
            later = [step for step in steps if step > newest]
            self._fetch(later, damaged, is_needed=newest < 0)

    def fetch(self, steps: range) -> None:
        """Fetch the newest checkpoint of some steps, unless one here is as new (collective).

        After a start on an empty disk, those before that of the start are at the URL only.
        """
        if self._url is None:
            return
        local = on_rank_0(self.ranks, lambda: published_checkpoints(self._root))
        valid = self._newest_here([path for path in local if step_of(path) in steps])
        if valid is None or (valid[0] >= 0 and not valid[1]):
            return
        newest, damaged = valid

        def later() -> list[int]:
            assert self._uploads is not None  # as on rank 0
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
            found = run_on_all_ranks(self.ranks, lambda path=path: verify_part(self.ranks, path))
            bad = next(filter(None, found), None)
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
        assert self._uploads is not None  # as on rank 0
        remote = self._uploads.remote
        events: list[tuple[str, dict[str, Any]]] = []
        for step in steps:
            started, final = time.perf_counter(), step_directory(self._root, step)
            manifest = remote.read(f"{CHECKPOINTS}/{final.name}/{MANIFEST}")
            abandoned = self._root.glob(f"abandoned-{final.name}*/{MANIFEST}")
            if any(path.read_bytes() == manifest for path in abandoned):
                continue  # the run has gone back from it
            tmp = final.with_name(f"{final.name}.tmp-{secrets.token_hex(4)}")
            url = f"{remote.shown}/{CHECKPOINTS}/{final.name}"
            with storing(str(tmp), "free some space, or give another --out_dir"):
                bad = remote.fetch(step, tmp)
                if bad is None:
                    if own := damaged.get(step):
                        events.append(_rejection(str(final), own))
                    size = sum(path.stat().st_size for path in tmp.iterdir())
                    publish(tmp, final)
                    seconds = time.perf_counter() - started
                    fields = {"step": step, "url": url, "bytes": size, "seconds": seconds}
                    return [*events, ("checkpoint_fetched", fields)]
                shutil.rmtree(tmp)
            events.append(_rejection(url, bad))
        if events and is_needed:
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
            is_own = path is not None and path.resolve().parent == self._root.resolve()
            abandon_after(remote, step if is_own else -1)
            if is_own:
                self._resumed, self._is_only_here = path, step not in complete(remote.files())

        if self._url is not None:
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
        if self._url is not None:
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
        """Begin no further upload."""
        if self._uploads:
            self._uploads.close()


def verify_part(ranks: Ranks, path: Path) -> Rejected | None:
    """The damage that this rank finds in its share of a checkpoint's files."""
    return verify(path, ranks.rank, ranks.world_size)


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
