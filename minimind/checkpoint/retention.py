"""Which checkpoints are kept: `kept` states all rules, for runs, mirrors, `prune` and `list`.

What --keep_best compares is in the folder of its checkpoint, in `validation.json`, so that it is
renamed, copied and deleted with it. It is no part of the manifest, since the evaluation ends later.
A checkpoint whose value is unknown is kept, for it may be the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimind.checkpoint.directory import (
    delete,
    published_checkpoints,
    require_sum,
    step_directory,
    step_of,
    with_sum,
)
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
from minimind.runtime.durable_files import sync_directory, write_whole
from minimind.runtime.event_log import EventLog, is_count

VALIDATION = "validation.json"
BEST = "best"  # RUN/best names a checkpoint
STAYS = "the checkpoint stays while --keep_best is in force, since it may be among the best"


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
    """A checkpoint as the rules see it."""

    step: int
    value: float | None = None  # the lower the better, infinite if it was not finite; None: unknown
    by: str = VAL_LOSS  # or the name of a score, which is negative if higher is better
    fault: str = ""  # why its record cannot be used

    @property
    def val_loss(self) -> float | None:
        """The validation loss, if it is known and finite."""
        is_loss = self.value is not None and self.by == VAL_LOSS and math.isfinite(self.value)
        return self.value if is_loss else None


def unknown(listed: Iterable[Saved], rules: Rules) -> dict[int, str]:
    """Why the value that `keep_best` compares is unknown, by step; that of the newest may come."""
    listed = [*listed] if rules.keep_best else []
    newest, every = max((saved.step for saved in listed), default=0), rules.compared_every
    found: dict[int, str] = {}
    for saved in listed:
        if saved.fault:
            found[saved.step] = saved.fault
        elif saved.step == newest:
            continue
        elif saved.value is None and every and saved.step % every == 0:
            found[saved.step] = f"is missing, and the run evaluates every {every:,} steps"
        elif saved.value is not None and saved.by != rules.keep_best_by:
            found[saved.step] = f"has {saved.by}, and --keep_best_by compares {rules.keep_best_by}"
    return found


def kept(listed: Iterable[Saved], rules: Rules, good: int | None = None) -> dict[int, list[str]]:
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
    for step in unknown(newest_first, rules):
        reasons[step].append("unproven")
    compared = [
        (saved.value, -saved.step)
        for saved in newest_first
        if saved.value is not None and math.isfinite(saved.value) and saved.by == rules.keep_best_by
    ]
    for value, step in sorted(compared)[: rules.keep_best]:
        by = "" if rules.keep_best_by == VAL_LOSS else f"{rules.keep_best_by} "
        reasons[-step].append(f"best {by}{abs(value) if by else value:.4g}")
    if rules.reach:  # all that a rollback may have to pass over, and one before them
        recent = sum(step > steps[0] - rules.reach for step in steps)
        for step in steps[: recent + 1]:
            reasons[step].append("rollback")
    if good is not None:
        for step in [step for step in steps if step <= good][:1]:
            reasons[step].append("good")
    return reasons


def fate(listed: Sequence[Saved], rules: Rules, good: int | None = None) -> dict[int, str]:
    """Why each checkpoint is kept, by step, and whether the next save ends that."""
    now = kept(listed, rules, good)
    following = Saved(max(now, default=0) + rules.interval)
    then = kept([*listed, following], rules, good)
    found = {}
    for step, reasons in now.items():
        # The newest will be evaluated before the next save.
        stays = {*then[step]} - ({"unproven"} - {*reasons})
        found[step] = ", ".join(
            reasons if stays else [*reasons, "will be deleted at the next save"]
        )
    return found


def prune(root: Path, rules: Rules, good: int | None = None) -> None:
    """Delete the checkpoints that no rule keeps; those being read stay until the next call.

    Assumes that `resume` has set damaged ones aside.
    """
    reasons = kept(saved_in(root), rules, good)
    for path in published_checkpoints(root):
        if not reasons.get(step_of(path), True):
            delete(path)


def kept_unknown(root: Path, rules: Rules) -> list[str]:
    """A sentence for each checkpoint that stays because its value is unknown."""
    return [
        f"{step_directory(root, step) / VALIDATION} {why}; {STAYS}"
        for step, why in unknown(saved_in(root), rules).items()
    ]


def saved_in(root: Path) -> list[Saved]:
    """The published checkpoints of a folder with their values, newest first."""
    return [saved_of(path) for path in published_checkpoints(root)]


def best_of(listed: Iterable[Saved]) -> Saved | None:
    """The best checkpoint by what the newest value is of; of equal ones the newer."""
    known = [one for one in listed if one.value is not None and math.isfinite(one.value)]
    by = max(known, key=lambda one: one.step).by if known else ""
    known = [one for one in known if one.by == by]
    return min(known, key=lambda one: (one.value, -one.step), default=None)


def with_best(place: Path) -> Path:
    """`place`, or the checkpoint that RUN/best means; raise CheckpointError if none has a value."""
    run = place.parent
    root = run if run.name == "checkpoints" else run / "checkpoints"
    try:
        if place.name != BEST or disk.lexists(place) or not disk.is_dir(root):
            return place
    except OSError:  # the folder is closed: the reader says so
        return place
    if best := best_of(saved_in(root)):
        return step_directory(root, best.step)
    raise CheckpointError(
        f"{place}: no checkpoint of {run} has a validation, so none is known as the best; name"
        f" {run} for the newest, or train with --keep_best 1"
    )


class Record(ClosedJson):
    """`validation.json`: what --keep_best compares of a checkpoint; null if it was not finite."""

    step: Count
    by: str
    value: Real | None
    sha256: Digest


def record_validation(directory: Path, value: float, by: str = VAL_LOSS) -> None:
    """Write the validation loss, or the score, of a published checkpoint durably."""
    finite = value if math.isfinite(value) else None
    content = with_sum({"step": step_of(directory), "by": by, "value": finite})
    write_whole(directory / VALIDATION, content)
    sync_directory(directory)


def saved_of(directory: Path, step: int | None = None) -> Saved:
    """A checkpoint with its value; `step` is by default that of its name."""
    path, step = directory / VALIDATION, step_of(directory) if step is None else step
    try:
        return saved_with(step, read_object(path)[1] if disk.lexists(path) else None)
    except OSError as error:
        return Saved(step, fault=f"cannot be read ({error.strerror})")
    except CheckpointError as error:
        return Saved(step, fault=str(error))


def saved_with(step: int, text: bytes | None) -> Saved:
    """The checkpoint of a step with the value of its `validation.json`, if it has that file."""
    if text is None:
        return Saved(step)
    try:
        found = parse_object(text)
        validate(Record, found)
        require_sum(found, text)
    except CheckpointError as error:
        return Saved(step, fault=str(error))
    if found["step"] != step:
        return Saved(step, fault=f"is for step {found['step']}")
    value = found["value"]
    return Saved(step, math.inf if value is None else value, found["by"])


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
