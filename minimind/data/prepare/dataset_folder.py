"""A folder of shards that stays: filled as NAME.part by any number of jobs, renamed when whole."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from minimind.data.loader.manifest import MANIFEST_NAME
from minimind.data.prepare.encode import TOKENIZER_NAME, Work
from minimind.data.prepare.merge import clear, merge
from minimind.data.prepare.plan_file import PLAN_NAME, TEXT, described, differences, read_described
from minimind.data.prepare.prepare import (
    Prepared,
    PrepareRequest,
    is_prepared,
    open_prepared,
    tokenizer_of,
)
from minimind.data.prepare.work_units import Plan
from minimind.data.prepare.workers import encode_plan
from minimind.data.tokenizer.files import write_tokenizer
from minimind.data.tokenizer.load import load_tokenizer
from minimind.errors import UsageError
from minimind.runtime.durable_files import (
    canonical_json,
    fingerprint,
    storing,
    sync_directory,
    write_whole,
)
from minimind.runtime.locks import held, is_locked_by_anyone
from minimind.runtime.output_folder import NewFolder

OWN = ("manifest.json", "plan.json", "rejected.jsonl", "tokenizer", "*-[0-9]*.bin", "*-[0-9]*.idx")
WAIT = "give another --out, or wait until it is done"
ALIKE = "give all shares the same, or another --out, or delete it to begin anew"
REMEDY = "free some space, mend its rights, or give another --out"


def prepare_folder(
    request: PrepareRequest, out: Path, share: tuple[int, int] | None = None, force: bool = False
) -> Prepared | None:
    """The shards in a new folder `out`; None after a share of them, for a merge to put together.

    A unit that `out`.part has of just this text and these options is not made again.
    """
    place = _place(out, force)
    out = place.path
    with storing(f"{out}: cannot be written", REMEDY):
        plan, draft = request.plan(), draft_of(out)
        settings = _describe(request, plan)
        out.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            begin = stack.enter_context(ExitStack())
            begin.enter_context(held(out, "begin", fcntl.LOCK_EX))
            if is_locked_by_anyone(out, "work"):
                _require_same(settings, draft, f"another prepare is at work on {out}", WAIT)
            stack.enter_context(held(out, "work", fcntl.LOCK_SH))
            if is_prepared(out) and not force:
                return _open_finished(settings, place)  # written by another job meanwhile
            if share:
                _require_same(settings, draft, f"{draft} was begun", ALIKE, ignoring=(TEXT,))
            work = _start_work(request, plan, settings, draft)
            begin.close()
            if not is_prepared(draft):  # or it was killed while it cleared up
                encode_plan(work, share or (0, 1), request.processes, request.progress)
        return None if share else _merged(work, settings, place, request.max_bad_fraction)


def _describe(request: PrepareRequest, plan: Plan) -> dict[str, Any]:
    """What identifies the preparation, before a tokenizer is learnt for it."""
    policy = (request.skips_bad, request.max_bad_fraction)
    if request.tokenizer_path is None:
        return described(plan, *policy, request.vocab_size)
    given = load_tokenizer(request.tokenizer_path)
    return {**described(plan, *policy, None), "tokenizer": given.fingerprint}


def _require_same(
    settings: dict[str, Any], directory: Path, what: str, remedy: str, ignoring: Sequence[str] = ()
) -> None:
    """Nothing, or a UsageError where there is a preparation in `directory`, and another."""
    there = read_described(directory)
    found = [] if there is None else differences(settings, there)
    found = [one for one in found if one not in ignoring]
    if found:
        raise UsageError(f"{what} with another {', '.join(found)}; {remedy}")


def _open_finished(settings: dict[str, Any], place: NewFolder) -> Prepared:
    """What another job has put there meanwhile, where it is what we were asked for."""
    if differences(settings, read_described(place.path)):
        replace(place, force=False).require_free()
    return open_prepared(place.path)


def _start_work(request: PrepareRequest, plan: Plan, settings: dict[str, Any], draft: Path) -> Work:
    """The draft with its plan and its tokenizer, which the first of all jobs learns."""
    learnt = draft / f"{TOKENIZER_NAME}-{_learnt_key(request, plan)}"
    tokenizer = tokenizer_of(request, plan, learnt, REMEDY)
    content = canonical_json({**settings, "tokenizer": tokenizer.fingerprint})
    path = draft / PLAN_NAME
    if not path.exists() or path.read_bytes() != content:
        draft.mkdir(exist_ok=True)
        (draft / MANIFEST_NAME).unlink(missing_ok=True)  # of another plan, whose end was cut off
        write_tokenizer(draft / TOKENIZER_NAME, tokenizer.files())
        write_whole(path, content)
    return Work(draft, plan, tokenizer, not request.skips_bad)


def merge_folder(out: Path, force: bool = False, max_bad_fraction: float | None = None) -> Prepared:
    """`out`, from an `out`.part of which every unit is done; a UsageError names what is not.

    What is bad is judged as the jobs that filled it were told, or by another `max_bad_fraction`.
    """
    place = _place(out, force)
    out = place.path
    draft = draft_of(out)
    if not (draft / PLAN_NAME).exists():
        raise UsageError(f"{draft}: is not there; run `minimind prepare --shard I/N` first")
    try:
        found = json.loads((draft / PLAN_NAME).read_bytes())
        plan, skips, most = Plan.from_json(found), found["skips_bad"], found["max_bad_fraction"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{draft / PLAN_NAME}: is of another version or damaged ({error!r}); run `minimind"
            " prepare` with the text once more, which keeps what it can"
        ) from error
    most = most if max_bad_fraction is None else max_bad_fraction
    with storing(f"{out}: cannot be written", REMEDY):
        tokenizer = load_tokenizer(draft / TOKENIZER_NAME)
        return _merged(Work(draft, plan, tokenizer, not skips), found, place, most)


def draft_of(out: Path) -> Path:
    """Where a folder is filled."""
    return out.with_name(f"{out.name}.part")


def _place(out: Path, force: bool) -> NewFolder:
    place = NewFolder(out.expanduser().resolve(), force, OWN, "minimind prepare")
    place.require_free()
    draft = draft_of(place.path)
    if os.path.lexists(draft) and not draft.is_dir():
        raise UsageError(
            f"{draft} is a file or a link, and --out {place.path} grows in a folder of that name;"
            " move it away, or give another --out"
        )
    return place


def _learnt_key(request: PrepareRequest, plan: Plan) -> str:
    """Of what a tokenizer is learnt from."""
    units = [plan.key_of(unit, "") for unit in plan.units]
    return fingerprint([request.vocab_size, request.skips_bad, units])


def _merged(
    work: Work, settings: dict[str, Any], place: NewFolder, max_bad_fraction: float
) -> Prepared:
    """Put together what is in the draft once nobody works there."""
    draft, out = work.directory, place.path
    with held(out, "work", fcntl.LOCK_EX):
        if not (draft / PLAN_NAME).exists():  # another job has put it there meanwhile
            return _open_finished(settings, place)
        _require_same(settings, draft, f"another prepare has begun on {out} meanwhile", WAIT)
        if not is_prepared(draft):  # or it was killed while it cleared up
            merge(work, max_bad_fraction)
        clear(draft)
        sync_directory(draft)
        place.replace(draft)
    return open_prepared(out)
