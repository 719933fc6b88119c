"""Where a value comes from, and what it overrides."""

from __future__ import annotations

from enum import IntEnum

from minimind.config.flags import AUTO


class Rank(IntEnum):
    """What gives a value; a higher rank overrides a lower one. Ranks above PRESET are explicit."""

    OPEN = 0  # nothing yet: the start decides it, and what stands there is a placeholder
    DEFAULT = 1
    RULE = 2  # a rule, by the host, the text or the checkpoint to resume
    PRESET = 3
    DATA = 4  # the text or the model
    TASK = 5  # --task, which sets it again whenever it is given
    LAUNCHER = 6
    DEEPSPEED = 7  # the DeepSpeed file
    FILE = 8  # --config
    FLAG = 9


class Origin(str):
    """Where a value comes from, in words, and its rank."""

    rank: Rank

    def __new__(cls, words: str, rank: Rank) -> Origin:
        origin = super().__new__(cls, words)
        origin.rank = rank
        return origin

    def __reduce__(self) -> tuple[type[Origin], tuple[str, Rank]]:  # copies keep the rank
        return Origin, (str(self), self.rank)


def derived(reason: str) -> Origin:
    """The origin of a value that follows from others."""
    return Origin(f"derived: {reason}", Rank.RULE)


DEFAULT = Origin("default", Rank.DEFAULT)
OPEN = Origin(AUTO, Rank.OPEN)
BY_TASK = Origin("--task sft", Rank.TASK)
