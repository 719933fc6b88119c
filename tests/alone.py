"""The control group of a run of one process, for stand-ins of engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Alone:
    """Collectives of the only rank."""

    rank, world_size = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def from_rank_0(self, value: Any) -> Any:
        return value

    def decide(self, value: Any, choose: Callable[[list[Any]], Any]) -> Any:
        return choose(self.gather(value))
