"""The time of a step over all profiles of a start. Imports no torch, for `minimind report`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

COMPUTING = ("forward", "backward", "optimizer")
# Pauses that recur; garbage collection and traces do not.
PAUSES = ("checkpoint", "evaluate", "sample", "verify")


class Period:
    """Sums over the profiles of a start; the first, in which steps warm up, only if it is alone."""

    def __init__(self) -> None:
        self.profiles = self.steps = self.last_step = self.all_steps = 0
        self.compiling_ms = self.all_ms = 0.0  # of all profiles
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._ranks: dict[str, list[float]] = {}

    def add(self, profile: Mapping[str, Any]) -> None:
        """Add a `profile` event: means of rank 0, pauses in all, medians by rank."""
        if self.profiles == 1:
            self.steps, self._sums, self._ranks = 0, defaultdict(float), {}
        steps, ranks = profile["steps"], profile["ranks"]
        self.profiles += 1
        self.steps += steps
        self.all_steps += steps
        self.last_step = profile["step"]
        means = {name: profile[f"{name}_ms"] for name in ("data", *COMPUTING)}
        pauses = {name: profile.get(f"{name}_ms", 0.0) for name in PAUSES}
        for name, ms in (*((name, mean * steps) for name, mean in means.items()), *pauses.items()):
            self._sums[name] += ms
        for name, values in ranks.items():
            before = self._ranks.get(name, [0.0] * len(values))
            self._ranks[name] = [a + b * steps for a, b in zip(before, values, strict=True)]
        # Medians leave out the step that compiles, means do not.
        usual = ranks.get("forward_ms", [means["forward"]])[0]
        self.compiling_ms += max(0.0, means["forward"] - usual) * steps
        self.all_ms += sum(means.values()) * steps + sum(pauses.values())

    def mean(self, name: str) -> float:
        """Milliseconds per step on rank 0."""
        return self._sums[name] / self.steps

    def by_rank(self, name: str) -> list[float]:
        """Usual milliseconds per step of each rank; empty where they were not recorded."""
        return [ms / self.steps for ms in self._ranks.get(f"{name}_ms", ())]

    def usual(self, name: str) -> float:
        """Usual milliseconds per step on rank 0, without steps that compile or warm up."""
        ranks = self.by_rank(name)
        return ranks[0] if ranks else self.mean(name)

    @property
    def step(self) -> float:
        """Milliseconds of a step: the mean wait for rows and the usual time of the rest.

        Rows of small steps are read in blocks, so that most steps wait for none.
        """
        return self.mean("data") + sum(map(self.usual, COMPUTING))

    @property
    def time(self) -> float:
        """Milliseconds of a step with its part of the pauses."""
        return self.step + sum(map(self.mean, PAUSES))

    def has_due(self, interval: int, total_steps: int) -> bool:
        """Whether a multiple of `interval` lies in the period, besides the last step of the run.

        What is done at the last step does not depend on the interval.
        """
        last = min(self.last_step, total_steps - 1) if total_steps else self.last_step
        return interval > 0 and last // interval > (self.last_step - self.steps) // interval
