"""A folder of shards that stays: filled as NAME.part by any number of jobs, renamed when whole."""

from __future__ import annotations

import fcntl
import json
from contextlib import ExitStack
from pathlib import Path

from minimind.data.crew import encode_plan
from minimind.data.encode import PLAN_NAME, TOKENIZER_NAME, Work
from minimind.data.load_tokenizer import load_tokenizer
from minimind.data.manifest import MANIFEST_NAME
from minimind.data.merge import clear, merge
from minimind.data.prepare import Asked, Prepared, is_prepared, open_prepared, tokenizer_of
from minimind.data.tokenizer_files import write_tokenizer
from minimind.data.units import Plan
from minimind.errors import UsageError
from minimind.files import canonical_json, fingerprint, storing, sync_directory, write_whole
from minimind.new_folder import held, lock_path, replace_folder, require_free

OWN = ("manifest.json", "plan.json", "rejected.jsonl", "tokenizer", "*-[0-9]*.bin", "*-[0-9]*.idx")
REMEDY = "free some space, mend its rights, or give another --out"


def prepare_folder(
    asked: Asked, out: Path, share: tuple[int, int] | None = None, force: bool = False
) -> Prepared | None:
    """The shards in a new folder `out`; None after a share of them, for a merge to put together.

    A unit that `out`.part has of just this text and these options is not made again.
    """
    out = _place(out, force)
    with storing(f"{out}: cannot be written", REMEDY):
        plan, draft = asked.plan(), draft_of(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            begin = stack.enter_context(ExitStack())
            begin.enter_context(held(out, "begin", fcntl.LOCK_EX))
            lock = stack.enter_context(held(out, "work", fcntl.LOCK_SH))
            if is_prepared(out) and not force:
                return open_prepared(out)  # another job has put it there since we looked
            work = _begun(asked, plan, draft)
            begin.close()
            if not is_prepared(draft):  # or it was killed while it cleared up
                encode_plan(work, share or (0, 1), asked.processes, asked.progress, [lock])
        return None if share else _merged(work, out, asked.max_bad_fraction)


def _begun(asked: Asked, plan: Plan, draft: Path) -> Work:
    """The draft with its plan and its tokenizer, which the first of all jobs learns."""
    tokenizer = tokenizer_of(asked, plan, draft / f"{TOKENIZER_NAME}-{_learnt_key(asked, plan)}")
    policy = {"skips_bad": asked.skips_bad, "max_bad_fraction": asked.max_bad_fraction}
    policy["tokenizer"] = tokenizer.fingerprint
    told, path = canonical_json({**plan.to_json(), **policy}), draft / PLAN_NAME
    if not path.exists() or path.read_bytes() != told:
        draft.mkdir(exist_ok=True)
        (draft / MANIFEST_NAME).unlink(missing_ok=True)  # of another plan, whose end was cut off
        write_tokenizer(draft / TOKENIZER_NAME, tokenizer.files())
        write_whole(path, told)
    return Work(draft, plan, tokenizer, not asked.skips_bad)


def merge_folder(out: Path, force: bool = False) -> Prepared:
    """`out`, from an `out`.part of which every unit is done; a UsageError names what is not.

    What is bad is judged as the jobs that filled it were told.
    """
    out = _place(out, force)
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
    with storing(f"{out}: cannot be written", REMEDY):
        tokenizer = load_tokenizer(draft / TOKENIZER_NAME)
        return _merged(Work(draft, plan, tokenizer, not skips), out, most)


def draft_of(out: Path) -> Path:
    """Where a folder is filled."""
    return out.with_name(f"{out.name}.part")


def _place(out: Path, force: bool) -> Path:
    out = out.expanduser().resolve()
    require_free(out, force, OWN, "minimind prepare")
    return out


def _learnt_key(asked: Asked, plan: Plan) -> str:
    """Of what a tokenizer is learnt from."""
    units = [plan.key_of(unit, "") for unit in plan.units]
    return fingerprint([asked.vocab_size, asked.skips_bad, units])


def _merged(work: Work, out: Path, max_bad_fraction: float) -> Prepared:
    """Put together what is in the draft once nobody works there."""
    with held(out, "work", fcntl.LOCK_EX):
        if work.directory.exists():  # or another job has put it there meanwhile
            if not is_prepared(work.directory):  # or it was killed while it cleared up
                merge(work, max_bad_fraction)
            clear(work.directory)
            sync_directory(work.directory)
            replace_folder(out, work.directory)
    for name in ("begin", "work"):
        lock_path(out, name).unlink(missing_ok=True)
    return open_prepared(out)
