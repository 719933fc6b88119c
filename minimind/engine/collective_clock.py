"""How long a rank has a collective of the step under way: what `comm_ms` is, with --profile.

It is an 'of which': reduction happens in the backward pass and, at stages 1 and 2, the gathering of
weights in the update, and where communication overlaps with computing it is counted all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# Those of DeepSpeed's communication backend that ZeRO calls in a step.
COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("broadcast", "all_gather", "all_gather_into_tensor", "all_gather_coalesced"),
)


class CommunicationClock:
    """Spans from the call of a collective to its end, by the host's clock or by CUDA events.

    On a GPU nothing waits: events are read when the times are.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []
        self._watched: Any = None
        self._found: dict[str, Any] = {}  # what the object itself had, beside its class

    def watch_deepspeed(self, backend: Any) -> None:
        """Time the collectives of `backend`, DeepSpeed's own object for them, until `release`.

        The object is the process's, and is there after the run.
        """
        self._watched = backend
        self._found = {name: vars(backend)[name] for name in COLLECTIVES if name in vars(backend)}
        for name in COLLECTIVES:
            if hasattr(backend, name):
                setattr(backend, name, self._timed(getattr(backend, name)))

    def release(self) -> None:
        """Leave the object of DeepSpeed as it was found."""
        if self._watched is None:
            return
        for name in COLLECTIVES:
            vars(self._watched).pop(name, None)
        vars(self._watched).update(self._found)
        self._watched = None

    def watch_ddp(self, model: Any) -> None:
        """Have DDP reduce each bucket as it would by itself, and time it."""
        model.register_comm_hook(self, reduce_bucket)

    def now(self) -> Any:
        """This moment, as far as the device has come."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, begun: Any) -> None:
        """A collective that began at `begun` is through."""
        self._spans.append((begun, self.now()))

    def _timed(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            begun = self.now()
            work = collective(*given, **named)
            if work is None:
                self.add(begun)
                return None
            return _Waited(work, self, begun)

        return timed

    def take(self) -> float:
        """Milliseconds since the last call in which at least one collective was under way.

        The device must have been waited for.
        """
        spans, self._spans = self._spans, []
        if not spans:
            return 0.0
        origin = spans[0][0]
        return _covered([(_ms(origin, begun), _ms(origin, ended)) for begun, ended in spans])


class _Waited:
    """An asynchronous collective, which is through when it has been waited for."""

    def __init__(self, work: Any, clock: CommunicationClock, begun: Any) -> None:
        self._work, self._clock, self._begun = work, clock, begun

    def wait(self, *given: Any) -> Any:
        """What waiting for it returns."""
        answer = self._work.wait(*given)
        self._clock.add(self._begun)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def reduce_bucket(clock, bucket):
    """DDP's own reduction, the mean over all ranks, as a communication hook.

    A future of the bucket. DDP compares annotations, if there are any, with the types themselves,
    which they are not in a module that postpones them.
    """
    begun = clock.now()
    gradients = bucket.buffer().mul_(1 / dist.get_world_size())  # as it does, to the last bit
    work: Any = dist.all_reduce(gradients, async_op=True)

    def through(reduced: torch.futures.Future[Any]) -> torch.Tensor:
        clock.add(begun)
        return reduced.value()[0]

    return work.get_future().then(through)


def _ms(begun: Any, ended: Any) -> float:
    if isinstance(begun, float):
        return (ended - begun) * 1e3
    return begun.elapsed_time(ended)


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of what at least one span covers."""
    total, reached = 0.0, float("-inf")
    for begun, ended in sorted(spans):
        total += max(0.0, ended - max(begun, reached))
        reached = max(reached, ended)
    return total
