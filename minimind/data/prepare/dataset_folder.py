"""A dataset folder: filled as NAME.part by any number of jobs, renamed when complete."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from minimind.data.prepare.encode import Work
from minimind.data.prepare.merge import clear, merge
from minimind.data.prepare.prepare import PrepareRequest, tokenizer_of
from minimind.data.prepare.prepared import Prepared, is_prepared, open_prepared
from minimind.data.prepare.ray_tasks import encode_with_ray
from minimind.data.prepare.work_units import TEXT, Plan, described, differences, read_described
from minimind.data.prepare.workers import encode_plan
from minimind.data.shards.manifest import MANIFEST_NAME, PLAN_NAME, SUMS_NAME, TOKENIZER_NAME
from minimind.data.tokenizer.load import load_tokenizer
from minimind.data.tokenizer.vocabulary import TOKENIZER_FILES, write_tokenizer
from minimind.errors import UsageError
from minimind.runtime import disk
from minimind.runtime.durable_files import (
    canonical_json,
    fingerprint,
    storing,
    sync_directory,
    write_whole,
)
from minimind.runtime.locks import held, is_locked_by_anyone
from minimind.runtime.output_folder import NewFolder

SHARDS = ("*-[0-9]*.bin", "*-[0-9]*.idx")
OF_TOKENIZER = tuple(f"{TOKENIZER_NAME}/{name}" for name in TOKENIZER_FILES)
OWN = (MANIFEST_NAME, PLAN_NAME, SUMS_NAME, "rejected.jsonl", *OF_TOKENIZER, *SHARDS)
# What a draft has, also after a kill.
OF_DRAFT = (
    MANIFEST_NAME,
    PLAN_NAME,
    SUMS_NAME,
    "rejected.jsonl",
    TOKENIZER_NAME,
    f"{TOKENIZER_NAME}-*",
)
OF_DRAFT += ("*-[0-9]*.*", "*.tmp-*")
WAIT = "give another --out, or wait until it is done"
SAME_SHARES = "give all shares the same, or another --out, or delete it to start again"
REMEDY = "give another --out"


def prepare_folder(
    request: PrepareRequest, out: Path, share: tuple[int, int] | None = None, force: bool = False
) -> Prepared | None:
    """Prepare shards in a new folder `out`; return None after a share of them.

    Units that `out`.part has from the same text and options are not encoded again.
    """
    place = _place(out, force)
    out = place.path
    with storing(f"{out}: cannot be written", REMEDY):
        plan, draft = request.plan(), draft_of(out)
        settings = _describe(request, plan)
        out.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            start_lock = stack.enter_context(ExitStack())
            start_lock.enter_context(held(out, "begin", fcntl.LOCK_EX))
            if is_locked_by_anyone(out, "work"):
                _require_same(settings, draft, f"another prepare is working on {out}", WAIT)
            stack.enter_context(held(out, "work", fcntl.LOCK_SH))
            if is_prepared(out) and not force:
                return _open_finished(settings, place)  # written by another job meanwhile
            if share:
                _require_same(
                    settings, draft, f"{draft} was started", SAME_SHARES, ignoring=(TEXT,)
                )
            work = _start_work(request, plan, settings, draft)
            start_lock.close()
            if not is_prepared(draft):  # or killed in clear()
                _encode(work, request, share or (0, 1))
        policy = request.max_bad_fraction, request.allow_lossy
        return None if share else _merge(work, settings, place, *policy)


def _encode(work: Work, request: PrepareRequest, share: tuple[int, int]) -> None:
    if request.ray is None:
        encode_plan(work, share, request.processes, request.progress)
    else:
        encode_with_ray(work, request.ray, request.processes, request.progress)


def _describe(request: PrepareRequest, plan: Plan) -> dict[str, Any]:
    """Return what identifies the preparation, before its tokenizer is trained."""
    policy = (request.skips_bad, request.max_bad_fraction)
    if request.tokenizer_path is None:
        return described(plan, *policy, request.vocab_size)
    given = load_tokenizer(request.tokenizer_path)
    return {**described(plan, *policy, None), "tokenizer": given.fingerprint}


def _require_same(
    settings: dict[str, Any], directory: Path, what: str, remedy: str, ignoring: Sequence[str] = ()
) -> None:
    """Raise UsageError if `directory` has a preparation with other settings."""
    existing = read_described(directory)
    names = [] if existing is None else differences(settings, existing)
    names = [name for name in names if name not in ignoring]
    if names:
        raise UsageError(f"{what} with another {', '.join(names)}; {remedy}")


def _open_finished(settings: dict[str, Any], place: NewFolder) -> Prepared:
    """Open the folder that another job has finished meanwhile, if its settings are the same."""
    if differences(settings, read_described(place.path)):
        replace(place, force=False).require_free()
    return open_prepared(place.path)


def _start_work(request: PrepareRequest, plan: Plan, settings: dict[str, Any], draft: Path) -> Work:
    """Write plan and tokenizer to the draft; the first job trains the tokenizer."""
    units = [plan.key_of(unit, "") for unit in plan.units]
    key = fingerprint([request.vocab_size, request.skips_bad, units])
    learnt = draft / f"{TOKENIZER_NAME}-{key}"
    tokenizer = tokenizer_of(request, plan, learnt, REMEDY)
    content = canonical_json({**settings, "tokenizer": tokenizer.fingerprint})
    path = draft / PLAN_NAME
    if not disk.exists(path) or path.read_bytes() != content:
        draft.mkdir(exist_ok=True)
        (draft / MANIFEST_NAME).unlink(missing_ok=True)  # left by another plan that was interrupted
        write_tokenizer(draft / TOKENIZER_NAME, tokenizer.files())
        write_whole(path, content)
    return Work(draft, plan, tokenizer, not request.skips_bad)


def merge_folder(
    out: Path, force: bool = False, max_bad_fraction: float | None = None, allow_lossy: bool = False
) -> Prepared:
    """Merge `out`.part into `out`; raise UsageError if units are missing.

    `max_bad_fraction` replaces the value of the jobs that encoded the units.
    """
    place = _place(out, force)
    out = place.path
    draft = draft_of(out)
    if not disk.exists(draft / PLAN_NAME):
        raise UsageError(f"{draft}: does not exist; run `minimind prepare --shard I/N` first")
    try:
        settings = json.loads((draft / PLAN_NAME).read_bytes())
        plan, skips_bad = Plan.from_json(settings), settings["skips_bad"]
        limit = settings["max_bad_fraction"] if max_bad_fraction is None else max_bad_fraction
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{draft / PLAN_NAME}: was written by another version or is damaged ({error!r}); run"
            " `minimind prepare` on the text again, which keeps finished units"
        ) from error
    with storing(f"{out}: cannot be written", REMEDY):
        tokenizer = load_tokenizer(draft / TOKENIZER_NAME)
        work = Work(draft, plan, tokenizer, not skips_bad)
        return _merge(work, settings, place, limit, allow_lossy)


def draft_of(out: Path) -> Path:
    """Return the folder in which `out` is built."""
    return out.with_name(f"{out.name}.part")


def _place(out: Path, force: bool) -> NewFolder:
    place = NewFolder(disk.resolve(out.expanduser()), force, OWN, "minimind prepare", is_prepared)
    place.require_free()
    draft = draft_of(place.path)
    if disk.lexists(draft) and not disk.is_dir(draft):
        raise UsageError(
            f"{draft} is a file or a link, and --out {place.path} is built in a folder of that"
            " name; move it away, or give another --out"
        )
    for path in sorted(disk.entries(draft)) if disk.is_dir(draft) else ():
        if not any(map(path.match, OF_DRAFT)):
            raise UsageError(
                f"{draft} holds {path.name!r}, which minimind prepare did not write, and --out"
                f" {place.path} is built in a folder of that name; move it away, or give another"
                " --out"
            )
    return place


def _merge(
    work: Work,
    settings: dict[str, Any],
    place: NewFolder,
    max_bad_fraction: float,
    allow_lossy: bool,
) -> Prepared:
    """Merge the draft once no other job works on it."""
    draft, out = work.directory, place.path
    with held(out, "work", fcntl.LOCK_EX):
        if not disk.exists(draft / PLAN_NAME):  # another job has renamed it
            return _open_finished(settings, place)
        _require_same(settings, draft, f"another prepare has started on {out} meanwhile", WAIT)
        if not is_prepared(draft):  # or killed in clear()
            merge(work, max_bad_fraction, allow_lossy)
        clear(draft)
        sync_directory(draft)
        place.replace(draft)
    return open_prepared(out)
