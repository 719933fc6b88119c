"""Where a run stands. Everything else follows from these numbers and the configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainState:
    """Optimizer steps taken, and target tokens seen by all ranks together."""

    step: int = 0
    tokens: int = 0

    def after(self, tokens_per_step: int) -> TrainState:
        """The state one optimizer step later."""
        return TrainState(self.step + 1, self.tokens + tokens_per_step)


def is_due(step: int, every: int, last_step: int) -> bool:
    """Whether something done every so many steps, and at the last one, is done after `step`."""
    return step % every == 0 or step == last_step
