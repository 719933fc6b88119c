"""Time during which a rank has a collective in flight: `comm_ms`, with --profile.

It is part of the phases: gradients are reduced in the backward pass and, at stages 1 and 2, weights
are gathered in the update. Communication that overlaps with computation counts too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# Methods of DeepSpeed's communication backend that ZeRO calls in a step.
COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("broadcast", "all_gather", "all_gather_into_tensor", "all_gather_coalesced"),
)


class CommunicationClock:
    """Records spans from the call of a collective to its end, by host clock or CUDA events.

    Does not synchronize: events are read with the phase times.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []
        self._backend: Any = None
        self._originals: dict[str, Any] = {}  # instance attributes of the backend

    def watch_deepspeed(self, backend: Any) -> None:
        """Time the collectives of DeepSpeed's communication backend until `release`.

        The backend belongs to the process and outlives the run.
        """
        self._backend = backend
        own = vars(backend)
        self._originals = {name: own[name] for name in COLLECTIVES if name in own}
        for name in COLLECTIVES:
            if hasattr(backend, name):
                setattr(backend, name, self._timed(getattr(backend, name)))

    def release(self) -> None:
        """Restore DeepSpeed's backend."""
        if self._backend is None:
            return
        for name in COLLECTIVES:
            vars(self._backend).pop(name, None)
        vars(self._backend).update(self._originals)
        self._backend = None

    def watch_ddp(self, model: Any) -> None:
        """Time DDP's bucket reductions, which stay the same."""
        model.register_comm_hook(self, reduce_bucket)

    def now(self) -> Any:
        """The current time, or an event in the current CUDA stream."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, start: Any) -> None:
        """Record that the collective started at `start` has ended."""
        self._spans.append((start, self.now()))

    def _timed(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            work = collective(*args, **kwargs)
            if work is None:
                self.add(start)
                return None
            return _TimedWork(work, self, start)

        return timed

    def take(self) -> float:
        """Milliseconds since the last call with at least one collective in flight.

        The device must be synchronized.
        """
        spans, self._spans = self._spans, []
        if not spans:
            return 0.0
        origin = spans[0][0]
        return _covered([(_ms(origin, start), _ms(origin, end)) for start, end in spans])


class _TimedWork:
    """An asynchronous collective, whose span ends when it has been waited for."""

    def __init__(self, work: Any, clock: CommunicationClock, start: Any) -> None:
        self._work, self._clock, self._start = work, clock, start

    def wait(self, *args: Any) -> Any:
        """Wait for the collective and end its span."""
        result = self._work.wait(*args)
        self._clock.add(self._start)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def reduce_bucket(clock, bucket):
    """DDP's default reduction (mean over ranks) as a communication hook; returns a future.

    Not annotated: DDP compares annotations with types, and here they are postponed strings.
    """
    start = clock.now()
    gradients = bucket.buffer().mul_(1 / dist.get_world_size())  # bit for bit what DDP does
    work: Any = dist.all_reduce(gradients, async_op=True)

    def end(reduced: torch.futures.Future[Any]) -> torch.Tensor:
        clock.add(start)
        return reduced.value()[0]

    return work.get_future().then(end)


def _ms(start: Any, end: Any) -> float:
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of the spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
