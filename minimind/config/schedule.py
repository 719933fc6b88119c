"""Learning rate and length of a run, as pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from minimind.config.flags import FLAGS
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
    decay_steps: int = 0  # the last steps of wsd
    decay_shape: str = FLAGS["decay_shape"].unset

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0.

        Linear warm-up reaches the peak at step `warmup_steps` - 1. cosine, linear and wsd end at
        `min_ratio` of the peak on the last step; inverse_sqrt stays at or above it. Independent of
        the number of processes and of resumes.
        """
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.shape == "inverse_sqrt":
            return self.peak * max(
                self.min_ratio, math.sqrt(max(1, self.warmup_steps) / (step + 1))
            )
        decay_start = self.total_steps - self.decay_steps
        if self.shape == "constant" or (self.shape == "wsd" and step < decay_start):
            return self.peak
        if self.shape == "wsd":
            progress = min(1.0, (step - decay_start + 1) / self.decay_steps)
        else:
            steps = max(1, self.total_steps - 1 - self.warmup_steps)
            progress = min(1.0, (step - self.warmup_steps) / steps)
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * self._remaining(progress))

    def __str__(self) -> str:
        warmup = f"{self.warmup_steps:,} step{'s' * (self.warmup_steps != 1)} of warm-up"
        decay = f", {self.decay_shape} decay over the last {self.decay_steps:,}"
        return f"{self.shape}, {warmup}{decay if self.decay_steps else ''}, peak {self.peak:g}"

    def _remaining(self, progress: float) -> float:
        """Part of the way from the minimum to the peak that is left at `progress` of the decay."""
        if self.shape == "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        is_root = self.shape == "wsd" and self.decay_shape == "1-sqrt"
        return 1 - (math.sqrt(progress) if is_root else progress)


def planned_warmup(run: RunConfig, total_steps: int) -> int:
    """Warm-up steps: --warmup_steps, else 5 % of `total_steps`, at most 100.

    Where rules hold, --warmup_steps has a number before this is asked for (rules.py).
    """
    return min(100, total_steps // 20) if run.warmup_steps is None else run.warmup_steps


def planned_decay(run: RunConfig, total_steps: int) -> int:
    """Last steps, in which wsd decays; 0 for another schedule."""
    if run.schedule != "wsd":
        return 0
    fraction = run.in_force("decay_fraction")
    by_fraction = max(1, int(total_steps * _exact(fraction)))
    return by_fraction if run.decay_steps is None else run.decay_steps


def budget_steps(
    run: RunConfig, tokens_per_step: int, parameters: int, flops_per_token: int
) -> dict[str, int]:
    """Return the whole steps within each budget that is given, by flag.

    Raise UsageError if a budget is less than one step.
    """
    tokens = {
        "max_tokens": _exact(run.max_tokens),
        "max_flops": _exact(run.max_flops) / flops_per_token,
        "tokens_per_param": _exact(run.tokens_per_param) * parameters,
    }
    steps = {name: int(tokens[name] / tokens_per_step) for name in tokens if tokens[name]}
    for name, whole in steps.items():
        if not whole:
            raise UsageError(
                f"{_named(run, name)} is {int(tokens[name]):,} tokens, less than the"
                f" {tokens_per_step:,} of one step; raise it, or lower --batch_size"
            )
    return steps


def run_length(run: RunConfig, steps_per_epoch: int, budgets: Mapping[str, int]) -> int:
    """Return the steps of the whole run: whichever of its limits ends first.

    `budgets` is of `budget_steps`. Raise UsageError if --max_steps is another number of steps.
    """
    for name, steps in budgets.items():
        if run.max_steps not in (None, steps):
            raise UsageError(
                f"{_named(run, 'max_steps')} contradicts {_named(run, name)}, which is"
                f" {steps:,} steps; give one of them"
            )
    limits = [*budgets.values(), *filter(None, [run.max_steps])]
    if run.epochs is not None or not limits:
        limits.append(steps_per_epoch * (run.epochs or 1))
    return min(limits)


def plan_schedule(
    run: RunConfig,
    steps_per_epoch: int,
    budgets: Mapping[str, int] | None = None,
    decay_from: int | None = None,
) -> Schedule:
    """Return the schedule of `run`; raise UsageError if warm-up and decay exceed the run.

    `decay_from` is the step with which the decay of wsd begins, of a stage.
    """
    total = run_length(run, steps_per_epoch, budgets or {})
    warmup, decay = planned_warmup(run, total), planned_decay(run, total)
    if decay_from is not None:
        decay = total - decay_from
    if warmup > total:
        raise UsageError(
            f"{_named(run, 'warmup_steps', warmup)} is more than the {total} steps of the whole"
            " run; lower it, or train longer"
        )
    given = _named(run, "decay_steps", decay)
    if run.decay_steps is None:
        fraction = run.in_force("decay_fraction")
        given = f"{_named(run, 'decay_fraction', fraction)}, {decay} steps,"
    if decay > total:
        raise UsageError(
            f"{given} is more than the {total} steps of the whole run; lower it, or train longer"
        )
    if warmup + decay > total:
        raise UsageError(
            f"{given} and {_named(run, 'warmup_steps', warmup)} are more than the {total} steps of"
            " the whole run; lower one of them, or train longer"
        )
    return Schedule(
        run.schedule,
        run.learning_rate,
        run.min_lr_ratio,
        warmup,
        total,
        decay,
        run.in_force("decay_shape"),
    )


def _exact(value: float | None) -> Fraction:
    """The number as it was typed, such as 3/10 for 0.3; 0 for None."""
    return Fraction(repr(value or 0))


def _named(run: RunConfig, name: str, value: float | None = None) -> str:
    """`name = value (source)`."""
    shown = getattr(run, name) if value is None else value
    text = str(shown) if isinstance(shown, int) else f"{shown:g}"
    return f"{name} = {text} ({run.sources[name]})"
