"""Learning rate and length of a run, as pure functions of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from minimind.config.run_config import RunConfig
from minimind.errors import UsageError


@dataclass(frozen=True)
class Schedule:
    """Number of optimizer steps, and the learning rate at each."""

    shape: str
    peak: float
    min_ratio: float
    warmup_steps: int
    total_steps: int

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0.

        Linear warm-up reaches the peak at step `warmup_steps` - 1; the decay ends at `min_ratio`
        of the peak on the last step. Independent of the number of processes and of resumes.
        """
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        decay_steps = max(1, self.total_steps - 1 - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / decay_steps)
        factor = (1 + math.cos(math.pi * progress)) / 2 if self.shape == "cosine" else 1 - progress
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * factor)


def planned_warmup(run: RunConfig, total_steps: int) -> int:
    """Warm-up steps: --warmup_steps, else 5 % of `total_steps`, at most 100."""
    return min(100, total_steps // 20) if run.warmup_steps is None else run.warmup_steps


def plan_schedule(run: RunConfig, steps_per_epoch: int) -> Schedule:
    """Return the schedule of `run`; raise UsageError if the warm-up exceeds the run."""
    epochs = run.epochs if run.epochs is not None else (None if run.max_steps else 1)
    lengths = (epochs and steps_per_epoch * epochs, run.max_steps)
    total = min(steps for steps in lengths if steps)
    warmup = planned_warmup(run, total)
    if warmup > total:
        raise UsageError(
            f"warmup_steps = {warmup} ({run.sources['warmup_steps']}) is more than the {total}"
            " steps of the whole run; lower it, or train longer"
        )
    return Schedule(run.schedule, run.learning_rate, run.min_lr_ratio, warmup, total)
