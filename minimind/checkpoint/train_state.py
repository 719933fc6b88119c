"""The training state: step and tokens; all else follows from the configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainState:
    """Optimizer steps, and target tokens over all ranks."""

    step: int = 0
    tokens: int = 0

    def after(self, tokens_per_step: int) -> TrainState:
        """Return the state after one more step."""
        return TrainState(self.step + 1, self.tokens + tokens_per_step)


def is_due(step: int, every: int, last_step: int) -> bool:
    """Whether an action with interval `every`, and at the last step, is due after `step`."""
    return step % every == 0 or step == last_step
