"""Early stopping: --patience ends a run whose validations do not improve any more.

A checkpoint is saved before the validation of its step. So its manifest has the state before, and
`validation.json` beside it has the value by which a resume goes on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from minimind.checkpoint.resume import Resumed
from minimind.checkpoint.retention import saved_of
from minimind.config.run_config import RunConfig
from minimind.config.schedule import Schedule
from minimind.errors import CheckpointError
from minimind.report.formats import count
from minimind.report.run_logger import RunLogger
from minimind.runtime.checked_json import ELSEWHERE, ClosedJson, Count, Real, validate
from minimind.runtime.collectives import Ranks, on_rank_0


class PatienceState(ClosedJson):
    """`patience` of a checkpoint's manifest."""

    step: Count  # of the last validation that counts
    best: Real | None  # the lower the better; None if none was finite
    waited: Count  # validations since the best one
    ran_out: Count | None  # step


@dataclass
class Patience:
    """Counts validations without an improvement, alike on every rank, and shortens the schedule."""

    run: RunConfig
    planned: Schedule
    logger: RunLogger
    step: int = 0
    best: float | None = None
    waited: int = 0
    value: float | None = None  # of the last validation of this process
    ran_out: int | None = None

    def restored(self, resumed: Resumed, ranks: Ranks) -> Patience:
        """The patience as of a checkpoint; raise CheckpointError if its state there is invalid.

        After an allowed change it counts from zero, unless it has run out; after one of the
        schedule that is forgotten, too. Collective.
        """
        path = resumed.path
        state: dict[str, Any] | None = resumed.manifest.get("patience")
        changed = {one.group for one in resumed.changed}
        if state is None or "schedule" in changed:
            state = {"ran_out": None}
        else:
            validate(PatienceState, state, "patience.")
            if max(state["step"], state["ran_out"] or 0) > resumed.state.step:
                raise CheckpointError(
                    f"{path}: manifest.json has a patience after its step {resumed.state.step};"
                    f" {ELSEWHERE}"
                )
        if changed and state["ran_out"] is None:
            state = {"step": resumed.state.step}
        found = Patience(self.run, self.planned, self.logger, **state)
        if path is not None:
            saved = on_rank_0(ranks, lambda: saved_of(path, resumed.state.step))
            if saved.value is not None and saved.by == self.run.keep_best_by:
                found.counts(saved.step, saved.value)
        self.logger.end_at(found.schedule.total_steps)
        return found

    @property
    def schedule(self) -> Schedule:
        """The schedule in force: where patience ran out, wsd decays, and others end."""
        if self.ran_out is None:
            return self.planned
        total = self.ran_out
        if self.planned.shape == "wsd":
            total = max(total, self.planned.warmup_steps) + self.planned.decay_steps
        return replace(self.planned, total_steps=total)

    @property
    def reason(self) -> str:
        """Why the run ends; empty if it does not end early."""
        if self.ran_out is None:
            return ""
        by, delta = self.run.keep_best_by, self.run.min_delta
        least = f" by {delta:g}" if delta else ""
        return f"ended early, as {by} did not improve{least} in {count(self.waited, 'validation')}"

    def lacks(self, step: int) -> bool:
        """Whether the validation of a step does not count yet; that of step 0 never counts."""
        return self.step < step

    def observe(self, step: int, value: float) -> None:
        """Count the value of a step as `counts` does, and log that patience ran out."""
        if not self.counts(step, value):
            return
        total = self.schedule.total_steps
        self.logger.end_at(total)
        best = self.best and abs(self.best)  # a score is negated
        facts = {"by": self.run.keep_best_by, "best": best, "validations": self.waited}
        self.logger.event("patience_ran_out", step=step, **facts, total_steps=total)
        end = "the run ends"
        if total > step:
            end = f"the rate decays, and {end} at step {total:,}"
        self.logger.print(f"step {step}: {self.reason.removeprefix('ended early, as ')}; {end}")

    def counts(self, step: int, value: float) -> bool:
        """Count the value of a step, the lower the better; return whether patience ran out at it.

        A value that counts already is ignored.
        """
        if not self.lacks(step):
            return False
        self.step, self.value = step, value
        if self.ran_out is not None:
            return False
        gain = math.inf if self.best is None else self.best - value
        if math.isfinite(value) and gain > 0 and gain >= self.run.min_delta:
            self.best, self.waited = value, 0
            return False
        self.waited += 1
        assert self.run.patience is not None
        is_decaying = step >= self.planned.total_steps - self.planned.decay_steps
        if self.waited >= self.run.patience and not is_decaying:
            self.ran_out = step
        return self.ran_out is not None

    def state(self) -> dict[str, Any]:
        """A `PatienceState` for a checkpoint."""
        return {name: getattr(self, name) for name in PatienceState.model_fields}
