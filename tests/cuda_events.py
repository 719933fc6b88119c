"""A stand-in for CUDA events: a stream that takes 1 ms per entry and runs when it is waited for."""

from __future__ import annotations

from typing import Any, ClassVar


class Event:
    """Knows its time once the stream has reached it; reading it earlier raises, as CUDA does."""

    queue: ClassVar[list[Any]] = []  # what was put on the stream, in order
    reached: ClassVar[int] = 0  # entries that the stream has run

    def __init__(self, device: str, enable_timing: bool = False) -> None:
        assert device == "cuda"
        assert enable_timing

    def record(self) -> None:
        self.queue.append(self)

    def synchronize(self) -> None:
        Event.reached = max(self.reached, self.queue.index(self) + 1)

    def elapsed_time(self, end: Event) -> float:
        places = [self.queue.index(event) for event in (self, end)]
        if max(places) >= self.reached:
            raise RuntimeError("device not ready")
        return float(places[1] - places[0])


def synchronize() -> None:
    """Wait for the whole stream."""
    Event.reached = len(Event.queue)


def clear() -> None:
    """Begin with an empty stream."""
    Event.queue.clear()
    Event.reached = 0
