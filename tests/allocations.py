"""What torch's CPU allocator gives out during a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def _in_tree(events: list[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _in_tree(event.children)


def most_allocated(work: Callable[[], Any]) -> int:
    """Bytes that were allocated at once during `work`, of what `work` allocated itself.

    The profiler also reports frees of earlier blocks, with the size of any block that it saw at
    the same address: these are left out.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = work()
    del kept
    found: Any = seen.profiler
    events = _in_tree(found.kineto_results.experimental_event_tree())
    changes = [e for e in events if e.tag == _EventType.Allocation]
    live: dict[int, int] = {}
    total = peak = 0
    for event in sorted(changes, key=lambda e: e.start_time_ns):
        block = event.typed[1]
        if block.alloc_size > 0:
            live[block.ptr] = block.alloc_size
            total += block.alloc_size
            peak = max(peak, total)
        else:
            total -= live.pop(block.ptr, 0)
    return peak
