"""What a trace of some steps says: the share of each kind of work, idle time, overlap.

Of a GPU the kernels and copies of a Chrome trace count, by the clock; of a CPU the time that each
operator of the main thread took itself. The kinds are distinguished by their names.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# The first that matches. Triton's fused pointwise kernels and reductions are elementwise.
KINDS = {
    "communication": r"nccl|c10d::|gloo:",
    "copies": r"memcpy|memset|aten::(copy_|_to_copy|to)$",
    "attention": r"flash|fmha|attention|cudnn.*sdpa",
    "matmul": r"gemm|triton_tem|cutlass|nvjet|xmma|aten::(mm|addmm|bmm|linear)|mkl",
    "optimizer": r"multi_tensor|adam|foreach|optimizer",
    "elementwise": r"",
}
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
Interval = tuple[float, float]  # microseconds


def kind_of(name: str) -> str:
    """The kind of work of a kernel or an operator."""
    return next(kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE))


def read(path: Path) -> list[dict[str, Any]]:
    """The complete events of a trace."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def shares(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The share of the recorded time by kind, with "idle"; they add up to 1 where none overlaps."""
    work = [event for event in events if event.get("cat") in ON_GPU]
    if work:
        spans = [(event["name"], span_of(event)) for event in work]
        busy = length(merged(span for _, span in spans))
    else:
        spans, busy = own_times(events)
    first, last = span_of_all(events)
    took = dict.fromkeys(KINDS, 0.0)
    for name, (start, end) in spans:
        took[kind_of(name)] += end - start
    found = {kind: took[kind] / (last - first) for kind in KINDS if took[kind]}
    return {**found, "idle": max(0.0, 1 - busy / (last - first))}


def overlap(events: Sequence[Mapping[str, Any]]) -> float | None:
    """The share of communication under which other kernels run; None without kernels of it."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    sent = merged(span_of(k) for k in kernels if kind_of(k["name"]) == "communication")
    others = merged(span_of(k) for k in kernels if kind_of(k["name"]) != "communication")
    if not sent:
        return None
    return (length(sent) + length(others) - length(merged([*sent, *others]))) / length(sent)


def span_of(event: Mapping[str, Any]) -> Interval:
    """Its beginning and end."""
    return event["ts"], event["ts"] + event["dur"]


def span_of_all(events: Sequence[Mapping[str, Any]]) -> Interval:
    """From the first phase of the first step to the end of the last piece of work."""
    counted = [e for e in events if e.get("cat") in (*ON_GPU, "user_annotation", "cpu_op")]
    return min(e["ts"] for e in counted), max(span_of(e)[1] for e in counted)


def own_times(events: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, Interval]], float]:
    """(operators of a CPU with a span as long as their own time, microseconds of all of them).

    Operators are nested: from each the time of those inside it is taken away.
    """
    spans: list[tuple[str, Interval]] = []
    ops = sorted(
        (event for event in events if event.get("cat") == "cpu_op"),
        key=lambda event: (event["tid"], event["ts"], -event["dur"]),
    )
    open_ops: list[list[Any]] = []  # [name, end, own, thread]

    def close(until: float, thread: Any) -> None:
        while open_ops and (open_ops[-1][1] <= until or open_ops[-1][3] != thread):
            name, _, own, _ = open_ops.pop()
            spans.append((name, (0.0, max(0.0, own))))

    for op in ops:
        close(op["ts"], op["tid"])
        if open_ops:
            open_ops[-1][2] -= op["dur"]
        open_ops.append([op["name"], op["ts"] + op["dur"], op["dur"], op["tid"]])
    close(float("inf"), None)
    inside = length(merged(span_of(op) for op in ops))
    return spans, inside


def merged(spans: Iterable[Interval]) -> list[Interval]:
    """The same moments without overlaps, in order."""
    result: list[Interval] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def length(spans: Iterable[Interval]) -> float:
    """Microseconds in all."""
    return sum(end - start for start, end in spans)
