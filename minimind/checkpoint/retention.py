"""Which checkpoints are kept: `kept` states all rules, for runs, `prune` and `list`.

The validation loss of a checkpoint is in its own folder, in `validation.json`, so that it is
renamed, copied and deleted with it. It is no part of the manifest, since the evaluation ends later,
and has a checksum of its own: a checkpoint whose loss is in doubt is kept, for it may be the best.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minimind.checkpoint.directory import delete, published_checkpoints, step_directory, step_of
from minimind.config.flags import VAL_LOSS
from minimind.config.run_config import REACH
from minimind.config.run_record import NAME, read_record
from minimind.errors import CheckpointError
from minimind.runtime import disk
from minimind.runtime.checked_json import (
    ClosedJson,
    Count,
    Digest,
    Real,
    parse_object,
    read_object,
    validate,
)
from minimind.runtime.durable_files import fingerprint, sync_directory, write_whole
from minimind.runtime.event_log import EventLog, is_count

VALIDATION = "validation.json"
STAYS = "the checkpoint stays while --keep_best is in force, since its loss may be among the lowest"
NO_CHECKSUM = "has no checksum, as an earlier version wrote it"


@dataclass(frozen=True)
class Rules:
    """The settings of a run that decide which checkpoints it keeps; 0: no such rule."""

    keep_last: int
    keep_every: int = 0
    keep_best: int = 0
    reach: int = 0  # steps that the spike guard may go back
    interval: int = 1  # steps between saves
    verifies: bool = False
    keep_best_by: str = VAL_LOSS
    compared_every: int = 0  # steps between the values that `keep_best` compares

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Rules:
        by = settings["keep_best_by"]
        return cls(
            settings["keep_last"],
            settings["keep_every"],
            settings["keep_best"],
            REACH if settings["spike_guard"] else 0,
            settings["save_interval"],
            settings["verify_interval"] > 0,
            by,
            settings["eval_interval" if by == VAL_LOSS else "eval_tasks_interval"],
        )

    def flags(self) -> str:
        """`--keep_last 2 --keep_every 5000`: the flags in force."""
        names = ("keep_last", "keep_every", "keep_best")
        given = ((name, getattr(self, name)) for name in names)
        return " ".join(f"--{name} {number}" for name, number in given if number)

    def most(self, last_step: int) -> int:
        """The most checkpoints of a run of `last_step` steps, with the one that is being written.

        A checkpoint kept by two rules counts twice; saves by the clock do not count.
        """
        last = max(self.keep_last, math.ceil(self.reach / self.interval) + 1 if self.reach else 0)
        every = last_step // math.lcm(self.interval, self.keep_every) if self.keep_every else 0
        return last + every + self.keep_best + self.verifies + 1


@dataclass(frozen=True)
class Saved:
    """A checkpoint as the rules see it; without a loss and a doubt it was not evaluated."""

    step: int
    val_loss: float | None = None  # or a score, negative if higher is better
    doubt: str = ""  # why the loss is not proven, or not known
    by: str = VAL_LOSS  # or the name of the score
    is_null: bool = False  # the loss was recorded, and was not finite


def kept(listed: Sequence[Saved], rules: Rules, good: int | None = None) -> dict[int, list[str]]:
    """The reasons to keep each checkpoint, by step, newest first; without one it is deleted.

    `good` is the last step at which a check for corruption passed.
    """
    newest_first = sorted(listed, key=lambda saved: saved.step, reverse=True)
    reasons: dict[int, list[str]] = {saved.step: [] for saved in newest_first}
    steps = [*reasons]
    for step in steps[: rules.keep_last]:
        reasons[step].append("last")
    for step in steps:
        if rules.keep_every and step % rules.keep_every == 0:
            reasons[step].append("every")
    proven = [saved for saved in listed if not saved.doubt and saved.by == rules.keep_best_by]
    evaluated = [(saved.val_loss, -saved.step) for saved in proven if saved.val_loss is not None]
    for saved in listed if rules.keep_best else ():
        if saved.doubt:
            reasons[saved.step].append("unproven")
    for loss, step in sorted(evaluated)[: rules.keep_best]:
        by = "" if rules.keep_best_by == VAL_LOSS else f"{rules.keep_best_by} "
        reasons[-step].append(f"best {by}{abs(loss) if by else loss:.4g}")
    if rules.reach:  # all that a rollback may have to pass over, and one before them
        recent = sum(step > steps[0] - rules.reach for step in steps)
        for step in steps[: recent + 1]:
            reasons[step].append("rollback")
    if good is not None:
        for step in [step for step in steps if step <= good][:1]:
            reasons[step].append("good")
    return reasons


def with_doubts(listed: Sequence[Saved], rules: Rules) -> list[Saved]:
    """Doubt those whose value for `keep_best` is unknown; that of the newest is still to come."""
    newest, every = max((saved.step for saved in listed), default=0), rules.compared_every
    found = []
    for saved in listed:
        doubt = saved.doubt
        if doubt or saved.step == newest:
            pass
        elif saved.by != rules.keep_best_by and saved.val_loss is not None:
            doubt = f"has {saved.by}, and --keep_best_by compares {rules.keep_best_by}"
        elif saved.val_loss is None and not saved.is_null and every and not saved.step % every:
            doubt = f"is missing, and the run evaluates every {every:,} steps"
        found.append(replace(saved, doubt=doubt))
    return found


def fate(listed: Sequence[Saved], rules: Rules, good: int | None = None) -> dict[int, str]:
    """Why each checkpoint is kept, by step, and whether the next save ends that."""
    now = kept(listed, rules, good)
    following = Saved(max(now, default=0) + rules.interval)
    then = kept([*listed, following], rules, good)
    end = "goes with the next save"
    return {
        step: ", ".join(reasons if then[step] else [*reasons, end]) for step, reasons in now.items()
    }


def prune(root: Path, rules: Rules, good: int | None = None) -> list[str]:
    """Delete the checkpoints that no rule keeps; those being read stay until the next call.

    Assumes that `resume` has set damaged ones aside. Return a sentence for each one whose loss is
    in doubt, if a rule compares losses.
    """
    saved = with_doubts(saved_in(root), rules)
    reasons = kept(saved, rules, good)
    for path in published_checkpoints(root):
        if not reasons.get(step_of(path), True):
            delete(path)
    return [
        f"{step_directory(root, one.step) / VALIDATION} {one.doubt}; {STAYS}"
        for one in saved
        if one.doubt and rules.keep_best
    ]


def saved_in(root: Path) -> list[Saved]:
    """The published checkpoints of a folder with their validation losses, newest first."""
    return [saved_of(path) for path in published_checkpoints(root)]


class Validation(ClosedJson):
    """`validation.json`: the loss at the step of the checkpoint; null if it was not finite.

    With `by` it is a score of that name instead, negative if higher is better.
    """

    step: Count
    val_loss: Real | None
    by: str = VAL_LOSS
    sha256: Digest | None = None  # digest of the canonical form without it; older files have none


def record_validation(directory: Path, val_loss: float, by: str = VAL_LOSS) -> None:
    """Write the validation loss, or the score, of a published checkpoint durably."""
    loss = val_loss if math.isfinite(val_loss) else None
    content = {"step": step_of(directory), "val_loss": loss}
    if by != VAL_LOSS:
        content["by"] = by
    content["sha256"] = fingerprint(content)
    write_whole(directory / VALIDATION, json.dumps(content).encode())
    sync_directory(directory)


def saved_of(directory: Path) -> Saved:
    """A published checkpoint with its validation loss."""
    path, step = directory / VALIDATION, step_of(directory)
    try:
        disk.stat(path, follow=False)
        return saved_with(step, read_object(path)[1])
    except FileNotFoundError:
        return Saved(step)
    except OSError as error:
        return Saved(step, doubt=f"cannot be read ({error.strerror})")
    except CheckpointError as error:
        return Saved(step, doubt=str(error))


def saved_with(step: int, text: bytes) -> Saved:
    """The checkpoint of a step with the loss that the text of its `validation.json` proves."""
    try:
        found = parse_object(text)
        validate(Validation, found)
    except CheckpointError as error:
        return Saved(step, doubt=str(error))
    if found["step"] != step:
        return Saved(step, doubt=f"is that of step {found['step']}")
    sha256, loss = found.pop("sha256", None), found["val_loss"]
    by = found.get("by", VAL_LOSS)
    if sha256 is None:
        return Saved(step, loss, NO_CHECKSUM, by)
    if sha256 != fingerprint(found):
        return Saved(step, doubt="does not match its own sha256")
    return Saved(step, loss, by=by, is_null=loss is None)


def rules_of_run(out_dir: Path) -> Rules | None:
    """The rules of the last start of a run, from its config.yaml; None if there is none.

    Raise CheckpointError if it is not whole.
    """
    path = out_dir / NAME
    return Rules.of(read_record(path)) if disk.exists(path) else None


def had_rules(out_dir: Path, rules: Rules) -> bool:
    """Whether these were the rules of the last start of a run; not where that is unknown."""
    with suppress(CheckpointError):
        return rules_of_run(out_dir) == rules
    return False


def good_step(log: EventLog, newest: int) -> tuple[int | None, bool]:
    """The last step known to be good, or at which the last start began, and whether it is certain.

    It is not where a line that cannot be read follows the last check that passed, or where the log
    does not reach to the `newest` checkpoint.
    """
    good, is_back, unread, reached = None, False, 0, 0
    for event in log.events("run_start", "verified", "rolled_back", "checkpoint_saved"):
        name = event["event"]
        if name in ("run_start", "checkpoint_saved"):
            reached = event["step"]
        if name == "checkpoint_saved":
            continue
        if name == "rolled_back" and not is_count(event.get("to")):
            log.unread += 1
            continue
        if name == "rolled_back":
            good = None if good is None else min(good, event["to"])
        elif name == "run_start" and not is_back:
            good = event["step"]
        elif name == "verified" and event.get("passed") is True:
            good, unread = event["step"], log.unread
        is_back = name == "rolled_back"
    return good, log.unread == unread and not log.is_torn and reached >= newest
