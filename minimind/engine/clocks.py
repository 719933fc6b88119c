"""Time of each phase of a step, and of a rank's collectives in flight (`comm_ms`).

Every moment belongs to exactly one phase.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from minimind.runtime.device import Moment, device_kind, milliseconds

# Methods of DeepSpeed's communication backend that ZeRO calls in a step.
COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("broadcast", "all_gather", "all_gather_into_tensor", "all_gather_coalesced"),
)


class CommunicationClock:
    """Records spans from the call of a collective to its end, by moments of the device.

    Does not synchronize: events are read with the phase times.
    """

    def __init__(self, device: torch.device) -> None:
        self._kind = device_kind(device)
        self._spans: list[tuple[Moment, Moment]] = []
        self._backend: Any = None
        self._originals: dict[str, Any] = {}  # instance attributes of the backend

    def watch_deepspeed(self, backend: Any) -> None:
        """Time the collectives of DeepSpeed's communication backend until `release`.

        The backend belongs to the process and outlives the run.
        """
        self._backend = backend
        attributes = vars(backend)
        self._originals = {name: attributes[name] for name in COLLECTIVES if name in attributes}
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

    def now(self) -> Moment:
        """The current time, or an event in the device's current stream."""
        return self._kind.moment()

    def add(self, start: Moment) -> None:
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
        since = partial(milliseconds, spans[0][0])
        return _covered([(since(start), since(end)) for start, end in spans])


class _TimedWork:
    """An asynchronous collective, whose span ends when it has been waited for."""

    def __init__(self, work: Any, clock: CommunicationClock, start: Moment) -> None:
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


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of the spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


PHASES = ("data", "forward", "backward", "optimizer")
PASSES = ("forward", "backward")
LABELS = {"comm": "of it comm.", "host": "of it host", "memory_mib": "memory MiB"}
LEVEL = 0.05  # of a pass: a device that ends it no later than that after the host waits for it
Mark = tuple[str, Moment, float]  # a phase, its end on the device, and its end on the host in s


class PhaseClock:
    """Records marks at the ends of phases.

    On a GPU marks are events, read when they are reported, the only synchronization. On a CPU
    they are monotonic times. With `communication`, the host's time is recorded beside an event.
    """

    def __init__(
        self, device: torch.device, communication: CommunicationClock | None = None
    ) -> None:
        self._kind = device_kind(device)
        self._communication = communication
        self._range: Any = None  # record_function of the current phase in a trace
        self.is_traced = False
        self.passed = 0  # marks since the start: the progress of this rank, for its peers
        self.phase = ""  # the current one
        self._marks: list[list[Mark]] = []
        has_both = communication is not None and self._kind.has_queue
        self._drained = self._drain() if has_both else None

    def begin(self) -> None:
        """Start a step, before its first micro-batch is fetched."""
        self._marks.append([self._now("")])
        self._enter("data")
        self._annotate("data")

    def mark(self, phase: str, is_last: bool = False) -> None:
        """End `phase`; `is_last` ends the step."""
        self._marks[-1].append(self._now(phase))
        next_phase = PHASES[(PHASES.index(phase) + 1) % len(PHASES)]
        self._enter(next_phase)
        self._annotate("" if is_last else next_phase)

    def _now(self, phase: str) -> Mark:
        return phase, self._kind.moment(), time.perf_counter() if self._drained else 0.0

    def _drain(self) -> tuple[Moment, float]:
        """Wait until the queue is empty; return the end of it on the device and on the host."""
        end = self._kind.moment()
        self._kind.synchronize()
        return end, time.perf_counter()

    def _enter(self, phase: str) -> None:
        self.passed += 1
        self.phase = phase

    def _annotate(self, phase: str) -> None:
        """Mark the phase in a trace that is being recorded."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self.is_traced and phase:
            self._range = torch.profiler.record_function(phase)
            self._range.__enter__()

    def take(self, waits: bool = False) -> list[dict[str, float]]:
        """Return milliseconds by phase, and their sum as `step`, of each step since the last call.

        Communication time, if recorded, is divided evenly over the steps as `comm`. Where the
        host's time is recorded, `host` is the part of both passes that the host decided.

        waits: whether a backward pass ends by a wait for the device.
        """
        marks, self._marks = self._marks, []
        before, after = self._drained, self._drain()
        steps = []
        for step in marks:
            times: dict[str, float] = dict.fromkeys(PHASES, 0.0)
            for (_, start, _), (phase, end, _) in pairwise(step):
                times[phase] += milliseconds(start, end)
            steps.append({**times, "step": sum(times.values())})
            if before:
                steps[-1]["host"] = _decided_by_host(step, before, after, waits)
        self._drained = before and after
        if self._communication:
            comm = self._communication.take() / max(1, len(steps))
            steps = [{**step, "comm": comm} for step in steps]
        return steps


def _decided_by_host(
    step: list[Mark], before: tuple[Moment, float], after: tuple[Moment, float], waits: bool
) -> float:
    """Milliseconds of the passes at whose end the device had nothing left to do.

    A device that is the limit ends a pass after the host does: by the difference of their speeds if
    its queue was empty before, else by all that the queue holds. After a wait nothing is left
    either, so a backward pass with one is taken for what the forward pass before it was.

    The queue was empty at `before` and `after`, which relate the two clocks; they drift apart.
    """
    (origin, began), (last, ended) = before, after
    rate = (ended - began) * 1e3 / milliseconds(origin, last)
    total, is_level = 0.0, False
    for (_, start, _), (phase, end, queued) in pairwise(step):
        if phase not in PASSES:
            continue
        lasted = milliseconds(start, end)
        if phase == "forward" or not waits:
            behind = milliseconds(origin, end) * rate - (queued - began) * 1e3
            is_level = behind <= LEVEL * lasted
        total += lasted if is_level else 0.0
    return total


def mean_ms(steps: list[dict[str, float]]) -> dict[str, float | None]:
    """Mean of each phase over `steps` as `PHASE_ms`; comm_ms is None if not recorded."""
    means = {f"{n}_ms": sum(s[n] for s in steps) / max(1, len(steps)) for n in (*PHASES, "step")}
    has_comm = bool(steps) and "comm" in steps[0]
    return {**means, "comm_ms": sum(s["comm"] for s in steps) / len(steps) if has_comm else None}


def median_ms(steps: list[dict[str, float]]) -> dict[str, float]:
    """Median of every value over `steps` as `NAME_ms`."""
    return {f"{name}_ms": median(step[name] for step in steps) for name in steps[0]}


def ranks_table(ranks: Sequence[Mapping[str, float]]) -> str:
    """Table of min, median and max over ranks, and the rank of the maximum.

    Ranks wait for each other in the backward pass, so a slow rank shows by a long forward pass or
    little communication.
    """
    lines = [f"  {'over ranks':<12}{'min':>10}{'median':>10}{'max':>10}  largest"]
    for name in ranks[0]:
        values, short = [rank[name] for rank in ranks], name.removesuffix("_ms")
        lines.append(
            f"  {LABELS.get(short, short):<12}{min(values):>10.1f}{median(values):>10.1f}"
            f"{max(values):>10.1f}  rank {values.index(max(values))}"
        )
    return "\n".join(lines)


def profile_table(steps: list[dict[str, float]], pauses: dict[str, float]) -> str:
    """Table of min, median and max milliseconds by phase over `steps`.

    `pauses` are milliseconds between the steps (evaluate, checkpoint), listed below. Shares are
    shares of sums, so those of the phases add up to 100 %.
    """
    total = sum(s["step"] for s in steps)
    lines = [f"  {'phase':<12}{'min ms':>10}{'median':>10}{'max':>10}{'share':>8}"]
    for name in (*PHASES, "step", "comm", "host"):
        times = [s[name] for s in steps if name in s]
        if not times:
            continue
        share = f"{sum(times) / total:>8.1%}" if total else ""
        lines.append(
            f"  {LABELS.get(name, name):<12}{min(times):>10.1f}{median(times):>10.1f}"
            f"{max(times):>10.1f}{share}"
        )
    for name, ms in pauses.items():
        lines.append(f"  {name:<12}{ms:>10.1f}  in all, between the {len(steps)} steps")
    return "\n".join(lines)
